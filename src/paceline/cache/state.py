"""The states of recurrent layers, which are kept for a few lengths of each text.

Attention reads every token of a text from the cache, so a rejected token can simply be overwritten. A recurrent layer,
however, has a single state for the whole text, and no token can be removed from it. Therefore, a pass never changes a
state. It records an update for each row, which is far smaller than a state. A commit takes the state before the pass,
and applies the updates of the accepted rows, in order and with the same operations as the pass. The result has the same
bits as a pass over only these rows, and no row goes through the model twice.

States are immutable, so forks, the prefix cache and checkpoints only hold references to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPass, SlabPlan
from paceline.cache.layout import NONE
from paceline.cache.slab import SavedSlabs, SlabCache
from paceline.protocols import Saved
from paceline.types import Rows

Tensors = tuple[Tensor, ...]
State = Mapping[int, Tensors]
"""Index of a recurrent layer -> its state after a text."""

CHECKPOINT_INTERVAL = 256
"""Distance between two checkpoints, in tokens. Prompts are cut into chunks at the same positions."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The rows that one slot has fed since its last commit.

    Attributes:
        parents: The parent of every row, including rows of earlier passes (see `types.Rows`).
        start: The first row of the current pass.
    """

    parents: tuple[int, ...]
    start: int = 0

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(NONE, len(self.parents) - 1))

    def history(self, count: int) -> Tensor:
        """Return, for each row of the pass, the last `count` entries of its text, ending with the row itself, int64 [T,
        count].

        Entries 0 to `count` - 2 are the last tokens of the committed text. Entry `count` - 1 + r is row r of the tree.
        """
        return _history(self.parents, count)[self.start :]


@lru_cache(maxsize=256)
def _history(parents: tuple[int, ...], count: int) -> Tensor:
    before, lines = list(range(count - 1)), list[list[int]]()
    for row, parent in enumerate(parents):
        above = before if parent == NONE else lines[parent]
        lines.append([*above, count - 1 + row][-count:])
    return torch.tensor(lines)


class Stretch(NamedTuple):
    """Consecutive rows of a slot that a recurrence processes together.

    Attributes:
        slot: Index of the slot in the pass.
        first: First row, counted from the slot's first row in the pass.
        tree: The tree. The stretch consists of its rows starting at `tree.start`.
        state: The state before the tree.
        earlier: Updates of the tree's earlier rows, each [start, ...]. None if there are none.
    """

    slot: int
    first: int
    tree: Tree
    state: Tensors
    earlier: Tensors | None = None

    @property
    def rows(self) -> slice:
        """The rows, counted from the slot's first row in the pass."""
        return slice(self.first, self.first + len(self.tree.parents) - self.tree.start)


class Recurrence(ABC):
    """The recurrence of one layer.

    Except for prompt chunks, the bits of a row's result must not depend on the other rows of the pass, and `apply` must
    return the same bits as `scan`.
    """

    @abstractmethod
    def empty(self) -> Tensors:
        """Return the state of an empty text."""

    @abstractmethod
    def scan(
        self, state: Tensors, earlier: Tensors | None, tree: Tree, inputs: Tensors, prompt: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        """Feed the rows of a pass. This does not change the arguments.

        Args:
            state: The state before the tree.
            earlier: Updates of the rows before `tree.start`, each [start, ...]. None if there are none.
            tree: The tree that the rows belong to.
            inputs: Inputs of the pass's rows, each [T, ...].
            prompt: True if the rows are a prompt chunk, which is a chain of any length and needs no updates.

        Returns:
            The outputs [T, ...], the updates of the rows, each [T, ...] (empty for a prompt), and the state after the
            last row (None if the tree is not a chain).
        """

    @abstractmethod
    def apply(self, state: Tensors, updates: Tensors, rows: Sequence[int]) -> Tensors:
        """Return the state that results from applying the updates of these rows, in order."""


@dataclass(slots=True)
class _FedRows:
    """Results of the rows that a slot has fed since its last commit.

    Attributes:
        updates: Layer -> updates of the rows.
        after: If the rows are a chain, layer -> n -> state after the first n rows.
    """

    updates: dict[int, Tensors] = field(default_factory=dict)
    after: dict[int, dict[int, Tensors]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedHybrid(Saved):
    """The keys and values of a slot, and its states by length of the text."""

    slabs: SavedSlabs
    states: Mapping[int, State]

    def most(self, length: int, prompt: int) -> int:
        """Return the greatest length, up to `length`, for which a state was saved, or 0 if there is none."""
        return max((n for n in self.states if n <= length and self.slabs.holds(n, prompt)), default=0)


class StateCache(SlabCache):
    """A `SlabCache` for models that also have recurrent layers.

    A slot keeps the states at its current length, at the length before its latest commit, and at checkpoints. The
    checkpoints are the latest two multiples of `CHECKPOINT_INTERVAL`, and `CHECKPOINT_INTERVAL` times each power of
    two. `truncate` and `load` go back to the nearest state.
    """

    def __init__(self, recurrences: Mapping[int, Recurrence], *args: Any) -> None:
        """Make a cache.

        Args:
            recurrences: Index of a recurrent layer -> its recurrence.
            args: Arguments of `SlabCache`.
        """
        super().__init__(*args)
        self.recurrences = recurrences
        self._states: dict[int, dict[int, State]] = {}
        """Taken slot -> length of its text -> the state after that length."""
        self._fed: dict[int, _FedRows] = {}

    @cached_property
    def _empty_states(self) -> State:
        """The states of an empty text. All slots share them, because a state is never changed in place."""
        return {layer: one.empty() for layer, one in self.recurrences.items()}

    @torch.inference_mode()
    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        slot = super().acquire(prompt, adapter, lag)
        self._states[slot] = {0: self._empty_states}
        self._fed[slot] = _FedRows()
        return slot

    def release(self, slot: int) -> None:
        super().release(slot)
        self._states.pop(slot, None)
        self._fed.pop(slot, None)

    def fork(self, slot: int) -> int:
        """See `protocols.KVCache.fork`."""
        new = super().fork(slot)
        self._states[new] = dict(self._states[slot])
        return new

    def save(self, slot: int) -> SavedHybrid:  # type: ignore[override]
        """See `protocols.KVCache.save`."""
        slabs, states = super().save(slot), self._states[slot]
        kept = {n: states[n] for n in sorted(states) if n and n in _checkpoint_lengths(self.lengths[slot])}
        tensors = (x for state in kept.values() for layer in state.values() for x in layer)
        return SavedHybrid(slabs.length, (*slabs.tensors, *tensors), slabs, kept)

    def load(self, slot: int, saved: SavedHybrid, length: int) -> int:  # type: ignore[override]
        """See `protocols.KVCache.load`."""
        length = super().load(slot, saved.slabs, saved.most(length, self.prompts[slot]))
        self._states[slot] |= {n: state for n, state in saved.states.items() if n <= length}
        return length

    def restored(self, saved: SavedHybrid) -> SavedHybrid:  # type: ignore[override]
        """See `protocols.Restorer`. `load` uses states as they are, so they must not remain memory-mapped pages of a
        file."""
        states = {
            n: {layer: tuple(x.clone() for x in tensors) for layer, tensors in state.items()}
            for n, state in saved.states.items()
        }
        return replace(saved, slabs=super().restored(saved.slabs), states=states)

    def truncate(self, slot: int, length: int) -> None:
        """See `protocols.KVCache.truncate`."""
        self.check_length(slot, length)
        super().truncate(slot, max(n for n in self._states[slot] if n <= length))
        length = self.lengths[slot]
        self._states[slot] = {n: state for n, state in self._states[slot].items() if n <= length}

    def begin(self, rows: Rows) -> StatePass:
        """See `protocols.KVCache.begin`."""
        view = super().begin(rows)
        if rows.resume is None:
            self._fed |= {slot: _FedRows() for slot, start in zip(rows.slots, rows.starts, strict=True) if not start}
        fed = [self._fed[slot] for slot in rows.slots]
        before = [self._states[slot][length] for slot, length in zip(rows.slots, rows.lengths, strict=True)]
        return StatePass(view.plans, self._layers, self._indices, rows, self.recurrences, before, fed)

    @torch.inference_mode()
    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        """See `protocols.KVCache.commit`. The state before the commit is kept, so that a round can be repeated if it
        fails half-way."""
        for i, (slot, length, path) in enumerate(zip(rows.slots, rows.lengths, paths, strict=True)):
            if path is not None:
                self.check_commit(slot, rows, i)
                states, taken = self._states[slot], [0, *path]
                states |= self._after(slot, length, taken)
                kept = {*_checkpoint_lengths(length + len(taken)), length}
                self._states[slot] = {n: state for n, state in states.items() if n in kept}
        super().commit(rows, paths)

    def _after(self, slot: int, length: int, path: Sequence[int]) -> dict[int, State]:
        """Return the states after `length` tokens and the rows of a path: the state at the end of the path, and the
        states at the checkpoints on it."""
        fed, state, done, found = self._fed[slot], self._states[slot][length], 0, dict[int, State]()
        for end in _ends(length, len(path)):
            # `Decoder.excerpt` feeds only the first layers. The other layers keep their state.
            fresh = {layer: self._one_after(fed, layer, state[layer], path, done, end) for layer in fed.updates}
            state = {**state, **fresh}
            found[length + end], done = state, end
        return found

    def _one_after(
        self, fed: _FedRows, layer: int, state: Tensors, path: Sequence[int], done: int, end: int
    ) -> Tensors:
        """Return a layer's state after the first `end` rows of a path, given its state after the first `done` rows."""
        if path[end - 1] == end - 1 and end in fed.after[layer]:
            return fed.after[layer][end]
        updates = fed.updates[layer]
        if not updates:
            raise ValueError("a chunk of a prompt must be committed whole")
        return self.recurrences[layer].apply(state, updates, path[done:end])


class StatePass(SlabPass):
    """One forward pass over a `StateCache` (`protocols.RecurrentPass`)."""

    def __init__(
        self,
        plans: Sequence[Sequence[SlabPlan]],
        layers: Sequence[LayerAttention | None],
        indices: Sequence[tuple[int, int]],
        rows: Rows,
        recurrences: Mapping[int, Recurrence],
        before: Sequence[State],
        fed: Sequence[_FedRows],
    ) -> None:
        """Make a pass.

        Args:
            plans: See `SlabPass`.
            layers: See `SlabPass`.
            indices: See `SlabPass`.
            rows: The rows of the pass.
            recurrences: Index of a recurrent layer -> its recurrence.
            before: For each slot, the state before the slot's rows.
            fed: For each slot, the results of the rows since its last commit. `keep` adds to them.
        """
        # Use exact attention for prompts too, so that a text has the same bits from whichever state it continues.
        super().__init__(plans, layers, indices, False)
        self.rows, self._recurrences, self._before, self._fed = rows, recurrences, before, fed
        ends = [start + count for start, count in zip(rows.starts, rows.counts, strict=True)]
        self._trees = [Tree(p[:end], start) for p, end, start in zip(rows.parents, ends, rows.starts, strict=True)]

    def recur(self, layer: int, inputs: Tensors) -> Tensor:
        """See `protocols.RecurrentPass.recur`."""
        lines: list[list[Tensor]] = [[] for _ in self.rows.slots]
        for stretch in self.stretches(layer):
            own, b = tuple(x[stretch.slot, stretch.rows] for x in inputs), stretch.slot
            scan = self._recurrences[layer].scan
            out, updates, end = scan(stretch.state, stretch.earlier, stretch.tree, own, self.rows.prefill)
            known = self.known(layer, b)
            self.keep(
                layer, stretch, tuple(map(torch.cat, zip(known, updates, strict=True))) if known else updates, end
            )
            lines[b].append(out)
        room = inputs[0].shape[1]
        # Padding rows repeat the first row's token, so they also repeat its output (see `SlabPass.attend`).
        whole = [torch.cat(parts) for parts in lines]
        return torch.stack([torch.cat([x, x[:1].expand(room - len(x), *x.shape[1:])]) for x in whole])

    def stretches(self, layer: int) -> Iterator[Stretch]:
        """Yield the rows of the pass, in order, in the stretches that a layer's recurrence processes. Call `keep` for
        each stretch before the next one."""
        for b in range(len(self.rows.slots)):
            if self.rows.prefill:
                yield from self._prompt(layer, b)
                continue
            tree, fed, state = self._trees[b], self._fed[b], self._before[b][layer]
            start, ends = tree.start, fed.after.get(layer, {})
            if start and tree.is_chain and start in ends:
                yield Stretch(b, 0, _chain(len(tree.parents) - start), ends[start])
            else:
                yield Stretch(b, 0, tree, state, self.known(layer, b))

    def known(self, layer: int, b: int) -> Tensors | None:
        """Return the updates of the rows that slot `b` has fed in earlier passes since its last commit, each [start,
        ...], or None if there are none."""
        start = 0 if self.rows.prefill else self._trees[b].start
        return tuple(x[:start] for x in self._fed[b].updates[layer]) if start else None

    def keep(self, layer: int, stretch: Stretch, updates: Tensors, end: Tensors | None) -> None:
        """Record the updates of all rows since the slot's last commit (empty for a prompt), and the state after the
        stretch (None if the rows are a tree)."""
        fed = self._fed[stretch.slot]
        fed.updates[layer] = updates
        if not stretch.first:
            fed.after[layer] = {}
        if end is not None:
            prompt = self.rows.prefill
            fed.after[layer][stretch.rows.stop if prompt else len(self._trees[stretch.slot].parents)] = end

    def _prompt(self, layer: int, b: int) -> Iterator[Stretch]:
        """Yield the stretches of a prompt chunk. Each ends at a checkpoint or at the end of the chunk."""
        state, done = self._before[b][layer], 0
        for end in _ends(self.rows.lengths[b], self.rows.counts[b]):
            yield Stretch(b, done, _chain(end - done), state)
            state, done = self._fed[b].after[layer][end], end


def _chain(count: int) -> Tree:
    return Tree(tuple(range(NONE, count - 1)))


def _ends(length: int, count: int) -> list[int]:
    """Divide the next `count` tokens at the checkpoints. Return the end of each piece, counted from `length`."""
    return [*range(CHECKPOINT_INTERVAL - length % CHECKPOINT_INTERVAL, count, CHECKPOINT_INTERVAL), count]


@lru_cache(maxsize=1024)
def max_states(length: int) -> int:
    """Return the maximum number of states that a slot keeps for a text of this length."""
    return len(_checkpoint_lengths(length)) + 1  # plus the state before the latest commit


def _checkpoint_lengths(length: int) -> frozenset[int]:
    """Return the lengths for which a slot keeps states if its own length is `length`."""
    count = length // CHECKPOINT_INTERVAL
    powers = [1 << power for power in range(count.bit_length())]
    return frozenset({0, length, *(n * CHECKPOINT_INTERVAL for n in (*powers, count, max(0, count - 1)))})
