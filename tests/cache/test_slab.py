from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache import slab as slabs
from paceline.cache.attention import LayerAttention
from paceline.cache.slab import SlabCache
from paceline.errors import CacheError, OutOfMemory
from paceline.models.decoder import Decoder
from paceline.testing import tiny_target
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import pack, pack_prefix
from tests.support.cache_witness import Witness
from tests.support.trees import drafts, path_to

CPU = torch.device("cpu")
TOY = tiny_target(context_length=2048)


def fed(tokens: list[int], target: Decoder = TOY) -> tuple[SlabCache, int]:
    """Return a cache with the tokens, which were fed in one chunk."""
    cache = target.new_cache()
    slot = cache.acquire()
    rows = pack_prefix(tokens, slot, 0, CPU)
    target.forward(rows, cache, Want("none"))
    cache.commit(rows, [range(1, len(tokens))])
    return cache, slot  # type: ignore[return-value]


def logits_after(tokens: list[int]) -> torch.Tensor:
    """Return the logits [V] after the last token, from one pass over all tokens."""
    cache, slot = fed(tokens[:-1])
    rows = pack([tokens[-1]], [Draft()], [slot], [len(tokens) - 1], CPU)
    return TOY.forward(rows, cache, Want()).logits[0, 0]


@given(drafts(most=9), st.integers(1, 20), st.data())
def test_a_nodes_logits_equal_the_logits_of_its_path(draft: Draft, length: int, data: st.DataObject) -> None:
    prefix = [(3 * i + 1) % 37 for i in range(length)]
    cache, slot = fed(prefix)
    rows = pack([5], [draft], [slot], [length], CPU)
    logits = TOY.forward(rows, cache, Want()).logits[0]
    row = data.draw(st.integers(0, len(draft.tokens)))
    path = path_to(draft, row)[::-1]
    plain = logits_after([*prefix, 5, *(draft.tokens[r - 1] for r in path[1:])])
    torch.testing.assert_close(logits[row], plain, rtol=0, atol=1e-10)

    cache.commit(rows, [path[1:]])
    assert cache.lengths[slot] == length + len(path)
    after = TOY.forward(pack([7], [Draft()], [slot], [cache.lengths[slot]], CPU), cache, Want()).logits[0, 0]
    plain = logits_after([*prefix, 5, *(draft.tokens[r - 1] for r in path[1:]), 7])
    torch.testing.assert_close(after, plain, rtol=0, atol=1e-10)


def test_slots_of_different_lengths_share_a_pass() -> None:
    texts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11, 12]]
    tree = Draft((1, 2, 3), (0, 0, 1))
    batch = [Draft.chain([9, 9]), Draft(), tree]
    cache = TOY.new_cache()
    slots = [cache.acquire() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        rows = pack_prefix(text, slot, 0, CPU)
        TOY.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(text))])
    for order in ([0, 1, 2], [2, 0]):
        rows = pack(
            [30] * len(order), [batch[i] for i in order], [slots[i] for i in order], [len(texts[i]) for i in order], CPU
        )
        together = TOY.forward(rows, cache, Want()).logits
        for line, i in enumerate(order):
            own, slot = fed(texts[i])
            alone = TOY.forward(pack([30], [batch[i]], [slot], [len(texts[i])], CPU), own, Want()).logits[0]
            real = len(batch[i].tokens) + 1
            torch.testing.assert_close(together[line, :real], alone[:real], rtol=0, atol=1e-10)


def test_memory_follows_the_length_reached() -> None:
    cache, slot = fed([1, 2, 3])
    assert cache.capacity == 256
    rows = pack_prefix([1] * 400, slot, 3, CPU)
    TOY.forward(rows, cache, Want("none"))
    cache.commit(rows, [range(1, 400)])
    assert 403 <= cache.capacity <= 512
    assert TOY.new_cache().capacity == 0, "nothing is held before a request comes"


@torch.inference_mode()
def extend(cache: SlabCache, slot: int, count: int) -> None:
    """Feed `count` tokens to a slot of a cache of `in_memory`."""
    for done in range(0, count, 256):
        n = min(256, count - done)
        rows = pack_prefix([0] * n, slot, cache.lengths[slot], CPU)
        view = cache.begin(rows)
        for layer in range(2):
            view.write(layer, *torch.full((2, 1, n, 2, 8), float(slot + 1)))
        cache.commit(rows, [range(1, n)])


def in_memory(limit: int = 2**16) -> SlabCache:
    return SlabCache([LayerAttention(1.0)] * 2, 2, 8, limit, torch.float32, CPU)


POSITION = 2 * 2 * 2 * 8 * 4
"""Bytes per position in a cache of `in_memory`."""
LENGTHS = (30_000, *(100 + 40 * i for i in range(15)))


@pytest.mark.parametrize("known", [True, False])
def test_memory_is_the_sum_of_the_lengths_of_texts(known: bool) -> None:
    """Memory grows in steps, by at most a quarter more if a text exceeds the size that its prompt requested."""
    cache = in_memory()
    slots = [cache.acquire(n if known else 0) for n in LENGTHS]
    for slot, n in zip(slots, LENGTHS, strict=True):
        extend(cache, slot, n)
    steps = [-(-n // 256) * 256 for n in LENGTHS]
    if known:
        assert cache.nbytes == POSITION * sum(steps)
    else:
        assert POSITION * sum(steps) <= cache.nbytes <= POSITION * sum(1.25 * n + 256 for n in LENGTHS)
    before = cache.nbytes
    cache.release(slots[0])
    assert before - cache.nbytes >= POSITION * 30_000, "what a slot had is given back with it"
    for slot in slots[1:]:
        cache.release(slot)
    assert cache.nbytes == 0


def test_a_slot_that_grows_moves_no_other() -> None:
    cache = in_memory()
    slots = [cache.acquire() for _ in range(4)]
    for slot in slots:
        extend(cache, slot, 100)

    def held(slot: int) -> list[tuple[int, torch.Size]]:
        return [(x.data_ptr(), x.shape) for slab in cache._held[slot] for x in slab.tensors]

    before = [held(slot) for slot in slots]
    extend(cache, slots[1], 3000)
    after = [held(slot) for slot in slots]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True, True]
    cache.release(slots[0])
    assert [held(slot) for slot in slots[1:]] == after[1:], "nor does one that leaves"
    for slot in slots[1:]:
        assert all(bool((x == slot + 1).all()) for x in cache.save(slot).tensors)


def test_growth_needs_room_for_one_slot_twice_and_copies_a_text_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    live = peak = copied = 0
    honest = slabs._zeros

    def freed(count: int) -> None:
        nonlocal live
        live -= count

    def zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal live, peak, copied
        new = honest(like, shape)
        weakref.finalize(new, freed, new.nbytes)
        live += new.nbytes
        peak, copied = max(peak, live), copied + like.nbytes
        return new

    monkeypatch.setattr(slabs, "_zeros", zeros)
    cache = in_memory()
    slots = [cache.acquire() for _ in range(8)]
    for slot in slots:
        extend(cache, slot, 1000)
    others, copied = live, 0
    while cache.lengths[slots[0]] < 30_000:
        own = sum(x.nbytes for slab in cache._held[slots[0]] for x in slab.tensors)
        peak = live
        extend(cache, slots[0], 256)
        assert live == cache.nbytes
        assert peak <= live + own
    assert live - others > 29_000 * POSITION
    assert copied < 6 * 30_000 * POSITION


def test_a_fork_for_which_there_is_no_memory_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, slot = fed([1] * 300)
    honest = slabs.Slab.resize

    def resize(slab: slabs.Slab, places: int, capacity: int, used: int) -> None:
        if capacity > 256:
            raise OutOfMemory("no memory", "Use less")
        honest(slab, places, capacity, used)

    monkeypatch.setattr(slabs.Slab, "resize", resize)
    before = cache.nbytes
    with pytest.raises(OutOfMemory):
        cache.fork(slot)
    assert cache.nbytes == before
    monkeypatch.undo()
    other = cache.fork(slot)
    assert all(map(torch.equal, cache.save(other).tensors, cache.save(slot).tensors))


def test_growth_keeps_written_rows() -> None:
    text = [(5 * i) % 37 for i in range(300)]
    cache, slot = fed(text[:200])
    rest = TOY.forward(pack_prefix(text[200:], slot, 200, CPU), cache, Want()).logits[0, -1]
    torch.testing.assert_close(rest, logits_after(text), rtol=0, atol=1e-10)


def test_a_released_slot_is_used_again_and_starts_empty() -> None:
    cache, slot = fed([1, 2, 3])
    cache.release(slot)
    cache.release(slot)
    assert cache.acquire() == slot
    assert cache.lengths[slot] == 0
    assert cache.acquire() != slot


def test_unused_positions_cost_no_memory() -> None:
    """Only touched pages (4 KiB, or 2 MiB for large pages) use memory. Writing zeros would touch all 512 MiB."""
    resource = pytest.importorskip("resource")
    cache = SlabCache([LayerAttention(1.0)] * 32, 2, 64, 2**20, torch.float32, CPU)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache.acquire(2**14)
    assert cache.nbytes == 2**29
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 64
    assert not any(x[:, 0, :, ::4096].any() for slab in cache.slabs for x in slab.tensors)


FAST = {(3, 1), (1700, 150), (1700, 1100)}


@pytest.mark.parametrize(
    ("length", "back"),
    [
        pytest.param(length, back, marks=() if (length, back) in FAST else pytest.mark.slow)
        for back in (0, 1, 150, 600, 1100)
        for length in (3, 700, 1030, 1700)
    ],
)
def test_loaded_rows_are_seen_as_they_were_written(length: int, back: int) -> None:
    """Check layers with windows of 20, 700 and all positions, before and after their rings (1024 and 1536) wrap."""
    witness = Witness()
    cache, slot = witness.cache, witness.acquire()
    grow(witness, slot, length)
    tree = Draft((1, 2, 3), (0, 0, 1))
    witness.feed(pack([0], [tree], [slot], [length], CPU), [[1, 3]])
    saved, goal = cache.save(slot), max(1, cache.lengths[slot] - back)
    other = witness.acquire()
    history = {slot: witness.history[slot], other: witness.history[slot]}
    # Another slot, the only slot of a new cache, and saved rows that had already been loaded once.
    for _ in range(3):
        kept = cache.load(other, saved, goal)
        assert kept == (goal if saved.holds(goal, 0) else 0)
        assert saved.holds(goal, 0) == (back < 1100 or length < 1024), "a ring goes back by 1000 positions"
        witness.history[other] = [(keys[:kept], values[:kept]) for keys, values in history[other]]
        for draft in (tree, Draft.chain([1] * 5), tree):
            kept = cache.lengths[other]
            witness.feed(pack([0], [draft], [other], [kept], CPU), [[1, 2] if draft is not tree else [2]])
        grow(witness, other, 700)
        for used in (slot, other):
            cache.release(used)
        other = witness.acquire()
        if goal <= saved.length and saved.holds(goal, 0):
            cache.load(other, saved, goal)
            saved = cache.save(other)
            assert (saved.length, saved.holds(goal, 0)) == (goal, True)
            cache.release(other)
            other = witness.acquire()


def grow(witness: Witness, slot: int, count: int) -> None:
    """Prefill `count` more tokens in a slot."""
    for done in range(0, count, 200):
        chunk = [0] * min(200, count - done)
        rows = pack_prefix(chunk, slot, witness.cache.lengths[slot], CPU)
        witness.feed(rows, [[*range(1, len(chunk))]])


def test_saved_rows_are_a_copy_without_spare_memory() -> None:
    cache, slot = fed([1, 2, 3, 4, 5])
    saved = cache.save(slot)
    before = [x.clone() for x in saved.tensors]
    assert saved.nbytes == TOY.config.cache_bytes(5, torch.float64)
    cache.truncate(slot, 2)
    TOY.forward(pack_prefix([7, 8, 9], slot, 2, CPU), cache, Want("none"))
    cache.release(slot)
    assert all(map(torch.equal, saved.tensors, before))


def test_running_out_of_memory_is_a_typed_error() -> None:
    cache = SlabCache([LayerAttention(1.0)] * 2**8, 2**16, 2**16, 2**20, torch.float32, CPU)
    with pytest.raises(OutOfMemory, match="KV cache"):
        cache.acquire()


def test_misuse_is_refused_and_changes_nothing() -> None:
    cache, slot = fed([1, 2, 3])
    for length in (77, 4, -3):
        with pytest.raises(CacheError, match=f"holds 3 tokens and cannot be cut to {length}"):
            cache.truncate(slot, length)
    rows = pack([5], [Draft.chain([6, 7])], [slot], [3], CPU)
    TOY.forward(rows, cache, Want())
    with pytest.raises(CacheError, match="Commit only the slot's latest pass, and only once"):
        cache.commit(pack([5], [Draft()], [slot], [4], CPU), [()])
    cache.commit(rows, [[1]])
    with pytest.raises(CacheError, match="once"):
        cache.commit(rows, [[1, 2]])
    assert cache.lengths[slot] == 5
    later = pack([5], [Draft()], [slot], [5], CPU)
    TOY.forward(later, cache, Want())
    cache.commit(later, [()])
    with pytest.raises(CacheError, match="once"):
        cache.commit(rows, [[1]])
    cache.release(slot)
    cache.release(slot)
    for misuse in (
        lambda: cache.truncate(slot, 0),
        lambda: cache.commit(rows, [[1]]),
        lambda: cache.fork(slot),
        lambda: cache.save(slot),
        lambda: cache.fit(slot, DraftBudget.chain(3)),
        lambda: TOY.forward(rows, cache, Want()),
        lambda: cache.release(slot + 1),
        lambda: cache.release(-1),
    ):
        with pytest.raises(CacheError, match="is not taken"):
            misuse()
