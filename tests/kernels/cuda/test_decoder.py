"""Passes with recorded graphs on the CPU: a tape replays the recorded operations on the same memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.kernels.cuda.cache import DeviceCache
from paceline.models.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from paceline.models.cuda_decoder import PATIENCE, DeviceDecoder
from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, Oracle, random_tensors, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import pack, pack_prefix
from tests.support.cuda_tape import tape
from tests.support.target_clauses import check_clause, clauses

CPU = torch.device("cpu")
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]


def device_target(capture=tape, dtype=torch.float64, config=TINY) -> DeviceDecoder:  # type: ignore[no-untyped-def]
    return DeviceDecoder(config, random_tensors(config), dtype, CPU, capture=capture)


@pytest.fixture(autouse=True)
def _no_kernels_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the CPU kernels, as on a CUDA device."""
    for module in ("kernels.linear", "kernels.cpu.attention", "models.norms"):
        monkeypatch.setattr(f"paceline.{module}.library", lambda: None)


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small slabs: graphs are recorded again when slabs grow, and the reference reads whole slabs."""
    monkeypatch.setattr(DeviceCache, "initial_capacity", 64)


SHORT = replace(TINY, context_length=48)
SLIDING = replace(
    TINY,
    layers=3,
    special=(LayerConfig(RopeConfig(), window=7), LayerConfig(None), LayerConfig(RopeConfig(theta=500.0), window=20)),
    attention=AttentionConfig(softcap=4.0),
    context_length=48,
)
SINKS = replace(SLIDING, attention=AttentionConfig(sinks=True))
TARGETS = {"eager": (None, SHORT), "recorded": (tape, SHORT), "windows": (None, SLIDING), "sinks": (None, SINKS)}


@clauses(
    eager="chunks growing",
    recorded="wanted commits ends",
    windows="truncation fits",
    sinks="drafts",
)
def test_it_is_a_target_like_any_other(kind: str, clause: str) -> None:
    capture, config = TARGETS[kind]
    check_clause(clause, lambda: device_target(capture, config=config), tolerance=1e-9, taps=(0, 1, "final"))


def test_sinks_weigh_as_on_a_cpu() -> None:
    found = []
    for target in (device_target(None, config=SINKS), Decoder(SINKS, random_tensors(SINKS), torch.float64, CPU)):
        cache = target.new_cache()
        slot = cache.acquire()
        rows = pack_prefix(PROMPT, slot, 0, CPU)
        found.append(target.forward(rows, cache, Want()).logits[0, : len(PROMPT)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("config", [TINY, SLIDING], ids=["full", "sliding"])
def test_a_recorded_pass_gives_the_very_logits_of_one_that_is_not(config: ModelConfig) -> None:
    """The recording used other tokens, trees, lengths and slots in its tables."""
    targets = [device_target(capture, torch.float32, config) for capture in (tape, None)]
    caches = [target.new_cache() for target in targets]
    slots = [[cache.acquire() for _ in range(3)] for cache in caches]
    for target, cache, own in zip(targets, caches, slots, strict=True):
        for n, slot in enumerate(own):
            rows = pack_prefix(PROMPT[: 4 + 2 * n], slot, 0, CPU)
            target.forward(rows, cache, Want("none"))
            cache.commit(rows, [range(1, 4 + 2 * n)])
    drafts = [Draft.chain((3, 4, 5)), Draft((6, 7, 8), (0, 0, 2)), Draft((1, 2, 3, 4, 5, 6, 7), (0, 1, 1, 0, 4, 5, 5))]
    for turn in range(PATIENCE + 4):
        for group, kinds in (([turn % 3], [turn % 2]), ([0, 1], [0, 1]), ([2, 1], [2, 2]), ([1], [2])):
            outs = []
            for target, cache, own in zip(targets, caches, slots, strict=True):
                taken = [own[i] for i in group]
                lengths = [cache.lengths[slot] for slot in taken]
                rows = pack([turn + 1] * len(group), [drafts[i] for i in kinds], taken, lengths, CPU)
                outs.append(target.forward(rows, cache, Want(taps=(1,))))
                cache.commit(rows, [(1,), *[None] * (len(taken) - 1)])
            assert torch.equal(outs[0].logits, outs[1].logits)
            assert torch.equal(outs[0].taps[1], outs[1].taps[1])
    assert {size for size, _ in caches[0].graphs} == {(1, 4), (1, 8), (2, 4), (2, 8)}
    assert not caches[1].graphs


def test_a_graph_is_made_when_its_size_has_come_up_often_enough() -> None:
    made = []
    target = device_target(lambda run: made.append(1) or tape(run))  # type: ignore[func-returns-value]
    cache = target.new_cache()
    slot = cache.acquire()
    for turn in range(PATIENCE + 3):
        target.forward(pack([1], [Draft()], [slot], [0], CPU), cache, Want())
        assert len(made) == (turn >= PATIENCE)
    target.forward(pack([1], [Draft()], [slot], [0], CPU), cache, Want("last"))
    target.forward(pack([1], [Draft.chain([1] * 200)], [slot], [0], CPU), cache, Want())
    assert len(made) == 1, "a pass that no graph holds runs without one"


def test_outputs_of_a_graph_outlast_its_next_run() -> None:
    found = []
    for capture in (tape, None):
        target = device_target(capture)
        cache = target.new_cache()
        slot = cache.acquire()
        rows = [pack([token], [Draft()], [slot], [0], CPU) for token in range(2 * PATIENCE + 3)]
        outs = [target.forward(x, cache, Want(taps=(1,))) for x in rows]
        found.append(torch.stack([torch.cat([out.logits[0, 0], out.taps[1][0, 0]]) for out in outs]))
        assert bool(cache.graphs) == (capture is tape)
    assert torch.equal(*found)


def test_rotary_factors_are_made_as_texts_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not computed for a context of millions, and graphs from before a table grew are not used again."""
    monkeypatch.setattr("paceline.models.cuda_decoder.FIRST", 1)
    config, found = replace(TINY, context_length=2**22), []
    for capture in (tape, None):
        target = device_target(capture, torch.float32, config)
        assert target._stack.ropes.reserve(0) < 1024
        cache = target.new_cache()
        slot, outs, reached = cache.acquire(), [], set()
        for start in range(0, 490, 98):
            rows = pack_prefix([1 + n % 30 for n in range(start, start + 98)], slot, start, CPU)
            target.forward(rows, cache, Want("none"))
            cache.commit(rows, [range(1, 98)])
        for turn in range(40):
            rows = pack([turn % 30], [Draft.chain((3, 4))], [slot], [cache.lengths[slot]], CPU)
            outs.append(target.forward(rows, cache, Want()).logits)
            cache.commit(rows, [()])
            reached.add(cache.reach)
        found.append(torch.cat(outs))
        assert cache.lengths[slot] > 512
        assert len(reached) == (2 if capture else 1)
        assert len(cache.graphs) == (capture is tape), "none that can never run again"
    assert torch.equal(*found)


def test_a_rule_that_follows_the_prompt_has_no_graphs() -> None:
    scaling = (("factor", 2.0), ("original_max_position_embeddings", 16.0))
    config = replace(TINY, rope=RopeConfig(kind="dynamic", scaling=scaling))
    engine = Engine(device_target(config=config))
    for prompt in (PROMPT, PROMPT * 3):
        plain = run(Decoder(config, random_tensors(config), torch.float64, CPU), prompt, Sampling(max_new_tokens=9))[0]
        assert run(engine.target, prompt, Sampling(max_new_tokens=9), engine=engine)[0] == plain
    assert not engine.cache.graphs  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        (DraftBudget.chain(5), 0.9),
        (DraftBudget(9, 4, 3), 0.0),
        pytest.param(DraftBudget.chain(5), 0.0, marks=pytest.mark.slow),
        pytest.param(DraftBudget(9, 4, 3), 0.9, marks=pytest.mark.slow),
    ],
)
def test_the_text_equals_plain_decoding_on_the_cpu(shape: DraftBudget, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=60, temperature=temperature, seed=3)
    plain = run(tiny_target(), PROMPT, sampling)[0]
    target = device_target()
    engine = Engine(target, Oracle(PROMPT + plain, 0.7, 37), shape)
    assert run(target, PROMPT, sampling, engine=engine)[0] == plain
    assert engine.cache.graphs  # type: ignore[attr-defined]
    others = [PROMPT[2:], PROMPT]
    together = run_together(engine, others, [sampling] * 2)
    assert [text for text, _, _ in together] == [run(tiny_target(), p, sampling)[0] for p in others]


def test_the_self_check_runs_on_it() -> None:
    assert guarantee(device_target()) in ("bits", "rounding")
