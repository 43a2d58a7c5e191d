"""Reference pages of the command line, generated from the commands themselves: `python docs/cli_reference.py`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENT = {
    "PACELINE_CACHE": (
        "`$XDG_CACHE_HOME/paceline`, else `~/.cache/paceline`",
        "Folder for the demo model and compiled CPU kernels.",
    ),
    "PACELINE_NATIVE": ("`1`", "`0` runs the layers on torch instead of the compiled CPU kernels."),
    "PACELINE_ISA": (
        "the best one that the processor supports",
        "Instruction set of the CPU kernels: `portable`, `sse4`, `avx2`, `avxvnni`, `avx512`, `avx512vnni`, "
        "`avx512bf16`; on ARM `neon`, `neondot`, `neoni8mm`.",
    ),
    "PACELINE_MODEL": ("`demo`", "Model for commands that name none; as `--model`."),
    "PACELINE_CONFIG": ("`~/.config/paceline/config.toml`", "Configuration file; as `paceline --config`."),
    "PACELINE_API_KEY": ("", "API keys of `paceline serve`, separated by spaces; as `--api-key`."),
    "PACELINE_CERTIFY_KEY": ("`$OPENAI_API_KEY`", "API key that `paceline certify` sends to endpoints."),
    "OPENAI_API_KEY": ("", "The same, if `PACELINE_CERTIFY_KEY` is not set."),
    "HF_TOKEN": ("", "Access token for gated or private models on the Hugging Face Hub; as `--token`."),
    "CXX": (
        "`g++`, `clang++` or `c++`",
        "C++ compiler for the CPU kernels if no wheel included them. May have options, as in a shell.",
    ),
    "XDG_CACHE_HOME": ("`~/.cache`", "Parent of the cache folder if `PACELINE_CACHE` is not set."),
    "XDG_CONFIG_HOME": ("`~/.config`", "Parent of `paceline/config.toml`."),
    "OLLAMA_MODELS": ("`~/.ollama/models`", "Ollama's store. `paceline list --all` shows its models."),
    "WORLD_SIZE": ("`1`", "Number of processes that share a model. torchrun sets this and the next three."),
    "RANK": ("", "Rank of this process."),
    "LOCAL_WORLD_SIZE": ("", "Number of these processes on this machine. If all are on it, they share memory."),
    "LOCAL_RANK": ("`$RANK`", "Rank of this process on its machine, and the number of its GPU."),
    "NO_COLOR": ("", "Any value turns colours off, as does `TERM=dumb`. See <https://no-color.org>."),
    "TERM": ("", "`dumb` turns colours off."),
    "GOMP_SPINCOUNT": ("`10000`", "How long idle threads spin. The `paceline` command sets it unless you do."),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ("`64`", "Limits oneDNN's memory. `paceline train` sets it unless you do."),
    "LRU_CACHE_CAPACITY": ("`64`", "Limits torch's memory for oneDNN. `paceline train` sets it unless you do."),
}
"""Environment variables that Paceline reads or sets: name -> (default, meaning), in Markdown."""


def environment() -> str:
    """Return the environment variables as a Markdown table."""
    rows = [(f"`{name}`", default, meaning) for name, (default, meaning) in ENVIRONMENT.items()]
    return _table(("Variable", "Default", "Meaning"), rows)


def markdown() -> str:
    """Return every command with its arguments and options as one Markdown page."""
    from paceline.cli import app

    group: Any = typer.main.get_command(app)
    commands = {f"paceline {name}": command for name, command in group.commands.items()}
    pages = [_command(name, command) for name, command in ({"paceline": group} | commands).items()]
    return "\n\n".join(["# Command line", *pages]) + "\n"


def _command(name: str, command: Any) -> str:
    context = typer.Context(command, info_name=name)
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        panels.setdefault(param.rich_help_panel or default, []).append(param)
    parts = [f"## {name}", f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"]
    parts += [_escaped(paragraph) for paragraph in command.help.split("\n\n")]
    for panel in sorted(panels, key=["Options", "Arguments"].__contains__, reverse=True):
        rows = [(_names(param), _default(param, context), _escaped(param.help)) for param in panels[panel]]
        parts += [f"**{panel}**", _table(("Name", "Default", "Meaning"), rows)]
    return "\n\n".join(parts)


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    value = "" if param.is_flag else " " + (param.metavar or "VALUE")
    return f"`{', '.join(sorted(param.opts, key=len))}{value}`"


def _default(param: Any, context: typer.Context) -> str:
    if param.required:
        return "required"
    default = param.get_default(context)
    text = "" if default in (None, False, "") else f"`{default}`"
    text = _escaped(param.show_default) if isinstance(param.show_default, str) else text
    return f"{text} `${param.envvar}`".strip() if param.envvar else text


def _escaped(text: str) -> str:
    """Return the text on one line, with Markdown's special characters escaped outside of code."""
    return re.sub(r"(`[^`]*`)|([|<*_])", lambda found: found[1] or "\\" + found[2], " ".join(text.split()))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(markdown(), end="")
