"""EAGLE heads: their numbers equal a plain reimplementation, and they use the target's features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.eagle import Eagle
from paceline.drafters.growth import TreeGrowth
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.engine.detokenizer import TextStream
from paceline.engine.draft_length import Controller
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.stats import Stats
from paceline.errors import CorruptModel
from paceline.models.decoder import Decoder
from paceline.models.heads import EagleConfig
from paceline.protocols import TargetWithHead
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Ranked
from paceline.testing import TINY, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import PREFILL_ROWS
from tests.support.controlled import fixed_plan
from tests.support.cover import cover
from tests.support.eagle_reference import Reference
from tests.support.tiny_heads import eagle_config, eagle_tensors
from tests.support.toys import ask_for

TOY = tiny_target()
LONG = tiny_target(context_length=2048)
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]

CONFIGS: dict[str, EagleConfig] = {
    "eagle-3": eagle_config(),
    "3.1": eagle_config(fc_norm=True, norm_output=True),
    "speculators": eagle_config(norm_before_fc=True, norm_before_residual=True),
    "all tokens": eagle_config(draft_vocab=37),
    "wider than its target": eagle_config(layer=replace(TINY, layers=1, hidden=40, context_length=16)),
    "eagle-1": eagle_config(version=1),
    "three layers": eagle_config(layer=replace(TINY, layers=3, context_length=16)),
    "eagle-1, two layers": eagle_config(version=1, layer=replace(TINY, context_length=16)),
}


def make(config: EagleConfig, target: Decoder = TOY, **tensors: Tensor) -> Eagle:
    return Eagle(config, eagle_tensors(config) | tensors, target)


class Spy(Eagle):
    """Records every row that it ranks: the text, the drafted path, and the logits [C]."""

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor], target: TargetWithHead) -> None:
        super().__init__(config, tensors, target)
        self.seen: list[tuple[list[int], list[int], Tensor]] = []

    def rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        for path, row in zip(paths, logits, strict=True):
            subset = self._net.subset
            self.seen.append((list(growth.ask.token_ids), list(path), subset.widen(row) if subset else row.clone()))
        return super().rank(growth, logits, paths, count)


def compare(spy: Spy, reference: Reference, every: int = 1) -> None:
    for text, path, row in spy.seen[::every]:
        torch.testing.assert_close(row, reference.after(text, path)[0], rtol=0, atol=1e-8)


@cover(
    name=[*CONFIGS],
    draft={"chain": DraftBudget.chain(4), "tree": DraftBudget(10, 4, 3)},
    together=[("name",), ("draft",)],
)
def test_every_row_is_what_a_plain_head_gives_for_its_path(name: str, draft: DraftBudget) -> None:
    """Run many rounds, with texts longer than the head's context, and true features that replace drafted features."""
    config = CONFIGS[name]
    tensors = eagle_tensors(config)
    spy = Spy(config, tensors, TOY)
    _, _, stats = run(TOY, PROMPT, Sampling(max_new_tokens=14, temperature=3.0, seed=3), spy, draft)
    assert stats.accepted > 0, "or nothing but roots was caught up with"
    assert len(PROMPT) + 14 > config.layer.context_length
    compare(spy, Reference(config, tensors, TOY), every=3)


@pytest.mark.parametrize("rule", ["match", "block"])
def test_rows_of_a_ragged_batch_equal_plain_heads(rule: str) -> None:
    config = CONFIGS["eagle-3"]
    tensors = eagle_tensors(config)
    spy = Spy(config, tensors, LONG)
    prompts = [PROMPT, [3], [i * i % 37 for i in range(60)]]
    samplings = [Sampling(max_new_tokens=count, temperature=0.8, seed=2, rule=rule) for count in (8, 12, 6)]  # type: ignore[arg-type]
    run_together(Engine(LONG, spy, DraftBudget(9, 3, 3)), prompts, samplings)
    assert len({tuple(text) for text, _, _ in spy.seen}) > 10
    compare(spy, Reference(config, tensors, LONG), every=4)


def test_a_long_prompt_goes_through_the_head_in_chunks() -> None:
    config = CONFIGS["eagle-3"]
    tensors = eagle_tensors(config)
    spy = Spy(config, tensors, LONG)
    prompt = [i * i % 37 for i in range(3 * PREFILL_ROWS + 50)]
    run(LONG, prompt, Sampling(max_new_tokens=5), spy, DraftBudget(6, 3, 2))
    compare(spy, Reference(config, tensors, LONG), every=5)


def test_a_head_that_was_not_asked_for_a_while_catches_up() -> None:
    config = CONFIGS["eagle-3"]
    tensors = eagle_tensors(config)
    spy = Spy(config, tensors, TOY)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    run(
        TOY,
        prompt,
        Sampling(max_new_tokens=30, temperature=0.8, seed=2),
        DrafterStack([Suffix(), spy]),
        DraftBudget(6, 3, 2),
    )
    lengths = sorted({len(text) for text, _, _ in spy.seen})
    assert max(b - a for a, b in pairwise(lengths)) > 1
    compare(spy, Reference(config, tensors, TOY))


def started(engine: Engine, prompt: Sequence[int], like: Request | None = None) -> Request:
    sampling = Sampling(temperature=0.9, seed=7)
    stream = TextStream(sampling, (), lambda ids: "", 500)
    request = engine.start(prompt, sampling.sampler(), stream, Stats(7, "rounding"), like)
    engine.prefill(request)
    return request


@pytest.mark.parametrize("name", ["eagle-3", "eagle-1"])
def test_asked_again_a_head_says_the_same_and_a_fork_says_it_too(name: str) -> None:
    drafter, draft = make(CONFIGS[name]), DraftBudget(9, 3, 3)
    engine = Engine(TOY, drafter, draft)
    first = started(engine, PROMPT)
    early = started(engine, PROMPT, first)
    alone = drafter.propose([Ask(first.slot, first.prefix, draft, first.sampler)])
    assert alone[0].tokens
    late, other = started(engine, PROMPT, first), started(engine, PROMPT[2:])
    asks = [Ask(request.slot, request.prefix, draft, request.sampler) for request in (early, other, late, first)]
    drafts = drafter.propose(asks)
    assert drafts.pop(1) != alone[0]
    assert drafts == alone * 3
    engine.finish(first)
    assert drafter.propose(asks[:1]) == alone, "releasing the source changes its fork"


def test_of_a_long_prompt_few_taps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafters.cached.MAX_PENDING", PREFILL_ROWS)
    drafter = make(CONFIGS["eagle-3"], LONG)
    drafter.admit(0, [1] * 1500)
    row = torch.zeros(1, 32, dtype=torch.float64)
    waiting = []
    for start in range(0, 1499, PREFILL_ROWS):
        count = min(PREFILL_ROWS, 1499 - start)
        drafter.feed(0, [1] * count, dict.fromkeys(drafter.taps, row.expand(count, -1)))
        waiting.append(len(drafter._slots[0].pending))
    assert max(waiting) == PREFILL_ROWS
    drafter.propose([ask_for(0, DraftBudget.chain(2), Sampling(), [1] * 1500)])
    assert len(drafter._slots[0].pending) == 0


def test_a_prompt_without_drafting_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make(CONFIGS["eagle-3"], LONG)
    monkeypatch.setattr(drafter, "_read", None)
    monkeypatch.setattr(Controller, "plan", lambda self, each, together: fixed_plan(self, each, self.sizes[0]))
    run(LONG, [i * i % 37 for i in range(3 * PREFILL_ROWS)], Sampling(max_new_tokens=5), drafter)


def test_a_text_whose_features_are_missing_is_not_drafted_for() -> None:
    drafter = make(CONFIGS["eagle-3"])
    taps = dict.fromkeys(drafter.taps, torch.zeros(2, 32, dtype=torch.float64))
    for slot, (prompt, fed) in enumerate([([1], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], 2), ([1, 2, 3], 2)]):
        drafter.admit(slot, prompt)
        if fed:
            drafter.feed(slot, prompt[:fed], taps)
    texts = [[1], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3]]
    drafts = drafter.propose([ask_for(i, DraftBudget.chain(2), Sampling(), text) for i, text in enumerate(texts)])
    assert [len(draft.tokens) for draft in drafts] == [0, 0, 0, 2]


def test_only_tokens_that_the_head_knows_are_drafted_whatever_the_order_of_its_map() -> None:
    config = CONFIGS["eagle-3"]
    tensors = eagle_tensors(config)
    tensors["lm_head.weight"][1::2] = tensors["lm_head.weight"][:22:2]  # ties, which go to the lowest id
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(23) + tensors["d2t"])[order]
    shuffled = {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": ids - torch.arange(23)}
    warm = Sampling(max_new_tokens=10, temperature=0.9, seed=1)
    for sampling in (replace(warm, temperature=0.0), warm, replace(warm, rule="block")):
        ours, theirs = (Kept(config, tensors | change, TOY) for change in ({}, shuffled))
        for drafter in (ours, theirs):
            run(TOY, PROMPT, sampling, drafter, DraftBudget(8, 3, 3))
        assert ours.drafts == theirs.drafts
        assert {token for draft in ours.drafts for token in draft.tokens} <= set(ids.tolist())
        assert all(q.shape == (37,) for draft in ours.drafts for q in draft.q.values())


def test_rows_that_a_head_leaves_to_its_target_are_drafted_from_as_if_it_stored_them() -> None:
    config, warm = CONFIGS["eagle-3"], Sampling(max_new_tokens=10, temperature=0.9, seed=1)
    tensors = eagle_tensors(config)
    ids = torch.arange(23) + tensors["d2t"]
    stored = tensors | {"lm_head.weight": TOY.head()[ids].clone()}
    lent = {name: x for name, x in tensors.items() if name != "lm_head.weight"}
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    shuffled = lent | {"d2t": ids[order] - torch.arange(23)}
    drafts = []
    for given in (stored, lent, shuffled):
        drafter = Kept(config, given, TOY)
        run(TOY, PROMPT, warm, drafter, DraftBudget(8, 3, 3))
        drafts.append(drafter.drafts)
    assert any(draft.tokens for draft in drafts[0])
    assert drafts == drafts[:1] * 3
    wide = CONFIGS["wider than its target"]
    with pytest.raises(CorruptModel, match=r"has no lm_head\.weight, and its width 40 is not its target's, 32"):
        Eagle(wide, {name: x for name, x in eagle_tensors(wide).items() if name != "lm_head.weight"}, TOY)


class Kept(Eagle):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drafts: list[Draft] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(asks)
        self.drafts += drafts
        return drafts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": torch.full((23,), 30)}, "beyond the 37"),
        ({"d2t": torch.arange(23).flip(0)}, "maps two rows to one token"),
        ({"midlayer.weight": torch.zeros(1)}, "does not know"),
        ({"fc.weight": torch.zeros(32, 64)}, "shape"),
    ],
)
def test_a_head_of_another_model_is_refused(change: dict[str, Tensor], said: str) -> None:
    with pytest.raises(CorruptModel, match=said):
        make(CONFIGS["eagle-3"], **change)


def test_a_head_of_another_width_must_bring_its_embedding() -> None:
    config = CONFIGS["wider than its target"]
    tensors = {name: x for name, x in eagle_tensors(config).items() if name != "embed_tokens.weight"}
    with pytest.raises(CorruptModel, match="no embedding"):
        Eagle(config, tensors, TOY)


# A head that predicts one text exactly, and the effect of off-by-one errors on it.

WARM = Sampling(max_new_tokens=60, temperature=0.8, seed=5)


def learned(config: EagleConfig, target: Decoder, depth: int = 4) -> tuple[dict[str, Tensor], list[int]]:
    """Fit the output matrix of a random head by ridge regression to one text.

    The head then predicts the next token wherever a draft of up to `depth` tokens begins. It learns from the plain
    reimplementation.
    """
    tensors = eagle_tensors(config)
    reference = Reference(config, tensors, target)
    text = PROMPT + run(target, PROMPT, WARM)[0]
    ends = [(end, k) for end in range(len(PROMPT), len(text)) for k in range(min(depth, len(text) - end))]
    states = torch.stack([reference.after(text[:end], text[end : end + k])[1] for end, k in ends])
    wanted = torch.nn.functional.one_hot(torch.tensor([text[end + k] for end, k in ends]), 37).double()
    gram = states.T @ states + 1e-6 * torch.eye(states.shape[1], dtype=torch.float64)
    return tensors | {"lm_head.weight": 60 * torch.linalg.solve(gram, states.T @ wanted).T}, text


class LateFeatures(Eagle):
    """Gets the target's features of the previous position at each position."""

    def _receive(self, state: Any, taps: Mapping[Tap, Tensor], path: Sequence[int] | None = None) -> None:
        kept = slice(None) if path is None else [0, *path]
        super()._receive(state, {tap: states[kept].roll(1, 0) for tap, states in taps.items()})


class LateTokens(Eagle):
    """Combines features with the token at their own position."""

    def _read(self, states: Any, counts: Any, prefill: bool = False) -> None:
        for state in states:
            state.token_ids.insert(0, 0)
        super()._read(states, counts, prefill)
        for state in states:
            state.token_ids.pop(0)


class Deaf(Eagle):
    """Uses the features of a round's first position for all positions."""

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        super().observe(slot, verdict, {tap: x[:1].expand(len(x), -1) for tap, x in out.items()})


def test_a_head_that_knows_the_text_is_nearly_always_right_and_an_off_by_one_undoes_it() -> None:
    config = eagle_config(layer=replace(TINY, layers=1, hidden=96), draft_vocab=37)
    tensors, text = learned(config, TOY)
    rounds = {}
    for kind in (Eagle, LateFeatures, LateTokens, Deaf):
        reply, _, stats = run(TOY, PROMPT, WARM, kind(config, tensors, TOY), DraftBudget.chain(4))
        assert reply == text[len(PROMPT) :]
        rounds[kind] = stats.tokens_per_round
    assert rounds.pop(Eagle) > 3.5
    assert max(rounds.values()) < 2.2, rounds
