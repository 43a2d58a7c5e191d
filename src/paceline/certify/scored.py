"""Long sampled texts: is the most likely token sampled as often as the log-probabilities say?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from paceline.certify.compare import ALPHA, Sides
from paceline.certify.prompts import NamedPrompt
from paceline.certify.side import NotOffered, ScoredToken, Side
from paceline.certify.statistics import sign_flip
from paceline.certify.transport import EndpointError

_FRESH = 2_000_000
_MAX_PROMPT_CHARACTERS = 2000
"""Maximum length of a prompt, in characters."""


@dataclass(frozen=True, slots=True)
class ScoredResult:
    """The comparison of long sampled texts.

    Attributes:
        texts: Number of texts of each side. 0 if the endpoints give no log-probabilities.
        by_plain: True if the plain endpoint scored the texts of both sides, False if each side scored its own.
        excess: How much more often the speculative side samples the most likely token than the plain side does, as a
            share of all tokens, after subtracting the probability of that token.
        p_value: Sign-flip test over the texts, two-sided.
        repeated_p_value: The same with fresh seeds, asked only if the first was small. Else None.
        detectable: Excess that would have been found with probability 0.95.
    """

    texts: int
    by_plain: bool = False
    excess: float = 0.0
    p_value: float = 1.0
    repeated_p_value: float | None = None
    detectable: float = 1.0

    @property
    def differs(self) -> bool:
        """True if both tests reject."""
        return self.repeated_p_value is not None and self.repeated_p_value < 0.01


def compare_scores(sides: Sides, tasks: Sequence[NamedPrompt], texts: int, tokens: int) -> ScoredResult:
    """Sample texts at temperature 1 on both sides, and score them.

    A text's score is the share of its tokens that are the most likely ones, less the mean probability of these tokens.
    Its expectation is 0, whatever the prompt is, and so the scores of both sides for the same prompt are exchangeable.

    Args:
        sides: Both sides.
        tasks: Prompts. They take turns.
        texts: Number of texts of each side.
        tokens: Length of a text.
    """
    short = [task for task in tasks if len(task.text) <= _MAX_PROMPT_CHARACTERS] or tasks
    asked = [short[i % len(short)] for i in range(texts)]
    by_plain = _echoes(sides.plain)
    try:
        first = _score_all(sides, asked, tokens, by_plain, 0)
        if not first:
            return ScoredResult(0)
        p_value, again = sign_flip([a - b for a, b, _ in first]), None
        if p_value < ALPHA:
            sides.allow(float("inf"))  # a second set must have the same size, however long it takes
            fresh = _score_all(sides, asked[: len(first)], tokens, by_plain, _FRESH)
            again = sign_flip([a - b for a, b, _ in fresh])
    except (NotOffered, EndpointError):
        return ScoredResult(0)
    spread = math.sqrt(sum(variance for _, _, variance in first)) / len(first)
    normal = NormalDist()
    detectable = spread * (normal.inv_cdf(1 - ALPHA / 2) + normal.inv_cdf(0.95))
    excess = sum(a - b for a, b, _ in first) / len(first)
    return ScoredResult(len(first), by_plain, excess, p_value, again, min(1.0, detectable))


def _score_all(
    sides: Sides, tasks: Sequence[NamedPrompt], tokens: int, by_plain: bool, first: int
) -> list[tuple[float, float, float]]:
    """Return the scores of both sides' texts for each prompt, and the variance of their difference."""
    speculative, plain = (replace(side, raw=side.raw or by_plain) for side in (sides.speculative, sides.plain))

    def one(item: tuple[int, NamedPrompt]) -> tuple[float, float, float] | None:
        seed, task = item
        sides.note(f"sampled: long text {seed - first + 1} of {len(tasks)}")
        found = [
            _text_scores(side, plain if by_plain else None, task.text, seed, tokens) for side in (speculative, plain)
        ]
        if not all(found):
            return None
        (a, x), (b, y) = map(_score, found)
        return a, b, x + y

    scored = sides.run_concurrently(one, enumerate(tasks, first))
    for side, asked in ((sides.speculative, speculative), (sides.plain, plain)):
        side.requests, side.tokens, side.drafted = asked.requests, asked.tokens, asked.drafted
    return [one for one in scored if one]


def _text_scores(side: Side, scorer: Side | None, prompt: str, seed: int, tokens: int) -> Sequence[ScoredToken]:
    """Sample a text. Return its tokens as `scorer` rates them, or as the side itself does."""
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": tokens, "seed": seed}
    fields |= {} if scorer else {"logprobs": True, "top_logprobs": 1}
    try:
        reply = side.ask(prompt, **fields)
    except NotOffered:
        reply = side.ask(prompt, **{name: value for name, value in fields.items() if name != "seed"})
    if scorer:
        return _echoed(scorer, prompt, reply.text)
    scored = [token for token in reply.scores if token.top]
    # Some servers give no log-probabilities for drafted tokens, and the remaining tokens are not a fair sample.
    return scored if 2 * len(scored) > len(reply.scores) else []


def _echoed(scorer: Side, prompt: str, text: str) -> Sequence[ScoredToken]:
    """Return the tokens of a text that follows a prompt, as the scorer rates them."""
    reply = scorer.ask(prompt + text, echo=True, logprobs=True, top_logprobs=1, max_tokens=1)
    # Count from the end, because some servers begin with a token (BOS) that is not part of the prompt's text.
    position = sum(len(token.text) for token in reply.scores) - len(reply.text)
    found = []
    for token in reply.scores:
        if len(prompt) <= position < len(prompt) + len(text) and token.top:
            found.append(token)
        position += len(token.text)
    return found


def _echoes(side: Side) -> bool:
    """Return True if a side scores given texts: text completions with `echo` and `logprobs`."""
    try:
        return len(_echoed(replace(side, raw=True), "One, two, three,", " four, five, six,")) > 1
    except (NotOffered, EndpointError):
        return False


def _score(tokens: Sequence[ScoredToken]) -> tuple[float, float]:
    """Return a text's score, and its variance if the log-probabilities are right."""
    best = [max(token.top.values()) for token in tokens]
    hits = sum(token.logprob > value - 1e-6 for token, value in zip(tokens, best, strict=True))
    likely = [min(1.0, math.exp(value)) for value in best]
    n = len(tokens)
    return (hits - sum(likely)) / n, sum(p * (1 - p) for p in likely) / n**2
