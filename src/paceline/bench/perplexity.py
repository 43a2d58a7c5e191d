"""How well a target predicts a text: what quantising its weights costs."""

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
"""Rows per pass: their logits are 130 MB where the vocabulary is the largest there is."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of each token that was predicted, in the text's order: `losses` [n], its -log p in nats (float64), and `best`
    [n], the likeliest token in its place."""

    losses: Tensor
    best: Tensor

    @property
    def perplexity(self) -> float:
        return float(self.losses.mean().exp())

    def agreement(self, other: TokenScores) -> float:
        """The share of places where both find the same token likeliest: at most so much of a draft is accepted."""
        return float((self.best == other.best).double().mean())


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A stretch of text that is fed by itself; the tokens from `first` on are predicted, those before are context."""

    tokens: Sequence[int]
    first: int


def windows(tokens: Sequence[int], size: int, context: int, front: Sequence[int] = ()) -> list[TextWindow]:
    """Stretches of `size` tokens, each but the first beginning with the last `context` of the one before: every token
    is predicted once, most with more than `context` before them. `front` (a beginning-of-text token) opens each.

    Raises `InvalidOption`, and `InvalidPrompt` for a text with nothing to predict.
    """
    if not 1 <= context < size:
        raise InvalidOption(
            f"windows of {size} tokens cannot share {context}", "Give 1 or more, and fewer than a window"
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
    """Feed every window on its own through the target's forward."""
    cache = target.new_cache()
    losses, best = zip(*(part for piece in pieces for part in _scored(target, cache, piece)), strict=True)
    return TokenScores(torch.cat(losses), torch.cat(best))


def _scored(target: Target, cache: KVCache, piece: TextWindow) -> Iterator[tuple[Tensor, Tensor]]:
    slot = cache.acquire(len(piece.tokens))
    for start in range(0, len(piece.tokens) - 1, _ROWS):
        chunk = piece.tokens[start : min(start + _ROWS, len(piece.tokens) - 1)]
        rows = pack_prefix(chunk, slot, start, target.device)
        logits = target.forward(rows, cache, Want()).logits[0, : len(chunk)]
        cache.commit(rows, [range(1, len(chunk))])
        # Row i predicts the token at i + 1.
        skipped = max(0, piece.first - 1 - start)
        if skipped < len(chunk):
            following = torch.tensor(piece.tokens[start + skipped + 1 : start + len(chunk) + 1], device=logits.device)
            yield _judged(logits[skipped:], following)
    cache.release(slot)


def _judged(logits: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    loss = torch.nn.functional.cross_entropy(logits, following, reduction="none")
    return loss.double().cpu(), logits.argmax(-1).cpu()
