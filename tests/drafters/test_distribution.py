"""With `rejection` and `block`, every drafter keeps the distribution of every kind of model, by chi-square tests.

The seeds are fixed, so results are the same every time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules

import pytest

from paceline import drafters
from paceline.drafters import factory
from paceline.drafters.base import Drafter
from paceline.drafters.stack import DrafterWrapper
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.results import Batch
from paceline.engine.scheduler import Task
from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.testing.tiny import start
from paceline.types import DraftBudget, Want
from paceline.verify.rules import RULES
from paceline.verify.tree import pack_prefix
from tests.support.every_drafter import EVERY, HEADS, KINDS, PAIRS, VOCAB

PROMPT = [1, 2, 3, 0, 1, 2, 4, 1]
LENGTH, REPLIES, TOGETHER, HEAT = 3, 640, 64, 2.0
TREE = DraftBudget(14, 2, 4)
EXACT = [rule for rule in RULES if rule not in ("match", "typical")]
"""The rules that keep the distribution and not the text. `typical` keeps neither."""
CASES = [(*pair, EXACT[(list(KINDS).index(pair[0]) + list(EVERY).index(pair[1])) % len(EXACT)]) for pair in PAIRS]
"""Every kind of model with every drafter, and each kind and drafter with every rule."""

Reply = tuple[int, ...]


@cache
def model(kind: str) -> Decoder:
    return KINDS[kind](0)


@cache
def distribution(kind: str) -> dict[Reply, float]:
    """Return the exact probability of every reply of `LENGTH` tokens."""
    target, found = model(kind), {}
    for above in itertools.product(range(VOCAB), repeat=LENGTH - 1):
        cache, text = target.new_cache(), [*PROMPT, *above]
        out = target.forward(pack_prefix(text, cache.acquire(len(text)), 0, target.device), cache, Want())
        rows = (out.logits[0, len(PROMPT) - 1 : len(text)] / HEAT).softmax(-1)
        chance = 1.0
        for row, token in zip(rows, above, strict=False):
            chance *= float(row[token])
        found.update({(*above, last): chance * float(rows[-1][last]) for last in range(VOCAB)})
    assert sum(found.values()) == pytest.approx(1.0)
    return found


def excess(counts: Mapping[Reply, int], expected: Mapping[Reply, float]) -> float:
    """Return the distance of chi-square from its mean in standard deviations. Rare replies share one cell."""
    common = {reply: p * REPLIES for reply, p in expected.items() if p * REPLIES >= 5}
    rest = REPLIES - sum(common.values()), REPLIES - sum(counts[reply] for reply in common)
    cells = [*((p, counts[reply]) for reply, p in common.items()), rest]
    chi_square = sum((seen - p) ** 2 / p for p, seen in cells)
    return (chi_square - len(common)) / (2 * len(common)) ** 0.5


def replies(target: Decoder, drafter: str, rule: str) -> Counter[Reply]:
    """Count the replies of `REPLIES` seeds. Replies that run together share the prefill of the prompt."""
    engine = Engine(target, EVERY[drafter](target), TREE)

    def begin(source: Request | None, seed: int) -> Request:
        how = Sampling(max_new_tokens=LENGTH, temperature=HEAT, seed=seed, rule=rule)  # type: ignore[arg-type]
        return start(engine, PROMPT, how, (), source)

    counts: Counter[Reply] = Counter()
    for first in range(0, REPLIES, TOGETHER):
        seeds = range(first, first + TOGETHER)
        tasks = [Task(partial(begin, seed=seed), PROMPT, group="replies") for seed in seeds]
        for _ in Batch(engine, tasks, len(tasks)):
            pass
        requests = [task.request for task in tasks if task.request]
        counts.update(tuple(request.token_ids[len(PROMPT) :]) for request in requests)
    assert counts.total() == REPLIES
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "drafter", "rule"), CASES)
def test_replies_have_the_distribution_of_plain_decoding(kind: str, drafter: str, rule: str) -> None:
    assert excess(replies(model(kind), drafter, rule), distribution(kind)) < 4


@pytest.mark.slow
def test_another_temperature_is_noticed() -> None:
    cold = {reply: p**1.2 for reply, p in distribution("attention").items()}
    total = sum(cold.values())
    assert (
        excess(replies(model("attention"), "suffix", "rejection"), {reply: p / total for reply, p in cold.items()}) > 4
    )


def test_no_drafter_of_the_registry_is_left_out() -> None:
    for module in iter_modules(drafters.__path__):
        import_module(f"{drafters.__name__}.{module.name}")
    found, waiting = set(), [Drafter]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        own = kind.__module__.startswith(drafters.__name__) and not kind.__name__.startswith("_")
        if own and not isabstract(kind):
            found.add(kind)
    target = model("attention")
    assert found - {DrafterWrapper} == {type(make(target)) for make in EVERY.values()}
    assert HEADS.keys() == factory._CLASSES.keys()
    assert {*HEADS.values()} <= EVERY.keys()
    assert {type(make()) for make in factory._LOOKUPS.values()} <= found
    assert EXACT == ["rejection", "block"]
    assert len({case[1:] for case in CASES}) == len(EVERY) * len(EXACT)
