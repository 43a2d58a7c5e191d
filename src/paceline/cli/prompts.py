"""Reading prompts from the command line, stdin, or a file with one JSON object per line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from select import select
from stat import S_ISFIFO, S_ISREG, S_ISSOCK

from paceline.cli.options import note
from paceline.cli.wrapping import say
from paceline.errors import InvalidPrompt
from paceline.text.prompt_rows import PromptRow, parse_row, text_of

STDIN = "-"
_PATIENCE = 2.0
"""Seconds without input on stdin before a line explains that the command is waiting for it."""


def single_prompt(prompt: str | None, with_stdin: bool = False) -> str:
    """Return the prompt of the command line, or else all of stdin.

    Args:
        prompt: Prompt of the command line. None and "-" mean stdin.
        with_stdin: Append piped text to the prompt.

    Raises:
        InvalidPrompt: If there is no prompt, or it is not valid text.
    """
    if prompt is None or prompt == STDIN:
        prompt = _read_stdin(from_terminal=prompt == STDIN)
    elif with_stdin and prompt and _is_piped() and (more := _read_stdin(from_terminal=True)):
        count = more.count("\n") + 1
        lines = "1 line" if count == 1 else f"{count} lines"
        note(f"added {lines} from stdin to the prompt; </dev/null prevents this")
        prompt = f"{prompt}\n\n{more}"
    try:
        return text_of(prompt, "the prompt")
    except ValueError as error:
        raise InvalidPrompt(str(error), "Pass it as an argument, on stdin, or with --prompts FILE") from None


def piped_prompt(prompt: str) -> str:
    """Return the prompt of the command line followed by piped text, or "" without either.

    Raises:
        InvalidPrompt: If it is not valid text.
    """
    if prompt:
        return single_prompt(prompt, with_stdin=True)
    text = _read_stdin(from_terminal=False) if _is_piped() else ""
    return text_of(text, "stdin") if text else ""


def _is_piped() -> bool:
    """Return True if stdin is a file or a pipe. Print a line while waiting, since a pipe may stay open forever."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    if not (S_ISFIFO(kind) or S_ISREG(kind) or S_ISSOCK(kind)):
        return False
    if os.name != "nt" and not select([sys.stdin], [], [], _PATIENCE)[0]:
        # Print this even with --quiet, because otherwise the command seems to hang.
        say("waiting for text on stdin to add to the prompt; </dev/null prevents this")
    return True


def _read_stdin(from_terminal: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not from_terminal):
        raise InvalidPrompt("there is no prompt", "Pass it as an argument, on stdin, or with --prompts FILE")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"stdin is not UTF-8 text (byte {error.start})", "Convert it to UTF-8") from None
    # The newline that ends a file or an echo is not part of the question.
    return text.removesuffix("\n").removesuffix("\r")


def read_rows(path: Path) -> list[PromptRow]:
    """Read and check the rows of a JSONL file. The path "-" means stdin.

    Raises:
        InvalidPrompt: If a row is not valid. The message names file and line.
        OSError: If the file cannot be read.
    """
    from_stdin = str(path) == STDIN
    name = "stdin" if from_stdin else str(path)
    data = sys.stdin.buffer.read() if from_stdin else path.read_bytes()
    rows: dict[str | int | None, tuple[int, PromptRow]] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_row(line, number)
            if row.id in rows:
                raise ValueError(f"the id {row.id!r} was already used on line {rows[row.id][0]}")
        except ValueError as error:
            raise InvalidPrompt(f"{name}, line {number}: {error}", "Correct or remove the line") from None
        rows[row.id] = (number, row)
    if not rows:
        raise InvalidPrompt(f"{name} contains no prompts", 'Write one JSON object per line, such as {"prompt": "Hi"}')
    return [row for _, row in rows.values()]
