"""The command line: `paceline generate`, `chat`, `serve`, `demo`, `info`, `doctor`, `bench`, `train`, and two more."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.compile import compile_kernels
from paceline.cli.demo import demo
from paceline.cli.doctor import doctor
from paceline.cli.errors import Guarded
from paceline.cli.generate import generate
from paceline.cli.groups import with_options
from paceline.cli.info import info
from paceline.cli.perplexity import perplexity
from paceline.cli.serve import serve
from paceline.cli.train import train

app = typer.Typer(
    cls=Guarded,
    help="Speculative decoding of local language models: the same text, sooner.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Words after the prompt are kept for an error that says to quote it.
app.command(context_settings={"allow_extra_args": True})(with_options(generate))
for _command in (chat, serve, info, demo, doctor, bench, train, perplexity):
    app.command()(with_options(_command))
app.command("compile")(compile_kernels)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `paceline` command."""
    # Torch's threads spin while they wait, and take the cores that other programs need: a pass of 25 ms then took a
    # second. About 10 us of spinning costs nothing (LOG.md). Read when torch is imported, so it is set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        # A pipe on Windows is not UTF-8, and no model's text fits the code page that it is instead.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    app(prog_name="paceline")
