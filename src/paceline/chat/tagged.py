"""Call arguments that are tagged text, `<parameter=KEY>VALUE</parameter>`, instead of JSON.

A value is text without quotes or escapes. The function's schema decides which JSON value it stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

from paceline.sampling.lark import json_expression, quoted_text, text_expression
from paceline.sampling.schema_document import SchemaDocument, as_list, named_values
from paceline.text import loose_json
from paceline.text.growing import GrowingText, Malformed, Reading

Schema = Mapping[str, Any]

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object"}
_PYTHON = {"True": True, "False": False, "None": None}
_ABOUT = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""Keywords that restrict nothing."""
_OBJECT = {
    *_ABOUT,
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$schema",
    "$defs",
    "definitions",
    "x-guidance",
}
"""Keywords of a function's schema that a grammar of tagged text can enforce."""
_MAX_SCHEMA_CHARACTERS = 1 << 22
"""Maximum total size of the schemas in a grammar, in characters."""


_KEY = re.compile(r'[^<>"\n]*')


def json_text(value: Any) -> str:
    """Return a value as JSON that can be encoded in UTF-8.

    Raises:
        ValueError: If the value contains a number that JSON does not allow (NaN, infinity).
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if re.search(r"[\ud800-\udfff]", text) else text  # UTF-8 has no lone surrogates


@dataclass(frozen=True)
class Tags:
    """The tags around a parameter.

    Attributes:
        before: Text before the name.
        between: Text between the name and the value.
        after: Text after the value.
        kind: Attribute with the value "true" if the parameter is a string, else "false". Empty if the format has no
            such attribute, so that only the function's schema decides.
    """

    before: str
    between: str
    after: str
    kind: str = ""

    def read(self, text: GrowingText, schema: Schema, found: dict[str, Any], ends: Sequence[str] = ()) -> Reading[None]:
        """Read parameters until something else follows, and add them to `found`. Tags may lack their line breaks.

        Args:
            text: The text, at the first parameter.
            schema: The schema of all parameters, which decides their types.
            found: Receives the parameters.
            ends: Texts that may follow the last parameter. If anything else follows a closing tag, the tag is part of
                the value.

        Raises:
            Malformed: If a tag is incomplete.
        """
        before = self.before.strip()
        yield from text.space()
        while (yield from text.skip(before)):
            key = yield from text.run(_KEY)
            is_text = ""
            if self.kind and (yield from text.skip(self.kind)):
                is_text = yield from text.skip("true", "false")
            for i, line in enumerate(self.between.split("\n")):
                if i:
                    yield from text.skip("\n")
                if not key or (line and not (yield from text.skip(line))):
                    raise Malformed
            value = yield from self._value_text(text, (before, *ends))
            found[key] = value if is_text == "true" else parse_value(value, key, {} if is_text else schema)

    def _value_text(self, text: GrowingText, follows: Sequence[str]) -> Reading[str]:
        """Read a value, its closing tag and the white space after it. Return the value."""
        closing, parts = self.after.strip(), list[str]()
        while True:
            parts.append((yield from text.until(closing)))
            space = yield from text.space()
            if (yield from text.begins(*follows)) or not (yield from text.ahead()):
                value = "".join(parts)
                return value.removesuffix("\n") if self.after.startswith("\n") else value
            parts.append(closing + space)

    def rules(self, name: str, schema: Schema, special: Mapping[str, int]) -> list[str] | None:
        """Return rules of a Lark grammar for the arguments, in the order of their schema.

        Args:
            name: Name of the first rule. The names of the others begin with it.
            schema: The schema of all parameters.
            special: Ids of the markers that are special tokens.

        Returns:
            The rules. None if a grammar of tagged text cannot enforce the schema.
        """
        properties = schema.get("properties")
        required = {key for key in as_list(schema.get("required")) if isinstance(key, str)}
        if not isinstance(properties, Mapping) or not schema.keys() <= _OBJECT or not _divisible(schema):
            return None
        if not required <= properties.keys() or not (properties or schema.get("additionalProperties") is False):
            return None
        order = " ".join(f"{name}_{i}{'' if key in required else '?'}" for i, key in enumerate(properties))
        rules = [f"{name}: {order or quoted_text('')}"]
        for i, (key, value) in enumerate(properties.items()):
            forms = self._forms(f"{name}_{i}", value, schema, special)
            if not forms or not re.fullmatch(r'[^<>"\n]+', key):
                return None
            heads = {rule: text_expression(self.before + key + kind + self.between, special) for rule, kind, _ in forms}
            rules.append(f"{name}_{i}: {' | '.join(f'{head} {rule}' for rule, head in heads.items())}")
            rules += [text for _, _, text in forms]
        return rules

    def _forms(self, name: str, schema: Any, root: Schema, special: Mapping[str, int]) -> list[tuple[str, str, str]]:
        """Return the forms that a value may have.

        Each form is the name of its rule, the attribute before the value, and the rule for the value and its closing
        tag. If the format marks strings with an attribute (`kind`) and the schema allows strings and other types, there
        are two forms.
        """
        schema, known = SchemaDocument(root).resolved(schema), json_types(schema, root)
        is_text, is_json = (f"{self.kind}true", f"{self.kind}false") if self.kind else ("", "")
        maybe_text = not known or "string" in known
        text = self._text(f"{name}_text", schema, root, special) if maybe_text else None
        forms = [(f"{name}_text", is_text, text)] if text else []
        if (text and known == {"string"}) or (maybe_text and not self.kind):
            return forms
        shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        rule = f"{name}_json: {name}_value {text_expression(self.after, special)}"
        value = f"{name}_value: {json_expression({**schema, **shared})}"
        return [*forms, (f"{name}_json", is_json, f"{rule}\n{value}")]

    def _text(self, name: str, schema: Schema, root: Schema, special: Mapping[str, int]) -> str | None:
        """Return the rule for a text value and its closing tag. None if a rule cannot enforce the schema."""
        after = text_expression(self.after, special)
        named = named_values(schema)
        if named and all(isinstance(one, str) for one in named):
            return f"{name}: ({' | '.join(map(quoted_text, named))}) {after}"
        free = {*_ABOUT, "type", "anyOf", "oneOf"}
        if not all(one.keys() <= free for one in (schema, *_members(schema, root))):
            return None
        if any(marker in self.after for marker in special):
            closing = self.after.lstrip()
            # A special token can end the value, but only if the closing tag begins with it.
            return (
                f"{name}: /(.|\\n)*/ {text_expression(closing, special)}" if closing.startswith((*special,)) else None
            )
        return f"{name}[suffix={quoted_text(self.after)}]: /(.|\\n)*/"


class TaggedArguments:
    """Converts growing tagged text to growing JSON.

    Attributes:
        complete: True if the call was complete at the end of the reply.
    """

    def __init__(self, tags: Tags, schema: Schema, tail: str) -> None:
        """Make a converter.

        Args:
            tags: The tags around each parameter.
            schema: The schema of all parameters.
            tail: Text after the arguments.
        """
        self._text, self._found, self._shown = GrowingText(), dict[str, Any](), 0
        self._reading = self._read(tags, schema, tail.strip())
        self._began = False
        self.complete = False

    def push(self, text: str) -> str:
        """Add text of the reply. Return the new part of the JSON, in whole parameters."""
        self._text.push(text)
        next(self._reading, None)
        if len(self._found) == self._shown:
            return ""
        new = dict([*self._found.items()][self._shown :])
        self._shown = len(self._found)
        return self._after_last(json_text(new)[1:-1])

    def flush(self) -> str:
        """End the reply. Return the rest of the JSON, with its closing brace if the call is complete."""
        self._text.is_complete = True
        more = self.push("")
        return more + (self._after_last("") + "}" if self.complete else "")

    def _read(self, tags: Tags, schema: Schema, tail: str) -> Reading[None]:
        try:
            yield from tags.read(self._text, schema, self._found, (tail,))
            self.complete = bool((yield from self._text.skip(tail))) and not (yield from self._text.ahead())
        except Malformed:
            self.complete = False

    def _after_last(self, more: str) -> str:
        before = (", " if more else "") if self._began else "{"
        self._began = True
        return before + more


def json_types(schema: Any, root: Schema) -> set[str]:
    """Return the JSON types that a schema names, directly or by its constants. Empty if it names none."""
    found: set[str] = set()
    for one in _members(schema, root):
        given = one.get("type")
        values = named_values(one)
        found |= {kind for kind in ([given] if isinstance(given, str) else as_list(given)) if isinstance(kind, str)}
        found |= set() if given else {_kind(value) for value in values}
    return found


def parse_value(text: str, key: str, schema: Schema) -> Any:
    """Return the JSON value that a parameter's text stands for.

    Args:
        text: The text.
        key: Name of the parameter.
        schema: The schema of all parameters.
    """
    properties = schema.get("properties")
    known = json_types(properties.get(key) if isinstance(properties, Mapping) else None, schema)
    if known == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        value = _loose(text) if known and "string" not in known else _PYTHON.get(text.strip(), text)
    fits = _kind(value) in known or (isinstance(value, int) and "number" in known)
    return text if "string" in known and not fits else value


def _loose(text: str) -> Any:
    try:
        return loose_json.parse(text)
    except Malformed:
        return text


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "array")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    return found if isfinite(found := float(number)) else _refuse(number)


def _members(schema: Any, root: Schema) -> list[Schema]:
    """Return the members of a union, recursively, or the schema if it is not a union. Schemas may be recursive, so each
    is visited once."""
    document = SchemaDocument(root)
    found: list[Schema] = []
    seen: dict[int, Schema] = {}
    waiting = [schema]
    while waiting:
        one = document.resolved(waiting.pop())
        if id(one) not in seen:
            seen[id(one)] = one
            members = [*as_list(one.get("anyOf")), *as_list(one.get("oneOf"))]
            waiting += members
            found += [] if members else [one]
    return found


def _divisible(schema: Schema) -> bool:
    """Return True if each property can be compiled separately, with a copy of all definitions.

    This requires that references point only to definitions and that all copies together are not too large.
    """
    text = json.dumps(schema)
    references = re.findall(r'"\$ref": "([^"]*)"', text)
    small = len(text) * len(schema["properties"]) <= _MAX_SCHEMA_CHARACTERS
    return small and all(name.startswith(("#/$defs/", "#/definitions/")) for name in references)
