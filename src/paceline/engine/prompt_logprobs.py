"""Data collected from a prompt during prefill: log-probabilities of its tokens, or the mean of its states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from paceline.engine.detokenizer import Logprobs
from paceline.types import Forward, Want


class PromptReader(Protocol):
    """Collects data from every row of a prompt. The whole prompt is then fed, without the prefix cache."""

    want: ClassVar[Want]
    """Outputs that `read` needs."""

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        """Receive the results of a pass over a chunk of the prompt.

        Args:
            start: Position of the first row.
            following: The token that follows each row.
            out: Results of the pass, for one slot.
        """


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, with the `top` likeliest tokens at each position."""

    want: ClassVar[Want] = Want("all")

    def __init__(self, top: int = 0) -> None:
        self._top = top
        self.tokens: list[Logprobs | None] = [None]
        """One entry per token fed so far. The first token has None, because no row predicts it."""

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        """See `PromptReader`."""
        self.push(start, following, out.logits[0, : len(following)])

    def push(self, start: int, following: Sequence[int], logits: Tensor) -> None:
        """Add the logits of a chunk. Rows that are fed again after a request was suspended are skipped.

        Args:
            start: Position of the first row.
            following: The T tokens that the rows predict.
            logits: Logits [T, V].
        """
        known = len(self.tokens) - 1 - start
        if known >= len(following):
            return
        logits, following = logits[known:], following[known:]
        total = logits.logsumexp(-1, keepdim=True)  # log_softmax would copy all logits
        own = torch.tensor(following, device=logits.device)[:, None]
        chosen = (logits.gather(1, own) - total)[:, 0].tolist()
        best = logits.topk(self._top, -1)
        for at, ids, values in zip(chosen, best.indices.tolist(), (best.values - total).tolist(), strict=True):
            self.tokens.append(Logprobs(at, tuple(zip(ids, values, strict=True))))


class PooledStates:
    """Mean of the hidden states after the final norm, over all prompt tokens except the last, which prefill does not
    feed."""

    want: ClassVar[Want] = Want("none", taps=("final",))

    def __init__(self) -> None:
        self.count = 0
        """Number of tokens read so far."""
        self._sum: Tensor | None = None

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        """See `PromptReader`. Rows that are fed again after a request was suspended are skipped."""
        new = out.taps["final"][0, self.count - start : len(following)]
        if len(new):
            total = new.float().sum(0)
            self._sum = total if self._sum is None else self._sum + total
            self.count += len(new)

    def vector(self, size: int | None = None) -> list[float]:
        """Return the first `size` components of the mean, normalized to length 1. At least one token must have been
        read."""
        assert self._sum is not None
        found: list[float] = torch.nn.functional.normalize(self._sum[:size], dim=0).tolist()
        return found
