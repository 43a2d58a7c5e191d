"""Messages and tools of chats in OpenAI's shape, which Ollama's API and the requests about prompts share.

Tools that take free text, which OpenAI calls custom, are shown to the model as functions of one string. A custom tool's
grammar becomes a pattern of that string if it is regular, which means that no rule refers to itself. Codex's
`apply_patch` is such a tool. Like the schema of any function, the pattern only applies to forced calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator

from paceline.chat.calls import Call
from paceline.sampling.lark_pattern import pattern_of
from paceline.server.compat import Lenient, Strict, accepted_values, accepts, part_as_text, text_or_empty
from paceline.server.request import ChatMessage, OfferedFunction, SentImage, refuse_media
from paceline.server.schema import MAX_TOOLS, ArgumentsText, CalledName, Name, Schema, Text

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
    """Return a chat's tool as a custom tool, or None if it is a function. In chats, the grammar of a custom tool is
    one level deeper than in the Responses API."""
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
    """Return a chat's call of a custom tool as a call of its function, and a choice of a custom tool as a choice of its
    function."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return call
    others = {key: value for key, value in call.items() if key != "custom"}
    text = {"arguments": arguments_of(custom["input"])} if "input" in custom else {}
    return {**others, "type": "function", "function": {"name": custom.get("name"), **text}}


class GrammarFormat(Lenient):
    """A grammar of the input, in the form of the Responses API. In chats, these fields are in `grammar`."""

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


_ROLES = {"developer": "system", "function": "tool"}


class ImageUrl(Lenient):
    """An image. `url`: a data URL, or a URL of a host that --allow-image-urls names."""

    url: Annotated[str, BeforeValidator(text_or_empty)] = ""
    detail: Annotated[
        str, BeforeValidator(text_or_empty), Field(description="low: the image is scaled down to 512 pixels.")
    ] = ""


def _image_url(value: Any) -> Any:
    """Return an image in OpenAI's shape. An image without a URL is refused later, if the model sees it at all."""
    return value if isinstance(value, dict) else {"url": value}


class ContentPart(Lenient):
    """A part of a message's content. If it is not text, `text` is a note."""

    type: Annotated[str, Field(max_length=100)]
    text: Text
    image_url: Annotated[ImageUrl, BeforeValidator(_image_url)] = Field(default_factory=ImageUrl)

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, part: Any) -> Any:
        return part_as_text(part, ("text",), "text", "image_url")

    def part(self, param: str, new: bool) -> str | SentImage:
        """Return the text, or the image. `new`: True if the part is in the user's last message."""
        if self.type != "image_url":
            return self.text
        refusal = f"{param}: type must be 'text', got 'image_url'" if new else None
        low = self.image_url.detail == "low"
        return SentImage(
            source=self.image_url.url, param=f"{param}.image_url", kind=self.type, low=low, refusal=refusal
        )


class CalledFunction(Lenient):
    name: CalledName
    arguments: ArgumentsText = ""


class ToolCall(Lenient):
    """A function call in an assistant's message. A call of a custom tool becomes a call of a function with one text,
    `input`."""

    _custom = model_validator(mode="before")(chat_call)

    id: Annotated[str, Field(max_length=200)] | None = None
    type: str | None = "function"
    function: CalledFunction


@accepts(accepted_values((), "audio", "no model here reads audio"))
class Message(Lenient):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    function_call: CalledFunction | None = None

    @property
    def calls(self) -> list[Call]:
        """The message's function calls, sent as `tool_calls` or as the legacy `function_call`."""
        sent = [(one.function, one.id) for one in self.tool_calls or ()]
        legacy = [(self.function_call, None)] if self.function_call else []
        return [Call(function.name, function.arguments, call_id) for function, call_id in (*sent, *legacy)]

    def as_chat_message(self, param: str, new: bool) -> ChatMessage:
        """Return the message in the form that all APIs share. `new`: True if it is the user's last message."""
        content = self.refusal or "" if self.content is None else self.content
        return ChatMessage(
            role=_ROLES.get(self.role, self.role),  # type: ignore[arg-type]
            content=content
            if isinstance(content, str)
            else [part.part(f"{param}.content.{i}", new) for i, part in enumerate(content)],
            calls=self.calls,
            reasoning=self.reasoning_content,
            name=self.name,
            call_id=self.tool_call_id,
        )

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool", "function"):
            raise ValueError("content must not be null, except in messages of the assistant and of tools")
        return self


class Function(Lenient):
    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: Annotated[
        bool | None,
        Field(description="Arguments always follow the schema if tool_choice is required or names a function."),
    ] = None

    @property
    def offered(self) -> OfferedFunction:
        """The function that the model may call."""
        return OfferedFunction(self.name, self.description, self.parameters, self.strict)


class Tool(Lenient):
    """A function, or the function that stands for a custom tool."""

    type: Literal["function", "custom"]
    function: Function

    _custom: CustomTool | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, given: Any, read: ModelWrapValidatorHandler[Tool]) -> Tool:
        if (custom := chat_tool(given)) is None:
            return read(given)
        tool = read({"type": "custom", "function": {"name": custom.name, "description": custom.about}})
        tool._custom = custom
        return tool

    @property
    def offered(self) -> OfferedFunction:
        """The function that the model may call."""
        return self._custom.offered if self._custom else replace(self.function.offered, custom=self.type == "custom")


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName

    _custom = model_validator(mode="before")(chat_call)


class Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """Some of the tools may be called; the prompt shows all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


MessageList = Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


def image_chars(messages: Sequence[Message]) -> int:
    """Return the characters of all images in messages."""
    contents = [message.content for message in messages if isinstance(message.content, list)]
    return sum(len(part.image_url.url) for content in contents for part in content)


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return messages in the form that all APIs share. Raises `ApiError` 400 as `refuse_media` does."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "user" and isinstance(last.content, list):
        kinds = [part.type for part in last.content]
        refuse_media(f"messages.{len(messages) - 1}.content", kinds, ("text", "image_url"), "type must be 'text'")
    return [
        message.as_chat_message(f"messages.{i}", message is last and message.role == "user")
        for i, message in enumerate(messages)
    ]
