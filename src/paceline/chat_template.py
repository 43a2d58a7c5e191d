"""Chat messages -> the text a model was trained on, by the jinja template that the model brings.

A template is code of whoever made the model: it runs in jinja's sandbox, sees the messages and a few helpers, and
changes nothing. The helpers and flags are those that templates on the hub expect (transformers' chat templating).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from paceline.errors import InvalidPrompt


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as plain dicts. Raises `InvalidPrompt` for anything but a list of {"role": str, "content": str}."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidPrompt(
            "chat messages must be a list with at least one message",
            'As in [{"role": "user", "content": "Hi"}]',
        )
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(
            f"message {index} is a {type(message).__name__}", 'A message is {"role": ..., "content": ...}'
        )
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            what = f"has {key} {message[key]!r:.60}" if key in message else f"lacks {key!r}"
            raise InvalidPrompt(f"message {index} {what}", f"Its {key} must be a string")
    return dict(message)


def render(template: str, messages: Any, values: Mapping[str, Any]) -> str:
    """The prompt text. `values`: what the template may use besides the messages, special tokens for instance.

    Raises `InvalidPrompt` for malformed messages and for whatever the template itself objects to.
    """
    checked = check_messages(messages)
    defaults = {"tools": None, "documents": None}
    try:
        return str(_compiled(template).render(messages=checked, **{**defaults, **values}))
    except RecursionError as error:
        raise InvalidPrompt("the chat template never ends") from error
    except Exception as error:  # a template fails with whatever its code runs into
        raise InvalidPrompt(
            f"the model's chat template refuses these messages ({error})",
            "Check roles and their order, or skip the template with raw=True (--raw)",
        ) from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the model's own turns for training; here it only lets them through."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike jinja's own, neither HTML-escaped nor marked safe."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
