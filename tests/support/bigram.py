"""The smallest possible target: a table with the logits after each token, for tests that need thousands of texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.protocols import KVCache, Pass, Saved
from paceline.types import DraftBudget, Forward, Rows, Want


class Lengths:
    """A cache that stores only lengths."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.prompts: list[int] = []

    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        self.lengths.append(0)
        self.prompts.append(prompt)
        return len(self.lengths) - 1

    def begin(self, rows: Rows) -> Pass:
        raise NotImplementedError("there are no layers")

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        return budget

    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        for slot, path in zip(rows.slots, paths, strict=True):
            self.lengths[slot] += 0 if path is None else 1 + len(path)

    def truncate(self, slot: int, length: int) -> None:
        self.lengths[slot] = length

    def fork(self, slot: int) -> int:
        self.lengths.append(self.lengths[slot])
        self.prompts.append(self.prompts[slot])
        return len(self.lengths) - 1

    def save(self, slot: int) -> Saved:
        return Saved(self.lengths[slot], ())

    def load(self, slot: int, saved: Saved, length: int) -> int:
        self.lengths[slot] = length
        return length

    def release(self, slot: int) -> None:
        self.lengths[slot] = 0


class Bigram:
    """A `Target` with `EmbeddingAndHead`: `table` [V, V] holds the logits after each token, its own "final" state."""

    context_length = 64
    device = torch.device("cpu")
    layers = 0

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocab_size = table, len(table)

    def new_cache(self) -> Lengths:
        return Lengths()

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        logits, taps = self.table[rows.tokens], dict.fromkeys(want.taps, self.embed(rows.tokens))
        return Forward({"all": logits, "last": logits[:, -1:], "none": logits[:, :0]}[want.logits], taps)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, self.vocab_size).to(self.table)

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.table

    def head(self) -> Tensor:
        return self.table.T

    def shaped(self, products: Tensor, tokens: Tensor) -> Tensor:
        return products
