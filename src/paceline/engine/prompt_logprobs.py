"""Data collected from a prompt during prefill: log-probabilities of its tokens, or the mean of its states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from paceline.engine.detokenizer import Logprobs
from paceline.types import Forward, Want


class PromptReader(Protocol):
    """Collects something of every row of a prompt. Such a prompt is fed whole, whatever the prefix cache holds."""

    want: ClassVar[Want]
    """Outputs that `read` needs."""

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        """Receive the pass over rows `start` on of the prompt's one slot. `following`: the tokens after them, one for
        each."""


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, each with the `top` likeliest tokens at its position."""

    want: ClassVar[Want] = Want("all")

    def __init__(self, top: int = 0) -> None:
        self._top = top
        self.tokens: list[Logprobs | None] = [None]
        """One per token fed so far; None for the first, which nothing predicts."""

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        """See `PromptReader`."""
        self.push(start, following, out.logits[0, : len(following)])

    def push(self, start: int, following: Sequence[int], logits: Tensor) -> None:
        """Add logits [T, V] of the rows from position `start` on. `following`: the T tokens that they predict.

        Rows fed again, after a request was suspended, are skipped.
        """
        known = len(self.tokens) - 1 - start
        if known >= len(following):
            return
        logits, following = logits[known:], following[known:]
        total = logits.logsumexp(-1, keepdim=True)  # no second copy of the logits
        own = torch.tensor(following, device=logits.device)[:, None]
        chosen = (logits.gather(1, own) - total)[:, 0].tolist()
        best = logits.topk(self._top, -1)
        for at, ids, values in zip(chosen, best.indices.tolist(), (best.values - total).tolist(), strict=True):
            self.tokens.append(Logprobs(at, tuple(zip(ids, values, strict=True))))


class PooledStates:
    """Mean of a prompt's last hidden states, after the final norm, of all its tokens but the pending one."""

    want: ClassVar[Want] = Want("none", taps=("final",))

    def __init__(self) -> None:
        self.count = 0
        """Tokens read so far."""
        self._sum: Tensor | None = None

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        """See `PromptReader`. Rows fed again, after a request was suspended, are skipped."""
        new = out.taps["final"][0, self.count - start : len(following)]
        if len(new):
            total = new.float().sum(0)
            self._sum = total if self._sum is None else self._sum + total
            self.count += len(new)

    def vector(self, size: int | None = None) -> list[float]:
        """Return the mean, cut to its first `size` numbers, with length 1. At least one token must have been read."""
        assert self._sum is not None
        found: list[float] = torch.nn.functional.normalize(self._sum[:size], dim=0).tolist()
        return found
