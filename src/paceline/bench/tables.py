"""Tables of a benchmark for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of strings. The first column contains the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table as Markdown below its title in bold."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"

    def html(self) -> str:
        """Return the table as HTML without its title."""
        head = "".join(f"<th scope=col>{escape(column)}</th>" for column in self.columns)
        rows = [(escape(row[0]), "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])) for row in self.rows]
        body = "".join(f"<tr><th scope=row>{name}</th>{cells}</tr>" for name, cells in rows)
        return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def main_grids(result: Mapping[str, Any]) -> list[Grid]:
    """Return the main tables of a run: the speed of every system, and Paceline's speed relative to other programs."""
    parts = by_temperature(result["systems"])
    over = [_over(part) for part in parts if any(s["program"] != "paceline" for s in part)]
    return [_speeds(result["systems"]), *over]


def all_grids(result: Mapping[str, Any]) -> list[Grid]:
    """Return the main tables, and tables with details by category, by depth and by phase of a round."""
    summaries = result["systems"]
    ours = [s for s in summaries if s["inside"]]
    grids = [
        *main_grids(result),
        _by_category("Tok/s, end to end", summaries, lambda c: f"{c['tokens_per_second']:.1f}"),
    ]
    if drafting := [s for s in ours if s["drafter"]]:
        over = "Speed relative to the same system without drafts, median of questions"
        grids += [
            _by_category(over, drafting, lambda c: f"{c['ratio']:.2f}"),
            _by_category("Tokens per round", drafting, lambda c: f"{c['tokens_per_round'] or 0:.2f}"),
            _depths(drafting),
        ]
    return [*grids, _rounds(ours)]


def by_temperature(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """Group summaries by temperature, since only these may be compared with each other."""
    temperatures = dict.fromkeys(s["temperature"] for s in summaries)
    return [[s for s in summaries if s["temperature"] == temperature] for temperature in temperatures]


def temperature_suffix(part: Sequence[Summary]) -> str:
    """Return the end of a title, which names the temperature, or "" for greedy decoding."""
    temperature = part[0]["temperature"]
    return f", T={temperature:g}" if temperature else ""


def interval(ratio: Mapping[str, float] | None) -> str:
    """Format a ratio as 1.25 [1.20, 1.31], and None as ""."""
    return "" if ratio is None else f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _speeds(summaries: Sequence[Summary]) -> Grid:
    columns = ["system", "tok/s", "x plain [95 %]", "decoding only", "decode tok/s", "first token, ms"]
    rows = []
    for s in summaries:
        inside, categories, drafts = s["inside"], s["categories"], bool(s["drafter"])
        slowest = min(categories, key=lambda c: categories[c]["ratio"])
        rows.append(
            [
                s["system"],
                f"{s['tokens_per_second']:.1f}",
                interval(s["ratios"][s["base"]]) if drafts else "",
                f"{s['decode_ratio']['median']:.2f}" if drafts and s["decode_ratio"] else "",
                f"{s['decode_tokens_per_second']:.1f}",
                f"{1e3 * s['first_token_seconds']:.0f}",
                f"{inside['tokens_per_round']:.2f}" if inside else "",
                f"{slowest} {categories[slowest]['ratio']:.2f}" if drafts else "",
                "" if s["spread"] is None else f"{100 * s['spread']:.1f} %",
                f"{100 * s['same_text']:.0f} %" if drafts else "",
            ]
        )
    title = "Text to text, in batches" if any(s["width"] > 1 for s in summaries) else "Text to text, one at a time"
    return Grid(title, [*columns, "tokens/round", "slowest", "spread", "same text"], rows)


def _over(part: Sequence[Summary]) -> Grid:
    peers = [s["system"] for s in part if s["program"] != "paceline"]
    rows = [[s["system"], *(interval(s["ratios"][peer]) for peer in peers)] for s in part if s["program"] == "paceline"]
    title = f"Speed relative to other programs, median of questions [95 %]{temperature_suffix(part)}"
    return Grid(title, ["system", *peers], rows)


def _by_category(title: str, summaries: Sequence[Summary], cell: Callable[[Any], str]) -> Grid:
    categories = summaries[0]["categories"]
    columns = [f"{name} ({about['questions']})" for name, about in categories.items()]
    rows = [[s["system"], *(cell(s["categories"][name]) for name in categories)] for s in summaries]
    return Grid(title, ["system", *columns], rows)


def _depths(drafting: Sequence[Summary]) -> Grid:
    shares = {s["system"]: s["inside"]["accepted_at"] for s in drafting}
    deepest = max(map(len, shares.values()))
    rows = [[name, *(f"{x:.2f}" for x in found), *[""] * (deepest - len(found))] for name, found in shares.items()]
    return Grid(
        "Share of rounds that accepted a draft to this depth", ["drafter", *map(str, range(1, deepest + 1))], rows
    )


def _rounds(ours: Sequence[Summary]) -> Grid:
    phases = list(ours[0]["inside"]["milliseconds"])
    rows = []
    for s in ours:
        spent = s["inside"]["milliseconds"]
        cells = [f"{spent[phase]:.2f}" for phase in phases]
        rows.append([s["system"], *cells, f"{sum(spent.values()):.2f}", f"{s['inside']['drafted_per_round']:.2f}"])
    return Grid("A round, ms", ["system", *phases, "sum", "tokens drafted"], rows)


def where(source: Mapping[str, Any]) -> str:
    """Format the machine and the versions of a provenance."""
    machine, versions = source["machine"], source["versions"]
    used = ", ".join(f"{key} {value}" for key, value in versions.items() if value)
    return f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; {used}"


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each finding of a run, and for each system that was not measured."""
    return [*result["findings"], *(f"not measured: {line}" for line in result["missing"])]


def markdown(name: str, source: Mapping[str, Any], grids: Sequence[Grid], lines: Sequence[str] = ()) -> str:
    """Return a report in Markdown: command and machine, tables, then lines of text."""
    commit = f"{(source['commit'] or 'no commit')[:12]}{' with changes' if source['dirty'] else ''}"
    heading = f"# {name}, {source['date'][:10]}\n\n`{source['command']}` at {commit}; {where(source)}.\n"
    return "\n".join([heading, *(grid.markdown() for grid in grids), *(f"- {line}" for line in lines)]) + "\n"
