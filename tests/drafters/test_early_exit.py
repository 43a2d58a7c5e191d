"""Early exit: verification reuses the layers that drafted, without changing a bit of the text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.drafters.base import Ask
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.engine.engine import Engine
from paceline.errors import CorruptModel, InvalidOption, UnsupportedModel
from paceline.kernels.linear import packs_bfloat16
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.models.layers import Layer
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, ToyTarget, random_tensors, run, run_together, tiny_target
from paceline.types import Carried, Draft, DraftBudget, Tap, Verdict, Want
from paceline.verify.tree import MIN_ROWS, PREFILL_ROWS, depths, pack, pack_prefix
from tests.support.cover import cover, some
from tests.support.golden import decoder
from tests.support.logits import text
from tests.support.plain import plain_text
from tests.support.random_heads import folder_of
from tests.support.tiny_families import FAMILIES
from tests.support.toys import ask_for, toy_target
from tests.support.trees import path_to

CPU = torch.device("cpu")
LAYERS = 4
TOY, QUICK = tiny_target(layers=LAYERS), toy_target(layers=LAYERS)
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
CHAIN, TREE = DraftBudget.chain(5), DraftBudget(14, 4, 3)


def skipping(quiet: float = 0.02) -> Decoder:
    """Return a model as trained with LayerSkip: its last two layers add almost nothing to the residual stream."""
    config = replace(TINY, layers=LAYERS)
    tensors = random_tensors(config)
    late = (f"model.layers.{i}." for i in range(2, LAYERS))
    for name in [n for prefix in late for n in tensors if n.startswith(prefix) and ("o_proj" in n or "down" in n)]:
        tensors[name] = tensors[name] * quiet
    return Decoder(config, tensors, torch.float64, CPU)


def early(layers: int, target: Decoder = TOY, threshold: float = 0.0) -> EarlyExit:
    return EarlyExit(ExitConfig(target.config.hidden, layers), {}, target, threshold)


# Rows that stop and go on.

BUSHY = Draft((7, 8, 9, 10, 11, 12, 7, 8), (0, 0, 1, 1, 2, 3, 4, 6))


def taken(target: Decoder, cache: KVCache, slot: int, draft: Draft, layer: int, levels: int) -> Draft:
    """Run the rows of a draft's first levels up to a layer, level by level. Return the draft."""
    streams: list[Tensor] = []
    deep = depths(draft.parents)
    for level in range(levels):
        start, end = sum(d < level for d in deep), sum(d <= level for d in deep)
        part = Draft(draft.tokens[: end - 1], draft.parents[: end - 1])
        rows = pack([5], [part], [slot], [cache.lengths[slot]], CPU, [start])
        assert rows.tokens.numel() >= MIN_ROWS
        out = target.forward(rows, cache, Want("none", (layer,), layer))
        streams.append(out.taps[layer][0, : end - start])
    return replace(draft, carried=Carried(layer, torch.cat(streams))) if streams else draft


def plain_rows(target: Decoder, cache: KVCache, slot: int, draft: Draft) -> Tensor:
    """Return logits [T, V]: feed the path to every leaf token by token."""
    rows: dict[int, Tensor] = {}
    for leaf in {*range(len(draft.tokens) + 1)} - {*draft.parents}:
        fork = cache.fork(slot)
        for row in path_to(draft, leaf)[::-1]:
            one = pack([draft.tokens[row - 1] if row else 5], [Draft()], [fork], [cache.lengths[fork]], CPU)
            rows[row] = target.forward(one, cache, Want()).logits[0, 0]
            cache.commit(one, [()])
        cache.release(fork)
    return torch.stack([rows[row] for row in sorted(rows)])


def filled(target: Decoder, cache: KVCache, length: int) -> int:
    slot, tokens = cache.acquire(length), text(length)
    for start in range(0, length, PREFILL_ROWS):
        chunk = tokens[start : start + PREFILL_ROWS]
        rows = pack_prefix(chunk, slot, start, CPU)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(chunk))])
    return slot


def exits(target: Decoder) -> list[int]:
    """Return three exits: after the first layer, before the last layer, and after it."""
    return sorted({1, target.config.layers - 1, target.config.layers})


LEVELS = ((3, 2, 1), (4, 4, 0), (1, 0, 2))
"""For each of three drafts, the number of levels that drafting has already run up to a layer."""


def check_resumed(target: Decoder, lengths: Sequence[int]) -> None:
    """Run drafts up to a layer to different depths, then commit one. Check that every row equals plain decoding."""
    cache = target.new_cache()
    drafts = [BUSHY, Draft.chain([1, 2, 3]), Draft(BUSHY.tokens[:4], BUSHY.parents[:4])]
    slots = [filled(target, cache, length) for length in lengths]
    expected = [plain_rows(target, cache, slot, draft) for slot, draft in zip(slots, drafts, strict=True)]
    for layer, levels in itertools.product(exits(target), LEVELS):
        each = zip(slots, drafts, levels, strict=True)
        carried = [taken(target, cache, slot, draft, layer, count) for slot, draft, count in each]
        at = [cache.lengths[slot] for slot in slots]
        out = target.forward(pack([5] * len(slots), carried, slots, at, CPU), cache, Want())
        for draft, line, alone in zip(drafts, out.logits, expected, strict=True):
            same(line[: 1 + len(draft.tokens)], alone)
    check_committed(target, cache, slots[0])


def same(ours: Tensor, theirs: Tensor) -> None:
    """Check equality: bit for bit, except in float64, where products depend on their shape."""
    if ours.dtype == torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    else:
        assert torch.equal(ours, theirs)


def check_committed(target: Decoder, cache: KVCache, slot: int) -> None:
    """Commit a branch of a partly computed tree. Check that the text continues with the bits of plain decoding."""
    fork, path = cache.fork(slot), path_to(BUSHY, 8)[::-1][1:]
    for token in (5, *(BUSHY.tokens[row - 1] for row in path)):
        rows = pack([token], [Draft()], [fork], [cache.lengths[fork]], CPU)
        target.forward(rows, cache, Want())
        cache.commit(rows, [()])
    draft = taken(target, cache, slot, BUSHY, 1, 3)
    rows = pack([5], [draft], [slot], [cache.lengths[slot]], CPU)
    target.forward(rows, cache, Want())
    cache.commit(rows, [path])
    ours, theirs = (
        target.forward(pack([6], [Draft.chain([1, 2])], [s], [cache.lengths[s]], CPU), cache, Want()).logits
        for s in (slot, fork)
    )
    same(ours, theirs)


KINDS = [
    "mistral, sliding",
    "gpt-oss",
    "granite",
    "llama4, sliding",
    "deepseek v3",
    "phi",
]
"""A family for every kind of layer: windows, norms, experts, chunks, latent attention, parallel MLPs."""

BITS = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not packs_bfloat16(), reason="no products that keep bits"))


IN_TURN = {(case, number % 2 == 0) for number, case in enumerate(KINDS)}
"""Every kind once, alternately in bfloat16 and float64: the fast tier."""


@pytest.mark.parametrize(
    ("case", "bits"),
    [
        pytest.param(case, bits, marks=() if (case, bits) in IN_TURN else pytest.mark.slow)
        for case in FAMILIES
        for bits in (False, True)
    ],
)
def test_rows_that_stop_early_and_continue_equal_plain_decoding(case: str, bits: bool) -> None:
    if bits and not packs_bfloat16():
        pytest.skip("no products that keep bits")
    check_resumed(decoder(case, torch.bfloat16 if bits else torch.float64), (48, 46, 30))


@pytest.mark.parametrize("dtype", [torch.float64, BITS], ids=["float64", "bfloat16"])
@some("case", ["gemma3", "mistral, sliding"], fast=["gemma3"])
def test_they_are_over_a_ring_that_has_wrapped(case: str, dtype: torch.dtype) -> None:
    check_resumed(decoder(case, dtype), (1110, 47, 700))


@some("case", FAMILIES, fast=KINDS)
def test_an_exit_gives_the_stream_of_its_layer_and_the_head_on_it(case: str) -> None:
    target = decoder(case)
    rows = lambda cache: pack_prefix(text(20), cache.acquire(20), 0, CPU)  # noqa: E731
    cache = target.new_cache()
    full = target.forward(rows(cache), cache, Want(taps=(*exits(target), "final")))
    for layer in exits(target):
        cache = target.new_cache()
        out = target.forward(rows(cache), cache, Want(taps=(layer, "final"), layers=layer))
        normed = target.norm(full.taps[layer])
        assert torch.equal(out.taps[layer], full.taps[layer])
        assert torch.equal(out.taps["final"], normed)
        assert torch.equal(out.logits, target.logits(normed))
    assert torch.equal(out.logits, full.logits), "after all layers it is no exit"


# Acceptance.


@cover(
    temperature=[0.0, 0.8],
    rule=["match", "rejection", "block"],
    length=[1, 2, 4],
    prompt={"long prompt": PROMPT, "1 token": PROMPT[:1], "2 tokens": PROMPT[:2]},
)
def test_an_exit_after_all_layers_is_always_right(
    temperature: float, rule: str, length: int, prompt: list[int]
) -> None:
    """Any error (an extra row, a stale residual stream, a wrong position) would cause a rejection."""
    sampling = Sampling(max_new_tokens=30, temperature=temperature, seed=4, rule=rule)  # type: ignore[arg-type]
    text, _, stats = run(QUICK, prompt, sampling, early(LAYERS, QUICK), DraftBudget.chain(length))
    # A drawn draft ends after an unlikely path.
    assert stats.tokens_per_round == 1 + length if rule == "match" else stats.accepted == stats.drafted > 0
    assert rule != "match" or text == plain_text(QUICK, prompt, sampling), "the last row went astray"


@cover(temperature=[0.0, 0.8], rule=["match", "rejection", "block"], together=[("temperature",), ("rule",)])
def test_a_tree_from_an_exit_after_all_layers_is_mostly_right(temperature: float, rule: str) -> None:
    sampling = Sampling(max_new_tokens=30, temperature=temperature, seed=4, rule=rule)  # type: ignore[arg-type]
    assert run(QUICK, PROMPT, sampling, early(LAYERS, QUICK), TREE)[2].tokens_per_round > (3 if rule == "match" else 2)


def test_an_exit_before_layers_that_do_little_is_nearly_always_right() -> None:
    target = skipping()
    chain = run(target, PROMPT, Sampling(max_new_tokens=48), early(2, target), CHAIN)[2]
    warm = run(target, PROMPT, Sampling(max_new_tokens=48, temperature=0.8, seed=1), early(2, target), TREE)[2]
    soon = run(target, PROMPT, Sampling(max_new_tokens=32), early(1, target), CHAIN)[2]
    assert chain.tokens_per_round > 5
    assert warm.tokens_per_round > 4
    assert soon.tokens_per_round < 2, "the layer between matters"


@pytest.mark.slow
def test_a_threshold_ends_the_draft_where_the_exit_is_unsure() -> None:
    target = skipping(quiet=0.3)
    how = Sampling(max_new_tokens=96, temperature=0.7, seed=3)
    found = [run(target, PROMPT, how, early(2, target, bar), CHAIN)[2] for bar in (0.0, 0.4, 0.8, 1.0)]
    drafted = [stats.drafted for stats in found]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[-1] < 5
    assert found[2].acceptance > found[0].acceptance + 0.1, "what it is sure of is right more often"
    bushy = [run(target, PROMPT, how, early(2, target, bar), TREE)[2].drafted for bar in (0.0, 0.8)]
    assert bushy[1] < bushy[0] / 2


def test_a_drawn_tree_keeps_its_shape_and_a_drawn_chain_may_end() -> None:
    for shape, ends in ((CHAIN, True), (TREE, False)):
        how = Sampling(max_new_tokens=40, temperature=1.0, seed=3, rule="block")
        stats = [run(QUICK, PROMPT, how, early(2, QUICK, bar), shape)[2] for bar in (0.0, 0.7)]
        assert (stats[1].drafted / stats[1].rounds < 0.5 * stats[0].drafted / stats[0].rounds) == ends


# Work.


@pytest.fixture
def rows_of_layers(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return layer -> numbers of rows that it gets."""
    rows = dict.fromkeys(range(LAYERS), 0)
    plain = Layer.__call__

    def counted(self: Layer, x: Tensor, layer: int, *more: object) -> Tensor:
        rows[layer] += x.shape[0] * x.shape[1]
        return plain(self, x, layer, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Layer, "__call__", counted)
    return rows


@cover(layers=[1, 2, 4], shape={"chain": CHAIN, "tree": TREE}, together=[("layers",), ("shape",)])
def test_no_row_passes_a_layer_twice(layers: int, shape: DraftBudget, rows_of_layers: dict[int, int]) -> None:
    """Four requests run in step, so that no pass is padded. Prompts have one token, so that there is no prefill."""
    engine = Engine(TOY, early(layers), shape)
    how = [Sampling(max_new_tokens=16, temperature=0.7, seed=2)] * MIN_ROWS
    replies = run_together(engine, [[3]] * MIN_ROWS, how)
    fed = sum(stats.rounds + stats.drafted for _, _, stats in replies)
    assert rows_of_layers == dict.fromkeys(range(LAYERS), fed)


def test_drafting_runs_only_the_first_layers(rows_of_layers: dict[int, int]) -> None:
    engine = Engine(TOY, early(2), CHAIN)
    slots = [engine.cache.acquire(1) for _ in range(MIN_ROWS)]
    (policy,) = engine.policies
    drafts = policy.drafter.propose([ask_for(slot, CHAIN, Sampling(), [3]) for slot in slots])
    assert rows_of_layers == {0: 20, 1: 20, 2: 0, 3: 0}
    assert [len(draft.carried.streams) for draft in drafts if draft.carried] == [5] * MIN_ROWS, "not the last leaf"


def test_a_round_that_broke_off_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=LAYERS)
    drafter, cache = early(2, target), target.new_cache()
    drafter.bind(cache)
    ask = ask_for(cache.acquire(1), CHAIN, Sampling(), [3])
    passes = iter([target.forward])

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", lambda *given: next(passes)(*given))
        with pytest.raises(StopIteration):
            drafter.propose([ask])
    (draft,) = drafter.propose([replace(ask, budget=DraftBudget.chain(0))])
    assert draft.carried is None


class Listener(NGram):
    """Requests hidden states below and above the exit, and never drafts."""

    taps: tuple[Tap, ...] = (1, 3, "final")

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[Tap, Tensor]] = []

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self.heard.append({tap: states[[0, *verdict.path]] for tap, states in out.items()})

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft()] * len(asks)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_hidden_states_come_from_below_the_exit_too(layers: int) -> None:
    how = Sampling(max_new_tokens=20)
    ours, theirs = Listener(), Listener()
    tokens = run(TOY, PROMPT, how, DrafterStack([ours, early(layers)]), CHAIN)[0]
    assert tokens == run(TOY, PROMPT, how, theirs)[0]
    for tap in Listener.taps:
        states, plain = (torch.cat([heard[tap] for heard in x.heard]) for x in (ours, theirs))
        count = min(len(states), len(plain))
        assert count > 15
        torch.testing.assert_close(states[:count], plain[:count], rtol=0, atol=1e-9)


# An exit's own parts, and refused exits.


def test_a_norm_and_a_projection_stand_before_the_head() -> None:
    target = skipping()
    make = torch.Generator().manual_seed(1)
    down, up = torch.randn(3, 32, generator=make), torch.randn(32, 3, generator=make)
    norm = torch.rand(32, generator=make) + 0.5
    tensors = {"norm.weight": norm, "proj.down.weight": down, "proj.up.weight": up}
    how = Sampling(max_new_tokens=40)
    own = EarlyExit(ExitConfig(32, 2, rank=3), tensors, target, 0.0)
    neutral = {"norm.weight": torch.ones(32), "proj.down.weight": down, "proj.up.weight": 0 * up}
    same = EarlyExit(ExitConfig(32, 2, rank=3), neutral, target, 0.0)
    plain, _, stats = run(target, PROMPT, how, early(2, target), CHAIN)
    assert run(target, PROMPT, how, same, CHAIN)[2].accepted == stats.accepted, "ones and nothing added"
    text, _, worse = run(target, PROMPT, how, own, CHAIN)
    assert text == plain
    assert worse.accepted < stats.accepted / 2
    x = torch.randn(1, 4, 32, generator=make).double()
    normed = torch.nn.functional.rms_norm(x + x @ down.double().T @ up.double().T, (32,), norm.double(), 1e-6)
    torch.testing.assert_close(own._logits(x), target.logits(normed))


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    tensors = {
        "norm.weight": torch.ones(32),
        "proj.down.weight": torch.ones(3, 32),
        "proj.up.weight": torch.ones(32, 3),
    }
    config = {"paceline_kind": "exit", "hidden_size": 32, "layers": 2, "rank": 3}
    head = open_head(folder_of(tmp_path / "old", config, tensors))
    assert head.config == ExitConfig(32, 2, rank=3)
    drafter, x = EarlyExit(head.config, head.tensors, TOY), torch.arange(32.0, dtype=torch.float64)[None, None]
    normed = torch.nn.functional.rms_norm(x + 3 * x.sum(), (32,), eps=1e-6)
    torch.testing.assert_close(drafter._logits(x), TOY.logits(normed))


def test_impossible_early_exits_are_refused() -> None:
    with pytest.raises(InvalidOption, match="5 layers is not possible"):
        early(5)
    with pytest.raises(InvalidOption, match="0 layers"):
        early(0)
    with pytest.raises(InvalidOption, match=r"threshold=1\.5"):
        early(1, threshold=1.5)
    with pytest.raises(UnsupportedModel, match="ToyTarget cannot stop"):
        EarlyExit(ExitConfig(16, 1), {}, ToyTarget())
    with pytest.raises(CorruptModel, match=r"proj\.down"):
        EarlyExit(ExitConfig(32, 1, rank=2), {"norm.weight": torch.ones(32)}, TOY)
    with pytest.raises(CorruptModel, match="does not know"):
        EarlyExit(ExitConfig(32, 1), {"proj.up.weight": torch.ones(32, 2)}, TOY)
    with pytest.raises(InvalidOption, match="no target cache"):
        early(1).propose([ask_for(0, CHAIN, Sampling(), [3])])


def test_a_model_of_transformers_does_not_stop_early() -> None:
    transformers = pytest.importorskip("transformers")
    from paceline.models.transformers import CausalLM

    sizes = {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    target = CausalLM(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    with pytest.raises(UnsupportedModel, match="CausalLM cannot stop"):
        EarlyExit(ExitConfig(16, 1), {}, target)
    cache = target.new_cache()
    with pytest.raises(UnsupportedModel, match="does not stop after 1 layers"):
        target.forward(pack_prefix([1, 2], cache.acquire(), 0, CPU), cache, Want(layers=1))
