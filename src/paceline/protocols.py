"""The seams: targets and their caches. `drafters/base.py` has the drafters', `engine/engine.py` shows how they meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar

from paceline.types import DraftBudget, Forward, Rows, Want


class Pass(Protocol):
    """A cache made ready for one forward pass."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's keys and values [B, T, kv_heads, D] of the pass's rows, rotary applied."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the layer's keys and values, then attend.

        q [B, T, heads, D], k and v as for `write`. Returns [B, T, heads * D].
        Each row sees its slot's committed prefix, its ancestors and itself.
        """


class SharedPass(Pass, Protocol):
    """A pass over a cache where layers may share keys and values."""

    def look(self, layer: int, q: Tensor) -> Tensor:
        """Attend to the keys and values that this layer has written, or the earlier one whose keys and values it
        shares. q and the result: see `attend`."""


class RecurrentPass(Pass, Protocol):
    """A pass over a cache that keeps states of recurrent layers too."""

    def recur(self, layer: int, inputs: tuple[Tensor, ...]) -> Tensor:
        """Feed a recurrent layer with its inputs of the pass's rows, each [B, T, ...]. Returns its outputs [B, T, ...].

        Each row goes on from the state that its parent left. No state changes before the commit.
        """


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy of what was computed for the first `length` tokens of a text, for other requests that begin alike
    (the prefix cache). Caches and drafters that keep more than this derive from it."""

    length: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def most(self, length: int, prompt: int) -> int:
        """Return how many of the first `length` tokens a request with a prompt of `prompt` tokens can begin with."""
        return min(length, self.length)

    def holds(self, length: int, prompt: int) -> bool:
        """Whether it can begin with all of them."""
        return self.most(length, prompt) == length


def common_most(parts: Sequence[Saved], length: int, prompt: int) -> int:
    """Return how many of the first `length` tokens a request can begin with by all these parts."""
    while any((shorter := part.most(length, prompt)) < length for part in parts):
        length = shorter
    return length


PassT = TypeVar("PassT", covariant=True, default=Pass)


class KVCache(Protocol[PassT]):
    """Keys and values of every slot. It owns its layout, growth and lengths.

    Rows that are written but not committed are overwritten later: there is no rollback. Cost follows the length
    reached, never the capacity. `PassT`: what `begin` makes for the cache's own model, a `Pass` unless the model brings
    its own attention.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each slot."""

    @property
    def prompts(self) -> Sequence[int]:
        """Prompt length of each slot's request, for models whose rotary factors depend on the length of the text.

        It is fixed for the whole request, because keys made with one choice of factors cannot meet queries of another.
        """

    @property
    def adapters(self) -> Sequence[int]:
        """Adapter of each slot's request, as a number from 1 on in `Adaptable.adapters`; 0: none."""

    def acquire(self, prompt: int = 0, adapter: int = 0) -> int:
        """Return a free slot, of length 0, for a request with a prompt of `prompt` tokens and this adapter. Raises
        `OutOfMemory`."""

    def begin(self, rows: Rows) -> PassT:
        """Make room for the rows and return the pass that writes and reads them. Raises `OutOfMemory`."""

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """The part of a draft budget that the slot's next pass can verify exactly."""

    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep row 0 and then the rows of `paths[i]`, in this order, of slot i of a pass over `rows`; None keeps
        nothing. The only place where a slot's length grows.

        `rows` must belong to the slots' latest pass, which can be committed once. Raises `CacheError` for an earlier
        pass, and for a pass of a slot that was released since.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens. Raises `CacheError` unless 0 <= length <= the slot's length.

        A cache that no longer has what the next row would see (a sliding window that moved on, a state between two
        checkpoints) forgets more, or all: look at `lengths` and feed again what is missing.
        """

    def fork(self, slot: int) -> int:
        """Return a new slot that begins with all that `slot` has committed. Raises `OutOfMemory`."""

    def save(self, slot: int) -> Saved:
        """Return a copy of all that the slot has committed. It outlives the slot and the cache."""

    def load(self, slot: int, saved: Any, length: int) -> int:
        """Fill a fresh slot with the first `length` tokens of what a cache of the same target saved.

        Returns the slot's length: what `saved.most` says, which may be less (a state between two checkpoints) or 0 (a
        sliding window that has moved on, rotary factors for another length of text). Raises `OutOfMemory`.
        """

    def release(self, slot: int) -> None:
        """Give the slot back. Releasing a free slot does nothing. Every other use of one raises `CacheError`."""


class Target(Protocol):
    """A model that can verify: any number of rows in one pass, over a cache of its own making."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens (prompt and reply) of one slot."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self) -> KVCache[Any]: ...

    def forward(self, rows: Rows, cache: KVCache[Any], want: Want) -> Forward:
        """Feed the rows and write their keys and values; commit nothing. `cache` must come from `new_cache`."""


@runtime_checkable
class Divisible(Protocol):
    """A target of which a part shows how all of it computes."""

    def excerpt(self) -> Target:
        """Return the fewest first layers that have one of each kind, and the head's first outputs if its kernels treat
        all alike; the target itself where parts run otherwise."""


@runtime_checkable
class Adaptable(Protocol):
    """A target with adapters, of which each slot may have one (`KVCache.acquire`)."""

    @property
    def adapters(self) -> Sequence[str]:
        """Their names."""


@runtime_checkable
class EmbeddingAndHead(Protocol):
    """The parts of a target that a learned drafter borrows: embedding and output head."""

    @property
    def layers(self) -> int:
        """Number of layers: the taps are 0 to layers - 1, and "final"."""

    def embed(self, tokens: Tensor) -> Tensor:
        """From tokens, int64 of any shape [...], to the input of layer 0 [..., H], in the target's dtype."""

    def logits(self, x: Tensor) -> Tensor:
        """From normed states [..., H] (the tap "final", or a drafter's stand-in for it) to float32 logits [..., V]."""

    def head(self) -> Tensor:
        """The matrix [V, H] of the output head: a drafter is trained towards it."""

    def shaped(self, products: Tensor, tokens: Tensor) -> Tensor:
        """From products [..., C] of states with the rows of `head` of these tokens [C] to their logits, in place: with
        any bias, factor and bound."""


@runtime_checkable
class TargetWithHead(Target, EmbeddingAndHead, Protocol):
    """A target for learned drafters, which use its dtype and device, its embedding and its head."""

    @property
    def dtype(self) -> torch.dtype: ...


class Closable(ABC):
    """Something that holds a slot, a cache or a file until `close`, the end of its `with` block, or its deletion."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
