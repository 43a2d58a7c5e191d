"""From an order to the result of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from paceline.bench.child import Child
from paceline.bench.figures import findings, summarise
from paceline.bench.measure import Lost, Sample, Write, measure
from paceline.bench.peers import PEERS, Missing, PeerSetup
from paceline.bench.questions import Question
from paceline.bench.source import provenance
from paceline.bench.systems import OURS, Comparison, System, own_systems, peer_systems
from paceline.llm import LLM


def run(
    targets: Mapping[str, LLM],
    order: Comparison,
    questions: Sequence[Question],
    on_sample: Callable[[Sample, int], object] = lambda sample, total: None,
    **settings: Any,
) -> dict[str, Any]:
    """The whole result, for JSON: {"provenance", "systems", "findings", "missing", "samples"}.

    `targets`: the model by precision, "" where it is not quantised. `on_sample` sees every sample, and how many there
    will be. `settings` go into the provenance.
    """
    with ExitStack() as stack:
        found = own_systems(targets, order)
        theirs, missing = _peers(stack, next(iter(targets.values())), order, questions)
        found |= theirs
        source = provenance(**_settings(targets, order, questions) | settings)  # before the run: the load it begins at
        samples: list[Sample] = []
        for event in measure({s.name: write for s, write in found.items()}, questions, order.repeats):
            if isinstance(event, Sample):
                samples.append(event)
                on_sample(event, len(found) * len(questions) * order.repeats)
            else:
                name, lost = event
                missing.append(f"{name}: {lost}")
                found = {system: write for system, write in found.items() if system.name != name}
    kept = [system for system in found if system.base in found]
    samples = [sample for sample in samples if sample.system in {system.name for system in kept}]
    figures = _figures(kept, samples) | {"missing": missing}
    return {"provenance": source, **figures, "samples": [sample.as_dict() for sample in samples]}


def _peers(
    stack: ExitStack, llm: LLM, order: Comparison, questions: Sequence[Question]
) -> tuple[dict[System, Write], list[str]]:
    """Those that can begin, one after the other, and a line for each that cannot."""
    longest = max(len(llm.encode(question.text)) for question in questions)
    positions = min(llm.model.target.context_length, longest + order.tokens)
    device = str(llm.model.target.device)
    job = PeerSetup(str(llm.model.path), tuple(llm.model.eos), order.tokens, positions, order.threads, device)
    found: dict[System, Write] = {}
    missing = []
    for name in dict.fromkeys(order.against):
        child = _begin(name, job)
        if isinstance(child, Child):
            stack.callback(child.close)
            found |= peer_systems(name, child, llm, order)
        else:
            missing.append(f"{name}: {child}")
    return found, missing


def _begin(name: str, job: PeerSetup) -> Child | Missing | Lost:
    try:
        return Child(PEERS[name], job)
    except (Missing, Lost) as error:
        return error


def _figures(systems: Sequence[System], samples: Sequence[Sample]) -> dict[str, Any]:
    summaries = []
    for system in systems:
        others = [s.name for s in systems if s.temperature == system.temperature and s.program != OURS]
        summaries.append(asdict(system) | summarise(samples, system.name, system.base.name, others))
    return {"systems": summaries, "findings": findings(summaries)}


def _settings(targets: Mapping[str, LLM], order: Comparison, questions: Sequence[Question]) -> dict[str, Any]:
    llm = next(iter(targets.values()))
    return {
        "model": str(llm.model.path),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(order).items()},
        "questions": len(questions),
        "guarantee": {precision or "as loaded": target.guarantee for precision, target in targets.items()},
    }
