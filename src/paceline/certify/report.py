"""Certificates as JSON, as one HTML page, and as JUnit XML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from paceline.certify.certificate import Certificate, Check
from paceline.certify.compare import Difference
from paceline.errors import CannotWrite, InvalidOption

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2430;background:#fff}
table{border-collapse:collapse;width:100%;margin:1rem 0}td,th{border-bottom:1px solid #ccd3dc;padding:.3rem .6rem;
text-align:left;vertical-align:top}pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f2f4f7;padding:.6rem}
.pass{color:#0a6b2f}.fail{color:#b00020;font-weight:600}.skip,.note{color:#5a6472}
h1 small{font-weight:400;color:#5a6472}
text{font:13px system-ui,sans-serif;fill:#1c2430}
"""
_COLOURS = {"identical": "#2e7d4f", "near-ties": "#d9a400", "unknown": "#8a94a3", "real": "#b00020"}


def write(certificate: Certificate, path: Path) -> None:
    """Write a certificate. The suffix decides the format: .json, .html or .xml (JUnit).

    Raises:
        InvalidOption: If the suffix is not one of these.
        CannotWrite: If the file cannot be written.
    """
    text = writer(path)(certificate)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written: {error.strerror}", "Choose another path for --out") from error


def writer(path: Path) -> Callable[[Certificate], str]:
    """Return the function that formats a certificate for this path. Raise `InvalidOption` for an unknown suffix."""
    formats = {".json": as_json, ".html": as_html, ".xml": as_junit}
    if path.suffix not in formats:
        raise InvalidOption(f"--out {path} has no known format", "Use a name that ends in .json, .html or .xml")
    return formats[path.suffix]


def as_json(certificate: Certificate) -> str:
    """Return a certificate as JSON."""
    return json.dumps(certificate.as_json(), indent=1) + "\n"


def as_junit(certificate: Certificate) -> str:
    """Return a certificate as JUnit XML: a test case for each check."""
    checks = certificate.checks()
    count = {state: sum(check.state == state for check in checks) for state in ("fail", "skip")}
    cases = "".join(_case(check) for check in checks)
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuite name="paceline certify" tests="{len(checks)}" '
        f'failures="{count["fail"]}" skipped="{count["skip"]}">\n{cases}</testsuite>\n'
    )


def _case(check: Check) -> str:
    tag = {"fail": "failure", "skip": "skipped"}.get(check.state)
    detail = _xml(check.detail)
    inner = f'<{tag} message="{detail}"/>' if tag else f"<system-out>{detail}</system-out>"
    return f'<testcase classname="{_xml(check.part)}" name="{_xml(check.name)}">{inner}</testcase>\n'


def _xml(text: str) -> str:
    """Escape a text for XML, which does not allow most control characters and lone surrogates."""
    return escape(re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def as_html(certificate: Certificate) -> str:
    """Return a certificate as a self-contained page."""
    verdict, reason = certificate.verdict()
    facts = [(name, str(value)) for name, value in (certificate.facts | certificate.usage).items()]
    shown = [certificate.smallest] if certificate.smallest else []
    shown += [one for one in certificate.greedy.differences if one.is_near_tie is not True][:10]
    parts = [
        f"<h1>{_xml(verdict)} <small>paceline certify</small></h1><p>{_xml(reason)}</p>",
        _texts_plot(certificate),
        _speed_plot(certificate),
        _table(("Part", "Check", "", "Seen"), [_row(check) for check in certificate.checks()]),
        "<h2>Run</h2>",
        _table(("Fact", "Value"), [f"<td>{_xml(name)}</td><td>{_xml(value)}</td>" for name, value in facts]),
        "<h2>Differences</h2>" if shown else "",
        *map(_difference, shown),
    ]
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f"{head}<title>{_xml(verdict)}</title><style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"


def _row(check: Check) -> str:
    cells = "".join(f"<td>{_xml(text)}</td>" for text in (check.part, check.name))
    return f'{cells}<td class="{check.state}">{check.state}</td><td>{_xml(check.detail)}</td>'


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    titles = "".join(f"<th>{_xml(title)}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _texts_plot(certificate: Certificate) -> str:
    """Draw the greedy texts as one bar: identical, near-ties, unknown, real divergences."""
    g = certificate.greedy
    parts = {"near-ties": g.near_ties, "unknown": g.unknown, "real": g.real}
    parts = {"identical": max(0, g.prompts - sum(parts.values()))} | parts
    total, x, drawn = max(1, sum(parts.values())), 0.0, []
    for name, count in parts.items():
        width = 600 * count / total
        drawn.append(f'<rect x="{x:.1f}" y="20" width="{width:.1f}" height="24" fill="{_COLOURS[name]}"/>')
        x += width
    legend = ", ".join(f"{count} {name}" for name, count in parts.items())
    label = f"Greedy texts: {legend}"
    head = f'<svg viewBox="0 0 600 50" role="img" aria-label="{label}"><text x="0" y="14">{label}</text>'
    return f"{head}{''.join(drawn)}</svg>"


def _speed_plot(certificate: Certificate) -> str:
    """Draw the speed ratio with its interval, on an axis from 0."""
    if not (v := certificate.speed):
        return ""
    scale = 560 / max(2.0, v.high * 1.1)
    label = f"Speed: {v.ratio:.2f} times plain decoding (95 % interval {v.low:.2f} to {v.high:.2f})"
    return (
        f'<svg viewBox="0 0 600 60" role="img" aria-label="{label}"><text x="0" y="14">{label}</text>'
        f'<line x1="0" x2="560" y1="40" y2="40" stroke="#ccd3dc"/>'
        f'<line x1="{scale:.1f}" x2="{scale:.1f}" y1="28" y2="52" stroke="#5a6472" stroke-dasharray="3"/>'
        f'<line x1="{v.low * scale:.1f}" x2="{v.high * scale:.1f}" y1="40" y2="40" stroke="#2e7d4f" stroke-width="6"/>'
        f'<circle cx="{v.ratio * scale:.1f}" cy="40" r="6" fill="#1c2430"/></svg>'
    )


def _difference(one: Difference) -> str:
    gap = "unknown" if one.gap is None else f"{one.gap:.3f} nats on the plain side"
    prompt = one.prompt if len(one.prompt) < 2000 else f"{one.prompt[:1000]} ... {one.prompt[-1000:]}"
    rows = (("prompt", prompt), ("common prefix", one.prefix), ("speculative", one.speculative), ("plain", one.plain))
    cells = [f"<td>{name}</td><td><pre>{_xml(text)}</pre></td>" for name, text in rows]
    return f"<h3>{_xml(one.name)} (gap: {gap})</h3>{_table(('', 'Text'), cells)}"
