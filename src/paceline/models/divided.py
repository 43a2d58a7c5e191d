"""Tensor parallelism behind the protocols `Target` and `KVCache`: a decoder that is split across ranks, and its
cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from paceline.cache.slab import SavedSlabs, SlabCache
from paceline.kernels.cpu.matrix import NativeLinear
from paceline.kernels.low_rank import Factors
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Progress
from paceline.models.lazy import Quantised
from paceline.models.mirror import Mirror, Mirrored, collective, repeated
from paceline.models.ranks import Ranks
from paceline.models.shards import RankTensors, divide
from paceline.protocols import KVCache
from paceline.types import Forward, Rows, Want


@dataclass(frozen=True, eq=False)
class SavedShards(SavedSlabs, Mirrored):
    """This rank's part of the keys and values that a slot has committed."""


class DividedCache(SlabCache, Mirrored):
    """The keys and values of this rank's heads."""

    acquire = repeated(SlabCache.acquire)
    fork = repeated(SlabCache.fork)
    commit = repeated(SlabCache.commit)
    truncate = repeated(SlabCache.truncate)
    load = repeated(SlabCache.load)
    release = repeated(SlabCache.release)

    @repeated
    def save(self, slot: int) -> SavedShards:
        """See `protocols.KVCache.save`."""
        saved = super().save(slot)
        return SavedShards(**{field.name: getattr(saved, field.name) for field in fields(saved)})


class DividedDecoder(Decoder, Mirrored):
    """This rank's part of a decoder. The part on rank 0 is the target, and calls of it are repeated on all other
    ranks."""

    _cache_type = DividedCache

    ranks: Ranks

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        mirror: Mirror,
        adapters: Sequence[Factors] = (),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """See `Decoder`. `tensors` and `adapters` are complete on every rank, and each rank takes its own part."""
        self.mirror, self.ranks = mirror, (ranks := mirror.ranks)
        with ranks.ended_by_failure():
            division = divide(config, tensors, ranks.count)
            spans = division.tokens()
            self._sizes, (self._first, self._end) = [end - first for first, end in spans], spans[ranks.rank]
            part = division.part(ranks.rank)
            own = RankTensors(tensors, division, ranks.rank)
            cut = tensors.over(own) if isinstance(tensors, Quantised) else own
            changes = [own.factors(adapter) for adapter in adapters]
            super().__init__(part, cut, dtype, device, progress, adapters=changes, kv_dtype=kv_dtype)
            if self._bias is not None:
                self._bias = self._gathered(self._bias)
            self.vocab_size = config.vocab_size
            self.config = replace(part, vocab_size=config.vocab_size)
            kernels = self._stack.native is None, type(self._head)
            ranks.check_alike((division, self.adapters, dtype, self.kv_dtype, device.type, *kernels))
            ranks.share_memory()
            mirror.hold(self)

    @repeated
    def excerpt(self) -> DividedDecoder:
        """See `protocols.Divisible`. The excerpt keeps the whole output head."""
        part = super().excerpt()
        assert isinstance(part, DividedDecoder)
        part._head = self._head
        return part

    @repeated
    def new_cache(self) -> SlabCache:
        cache = super().new_cache()
        assert isinstance(cache, DividedCache)
        cache.mirror = self.mirror
        return cache

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """See `protocols.Target.forward`."""
        cache.begin(rows)  # raise errors (misuse, no memory) before the other ranks start the pass
        return self.forward_part(rows, cache, want)

    @collective
    def forward_part(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """Run this rank's part of a pass. All ranks run it at the same time. Only rank 0 gets the logits."""
        return super().forward(rows, cache, want)

    @collective
    def embed(self, tokens: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`. The sum over the ranks is exact, because all ranks except one add zeros."""
        foreign = (tokens < self._first) | (tokens >= self._end)
        x = super().embed((tokens - self._first).masked_fill(foreign, 0))
        return self.ranks.sum(x.masked_fill(foreign[..., None], 0))

    @collective
    def logits(self, x: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        return self._gathered(super().logits(x))

    def _logits(self, head: NativeLinear, x: Tensor, rows: Rows) -> Tensor:
        return self._gathered(super()._logits(head, x, rows))

    @collective
    def head(self) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        return self._gathered(super().head().T).T.contiguous()

    def _gathered(self, logits: Tensor) -> Tensor:
        return self.ranks.gather(logits, self._sizes)
