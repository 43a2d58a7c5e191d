"""The whole examination of `paceline doctor`: timings, acceptance, forecasts and advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.bench.costs import PassTimer
from paceline.bench.doctor import advice
from paceline.bench.doctor.acceptance import PROMPTS, observe, stored, stored_drafters, write_replies
from paceline.bench.doctor.machine import Machine, measure_machine
from paceline.bench.doctor.predict import Drafting, Forecast, forecast, overall_speedup
from paceline.bench.doctor.weights import quantised_bytes
from paceline.bench.provenance import cpu_name
from paceline.bench.replay.predict import format_budget
from paceline.bench.replay.run import Replayer
from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.drafters.factory import AUTO, open_drafter, spec_name
from paceline.drafters.trimmed import DraftVocab
from paceline.engine.draft_length import Controller
from paceline.kernels.quantize import Precision
from paceline.models.decoder import Decoder
from paceline.recording.rows import RecordedReply

_OBSERVED = 48
"""Tokens per reply over which drafters are observed. Slow models get shorter replies."""
_PATIENCE = 15.0
"""Maximum time for writing all replies, in seconds."""


def choose_drafters(model: Loaded, given: str | None) -> list[str]:
    """Return the drafters to examine: the given one, or all with stored acceptance for this model, or the default."""
    if given is not None:
        return [] if given == "none" else [spec_name(given)]
    return stored_drafters(model) or [AUTO]


def examine(
    model: Loaded,
    drafters: Sequence[str],
    draft_quantize: Precision = "auto",
    draft_vocab: DraftVocab = "auto",
    on_progress: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Measure, forecast and recommend.

    Args:
        model: The target.
        drafters: Drafters to examine.
        draft_quantize: See `open_drafter`.
        draft_vocab: See `open_drafter`.
        on_progress: Called with a line of text at each step.

    Returns:
        The result for JSON and for the command's tables.

    Raises:
        PacelineError: If a drafter cannot be opened.
    """
    opened = {name: open_drafter(name, model, draft_quantize, draft_vocab=draft_vocab) for name in drafters}
    on_progress("timing passes")
    machine, threads = measure_machine(model), torch.get_num_threads()
    on_progress("writing short replies")
    tokens = max(16, min(_OBSERVED, int(_PATIENCE / len(PROMPTS) / machine.passes[1])))
    replies = write_replies(model, {kind: [text] for kind, text in PROMPTS.items()}, tokens)
    parts = []
    for name, drafter in opened.items():
        if drafter is not None:
            on_progress(f"observing {name}")
            drafting = examine_drafter(model, name, drafter, replies)
            parts.append(_drafter(name, drafting, forecast(machine, drafting)))
    speedups = {part["drafter"]: part["ratio"] for part in parts}
    return {
        "model": str(model.path),
        "machine": {
            "cpu": cpu_name(),
            "device": str(model.target.device),
            "threads": threads,
            "kv_bytes_per_token": model.target.cache_bytes(1) if isinstance(model.target, Decoder) else None,
            **_timings(machine),
        },
        "drafters": parts,
        "limits": advice.limits(machine),
        "settings": advice.settings(machine, speedups, quantised_bytes(model), threads),
        "warnings": advice.warnings(machine, threads),
    }


def examine_drafter(
    model: Loaded, name: str, drafter: Drafter, replies: Mapping[str, Sequence[RecordedReply]]
) -> Drafting:
    """Measure the time of a drafter's drafts, and look up or observe its acceptance.

    Args:
        model: The target.
        name: Name of the drafter.
        drafter: The drafter.
        replies: Kind of text -> replies.
    """
    budgets = Controller(drafter.draft).sizes[1:]
    known = stored(model, name, budgets)
    observed, times = observe(model, drafter, budgets, dict(list(replies.items())[:1]) if known else replies)
    first = next(iter(replies.values()))[0]
    slower = Replayer(model).slowdown(first, lambda: drafter, budgets[-1], PassTimer(model.target)).draft
    return Drafting({budget: slower * seconds for budget, seconds in times.items()}, known or observed)


def _timings(machine: Machine) -> dict[str, Any]:
    return {
        "pass_ms": {rows: 1e3 * s for rows, s in machine.passes.items()},
        "pass_ms_per_1000_tokens": 1e6 * machine.growth,
        "prefill_tokens_per_second": 1 / machine.prefill,
        "host_ms": 1e3 * machine.host,
        "read_gb_per_second": machine.bandwidth / 1e9,
        "weight_bytes": machine.weights,
        "floor_ms": 1e3 * machine.min_pass_seconds if machine.min_pass_seconds else None,
        "bandwidth_reached": machine.min_pass_seconds / machine.one_row if machine.min_pass_seconds else None,
        "pass_ms_by_threads": {count: 1e3 * s for count, s in machine.threads.items()},
    }


def _drafter(name: str, drafting: Drafting, forecasts: Sequence[Forecast]) -> dict[str, Any]:
    return {
        "drafter": name,
        "draft_ms": {format_budget(budget): 1e3 * s for budget, s in drafting.seconds.items()},
        "acceptance": drafting.acceptance.source,
        "ratio": overall_speedup(forecasts),
        "kinds": {f.kind: _kind(f) for f in forecasts},
        "reasons": advice.reasons(forecasts, name),
    }


def _kind(f: Forecast) -> dict[str, Any]:
    return {
        "draft": format_budget(f.best.budget),
        "tokens_per_round": f.best.gain.tokens,
        "ratio": f.speedup,
        "decode_ratio": f.decode_speedup,
        "tokens_per_second": f.speed(f.best),
        "plain_tokens_per_second": f.speed(f.plain),
        "first_token_ms": 1e3 * f.first,
    }
