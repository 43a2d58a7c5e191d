"""Threads that share the rows of a large pass in groups compute the same bits as one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.cache.slab import SlabCache
from paceline.kernels.cpu.build import library
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.types import Draft, Forward, Tap, Want
from paceline.verify.tree import pack, pack_prefix, with_siblings
from tests.support.native_models import BASE, CPU, DELTA_NET, GEMMA4, MODELS, native, plan, text
from tests.support.ragged_passes import DRAFTS, filled, packed, verify
from tests.support.row_groups import watched
from tests.support.trees import path_to

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]

THREADS = (2, 3, 5)
LENGTHS = (20, 7, 41, 300, 33, 1, 90, 64)
TREE = with_siblings([3, *text(9, 1)], 66)[0]
MANY = (*DRAFTS, Draft.chain(text(40, 2)), Draft(), TREE)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def same_with_threads(
    target: Decoder,
    lengths: Sequence[int],
    run: Callable[[KVCache, list[int]], Forward],
    counts: Sequence[int],
    cut: bool = True,
) -> None:
    """Check that one and two threads compute the same bits.

    `run` gets a cache without keys from earlier passes. `counts` is the number of real rows in each slot. `cut` is True
    if two threads must cut the last pass into groups.
    """

    def on(threads: int) -> tuple[Forward, int]:
        torch.set_num_threads(1)
        cache, slots = filled(target, lengths)
        torch.set_num_threads(threads)
        with watched(target) as groups:
            return run(cache, slots), groups[-1]

    right, alone = on(1)
    assert not alone
    for threads in THREADS:
        out, groups = on(threads)
        assert threads > 2 or (groups >= 2) == cut
        for line, count in enumerate(counts):
            assert torch.equal(out.logits[line, :count], right.logits[line, :count]), (threads, line)
            for tap, states in right.taps.items():
                assert torch.equal(out.taps[tap][line, :count], states[line, :count]), (threads, line, tap)


@pytest.mark.parametrize("name", MODELS)
def test_threads_do_not_change_passes_with_drafts(name: str) -> None:
    target = native(replace(BASE, **MODELS[name]))
    taps: tuple[Tap, ...] = (0, 1, target.layers, "final")
    counts = [1 + len(draft.tokens) for draft in MANY]
    cut = target.config.mixture is None and name != DELTA_NET
    same_with_threads(
        target, LENGTHS, lambda cache, slots: verify(target, cache, slots, MANY, Want(taps=taps)), counts, cut
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", GEMMA4])
@pytest.mark.parametrize("length", [18, 64, 200])
def test_a_chunk_of_a_prompt_is_cut_into_pieces_that_see_each_other(name: str, length: int) -> None:
    layers = {"layers": 6} if name == "llama" else plan(7, None, 7, 9, None, 7)
    target = native(replace(BASE, **{**MODELS[name], **(layers if name != GEMMA4 else {})}))

    def run(cache: KVCache, slots: list[int]) -> Forward:
        return target.forward(pack_prefix(text(length, 3), slots[0], 90, CPU), cache, Want(taps=(1,)))

    same_with_threads(target, [90], run, [length])


def test_a_pass_reads_the_rows_that_the_last_one_wrote() -> None:
    """Ring buffers have wrapped, and there are copies of parents next to their children."""
    target = native(replace(BASE, **plan(20, None), heads=2, kv_heads=1))
    after = []
    for threads in (1, *THREADS):
        torch.set_num_threads(threads)
        cache, slots = filled(target, (1021, 3, 1060, 600, 5, 9, 40, 2))
        rows = packed(cache, slots, MANY)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [path_to(draft, len(draft.tokens))[::-1][1:] for draft in MANY])
        after.append(verify(target, cache, slots, [Draft()] * len(slots), Want()).logits[:, 0])
    assert all(torch.equal(x, after[0]) for x in after)


def test_rows_that_all_see_each_other_stay_together() -> None:
    """A block drafter's rows look ahead in some or all layers, so no row can be a layer behind."""
    target = native(replace(BASE, **plan(60, None, 60, 60, None, 60)))

    def run(cache: KVCache, slots: list[int]) -> Forward:
        assert isinstance(cache, SlabCache)
        cache._kinds = [(60, False, None, 0), (None, True, None, 0)]
        return target.forward(pack_prefix(text(48, 3), slots[0], 30, CPU), cache, Want())

    same_with_threads(target, [30], run, [48], cut=False)


def test_trees_that_grow_level_by_level_keep_copies_of_parents() -> None:
    """A child in a later pass than its parent finds a copy of the parent next to it."""
    target = native(replace(BASE, **plan(20, None)))
    lengths = (1021, 30, 41, 64, 7, 90)
    bushy = Draft((1, 2, 3, 4, 5, 6, 7, 8, 9), (0, 0, 1, 1, 1, 2, 2, 3, 3))
    first = [Draft(bushy.tokens[:2], bushy.parents[:2])] * len(lengths)

    def run(cache: KVCache, slots: list[int]) -> Forward:
        verify(target, cache, slots, first, Want("none"))
        return verify(target, cache, slots, [bushy] * len(slots), Want(), *(3 for _ in slots))

    same_with_threads(target, lengths, run, [7] * len(lengths))


def test_layers_that_begin_with_something_else_than_the_stream() -> None:
    """EAGLE's first attention has its own input."""
    target = native(replace(BASE, layers=3))
    stack = target._stack
    assert stack.native
    results = []
    for threads in (1, *THREADS):
        torch.set_num_threads(1)
        cache, slots = filled(target, LENGTHS)
        torch.set_num_threads(threads)
        rows = pack([9] * len(slots), MANY, slots, [cache.lengths[slot] for slot in slots], CPU)
        draw = torch.Generator().manual_seed(5)
        x, entry = (torch.randn(*rows.tokens.shape, 64, generator=draw).bfloat16() for _ in range(2))
        with watched(target) as groups:
            out, _ = stack.run(
                x, 0, 3, target._stack.ropes(rows.positions, rows.end, [0] * len(slots)), cache.begin(rows), entry
            )
        assert threads != 2 or groups[-1] > 1
        results.append([out[i, : 1 + len(draft.tokens)] for i, draft in enumerate(MANY)])
    assert all(torch.equal(a, b) for one in results for a, b in zip(one, results[0], strict=True))


@pytest.mark.parametrize(
    ("layers", "lengths", "rows", "groups"),
    [
        (30, 1, 128, 4),
        (30, 1, 512, 4),
        (30, 1, 12, 0),
        (30, 1, 23, 0),
        (1, 1, 512, 0),
        (2, 48, 1, 3),
        (2, 15, 1, 0),
        (1, 40, 1, 3),
    ],
)
def test_passes_of_many_rows_are_cut_into_groups(layers: int, lengths: int, rows: int, groups: int) -> None:
    """Many rows are cut, except parts of a text that would wait for each other, and parts with very different sizes."""
    target = native(replace(BASE, layers=layers))
    cache, slots = filled(target, [3] * lengths)
    torch.set_num_threads(2)
    with watched(target) as seen:
        if rows > 1:
            target.forward(pack_prefix(text(rows), slots[0], 3, CPU), cache, Want("none"))
        else:
            verify(target, cache, slots, [Draft()] * lengths, Want("none"))
    assert seen == [groups]
