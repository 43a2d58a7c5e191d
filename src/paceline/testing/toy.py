"""A minimal target and a minimal cache. Read them before you write your own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.errors import CacheError
from paceline.protocols import KVCache, Saved
from paceline.types import DraftBudget, Forward, Rows, Tap, Want

Entry = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of one token: layer -> (key, value), each [kv_heads, D]."""


@dataclass(frozen=True, slots=True)
class SavedList(Saved):
    """A copy of a text's entries."""

    entries: tuple[Entry, ...]


class ListCache:
    """A `KVCache` made of lists: for each slot, the entries of its tokens in order. Slow, but easy to understand."""

    def __init__(self) -> None:
        self.prompts: list[int] = []  # slot -> prompt length of its request
        self.adapters: list[int] = []  # slot -> adapter number of its request
        self.lags: list[int] = []  # slot -> see `protocols.KVCache.lags`
        self._kept: list[list[Entry]] = []  # slot -> its committed tokens
        self._fed: dict[int, list[Entry]] = {}  # slot -> its uncommitted rows
        self._begun: dict[int, int] = {}  # slot -> number of its latest pass, if that is not committed
        self._free: list[int] = []

    @property
    def lengths(self) -> Sequence[int]:
        return [len(entries) for entries in self._kept]

    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        if not self._free:
            self._free.append(len(self._kept))
            self._kept.append([])
            self.prompts.append(0)
            self.adapters.append(0)
            self.lags.append(0)
        slot = self._free.pop()
        self.prompts[slot], self.adapters[slot], self.lags[slot] = prompt, adapter, lag
        return slot

    def begin(self, rows: Rows) -> ListPass:
        for slot, start, parents in zip(rows.slots, rows.starts, rows.parents, strict=True):
            # Rows that resume at a later layer keep the entries of earlier layers.
            earlier = self._fed.get(slot, [])[: len(parents) if rows.resume else start]
            self._fed[slot] = earlier + [{} for _ in parents[len(earlier) :]]
            self._begun[slot] = rows.number
        return ListPass(rows, [self._kept[slot] for slot in rows.slots], [self._fed[slot] for slot in rows.slots])

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        return budget

    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        for slot, path in zip(rows.slots, paths, strict=True):
            if path is not None:
                if self._begun.get(slot) != rows.number:
                    raise CacheError(f"not the latest pass of slot {slot}", "Commit the slot's latest pass, once")
                del self._begun[slot]
                fed = self._fed.pop(slot)
                self._kept[slot] += [fed[row] for row in (0, *path)]

    def truncate(self, slot: int, length: int) -> None:
        del self._kept[slot][length:]

    def fork(self, slot: int) -> int:
        new = self.acquire(self.prompts[slot], self.adapters[slot], self.lags[slot])
        self._kept[new] = list(self._kept[slot])
        return new

    def save(self, slot: int) -> SavedList:
        entries = tuple({i: (k.clone(), v.clone()) for i, (k, v) in entry.items()} for entry in self._kept[slot])
        tensors = tuple(x for entry in entries for pair in entry.values() for x in pair)
        return SavedList(len(entries), tensors, entries)

    def load(self, slot: int, saved: SavedList, length: int) -> int:
        self._kept[slot] = list(saved.entries[: saved.most(length, self.prompts[slot])])
        return len(self._kept[slot])

    def release(self, slot: int) -> None:
        if slot not in self._free:
            self._kept[slot] = []
            self._begun.pop(slot, None)
            self._free.append(slot)


class ListPass:
    """One pass over a `ListCache`."""

    def __init__(self, rows: Rows, kept: list[list[Entry]], fed: list[list[Entry]]) -> None:
        self._rows, self._kept, self._fed = rows, kept, fed

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See `protocols.Pass.write`."""
        for fed, start, keys, values in zip(self._fed, self._rows.starts, k, v, strict=True):
            for entry, key, value in zip(fed[start:], keys, values, strict=True):
                entry[layer] = key, value

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`."""
        self.write(layer, k, v)
        return torch.stack(
            [torch.stack([self._row(b, t, layer, x) for t, x in enumerate(rows)]) for b, rows in enumerate(q)]
        )

    def _row(self, b: int, t: int, layer: int, q: Tensor) -> Tensor:
        """Attend from one row with query q [heads, D] to all entries that it sees. Returns [heads * D]."""
        entries = self.seen(b, self._rows.starts[b] + t)
        keys, values = (torch.stack(x, 1) for x in zip(*(entry[layer] for entry in entries), strict=True))
        return F.scaled_dot_product_attention(q[:, None], keys, values, enable_gqa=True).flatten()

    def seen(self, b: int, row: int) -> list[Entry]:
        """Return the committed entries, then the entries of the row's ancestors from the root, then the row's own."""
        path: list[Entry] = []
        while row != NONE:
            path.append(self._fed[b][row])
            row = self._rows.parents[b][row]
        return self._kept[b] + path[::-1]


class ToyTarget:
    """A `Target` of random vectors with one attention head: each logit depends on all earlier tokens and their
    positions."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int = 37, context_length: int = 64, width: int = 16, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.vocab_size, self.context_length = vocab_size, context_length
        self._words = torch.randn(vocab_size, width, generator=draw, dtype=torch.float64)
        self._places = torch.randn(context_length, width, generator=draw, dtype=torch.float64)
        self._weights = torch.randn(3, width, width, generator=draw, dtype=torch.float64) / width**0.5

    def new_cache(self) -> ListCache:
        return ListCache()

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        x = self._words[rows.tokens] + self._places[rows.positions]  # [B, T, H]
        q, k, v = ((x @ weight)[:, :, None] for weight in self._weights)  # one head: [B, T, 1, H]
        final = x + cache.begin(rows).attend(0, q, k, v)
        wanted = {"all": final, "last": final[:, -1:], "none": final[:, :0]}[want.logits]
        states: dict[Tap, Tensor] = {0: x, "final": final}
        return Forward(wanted @ self._words.T, {tap: states[tap] for tap in want.taps if tap in states})
