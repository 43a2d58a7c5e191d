"""Functions that a model may call: how a family writes a call, told by its chat template, and how to read it again.

The forms are those of the families' own chat templates: Hermes, Qwen2.5, Qwen3 and SmolLM2 write `<tool_call>` JSON
`</tool_call>`, Llama 3 a JSON object with "parameters" (behind `<|python_tag|>` or not), Mistral `[TOOL_CALLS]` and a
JSON list, or a name and JSON. Whatever is not a call in the family's form stays text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How llguidance is to write JSON: a small model that may choose white space may choose nothing else."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function call in a reply. `arguments`: a JSON object, as text."""

    name: str
    arguments: str
    id: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Family:
    """How a family writes calls. `opens`, `closes`: what stands around one ("": the text's end). `bare`: a text that
    begins with "{" is a call too. `key`: of the arguments. `id_length`: of a call's id, "call_" before it if long."""

    name: str
    opens: str
    closes: str
    key: str = "arguments"
    bare: bool = False
    id_length: int = 24

    def new_id(self) -> str:
        letters = string.ascii_letters + string.digits
        made = "".join(secrets.choice(letters) for _ in range(self.id_length))
        return made if self.id_length < 24 else f"call_{made}"

    def grammar(self, functions: Sequence[tuple[str, Schema | None]], marker: int | None) -> str:
        """Exactly one call of one of these (name, JSON schema of its arguments), as a Lark grammar of llguidance's.

        `marker`: the token that `opens` is, if it is one that a text does not show.
        """
        calls: list[Schema] = [self._call(name, schema) for name, schema in functions]
        schema: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        schema = {"x-guidance": _ONE_LINE, **schema}
        opens = self.opens if marker is None else ""
        before, after = f"{opens}\n", f"\n{self.closes}"
        if not self.closes:
            one = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1, "x-guidance": _ONE_LINE}
            schema = schema if self.bare else one
            before, after = ("" if self.bare else opens), ""
        special = [f"<[{marker}]>"] if marker is not None and not self.bare else []
        quoted = [json.dumps(text) for text in (before, after)]
        parts = [*special, *quoted[: bool(before)], "call", *quoted[1 : 1 + bool(after)]]
        return f"start: {' '.join(parts)}\ncall: %json {json.dumps(schema)}\n"

    def _call(self, name: str, arguments: Schema | None) -> Schema:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, self.key: arguments or {"type": "object"}},
            "required": ["name", self.key],
            "additionalProperties": False,
        }


HERMES = Family("hermes", "<tool_call>", "</tool_call>")
LLAMA = Family("llama", "<|python_tag|>", "", key="parameters", bare=True)
MISTRAL = Family("mistral", "[TOOL_CALLS]", "", id_length=9)


def family(template: str | None) -> Family:
    """The family of a chat template; Hermes' form where it knows no calls (`with_tools` then tells the model)."""
    template = template or ""
    if HERMES.opens in template:
        return HERMES
    if MISTRAL.opens in template:
        return MISTRAL
    llama = LLAMA.opens in template or ("ipython" in template and "<|start_header_id|>" in template)
    return LLAMA if llama else HERMES


def knows_tools(template: str | None) -> bool:
    """Whether the template itself tells the model of the tools."""
    return bool(re.search(r"\btools\b", template or ""))


_TELL = """You can call these functions. To call one, write a JSON object within these tags, and nothing else:
<tool_call>
{"name": <its name>, "arguments": <its arguments as an object>}
</tool_call>
The functions:
<tools>
%s
</tools>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[dict[str, Any]]:
    """The same chat for a template that knows no tools: the functions in the system message, calls and results as text
    in Hermes' form."""
    told = _TELL % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) if tools else ""
    chat = [_as_text(message) for message in messages]
    if not told:
        return chat
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{told}"}, *chat[1:]]
    return [{"role": "system", "content": told}, *chat]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    text = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join([*([text] if text or not calls else []), *calls])}


class Reader:
    """Splits a reply, as it comes, into text and calls.

    White space around calls is theirs, and is not shown. `names`: the functions there are; a call of another is text.
    `single`: what comes after the first call is dropped.
    """

    def __init__(self, family: Family, names: Collection[str], single: bool = False) -> None:
        self._family, self._names, self._single = family, frozenset(names), single
        self._held, self._inside = "", False
        self._began = False
        self._space = ""
        self.called = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """(text to show, calls that are complete)."""
        self._held += text
        shown, calls = "", []
        for piece in self._pieces():
            if isinstance(piece, str):
                shown += self._show(piece)
            else:
                calls += piece if not self._single else piece[: not self.called]
                self.called, self._space = True, ""
        return shown, calls

    def flush(self) -> tuple[str, list[Call]]:
        """What the end of the reply leaves: a call without its end, or text that was held back."""
        held, inside = self._held, self._inside
        self._held, self._inside = "", False
        found = self._parse(held) if inside else None
        if found is None:
            rest = self._show((self._opener(held) if inside else "") + held)
            space = "" if self.called else self._space
            return rest + space, []
        self.called = self.called or bool(found)
        return "", found[:1] if self._single else found

    def _show(self, text: str) -> str:
        """White space waits until it is known whether text follows it or a call."""
        if self.called and self._single:
            return ""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return stripped

    def _pieces(self) -> Iterator[str | list[Call]]:
        while self._held:
            step = self._within() if self._inside else self._outside()
            if step is None:
                return
            yield step

    def _outside(self) -> str | None:
        """Text up to where a call begins; None where that cannot be told yet."""
        family, held = self._family, self._held
        if family.bare and not self._began:
            start = held.lstrip()
            if not start:
                return None
            self._began = True
            if start.startswith("{"):
                self._held, self._inside = start, True
                return ""
        before, found, after = held.partition(family.opens)
        if found:
            self._held, self._inside, self._began = after, True, True
            return before
        keep = next(
            (n for n in range(min(len(held), len(family.opens) - 1), 0, -1) if family.opens.startswith(held[-n:])), 0
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep] or None

    def _within(self) -> str | list[Call] | None:
        """The call, once it is whole."""
        closes = self._family.closes
        if not closes:
            return None
        inner, found, after = self._held.partition(closes)
        if not found:
            return None
        self._held, self._inside = after, False
        calls = self._parse(inner)
        return f"{self._family.opens}{inner}{closes}" if calls is None else calls

    def _opener(self, held: str) -> str:
        return "" if self._family.bare and held.startswith("{") else self._family.opens

    def _parse(self, text: str) -> list[Call] | None:
        """The calls, or None for what is none."""
        found = _PARSERS[self._family.name](text.strip(), self._family.key)
        if not found or any(name not in self._names for name, _ in found):
            return None
        return [Call(name, json.dumps(given, ensure_ascii=False), self._family.new_id()) for name, given in found]


Found = list[tuple[str, dict[str, Any]]]


def _hermes(text: str, key: str) -> Found:
    """One object, or a list of them (SmolLM2)."""
    return _objects(_json(text), key)


def _llama(text: str, key: str) -> Found:
    """Objects, ";" between them."""
    found: Found = []
    while text:
        value, text = _first(text)
        one = _objects(value, key) or _objects(value, "arguments")
        if len(one) != 1:
            return []
        found += one
        text = text.lstrip().removeprefix(";").lstrip()
    return found


def _mistral(text: str, key: str) -> Found:
    """A list of objects; or a name and an object, with [TOOL_CALLS] between two."""
    if text.startswith("["):
        return _objects(_json(text), key)
    found: Found = []
    for part in filter(None, text.split(MISTRAL.opens)):
        hit = re.fullmatch(
            r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL
        )
        given = _json(hit[2]) if hit else None
        if not hit or not isinstance(given, dict):
            return []
        found.append((hit[1], given))
    return found


_PARSERS: dict[str, Callable[[str, str], Found]] = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}


def _objects(value: Any, key: str) -> Found:
    found: Found = []
    for one in value if isinstance(value, list) else [value]:
        given = one.get(key) if isinstance(one, dict) else None
        given = _json(given) if isinstance(given, str) else given
        if not isinstance(given, dict) or not isinstance(one.get("name"), str):
            return []
        found.append((one["name"], given))
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _first(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and the rest."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, ""
    return value, text[end:]
