"""Streaming parsers for function calls in a reply. Everything that is not a call in the model's format is text.

`CallParser` reads replies that may contain calls, and returns each call as a whole. `ForcedCallParser` reads a reply
that must be a call, and returns its arguments piece by piece. If such a reply is cut off, for example by the length
limit, the arguments are incomplete JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.chat.tagged import TaggedArguments, json_text
from paceline.chat.tools import FENCED, NO_ARGUMENTS, CallFormat, Schema
from paceline.text import loose_json
from paceline.text.growing import GrowingText, Malformed, Reading, overlap
from paceline.text.loose_json import JsonReader

Functions = Mapping[str, Schema | None]
"""Function name -> JSON schema of its arguments."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function call.

    Attributes:
        name: Name of the function.
        arguments: JSON object as text.
        id: Id of the call. None if the call is from an earlier message that has no id.
    """

    name: str
    arguments: str
    id: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's shape."""
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Piece = Call | str
"""A new call, or more text of the arguments of the current call."""


class ForcedCallParser:
    """Parses a reply that is one call generated under `CallFormat.grammar`. It streams the arguments."""

    def __init__(self, call_format: CallFormat, functions: Functions) -> None:
        self._forms = {name: call_format.forced(schema) for name, schema in functions.items()}
        self._heads = {name: form.head(name) for name, form in self._forms.items()}
        self._functions = functions
        self._held = ""
        self._name: str | None = None
        self._arguments: _JsonArguments | TaggedArguments | None = None

    @property
    def complete(self) -> bool:
        """True if the call was complete at the end of the reply."""
        return self._arguments is not None and self._arguments.complete

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """Return the text to show, which is always empty, and the new pieces of the call."""
        pieces: list[Piece] = []
        self._held += text
        head = self._held.lstrip()
        if self._name is None and self._held:
            fitting = [name for name, known in self._heads.items() if known.startswith(head) or head.startswith(known)]
            if len(fitting) == 1:  # with a single function, this is true from the first character on
                self._name = fitting[0]
                pieces.append(Call(self._name, "", self._forms[self._name].new_id()))
        if self._name is not None and self._arguments is None and head.startswith(self._heads[self._name]):
            self._held, self._arguments = head.removeprefix(self._heads[self._name]), self._reader(self._name)
        if self._arguments is not None:
            held, self._held = self._held, ""
            pieces += filter(None, [self._arguments.push(held)])
        return "", pieces

    def flush(self) -> tuple[str, list[Piece]]:
        """End the reply. Return no text, and the rest of the arguments."""
        return "", [*filter(None, [self._arguments.flush() if self._arguments else ""])]

    def _reader(self, name: str) -> _JsonArguments | TaggedArguments:
        form = self._forms[name]
        if form.tags is None:
            return _JsonArguments(form.call[2])
        return TaggedArguments(form.tags, self._functions[name] or NO_ARGUMENTS, form.call[2])


class _JsonArguments:
    """Streams arguments that are JSON. It holds back text that may be the `tail` of the call.

    `complete`: See `TaggedArguments`.
    """

    def __init__(self, tail: str) -> None:
        self._tail, self._held, self._shown = tail, "", ""
        self.complete = False

    def push(self, text: str) -> str:
        """Add text of the reply. Return the new part of the JSON."""
        self._held += text
        return self._show(len(self._held) - overlap(self._held, self._tail))

    def flush(self) -> str:
        """End the reply. Return the rest of the arguments if they are incomplete. Otherwise, the rest is the tail."""
        self.complete = _is_json(self._shown)
        return "" if self.complete else self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self._shown += shown
        return shown


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


_NAME = re.compile(r"[\w.:-]*")
_BRACES = re.compile(r"\}*")
_BARE_KEYS = {"name", "arguments", "parameters", "id", "type"}
"""Keys that a call without a marker may have."""
_WHOLE = replace(FENCED, name="whole", start="", heads=("```json", "```"))
"""Format of a reply that consists of one call without a marker."""


class CallParser:
    """Splits a growing reply into text and calls.

    White space around calls is dropped. A call to an unknown function is text.
    """

    def __init__(
        self,
        call_format: CallFormat,
        functions: Functions,
        single: bool = False,
        bare: bool = True,
        marked: bool = False,
    ) -> None:
        """Make a parser.

        Args:
            call_format: The model's format.
            functions: The functions that may be called.
            single: True to drop everything after the first call.
            bare: True to read a reply that consists of a JSON object as a call.
            marked: True to read only calls that begin with a marker.
        """
        self._format, self._functions, self._single = call_format, functions, single
        forms = [form for form in (*call_format.also, call_format) if form.start and not (marked and form.last)]
        self._forms = {form.start: form for form in forms}
        self._starts = re.compile("|".join(map(re.escape, sorted(self._forms, key=len, reverse=True))))
        self._bare = not marked and (bare or call_format.name == "llama")
        self._whole = replace(_WHOLE, tails=("```", *call_format.ends))
        self._text = GrowingText()
        self._found: list[str | list[Call]] = []
        self._reading = self._read()
        self._space: list[str] = []
        """White space that is shown only if text follows it."""
        self.called = False
        """True if a call has been found."""

    def push(self, text: str) -> tuple[str, Sequence[Piece]]:
        """Add text of the reply. Return the text to show and the calls that are now complete."""
        self._text.push(text)
        next(self._reading, None)
        found, self._found = self._found, []
        shown, calls = list[str](), list[Call]()
        for piece in found:
            if isinstance(piece, str):
                shown += self._shown(piece)
            else:
                calls += self._limited(piece)
                self._space = []
        return "".join(shown), calls

    def flush(self) -> tuple[str, Sequence[Piece]]:
        """End the reply. Return text that was held back, and calls that lack an end marker."""
        self._text.is_complete = True
        shown, calls = self.push("")
        return shown + ("" if self.called else "".join(self._space)), calls

    def _limited(self, calls: list[Call]) -> list[Call]:
        calls = calls[: not self.called] if self._single else calls
        self.called = self.called or bool(calls)
        return calls

    def _shown(self, text: str) -> list[str]:
        """Return the text that can be shown. White space is held back until text or a call follows it."""
        if self.called and self._single:
            return []
        stripped = text.rstrip()
        shown = [*self._space, stripped] if stripped else []
        if stripped:
            self._space = []
        self._space.append(text[len(stripped) :])
        return shown

    def _read(self) -> Reading[None]:
        """Read the whole reply."""
        if self._bare:
            yield from self._text.space()
            first = yield from self._text.begins(*self._forms, "{", "[", "```")
            if first in ("{", "[", "```"):
                yield from self._attempt(self._whole)
        while (form := (yield from self._text_before_call())) is not None:
            yield from self._attempt(form)

    def _text_before_call(self) -> Reading[CallFormat | None]:
        """Read text up to the beginning of a call. Return the call's format, or None at the end of the reply."""
        while True:
            start = self._text.seek((*self._forms,), self._starts)
            if shown := self._text.taken():
                self._found.append(shown)
            if start:
                return self._forms[start]
            if self._text.is_complete:
                return None
            yield

    def _attempt(self, form: CallFormat) -> Reading[None]:
        """Read calls in a format. If they turn out not to be calls, everything that was read becomes text."""
        try:
            calls = yield from _CallBlock(
                self._text, form, self._functions, lenient=self._format.name == "llama"
            ).calls()
        except Malformed:
            self._found.append(self._text.taken())
        else:
            self._text.taken()
            self._found.append([Call(name, arguments, self._format.new_id()) for name, arguments in calls])


class ReasonedCalls:
    """Finds calls in reasoning that never ends, because models sometimes forget to end it before a call.

    Once there is a call, the rest of the reasoning is held back. If the reasoning ends after all, the call was only a
    part of it, and is shown as reasoning.
    """

    def __init__(self, call_format: CallFormat, functions: Functions, single: bool = False) -> None:
        self._parser = CallParser(call_format, functions, single, marked=True)
        self._raw = self._text = ""
        """The text that is held back, with and without its calls."""
        self._calls: list[Call] = []

    def push(self, text: str, inside: bool, finish: str | None) -> tuple[str, Sequence[Call]]:
        """Add text of the reasoning.

        Args:
            text: New text.
            inside: True if the reasoning continues after this text.
            finish: The finish reason if the reply ends here, else None. Calls are dropped if the reason is "length".

        Returns:
            The reasoning that can be shown, and the calls.
        """
        self._raw += text
        if not self._raw:
            return "", ()
        self._keep(*self._parser.push(text))
        if inside and finish:
            self._keep(*self._parser.flush())
        if not inside or finish:
            called = bool(self._calls) and inside and finish != "length"
            shown, calls = (self._text, self._calls) if called else (self._raw, [])
            self._raw = self._text = ""
            self._calls = []
            return shown, calls
        if self._calls:
            return "", ()
        shown, self._text = self._text, ""  # without a call, this is a prefix of `_raw`
        self._raw = self._raw[len(shown) :]
        return shown, ()

    def _keep(self, text: str, found: Sequence[Piece]) -> None:
        self._text += text
        self._calls += [piece for piece in found if isinstance(piece, Call)]


@dataclass(frozen=True, slots=True)
class _CallBlock:
    """Reads one or several calls in one format, with the markers around them. A call may be written as

        {"name": NAME, "arguments": {...}}   NAME {...}   NAME(KEY=VALUE)   NAME and tags

    with the format's text around the name and the arguments.

    Attributes:
        text: The reply.
        form: The format of the calls.
        functions: The functions that may be called.
        lenient: True if a call without a marker may omit its arguments.
    """

    text: GrowingText
    form: CallFormat
    functions: Functions
    lenient: bool

    def calls(self) -> Reading[list[tuple[str, str]]]:
        """Read all calls. Return the name and the arguments, as JSON text, of each. Raises `Malformed`."""
        text, form = self.text, self.form
        yield from text.skip(form.start)
        yield from self._skip(form.heads)
        listed = bool((yield from text.skip("[")))
        found: list[tuple[str, str]] = []
        more = ""
        while True:
            yield from text.space()
            if form.end and (yield from text.skip(form.end)):
                listed = False
                break
            if listed and (yield from text.skip("]")):
                listed = False
            elif found and not ((yield from text.ahead()) and (more or (yield from text.begins("{", *form.heads)))):
                break
            else:
                found.append((yield from self._call()))
                yield from text.space()
                more = yield from text.skip("," if listed else ";")
        # A list may lack its closing bracket only at the end of the reply.
        unfinished = listed and (more or (yield from text.ahead()))
        if not found or unfinished or (form.last and (yield from self._followed())):
            raise Malformed
        return found

    def _followed(self) -> Reading[bool]:
        """Return True if more text follows. The end of a code block does not count."""
        yield from self._skip(self.form.tails)
        return bool((yield from self.text.ahead()))

    def _call(self) -> Reading[tuple[str, str]]:
        reader = JsonReader(self.text, self.form.quote, self.form.ends)
        yield from self._skip(self.form.heads)
        if (yield from self.text.begins("{")):
            value = yield from reader.value(_BARE_KEYS if self.form.last else None)
            name, given = self._of_object(value, reader.unclosed)
        else:
            name = self._known((yield from self.text.run(_NAME)))
            given = yield from self._arguments(name, reader)
        yield from self._end()
        return name, json_text(given)

    def _arguments(self, name: str, reader: JsonReader) -> Reading[dict[str, Any]]:
        """Read the arguments after a name."""
        text, form = self.text, self.form
        yield from self._skip(form.heads)
        if (yield from text.begins("{")):
            given = yield from reader.value()
            if reader.unclosed:
                raise Malformed
            return _as_object(given)
        if (yield from text.skip("(")):
            return (yield from reader.arguments())
        found: dict[str, Any] = {}
        if form.tags:
            schema = self.functions[name] or NO_ARGUMENTS
            yield from form.tags.read(text, schema, found, form.ends)
        # "```" does not count as an end if a call may begin with "```json": the reply may have been cut off inside it.
        ends = [end for end in form.ends if not any(head.startswith(end) for head in form.heads)]
        if not (yield from text.begins(*ends)):
            raise Malformed
        return found

    def _end(self) -> Reading[None]:
        """Read the end of a call. Surplus closing braces are allowed before an end marker."""
        yield from self.text.space()
        if (yield from self.text.run(_BRACES)):
            yield from self.text.space()
            if (yield from self.text.ahead()) and not (yield from self.text.begins(*self.form.ends)):
                raise Malformed
        yield from self._skip(self.form.tails)

    def _skip(self, texts: Collection[str]) -> Reading[None]:
        """Skip any of these texts, in any order, and the white space around them."""
        yield from self.text.space()
        while mark := (yield from self.text.skip(*texts)):
            if mark == "[CALL_ID]":
                yield from self.text.run(_NAME)
            yield from self.text.space()

    def _known(self, name: str) -> str:
        """Return the function that a name refers to. Raises `Malformed` if there is none."""
        short = re.sub(r":\d+$", "", name.removeprefix("functions."))
        known = (one for one in (name, short, short.removesuffix(".call")) if one in self.functions)
        if (found := next(known, None)) is None:
            raise Malformed
        return found

    def _of_object(self, value: dict[str, Any], unclosed: list[Any]) -> tuple[str, dict[str, Any]]:
        """Return the name and arguments of a call that is a JSON object.

        Raises:
            Malformed: If the object is not a call, or the end of the reply cut off its arguments.
        """
        inner = value.get("function")
        value = inner if isinstance(inner, dict) else value
        names = [one for key in ("name", "tool_name", "function") if isinstance(one := value.get(key), str)]
        keys: list[str] = [key for key in ("arguments", "parameters") if key in value]
        if not names and len(value) == 1 and not self.form.last:
            names, keys = [*value], [*value]  # {NAME: {...}}
        given = value[keys[0]] if keys else None
        cut = bool(unclosed) and (not keys or any(one is given for one in unclosed))
        if not names or cut or (self.form.last and not self.lenient and not isinstance(given, dict | str)):
            raise Malformed
        return self._known(names[0]), _as_object(given)


def _as_object(given: Any) -> dict[str, Any]:
    """Return arguments as an object. They may be missing, or JSON in a string. Raises `Malformed`."""
    if isinstance(given, str) and given.strip():
        given = loose_json.parse(given)
    if given is None or given == "":
        return {}
    if not isinstance(given, dict):
        raise Malformed
    return given
