"""Chat templates in jinja's sandbox; runs in forks of the helper process (`paceline.text.sandbox`).

Helpers and flags are those that templates on the hub expect (transformers' chat templating).
"""

from __future__ import annotations

import base64
import json
import marshal
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(template: str) -> str:
    """Return a template's code for `render`. Folds constants, so this needs limits too."""
    code: Any = _environment().compile(template, filename="<chat template>")
    return base64.b64encode(marshal.dumps(code)).decode()


def render(argument: tuple[str, Mapping[str, Any]]) -> str:
    """Return the text that `argument`, (code, values), renders to."""
    code, values = argument
    environment = _environment()
    template = Template.from_code(environment, marshal.loads(base64.b64decode(code)), environment.make_globals(None))
    try:
        return str(template.render(**values))
    except RecursionError:
        raise TemplateError("it recurses without end") from None


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


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


_environment()  # made on import, before the forks
