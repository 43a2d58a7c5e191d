"""Faulty caches of recurrent states, as negative controls for the rollback tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.cache.state import StateCache, Tensors, _FedRows
from paceline.models.decoder import Decoder
from tests.support.hybrids import tiny_hybrid


class Kept(StateCache):
    """Keeps the state after rejected rows."""

    def _one_after(
        self, fed: _FedRows, layer: int, state: Tensors, path: Sequence[int], done: int, end: int
    ) -> Tensors:
        after = fed.after[layer]
        return after[max(after)] if after else super()._one_after(fed, layer, state, path, done, end)


class Twice(StateCache):
    """Applies the last row twice."""

    def _one_after(
        self, fed: _FedRows, layer: int, state: Tensors, path: Sequence[int], done: int, end: int
    ) -> Tensors:
        state, updates = super()._one_after(fed, layer, state, path, done, end), fed.updates[layer]
        return self.recurrences[layer].apply(state, updates, path[end - 1 : end]) if updates else state


class Sibling(StateCache):
    """Applies the row before the last row instead of it. In trees, this can be a sibling."""

    def _one_after(
        self, fed: _FedRows, layer: int, state: Tensors, path: Sequence[int], done: int, end: int
    ) -> Tensors:
        wrong = [*path[: end - 1], max(0, path[end - 1] - 1)] if fed.updates[layer] else path
        return super()._one_after(fed, layer, state, wrong, done, end)


class Forgets(StateCache):
    """Stores the latest state in all checkpoints."""

    def _after(self, slot: int, length: int, path: Sequence[int]) -> Any:
        found = super()._after(slot, length, path)
        return dict.fromkeys(found, found[length + len(path)])


def broken(
    kind: type[StateCache], dtype: torch.dtype = torch.float64, hybrid: Callable[..., Decoder] = tiny_hybrid
) -> Any:
    """Return a hybrid model with caches of this kind."""
    target = hybrid(dtype=dtype)
    make = target.new_cache

    def new_cache() -> StateCache:
        cache = make()
        cache.__class__ = kind
        assert isinstance(cache, StateCache)
        return cache

    target.new_cache = new_cache  # type: ignore[method-assign]
    return target
