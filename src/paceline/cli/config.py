"""The configuration file with options of the commands, in TOML."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOption

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Defaults = dict[str, dict[str, Any]]
"""Command -> parameter -> value, in the form of click's `default_map`."""

_MAX_FILE_BYTES = 1 << 20
SECOND_NAMES = {"run": "chat", "show": "info"}
"""Command -> another command with the same options."""


def default_path() -> Path:
    """Return the path of the default configuration file."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "paceline/config.toml"


def read_config(path: Path | None, commands: Mapping[str, Any]) -> Defaults:
    """Read a configuration file.

    A table [COMMAND] contains options of a command under their long names. Options before the first table apply to
    every command that has them.

    Args:
        path: The file. None means the file at `default_path`, if it exists.
        commands: Name -> command.

    Raises:
        InvalidOption: If the file cannot be read, or it contains an unknown name or a value of the wrong kind.
    """
    if path is None and not default_path().is_file():
        return {}
    path = path or default_path()
    content = _read(path)
    known = {name: _options(command) for name, command in commands.items()}
    shared = {key: value for key, value in content.items() if not isinstance(value, dict)}
    everywhere = {option: param for options in known.values() for option, param in options.items()}
    for key in shared:
        _find(path, "no command", everywhere, key)
    for name in content.keys() - shared.keys() - known.keys():
        raise InvalidOption(f"{path}: there is no command {name!r}", _near(name, known))
    found: Defaults = {}
    for name, options in known.items():
        mine = {key: value for key, value in shared.items() if _flag(key) in options}
        mine |= content.get(SECOND_NAMES.get(name, ""), {}) | content.get(name, {})
        params = [(_find(path, f"[{name}]", options, key), key, value) for key, value in mine.items()]
        found[name] = {param.name: _value(path, param, key, value) for param, key, value in params}
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise InvalidOption(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB", "Use a configuration file")
        return tomllib.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidOption):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InvalidOption(
            f"the configuration {path} cannot be read: {reason}", "Correct it, or use another file"
        ) from error


def _options(command: Any) -> dict[str, Any]:
    return {
        flag: param for param in command.params for flag in (*param.opts, *param.secondary_opts) if flag[:2] == "--"
    }


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _find(path: Path, where: str, options: Mapping[str, Any], key: str) -> Any:
    if _flag(key) in options:
        return options[_flag(key)]
    raise InvalidOption(f"{path}: {where} has no option {key!r}", _near(key, [flag[2:] for flag in options]))


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), 1, 0.5)
    return f"Did you mean {near[0]}?" if near else "See paceline --help"


def _value(path: Path, param: Any, key: str, value: Any) -> Any:
    """Convert a value to the form of the command line: a list for a repeatable option, otherwise a single value."""
    values = value if isinstance(value, list) else [value]
    single = all(isinstance(one, (str, int, float)) for one in values)
    if not single or (isinstance(value, list) and not param.multiple) or param.is_flag != isinstance(values[0], bool):
        kind = "true or false" if param.is_flag else "a list of values" if param.multiple else "one value"
        raise InvalidOption(f"{path}: {key} must be {kind}, got {value!r:.80}", "Correct the file")
    if param.is_flag:
        return value
    texts = [str(one) for one in values]
    return texts if param.multiple else texts[0]
