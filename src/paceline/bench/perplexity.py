"""Perplexity of a target on a text, to measure the loss from quantisation."""

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
"""Rows per pass. With the largest vocabularies, their logits take 130 MB."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of the predicted tokens, in the order of the text.

    Attributes:
        losses: -log p in nats, float64 [n].
        best: The most likely token at each position, int64 [n].
    """

    losses: Tensor
    best: Tensor

    @property
    def perplexity(self) -> float:
        return float(self.losses.mean().exp())

    def agreement(self, other: TokenScores) -> float:
        """Return the share of positions with the same most likely token. It limits the acceptance of greedy drafts."""
        return float((self.best == other.best).double().mean())


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A part of a text that is fed separately.

    Attributes:
        tokens: Token ids.
        first: Index of the first token to predict. All tokens before it are context.
    """

    tokens: Sequence[int]
    first: int


def windows(tokens: Sequence[int], size: int, context: int, front: Sequence[int] = ()) -> list[TextWindow]:
    """Cut a text into windows so that every token is predicted once.

    Args:
        tokens: The text.
        size: Window size in tokens.
        context: Number of tokens at the beginning of a window that repeat the end of the previous window.
        front: Tokens before each window, such as BOS.

    Raises:
        InvalidOption: If `context` does not fit `size`.
        InvalidPrompt: If the text is too short to predict anything.
    """
    if not 1 <= context < size:
        raise InvalidOption(
            f"context must be >= 1 and less than the window of {size} tokens, got {context}",
            "Use a shorter context or a larger window",
        )
    if len(tokens) + len(front) < 2:
        raise InvalidPrompt("the text has fewer than two tokens", "Use a longer text")
    pieces = [TextWindow([*front, *tokens[:size]], max(1, len(front)))]
    pieces += [
        TextWindow([*front, *tokens[start : start + size]], len(front) + context)
        for start in range(size - context, len(tokens) - context, size - context)
    ]
    return pieces


def score(target: Target, pieces: Sequence[TextWindow]) -> TokenScores:
    """Feed each window separately and score its predicted tokens."""
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
