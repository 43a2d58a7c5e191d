"""State of recurrent layers: what a text has left in them, kept at a few of its lengths.

Attention finds every token of a text in the cache, so a rejected token costs nothing: it is overwritten. A recurrent
layer has one state for the whole text, and a token that went into it cannot be taken out. So here a pass never changes
a state. It leaves what each of its rows *would* change, its update, which is far smaller than a state; a commit takes
the state before the pass and applies the updates of the accepted rows, in their order and by the operations of the
pass, so that the bits are those of a pass over these rows alone. Nothing goes through the model twice.

States are never written to, so copies (forks, prefix cache, checkpoints) are references.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPass, SlabPlan
from paceline.cache.layout import NONE
from paceline.cache.slab import SavedSlabs, SlabCache
from paceline.protocols import Saved
from paceline.types import Rows

Tensors = tuple[Tensor, ...]
State = Mapping[int, Tensors]
"""Recurrent layer -> its state after one text."""

CHECKPOINT = 256
"""States are kept where a text's length is a multiple of this, which is where prompts are cut into chunks."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The rows that one slot has fed since its last commit: `parents` of all of them (see `types.Rows`), of which those
    before `start` were fed by earlier passes."""

    parents: tuple[int, ...]
    start: int = 0

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(NONE, len(self.parents) - 1))

    def history(self, count: int) -> Tensor:
        """For each row of the pass the last `count` entries of its text, its own last: int64 [T, count], numbered
        through the last `count` - 1 entries of the committed text and then all rows."""
        return _history(self.parents, count)[self.start :]


@lru_cache(maxsize=256)
def _history(parents: tuple[int, ...], count: int) -> Tensor:
    before, lines = list(range(count - 1)), list[list[int]]()
    for row, parent in enumerate(parents):
        above = before if parent == NONE else lines[parent]
        lines.append([*above, count - 1 + row][-count:])
    return torch.tensor(lines)


class Recurrence(ABC):
    """A layer's state, and how rows change it.

    A row's result must have the same bits whatever other rows its pass has, unless the pass is part of a prompt; and
    `apply` those of `scan`.
    """

    @abstractmethod
    def empty(self) -> Tensors:
        """The state before a text."""

    @abstractmethod
    def scan(
        self, state: Tensors, earlier: Tensors | None, tree: Tree, inputs: Tensors, prompt: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        """Feed the rows of a pass, from the state before the tree. Writes to no argument.

        `earlier`: the updates of the tree's first rows, those before `tree.start`, each [start, ...]. `inputs`, each
        [T, ...]: those of the pass's rows. `prompt`: the rows are a chain of any length, whose end alone is needed.
        Returns the outputs [T, ...], the rows' updates, each [T, ...] (or () for a prompt), and the state after the
        last row if the tree is a chain.
        """

    @abstractmethod
    def apply(self, state: Tensors, updates: Tensors, rows: Sequence[int]) -> Tensors:
        """Return the state after these rows, in their order."""


@dataclass(slots=True)
class _Fed:
    """Rows that a slot fed since its last commit: by layer the updates of its rows, and the states after the first n
    rows of a chain."""

    updates: dict[int, Tensors] = field(default_factory=dict)
    after: dict[int, dict[int, Tensors]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedHybrid(Saved):
    """Keys and values of a slot, and states by the length of the text."""

    slabs: SavedSlabs
    states: Mapping[int, State]

    def most(self, length: int, prompt: int) -> int:
        """A text can go on only from where there is a state."""
        return max((n for n in self.states if n <= length and self.slabs.holds(n, prompt)), default=0)


class StateCache(SlabCache):
    """A `SlabCache` for models that have recurrent layers too.

    A slot has states at its length, at the length before its latest commit, and at checkpoints: the last two multiples
    of `CHECKPOINT` and those that are a power of two times it. `truncate` and `load` go back to the nearest of them.
    """

    def __init__(self, recurrences: Mapping[int, Recurrence], *args: Any) -> None:
        """`recurrences`: by layer. For the rest see `SlabCache`."""
        super().__init__(*args)
        self.recurrences = recurrences
        self._states: dict[int, dict[int, State]] = {}
        """Taken slot -> length of its text -> the state after it."""
        self._fed: dict[int, _Fed] = {}

    @torch.inference_mode()
    def acquire(self, prompt: int = 0, adapter: int = 0) -> int:
        slot = super().acquire(prompt, adapter)
        self._states[slot] = {0: {layer: one.empty() for layer, one in self.recurrences.items()}}
        self._fed[slot] = _Fed()
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
        kept = {n: states[n] for n in sorted(states) if n in _kept(self.lengths[slot])}
        tensors = (x for state in kept.values() for layer in state.values() for x in layer)
        return SavedHybrid(slabs.length, (*slabs.tensors, *tensors), slabs, kept)

    def load(self, slot: int, saved: SavedHybrid, length: int) -> int:  # type: ignore[override]
        """See `protocols.KVCache.load`."""
        length = super().load(slot, saved.slabs, saved.most(length, self.prompts[slot]))
        self._states[slot] |= {n: state for n, state in saved.states.items() if n <= length}
        return length

    def truncate(self, slot: int, length: int) -> None:
        """See `protocols.KVCache.truncate`."""
        self.check_length(slot, length)
        super().truncate(slot, max(n for n in self._states[slot] if n <= length))
        length = self.lengths[slot]
        self._states[slot] = {n: state for n, state in self._states[slot].items() if n <= length}

    def begin(self, rows: Rows) -> StatePass:
        """See `protocols.KVCache.begin`."""
        attention = super().begin(rows)
        if rows.resume is None:
            self._fed |= {slot: _Fed() for slot, start in zip(rows.slots, rows.starts, strict=True) if not start}
        fed = [self._fed[slot] for slot in rows.slots]
        before = [self._states[slot][length] for slot, length in zip(rows.slots, rows.lengths, strict=True)]
        return StatePass(attention.plans, self._layers, self._indices, rows, self.recurrences, before, fed)

    @torch.inference_mode()
    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        """See `protocols.KVCache.commit`. The state before it stays, so that a round that failed half-way can be
        repeated."""
        for i, (slot, length, path) in enumerate(zip(rows.slots, rows.lengths, paths, strict=True)):
            if path is not None:
                self.check_commit(slot, rows, i)
                states, taken = self._states[slot], [0, *path]
                states |= self._after(slot, length, taken)
                kept = {*_kept(length + len(taken)), length}
                self._states[slot] = {n: state for n, state in states.items() if n in kept}
        super().commit(rows, paths)

    def _after(self, slot: int, length: int, path: Sequence[int]) -> dict[int, State]:
        """The states after a text of `length` tokens and these rows, and at the checkpoints in between."""
        fed, state, done, found = self._fed[slot], self._states[slot][length], 0, dict[int, State]()
        for end in _ends(length, len(path)):
            # A model's excerpt feeds its first layers alone.
            fresh = {layer: self._one_after(fed, layer, state[layer], path, done, end) for layer in fed.updates}
            state = {**state, **fresh}
            found[length + end], done = state, end
        return found

    def _one_after(self, fed: _Fed, layer: int, state: Tensors, path: Sequence[int], done: int, end: int) -> Tensors:
        """One layer's state after the first `end` rows of a path, from that after `done` of them."""
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
        fed: Sequence[_Fed],
    ) -> None:
        """`plans`, `layers`, `indices`: see `SlabPass`. `before`: for each slot the states before its rows. `fed`: for
        each slot the rows since its last commit, to which `recur` adds."""
        # Prompts too by the sums that keep bits: then, where the rest keeps them, a text may go on from any state.
        super().__init__(plans, layers, indices, False)
        self._rows, self._recurrences, self._before, self._fed = rows, recurrences, before, fed
        ends = [start + count for start, count in zip(rows.starts, rows.counts, strict=True)]
        self._trees = [Tree(p[:end], start) for p, end, start in zip(rows.parents, ends, rows.starts, strict=True)]

    def recur(self, layer: int, inputs: Tensors) -> Tensor:
        """See `protocols.RecurrentPass.recur`."""
        counts = self._rows.counts
        lines = [self._recur(layer, b, tuple(x[b, :count] for x in inputs)) for b, count in enumerate(counts)]
        room = inputs[0].shape[1]
        # Padding repeats the first row's token, and so its output (see `SlabPass.attend`).
        return torch.stack([torch.cat([x, x[:1].expand(room - len(x), *x.shape[1:])]) for x in lines])

    def _recur(self, layer: int, b: int, inputs: Tensors) -> Tensor:
        """The outputs [T, ...] of one slot's rows."""
        if self._rows.prefill:
            return self._prompt(layer, b, inputs)
        tree, fed, recurrence = self._trees[b], self._fed[b], self._recurrences[layer]
        start, state = tree.start, self._before[b][layer]
        earlier = tuple(x[:start] for x in fed.updates[layer]) if start else None
        ends = fed.after.setdefault(layer, {}) if start else {}
        if tree.is_chain and start in ends:
            out, updates, end = recurrence.scan(ends[start], None, _chain(len(tree.parents) - start), inputs, False)
        else:
            out, updates, end = recurrence.scan(state, earlier, tree, inputs, False)
        fed.updates[layer] = tuple(map(torch.cat, zip(earlier, updates, strict=True))) if earlier else updates
        fed.after[layer] = {} if end is None else {len(tree.parents): end}
        return out

    def _prompt(self, layer: int, b: int, inputs: Tensors) -> Tensor:
        """As `_recur` for a prompt's chunk, in parts that end at checkpoints."""
        state, fed, parts, done = self._before[b][layer], self._fed[b], list[Tensor](), 0
        fed.updates[layer], fed.after[layer] = (), {}
        for end in _ends(self._rows.lengths[b], len(inputs[0])):
            chunk = tuple(x[done:end] for x in inputs)
            out, _, after = self._recurrences[layer].scan(state, None, _chain(end - done), chunk, True)
            assert after is not None
            state = fed.after[layer][end] = after
            parts.append(out)
            done = end
        return torch.cat(parts)


def _chain(count: int) -> Tree:
    return Tree(tuple(range(NONE, count - 1)))


def _ends(length: int, count: int) -> list[int]:
    """Return the numbers, from 1, of those of the next `count` tokens that end at a checkpoint, and of the last one."""
    return [*range(CHECKPOINT - length % CHECKPOINT, count, CHECKPOINT), count]


@lru_cache(maxsize=1024)
def held(length: int) -> int:
    """Return the number of states that a slot keeps at most after a text of this length."""
    return len(_kept(length)) + 1  # and the one before its latest commit


def _kept(length: int) -> frozenset[int]:
    """Lengths at which a slot of this length keeps its states."""
    count = length // CHECKPOINT
    powers = [1 << power for power in range(count.bit_length())]
    return frozenset({0, length, *(n * CHECKPOINT for n in (*powers, count, max(0, count - 1)))})
