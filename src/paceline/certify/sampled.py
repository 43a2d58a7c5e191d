"""Sampling: comparing the distributions of short replies over many seeds."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.certify.compare import ALPHA, Sides
from paceline.certify.prompts import NamedPrompt
from paceline.certify.side import NotOffered, Side
from paceline.certify.sizes import SAMPLED_TOKENS
from paceline.certify.statistics import Pair, chi_square, detectable, holm

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0, "top_p": 1.0},
    "temperature 0.6": {"temperature": 0.6, "top_p": 1.0},
    "top_p 0.7": {"temperature": 1.0, "top_p": 0.7},
}
"""Settings to sample with. The last two reveal drafts that were drawn with another temperature or top_p."""

_FRESH = 1_000_000


@dataclass(frozen=True, slots=True)
class SampledResult:
    """The comparison of one setting.

    Attributes:
        setting: Name of the setting.
        contexts: Number of contexts.
        samples: Replies per context and side.
        p_value: The smallest p-value of the chi-square tests, before the correction for their number.
        repeated_p_value: The same with fresh seeds, asked only if the first was small. Else None.
        equal_seeds: Share of the seeds with the same reply on both sides.
        detectable: Shift in total variation that would have been found with probability 0.95, by the most sensitive
            test.
        differs: True if both tests reject.
    """

    setting: str
    contexts: int
    samples: int
    p_value: float
    repeated_p_value: float | None
    equal_seeds: float
    detectable: float
    differs: bool


def compare_sampled(sides: Sides, contexts: Sequence[NamedPrompt], seeds: int) -> list[SampledResult]:
    """Sample both sides, and compare the distributions of their replies.

    Test: Pearson's chi-square over all contexts, with rare values pooled, on whole replies and on the words at each
    place. Holm's method controls the false alarms over all tests. Settings that it rejects are sampled again with fresh
    seeds, and differ only if they are also rejected at 0.01 there.
    """
    began = time.monotonic()
    drawn = {name: pairs for name, pairs in _draw(sides, list(SETTINGS), contexts, seeds, 0).items() if pairs}
    p_values = {name: [chi_square(test)[0] for test in _tests(pairs)] for name, pairs in drawn.items()}
    every = [p for ps in p_values.values() for p in ps]
    rejected = iter(holm(every, ALPHA))
    took = time.monotonic() - began
    results = []
    for name, pairs in drawn.items():
        marks, again = [next(rejected) for _ in p_values[name]], None
        if any(marks):
            sides.allow(took)
            fresh = _draw(sides, [name], contexts[: len(pairs)], len(pairs[0][0]), _FRESH)[name]
            again = min(chi_square(test)[0] for test, mark in zip(_tests(fresh), marks, strict=True) if mark)
            again = min(1.0, again * sum(marks))
        couples = [x == y for a, b in pairs for x, y in zip(a, b, strict=True)]
        results.append(
            SampledResult(
                name,
                len(pairs),
                len(pairs[0][0]),
                min(p_values[name]),
                again,
                sum(couples) / len(couples),
                min(detectable(test, ALPHA / len(every)) for test in _tests(pairs)),
                again is not None and again < 0.01,
            )
        )
    return results


def _draw(
    sides: Sides, names: Sequence[str], contexts: Sequence[NamedPrompt], seeds: int, first: int
) -> dict[str, list[Pair]]:
    """Return setting -> replies of both sides per context. Seeds are the outer loop, so a time limit affects all."""

    def one(item: tuple[int, str, NamedPrompt]) -> tuple[str, str, str, str]:
        seed, name, task = item
        # Contexts share no seeds. Otherwise, the replies to different contexts would be correlated.
        own = first + seed * len(contexts) + contexts.index(task)
        fields = {"max_tokens": SAMPLED_TOKENS, "seed": own, **SETTINGS[name]}
        sides.note(f"sampled: {seed + 1} of {seeds} seeds")
        return name, task.text, _reply(sides.speculative, task.text, fields), _reply(sides.plain, task.text, fields)

    items = ((seed, name, task) for seed in range(seeds) for name in names for task in contexts)
    values: dict[str, dict[str, tuple[list[str], list[str]]]] = {name: {} for name in names}
    for name, text, a, b in sides.run_concurrently(one, items):
        pair = values[name].setdefault(text, ([], []))
        pair[0].append(a)
        pair[1].append(b)
    return {name: list(pairs.values()) for name, pairs in values.items()}


def _reply(side: Side, prompt: str, fields: dict[str, Any]) -> str:
    try:
        return side.ask(prompt, **fields).text
    except NotOffered:
        return side.ask(prompt, **{name: value for name, value in fields.items() if name != "seed"}).text


def _tests(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs to compare: whole replies, and the words at each place."""
    tests = [list(pairs)]
    tests += [[(_words(a, i), _words(b, i)) for a, b in pairs] for i in range(SAMPLED_TOKENS)]
    return tests


def _words(texts: Sequence[Hashable], place: int) -> list[str]:
    return ["".join(str(text).split()[place : place + 1]) for text in texts]
