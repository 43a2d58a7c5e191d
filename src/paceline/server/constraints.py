"""Constraints on the form of a reply: OpenAI's, vLLM's, llama.cpp's and SGLang's, as grammars of llguidance."""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.sampling.grammar import Kind, check_installed
from paceline.sampling.json_schema import guide
from paceline.server.errors import bad_request
from paceline.server.lark import json_of, quoted
from paceline.server.schema import RequestBody, SchemaFormat
from paceline.server.worker import Busy
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished

Constraint = tuple[Kind, Any]

_SECONDS, _MEMORY = 2.0, 128 * 2**20
"""Limits for reading a GBNF grammar: processor time and bytes."""
_ANY_OBJECT = {"type": "object"}


def constraints_of(body: RequestBody) -> dict[str, Constraint]:
    """Return the request's constraints by parameter.

    Raises `ApiError` 400 for a schema or grammar that is malformed, `Busy` if a grammar cannot be read now.
    """
    outputs = body.structured_outputs
    found: dict[str, Constraint | None] = {
        "response_format": _formatted(body),
        "guided_json": _json("guided_json", body.guided_json),
        "json_schema": _json("json_schema", body.json_schema),
        "guided_regex": _regex(body.guided_regex),
        "regex": _regex(body.regex),
        "guided_grammar": _grammar("guided_grammar", body.guided_grammar),
        "grammar": _grammar("grammar", body.grammar),
        "ebnf": _grammar("ebnf", body.ebnf),
        "guided_choice": _choice(body.guided_choice),
    }
    if outputs is not None:
        found |= {
            "structured_outputs.json": _json("structured_outputs.json", outputs.json_),
            "structured_outputs.json_object": ("json_schema", _ANY_OBJECT) if outputs.json_object else None,
            "structured_outputs.regex": _regex(outputs.regex),
            "structured_outputs.grammar": _grammar("structured_outputs.grammar", outputs.grammar),
            "structured_outputs.choice": _choice(outputs.choice),
        }
    return {param: constraint for param, constraint in found.items() if constraint is not None}


def _formatted(body: RequestBody) -> Constraint | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    asked = form.json_schema if isinstance(form, SchemaFormat) else None
    schema = _ANY_OBJECT if asked is None or asked.schema_ is None else asked.schema_
    return "json_schema", guide(schema, lenient=asked is None or not asked.strict)


def _json(param: str, schema: Any) -> Constraint | None:
    """Return the constraint of a schema, which may be JSON text. It is a promise unless it says otherwise itself."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise bad_request(f"{param} must be a JSON schema, got text that is not JSON", param) from None
        if not isinstance(schema, dict):
            raise bad_request(f"{param} must be a JSON schema, got {type(schema).__name__}", param)
    return None if schema is None else ("json_schema", guide(schema, lenient=False))


def _regex(expression: str | None) -> Constraint | None:
    return None if expression is None else ("regex", expression)


def _choice(texts: list[str] | None) -> Constraint | None:
    return None if texts is None else ("lark", f"start: {' | '.join(map(quoted, texts))}")


def _grammar(param: str, text: str | None) -> Constraint | None:
    """Return the constraint of a Lark grammar, or of llama.cpp's GBNF, whose rules have "::="."""
    if not text or not re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
        return ("lark", text) if text else None
    check_installed()
    try:
        return "lark", str(SANDBOX.run("paceline.sampling.gbnf:to_lark", text, _SECONDS, _MEMORY))
    except (JobFailed, OverLimit) as error:
        reason = f"{error}" or f"reading it takes more than {_SECONDS:g} s or {_MEMORY >> 20} MiB"
        raise bad_request(f"{param} is not a valid GBNF grammar: {reason}", param) from error
    except Unfinished:
        raise Busy("the machine is too busy to read a new grammar") from None


def as_lark(kind: Kind, content: Any) -> str:
    """Return a constraint as an expression of a Lark grammar."""
    if kind == "json_schema":
        return json_of(content)
    if kind == "lark":
        return f"%lark {{\n{content}\n}}"
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), content, flags=re.DOTALL
    )
    return f"/{escaped}/"
