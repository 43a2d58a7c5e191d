"""The two sides of a certificate, and the first difference of two texts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.certify.side import NotOffered, Side
from paceline.certify.transport import EndpointError

ALPHA = 0.001
"""Maximum probability of a false alarm in each part of a certificate."""

_MAX_SHOWN = 120
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Sides:
    """Both sides, and the time that the current part may take.

    Attributes:
        speculative: The endpoint with speculation.
        plain: The endpoint without speculation.
        concurrency: Number of simultaneous requests in parts that do not choose it themselves.
        near_tie_gap: Gap of log-probabilities below which two tokens are a near-tie, in nats.
        note: Called with a line about the progress.
        plain_drafts: True if the plain side is meant to speculate too, with another drafter.
    """

    speculative: Side
    plain: Side
    concurrency: int = 4
    near_tie_gap: float = 0.25
    note: Callable[[str], None] = field(default=lambda text: None)
    plain_drafts: bool = False
    _end: float = float("inf")

    def allow(self, seconds: float) -> None:
        """Give the next part this much time."""
        self._end = time.monotonic() + seconds

    @property
    def out_of_time(self) -> bool:
        """True if the current part has no time left."""
        return time.monotonic() > self._end

    def in_time(self, items: Iterable[T]) -> Iterable[T]:
        """Yield items while there is time left, but at least one."""
        for i, item in enumerate(items):
            if i and self.out_of_time:
                return
            yield item

    def run_concurrently(self, function: Callable[[T], R], items: Iterable[T], width: int | None = None) -> list[R]:
        """Compute results in threads. Return the results for as many items as the time allows."""
        width = width or self.concurrency
        if width == 1:
            return [function(item) for item in self.in_time(items)]

        def one(numbered: tuple[int, T]) -> tuple[R] | None:
            number, item = numbered
            return None if number >= width and self.out_of_time else (function(item),)

        with ThreadPoolExecutor(width) as pool:
            return [result[0] for result in pool.map(one, enumerate(items)) if result]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two greedy replies.

    Attributes:
        name: Name of the prompt.
        prompt: The prompt.
        fields: Fields of the request.
        prefix: End of the common prefix.
        speculative: Continuation with speculation.
        plain: Continuation without speculation.
        gap: Log-probability of the plain token minus the speculative token's, on the plain side. None if unknown.
        speculative_gap: The same on the speculative side, with the roles exchanged.
        is_near_tie: True if the gap is smaller than the limit. None if no gap is known.
    """

    name: str
    prompt: str
    fields: dict[str, Any]
    prefix: str
    speculative: str
    plain: str
    gap: float | None = None
    speculative_gap: float | None = None
    is_near_tie: bool | None = None


def first_difference(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def explain(sides: Sides, name: str, prompt: str, fields: dict[str, Any], speculative: str, plain: str) -> Difference:
    """Describe how two replies to a prompt differ, and how close the two tokens are."""
    gap = token_gap(sides.plain, prompt, fields, plain, speculative, sides.near_tie_gap)
    other = token_gap(sides.speculative, prompt, fields, speculative, plain, sides.near_tie_gap)
    known = other if gap is None else gap
    at = first_difference(speculative, plain)
    return Difference(
        name,
        prompt,
        fields,
        plain[max(0, at - _MAX_SHOWN) : at],
        speculative[at : at + _MAX_SHOWN],
        plain[at : at + _MAX_SHOWN],
        gap,
        other,
        None if known is None else abs(known) < sides.near_tie_gap,
    )


def token_gap(side: Side, prompt: str, fields: dict[str, Any], own: str, other: str, near: float) -> float | None:
    """Return how much more likely a side's own token is than the other side's, where the texts first differ.

    Returns:
        The gap in nats, or a lower bound if the other token is not among the alternatives. None if the side gives no
        log-probabilities, does not repeat its text, or gives no alternatives and the bound is below `near_tie_gap`.
    """
    try:
        reply = side.ask(prompt, **(fields | {"logprobs": True, "top_logprobs": 5}))
    except (NotOffered, EndpointError):
        return None
    if first_difference(reply.text, own) <= first_difference(own, other) and reply.text != own:
        return None
    position = 0
    for token in reply.scores:
        if "\ufffd" in token.text:
            return None  # part of a character: texts cannot be aligned
        rest = other[position:]
        if token.text and rest.startswith(token.text):
            position += len(token.text)
            continue
        others = {text: value for text, value in token.top.items() if text != token.text}
        same = {text: value for text, value in others.items() if text and rest.startswith(text)}
        if not others:
            bound = _least_gap(token.logprob)
            return bound if bound >= near else None
        if same:
            return token.logprob - same[max(same, key=len)]
        # The other side has ended the reply here, with a token without text, or its token is unlikely.
        return token.logprob - (min(others.values()) if rest else max(others.values()))
    return None


def _least_gap(logprob: float) -> float:
    """Return a lower bound of a token's lead over any other token, since all others share the remaining probability."""
    # Some servers report 0 for tokens without a known log-probability.
    return logprob - math.log(-math.expm1(logprob)) if logprob < 0 else -math.inf


def evenly_spread(items: Sequence[T], count: int) -> Sequence[T]:
    """Return at most `count` items, spread evenly."""
    step = max(1, len(items) // count) if count else 1
    return items[::step][:count]
