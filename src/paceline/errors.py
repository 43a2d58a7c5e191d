"""The errors that Paceline raises. Each message names the cause first, and then the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MAX_LINE = 1000


def one_line(text: str, longest: int = _MAX_LINE) -> str:
    """Return a text on one line. Line breaks become spaces, control characters are escaped, and a long text is
    shortened in the middle."""
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    spaced = (" " if c.isspace() else c for c in text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in spaced)


class PacelineError(Exception):
    """Base class of all errors that a user can cause or fix. The command line prints them on one line.

    Cause and fix may quote untrusted files and requests. Both are reduced to one line of printable characters, so that
    quoted text cannot fake log lines or send control sequences to a terminal.

    Attributes:
        cause: What is wrong.
        fix: What to do about it. May be empty.
        partial: For a stream, the `Completion` so far. For a batch, a list of completions. Otherwise None.
    """

    partial: Any = None

    def __init__(self, cause: str, fix: str = "") -> None:
        self.cause, self.fix = one_line(cause), one_line(fix)
        super().__init__(f"{self.cause}. {self.fix}" if fix else self.cause)


class ModelNotFound(PacelineError, FileNotFoundError):
    """There is no folder, file or hub model with this name, or the model cannot be downloaded."""


class CorruptModel(PacelineError):
    """A file of a model is damaged, truncated, or inconsistent with the other files."""


class UnsupportedModel(PacelineError):
    """An architecture, file layout or quantisation is not supported."""


class AdapterMismatch(PacelineError):
    """An adapter changes modules that the model does not have, or that have other shapes in the model."""


class HeadMismatch(PacelineError):
    """A learned drafter was trained for another target, or is of another kind than requested (such as Medusa instead of
    EAGLE)."""


class CannotWrite(PacelineError, OSError):
    """A file could not be written (no space, no permission, no such folder). No partial file is left."""


class TokenizerMismatch(PacelineError):
    """A tokenizer has no tokens that stand for text, so its tokens cannot be mapped to the tokens of another
    tokenizer."""


class InvalidOption(PacelineError, ValueError):
    """A parameter is out of range or has the wrong type.

    Attributes:
        param: The parameter's name. None if the error is about several parameters.
    """

    def __init__(self, cause: str, fix: str = "", param: str | None = None) -> None:
        super().__init__(cause, fix)
        self.param = param


class InvalidPrompt(PacelineError, ValueError):
    """A prompt is empty, malformed, or contains unknown token ids."""


class PromptTooLong(InvalidPrompt):
    """A prompt leaves no room for a reply in the model's context."""


class InvalidData(PacelineError, ValueError):
    """A data file is malformed, inconsistent with another file, or was created with other options."""


class OutOfMemory(PacelineError, MemoryError):
    """The device does not have enough memory."""


class TimedOut(PacelineError, TimeoutError):
    """A reply exceeded its time limit. Tokens generated before the limit have already been delivered."""


class TrainingFailed(PacelineError):
    """Training cannot continue. Finished work is kept."""


class SessionError(PacelineError, ValueError):
    """A call is not possible in the current state of a session. The session does not change."""


class CacheError(PacelineError, ValueError):
    """A call violates the contract of a KV cache. The cache does not change."""


class RankLost(PacelineError, ConnectionError):
    """One of the processes that share a model has ended, so the model can no longer be used."""


class NonFiniteLogits(PacelineError, ArithmeticError):
    """The model produced NaN or infinity instead of usable logits."""


class NoTokenLeft(PacelineError, ValueError):
    """Bans, biases and grammars exclude every token."""


def install_line(extra: str) -> str:
    """Return the command that installs an extra. It installs from the checkout if Paceline runs from one, and from PyPI
    otherwise."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return f'pip install "paceline[{extra}]"'
    return f'pip install -e "{root}[{extra}]"'


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error from Python or torch means that memory ran out."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said


@contextmanager
def memory_named(cause: str, fix: str) -> Iterator[None]:
    """Convert out-of-memory errors that Python or torch raise inside the `with` block to `OutOfMemory`, with this cause
    and fix."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(cause, fix) from error
