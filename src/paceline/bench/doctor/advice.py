"""Advice: explaining the measurements in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.bench.doctor.machine import Machine
from paceline.bench.doctor.predict import Forecast
from paceline.bench.replay.predict import format_budget
from paceline.verify.tree import MIN_ROWS

MIN_SPEEDUP = 1.02
"""Smallest speed-up worth recommending."""
_MIN_READING_SHARE = 0.4
"""Smaller weights are recommended if reading the weights takes more than this share of a pass."""
_MAX_TIME_SHARE = 0.93
"""Another number of threads is recommended if it takes less than this share of the time."""
_MAX_NOISE = 1.15
"""If a pass takes more than this many times as long as a pass with more rows, noise cannot explain it."""
_SUSPICIOUS_SPEEDUP = 1.3
"""A speed-up of this factor with fewer threads suggests that another program occupied a core."""


def reasons(forecasts: Sequence[Forecast], drafter: str) -> list[str]:
    """For each kind of text where a drafter is not faster, explain why."""
    return [_reason(f, drafter) for f in forecasts if f.speedup < MIN_SPEEDUP]


def _reason(f: Forecast, drafter: str) -> str:
    draft, plain = f.best_draft, f.plain.seconds
    verify = f"a pass of {draft.gain.rows:.1f} rows takes {(draft.seconds - draft.drafting) / plain:.2f}"
    costs = f"drafting takes {draft.drafting / plain:.2f} plain rounds and {verify}"
    gives = f"{drafter} gives {draft.gain.tokens:.2f} tokens per round with drafts of {format_budget(draft.budget)}"
    if f.decode_speedup >= MIN_SPEEDUP:
        return f"{f.kind}: {gives}, but reading the prompt takes most of the time"
    speed = f"{draft.gain.tokens * plain / draft.seconds:.2f} times the plain speed"
    end = "so nothing will be drafted" if not f.best.budget.nodes else "hardly faster than plain decoding"
    return f"{f.kind}: {gives}, but {costs}. The result is {speed}, {end}"


def limits(machine: Machine) -> list[str]:
    """Explain what limits the speed of a pass."""
    one = machine.one_row
    costs = ", ".join(f"{n} rows {s / one:.2f}" for n, s in machine.passes.items() if n > MIN_ROWS)
    lines = [f"cost of a pass, relative to one row: {costs}"]
    reading = machine.min_pass_seconds
    if reading and machine.weights:
        lines.append(
            f"a pass of one row takes {1e3 * one:.1f} ms; reading its {machine.weights / 1e6:.0f} MB of weights at "
            f"{machine.bandwidth / 1e9:.1f} GB/s takes {1e3 * reading:.1f} ms of this ({reading / one:.0%})"
        )
    return lines


def settings(machine: Machine, speedups: Mapping[str, float], sizes: Mapping[str, int], threads: int) -> list[str]:
    """Recommend a drafter, a number of threads and a quantisation, with one line for each.

    Args:
        machine: Measurements.
        speedups: Drafter -> overall speed relative to plain decoding.
        sizes: Mode of `--quantize` -> bytes read per pass. Empty if the model cannot be quantised.
        threads: Number of threads that is in use.
    """
    return [_drafter(speedups), _threads(machine, threads), _weights(machine, sizes)]


def _drafter(speedups: Mapping[str, float]) -> str:
    if not speedups:
        return "--drafter none: no drafter was examined"
    best = max(speedups, key=speedups.__getitem__)
    if speedups[best] < MIN_SPEEDUP:
        return f"--drafter none: {' and '.join(speedups)} would not be faster here"
    return f"--drafter {best}: {speedups[best]:.2f} times the speed of plain decoding, averaged over all kinds of text"


def _threads(machine: Machine, threads: int) -> str:
    fastest = min(machine.threads, key=lambda n: machine.threads[n], default=threads)
    if fastest == threads or machine.threads[fastest] >= _MAX_TIME_SHARE * machine.threads[threads]:
        return f"--threads {threads}: the current setting"
    return f"--threads {fastest}: a pass takes {machine.threads[fastest] / machine.threads[threads]:.0%} of the time"


def _weights(machine: Machine, sizes: Mapping[str, int]) -> str:
    if not sizes or not machine.min_pass_seconds or not machine.weights:
        return "--quantize: keep the current setting"
    share = machine.min_pass_seconds / min([machine.one_row, *machine.threads.values()])
    if share <= _MIN_READING_SHARE:
        return f"--quantize none: reading the weights takes only {share:.0%} of a pass"
    now, (least, *others) = f"{machine.weights / 1e6:.0f} MB", sorted({round(size / 1e6) for size in sizes.values()})
    if not others:
        return f"--quantize int8: a pass reads {least} MB instead of {now}, using the codes of the file itself"
    modes = " or ".join(f"{size / 1e6:.0f} MB with {mode}" for mode, size in sizes.items())
    return f"--quantize: a pass reads {modes} instead of {now} (`paceline perplexity` measures the loss of quality)"


def warnings(machine: Machine, threads: int) -> list[str]:
    """Return signs that other programs disturbed the measurements. `threads` is the number that is in use."""
    found = [*_contradictions(machine), *_slow_threads(machine, threads)]
    again = "Do not rely on the advice above; run the command again on an idle machine"
    return [f"{line}. {again}" for line in found]


def _slow_threads(machine: Machine, threads: int) -> list[str]:
    fewer = {n: seconds for n, seconds in machine.threads.items() if n < threads}
    best = min(fewer, key=lambda n: fewer[n], default=threads)
    if best == threads or machine.threads[threads] <= _SUSPICIOUS_SPEEDUP * fewer[best]:
        return []
    times = machine.threads[threads] / fewer[best]
    return [
        f"a pass was {times:.1f} times as fast with {_count(best, 'thread')} as with {threads}: either the model is "
        "too small for more threads, or another program occupied a core"
    ]


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _contradictions(machine: Machine) -> list[str]:
    """Return the worst case of a pass that took longer than a pass with more rows."""
    times = list(machine.passes.items())
    pairs = [(few, many) for at, few in enumerate(times) for many in times[at + 1 :] if few[1] > _MAX_NOISE * many[1]]
    if not pairs:
        return []
    few, many = max(pairs, key=lambda pair: pair[0][1] / pair[1][1])
    return [
        f"the measurements contradict each other: a pass of {_count(few[0], 'row')} took {1e3 * few[1]:.1f} ms, but a "
        f"pass of {many[0]} rows took {1e3 * many[1]:.1f} ms"
    ]
