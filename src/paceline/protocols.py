"""The protocols of targets and their caches. Drafters are in `drafters/base.py`; `engine/engine.py` uses all of
them."""

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
    """One forward pass's view of a cache, which holds room for the rows of the pass."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the pass's rows for a layer.

        Args:
            layer: Number of the layer.
            k: Keys after rotary embeddings, [B, T, kv_heads, D].
            v: Values, [B, T, kv_heads, D].
        """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values of a layer, then attend. Each row sees its slot's committed prefix, its ancestors and
        itself.

        A model may also do this itself: the CPU kernels store and attend in C++ (`models.cpu_layers.NativeLayers.run`,
        `write_head` in kernels/cpu/attention.h).

        Args:
            layer: Number of the layer.
            q: Queries, [B, T, heads, D].
            k: See `write`.
            v: See `write`.

        Returns:
            [B, T, heads * D].
        """


class SharedPass(Pass, Protocol):
    """A pass over a cache with layers that share keys and values."""

    def look(self, layer: int, q: Tensor) -> Tensor:
        """Attend to the stored keys and values of this layer, or of the earlier layer with which it shares them.

        For `q` and the result see `attend`.
        """


class RecurrentPass(Pass, Protocol):
    """A pass over a cache that also keeps the states of recurrent layers."""

    def recur(self, layer: int, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run a recurrent layer. Each row starts from the state after its parent. No state changes before the commit.

        Args:
            layer: Number of the layer.
            inputs: Inputs of the layer for the pass's rows, each [B, T, ...].

        Returns:
            [B, T, ...].
        """


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy of the state after the first `length` tokens of a text, for requests with the same prefix (the prefix
    cache).

    Caches and drafters that keep other state as well derive from this class.
    """

    length: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def most(self, length: int, prompt: int) -> int:
        """Return how many of the first `length` tokens a request with a prompt of `prompt` tokens can reuse."""
        return min(length, self.length)

    def holds(self, length: int, prompt: int) -> bool:
        """Return True if such a request can reuse all `length` tokens."""
        return self.most(length, prompt) == length


def common_most(parts: Sequence[Saved], length: int, prompt: int) -> int:
    """Return how many of the first `length` tokens a request can reuse from all these parts."""
    while any((shorter := part.most(length, prompt)) < length for part in parts):
        length = shorter
    return length


@runtime_checkable
class Restorer(Protocol):
    """A cache whose saved copies refer to functions of the model, which a file cannot hold."""

    def restored(self, saved: Any) -> Saved:
        """Return a copy that was read from a file, with this cache's functions."""


def restored(cache: object, saved: Saved) -> Saved:
    """Return a copy that was read from a file, ready for a cache of the same model."""
    return cache.restored(saved) if isinstance(cache, Restorer) else saved


PassT = TypeVar("PassT", covariant=True, default=Pass)


class KVCache(Protocol[PassT]):
    """Keys and values of all slots. The cache owns its layout, growth and lengths.

    Rows that are written but not committed are overwritten later, so there is no rollback. Costs depend on the length
    that a slot has reached, never on the capacity. `PassT` is the type that `begin` returns. It is `Pass`, unless the
    model has its own attention.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Number of committed tokens of each slot."""

    @property
    def prompts(self) -> Sequence[int]:
        """Prompt length of each slot's request, for models with rotary factors that depend on the length of the text.

        It stays the same for the whole request, because keys and queries must use the same factors.
        """

    @property
    def adapters(self) -> Sequence[int]:
        """Adapter of each slot's request: a number in `Adaptable.adapters` starting at 1, or 0 for none."""

    @property
    def lags(self) -> Sequence[int]:
        """Difference between the length of each slot's text and its next rotary position, after the prompt.

        It is above 0 after images in models with M-RoPE: an image takes fewer positions than rows.
        """

    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        """Return a free slot of length 0.

        Args:
            prompt: Length of the request's prompt, in tokens.
            adapter: See `adapters`.
            lag: See `lags`.

        Raises:
            OutOfMemory: If there is no memory for a slot.
        """

    def begin(self, rows: Rows) -> PassT:
        """Make room for rows, and return the pass that writes and reads them.

        Raises:
            OutOfMemory: If there is no memory for the rows.
        """

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Return the part of a draft budget that the slot's next pass can verify exactly."""

    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the accepted rows of a pass. Only this call increases the length of a slot.

        Args:
            rows: Rows of the latest pass of these slots, which can be committed once.
            paths: Accepted rows of each slot, in order, after row 0, which is always kept. None keeps nothing.

        Raises:
            CacheError: If `rows` belongs to an earlier pass, or a slot has been released since.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Drop all tokens after the first `length`.

        A cache may drop more if it no longer has the state at that length (a sliding window that moved on, a state
        between two checkpoints). Look at `lengths`, and feed the missing tokens again.

        Raises:
            CacheError: Unless 0 <= length <= the slot's length.
        """

    def fork(self, slot: int) -> int:
        """Return a new slot with a copy of everything that `slot` has committed.

        Raises:
            OutOfMemory: If there is no memory for a slot.
        """

    def save(self, slot: int) -> Saved:
        """Return a copy of everything that the slot has committed. It outlives the slot and the cache."""

    def load(self, slot: int, saved: Any, length: int) -> int:
        """Fill a new slot from a saved copy of a cache of the same target.

        Args:
            slot: A slot of length 0.
            saved: Result of `save`.
            length: Number of tokens to load.

        Returns:
            The new length of the slot, `saved.most`. It may be lower than `length` (a state between two checkpoints),
            or 0 (a sliding window that moved on, or rotary factors for another text length).

        Raises:
            OutOfMemory: If there is no memory for the tokens.
        """

    def release(self, slot: int) -> None:
        """Release a slot. Releasing a free slot does nothing. Any other use of a free slot raises `CacheError`."""


class Target(Protocol):
    """A model that computes any number of rows in one pass, over a cache that it creates."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens (prompt and reply) of a slot."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self) -> KVCache[Any]: ...

    def forward(self, rows: Rows, cache: KVCache[Any], want: Want) -> Forward:
        """Compute rows and store their keys and values, without committing them.

        Args:
            rows: Rows to compute.
            cache: A cache from `new_cache`.
            want: Requested outputs.
        """


@runtime_checkable
class Divisible(Protocol):
    """A target that can be represented by a part of it, for self-checks."""

    @property
    def rows_are_independent(self) -> bool:
        """True if the order of every sum does not depend on the number of rows, so that a row has the same bits in any
        pass."""

    def excerpt(self) -> Target:
        """Return a target of the first layers, as few as include each kind of layer.

        It has only the first outputs of the head if the kernels treat all outputs in the same way. If parts would be
        computed differently, return the target itself.
        """


@runtime_checkable
class Adaptable(Protocol):
    """A target with adapters. Each slot may use one of them (`KVCache.acquire`)."""

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters."""


@runtime_checkable
class EmbeddingAndHead(Protocol):
    """The parts of a target that a learned drafter uses: embedding and output head."""

    @property
    def layers(self) -> int:
        """Number of layers. The taps are 0 to layers - 1, and "final"."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of layer 0 for tokens (int64 [...]), [..., H] in the target's dtype."""

    def logits(self, x: Tensor) -> Tensor:
        """Return float32 logits [..., V] for normed states [..., H]: the tap "final", or a drafter's prediction of
        it."""

    def head(self) -> Tensor:
        """Return the matrix [V, H] of the output head, which is used to train drafters."""

    def shaped(self, products: Tensor, tokens: Tensor) -> Tensor:
        """Convert products of states with rows of `head` to logits, in place, with the target's bias, factor and bound.

        Args:
            products: [..., C].
            tokens: Tokens of the rows, [C].
        """


@runtime_checkable
class TargetWithHead(Target, EmbeddingAndHead, Protocol):
    """A target for learned drafters, which use its dtype, device, embedding and head."""

    @property
    def dtype(self) -> torch.dtype: ...


class Closable(ABC):
    """An object that holds a slot, a cache or a file until `close`, the end of its `with` block, or its deletion."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that is held. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
