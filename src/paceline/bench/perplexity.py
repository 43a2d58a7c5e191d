"""Perplexity of a target on a text: what quantising its weights costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import InvalidOption, InvalidPrompt
from paceline.protocols import KVCache, Target
from paceline.types import Want
from paceline.verify.tree import pack_prefix

_ROWS = 128
"""Rows per pass; their logits take 130 MB with the largest vocabularies."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of the predicted tokens, in the text's order: `losses` [n], -log p in nats (float64), and `best` [n], the
    likeliest token at each position."""

    losses: Tensor
    best: Tensor

    @property
    def perplexity(self) -> float:
        return float(self.losses.mean().exp())

    def agreement(self, other: TokenScores) -> float:
        """Return the share of positions with the same likeliest token, which bounds the acceptance of greedy drafts."""
        return float((self.best == other.best).double().mean())


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A stretch of text, fed by itself: tokens from `first` on are predicted, those before are context."""

    tokens: Sequence[int]
    first: int


def windows(tokens: Sequence[int], size: int, context: int, front: Sequence[int] = ()) -> list[TextWindow]:
    """Cut a text into windows of `size` tokens, each starting with the last `context` tokens of the one before, so that
    every token is predicted once. `front` (a beginning-of-text token) starts each window.

    Raises `InvalidOption`, and `InvalidPrompt` for a text with nothing to predict.
    """
    if not 1 <= context < size:
        raise InvalidOption(
            f"context must be 1 or more and less than the window of {size} tokens, got {context}",
            "Give a shorter context",
        )
    if len(tokens) + len(front) < 2:
        raise InvalidPrompt("the text has fewer than two tokens", "Give a longer one")
    pieces = [TextWindow([*front, *tokens[:size]], max(1, len(front)))]
    pieces += [
        TextWindow([*front, *tokens[start : start + size]], len(front) + context)
        for start in range(size - context, len(tokens) - context, size - context)
    ]
    return pieces


def score(target: Target, pieces: Sequence[TextWindow]) -> TokenScores:
    """Feed every window by itself and score its predicted tokens."""
    cache = target.new_cache()
    losses, best = zip(*(part for piece in pieces for part in _score_window(target, cache, piece)), strict=True)
    return TokenScores(torch.cat(losses), torch.cat(best))


def _score_window(target: Target, cache: KVCache, piece: TextWindow) -> Iterator[tuple[Tensor, Tensor]]:
    slot = cache.acquire(len(piece.tokens))
    for start in range(0, len(piece.tokens) - 1, _ROWS):
        chunk = piece.tokens[start : min(start + _ROWS, len(piece.tokens) - 1)]
        rows = pack_prefix(chunk, slot, start, target.device)
        logits = target.forward(rows, cache, Want()).logits[0, : len(chunk)]
        cache.commit(rows, [range(1, len(chunk))])
        # Row i predicts the token at i + 1.
        skipped = max(0, piece.first - 1 - start)
        if skipped < len(chunk):
            scored = logits[skipped:]
            following = torch.tensor(piece.tokens[start + skipped + 1 : start + len(chunk) + 1], device=logits.device)
            losses = torch.nn.functional.cross_entropy(scored, following, reduction="none")
            yield losses.double().cpu(), scored.argmax(-1).cpu()
    cache.release(slot)
