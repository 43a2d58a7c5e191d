"""The seams. Whatever implements these works with the rest: targets, caches, drafters.

Nothing here speculates: `engine.py` shows how the parts meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.types import DraftBudget, Forward, Rows, Want


class Pass(Protocol):
    """A cache made ready for one forward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write this layer's keys and values of the pass's rows, then attend.

        q [B, T, heads, D], k and v [B, T, kv_heads, D], rotary applied. Returns [B, T, heads * D].
        Each row sees its slot's committed prefix, its ancestors and itself.
        """
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """What was computed of a text's first `length` tokens, in tensors of its own, for texts that begin alike
    (`prefix.py`). Those who keep more than this derive from it."""

    length: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def holds(self, length: int, prompt: int) -> bool:
        """Whether a request whose prompt has `prompt` tokens can begin with the first `length` of them."""
        return length <= self.length


class KVCache(Protocol):
    """Keys and values of every slot. It owns its layout, growth and lengths.

    Rows that are written but not committed are simply overwritten later: there is no rollback. Cost follows the
    length reached, never the capacity.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each slot."""
        ...

    @property
    def prompts(self) -> Sequence[int]:
        """The prompt's length of each slot's request: what a model goes by whose positions depend on the text's length.

        It is chosen once and for the whole request, because keys of one choice mean nothing to rows of another.
        """
        ...

    def acquire(self, prompt: int = 0) -> int:
        """A free slot, of length 0, for a request whose prompt has so many tokens. Raises `OutOfMemory`."""
        ...

    def begin(self, rows: Rows) -> Any:
        """Make room for the rows. Raises `OutOfMemory`.

        What it returns is between a cache and the model that made it: a `Pass`, or what a model of transformers takes.
        """
        ...

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """As much of a draft's budget as the slot's next pass can verify exactly."""
        ...

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep row 0 and then the rows of `path`, in this order: the only place where a slot's length grows."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens (0 <= length <= the slot's length).

        A cache that has dropped what the next row would see (a sliding window that moved on) forgets them all:
        look at `lengths` and feed again what is missing.
        """
        ...

    def fork(self, slot: int) -> int:
        """A new slot that begins with all that `slot` has committed. Raises `OutOfMemory`."""
        ...

    def save(self, slot: int) -> Saved:
        """A copy of all that the slot has committed. It outlives the slot, and the cache."""
        ...

    def load(self, slot: int, saved: Any, length: int) -> int:
        """A fresh slot begins with the first `length` tokens of what a cache of the same target saved.

        Returns how many it holds now: `length`, or 0 where `saved.holds` denies them (a sliding window that has moved
        on, keys turned for texts of another length). Raises `OutOfMemory`.
        """
        ...

    def release(self, slot: int) -> None:
        """Give the slot back. Releasing a free slot does nothing."""
        ...


class Target(Protocol):
    """A model that can verify: any number of rows in one pass, over a cache it made itself."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """The most tokens (prompt and reply) that one slot may reach."""
        ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self) -> KVCache: ...

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """Feed the rows, write their keys and values, commit nothing."""
        ...


@runtime_checkable
class Ends(Protocol):
    """What a learned drafter borrows of its target: where tokens enter, and where they come out."""

    @property
    def layers(self) -> int:
        """How many there are: the taps are 0 to layers - 1, and "final"."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens, int64 of any shape [...], to what enters layer 0 [..., H], in the target's dtype."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Normed states [..., H] (the tap "final", or what a drafter has for it) to float32 logits [..., V]."""
        ...

    def head(self) -> Tensor:
        """The matrix [V, H] that logits are made with: what a drafter is trained towards."""
        ...


@runtime_checkable
class Host(Target, Ends, Protocol):
    """A target that learned drafters can live beside: they take its dtype and device, and its ends."""

    @property
    def dtype(self) -> torch.dtype: ...
