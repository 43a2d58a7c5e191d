"""Breaking lines between words, before the terminal breaks them within words."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import NamedTuple

import typer

_MARGIN = 24
"""Number of columns at the end of a line. A word there is held back until it is complete. Longer words are rare."""
_PARTS = re.compile(r"\n|[^\S\n]|\S+")
_FENCES = ("```", "~~~")


class Piece(NamedTuple):
    """Part of a reply. `green` is True if the model accepted it from a draft."""

    text: str
    green: bool


class WordWrap:
    """Adds line breaks to a text that arrives in pieces.

    A word near the end of a line is held back until it is complete. All other words are returned at once. Words longer
    than a line, and code between fences, get no line breaks, so that they can be copied from the terminal as one line.
    """

    def __init__(self) -> None:
        self._column, self._size = 0, 0
        self._held: list[Piece] = []
        self._begun = self._in_code = False
        self._line = ""

    def add(self, piece: Piece) -> list[Piece]:
        """Add a piece, and return the pieces to write now."""
        out: list[Piece] = []
        for part in _PARTS.findall(piece.text):
            if part == "\n":
                out += [*self.rest(), Piece(part, piece.green)]
                self._in_code ^= self._line.lstrip().startswith(_FENCES)
                self._column, self._line = 0, ""
            elif part.isspace():
                out += [*self.rest(), *self._space(Piece(part, piece.green))]
            else:
                out += self._word(Piece(part, piece.green))
        return out

    def rest(self) -> list[Piece]:
        """Return the word that is held back, which is complete now."""
        out, self._begun = self._release(), False
        return out

    def _space(self, piece: Piece) -> list[Piece]:
        """Return the space, or nothing at the end of a line, where the terminal would move it to the next line."""
        self._line += piece.text
        if self._column >= _columns() and not self._in_code:
            return []
        self._column += 8 - self._column % 8 if piece.text == "\t" else 1
        return [piece]

    def _word(self, piece: Piece) -> list[Piece]:
        from rich.cells import cell_len

        self._line += piece.text
        self._held.append(piece)
        self._size += cell_len(piece.text)
        end, width = self._column + self._size, _columns()
        if self._in_code or self._begun or end + _MARGIN <= width or self._size > width:
            self._begun = True
            return self._release()
        if end <= width:
            return []
        self._column = 0
        return [Piece("\n", False)]

    def _release(self) -> list[Piece]:
        out, width = self._held, _columns()
        if out:
            end = self._column + self._size
            self._column = end if end <= width else end % width
        self._held, self._size = [], 0
        return out


def say(text: str, *, err: bool = True) -> None:
    """Print text, by default on stderr. On a terminal, lines are broken between words."""
    typer.echo(_filled(text) if (sys.stderr if err else sys.stdout).isatty() else text, err=err)


def _filled(text: str) -> str:
    fill = textwrap.TextWrapper(_columns(), break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(map(fill, text.split("\n")))


def _columns() -> int:
    return shutil.get_terminal_size().columns
