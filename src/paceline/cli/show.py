"""How a reply and its statistics look."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from paceline.engine.detokenizer import Chunk
    from paceline.engine.results import Completion
    from paceline.engine.stats import Stats
    from paceline.sampling.parameters import Sampling

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"

# A model may write escape sequences, and a terminal would obey them.
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]


def in_colour(file: TextIO) -> bool:
    """Whether `file` is a terminal that takes colours. See https://no-color.org."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Display:
    """Writes a reply chunk by chunk: plain text to a file or pipe; on a terminal, accepted draft tokens in green."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._terminal, self._colour = file.isatty(), in_colour(file)
        self._open_line = False

    def write(self, chunk: Chunk) -> None:
        """Show one chunk at once."""
        self.text(chunk.text, green=chunk.drafted)

    def text(self, text: str, green: bool = False) -> None:
        """Show a piece of text at once."""
        if not text:
            return
        self._open_line = not text.endswith("\n")
        text = text.translate(_CONTROLS) if self._terminal else text
        self._file.write(f"{_GREEN}{text}{_PLAIN}" if self._colour and green else text)
        self._file.flush()

    def end(self) -> None:
        """Close the last line, if there is one and it is open."""
        if self._open_line:
            self._file.write("\n")
            self._file.flush()
        self._open_line = False


def speed(stats: Stats) -> float:
    """Tokens per second, end to end."""
    return _rate(stats.tokens, sum(stats.seconds.values()))


def decode_speed(stats: Stats) -> float:
    """Tokens per second without the prompt's part (prefill)."""
    return _rate(stats.tokens, sum(stats.seconds.values()) - stats.seconds["prefill"])


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def amount(size: float, unit: str = "") -> str:
    """A number for people: "134.5 million", or with a unit of bytes "98.4 MB"."""
    steps = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if unit else ((" billion", 1e9), (" million", 1e6))
    name, step = next(((name, step) for name, step in steps if size >= step), (unit, 1.0))
    number = f"{size / step:.3g}" if size < 100 * step else f"{size / step:,.0f}"
    return f"{number} {name.strip()}".rstrip()


def summary(reply: Completion, sampling: Sampling) -> str:
    """One line: how much, how fast, what speculation gave, how to get the same text again, and whether it was cut."""
    stats = reply.stats
    parts = [f"{stats.tokens} tokens", f"{speed(stats):.1f} tok/s", f"{stats.tokens_per_round:.2f} tokens per round"]
    if stats.drafter is not None:
        parts.append(f"{stats.drafter}: {_drafts(stats)}")
    if sampling.temperature > 0:
        parts.append(f"seed {stats.seed}")
    if stats.guarantee == "lossy":
        parts.append("lossy: not the target's own text")
    if cut := cut_at(reply, sampling):
        parts.append(cut)
    return " · ".join(parts)


def _drafts(stats: Stats) -> str:
    return f"{percent(stats.acceptance)} of {stats.drafted} drafted accepted" if stats.drafted else "nothing drafted"


def cut_at(reply: Completion, sampling: Sampling) -> str:
    """Which limit ended a reply and how to raise it; empty for a reply that ended by itself."""
    if reply.finish_reason != "length":
        return ""
    if reply.stats.tokens < sampling.max_new_tokens:
        return f"cut at {reply.stats.tokens} tokens: the model's context is full"
    return f"cut at {reply.stats.tokens} tokens; raise -n"


def sampling_line(sampling: Sampling, given: Mapping[str, Any]) -> str:
    """What applies: first what was given on the command line, then what the model adds."""
    from paceline.sampling.parameters import RECOMMENDED, Sampling

    plain = Sampling()
    values = {name: getattr(sampling, name) for name in RECOMMENDED}
    applied = {name: f"{name} {value:g}" for name, value in values.items() if value != getattr(plain, name)}
    own = ", ".join(text for name, text in applied.items() if name in given)
    model = ", ".join(text for name, text in applied.items() if name not in given)
    return "; ".join(part for part in (own, f"from the model: {model}" if model else "") if part)


_DRAWING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "seed": None}
"""Parameters that greedy text does not depend on, with the values that are off."""


def idle_line(given: Mapping[str, Any]) -> str:
    """Which of the given options have no effect on greedy text; empty where all have."""
    idle = [f"--{name.replace('_', '-')}" for name, off in _DRAWING.items() if given.get(name, off) != off]
    verb = "has" if len(idle) == 1 else "have"
    return f"{', '.join(idle)} {verb} no effect: decoding is greedy; set -t" if idle else ""
