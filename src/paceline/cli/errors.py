"""Errors of the command line: one line on stderr, and an exit code."""

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
"""128 + SIGPIPE: the program that read the output has exited."""


class PacelineGroup(TyperGroup):
    """Commands of `paceline`, which report every error that a user can cause or fix in one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes stdout once more when it exits, which would fail with a message.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except PacelineError as error:
            print_error(error)
            raise typer.Exit(1) from None
        except OSError as error:
            message = error.strerror or str(error) or type(error).__name__
            print_error(f"{error.filename}: {message}" if error.strerror and error.filename is not None else message)
            raise typer.Exit(1) from None
        return result


def print_error(problem: object) -> None:
    """Print one line on stderr."""
    typer.echo("error: " + " ".join(str(problem).split()), err=True)
