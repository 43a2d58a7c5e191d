"""Options of the command, declared once for `paceline certify` and for `python -m paceline.certify`."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from paceline.certify.sizes import FULL, QUICK, STANDARD, WorkSizes
from paceline.errors import InvalidOption


def _option(help: str, metavar: str = "", panel: str = "Endpoints", default: Any = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar, "panel": panel})


@dataclass(frozen=True, slots=True)
class CertifyOptions:
    """Endpoints, amount of work, and output of `paceline certify`."""

    plain: str | None = _option("Address of the same model without speculation.", "URL")
    plain_body: str | None = _option(
        "Fields that switch speculation off, as JSON. Known servers have a default.", "JSON"
    )
    body: str | None = _option("Fields that switch speculation on, as JSON.", "JSON")
    model: str | None = _option("Name of the model in requests. By default, the server's first model.", "NAME")
    plain_model: str | None = _option("Name of the model in plain requests, if it differs.", "NAME")
    api: str = _option("chat or completions.", "NAME", default="chat")
    drafter: str = _option("Drafter, if the target is a model instead of an address.", "DRAFTER", default="suffix")
    against: str = _option("Drafter of the other side, or none.", "DRAFTER", default="none")
    quick: bool = _option("Look only for large faults, in two minutes.", panel="Work", default=False)
    full: bool = _option("Look for small faults too, in an hour.", panel="Work", default=False)
    prompts: Path | None = _option('Your own prompts for greedy replies: JSONL of {"prompt"}.', "FILE", "Work")
    tokens: int | None = _option("Maximum length of a greedy reply, in tokens.", "N", "Work")
    seconds: float | None = _option("Time limit for the whole test, in seconds.", "S", "Work")
    concurrency: int = _option("Number of simultaneous requests, 1 to 16, except in the load test.", "N", "Work", 4)
    near_tie: float = _option("Gap of log-probabilities below which two tokens are a near-tie.", "NATS", "Work", 0.25)
    seed: int = _option("Seed of the built-in prompts.", "N", "Work", 0)
    timeout: float = _option("Time limit for a request, in seconds.", "S", "Work", 300.0)
    out: list[Path] | None = _option(
        "Write the certificate: .json, .html or .xml (JUnit). Repeatable.", "FILE", "Output"
    )
    yes: bool = _option("Start without asking for consent.", panel="Output", default=False)

    def sizes(self) -> WorkSizes:
        """Return the amounts of work. Raise `InvalidOption` if an option is not valid."""
        if self.quick and self.full:
            raise InvalidOption("--quick does not work with --full", "Give only one of them")
        for name, low, high in (
            ("concurrency", 1, 16),
            ("tokens", 1, 100_000),
            ("seconds", 1, 1e6),
            ("timeout", 1, 1e5),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidOption(f"--{name} must be {low} to {high:g}, got {value}", param=name)
        if self.api not in ("chat", "completions"):
            raise InvalidOption(f"--api must be chat or completions, got {self.api}", param="api")
        if not 0 <= self.near_tie < 10:
            raise InvalidOption(f"--near-tie must be >= 0 and < 10, got {self.near_tie}", param="near_tie")
        base = QUICK if self.quick else FULL if self.full else STANDARD
        given = {"tokens": self.tokens, "seconds": self.seconds}
        values = {one.name: getattr(base, one.name) for one in fields(WorkSizes)}
        return WorkSizes(**(values | {name: value for name, value in given.items() if value is not None}))


def parse_body(name: str, text: str) -> dict[str, Any]:
    """Parse the JSON object of an option. Raise `InvalidOption` if it is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidOption(f"{name} is not a JSON object: {text:.100}", 'Write {"speculation": "off"}, for example')
    return found


def parser() -> argparse.ArgumentParser:
    """Return a parser with a flag for each field of `CertifyOptions`, and the target."""
    made = argparse.ArgumentParser("python -m paceline.certify", description=__doc__)
    made.description = "Test whether the speculation of an OpenAI-compatible endpoint is lossless."
    made.add_argument("target", metavar="TARGET", help="Address such as http://127.0.0.1:8000/v1, or a model.")
    hints = get_type_hints(CertifyOptions)
    for one in fields(CertifyOptions):
        flag, hint, help_text = "--" + one.name.replace("_", "-"), hints[one.name], str(one.metadata["help"])
        help_text = help_text.replace("%", "%%")
        if hint is bool:
            made.add_argument(flag, action="store_true", help=help_text)
            continue
        kind = next(x for x in (*get_args(hint), hint) if x is not type(None))
        action = "append" if get_origin(kind) is list else "store"
        kind = get_args(kind)[0] if get_origin(kind) is list else kind
        made.add_argument(
            flag, action=action, type=kind, default=one.default, metavar=one.metadata["metavar"], help=help_text
        )
    return made
