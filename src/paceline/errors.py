"""The errors that Paceline raises. Each message names the cause, then the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LONGEST = 1000


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Return the text on one line: line breaks become spaces, control characters are escaped, long texts are cut in the
    middle."""
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    spaced = (" " if c.isspace() else c for c in text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in spaced)


class PacelineError(Exception):
    """Base of all errors a user can cause or cure; the command line prints it as one line.

    `cause` says what is wrong, `fix` what to do about it, `partial` a stream's `Completion` so far or a batch's list of
    them. Both texts are kept to one line of printable characters: they may quote untrusted files and requests.
    """

    partial: Any = None

    def __init__(self, cause: str, fix: str = "") -> None:
        self.cause, self.fix = one_line(cause), one_line(fix)
        super().__init__(f"{self.cause}. {self.fix}" if fix else self.cause)


class ModelNotFound(PacelineError, FileNotFoundError):
    """The reference names no folder, file, hub model or `demo`, or it cannot be fetched."""


class CorruptModel(PacelineError):
    """A file of the model is damaged, truncated or contradicts the others."""


class UnsupportedModel(PacelineError):
    """An architecture, layout or quantisation that Paceline does not run."""


class AdapterMismatch(PacelineError):
    """An adapter changes modules that its base model lacks or has in other shapes."""


class HeadMismatch(PacelineError):
    """A learned drafter was made for another target, or is of another kind than its name says."""


class CannotWrite(PacelineError, OSError):
    """A file could not be written: no space, no permission, no such folder. Nothing half-written was left behind."""


class TokenizerMismatch(PacelineError):
    """A tokenizer without tokens of text: nothing can be drafted with it, or for it."""


class InvalidOption(PacelineError, ValueError):
    """A parameter out of its range or of the wrong kind. `param`: its name, None if the error is about several."""

    def __init__(self, cause: str, fix: str = "", param: str | None = None) -> None:
        super().__init__(cause, fix)
        self.param = param


class InvalidPrompt(PacelineError, ValueError):
    """A prompt that is empty, malformed or holds unknown token ids."""


class PromptTooLong(InvalidPrompt):
    """The prompt leaves no room for a reply in the model's context."""


class InvalidData(PacelineError, ValueError):
    """A file of training data is malformed, contradicts another, or was made with other options."""


class OutOfMemory(PacelineError, MemoryError):
    """The device has not enough memory."""


class TimedOut(PacelineError, TimeoutError):
    """A reply took longer than its time limit. The tokens so far have been shown."""


class TrainingFailed(PacelineError):
    """Training cannot continue. What was finished is kept."""


class SessionError(PacelineError, ValueError):
    """A session cannot do this in its present state, which is unchanged."""


class CacheError(PacelineError, ValueError):
    """A KV cache was used against its contract; it is unchanged."""


class RankLost(PacelineError, ConnectionError):
    """One of the processes that share a model has ended, and the model with it."""


class NonFiniteLogits(PacelineError, ArithmeticError):
    """The model produced NaN or infinity where a token had to be chosen."""


class NoTokenLeft(PacelineError, ValueError):
    """Bans and biases leave no token to choose."""


def install_line(extra: str) -> str:
    """Return the command that adds an optional dependency group: from the checkout if Paceline runs from one."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return f'pip install "paceline[{extra}]"'
    return f'pip install -e "{root}[{extra}]"'


def is_out_of_memory(error: Exception) -> bool:
    """Whether a bare error of Python or torch means that no memory was left."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said


@contextmanager
def memory_named(cause: str, fix: str) -> Iterator[None]:
    """Turn a bare error that means "no memory left" into an `OutOfMemory` with this cause and fix."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(cause, fix) from error
