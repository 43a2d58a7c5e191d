"""Tools that take free text, which OpenAI calls custom: shown to the model as functions of one string.

A tool's grammar becomes a pattern of that string, where it is regular: its rules do not refer to themselves. Codex's
`apply_patch` is such a tool. Like the schema of any function it holds where the call is forced.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from paceline.sampling.lark_pattern import pattern_of
from paceline.server.compat import Lenient
from paceline.server.fields import Name, Schema, Text
from paceline.server.request import OfferedFunction

_ARGUMENT = "input"


class CustomTool(Lenient):
    """A custom tool, as in the Responses API."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: Annotated[GrammarFormat | TextFormat | None, Field(discriminator="type")] = None

    @property
    def about(self) -> str:
        """The description of the function that stands for the tool in the prompt."""
        about = [self.description or "", "Its argument is plain text."]
        if isinstance(self.format, GrammarFormat):
            about.append(f"The text follows this {self.format.syntax} grammar:\n{self.format.definition}")
        return "\n".join(filter(None, about))

    @property
    def offered(self) -> OfferedFunction:
        """The function that the model may call. A grammar may take milliseconds to convert."""
        argument: Schema = {"type": "string"}
        if isinstance(self.format, GrammarFormat):
            definition = self.format.definition
            pattern = definition if self.format.syntax == "regex" else pattern_of(definition)
            argument |= {} if pattern is None else {"pattern": f"^({pattern})$"}
        closed = {"required": [_ARGUMENT], "additionalProperties": False}
        schema = {"type": "object", "properties": {_ARGUMENT: argument}, **closed}
        return OfferedFunction(self.name, self.about, schema, custom=True)


def chat_tool(tool: Any) -> CustomTool | None:
    """Return the custom tool that a chat's tool is, if any. Its grammar is one level deeper than in Responses."""
    custom = tool.get("custom") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return None
    form = custom.get("format")
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):
        form = {**form["grammar"], "type": form.get("type")}
    try:
        return CustomTool.model_validate({**custom, "type": "custom", "format": form})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"custom.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def chat_call(call: Any) -> Any:
    """Return a call of a custom tool in a chat as a call of its function; a choice of such a tool likewise."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return call
    others = {key: value for key, value in call.items() if key != "custom"}
    text = {"arguments": arguments_of(custom["input"])} if "input" in custom else {}
    return {**others, "type": "function", "function": {"name": custom.get("name"), **text}}


class GrammarFormat(Lenient):
    """A grammar of the input, in the Responses API; in chats it lies in `grammar`."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=100_000)]


class TextFormat(Lenient):
    """Any text."""

    type: Literal["text"]


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
