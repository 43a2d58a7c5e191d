# ruff: noqa: RUF001 (DeepSeek's markers)
"""Parsers of function calls in a reply as it grows. Whatever is not a call in the family's format stays text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.tagged import TaggedArguments, loose, written
from paceline.server.thinking import overlap
from paceline.server.tools import FENCED, GEMMA, MISTRAL, NO_ARGUMENTS, CallFormat, Schema

Functions = Mapping[str, Schema | None]
"""The schema of each function's arguments by its name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function call. `arguments`: a JSON object, as text."""

    name: str
    arguments: str
    id: str

    def as_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Piece = Call | str
"""A new call, or more arguments of the last one."""


class ForcedCallParser:
    """Parses a reply that is one call generated under `CallFormat.grammar`. Arguments are passed on as they come."""

    def __init__(self, family: CallFormat, functions: Functions) -> None:
        self._forms = {name: family.forced(schema) for name, schema in functions.items()}
        self._heads = {name: form.head(name) for name, form in self._forms.items()}
        self._functions = functions
        self._held = ""
        self._name: str | None = None
        self._arguments: _JsonArguments | TaggedArguments | None = None

    @property
    def complete(self) -> bool:
        """Whether the call was complete at the end of the reply."""
        return self._arguments is not None and self._arguments.complete

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """Return (text to show, always empty, and the new pieces of the call)."""
        pieces: list[Piece] = []
        self._held += text
        head = self._held.lstrip()
        if self._name is None and self._held:
            fitting = [name for name, known in self._heads.items() if known.startswith(head) or head.startswith(known)]
            if len(fitting) == 1:  # at once if there is only one function
                self._name = fitting[0]
                pieces.append(Call(self._name, "", self._forms[self._name].new_id()))
        if self._name is not None and self._arguments is None and head.startswith(self._heads[self._name]):
            self._held, self._arguments = head.removeprefix(self._heads[self._name]), self._reader(self._name)
        if self._arguments is not None:
            held, self._held = self._held, ""
            pieces += filter(None, [self._arguments.push(held)])
        return "", pieces

    def flush(self) -> tuple[str, list[Piece]]:
        """Return the rest of the arguments."""
        return "", [*filter(None, [self._arguments.flush() if self._arguments else ""])]

    def _reader(self, name: str) -> _JsonArguments | TaggedArguments:
        form = self._forms[name]
        if form.tags is None:
            return _JsonArguments(form.call[2])
        return TaggedArguments(form.tags, self._functions[name] or NO_ARGUMENTS, form.call[2])


class _JsonArguments:
    """Passes growing JSON on, without what may be the `tail` of the call. `complete`: as of `TaggedArguments`."""

    def __init__(self, tail: str) -> None:
        self._tail, self._held, self._shown = tail, "", ""
        self.complete = False

    def push(self, text: str) -> str:
        """Return more of the JSON."""
        self._held += text
        return self._show(len(self._held) - overlap(self._held, self._tail))

    def flush(self) -> str:
        """Return the rest of incomplete arguments; after complete ones the rest is the end of the call."""
        self.complete = _json(self._shown, _INVALID) is not _INVALID
        return "" if self.complete else self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self._shown += shown
        return shown


class CallParser:
    """Splits a growing reply into text and calls.

    White space around calls is dropped. A call of any other than these functions is text. `single`: everything after
    the first call is dropped.
    """

    def __init__(self, family: CallFormat, functions: Functions, single: bool = False) -> None:
        self._family, self._functions, self._single = family, functions, single
        self._formats = (family, *family.also, FENCED)
        self._buffer = ""
        self._inside: CallFormat | None = None
        """Format of the call that `_buffer` is in."""
        self._text_began = False
        self._space = ""
        """White space that is shown if text follows it."""
        self.called = False

    def push(self, text: str) -> tuple[str, Sequence[Piece]]:
        """Return (text to show, complete calls)."""
        self._buffer += text
        shown, calls = "", []
        for piece in self._pieces():
            if isinstance(piece, str):
                shown += self._show(piece)
            else:
                calls += self._limited(piece)
                self._space = ""
        return shown, calls

    def flush(self) -> tuple[str, Sequence[Piece]]:
        """Return what the end of the reply leaves: a call without its end marker, or text that was held back."""
        held, inside = self._buffer, self._inside
        self._buffer, self._inside = "", None
        calls = self._parse(held, inside) if inside and inside.ends_itself else None
        if calls is not None:
            return "", self._limited(calls)
        marked = inside is not None and not (inside.bare and held.startswith("{"))
        rest = self._show((inside.start if inside and marked else "") + held)
        return rest + ("" if self.called else self._space), []

    def _limited(self, calls: list[Call]) -> list[Call]:
        calls = calls[: not self.called] if self._single else calls
        self.called = self.called or bool(calls)
        return calls

    def _show(self, text: str) -> str:
        """Return text that can be shown; white space waits until text or a call follows it."""
        if self.called and self._single:
            return ""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return stripped

    def _pieces(self) -> Iterator[str | list[Call]]:
        while self._buffer:
            piece = self._in_call(self._inside) if self._inside else self._in_text()
            if piece is None:
                return
            yield piece

    def _in_text(self) -> str | None:
        """Return text up to the beginning of a call; None if more of the reply is needed to tell."""
        family, held = self._family, self._buffer
        if family.bare and not self._text_began:
            held = held.lstrip()
            if not held:
                return None
            self._text_began = True
            if held.startswith("{"):
                self._buffer, self._inside = held, family
                return ""
            held = self._buffer
        starts = [(at, form) for form in self._formats if (at := held.find(form.start)) >= 0]
        if starts:
            at, form = min(starts, key=lambda start: start[0])
            self._buffer, self._inside, self._text_began = held[at + len(form.start) :], form, True
            return held[:at]
        shown = len(held) - max(overlap(held, form.start) for form in self._formats)
        self._buffer = held[shown:]
        return held[:shown] or None

    def _in_call(self, form: CallFormat) -> str | list[Call] | None:
        """Return the calls, or text if they are none; None if more of the reply is needed."""
        if not form.end:
            return None
        first = self._buffer.lstrip()[:1]
        if form.first and first not in form.first:  # a code block in another language is not held back
            self._inside = None
            return form.start
        inner, found, after = self._buffer.partition(form.end)
        if not found:
            return None
        self._buffer, self._inside = after, None
        calls = self._parse(inner, form)
        return f"{form.start}{inner}{form.end}" if calls is None else calls

    def _parse(self, text: str, form: CallFormat) -> list[Call] | None:
        found = _tagged(text, form, self._functions) if form.tags else []
        found = found or _PARSERS.get(form.name, _hermes)(text.strip())
        if not found or any(name not in self._functions for name, _ in found):
            return None
        try:
            return [Call(name, written(given), self._family.new_id()) for name, given in found]
        except ValueError:
            return None


Found = list[tuple[str, dict[str, Any]]]
"""Names and arguments; empty if the text is not a call."""
_INVALID = object()


def _hermes(text: str) -> Found:
    """One object, or a list of them (SmolLM2)."""
    return _objects(_json(text))


def _llama(text: str) -> Found:
    """Objects separated by ";"."""
    found: Found = []
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return []
        one = _objects(value)
        if len(one) != 1:
            return []
        found += one
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return found


def _mistral(text: str) -> Found:
    """A list of objects; or names with objects, separated by [TOOL_CALLS]."""
    if text.startswith("["):
        return _objects(_json(text))
    found: Found = []
    for part in filter(None, text.split(MISTRAL.start)):
        part = part.strip()
        hit = re.match(r"([a-zA-Z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?", part)
        given = _json(part[hit.end() :]) if hit else None
        if not hit or not isinstance(given, dict):
            return []
        found.append((hit[1], given))
    return found


def _fenced(text: str) -> Found:
    """As Hermes; at the end of a reply the fence may be on the same line."""
    return _hermes(text.removesuffix("```"))


def _tagged(text: str, form: CallFormat, functions: Functions) -> Found:
    """Names, each with tagged arguments."""
    assert form.tags is not None
    before, between, after = form.call
    head = re.compile(rf'\s*(?:{re.escape(before.splitlines()[-1])})?([^<>"\s]+){loose(between)}')
    tail = re.compile(rf"\s*{re.escape(after.removesuffix(form.end).strip())}\s*")
    found: Found = []
    at = 0
    while at < len(text):
        begun = head.match(text, at)
        if not begun:
            return []
        given, at = form.tags.read(text, begun.end(), functions.get(begun[1]) or NO_ARGUMENTS)
        ended = tail.match(text, at)
        if not ended:
            return []
        found.append((begun[1], given))
        at = ended.end()
    return found


def _pythonic(text: str) -> Found:
    """A list of calls as Python writes them, or JSON."""
    try:
        tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return _hermes(text)


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    return ast.unparse(node.func), {str(one.arg): _python_value(one.value) for one in node.keywords}


def _python_value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id="true" | "false" | "null"):
            return json.loads(node.id)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [_python_value(one) for one in node.elts]
        case ast.Dict():
            return {
                str(_python_value(key)): _python_value(one) for key, one in zip(node.keys, node.values, strict=True)
            }
    raise ValueError("not a JSON value")


def _gemma(text: str) -> Found:
    """A name, and JSON without quotes around names, and with a token of its own around texts."""
    name, brace, body = text.removeprefix("call:").partition("{")
    parts = (brace + body).split(GEMMA.quote)
    parts[1::2] = map(json.dumps, parts[1::2])
    parts[::2] = [re.sub(r"([{,]\s*)([\w.-]+)(\s*:)", r'\1"\2"\3', part) for part in parts[::2]]
    given = _json(brace + body) or _json("".join(parts))
    return [(name.strip(), given)] if isinstance(given, dict) else []


def _deepseek(text: str) -> Found:
    """Names and objects between markers of their own; R1 and V3 write a word before a name, and fences."""
    found: Found = []
    for part in filter(None, text.replace("<｜tool▁call▁end｜>", "").split("<｜tool▁call▁begin｜>")):
        hit = re.match(r"(?:function<｜tool▁sep｜>)?([\w.-]+)\s*(?:<｜tool▁sep｜>|```json)", part)
        given = _json(part[hit.end() :].rstrip().removesuffix("```")) if hit else None
        if not hit or not isinstance(given, dict):
            return []
        found.append((hit[1], given))
    return found


_PARSERS: dict[str, Callable[[str], Found]] = {
    "llama": _llama,
    "mistral": _mistral,
    "fenced": _fenced,
    "pythonic": _pythonic,
    "gemma": _gemma,
    "deepseek": _deepseek,
}
"""By the name of the format; all others are read as Hermes'."""


def _objects(value: Any) -> Found:
    found: Found = []
    for one in value if isinstance(value, list) else [value]:
        given = one.get("arguments", one.get("parameters")) if isinstance(one, dict) else None
        given = _json(given) if isinstance(given, str) else given
        if not isinstance(given, dict) or not isinstance(one.get("name"), str):
            return []
        found.append((one["name"], given))
    return found


def _json(text: str, default: Any = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default
