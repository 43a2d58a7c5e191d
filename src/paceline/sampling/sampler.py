"""From a row of logits to a token: processors, temperature, cuts, noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidOption, NonFiniteLogits, NoTokenLeft
from paceline.sampling.noise import DRAFT, EXCLUDE, Noise
from paceline.sampling.truncation import Floats, Ids, finite, highest, survivors, without_top

RuleName = Literal["match", "rejection", "block", "typical"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens before a row: the committed `token_ids` (`num_prompt_tokens` of the prompt, then the reply's) and the
    `path` of drafted tokens that leads to the row.

    `token_ids` only grows, so counts of it stay valid; `path` may be discarded at the end of the round.
    """

    token_ids: Sequence[int] = ()
    path: Sequence[int] = ()
    num_prompt_tokens: int = 0

    def after(self, path: Sequence[int]) -> Prefix:
        """The prefix of the row that `path` leads to."""
        return Prefix(self.token_ids, path, self.num_prompt_tokens)

    @property
    def tokens(self) -> list[int]:
        """Committed and drafted tokens."""
        return [*self.token_ids, *self.path]

    @property
    def reply(self) -> list[int]:
        """`tokens` without the prompt."""
        return [*self.token_ids[self.num_prompt_tokens :], *self.path]

    def tail(self, count: int) -> tuple[int, ...]:
        """The last `count` of `tokens`, or all if there are fewer. Does not copy the rest."""
        committed = count - len(self.path)
        if committed <= 0:
            return tuple(self.path[len(self.path) - count :])
        return (*self.token_ids[max(0, len(self.token_ids) - committed) :], *self.path)

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.path)


LogitsProcessor = Callable[[Prefix, Tensor], Tensor]
"""(prefix, logits [V]) -> the logits to use instead. The row is a copy and may be changed in place."""


class Forcing(ABC):
    """A `LogitsProcessor` that at times knows the next tokens."""

    @abstractmethod
    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor: ...

    @abstractmethod
    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` tokens that must come next; none where several may."""


_SPARSE = 8
"""If processors leave fewer than one token in this many, the others are dropped before anything is computed."""

_COMPARED = 16
"""Number of best candidates that share a row's probability where text is sampled."""


@dataclass(slots=True)
class Ranked:
    """Candidates for one row, best first. `scores`: log-probability of each to be the choice: among all tokens where
    the text is greedy; given the noise, among the best few, where it is sampled.

    `q`: the distribution [V] from which they were drawn in this order, without replacement; None if they were chosen.
    """

    tokens: list[int]
    scores: list[float]
    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Subset:
    """The target's tokens that a drafter with a reduced vocabulary knows: `ids` [C] of its columns, int64 on the host,
    ascending, out of `size`."""

    ids: Tensor
    size: int

    def widen(self, logits: Tensor) -> Tensor:
        """Return a row [C] as a row [V] that is -inf outside the subset."""
        return logits.new_full((self.size,), -math.inf).index_copy_(0, self.ids, logits)


@dataclass(slots=True)
class Sampler:
    """Sampling parameters and noise of one reply. It holds no text: every method takes the `Prefix` of its row.

    The target chooses with it and drafters rank with it, so that both see the same noise.

    Rows are shaped on the host, whatever device they come from: a visited row costs one transfer, and then the same
    steps give the same token everywhere.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    noise: Noise = field(default_factory=lambda: Noise(0))
    processors: tuple[LogitsProcessor, ...] = ()
    rule: RuleName = "match"

    def __post_init__(self) -> None:
        if self.greedy:
            self.rule = "match"  # without chance all rules accept the same

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draws(self) -> bool:
        """Whether the rule needs candidates drawn from the drafter's own distribution, in a fixed shape.

        The shape may depend on the text and the budget, never on the draws.
        """
        return self.rule in ("rejection", "block")

    def choose(self, prefix: Prefix, logits: Tensor) -> int:
        """Return the token after `prefix`, from its row of logits [V]; ties go to the lowest id.

        Raises `NonFiniteLogits`, and `NoTokenLeft` where the processors ban every token.
        """
        row = self.process(prefix, logits)
        if self.greedy:
            scores = row.detach().cpu().numpy()  # NumPy takes a tenth of torch's time
            token = int(scores.argmax())
            _check_finite(float(scores[token]), logits, len(prefix))
            return token
        tokens, scores = self._shaped(row, logits, len(prefix))
        return int(self.noise.best(len(prefix), scores, tokens)[0][0])

    def rank(
        self, prefix: Prefix, logits: Tensor, paths: Sequence[Sequence[int]], count: int, subset: Subset | None = None
    ) -> list[Ranked]:
        """Return the `count` likeliest choices of each row of logits [R, V], which stands after `prefix` and its path.

        Under a rule that `draws`, `count` draws without replacement instead, with noise that nothing else sees.
        Fewer where cuts and bans leave fewer, none where a row is not finite. `subset`: the tokens that the columns
        of logits [R, C] stand for; what comes back names the target's tokens, and is what rows [R, V] would give that
        are -inf elsewhere.
        """
        # One transfer for all rows. Without processors they are only read.
        rows = zip(logits.cpu(), paths, strict=True)
        return [self._rank(prefix.after(path), row, count, subset) for row, path in rows]

    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` tokens that must follow `prefix`, as far as a processor knows: a draft without cost.

        Empty where several tokens may come next. They depend on the prefix and the parameters alone.
        """
        for processor in self.processors:
            if isinstance(processor, Forcing):
                try:
                    found = processor.forced(prefix, limit)
                except Exception:
                    # The error is raised again when the target visits this row.
                    return []
                if found:
                    return found
        return []

    def process(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """Return one row of logits [V] after all processors; the same tensor where there are none."""
        if not self.processors:
            return logits
        row = logits.clone()
        for processor in self.processors:
            row = processor(prefix, row)
            if not isinstance(row, Tensor) or row.shape != logits.shape or row.dtype != logits.dtype:
                raise InvalidOption(
                    f"the logits processor {processor!r} returned no row of logits",
                    f"Return a tensor of shape {list(logits.shape)} and {logits.dtype}, as it was given",
                )
        return row

    def distribution(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """Return the probabilities [V] with which `choose` takes each token of one row (temperature > 0)."""
        row = self.process(prefix, logits)
        return _spread(row, *self._shaped(row, logits, len(prefix)), len(row))

    def _rank(self, prefix: Prefix, logits: Tensor, count: int, subset: Subset | None) -> Ranked:
        if subset and self.processors:
            # Processors index the target's tokens, and may allow one outside the subset.
            logits, subset = subset.widen(logits), None
        try:
            tokens, scores = self._shaped(self.process(prefix, logits), logits, len(prefix))
        except Exception:
            # No candidate, or a failing processor: the error is raised if the target visits this row.
            return Ranked([], [])
        if subset:
            ids = subset.ids.numpy()
            tokens = ids if tokens is None else ids[tokens]
        if self.draws:
            # Gumbel top-k: the order of log q + noise is that of draws without replacement (arXiv 1903.06059). Keyed by
            # the round and by the node, so that no two rows of any two drafts share a number.
            noise = self.noise.stream(DRAFT, len(prefix.token_ids), *prefix.path)
            best, sums = noise.best(0, scores, tokens, count)
            size = subset.size if subset else len(logits)
            return Ranked(best.tolist(), sums.tolist(), _spread(logits, tokens, scores, size))
        if self.greedy or self.rule == "typical":
            best = _best(scores, count)
            return Ranked((best if tokens is None else tokens[best]).tolist(), _chances(scores, scores[best]))
        best, sums = self.noise.best(len(prefix), scores, tokens, max(count, _COMPARED))
        return Ranked(best[:count].tolist(), _chances(sums, sums[:count]))

    def _shaped(self, row: Tensor, raw: Tensor, position: int) -> tuple[Ids | None, Floats]:
        """Return the tokens that survive the cuts, ascending (None: all), and their logits / temperature."""
        scores: Floats = row.detach().cpu().numpy()
        _check_finite(float(scores.max()), raw, position)
        open_ = None
        if self.processors and np.count_nonzero(scores > -np.inf) * _SPARSE < len(scores):
            open_ = finite(scores)
            scores = scores[open_]
        if self.greedy:
            return open_, scores
        cuts = (self.top_k, self.top_p, self.min_p, self.typical_p, self.top_n_sigma)
        tokens, scores = survivors(scores / self.temperature, *cuts)
        tokens = tokens if open_ is None else open_ if tokens is None else open_[tokens]
        if self._excludes(position) and (left := without_top(scores, self.xtc_threshold)) is not None:
            return left if tokens is None else tokens[left], scores[left]
        return tokens, scores

    def _excludes(self, position: int) -> bool:
        """Return whether XTC applies to the token at a position. That depends on the seed and the position alone, so
        that target and drafters, and every round that comes to the position, agree."""
        p = self.xtc_probability
        return p > 0.0 and self.noise.stream(EXCLUDE).uniform(position) < p


def _best(scores: Floats, count: int) -> Ids:
    """Return the `count` highest columns, highest first, ties to the lowest; fewer if fewer are finite."""
    if count == 1:
        return np.array([scores.argmax()])
    best = highest(scores, count)
    return best[np.argsort(-scores[best], kind="stable")[:count]]


def _chances(all_scores: Floats, chosen: Floats) -> list[float]:
    """Return the log-softmax over all scores of the chosen ones, the first of which is the highest of all."""
    total = np.exp(all_scores - chosen[0]).sum(dtype=np.float64)
    chances: list[float] = (chosen - chosen[0] - math.log(total)).tolist()
    return chances


def _spread(row: Tensor, tokens: Ids | None, scores: Floats, size: int) -> Tensor:
    """Return softmax(scores) at `tokens` out of `size`, 0 elsewhere, with the dtype and device of `row`."""
    kept = torch.from_numpy(scores).softmax(-1).to(row)
    if tokens is None:
        return kept
    return row.new_zeros(size).scatter_(0, torch.from_numpy(tokens).to(row.device), kept)


def not_finite(position: int) -> NonFiniteLogits:
    """Return the error for a row of logits without a finite maximum."""
    return NonFiniteLogits(
        f"the model's logits near position {position} are not finite",
        "Try dtype float32; if it stays, the weights are damaged",
    )


def _check_finite(best: float, raw: Tensor, position: int) -> None:
    """Raise the fitting error if `best`, a row's highest logit, is not finite. `raw`: the row before processors."""
    if math.isfinite(best):
        return
    if not math.isfinite(float(raw.max())):
        raise not_finite(position)
    if best == -math.inf:
        raise NoTokenLeft(
            f"every token is banned at position {position}",
            "Ban less: bad_words, logit_bias, no_repeat_ngram_size, min_new_tokens, grammar, processors of your own",
        )
    raise NonFiniteLogits(
        f"a logits processor made the logits at position {position} infinite or NaN", "Let it return -inf or numbers"
    )
