"""Renders chat messages with the model's own jinja template.

A template is untrusted code. It runs in jinja's sandbox, in a fork of the helper process (`paceline.text.sandbox`). It
can read the messages and call a few helpers, but cannot change anything. Its time and memory are limited. Helpers and
flags are the same as in transformers, because templates on the hub expect them.

The code that jinja generates differs in one respect: the template's own text is `TemplateText`, so that it can be
distinguished from the messages' text in the result.
"""

from __future__ import annotations

import base64
import json
import marshal
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from time import monotonic
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join
from jinja2.nodes import EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidPrompt, TimedOut
from paceline.text import orderly, past_calls
from paceline.text.image_part import ImagePart
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished
from paceline.text.template_text import TemplateText, concat, flags_of

_SECONDS, _MEMORY = 5.0, 512 * 2**20
"""Limits for a template: processor time in seconds, and memory in bytes, in addition to the memory of the helper
process."""

_PROBE = "probe of the content"
_ROLE = re.compile(r"\w{1,64}")
"""Roles that are treated as text of the template, because some templates write "<|" + role + "|>"."""


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check messages, and convert them to the form that templates expect: dicts whose content is a string.

    Content may be a list of {"type": "text", "text": str}. Its texts are joined by line breaks. A list with an
    `ImagePart` remains a list. Content may be null if there are `tool_calls`, whose arguments may be JSON text.

    Raises:
        InvalidPrompt: If a message is not valid.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidPrompt(
            "chat messages must be a list with at least one message", 'For example: [{"role": "user", "content": "Hi"}]'
        )
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(
            f"message {index} must be an object, got {type(message).__name__}", 'Write {"role": ..., "content": ...}'
        )
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and calls:
        content = ""
    elif isinstance(content, list) and any(isinstance(part, ImagePart) for part in content):
        content = [_typed_part(index, part) for part in content]
    elif isinstance(content, list):
        content = "\n".join(_part(index, part) for part in content)
    for key, value in (("role", message.get("role")), ("content", content)):
        if not isinstance(value, str | list):
            what = f"has {key} {message[key]!r:.60}" if key in message else f"lacks {key!r}"
            raise InvalidPrompt(f"message {index} {what}", f"Its {key} must be a string")
    checked = {**message, "content": content}
    return {**checked, "tool_calls": _calls(index, calls)} if calls else checked


def _part(index: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidPrompt(f"message {index} contains a part that is not text", "Use only parts of type text")
    return text


def _typed_part(index: int, part: Any) -> dict[str, str]:
    return part if isinstance(part, ImagePart) else {"type": "text", "text": _part(index, part)}


def _calls(index: int, calls: Any) -> list[dict[str, Any]]:
    """Return the calls with their arguments converted to objects, because templates write the JSON themselves."""
    try:
        return [{**call, "function": _function(call["function"])} for call in calls]
    except (TypeError, KeyError, ValueError) as error:
        raise InvalidPrompt(
            f"message {index} has an invalid tool call",
            'Write a call as {"function": {"name": ..., "arguments": a JSON object}}',
        ) from error


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(function["name"], str):
        raise ValueError("not a tool call")
    return {**function, "arguments": past_calls.as_object(function.get("arguments"))}


def render(template: str, messages: Any, values: Mapping[str, Any], written: Collection[str] = ()) -> TemplateText:
    """Render messages to the text of a prompt.

    If the template rejects the messages, other forms of the same messages are tried. The template runs in a separate
    process, with at most 5 seconds of processor time and 512 MiB of memory.

    Args:
        template: The jinja template.
        messages: Chat messages.
        values: Other variables of the template, such as special tokens.
        written: Names of the `values` that are treated as text of the template, like roles. All other values are data.

    Raises:
        InvalidPrompt: If the messages are malformed, or the template rejects all forms of them or exceeds its limits.
        TimedOut: If the machine was too busy.
    """
    checked = check_messages(messages)
    if _is_typed(template):
        checked = [{**one, "content": _typed(one["content"])} for one in checked]
    try:
        return _run(template, checked, values, written)
    except JobFailed as error:
        end = monotonic() + _SECONDS
        for form in takewhile(lambda _: monotonic() < end, _forms(checked)):
            with suppress(JobFailed):
                return _run(template, form, values, written)
        raise InvalidPrompt(
            f"the model's chat template refuses these messages ({error})",
            "Check roles and their order, or skip the template with raw=True (--raw)",
        ) from error


def _typed(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@lru_cache(maxsize=8)
def _is_typed(template: str) -> bool:
    """Return True if a template shows text only if the content is a list of parts (SmolVLM)."""
    if "type" not in template:
        return False
    return not _shows(template, _PROBE) and _shows(template, _typed(_PROBE))


def _shows(template: str, content: Any) -> bool:
    """Return True if a template writes a probe text that is contained in this content of a message."""
    try:
        return _PROBE in _run(template, [{"role": "user", "content": content}], {"add_generation_prompt": False}, ())
    except (JobFailed, InvalidPrompt):
        return False


def _forms(chat: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield other forms of a chat that have the same meaning. The most similar form comes first."""
    yield from past_calls.alternative_chats(chat)
    for form in orderly.alternative_chats(chat):
        yield form
        yield from past_calls.alternative_chats(form)


def _run(
    template: str, messages: list[dict[str, Any]], values: Mapping[str, Any], written: Collection[str]
) -> TemplateText:
    """Render messages in a single form. Raise `JobFailed` if the template rejects them."""
    try:
        given = {"tools": None, "documents": None, **values, "messages": messages}
        job = (_compiled(template), given, tuple(written))
        text, spans = SANDBOX.run("paceline.text.chat_template:render_compiled", job, _SECONDS, _MEMORY)
        return TemplateText.of_spans(text, spans)
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
    """Compile a template for `render_compiled`. This runs in a fork, because constant folding needs limits too."""
    code: Any = _ENVIRONMENT.compile(template, filename="<chat template>")
    return base64.b64encode(marshal.dumps(code)).decode()


def render_compiled(argument: tuple[str, Mapping[str, Any], Collection[str]]) -> tuple[str, list[tuple[int, int]]]:
    """Render a compiled template. This runs in a fork.

    Args:
        argument: The code, the values, and the names of the values that are treated as text of the template.

    Returns:
        The text, and the spans (start, end) that the template wrote.
    """
    code, values, written = argument
    loaded = marshal.loads(base64.b64decode(code))
    template = Template.from_code(_ENVIRONMENT, loaded, _ENVIRONMENT.make_globals(None))
    own = {name: TemplateText.written(values[name]) for name in written}
    chat = [
        {**one, "role": TemplateText.written(one["role"]) if _ROLE.fullmatch(one["role"]) else one["role"]}
        for one in values["messages"]
    ]
    try:
        text = concat([template.render(**{**values, **own, "messages": chat})])
    except RecursionError:
        raise TemplateError("infinite recursion") from None
    return text.plain(), text.spans()


class _Generator(CodeGenerator):
    """Generates code that writes the template's own text as `TemplateText`."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.written({''.join(group)!r})"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.written({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(concat)
    written = staticmethod(TemplateText.written)


class _Generation(Extension):
    """Support for {% generation %}, which marks the model's turns for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Join like jinja's own filter, but keep the flags of the parts and of the separator."""
    return str(do_join(context, value, TemplateText(d, flags_of(d)), attribute))


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON. Unlike jinja's own filter, this does not escape HTML and does not mark the result as safe."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


# Create this on import, so that forks need not create it.
_ENVIRONMENT = _Environment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[loopcontrols, _Generation],
    optimized=False,  # the optimizer hides strings in constant lists
)
_ENVIRONMENT.filters["join"] = _join
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
