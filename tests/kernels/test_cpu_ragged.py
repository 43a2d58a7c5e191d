"""Slots with different numbers of rows share a native pass: no slot affects another, and padding rows cost nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import library
from paceline.types import Carried, Draft, Forward, Tap, Want
from paceline.verify.tree import pack, pack_prefix, with_siblings
from tests.support.native_models import BASE, CPU, GEMMA4, MODELS, RECURRENT, native, plan, text
from tests.support.ragged_passes import DRAFTS, filled, packed, verify

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]

LENGTHS = (20, 7, 41, 300, 33)


def same(ours: Forward, line: int, alone: Forward, count: int) -> bool:
    each = [(ours.logits, alone.logits), *((ours.taps[tap], alone.taps[tap]) for tap in ours.taps)]
    return all(torch.equal(x[line, :count], y[0, :count]) for x, y in each)


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3", GEMMA4, *RECURRENT, "partial rotary", "layers without rope"]
)
def test_each_slot_of_a_ragged_pass_equals_a_separate_pass(name: str) -> None:
    target = native(replace(BASE, **MODELS[name]))
    taps: tuple[Tap, ...] = (0, 1, target.layers, "final")
    cache, slots = filled(target, LENGTHS)
    for order in ([0, 1, 2, 3, 4], [3, 1], [4, 2, 0, 1]):
        taken, drafts = [slots[i] for i in order], [DRAFTS[i] for i in order]
        out = verify(target, cache, taken, drafts, Want(taps=taps))
        assert out.logits.shape == (len(order), 16 if 0 in order else max(2, 1 + len(drafts[0].tokens)), 67)
        for line, (slot, draft) in enumerate(zip(taken, drafts, strict=True)):
            alone = verify(target, cache, [slot], [draft], Want(taps=taps))
            assert same(out, line, alone, 1 + len(draft.tokens)), (order, line)


def test_rings_that_have_wrapped() -> None:
    target = native(replace(BASE, **plan(20, None), heads=2, kv_heads=1))
    cache, slots = filled(target, (1021, 3, 1060, 600))
    drafts = [Draft.chain([1, 2]), Draft(), with_siblings([3, 4], 66)[0], Draft.chain(text(9))]
    out = verify(target, cache, slots, drafts, Want())
    for line, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
        assert same(out, line, verify(target, cache, [slot], [draft], Want()), 1 + len(draft.tokens)), line


@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_committed_rows_of_a_ragged_pass_equal_prefilled_rows(name: str) -> None:
    """Rows are written at their own slot's positions, where the next pass reads them."""
    target = native(replace(BASE, **MODELS[name]))
    cache, slots = filled(target, LENGTHS)
    rows = packed(cache, slots, DRAFTS)
    target.forward(rows, cache, Want())
    paths = ([*range(1, 10)], [], [2, 4], [1], [1, 2])
    cache.commit(rows, paths)
    for i, (slot, path) in enumerate(zip(slots, paths, strict=True)):
        whole = [*text(LENGTHS[i], i), 9, *(DRAFTS[i].tokens[row - 1] for row in path)]
        fresh = target.new_cache()
        own = fresh.acquire()
        for token in whole:
            rows = pack([token], [Draft()], [own], [fresh.lengths[own]], CPU)
            target.forward(rows, fresh, Want("none"))
            fresh.commit(rows, [()])
        ours, right = (verify(target, c, [s], [Draft()], Want()).logits[0, 0] for c, s in ((cache, slot), (fresh, own)))
        assert torch.equal(ours, right), i


@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_trees_at_different_levels_grow_together(name: str) -> None:
    target = native(replace(BASE, **MODELS[name]))
    cache, slots = filled(target, (20, 31, 12))
    chain, bushy = Draft.chain(text(6)), Draft((1, 2, 3, 4), (0, 0, 2, 1))
    whole = [
        verify(target, cache, [slot], [draft], Want()) for slot, draft in zip(slots, (chain, bushy, chain), strict=True)
    ]
    verify(target, cache, slots[:2], [Draft.chain(chain.tokens[:3]), Draft((1, 2), (0, 0))], Want("none"))
    out = verify(target, cache, slots, [chain, bushy, chain], Want(), 4, 3, 0)
    for line, (start, end) in enumerate(((4, 7), (3, 5), (0, 7))):
        assert torch.equal(out.logits[line, : end - start], whole[line].logits[0, start:end]), line


@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_a_pass_continues_each_slot_where_drafting_stopped(name: str) -> None:
    target = native(replace(BASE, **({"layers": 4} | MODELS[name])))
    cache, slots = filled(target, LENGTHS)
    right = verify(target, cache, slots, DRAFTS, Want())
    early = verify(target, cache, slots, DRAFTS, Want("none", (2,), 2)).taps[2]
    held = (10, 0, 9, 2, 3)
    carried = [
        replace(draft, carried=Carried(2, early[i, :n])) if n else draft
        for i, (draft, n) in enumerate(zip(DRAFTS, held, strict=True))
    ]
    out = verify(target, cache, slots, carried, Want())
    for line, draft in enumerate(DRAFTS):
        count = 1 + len(draft.tokens)
        assert torch.equal(out.logits[line, :count], right.logits[line, :count]), line


class Failing:
    """Wraps a kernel that once reports that there is no memory, before it computes anything."""

    def __init__(self, run: Any) -> None:
        self._run, self.fails = run, True

    def __call__(self, *args: Any) -> Any:
        failed, self.fails = self.fails, False
        return 1 if failed else self._run(*args)


@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_a_pass_may_be_repeated_after_it_ran_out_of_memory(name: str) -> None:
    """This holds for a prompt, a new draft and a further level of a tree."""
    target = native(replace(BASE, **MODELS[name]))
    stack = target._stack.native
    assert stack
    run, bushy = stack._run, Draft((1, 2, 3, 4), (0, 0, 2, 1))
    cache, slots = filled(target, (20, 31))
    right = verify(target, cache, slots, [bushy, bushy], Want()).logits
    prompt = pack_prefix(text(31, 1), slot := (repeated := target.new_cache()).acquire(), 0, CPU)
    passes = [lambda: target.forward(prompt, repeated, Want("none"))]
    cache, slots = filled(target, (20, 31))
    level = [Draft((1, 2), (0, 0))] * 2
    passes += [lambda: verify(target, cache, slots, level, Want("none"))]
    passes += [lambda: verify(target, cache, slots, [bushy, bushy], Want(), 3, 3)]
    for attempt in passes:
        stack._run = Failing(run)
        with pytest.raises(OutOfMemory):
            attempt()
        out = attempt()
    assert torch.equal(out.logits[:, :2], right[:, 3:5])
    repeated.commit(prompt, [range(1, 31)])
    after = verify(target, repeated, [slot], [bushy], Want()).logits[0]
    assert torch.equal(after, right[1])


class Counted:
    """Wraps a kernel and records the number of its rows."""

    def __init__(self, run: Any, rows: Any) -> None:
        self._run, self._rows, self.seen = run, rows, list[int]()

    def __call__(self, *args: Any) -> Any:
        self.seen.append(self._rows(args))
        return self._run(*args)


def test_only_real_rows_reach_the_kernels() -> None:
    target = native(BASE)
    cache, slots = filled(target, LENGTHS)
    layers = Counted(target._stack.native._run, lambda args: args[2]._obj.rows)  # type: ignore[attr-defined]
    head = Counted(target._head._run, lambda args: args[5])  # type: ignore[attr-defined]
    target._stack.native._run, target._head._run = layers, head  # type: ignore[attr-defined]
    verify(target, cache, slots, DRAFTS, Want())
    verify(target, cache, slots[1:2], [Draft()], Want())
    real = sum(1 + len(draft.tokens) for draft in DRAFTS)
    assert (layers.seen, head.seen) == ([real, 1], [real, 1])


@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_padding_of_a_pass_is_never_read(name: str) -> None:
    """It may have any values, even NaN."""
    target = native(replace(BASE, **MODELS[name]))
    cache, slots = filled(target, LENGTHS)
    right = verify(target, cache, slots, DRAFTS, Want())
    embed = target.embed

    def spoilt(tokens: Tensor) -> Tensor:
        x = embed(tokens)
        for line, draft in zip(x, DRAFTS, strict=True):
            line[1 + len(draft.tokens) :] = torch.nan
        return x

    target.embed = spoilt  # type: ignore[method-assign]
    out = verify(target, cache, slots, DRAFTS, Want())
    for line, draft in enumerate(DRAFTS):
        count = 1 + len(draft.tokens)
        assert torch.equal(out.logits[line, :count], right.logits[line, :count]), line
