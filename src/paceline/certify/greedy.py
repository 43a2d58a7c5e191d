"""Greedy decoding: the same prompts on both sides, text by text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.certify.compare import ALPHA, Difference, Sides, explain
from paceline.certify.prompts import NamedPrompt
from paceline.certify.side import NotOffered
from paceline.certify.statistics import Pair, exchange_test

_MAX_EXAMINED = 30
_MAX_REPEATED = 4
"""Number of differing prompts to repeat up to `_REPEATS` times. One that always differs is enough for a verdict."""
_REPEATS = 8


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The comparison of greedy texts.

    Attributes:
        prompts: Number of prompts that were answered.
        identical: Prompts with the same text on both sides.
        repeated: Prompts that the speculative side answered twice with the same text.
        plain_repeated: The same for the plain side.
        near_ties: Prompts whose texts diverge at a near-tie.
        real: Prompts whose texts diverge although one token is clearly more likely.
        unknown: Prompts whose texts diverge, without log-probabilities to judge by.
        p_value: Exchange test over all prompts except near-ties: small if the sides differ by more than their noise.
        differences: The differences that were examined.
        refused: Prompts that an endpoint refused, for example because they are too long.
        texts: Prompt -> texts (speculative, plain) if both sides repeat them.
    """

    prompts: int
    identical: int
    repeated: int
    plain_repeated: int
    near_ties: int
    real: int
    unknown: int
    p_value: float
    differences: tuple[Difference, ...]
    refused: int
    texts: dict[str, tuple[str, str]] = field(repr=False)

    @property
    def is_bitwise(self) -> bool:
        """True if all texts are identical, within and between the sides."""
        return self.prompts == self.identical == self.repeated == self.plain_repeated

    @property
    def is_repeatable(self) -> bool:
        """True if each side always repeats its own texts."""
        return self.prompts == self.repeated == self.plain_repeated

    @property
    def differs(self) -> bool:
        """True if the sides differ by more than near-ties and their own noise."""
        return self.p_value < ALPHA


def compare_greedy(sides: Sides, tasks: Sequence[NamedPrompt], tokens: int) -> GreedyResult:
    """Ask both sides each prompt twice. Examine the differences, and repeat prompts that diverge without a near-tie."""
    fields: dict[str, Any] = {"max_tokens": tokens}
    asked: list[tuple[NamedPrompt, list[str], list[str]]] = []
    refused, began = 0, time.monotonic()
    for task in sides.in_time(tasks):
        sides.note(f"greedy: {task.name}")
        a: list[str] = []
        b: list[str] = []
        try:
            _ask_again(sides, task, fields, a, b, 2)
        except NotOffered:
            refused += 1
        else:
            asked.append((task, a, b))
    parted = [one for one in asked if len({*one[1], *one[2]}) > 1]
    sides.allow((time.monotonic() - began) / 2)  # to examine the differences
    differences: list[Difference] = []
    pairs: list[Pair] = []
    for task, a, b in parted[:_MAX_EXAMINED]:
        at = next(((x, y) for x in a for y in b if x != y), None)
        difference = explain(sides, task.name, task.text, fields, *at) if at else None
        differences += [difference] if difference else []
        if difference is None or not difference.is_near_tie:
            if len(pairs) < _MAX_REPEATED:
                _ask_again(sides, task, fields, a, b, _REPEATS)
            pairs.append((a, b))
    count = {kind: sum(one.is_near_tie is kind for one in differences) for kind in (True, False, None)}
    return GreedyResult(
        len(asked),
        sum(a[0] == b[0] for _, a, b in asked),
        sum(a[0] == a[1] for _, a, _ in asked),
        sum(b[0] == b[1] for _, _, b in asked),
        count[True],
        count[False],
        count[None],
        exchange_test(pairs),
        tuple(differences),
        refused,
        {task.text: (a[0], b[0]) for task, a, b in asked if a[0] == a[1] and b[0] == b[1]},
    )


def _ask_again(sides: Sides, task: NamedPrompt, fields: dict[str, Any], a: list[str], b: list[str], times: int) -> None:
    """Ask both sides a prompt in turns, until each has answered this many times."""
    while len(a) < times and not (len(a) > 1 and sides.out_of_time):
        a.append(sides.speculative.ask(task.text, **fields).text)
        b.append(sides.plain.ask(task.text, **fields).text)


def shorten(sides: Sides, found: Difference, most: int = 40) -> Difference:
    """Return a smaller example of a difference: fewer words in the prompt, then fewer tokens.

    Args:
        sides: Both sides. They must repeat their texts.
        found: The difference.
        most: Maximum number of trials.
    """
    trials = 0

    def texts(words: Sequence[str], tokens: int) -> tuple[str, str] | None:
        """Return both replies if they differ, and not at a near-tie."""
        nonlocal trials
        trials += 1
        prompt, fields = " ".join(words), {"max_tokens": tokens}
        a, b = (side.ask(prompt, **fields).text for side in (sides.speculative, sides.plain))
        if a == b or explain(sides, "", prompt, fields, a, b).is_near_tie:
            return None
        return a, b

    words, tokens = found.prompt.split(" "), int(found.fields["max_tokens"])
    size = len(words) // 2
    while size and trials < most * 3 // 4:
        for start in range(0, len(words), size):
            fewer = words[:start] + words[start + size :]
            if trials >= most * 3 // 4 or sides.out_of_time:
                break
            if fewer and texts(fewer, tokens):
                words = fewer
                break
        else:
            size //= 2
        if sides.out_of_time:
            break
    low, high = 0, tokens
    while high - low > 1 and trials < most and not sides.out_of_time:
        middle = (low + high) // 2
        low, high = (low, middle) if texts(words, middle) else (middle, high)
    kept = texts(words, high)
    if kept is None:
        return found
    return explain(sides, found.name, " ".join(words), {"max_tokens": high}, *kept)
