"""Commands from plain functions: shared options, a short and a complete --help, and errors on one line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import OptionInfo

from paceline.cli.wrapping import say
from paceline.errors import PacelineError

EVERYDAY = {
    "generate": "model drafter quantize max-new-tokens temperature seed prompts json output quiet",
    "chat": "model drafter quantize max-new-tokens temperature seed system quiet",
    "serve": "model drafter quantize models host port api-key served-model-name slots quiet",
    "pull": "revision token quiet",
    "rm": "",
    "demo": "model drafter quantize max-new-tokens temperature seed",
    "info": "model json",
    "doctor": "model drafter quantize threads details json quiet",
    "certify": "plain plain-body model drafter against quick full out yes",
    "bench": "prompts model quantize drafters against count tokens temperature out report",
    "record": "prompts model drafter quantize max-new-tokens temperature seed batch quiet",
    "replay": "drafters model quantize draft-quantize count batch threads json quiet",
    "tune": "drafters model quantize draft-quantize count batch threads json quiet",
    "perplexity": "model quantize tokens json quiet",
    "train": "out target kind prompts answers from taps vocabulary epochs quiet",
    "learn": "status forget json",
    "compile": "json",
    "list": "all json",
    "run": "model drafter quantize max-new-tokens temperature seed system quiet",
    "show": "model json",
}
"""Options that --help of each command shows, in this order. --help-all shows all options, grouped by panel."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

INTERRUPTED = 130
"""Exit code 128 + SIGINT, as shells report it."""

BROKEN_PIPE = 141
"""Exit code 128 + SIGPIPE: the program that read the output has exited."""

_METAVARS = {int: "N", float: "X", Path: "PATH", bool: ""}
_ALL = "paceline.help_all"
_OPTION = "option"


def option(help: str, *names: str, panel: str | None = None, **settings: Any) -> Any:
    """Declare an option inside `Annotated`.

    Args:
        help: Help text. Its first paragraph appears in the short help.
        *names: Flags. The long flag may be omitted if it equals the parameter's name.
        panel: Panel in --help-all.
        **settings: Other arguments of `typer.Option`.
    """
    return typer.Option(..., *names, help=help, rich_help_panel=panel, **settings)


def options_of(panel: str) -> Callable[..., Any]:
    """Return a function that declares an option as a field of a dataclass, in this panel of --help-all."""

    def declare(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
        return field(default=default, metadata={_OPTION: option(help, *names, panel=panel, **settings)})

    return declare


class Command(TyperCommand):
    """A command with a --help for everyday options and a --help-all for all options."""

    def invoke(self, ctx: Any) -> Any:
        source = ctx.get_parameter_source("model")
        # If `generate` has two arguments, the first one is the model.
        named = ctx.params.get("argument" if ctx.params.get("second") is None else "first")
        if named is not None and source is not None and source.name != "COMMANDLINE":
            # MODEL overrides the environment and the configuration file.
            ctx.params["model"] = named
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = self
        if not ctx.meta.get(_ALL):
            shown = copy(self)
            names = [f"--{name}" for name in EVERYDAY[str(self.name)].split()]
            options = {name: short for param in self.params for name, short in _short_help(param)}
            shown.params = [param for param in self.params if param.param_type_name == "argument"]
            shown.params += [options[name] for name in names]
            if len(shown.params) < len(self.params) - 1:
                shown.epilog = f"More options: {ctx.command_path} --help-all"
        super(Command, shown).format_help(ctx, formatter)


def _short_help(param: Any) -> list[tuple[str, Any]]:
    """Return (name, option for the short help) for each name of an option."""
    short = copy(param)
    short.rich_help_panel, short.help = None, (param.help or "").partition("\n\n")[0]
    long = [name for name in param.opts if name.startswith("--")]
    short.opts = [name for name in param.opts if name not in long[1:]]
    return [(name, short) for name in param.opts]


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def add_command(app: typer.Typer, function: Callable[..., Any], name: str | None = None, **context: Any) -> None:
    """Add `function` as a command of `app`. `context` holds typer's context settings."""
    app.command(name, cls=Command, context_settings=context)(with_options(function))


def parsed(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Parse options for `function` as a command, without running it. The context's `command.invoke` runs it.

    Args:
        function: The function of a command.
        options: Name -> value, as in a configuration file.

    Returns:
        The command's context.

    Raises:
        click.UsageError: If an option is not valid.
    """
    arguments: list[str] = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            text = str(one)
            if text.lower() != "false":
                arguments += [f"--{name.replace('_', '-')}", *([] if text.lower() == "true" else [text])]
    app = typer.Typer()
    add_command(app, function)
    return get_command(app).make_context(function.__name__, arguments)


@cache
def _hints(annotated: Any) -> dict[str, Any]:
    """Return the type hints of a function or of a dataclass of options, which several commands share."""
    return get_type_hints(annotated, include_extras=True)


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert `function` for typer: replace each parameter with a dataclass type by the fields of the dataclass."""
    hints = {name: hint for name, hint in _hints(function).items() if name != "return"}
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    parameters: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        if (group := groups.get(parameter.name)) is None:
            parameters.append(_parameter(parameter.name, hints[parameter.name], parameter.default))
        else:
            of_group = _hints(group)
            parameters += [
                _parameter(x.name, of_group[x.name], x.default, _declared(x.metadata)) for x in fields(group)
            ]
    if "quiet" in hints:
        verbose = option("Log to stderr what is loaded and chosen, and how long it takes.", "-v", panel="Logging")
        parameters.append(_parameter("verbose", Annotated[bool, verbose], False))
    help_all = option("Show all options, grouped by subject, and exit.", is_eager=True, callback=_show_all)
    parameters.append(_parameter("help_all", Annotated[bool, help_all], False))

    def run(help_all: bool, verbose: bool = False, **given: Any) -> Any:
        if verbose:
            logging.basicConfig(format=LOG_FORMAT)
            logging.getLogger("paceline").setLevel(logging.DEBUG)
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return function(**given)

    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
    run.__name__, run.__doc__ = function.__name__, "\n\n".join(" ".join(text.split()) for text in paragraphs)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = Signature(parameters)
    return run


def _declared(metadata: Mapping[str, Any]) -> OptionInfo | None:
    """Return the option of a field. Rooms that do not import typer declare it as help, metavar and panel."""
    if "help" in metadata:
        found: OptionInfo = option(metadata["help"], panel=metadata["panel"], metavar=metadata["metavar"])
        return found
    declared: OptionInfo | None = metadata.get(_OPTION)
    return declared


def _parameter(name: str, hint: Any, default: Any, declared: OptionInfo | None = None) -> Parameter:
    """Return the parameter for typer. `declared` is the option of a field; others are declared inside `Annotated`."""
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, OptionInfo):
            declared, hint = part, hint.__origin__
    if declared is not None:
        declared = copy(declared)  # several commands share it
        names = declared.param_decls or ()
        if not any(flag.startswith("--") for flag in names):
            declared.param_decls = (f"--{name.replace('_', '-')}", *names)
        if declared.metavar is None:
            declared.metavar = next(
                (text for kind, text in _METAVARS.items() if kind in (hint, *get_args(hint))), "TEXT"
            )
        if default is not MISSING and default is not Parameter.empty:
            declared.default = default
        default = declared
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


class PacelineGroup(TyperGroup):
    """The commands of `paceline`. Errors that a user can cause or fix are reported on one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes stdout again when it exits, which would fail and print a message.
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
    say("error: " + " ".join(str(problem).split()))
