"""The `paceline` command: `generate`, `chat`, `serve`, `pull`, `list`, `info`, `doctor`, `bench` and others."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli.bench import bench
from paceline.cli.certify import certify
from paceline.cli.chat import chat, run
from paceline.cli.commands import PacelineGroup, add_command
from paceline.cli.config import read_config
from paceline.cli.demo import demo
from paceline.cli.doctor import doctor
from paceline.cli.generate import generate
from paceline.cli.info import info
from paceline.cli.learn import learn
from paceline.cli.models import list_models, pull, rm
from paceline.cli.options import AsJson, progress_wanted
from paceline.cli.perplexity import perplexity
from paceline.cli.record import record, replay, tune
from paceline.cli.serve import serve
from paceline.cli.train import train
from paceline.kernels.torch_variables import RUNNING, set_unless_given

app = typer.Typer(
    cls=PacelineGroup,
    help="Run language models locally, and faster: speculative decoding writes the same text in less time.",
    epilog="Show the options of a command: paceline COMMAND --help",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="PACELINE_CONFIG",
            help="Configuration file (TOML).",
            show_default="~/.config/paceline/config.toml",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", metavar="", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    group: Any = context.command
    context.default_map = dict(read_config(config, group.commands))


def compile_kernels(*, as_json: AsJson = False) -> None:
    """Compile the CPU kernels now instead of at the first model load.

    Kernels that came with the installed wheel are not compiled again. If compiling fails, the error explains why.
    """
    from paceline.files.progress import progress_bar
    from paceline.files.wheels import cache_folder
    from paceline.kernels.cpu.build import built_for, find, loaded

    begin, before = time.perf_counter(), set(cache_folder().glob("native-*"))
    with progress_bar("compiling the CPU kernels", progress_wanted(as_json)):
        path = find()
    existed = path in before or path.parent != cache_folder()
    target, seconds = built_for(loaded(path)), time.perf_counter() - begin
    if as_json:
        facts = {"path": str(path), "built_for": target, "compiled": not existed, "seconds": seconds}
        typer.echo(json.dumps(facts))
    else:
        typer.echo(f"{path}: {target}, {'compiled before' if existed else f'compiled in {seconds:.1f} s'}")


# Keep extra arguments, so that the error can tell the user to quote the prompt.
add_command(app, generate, allow_extra_args=True)
for _command in (
    chat,
    serve,
    pull,
    rm,
    demo,
    info,
    doctor,
    certify,
    bench,
    record,
    replay,
    tune,
    perplexity,
    train,
    learn,
):
    add_command(app, _command)
add_command(app, compile_kernels, "compile")
add_command(app, list_models, "list")
# Ollama's names for these commands.
add_command(app, run)
add_command(app, info, "show")


def main() -> None:
    """Entry point of the `paceline` command."""
    set_unless_given(RUNNING)
    for stream in (sys.stdout, sys.stderr):
        # On Windows, pipes use a code page instead of UTF-8. Code pages lack most characters that models write.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    app(prog_name="paceline")
