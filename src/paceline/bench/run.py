"""From a list of names to systems that write, and to the result of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.figures import summarise
from paceline.bench.measure import Reply, Sample, Write, measure
from paceline.bench.peers import PEERS, Missing, Setting
from paceline.bench.questions import Question
from paceline.bench.source import provenance
from paceline.drafters.make import make_drafter
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.models.loader import load_model
from paceline.sampling import Sampling
from paceline.types import Tree


@dataclass(frozen=True, slots=True)
class Order:
    """What to compare. `drafters`: as for `paceline.load`; plain decoding is always measured, and comes first. `draft`:
    how much they draft, None for the controller. `against`: names of `PEERS`, each measured plain and with its prompt
    lookup. `temperature`: 0 is greedy."""

    drafters: Sequence[str] = ("none", "auto")
    draft: Tree | None = None
    against: Sequence[str] = ()
    tokens: int = 96
    repeats: int = 1
    temperature: float = 0.0
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if unknown := [name for name in self.against if name not in PEERS]:
            raise InvalidOption(f"{unknown[0]!r} is no program to compare with", f"There are {', '.join(PEERS)}")


PLAIN = "plain"


def systems(llm: LLM, order: Order) -> tuple[dict[str, Write], list[str]]:
    """Name -> what writes, and a line for each peer that is missing. `llm` lends its model. Raises `PacelineError`."""
    sampling = Sampling(max_new_tokens=order.tokens, temperature=order.temperature, seed=order.seed)
    found = {PLAIN: _own(llm, None, None, sampling)}
    for drafter in dict.fromkeys(order.drafters):
        if drafter != "none":
            found[drafter] = _own(llm, drafter, order.draft, sampling)
    missing = []
    for name in dict.fromkeys(order.against):
        begin, lookup = PEERS[name]
        setting = Setting(order.tokens, order.temperature, order.threads)
        try:
            found[name] = begin(llm, setting)
            if not order.temperature:  # prompt lookup of some peers is greedy only
                found[f"{name} lookup"] = begin(llm, replace(setting, lookup=lookup))
        except Missing as error:
            missing.append(str(error))
    return found, missing


def run(
    llm: LLM,
    order: Order,
    questions: Sequence[Question],
    on_sample: Callable[[Sample, int], object] = lambda s, n: None,
) -> dict[str, Any]:
    """The whole result, for JSON: {"provenance", "systems", "missing", "samples"}. `on_sample` sees every sample, and
    how many there will be."""
    found, missing = systems(llm, order)
    total = len(found) * len(questions) * order.repeats
    settings = {
        "model": str(llm.model.path),
        "drafters": list(order.drafters),
        "draft": None if order.draft is None else str(order.draft),
        "against": list(order.against),
        "tokens": order.tokens,
        "repeats": order.repeats,
        "temperature": order.temperature,
        "questions": len(questions),
        "exact": llm.exact,
    }
    source = provenance("paceline", **settings)  # before the run, so that the load it shows is the machine's own
    samples = []
    for sample in measure(found, questions, order.repeats):
        samples.append(sample)
        on_sample(sample, total)
    return {
        "provenance": source,
        "systems": [summarise(samples, name, PLAIN) for name in found],
        "missing": missing,
        "samples": [sample.as_dict() for sample in samples],
    }


def _own(llm: LLM, drafter: str | None, draft: Tree | None, sampling: Sampling) -> Write:
    made = LLM(llm.model, make_drafter(drafter, llm.model, load_model), draft)

    def write(text: str) -> Reply:
        began, first = time.perf_counter(), 0.0
        with made.stream(text, sampling) as stream:
            for _ in stream:
                first = first or time.perf_counter() - began
        done = stream.completion
        return Reply(done.token_ids, first, done.stats)

    return write
