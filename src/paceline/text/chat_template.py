"""Chat messages rendered by the model's own jinja template.

A template is untrusted code: it runs in jinja's sandbox, in a fork of the helper process (`paceline.text.sandbox`),
sees the messages and a few helpers, cannot change anything, and has limits on time and memory. Helpers and flags are
those that templates on the hub expect (transformers' chat templating).
"""

from __future__ import annotations

import base64
import json
import marshal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidPrompt, TimedOut
from paceline.text import orderly
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished

_SECONDS, _MEMORY = 5.0, 512 * 2**20
"""Limits of a template: processor time, and memory in bytes beyond that of the helper process."""


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages as templates expect them: dicts whose content is a string.

    Content may be a list of {"type": "text", "text": str}, whose texts become lines, or null beside `tool_calls`, whose
    arguments may be JSON text. Raises `InvalidPrompt` for anything that is not a valid message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidPrompt(
            "chat messages must be a list with at least one message", 'As in [{"role": "user", "content": "Hi"}]'
        )
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(
            f"message {index} is a {type(message).__name__}", 'A message is {"role": ..., "content": ...}'
        )
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and calls:
        content = ""
    elif isinstance(content, list):
        content = "\n".join(_part(index, part) for part in content)
    for key, value in (("role", message.get("role")), ("content", content)):
        if not isinstance(value, str):
            what = f"has {key} {message[key]!r:.60}" if key in message else f"lacks {key!r}"
            raise InvalidPrompt(f"message {index} {what}", f"Its {key} must be a string")
    checked = {**message, "content": content}
    return {**checked, "tool_calls": _calls(index, calls)} if calls else checked


def _part(index: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidPrompt(f"message {index} holds a part that is not text", "Its parts must be of type text")
    return text


def _calls(index: int, calls: Any) -> list[dict[str, Any]]:
    """Return the calls with their arguments as objects, since templates write the JSON themselves."""
    try:
        return [{**call, "function": _function(call["function"])} for call in calls]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise InvalidPrompt(
            f"message {index} has an invalid tool call",
            'A call is {"function": {"name": ..., "arguments": a JSON object}}',
        ) from error


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function["arguments"]
    given = json.loads(given or "{}") if isinstance(given, str) else given
    if not isinstance(given, Mapping) or not isinstance(function["name"], str):
        raise ValueError("not a tool call")
    return {**function, "arguments": given}


def render(template: str, messages: Any, values: Mapping[str, Any]) -> str:
    """Return the prompt text. `values`: variables of the template besides the messages, such as special tokens.

    Messages that the template refuses are tried again in the other orders of `orderly.forms`. The template runs in a
    process of its own, for at most 5 seconds of processor time and 512 MiB. Raises `InvalidPrompt` for malformed
    messages, messages that the template refuses in every order, and exceeded limits, and `TimedOut` where the machine
    was too busy.
    """
    checked = check_messages(messages)
    try:
        return _run(template, checked, values)
    except JobFailed as error:
        for form in orderly.forms(checked):
            with suppress(JobFailed):
                return _run(template, form, values)
        raise InvalidPrompt(
            f"the model's chat template refuses these messages ({error})",
            "Check roles and their order, or skip the template with raw=True (--raw)",
        ) from error


def _run(template: str, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
    """Return the prompt text. Raises `JobFailed` for messages that the template refuses."""
    try:
        given = {"tools": None, "documents": None, **values, "messages": messages}
        job = (_compiled(template), given)
        return str(SANDBOX.run("paceline.text.chat_template:render_compiled", job, _SECONDS, _MEMORY))
    except OverLimit as error:
        raise InvalidPrompt(
            f"the model's chat template needs more than {_SECONDS:g} s or {_MEMORY >> 20} MiB for these messages",
            "Send fewer messages, or skip the template with raw=True (--raw)",
        ) from error
    except Unfinished as error:
        raise TimedOut("the machine was too busy to apply the chat template", "Try again") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> str:
    return str(SANDBOX.run("paceline.text.chat_template:compile_template", template, _SECONDS, _MEMORY))


def compile_template(template: str) -> str:
    """Return a template's code for `render_compiled`. Runs in a fork, since folding constants needs limits too."""
    code: Any = _ENVIRONMENT.compile(template, filename="<chat template>")
    return base64.b64encode(marshal.dumps(code)).decode()


def render_compiled(argument: tuple[str, Mapping[str, Any]]) -> str:
    """Return the text that `argument`, (code, values), renders to. Runs in a fork."""
    code, values = argument
    loaded = marshal.loads(base64.b64decode(code))
    template = Template.from_code(_ENVIRONMENT, loaded, _ENVIRONMENT.make_globals(None))
    try:
        return str(template.render(**values))
    except RecursionError:
        raise TemplateError("it recurses without end") from None


class _Generation(Extension):
    """{% generation %} marks the model's own turns for training; here its content stays unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON; unlike jinja's own filter without HTML escapes, and not marked safe."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


# Made on import, before the forks.
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
