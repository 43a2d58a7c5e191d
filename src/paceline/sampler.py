"""How a row of logits becomes a token: processors, temperature, cuts, noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.errors import NonFiniteLogits
from paceline.noise import DRAFT, Noise

_HEAD = 1024
"""Columns sorted before a top-p cut falls back to sorting them all."""

RuleName = Literal["match", "rejection", "block", "typical"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What stands before a row's next token: the committed `text`, of which the first `prompt` tokens are the prompt's,
    and then the `path` of drafted tokens that leads to the row.

    `text` only grows, so what was counted in it once stays true; `path` may be gone with the next round.
    """

    text: Sequence[int]
    path: Sequence[int]
    prompt: int

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        return [*self.text, *self.path]

    @property
    def reply(self) -> list[int]:
        """All of it but the prompt."""
        return [*self.text[self.prompt :], *self.path]

    def __len__(self) -> int:
        return len(self.text) + len(self.path)


LogitsProcessor = Callable[[Prefix, Tensor], Tensor]
"""(prefix, logits [V]) -> the logits to use instead. The row is a copy, which may be changed in place."""


@dataclass(slots=True)
class Ranked:
    """Candidates for one row, best first. `scores`: log-probabilities plus noise, comparable within the row.

    `q`: the distribution [V] from which they were drawn in this order, without replacement; None if they were chosen.
    """

    tokens: list[int]
    scores: list[float]
    q: Tensor | None = None


@dataclass(slots=True)
class Sampler:
    """Turns logits into tokens for one reply. Target and drafters use the same one, so that they see the same noise.

    `text`: prompt and reply so far, the pending token last; it grows with every round. `prompt`: how many of its tokens
    are the prompt's. Every cut (top_k, top_p, min_p) is a threshold on the scaled logits: equal logits live or die
    together, so the outcome does not depend on how a sort breaks ties.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: Noise = field(default_factory=lambda: Noise(0))
    processors: tuple[LogitsProcessor, ...] = ()
    rule: RuleName = "match"
    text: list[int] = field(default_factory=list)
    prompt: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draws(self) -> bool:
        """Whether the rule wants candidates drawn from the drafter's own distribution, in a shape fixed beforehand.

        What is drafted where may then depend on the text and the budget, never on what was drawn.
        """
        return self.rule in ("rejection", "block") and not self.greedy

    def choose(self, logits: Tensor, path: Sequence[int] = ()) -> int:
        """The token after `text` and `path`, from one row of logits [V]; ties go to the lowest id."""
        logits = self.process(logits, path)
        if self.greedy:
            value, token = logits.max(-1)
            if not math.isfinite(float(value)):
                raise not_finite(len(self.text) + len(path))
            return int(token)
        tokens, scores = self.perturbed(logits, len(self.text) + len(path))
        return int(tokens[scores.argmax()])

    def rank(self, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        """For each row of logits [R, V], which stands after `text` and its path: the `count` likeliest choices.

        Under a rule that `draws`, `count` draws without replacement instead, with noise that nothing else sees.
        Fewer where the cuts leave fewer, none where a row is not finite.
        """
        return [self._rank(row, path, count) for row, path in zip(logits, paths, strict=True)]

    def process(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """One row of logits [V] after all processors; itself where there are none."""
        if not self.processors:
            return logits
        prefix = Prefix(self.text, path, self.prompt)
        logits = logits.clone()
        for processor in self.processors:
            logits = processor(prefix, logits)
        return logits

    def distribution(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """The probabilities [V] with which `choose` takes each token: softmax of what the cuts leave."""
        tokens, logp = self._shaped(self.process(logits, path), len(self.text) + len(path))
        return torch.zeros_like(logits).scatter_(0, tokens, logp.exp())

    def perturbed(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The tokens that survive the cuts, ascending, and their log-probability plus noise."""
        tokens, logp = self._shaped(logits, position)
        return tokens, logp + self.noise.gumbel(position, tokens)

    def _shaped(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The tokens that survive the cuts, ascending, and their log-probability."""
        scores = logits / self.temperature
        highest = float(scores.max())
        if not math.isfinite(highest):
            raise not_finite(position)
        tokens = self._survivors(scores, highest)
        return tokens, scores[tokens].log_softmax(-1)

    def _rank(self, logits: Tensor, path: Sequence[int], count: int) -> Ranked:
        logits = self.process(logits, path)
        if not math.isfinite(float(logits.max())):
            return Ranked([], [])
        if self.greedy or self.rule == "typical":
            scores, tokens = torch.topk(logits.log_softmax(-1), min(count, logits.shape[-1]))
            return Ranked(tokens.tolist(), scores.tolist())
        if self.draws:
            return self._draw(logits, path, count)
        tokens, scores = self.perturbed(logits, len(self.text) + len(path))
        scores, order = torch.topk(scores, min(count, len(tokens)))
        return Ranked(tokens[order].tolist(), scores.tolist())

    def _draw(self, logits: Tensor, path: Sequence[int], count: int) -> Ranked:
        """Gumbel top-k: the order of log q + noise is that of draws without replacement (arXiv 1903.06059)."""
        tokens, logp = self._shaped(logits, len(self.text) + len(path))
        # Keyed by the round and by the node, so that no two rows of any two drafts share a number.
        noise = self.noise.stream(DRAFT, len(self.text), *path)
        scores, order = torch.topk(logp + noise.gumbel(0, tokens), min(count, len(tokens)))
        q = torch.zeros_like(logits).scatter_(0, tokens, logp.exp())
        return Ranked(tokens[order].tolist(), scores.tolist(), q)

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
