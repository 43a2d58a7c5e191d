"""The choice of a token from a row of logits: processors, temperature, truncation, noise."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidOption, NonFiniteLogits, NoTokenLeft
from paceline.sampling.noise import DRAFT_STREAM, XTC_STREAM, Noise
from paceline.sampling.truncation import Floats, Ids, exclude_top_choices, finite_columns, highest_columns, truncate

_LOG = logging.getLogger("paceline")

RuleName = Literal["match", "rejection", "block", "typical"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens before a row: the committed tokens, followed by the drafted tokens that lead to the row.

    Attributes:
        token_ids: Committed tokens of the prompt and the reply. This list only grows, so counts of its tokens stay
            valid.
        path: Drafted tokens. They may be rejected at the end of the round.
        num_prompt_tokens: Number of prompt tokens in `token_ids`.
    """

    token_ids: Sequence[int] = ()
    path: Sequence[int] = ()
    num_prompt_tokens: int = 0

    def after(self, path: Sequence[int]) -> Prefix:
        """Return the prefix of the row after the drafted tokens `path`."""
        return Prefix(self.token_ids, path, self.num_prompt_tokens)

    @property
    def tokens(self) -> list[int]:
        """The committed tokens and the drafted tokens."""
        return [*self.token_ids, *self.path]

    @property
    def reply(self) -> list[int]:
        """The committed tokens and the drafted tokens, without the prompt."""
        return [*self.token_ids[self.num_prompt_tokens :], *self.path]

    def tail(self, count: int) -> tuple[int, ...]:
        """Return the last `count` tokens, or all tokens if there are fewer. The other tokens are not copied."""
        committed = count - len(self.path)
        if committed <= 0:
            return tuple(self.path[len(self.path) - count :])
        return (*self.token_ids[max(0, len(self.token_ids) - committed) :], *self.path)

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.path)


LogitsProcessor = Callable[[Prefix, Tensor], Tensor]
"""(prefix, logits [V]) -> logits to use instead. The row is a copy and may be changed in place."""


class ForcingProcessor(ABC):
    """A `LogitsProcessor` that sometimes knows the next tokens."""

    @abstractmethod
    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor: ...

    @abstractmethod
    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` tokens that must come next. The list is empty if there is a choice."""


_SPARSE_FACTOR = 8
"""If processors leave fewer than one in this many tokens, only these tokens take part in further computation."""

_NORMALISED_CANDIDATES = 16
"""If the text is sampled, the scores of candidates are normalised among at least this many best candidates."""


@dataclass(slots=True)
class Ranked:
    """Candidates for one row, best first.

    Attributes:
        tokens: Token ids.
        scores: For each candidate, an estimate of the log-probability that the target chooses it. For greedy text and
            for the rule "typical", this is a log-softmax over all tokens that truncation keeps. For the rule "match",
            it is a log-softmax over the best few sums of score and noise. For rules that draw, the sums themselves are
            given.
        q: The drafter's distribution [V]. The candidates were drawn from it, in this order and without replacement.
            None if they were not drawn.
    """

    tokens: list[int]
    scores: list[float]
    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Subset:
    """The part of the target's vocabulary that a drafter knows.

    Attributes:
        ids: The target's token for each of the drafter's columns, in ascending order, int64 [C] on the host.
        size: Size of the target's vocabulary.
    """

    ids: Tensor
    size: int

    def widen(self, logits: Tensor) -> Tensor:
        """Expand a row [C] to a row [V] that is -inf outside the subset."""
        return logits.new_full((self.size,), -math.inf).index_copy_(0, self.ids, logits)


@dataclass(slots=True)
class Sampler:
    """Sampling parameters and noise of one reply. It holds no text: every method takes the `Prefix` of its row.

    The target chooses tokens with it, and drafters rank candidates with it, so both use the same noise.

    Rows are always processed and truncated on the host, whichever device they come from. So each row costs one
    transfer, and the same computation chooses the token for every device.
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
    draft_failures: int = field(default=0, repr=False, compare=False)
    """Number of rows of drafters that got no candidates because of an error."""

    def __post_init__(self) -> None:
        if self.greedy:
            self.rule = "match"  # if the text is greedy, all rules accept the same tokens

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draws(self) -> bool:
        """True if the rule needs candidates drawn from the drafter's distribution, in a tree of fixed shape.

        The shape may depend on the text and the budget, but not on the draws.
        """
        return self.rule in ("rejection", "block")

    def choose(self, prefix: Prefix, logits: Tensor) -> int:
        """Choose the token after a prefix. A tie goes to the lowest id.

        Args:
            prefix: The tokens before the row.
            logits: The row of logits, [V].

        Raises:
            NonFiniteLogits: If the highest logit is not finite.
            NoTokenLeft: If the processors ban every token.
        """
        row = self.process(prefix, logits)
        if self.greedy:
            scores = row.detach().cpu().numpy()  # NumPy takes a tenth of the time of torch
            token = int(scores.argmax())
            _check_finite(float(scores[token]), logits, len(prefix))
            return token
        tokens, scores = self._truncate(row, logits, len(prefix))
        return int(self.noise.best(len(prefix), scores, tokens)[0][0])

    def rank(
        self, prefix: Prefix, logits: Tensor, paths: Sequence[Sequence[int]], count: int, subset: Subset | None = None
    ) -> list[Ranked]:
        """Return, for several rows, the target's most likely choices, as a drafter predicts them.

        If the rule `draws`, the candidates are drawn without replacement instead, with noise that is used only here. A
        row has fewer candidates if truncation and bans leave fewer tokens. It has no candidates if it is not finite, or
        if a processor fails. `draft_failures` counts these rows.

        Args:
            prefix: Committed tokens.
            logits: The drafter's logits, [R, V], or [R, C] with a subset.
            paths: Drafted tokens before each row.
            count: Number of candidates for each row.
            subset: The target's tokens that the columns stand for. All other tokens get a logit of -inf. The candidates
                are always token ids of the target.
        """
        # One transfer for all rows. Without processors, the rows are only read.
        rows = zip(logits.cpu(), paths, strict=True)
        return [self._rank(prefix.after(path), row, count, subset) for row, path in rows]

    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` tokens that must follow `prefix` according to a processor. They are a draft that costs
        nothing.

        The result is empty if there is a choice. It depends only on the prefix and the parameters.
        """
        for processor in self.processors:
            if isinstance(processor, ForcingProcessor):
                try:
                    found = processor.forced(prefix, limit)
                except Exception:  # any error: it is raised again when the target visits this row
                    _LOG.debug("no forced tokens after %d tokens", len(prefix), exc_info=True)
                    return []
                if found:
                    return found
        return []

    def process(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """Apply all processors to a row of logits [V]. If there are none, return the same tensor.

        Raises:
            InvalidOption: If a processor does not return a row of the same shape and dtype.
        """
        if not self.processors:
            return logits
        row = logits.clone()
        for processor in self.processors:
            row = processor(prefix, row)
            if not isinstance(row, Tensor) or row.shape != logits.shape or row.dtype != logits.dtype:
                got = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
                raise InvalidOption(
                    f"the logits processor {processor!r} returned {got} instead of a row of logits",
                    f"Return a tensor like the one it was given: {logits.dtype} {list(logits.shape)}",
                )
        return row

    def distribution(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """Return the probability [V] that `choose` takes each token of a row. The temperature must be > 0."""
        row = self.process(prefix, logits)
        return _softmax_at(row, *self._truncate(row, logits, len(prefix)), len(row))

    def _rank(self, prefix: Prefix, logits: Tensor, count: int, subset: Subset | None) -> Ranked:
        if subset and self.processors:
            # Processors use the target's token ids, and may allow tokens outside the subset.
            logits, subset = subset.widen(logits), None
        try:
            tokens, scores = self._truncate(self.process(prefix, logits), logits, len(prefix))
        except NoTokenLeft:
            return Ranked([], [])
        except Exception:
            # A draft must not make its reply fail. A processor's error is raised when the target visits this row.
            self.draft_failures += 1
            _LOG.debug("a drafter's row after %d tokens could not be ranked", len(prefix), exc_info=True)
            return Ranked([], [])
        if subset:
            ids = subset.ids.numpy()
            tokens = ids if tokens is None else ids[tokens]
        if self.draws:
            # Gumbel top-k: sorting by log q + noise equals drawing without replacement (arXiv 1903.06059). The key of
            # the stream contains the round and the node, so two rows never share a random number.
            noise = self.noise.stream(DRAFT_STREAM, len(prefix.token_ids), *prefix.path)
            best, sums = noise.best(0, scores, tokens, count)
            size = subset.size if subset else len(logits)
            return Ranked(best.tolist(), sums.tolist(), _softmax_at(logits, tokens, scores, size))
        if self.greedy or self.rule == "typical":
            best = _top_columns(scores, count)
            return Ranked((best if tokens is None else tokens[best]).tolist(), _log_probs(scores, scores[best]))
        best, sums = self.noise.best(len(prefix), scores, tokens, max(count, _NORMALISED_CANDIDATES))
        return Ranked(best[:count].tolist(), _log_probs(sums, sums[:count]))

    def _truncate(self, row: Tensor, raw: Tensor, position: int) -> tuple[Ids | None, Floats]:
        """Return the tokens that survive truncation, in ascending order (None for all tokens), and their logits /
        temperature."""
        scores: Floats = row.detach().cpu().numpy()
        _check_finite(float(scores.max()), raw, position)
        allowed = None
        if self.processors and np.count_nonzero(scores > -np.inf) * _SPARSE_FACTOR < len(scores):
            allowed = finite_columns(scores)
            scores = scores[allowed]
        if self.greedy:
            return allowed, scores
        cuts = (self.top_k, self.top_p, self.min_p, self.typical_p, self.top_n_sigma)
        tokens, scores = truncate(scores / self.temperature, *cuts)
        tokens = tokens if allowed is None else allowed if tokens is None else allowed[tokens]
        if self._applies_xtc(position) and (left := exclude_top_choices(scores, self.xtc_threshold)) is not None:
            return left if tokens is None else tokens[left], scores[left]
        return tokens, scores

    def _applies_xtc(self, position: int) -> bool:
        """Return True if XTC applies to the token at a position.

        This depends only on the seed and the position, so the target and the drafters agree in all rounds.
        """
        p = self.xtc_probability
        return p > 0.0 and self.noise.stream(XTC_STREAM).uniform(position) < p


def _top_columns(scores: Floats, count: int) -> Ids:
    """Return the `count` highest columns, highest first, or fewer if fewer are finite. A tie goes to the lowest
    column."""
    if count == 1:
        return np.array([scores.argmax()])
    best = highest_columns(scores, count)
    return best[np.argsort(-scores[best], kind="stable")[:count]]


def _log_probs(all_scores: Floats, chosen: Floats) -> list[float]:
    """Return the log-softmax, over all scores, of the chosen scores. The first chosen score must be the highest of
    all."""
    total = np.exp(all_scores - chosen[0]).sum(dtype=np.float64)
    log_probs: list[float] = (chosen - chosen[0] - math.log(total)).tolist()
    return log_probs


def _softmax_at(row: Tensor, tokens: Ids | None, scores: Floats, size: int) -> Tensor:
    """Return a tensor [size] with softmax(scores) at `tokens` and 0 elsewhere. It has the dtype and device of `row`."""
    probs = torch.from_numpy(scores).softmax(-1).to(row)
    if tokens is None:
        return probs
    return row.new_zeros(size).scatter_(0, torch.from_numpy(tokens).to(row.device), probs)


def not_finite(position: int) -> NonFiniteLogits:
    """Return the error for a row of logits without a finite maximum."""
    return NonFiniteLogits(
        f"the model's logits near position {position} are not finite",
        "Try dtype float32; if the error persists, the weights are damaged",
    )


def _check_finite(best: float, raw: Tensor, position: int) -> None:
    """Raise an error if `best`, the highest logit of a row, is not finite. `raw` is the row before processors."""
    if math.isfinite(best):
        return
    if not math.isfinite(float(raw.max())):
        raise not_finite(position)
    if best == -math.inf:
        raise NoTokenLeft(
            f"every token is banned at position {position}",
            "Relax bad_words, logit_bias, no_repeat_ngram_size, min_new_tokens, thinking_budget, the grammar or your "
            "own processors",
        )
    raise NonFiniteLogits(
        f"a logits processor made the logits at position {position} infinite or NaN",
        "Make it return finite numbers or -inf",
    )
