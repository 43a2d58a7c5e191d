"""The whole examination."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from paceline.bench.doctor import advice
from paceline.bench.doctor.acceptance import PROMPTS, name_of, stored, stored_drafters, watched
from paceline.bench.doctor.codes import quantised_bytes
from paceline.bench.doctor.machine import (
    PREFIX,
    ROWS,
    Machine,
    PassTimer,
    bandwidth,
    by_threads,
    lengthen,
    passes,
    weight_bytes,
)
from paceline.bench.doctor.predict import Drafting, Forecast, forecast, overall
from paceline.bench.doctor.watch import Onlooker
from paceline.bench.source import cpu_name
from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.drafters.factory import AUTO, open_drafter, spec_name
from paceline.engine.draft_length import Controller
from paceline.kernels.quantize import Mode
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling

Say = Callable[[str], object]

_WATCHED = 48
"""Tokens of a reply over which a drafter is looked at, or fewer where that would take too long."""
_PATIENCE = 15.0
"""Seconds that all replies of a drafter of which nothing is stored may take."""


def choose_drafters(model: Loaded, given: str | None) -> list[str]:
    """Those to examine: the given one, else all that something is stored of for the model, else the default."""
    if given is not None:
        return [] if given == "none" else [spec_name(given)]
    return stored_drafters(model) or [AUTO]


def examine(
    model: Loaded, drafters: Sequence[str], draft_quantize: Mode | None = None, say: Say = lambda text: None
) -> dict[str, Any]:
    """Measures, predicts and recommends: for JSON, and for the command's tables. Raises `PacelineError`.

    `say`: told what is being done.
    """
    made = {name: open_drafter(name, model, draft_quantize) for name in drafters}
    say("timing passes")
    machine = measure(model)
    found: dict[str, tuple[Drafting, list[Forecast]]] = {}
    for name, drafter in made.items():
        if drafter is not None:
            say(f"looking at {name}")
            drafting = look_at(model, name, drafter, machine)
            found[name] = drafting, forecast(machine, drafting)
    return {
        "model": str(model.path),
        "machine": {"cpu": cpu_name(), "device": str(model.target.device), **_figures(machine)},
        "drafters": [_part(machine, name, *both) for name, both in found.items()],
        "limits": advice.limits(machine),
        "settings": advice.settings(machine, found, quantised_bytes(model), torch.get_num_threads()),
        "warnings": advice.warnings(machine, torch.get_num_threads()),
    }


def measure(model: Loaded) -> Machine:
    """Everything that no drafter changes."""
    target = model.target
    probe = PassTimer(target)
    for count in _chunks(min(PREFIX, target.context_length // 2)):
        probe.feed(count)
    rows = [n for n in ROWS if probe.length + n < target.context_length]
    counts = _threads() if target.device.type == "cpu" else []
    seconds = passes(probe, rows)
    threads = by_threads(probe, counts)
    prefill, growth = lengthen(probe, target.context_length)
    host = _host(model, seconds[1])
    return Machine(seconds, growth, prefill, host, bandwidth(target.device), weight_bytes(target), threads)


def _chunks(count: int) -> list[int]:
    return [count] if count else []


def _threads() -> list[int]:
    """Numbers of threads to try: the present one, all cores, half of them, one."""
    cores = os.cpu_count() or 1
    return sorted({torch.get_num_threads(), cores, max(1, cores // 2), 1})


def _host(model: Loaded, one: float) -> float:
    """Seconds of a plain round beside its pass."""
    llm, prompt = LLM(model), next(iter(PROMPTS.values()))
    rounds = []
    for _ in range(3):
        stats = llm.generate(prompt, Sampling(max_new_tokens=24, ignore_eos=True)).stats
        rounds.append((sum(stats.seconds.values()) - stats.seconds["prefill"]) / max(1, stats.rounds))
    return max(0.0, min(rounds) - one)


def look_at(model: Loaded, name: str, drafter: Drafter, machine: Machine) -> Drafting:
    """What its drafts cost here, and what they give: as stored, or as seen."""
    sizes = Controller(drafter.draft).sizes[1:]
    onlooker = Onlooker(drafter, sizes)
    known = stored(model, name, sizes)
    some = dict(list(PROMPTS.items())[:1]) if known else PROMPTS
    limit = _WATCHED if known else int(_PATIENCE / len(PROMPTS) / (2 * machine.passes[1]))
    tokens = max(16, min(_WATCHED, limit))
    seen = watched(model, onlooker, sizes, {kind: [text] for kind, text in some.items()}, tokens)
    # The first drafts warm up.
    seconds = {size: median(taken[1:] or taken or [0.0]) for size, taken in zip(sizes, onlooker.seconds, strict=True)}
    return Drafting(name, seconds, known or seen)


def _figures(machine: Machine) -> dict[str, Any]:
    one = machine.passes[min(machine.passes)]
    return {
        "threads": torch.get_num_threads(),
        "pass_ms": {rows: 1e3 * s for rows, s in machine.passes.items()},
        "pass_ms_per_1000_tokens": 1e6 * machine.growth,
        "prefill_tokens_per_second": 1 / machine.prefill,
        "host_ms": 1e3 * machine.host,
        "read_gb_per_second": machine.bandwidth / 1e9,
        "weight_bytes": machine.weights,
        "floor_ms": 1e3 * machine.floor if machine.floor else None,
        "bandwidth_reached": machine.floor / one if machine.floor else None,
        "pass_ms_by_threads": {count: 1e3 * s for count, s in machine.threads.items()},
    }


def _part(machine: Machine, name: str, drafting: Drafting, forecasts: Sequence[Forecast]) -> dict[str, Any]:
    return {
        "drafter": name,
        "draft_ms": {name_of(size): 1e3 * s for size, s in drafting.seconds.items()},
        "acceptance": drafting.acceptance.source,
        "ratio": overall(forecasts),
        "kinds": {f.kind: _kind(f) for f in forecasts},
        "reasons": advice.reasons(machine, forecasts, name),
    }


def _kind(f: Forecast) -> Mapping[str, Any]:
    return {
        "draft": name_of(f.best.size),
        "tokens_per_round": f.best.gain.tokens,
        "ratio": f.ratio,
        "decode_ratio": f.decode_ratio,
        "tokens_per_second": f.speed(f.best),
        "plain_tokens_per_second": f.speed(f.plain),
        "first_token_ms": 1e3 * f.first,
    }
