"""Attention by its plain formula, over everything that was ever written to a cache."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention
from paceline.cache.kv_types import from_stored, to_stored
from paceline.cache.slab import SlabCache
from paceline.kernels.cpu.attention import attend, padded_size
from paceline.types import Draft, Rows
from tests.support.trees import path_to

CPU = torch.device("cpu")
HEADS, KV, D = 4, 2, 8
LAYERS = [
    LayerAttention(scale=0.3),
    LayerAttention(scale=0.5, window=20),
    LayerAttention(scale=0.4, window=700, softcap=5.0),
    LayerAttention(scale=0.2, window=20, softcap=2.0),
    LayerAttention(scale=0.3, window=20, chunked=True),
]


class Witness:
    """Feeds a cache and remembers every committed key and value."""

    def __init__(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        kind: type[SlabCache] = SlabCache,
        stored: torch.dtype | None = None,
        kernel: bool = False,
    ) -> None:
        """Create an empty cache.

        Args:
            seed: Seed of the random numbers.
            dtype: Dtype of queries and results.
            kind: Class of the cache.
            stored: Dtype of keys and values, if it is not `dtype`. The witness then remembers the stored values.
            kernel: True to compute attention with the CPU kernels, over padded heads.
        """
        layers = [replace(layer, kernel=attend) for layer in LAYERS] if kernel else LAYERS
        self.cache = kind(layers, KV, padded_size(D) if kernel else D, 4096, stored or dtype, CPU)
        self.error = 1e-9 if dtype == torch.float64 and not stored else 1e-5
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.history: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def acquire(self) -> int:
        slot = self.cache.acquire()
        empty = torch.zeros(0, KV, D, dtype=self.dtype)
        self.history[slot] = [(empty, empty)] * len(LAYERS)
        return slot

    @torch.inference_mode()
    def feed(self, rows: Rows, paths: list[list[int]]) -> None:
        """Run one pass and check each row, then commit one path per slot."""
        b, t = rows.tokens.shape
        view = self.cache.begin(rows)
        for layer, how in enumerate(LAYERS):
            q, k, v = (self.draw(b, t, heads) for heads in (HEADS, KV, KV))
            mixed = view.attend(layer, q, k, v)
            k, v = map(self.stored, (k, v))
            for line, slot in enumerate(rows.slots):
                real = rows.counts[line]
                checked = [*(range(real) if real < 32 else range(5, real, 40))]
                of = (rows.parents[line], q[line], k[line], v[line])
                expected = torch.stack([self.expected(how, slot, layer, row, *of) for row in checked])
                torch.testing.assert_close(mixed[line, checked], expected, rtol=0, atol=self.error)
                kept = [0, *paths[line]]
                keys, values = self.history[slot][layer]
                new = (torch.cat([keys, k[line, kept]]), torch.cat([values, v[line, kept]]))
                self.history[slot] = [*self.history[slot][:layer], new, *self.history[slot][layer + 1 :]]
        self.cache.commit(rows, paths)

    def stored(self, x: Tensor) -> Tensor:
        return from_stored(to_stored(x, self.cache.slabs[0].tensors[0]), self.dtype)[..., :D]

    def draw(self, b: int, t: int, heads: int) -> Tensor:
        return torch.randn(b, t, heads, D, generator=self.random, dtype=self.dtype)

    def expected(self, how, slot, layer, row, parents, q, k, v) -> Tensor:  # type: ignore[no-untyped-def]
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        old_keys, old_values = self.history[slot][layer]
        seen = length = len(old_keys) + len(path)
        if how.window:
            seen = min(length, (length - 1) % how.window + 1 if how.chunked else how.window)
        old = slice(len(old_keys) - max(0, seen - len(path)), None)
        keys, values = (torch.cat([kept[old], new[path[-seen:]]]) for kept, new in ((old_keys, k), (old_values, v)))
        scores = torch.einsum("kgd,lkd->kgl", q[row].view(KV, HEADS // KV, D), keys) * how.scale
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        return torch.einsum("kgl,lkd->kgd", scores.softmax(-1), values).flatten()


def random_tree(rng: random.Random, most: int) -> Draft:
    count = rng.randint(0, most)
    return Draft(tuple(range(count)), tuple(rng.randint(0, node) for node in range(count)))


def some_path(rng: random.Random, draft: Draft) -> list[int]:
    return path_to(draft, rng.randint(0, len(draft.tokens)))[-2::-1]
