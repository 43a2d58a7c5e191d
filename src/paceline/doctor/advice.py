"""What the figures mean, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.doctor.acceptance import name_of
from paceline.doctor.machine import Machine
from paceline.doctor.predict import Drafting, Forecast, overall
from paceline.tree import MIN_ROWS

PAYS = 1.02
"""A ratio below this one is no gain that anybody would notice."""
_BOUND = 0.4
"""A pass that spends this share of its time reading weights gains from smaller ones."""
_FASTER = 0.93
"""Another number of threads is worth naming if a pass takes less than this of the time."""
_SMALLER = {"int8": 1.0625, "int4": 0.625}
"""Bytes of a weight and its share of scales (docs/quantize.md)."""


def reasons(machine: Machine, forecasts: Sequence[Forecast], drafter: str) -> list[str]:
    """Why a drafter does not pay, for each kind of text where it does not."""
    return [_reason(machine, f, drafter) for f in forecasts if f.ratio < PAYS]


def _reason(machine: Machine, f: Forecast, drafter: str) -> str:
    draft, plain = f.nearest, f.plain.seconds
    verify = (draft.seconds - draft.drafting) / plain
    rows = f"a pass of {draft.gain.rows:.1f} rows {verify:.2f}"
    costs = f"drafting takes {draft.drafting / plain:.2f} of a plain round and {rows}"
    gives = f"{drafter} keeps {draft.gain.tokens:.2f} tokens a round with drafts of {name_of(draft.size)}"
    if f.decode_ratio >= PAYS:
        return f"{f.kind}: {gives}, but reading the prompt takes most of the time"
    end = "nothing will be drafted" if not f.best.size.nodes else "that is hardly more than plain decoding"
    return f"{f.kind}: {gives}, but {costs}: {draft.gain.tokens * plain / draft.seconds:.2f} of plain speed; {end}"


def limits(machine: Machine) -> list[str]:
    """What a pass spends its time on."""
    one = machine.passes[min(machine.passes)]
    dearer = ", ".join(f"{n} rows {s / one:.2f}" for n, s in machine.passes.items() if n > MIN_ROWS)
    lines = [f"in passes of one row, a pass costs: {dearer}"]
    if machine.floor and machine.weights:
        lines.append(
            f"a pass of one row takes {1e3 * one:.1f} ms; reading its {machine.weights / 1e6:.0f} MB of weights at "
            f"{machine.bandwidth / 1e9:.1f} GB/s takes {1e3 * machine.floor:.1f} of them ({machine.floor / one:.0%})"
        )
    return lines


def settings(
    machine: Machine, found: Mapping[str, tuple[Drafting, Sequence[Forecast]]], itemsize: int | None, threads: int
) -> list[str]:
    """What to change. `itemsize`: bytes of a weight that is not quantised yet and can be. `threads`: in use now."""
    lines = []
    if found:
        best = max(found, key=lambda name: overall(found[name][1]))
        ratio = overall(found[best][1])
        if ratio >= PAYS:
            lines.append(f"--drafter {best}: {ratio:.2f} times plain decoding over all kinds of text")
        else:
            lines.append("--drafter none: no drafter that was looked at pays here")
    fastest = min(machine.threads, key=lambda n: machine.threads[n], default=threads)
    if fastest != threads and machine.threads[fastest] < _FASTER * machine.threads[threads]:
        lines.append(f"--threads {fastest}: a pass takes {machine.threads[fastest] / machine.threads[threads]:.0%}")
    if machine.floor and itemsize and machine.floor > _BOUND * machine.passes[min(machine.passes)]:
        sizes = " or ".join(f"{mode} {machine.weights * b / itemsize / 1e6:.0f}" for mode, b in _SMALLER.items())  # type: ignore[operator]
        lines.append(
            f"--quantize: a pass reads {machine.weights / 1e6:.0f} MB; with {sizes}"  # type: ignore[operator]
            " (`paceline perplexity` says what that costs)"
        )
    return lines
