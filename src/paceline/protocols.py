"""Interfaces of targets and their KV caches, through which the engine uses any model. `drafters/base.py` defines
drafters."""

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
    """The cache as one forward pass sees it. Memory for the rows of the pass has already been reserved."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store one layer's keys and values for the rows of the pass.

        Args:
            layer: Index of the layer.
            k: Keys after rotary embeddings, [B, T, kv_heads, D].
            v: Values, [B, T, kv_heads, D].
        """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store one layer's keys and values, then attend. Each row sees its slot's committed prefix, its ancestors and
        itself.

        Models that run on the CPU kernels do not call this: the kernels store and attend in C++
        (`models.cpu_layers.NativeLayers.run`, `write_head` in kernels/cpu/attention.h).

        Args:
            layer: Index of the layer.
            q: Queries, [B, T, heads, D].
            k: See `write`.
            v: See `write`.

        Returns:
            Attention output, [B, T, heads * D].
        """


class SharedPass(Pass, Protocol):
    """A pass over the cache of a model whose layers may share keys and values."""

    def look(self, layer: int, q: Tensor) -> Tensor:
        """Attend to the stored keys and values of this layer, or of the earlier layer that shares them with this layer.

        `attend` describes `q` and the result.
        """


class RecurrentPass(Pass, Protocol):
    """A pass over a cache that also keeps the states of recurrent layers."""

    def recur(self, layer: int, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run a recurrent layer. Each row starts from the state after its parent. The stored states change only in
        `KVCache.commit`.

        Args:
            layer: Index of the layer.
            inputs: The layer's inputs for the rows of the pass, each [B, T, ...].

        Returns:
            Output of the layer, [B, T, ...].
        """


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy of what a KV cache or a drafter holds after the first `length` tokens of a text. The prefix cache keeps it
    for requests that begin with the same tokens.

    Caches and drafters that need more than tensors to restore their state define a subclass.
    """

    length: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def most(self, length: int, prompt: int) -> int:
        """Return how many of the first `length` tokens can be reused by a request whose prompt has `prompt` tokens."""
        return min(length, self.length)

    def holds(self, length: int, prompt: int) -> bool:
        """Return True if all of the first `length` tokens can be reused by such a request."""
        return self.most(length, prompt) == length


def common_most(parts: Sequence[Saved], length: int, prompt: int) -> int:
    """Return how many of the first `length` tokens can be reused from every one of these saved states (see
    `Saved.most`)."""
    while any((shorter := part.most(length, prompt)) < length for part in parts):
        length = shorter
    return length


@runtime_checkable
class Restorer(Protocol):
    """A cache whose saved copies contain functions of the model. A file cannot hold functions, so they are put back
    after a copy has been read from a file."""

    def restored(self, saved: Any) -> Saved:
        """Return a saved copy that was read from a file, with this cache's functions put back."""


def restored(cache: object, saved: Saved) -> Saved:
    """Return a saved copy that was read from a file, ready to be loaded into this cache."""
    return cache.restored(saved) if isinstance(cache, Restorer) else saved


PassT = TypeVar("PassT", covariant=True, default=Pass)


class KVCache(Protocol[PassT]):
    """Keys and values of all slots (one slot per request). The cache manages its own layout, growth and lengths.

    Rejected rows need no rollback: rows that were written but not committed are simply overwritten later. The cost of a
    pass depends on the lengths of its slots, never on the capacity. `PassT` is the type that `begin` returns. It is
    `Pass`, unless the model expects another type of cache object, as transformers' models do.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Number of committed tokens of each slot."""

    @property
    def prompts(self) -> Sequence[int]:
        """Prompt length of each slot's request, for models whose rotary factors depend on the length of the text.

        It stays the same for the whole request, because keys and queries must use the same factors.
        """

    @property
    def adapters(self) -> Sequence[int]:
        """Adapter of each slot's request: its index in `Adaptable.adapters`, counted from 1, or 0 for no adapter."""

    @property
    def lags(self) -> Sequence[int]:
        """For each slot, the difference between the position in the text and the rotary position, for tokens after the
        prompt.

        It is above 0 if the prompt contains an image and the model uses M-RoPE, because an image takes fewer rotary
        positions than rows.
        """

    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        """Take a free slot, with length 0, and return it.

        Args:
            prompt: Length of the request's prompt, in tokens.
            adapter: See `adapters`.
            lag: See `lags`.

        Raises:
            OutOfMemory: If there is no memory for a slot.
        """

    def begin(self, rows: Rows) -> PassT:
        """Make room for the rows of a pass, and return the pass, which writes and reads them.

        Raises:
            OutOfMemory: If there is no memory for the rows.
        """

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Limit a draft budget to what the slot's next pass can verify with the same results as plain decoding. For
        example, a cache may support only chains."""

    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the accepted rows of a pass. Only this call increases the length of a slot.

        Args:
            rows: Rows of the latest pass of these slots. A pass can be committed once.
            paths: For each slot, the accepted rows after row 0, in order. Row 0 is always kept. None keeps no row of
                the slot.

        Raises:
            CacheError: If `rows` belongs to an earlier pass, or a slot has been released in the meantime.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Drop all tokens after the first `length`.

        A cache drops more tokens if it no longer has the state at that length, for example because a sliding window has
        moved past it or the length lies between two checkpoints of recurrent states. Read `lengths` afterwards, and
        feed the missing tokens again.

        Raises:
            CacheError: If `length` is negative or greater than the slot's length.
        """

    def fork(self, slot: int) -> int:
        """Copy everything that `slot` has committed to a new slot, and return the new slot.

        Raises:
            OutOfMemory: If there is no memory for a slot.
        """

    def save(self, slot: int) -> Saved:
        """Return a copy of everything that the slot has committed. It outlives the slot and the cache."""

    def load(self, slot: int, saved: Any, length: int) -> int:
        """Fill a new slot from a saved copy, which may come from another cache of the same target.

        Args:
            slot: A slot of length 0.
            saved: Result of `save`.
            length: Number of tokens to load.

        Returns:
            The new length of the slot, which is `saved.most`. It is lower than `length` if `length` lies between two
            checkpoints of recurrent states. It is 0 if a sliding window no longer holds the entries that are needed, or
            if the rotary factors are for another prompt length.

        Raises:
            OutOfMemory: If there is no memory for the tokens.
        """

    def release(self, slot: int) -> None:
        """Free a slot. Releasing a free slot does nothing. Any other use of a free slot raises `CacheError`."""


class Target(Protocol):
    """A model that computes any number of rows in one pass, over a cache that its `new_cache` created."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Maximum length of a slot's text (prompt and reply), in tokens."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self) -> KVCache[Any]: ...

    def forward(self, rows: Rows, cache: KVCache[Any], want: Want) -> Forward:
        """Compute rows and store their keys and values in the cache, without committing them.

        Args:
            rows: Rows to compute.
            cache: A cache that `new_cache` returned.
            want: Requested outputs.
        """


@runtime_checkable
class Measurable(Protocol):
    """A target that knows the memory of its texts."""

    def cache_bytes(self, tokens: int) -> int:
        """Return the size, in bytes, of the keys and values of a text of `tokens` tokens."""


@runtime_checkable
class Divisible(Protocol):
    """A target that can make a small excerpt of itself. Self-checks run the excerpt instead of the whole model, to save
    time."""

    @property
    def rows_are_independent(self) -> bool:
        """True if no sum is computed in an order that depends on the number of rows. A row then has the same bits in
        any pass."""

    def excerpt(self) -> Target:
        """Return a target made of the first layers, with as few layers as possible but every kind of layer.

        Its output head keeps only the first tokens of the vocabulary if the kernels compute all logits alike. If the
        excerpt would be computed differently from the whole model, return the target itself.
        """


@runtime_checkable
class Adaptable(Protocol):
    """A target with adapters. Each slot uses one adapter or none (`KVCache.acquire`)."""

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters."""


@runtime_checkable
class EmbeddingAndHead(Protocol):
    """The parts of a target that a learned drafter uses: embedding and output head."""

    @property
    def layers(self) -> int:
        """Number of layers. The taps are 0 to `layers` - 1, and "final"."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of layer 0 for token ids.

        Args:
            tokens: int64 [...].

        Returns:
            [..., H], in the target's dtype.
        """

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits for normed states.

        Args:
            x: The tap "final", or a drafter's prediction of it, [..., H].

        Returns:
            float32 [..., V].
        """

    def head(self) -> Tensor:
        """Return the weight matrix of the output head, [V, H]. Training uses it."""

    def shaped(self, products: Tensor, tokens: Tensor) -> Tensor:
        """Finish logits that were computed as states times rows of `head`: add the bias, and apply the scale and the
        softcap, in place.

        Args:
            products: Dot products of states with C rows of `head`, [..., C].
            tokens: Token ids of these rows, [C].
        """


@runtime_checkable
class TargetWithHead(Target, EmbeddingAndHead, Protocol):
    """A target that learned drafters can use: they need its dtype, device, embedding and head."""

    @property
    def dtype(self) -> torch.dtype: ...


class Closable(ABC):
    """An object that holds a slot, a cache or a file until it is closed, deleted, or its `with` block ends."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that the object holds. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
