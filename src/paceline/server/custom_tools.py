"""Tools that take free text, which OpenAI calls custom: shown to the model as functions of one string.

A tool's grammar becomes a pattern of that string, where it is regular: its rules do not refer to themselves. Codex's
`apply_patch` is such a tool. Like the schema of any function it holds where the call is forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from paceline.server.compat import Lenient

_ARGUMENT = "input"
_IMPORTED = {
    **{"LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"},
    **{"DIGIT": "[0-9]", "INT": "[0-9]+", "NUMBER": r"[0-9]+(\.[0-9]+)?", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+"},
    **{"CNAME": "[A-Za-z_][A-Za-z0-9_]*", "HEXDIGIT": "[0-9A-Fa-f]"},
}
"""Terminals of Lark's `common` module."""
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<regex>/(?:[^/\\\n]|\\.)+/)|(?P<name>[A-Za-z_]\w*)'
    r"|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<other>[()|?*+\[\]]))"
)
_LONGEST = 20_000
"""Characters of a pattern."""


class CustomTool(Lenient):
    """A custom tool, as in the Responses API."""

    type: Literal["custom"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Annotated[str, Field(max_length=4_000_000)] | None = None
    format: Annotated[GrammarFormat | TextFormat | None, Field(discriminator="type")] = None

    @property
    def function(self) -> dict[str, Any]:
        """The function by which a model sees the tool."""
        return as_function(self.name, self.description, self.format)


def chat_tool(tool: Any) -> Any:
    """Return a custom tool of a chat, whose grammar lies one level deeper, as a tool with a function."""
    custom = tool.get("custom") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return tool
    form = custom.get("format")
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):
        form = {**form["grammar"], "type": form.get("type")}
    try:
        made = CustomTool.model_validate({**custom, "type": "custom", "format": form})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"custom.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return {"type": "custom", "function": made.function}


def chat_call(call: Any) -> Any:
    """Return a call of a custom tool in a chat as a call of its function; a choice of such a tool likewise."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return call
    others = {key: value for key, value in call.items() if key != "custom"}
    text = {"arguments": arguments_of(custom["input"])} if "input" in custom else {}
    return {**others, "type": "function", "function": {"name": custom.get("name"), **text}}


class _NotRegular(Exception):
    """The grammar has a rule that refers to itself, or a construct that is not read here."""


class GrammarFormat(Lenient):
    """A grammar of the input, in the Responses API; in chats it lies in `grammar`."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=100_000)]


class TextFormat(Lenient):
    """Any text."""

    type: Literal["text"]


def as_function(name: str, description: str | None, form: GrammarFormat | TextFormat | None) -> dict[str, Any]:
    """Return the function by which a model sees a custom tool: its name, description and parameters."""
    argument: dict[str, Any] = {"type": "string"}
    about = [description or "", "Its argument is plain text."]
    if isinstance(form, GrammarFormat):
        about.append(f"The text follows this {form.syntax} grammar:\n{form.definition}")
        pattern = form.definition if form.syntax == "regex" else pattern_of(form.definition)
        argument |= {} if pattern is None else {"pattern": f"^({pattern})$"}
    closed = {"required": [_ARGUMENT], "additionalProperties": False}
    schema = {"type": "object", "properties": {_ARGUMENT: argument}, **closed}
    return {"name": name, "description": "\n".join(filter(None, about)), "parameters": schema}


def text_of(arguments: str) -> str:
    """Return the text of a call. Arguments that were cut short are returned as they are."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(_ARGUMENT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def arguments_of(text: Any) -> str:
    """Return the arguments of a call with this text."""
    return json.dumps({_ARGUMENT: text}, ensure_ascii=False)


def pattern_of(grammar: str) -> str | None:
    """Return a regular expression of the texts of a Lark grammar; None if it is not regular."""
    try:
        return _Pattern(_rules(grammar)).of("start", ())
    except (_NotRegular, ValueError, RecursionError):
        return None


def _rules(grammar: str) -> dict[str, str]:
    """Return the right sides of the rules by their names."""
    rules: dict[str, str] = {}
    name = ""
    for line in grammar.splitlines():
        line = re.sub(r'("(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)+/)|//.*|^\s*#.*', lambda found: found[1] or "", line)
        imported = re.fullmatch(r"\s*%import\s+common\.(\w+)\s*", line)
        if imported and imported[1] in _IMPORTED:
            rules[imported[1]] = f"/{_IMPORTED[imported[1]]}/"
        elif line.lstrip().startswith("%"):
            raise _NotRegular
        elif begun := re.match(r"\s*[?!]?([A-Za-z_]\w*)(?:\.\d+)?\s*:(.*)", line):
            name, rules[begun[1]] = begun[1], begun[2]
        elif line.strip():
            if name not in rules:
                raise _NotRegular
            rules[name] += "\n" + line
    # The name of an alternative says nothing about its text.
    return {name: re.sub(r"->\s*\w+", "", right) for name, right in rules.items()}


class _Pattern:
    """Turns rules into regular expressions."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = rules

    def of(self, name: str, above: tuple[str, ...]) -> str:
        """Return the expression of a rule. `above`: the rules that led to it."""
        if name not in self._rules or name in above:
            raise _NotRegular
        right, at, found = self._rules[name].rstrip(), 0, ""
        while at < len(right):
            token = _TOKEN.match(right, at)
            if token is None or len(found) > _LONGEST:
                raise _NotRegular
            at, found = token.end(), found + self._token(token, (*above, name))
        return f"(?:{found})"

    def _token(self, token: re.Match[str], above: tuple[str, ...]) -> str:
        match token.lastgroup:
            case "text":
                return "(?:" + re.escape(str(json.loads(token["text"]))) + ")"
            case "regex":
                return "(?:" + str(token["regex"])[1:-1].replace(r"\/", "/") + ")"
            case "name":
                return self.of(token["name"], above)
            case "count":
                low, _, high = token["count"].strip("~ ").partition("..")
                return f"{{{int(low)},{int(high)}}}" if high else f"{{{int(low)}}}"
        other = str(token["other"])
        return {"(": "(?:", "[": "(?:", "]": ")?"}.get(other, other)
