"""Everything Paceline raises on purpose. Each message names the cause, then the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.llm import Completion


class PacelineError(Exception):
    """Base of all errors a user can cause or cure; the command line prints it as one line.

    `cause` says what is wrong, `fix` what to do about it, `partial` what had been written of a reply by then.
    """

    partial: Completion | None = None

    def __init__(self, cause: str, fix: str = "") -> None:
        self.cause, self.fix = cause, fix
        super().__init__(f"{cause}. {fix}" if fix else cause)


class ModelNotFound(PacelineError, FileNotFoundError):
    """The reference names no folder, file, hub model or `demo`, or it cannot be fetched."""


class CorruptModel(PacelineError):
    """A file of the model is damaged, truncated or contradicts the others."""


class UnsupportedModel(PacelineError):
    """An architecture, layout or quantisation that Paceline does not run."""


class TokenizerMismatch(PacelineError):
    """Target and draft model do not share one vocabulary."""


class InvalidOption(PacelineError, ValueError):
    """A parameter out of its range or of the wrong kind."""


class InvalidPrompt(PacelineError, ValueError):
    """A prompt that is empty, malformed or holds unknown token ids."""


class PromptTooLong(InvalidPrompt):
    """The prompt leaves no room for a reply in the model's context."""


class OutOfMemory(PacelineError, MemoryError):
    """The device cannot hold what was asked of it."""


class NonFiniteLogits(PacelineError, ArithmeticError):
    """The model produced NaN or infinity where a token had to be chosen."""


class NoTokenLeft(PacelineError, ValueError):
    """Bans and biases leave no token that could come next."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether a bare error of Python or torch means that no memory was left."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said
