"""The seams: targets and their caches. `drafters/base.py` has the drafters', `engine/engine.py` shows how they meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

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
    """Saved state of a text's first `length` tokens, for the prefix cache. Subclasses hold more."""

    length: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def holds(self, length: int, prompt: int) -> bool:
        """Whether a request with a prompt of `prompt` tokens can start from the first `length` tokens."""
        return length <= self.length


class KVCache(Protocol):
    """Keys and values of every slot. It owns its layout, growth and lengths.

    Rows that are not committed are overwritten later: there is no rollback. Cost follows the length reached, never the
    capacity.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each slot."""
        ...

    @property
    def prompts(self) -> Sequence[int]:
        """Prompt length of each slot's request, for models whose rotary factors depend on the text's length.

        It is fixed for the whole request: keys and rows must use the same factors.
        """
        ...

    def acquire(self, prompt: int = 0) -> int:
        """Return a free slot of length 0 for a request with a prompt of `prompt` tokens. Raises `OutOfMemory`."""
        ...

    def begin(self, rows: Rows) -> Any:
        """Make room for the rows. Raises `OutOfMemory`.

        What it returns is between a cache and the model that made it: a `Pass`, or what a model of transformers takes.
        """
        ...

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Return the part of a draft budget that the slot's next pass can verify exactly."""
        ...

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep row 0 and the rows of `path`, in this order: the only place where a slot's length grows."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens (0 <= length <= the slot's length).

        A cache that has dropped what the next row would see (a sliding window that moved on) forgets them all:
        look at `lengths` and feed again what is missing.
        """
        ...

    def fork(self, slot: int) -> int:
        """Return a new slot with a copy of what `slot` has committed. Raises `OutOfMemory`."""
        ...

    def save(self, slot: int) -> Saved:
        """Return a copy of what the slot has committed. It outlives the slot and the cache."""
        ...

    def load(self, slot: int, saved: Any, length: int) -> int:
        """Fill a fresh slot with the first `length` tokens that a cache of the same target saved.

        Returns the tokens it holds now: `length`, or 0 if `saved.holds` refuses them (a sliding window that has moved
        on, rotary factors of another length). Raises `OutOfMemory`.
        """
        ...

    def release(self, slot: int) -> None:
        """Give the slot back. Releasing a free slot does nothing."""
        ...


class Target(Protocol):
    """A model that verifies any number of rows in one pass, over a cache that it made."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """The most tokens (prompt and reply) of one slot."""
        ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self) -> KVCache: ...

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """Feed the rows, write their keys and values, commit nothing."""
        ...


@runtime_checkable
class Ends(Protocol):
    """The embedding and output head that a learned drafter borrows from its target."""

    @property
    def layers(self) -> int:
        """Number of layers: the taps are 0 to layers - 1, and "final"."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of layer 0 [..., H], in the target's dtype, for tokens [...] (int64)."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Return float32 logits [..., V] of normed states [..., H] (the tap "final", or a drafter's own)."""
        ...

    def head(self) -> Tensor:
        """Return the output matrix [V, H], which drafters are trained with."""
        ...


@runtime_checkable
class Host(Target, Ends, Protocol):
    """A target for learned drafters, which take its dtype, device, embedding and head."""

    @property
    def dtype(self) -> torch.dtype: ...


_Self = TypeVar("_Self", bound="Closable")


class Closable(ABC):
    """Something that holds a slot, a cache or a file until `close`, the end of its `with` block, or its deletion."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; closing twice does nothing."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
