"""Advice: what the measurements mean, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.bench.doctor.machine import Machine
from paceline.bench.doctor.predict import Forecast
from paceline.bench.replay.predict import size_name
from paceline.verify.tree import MIN_ROWS

PAYS = 1.02
"""Smallest speed-up worth recommending."""
_BOUND = 0.4
"""Share of a pass spent reading weights above which smaller weights help."""
_FASTER = 0.93
"""Share of the time below which another number of threads is worth recommending."""
_NOISE = 1.15
"""Ratio of a pass to one of more rows that the noise of two medians does not explain."""
_DISTURBED = 1.3
"""Speed-up with fewer threads that suggests that another program occupied a core."""


def reasons(forecasts: Sequence[Forecast], drafter: str) -> list[str]:
    """Explain for each kind of text where a drafter does not pay why it does not."""
    return [_reason(f, drafter) for f in forecasts if f.ratio < PAYS]


def _reason(f: Forecast, drafter: str) -> str:
    draft, plain = f.nearest, f.plain.seconds
    verify = f"a pass of {draft.gain.rows:.1f} rows {(draft.seconds - draft.drafting) / plain:.2f}"
    costs = f"drafting takes {draft.drafting / plain:.2f} of a plain round and {verify}"
    gives = f"{drafter} keeps {draft.gain.tokens:.2f} tokens per round with drafts of {size_name(draft.size)}"
    if f.decode_ratio >= PAYS:
        return f"{f.kind}: {gives}, but reading the prompt takes most of the time"
    end = "nothing will be drafted" if not f.best.size.nodes else "that is hardly more than plain decoding"
    return f"{f.kind}: {gives}, but {costs}: {draft.gain.tokens * plain / draft.seconds:.2f} of the plain speed; {end}"


def limits(machine: Machine) -> list[str]:
    """Explain what a pass spends its time on."""
    one = machine.one_row
    ratios = ", ".join(f"{n} rows {s / one:.2f}" for n, s in machine.passes.items() if n > MIN_ROWS)
    lines = [f"cost of a pass, relative to one row: {ratios}"]
    if machine.floor and machine.weights:
        lines.append(
            f"a pass of one row takes {1e3 * one:.1f} ms; reading its {machine.weights / 1e6:.0f} MB of weights at "
            f"{machine.bandwidth / 1e9:.1f} GB/s takes {1e3 * machine.floor:.1f} of them ({machine.floor / one:.0%})"
        )
    return lines


def settings(machine: Machine, ratios: Mapping[str, float], sizes: Mapping[str, int], threads: int) -> list[str]:
    """Recommend drafter, threads and weights, a line each. `ratios`: overall speed over plain decoding's by drafter.
    `sizes`: bytes read per pass by mode of `--quantize`, empty where nothing can be quantised. `threads`: in use
    now."""
    return [_drafter(ratios), _threads(machine, threads), _weights(machine, sizes)]


def _drafter(ratios: Mapping[str, float]) -> str:
    if not ratios:
        return "--drafter none: no drafter was examined"
    best = max(ratios, key=ratios.__getitem__)
    if ratios[best] < PAYS:
        return f"--drafter none: {' and '.join(ratios)} would not be faster here"
    return f"--drafter {best}: {ratios[best]:.2f} times the speed of plain decoding, over all kinds of text"


def _threads(machine: Machine, threads: int) -> str:
    fastest = min(machine.threads, key=lambda n: machine.threads[n], default=threads)
    if fastest == threads or machine.threads[fastest] >= _FASTER * machine.threads[threads]:
        return f"--threads {threads}: as now"
    return f"--threads {fastest}: a pass takes {machine.threads[fastest] / machine.threads[threads]:.0%} of the time"


def _weights(machine: Machine, sizes: Mapping[str, int]) -> str:
    if not sizes or not machine.floor or not machine.weights:
        return "--quantize: as now"
    share = machine.floor / min([machine.one_row, *machine.threads.values()])
    if share <= _BOUND:
        return f"--quantize none: reading the weights takes only {share:.0%} of a pass"
    now, (least, *others) = f"{machine.weights / 1e6:.0f} MB", sorted({round(size / 1e6) for size in sizes.values()})
    if not others:
        return f"--quantize int8: a pass reads {least} MB in place of {now}, the codes of the file itself"
    modes = " or ".join(f"{mode} {size / 1e6:.0f} MB" for mode, size in sizes.items())
    return f"--quantize: a pass reads {modes} in place of {now} (`paceline perplexity` measures the loss)"


def warnings(machine: Machine, threads: int) -> list[str]:
    """Return signs that other programs disturbed the measurements. `threads`: in use now."""
    found = [*_contradictions(machine), *_slow_threads(machine, threads)]
    again = "Do not rely on the advice above; run this again on an idle machine"
    return [f"{line}. {again}" for line in found]


def _slow_threads(machine: Machine, threads: int) -> list[str]:
    fewer = {n: seconds for n, seconds in machine.threads.items() if n < threads}
    best = min(fewer, key=lambda n: fewer[n], default=threads)
    if best == threads or machine.threads[threads] <= _DISTURBED * fewer[best]:
        return []
    times = machine.threads[threads] / fewer[best]
    return [
        f"a pass was {times:.1f} times as fast with {_count(best, 'thread')} as with {threads}: either the model is "
        "too small for more, or another program occupied a core"
    ]


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _contradictions(machine: Machine) -> list[str]:
    """The worst case of a pass that took longer than one of more rows."""
    times = list(machine.passes.items())
    pairs = [(few, many) for at, few in enumerate(times) for many in times[at + 1 :] if few[1] > _NOISE * many[1]]
    if not pairs:
        return []
    few, many = max(pairs, key=lambda pair: pair[0][1] / pair[1][1])
    return [
        f"the measurements contradict each other: a pass of {_count(few[0], 'row')} took {1e3 * few[1]:.1f} ms, one of "
        f"{many[0]} rows {1e3 * many[1]:.1f} ms"
    ]
