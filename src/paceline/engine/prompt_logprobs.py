"""Log-probabilities of a prompt's own tokens, collected during prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.detokenizer import Logprobs


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, each with the `top` likeliest tokens at its position."""

    def __init__(self, top: int = 0) -> None:
        self._top = top
        self.tokens: list[Logprobs | None] = [None]
        """One per token fed so far; None for the first, which nothing predicts."""

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
