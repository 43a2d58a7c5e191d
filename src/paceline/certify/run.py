"""A certificate from start to finish: the parts in order, each within its share of the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline.certify.certificate import Certificate
from paceline.certify.compare import Sides, evenly_spread
from paceline.certify.features import compare_features
from paceline.certify.greedy import compare_greedy, shorten
from paceline.certify.load import compare_load
from paceline.certify.prompts import NamedPrompt, answerable, contexts, tasks
from paceline.certify.sampled import compare_sampled
from paceline.certify.scored import compare_scores
from paceline.certify.sizes import WorkSizes
from paceline.certify.work import compare_quality, compare_speed

_SHARES = {
    "greedy": 0.25,
    "features": 0.35,
    "sampled": 0.18,
    "scored": 0.07,
    "load": 0.06,
    "quality": 0.05,
    "speed": 0.04,
}
"""Part -> share of the time. If a part does not use all of its time, later parts get the rest."""


def examine(
    sides: Sides, sizes: WorkSizes, facts: dict[str, Any], prompts: Sequence[NamedPrompt] = (), seed: int = 0
) -> Certificate:
    """Run all parts.

    Args:
        sides: The endpoints.
        sizes: Amounts of work.
        facts: Facts about the run, for the certificate.
        prompts: Prompts for greedy replies. By default, the built-in prompts.
        seed: Seed of the built-in prompts.
    """
    started = time.monotonic()
    shares = dict(_SHARES)

    def begin(part: str) -> None:
        left = max(0.0, sizes.seconds - (time.monotonic() - started))
        sides.allow(left * shares[part] / sum(shares.values()))
        del shares[part]

    begin("greedy")
    asked = prompts or tasks(sizes.prompts, seed)
    certificate = Certificate(facts, sizes, compare_greedy(sides, asked, sizes.tokens))
    greedy = certificate.greedy
    real = [one for one in greedy.differences if one.is_near_tie is False]
    if greedy.differs and greedy.is_repeatable and real:
        sides.note("greedy: shortening an example")
        sides.allow(sizes.seconds * 0.1)
        certificate.smallest = shorten(sides, min(real, key=lambda one: len(one.prompt)))
    begin("features")
    certificate.features = compare_features(sides, greedy.is_bitwise)
    begin("sampled")
    certificate.sampled = compare_sampled(sides, contexts(sizes.contexts, seed), sizes.seeds)
    begin("scored")
    certificate.scored = compare_scores(sides, asked, sizes.texts, sizes.tokens)
    begin("load")
    certificate.load = compare_load(sides, greedy.texts, sizes.tokens)
    begin("quality")
    certificate.quality = compare_quality(sides, answerable(sizes.questions, seed))
    begin("speed")
    certificate.speed = compare_speed(sides, evenly_spread(asked, sizes.timed), sizes.tokens)
    certificate.drafted = sides.speculative.drafted, None if sides.plain_drafts else sides.plain.drafted
    certificate.usage = {
        "requests": sides.speculative.requests + sides.plain.requests,
        "tokens": sides.speculative.tokens + sides.plain.tokens,
        "seconds": round(time.monotonic() - started, 1),
    }
    return certificate
