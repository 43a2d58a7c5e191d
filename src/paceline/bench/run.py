"""A whole benchmark run, from a comparison to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from paceline.bench.figures import findings, summarise
from paceline.bench.measure import Answer, Sample, SystemFailed, measure
from paceline.bench.peer_process import PeerProcess
from paceline.bench.peers import PEERS, PeerSetup, PeerUnavailable
from paceline.bench.provenance import provenance
from paceline.bench.questions import Question, batches
from paceline.bench.systems import OURS, Comparison, System, own_systems, peer_systems
from paceline.llm import LLM


def run(
    targets: Mapping[str, LLM],
    comparison: Comparison,
    questions: Sequence[Question],
    on_sample: Callable[[Sample, int], object] = lambda sample, total: None,
    **settings: Any,
) -> dict[str, Any]:
    """Run a benchmark.

    With batch widths above 1, every system answers batches of the largest width, with up to its own `width` of requests
    at a time.

    Args:
        targets: Precision -> model. The precision "" means weights as loaded.
        comparison: Systems to compare.
        questions: Questions to answer.
        on_sample: Called with each sample and the expected number of samples.
        **settings: Additional values for the provenance.

    Returns:
        The result for JSON: {"provenance", "systems", "findings", "missing", "samples"}.

    Raises:
        PacelineError: If a system of Paceline cannot be created.
    """
    llm, width = next(iter(targets.values())), max(comparison.widths)
    settings = {"model": llm.model.path, **asdict(comparison), "questions": len(questions)} | settings
    settings["guarantee"] = {precision or "as loaded": target.guarantee for precision, target in targets.items()}
    questions = batches(questions, width) if width > 1 else questions
    with ExitStack() as stack:
        systems = own_systems(targets, comparison)
        peers, missing = _peers(stack, llm, comparison, questions)
        systems |= peers
        source = provenance(**settings)  # recorded before the run, so that it shows the load at the beginning
        samples: list[Sample] = []
        for event in measure({s.name: answer for s, answer in systems.items()}, questions, comparison.repeats):
            if isinstance(event, Sample):
                samples.append(event)
                on_sample(event, len(systems) * len(questions) * comparison.repeats)
            else:
                name, error = event
                missing.append(f"{name}: {error}")
                systems = {system: answer for system, answer in systems.items() if system.name != name}
    kept = [system for system in systems if system.base in systems]
    samples = [sample for sample in samples if sample.system in {system.name for system in kept}]
    figures = _figures(kept, samples) | {"missing": missing}
    return {"provenance": source, **figures, "samples": [sample.as_dict() for sample in samples]}


def _peers(
    stack: ExitStack, llm: LLM, comparison: Comparison, questions: Sequence[Question]
) -> tuple[dict[System, Answer], list[str]]:
    """Start the peers. Return the systems of all that run, and a line of text for each peer that cannot run."""
    longest = max(len(llm.encode(text)) for question in questions for text in question.texts)
    positions = min(llm.model.target.context_length, longest + comparison.tokens)
    device = str(llm.model.target.device)
    model, eos, tokens = str(llm.model.path), tuple(llm.model.eos), comparison.tokens
    setup = PeerSetup(model, eos, tokens, positions, comparison.threads, device, comparison.draft_model)
    systems: dict[System, Answer] = {}
    missing = []
    for name in dict.fromkeys(comparison.against):
        peer = PEERS[name]
        try:
            process = PeerProcess(peer, setup)
        except (PeerUnavailable, SystemFailed) as error:
            missing.append(f"{name}: {error}")
        else:
            stack.callback(process.close)
            systems |= peer_systems(name, process, llm, comparison)
    return systems, missing


def _figures(systems: Sequence[System], samples: Sequence[Sample]) -> dict[str, Any]:
    summaries = []
    for system in systems:
        others = [s.name for s in systems if s.temperature == system.temperature and s.program != OURS]
        others += [system.single.name] if system.single in systems else []
        about = asdict(system) | {"single": system.single.name}
        summaries.append(about | summarise(samples, system.name, system.base.name, others))
    return {"systems": summaries, "findings": findings(summaries)}
