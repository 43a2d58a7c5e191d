"""Arguments of a call as tagged text, `<parameter=KEY>VALUE</parameter>`, instead of JSON: grammar, types, reading.

A value is text without quotes or escapes; what JSON value it stands for is known from the function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

from paceline.sampling.lark import json_of, literal, quoted
from paceline.text import loose_json
from paceline.text.growing import GrowingText, Malformed, Reading

Schema = Mapping[str, Any]

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object"}
_PYTHON = {"True": True, "False": False, "None": None}
_ABOUT = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""Keywords that allow and forbid nothing."""
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
"""Keywords of a function's schema that tagged text can hold to."""
_MOST = 1 << 22
"""Characters of a grammar's schemas."""


_KEY = re.compile(r'[^<>"\n]*')


def written(value: Any) -> str:
    """Return JSON as UTF-8 can hold it. Raises `ValueError` for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if re.search(r"[\ud800-\udfff]", text) else text  # half a character


@dataclass(frozen=True)
class Tags:
    """Text before a parameter's name, between it and the value, and after the value.

    kind: An attribute of the parameter, whose value "true" or "false" tells whether the parameter is a string; "" if
        only the function's schema tells it.
    """

    before: str
    between: str
    after: str
    kind: str = ""

    def read(self, text: GrowingText, schema: Schema, found: dict[str, Any], ends: Sequence[str] = ()) -> Reading[None]:
        """Read parameters until something else follows, and add them to `found`. Line breaks of the tags may be left
        out. Raises `Malformed`.

        Args:
            text: The text, at the first parameter.
            schema: The schema of all parameters, which tells their types.
            found: The parameters that have been read.
            ends: Texts that may follow the last parameter. A closing tag before anything else belongs to a value.
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
            found[key] = value if is_text == "true" else typed(value, key, {} if is_text else schema)

    def _value_text(self, text: GrowingText, follows: Sequence[str]) -> Reading[str]:
        """Read a value with its closing tag and the white space after it."""
        closing, parts = self.after.strip(), list[str]()
        while True:
            parts.append((yield from text.until(closing)))
            space = yield from text.space()
            if (yield from text.begins(*follows)) or not (yield from text.ahead()):
                value = "".join(parts)
                return value.removesuffix("\n") if self.after.startswith("\n") else value
            parts.append(closing + space)

    def rules(self, name: str, schema: Schema, special: Mapping[str, int]) -> list[str] | None:
        """Return rules of a Lark grammar for arguments in the order of their schema, the first under this name; None if
        tagged text cannot hold to the schema."""
        properties = schema.get("properties")
        required = {key for key in _list(schema.get("required")) if isinstance(key, str)}
        if not isinstance(properties, Mapping) or not schema.keys() <= _OBJECT or not _divisible(schema):
            return None
        if not required <= properties.keys() or not (properties or schema.get("additionalProperties") is False):
            return None
        order = " ".join(f"{name}_{i}{'' if key in required else '?'}" for i, key in enumerate(properties))
        rules = [f"{name}: {order or quoted('')}"]
        for i, (key, value) in enumerate(properties.items()):
            forms = self._forms(f"{name}_{i}", value, schema, special)
            if not forms or not re.fullmatch(r'[^<>"\n]+', key):
                return None
            heads = {rule: literal(self.before + key + kind + self.between, special) for rule, kind, _ in forms}
            rules.append(f"{name}_{i}: {' | '.join(f'{head} {rule}' for rule, head in heads.items())}")
            rules += [text for _, _, text in forms]
        return rules

    def _forms(self, name: str, schema: Any, root: Schema, special: Mapping[str, int]) -> list[tuple[str, str, str]]:
        """Return the forms that a value may have: the name of its rule, the attribute before the value, and the rule of
        the value with what follows it.

        Where an attribute tells strings from JSON, a value that may be either has both forms.
        """
        schema, known = _resolved(schema, root), kinds(schema, root)
        is_text, is_json = (f"{self.kind}true", f"{self.kind}false") if self.kind else ("", "")
        maybe_text = not known or "string" in known
        text = self._text(f"{name}_text", schema, root, special) if maybe_text else None
        forms = [(f"{name}_text", is_text, text)] if text else []
        if (text and known == {"string"}) or (maybe_text and not self.kind):
            return forms
        shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        rule = f"{name}_json: {name}_value {literal(self.after, special)}"
        value = f"{name}_value: {json_of({**schema, **shared})}"
        return [*forms, (f"{name}_json", is_json, f"{rule}\n{value}")]

    def _text(self, name: str, schema: Schema, root: Schema, special: Mapping[str, int]) -> str | None:
        """Return the rule of a value that is text, with what follows it; None if a rule cannot hold to the schema."""
        after = literal(self.after, special)
        named = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        if named and all(isinstance(one, str) for one in named):
            return f"{name}: ({' | '.join(map(quoted, named))}) {after}"
        free = {*_ABOUT, "type", "anyOf", "oneOf"}
        if not all(one.keys() <= free for one in (schema, *_members(schema, root))):
            return None
        if any(marker in self.after for marker in special):
            closing = self.after.lstrip()
            # Text ends at a special token, and not at text before one.
            return f"{name}: /(.|\\n)*/ {literal(closing, special)}" if closing.startswith((*special,)) else None
        return f"{name}[suffix={quoted(self.after)}]: /(.|\\n)*/"


class TaggedArguments:
    """Turns growing tagged text into growing JSON.

    `complete`: True if the call was complete at the end of the reply.
    """

    def __init__(self, tags: Tags, schema: Schema, tail: str) -> None:
        """`tail`: text after the arguments."""
        self._text, self._found, self._shown = GrowingText(), dict[str, Any](), 0
        self._reading = self._read(tags, schema, tail.strip())
        self._began = False
        self.complete = False

    def push(self, text: str) -> str:
        """Return more of the JSON: whole parameters."""
        self._text.push(text)
        next(self._reading, None)
        if len(self._found) == self._shown:
            return ""
        new = dict([*self._found.items()][self._shown :])
        self._shown = len(self._found)
        return self._after_last(written(new)[1:-1])

    def flush(self) -> str:
        """Return the end of the JSON if the call is complete."""
        self._text.over = True
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


def kinds(schema: Any, root: Schema) -> set[str]:
    """Return the JSON types that a schema allows, as far as it names them."""
    found: set[str] = set()
    for one in _members(schema, root):
        given = one.get("type")
        values = [one["const"]] if "const" in one else _list(one.get("enum"))
        found |= {kind for kind in ([given] if isinstance(given, str) else _list(given)) if isinstance(kind, str)}
        found |= set() if given else {_kind(value) for value in values}
    return found


def typed(text: str, key: str, schema: Schema) -> Any:
    """Return the JSON value that a parameter's text stands for under the schema of all parameters."""
    properties = schema.get("properties")
    known = kinds(properties.get(key) if isinstance(properties, Mapping) else None, schema)
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


def _list(value: Any) -> list[Any]:
    """Return a list that a schema may have; an empty one for anything else, since clients send what they like."""
    return value if isinstance(value, list) else []


def _members(schema: Any, root: Schema) -> list[Schema]:
    """Return a schema, or those that it is a union of. Each is looked at once, since they may refer to themselves."""
    found: list[Schema] = []
    seen: dict[int, Schema] = {}
    waiting = [schema]
    while waiting:
        one = _resolved(waiting.pop(), root)
        if id(one) not in seen:
            seen[id(one)] = one
            members = [*_list(one.get("anyOf")), *_list(one.get("oneOf"))]
            waiting += members
            found += [] if members else [one]
    return found


def _resolved(schema: Any, root: Schema) -> Schema:
    """Return the schema that a reference names; an empty one for what is no schema."""
    for _ in range(16):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema if isinstance(schema, Mapping) else {}
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return {}


def _divisible(schema: Schema) -> bool:
    """Return True if each property can be written with a copy of all definitions, and needs nothing else."""
    text = json.dumps(schema)
    references = re.findall(r'"\$ref": "([^"]*)"', text)
    small = len(text) * len(schema["properties"]) <= _MOST
    return small and all(name.startswith(("#/$defs/", "#/definitions/")) for name in references)
