"""What the user may ask of a reply (`Sampling`), and how a row of logits becomes a token (`Sampler`)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import InvalidOption, NonFiniteLogits
from paceline.noise import Noise

_HEAD = 1024
"""Columns sorted before a top-p cut falls back to sorting them all."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one reply. The default is greedy.

    max_new_tokens: the reply's length at most, EOS included (>= 1).
    temperature: 0 is greedy; > 0 samples from softmax(logits / temperature).
    top_k: keep the k likeliest tokens (0: all). top_p: keep the likeliest tokens until their mass reaches p
    (1: all). min_p: keep tokens at least min_p times as likely as the likeliest (0: all). Applied in this order.
    seed: 0 <= seed < 2**63; None draws one, and the statistics report it.
    stop: strings that end the reply; the text stops before them. stop_token_ids: tokens that do.
    ignore_eos: go on after the model's own end-of-sequence tokens.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 1, 2**31)
        _real("temperature", self.temperature, 0.0, 1000.0)
        if 0.0 < self.temperature < 1e-3:
            raise InvalidOption(f"temperature={self.temperature} is too small to divide by", "Give 0 for greedy text")
        _whole("top_k", self.top_k, 0, 2**31)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidOption("top_p is 0", "Give 0 < top_p <= 1, or temperature=0 for greedy text")
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.stop, Sequence) or not isinstance(self.stop_token_ids, Sequence):
            raise InvalidOption("stop and stop_token_ids must be lists", "Give strings in the one, ids in the other")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(s, str) or not s for s in stop):
            raise InvalidOption(f"stop={self.stop!r} holds something that is not a non-empty string")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def sampler(self, sample: int = 0) -> Sampler:
        """The sampler these parameters mean; draws the seed if there is none."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return Sampler(self.temperature, self.top_k, self.top_p, self.min_p, Noise(seed, sample))


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidOption(f"{name}={value!r} is out of range", f"Give a whole number from {low} to {high}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidOption(f"{name}={value!r} is out of range", f"Give a number from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class Sampler:
    """Turns logits into tokens. Target and drafters use the same one, so that they see the same noise.

    Every cut (top_k, top_p, min_p) is a threshold on the scaled logits: equal logits live or die together, so the
    outcome does not depend on how a sort breaks ties.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: Noise = field(default_factory=lambda: Noise(0))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def choose(self, logits: Tensor, position: int) -> int:
        """The token for `position`, from one row of logits [V]; ties go to the lowest id."""
        if self.greedy:
            value, token = logits.max(-1)
            if not math.isfinite(float(value)):
                raise not_finite(position)
            return int(token)
        tokens, scores = self.perturbed(logits, position)
        return int(tokens[scores.argmax()])

    def rank(self, logits: Tensor, position: int, count: int) -> tuple[list[int], list[float]]:
        """The `count` likeliest choices for `position` by one row of logits [V], best first, with their scores.

        Fewer where the cuts leave fewer. Scores are log-probabilities plus noise, comparable within the row.
        """
        if self.greedy:
            scores, tokens = torch.topk(logits.log_softmax(-1), min(count, logits.shape[-1]))
            return tokens.tolist(), scores.tolist()
        tokens, scores = self.perturbed(logits, position)
        scores, order = torch.topk(scores, min(count, len(tokens)))
        return tokens[order].tolist(), scores.tolist()

    def perturbed(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The tokens that survive the cuts, ascending, and their log-probability plus noise."""
        scores = logits / self.temperature
        highest = float(scores.max())
        if not math.isfinite(highest):
            raise not_finite(position)
        tokens = self._survivors(scores, highest)
        kept = scores[tokens]
        return tokens, kept.log_softmax(-1) + self.noise.gumbel(position, tokens)

    def _survivors(self, scores: Tensor, highest: float) -> Tensor:
        """Ids in ascending order: top_k, then top_p of what is left, then min_p of what is left.

        The likeliest come first from a short sort; only where the cut lies beyond it are all columns sorted.
        """
        low = highest + math.log(self.min_p) if self.min_p > 0.0 else -math.inf
        if self.top_k == 0 and self.top_p == 1.0:
            return (scores >= low).nonzero()[:, 0]
        for width in (_HEAD, scores.shape[-1]):
            ordered, ids = torch.topk(scores, min(width, scores.shape[-1]))
            cut = max(low, self._cut(ordered, scores))
            # Equal scores may straddle the end of a short sort.
            if cut > float(ordered[-1]) or len(ordered) == scores.shape[-1]:
                return ids[ordered >= cut].sort().values
        raise AssertionError("unreachable: the last width is all columns")

    def _cut(self, ordered: Tensor, scores: Tensor) -> float:
        """The lowest score that top_k and top_p keep, or -inf where it lies beyond `ordered` (best first)."""
        low = -math.inf
        if 0 < self.top_k < scores.shape[-1]:
            if self.top_k > len(ordered):
                return low
            low = float(ordered[self.top_k - 1])
        if self.top_p < 1.0:
            left = ordered[ordered >= low] if low > -math.inf else scores
            mass = (ordered - left.logsumexp(-1)).exp().cpu().cumsum(-1, dtype=torch.float64)
            reached = int((mass < self.top_p).sum())
            low = max(low, float(ordered[reached])) if reached < len(ordered) else low
        return low


def not_finite(position: int) -> NonFiniteLogits:
    """The error for a row of logits that holds no usable maximum."""
    return NonFiniteLogits(
        f"the model's logits near position {position} are not finite",
        "Try dtype float32; if it stays, the weights are damaged",
    )
