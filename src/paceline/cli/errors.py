"""How a command fails: one line on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from paceline.errors import PacelineError

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read our output has left."""


class Guarded(TyperGroup):
    """The commands of `paceline`, with every failure that a user can cause or cure told in one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _abandon_stdout()
            raise typer.Exit(BROKEN_PIPE) from None
        except PacelineError as error:
            complain(error)
            raise typer.Exit(1) from None
        except OSError as error:
            complain(_os_message(error))
            raise typer.Exit(1) from None
        return result


def complain(problem: object) -> None:
    """One line on stderr."""
    typer.echo("error: " + " ".join(str(problem).split()), err=True)


def _os_message(error: OSError) -> str:
    if error.strerror is None:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror


def _abandon_stdout() -> None:
    """Python flushes stdout once more when it ends, which would fail, and say so."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
