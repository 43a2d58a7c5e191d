"""Body of /v1/responses."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from paceline.server.compat import Lenient, OtherServers, Strict, accepts, ignored, left_out, only
from paceline.server.custom_tools import CustomTool, arguments_of
from paceline.server.schema import (
    MAX_TOOLS,
    WITHOUT_EMPTY,
    ArgumentsText,
    Budget,
    CalledName,
    Effort,
    Generating,
    Name,
    Penalty,
    Samplers,
    Schema,
    Stop,
    Stops,
    Text,
    ThinkingBudgets,
    schema_format,
)

ResponseId = Annotated[str, Field(min_length=1, max_length=200)]
Kind = Annotated[str, Field(max_length=100)]
_TEXTUAL = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class Part(Lenient):
    """A part of a message's content, or of reasoning. If it is not `textual`, such as an image, `text` is a note."""

    type: Kind
    text: Text = ""

    @property
    def textual(self) -> bool:
        """Whether the part is text."""
        return self.type in _TEXTUAL

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            return {"type": "output_text", "text": part.get("refusal")}
        return part if not isinstance(kind, str) or kind in _TEXTUAL else {"type": kind, "text": left_out(kind)}


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=10_000)]
CallId = Annotated[str, Field(min_length=1, max_length=200)]


def joined(content: str | list[Part]) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Lenient):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Parts


class CallItem(Lenient):
    """A function call that the model made."""

    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    namespace: Name | None = None
    arguments: ArgumentsText = ""


class CallOutputItem(Lenient):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text | Parts


class ReasoningItem(Lenient):
    """The model's reasoning before a message or a call."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


class OtherItem(Lenient):
    """An item that only OpenAI's servers or clients know, such as a search: a note stands for it."""

    type: Kind


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in ("message", "function_call", "function_call_output", "reasoning") else "other"


_PACKED = "paceline:"


def packed(summary: str) -> str:
    """Return a summary as the opaque content of a compaction."""
    return _PACKED + base64.b64encode(summary.encode()).decode()


def unpacked(content: Any) -> str | None:
    """Return the message for a compaction of this server; None for another's."""
    if not isinstance(content, str) or not content.startswith(_PACKED):
        return None
    try:
        summary = base64.b64decode(content.removeprefix(_PACKED), validate=True).decode()
    except ValueError:
        return None
    return f"Summary of the conversation so far:\n\n{summary}"


def _as_function(item: Any) -> Any:
    """Return the call of a tool that takes plain text, or its result, as those of a function, and a compaction as a
    message."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "item_reference":
        raise ValueError("an item_reference is not resolved here. Send the item itself, or previous_response_id")
    if kind == "custom_tool_call":
        return {**item, "type": "function_call", "arguments": arguments_of(item.get("input"))}
    if kind in ("compaction", "compaction_summary") and (summary := unpacked(item.get("encrypted_content"))):
        return {"type": "message", "role": "user", "content": summary}
    return {**item, "type": "function_call_output"} if kind == "custom_tool_call_output" else item


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
    BeforeValidator(_as_function),
]
Items = Annotated[list[Item], Field(max_length=10_000, fail_fast=True)]


def in_namespace(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


class FunctionTool(Lenient):
    """A function. Tools of other types are skipped."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Schema | None = None


class Namespace(Lenient):
    """Functions of one source, such as Codex sends those of an MCP server."""

    type: Literal["namespace"]
    name: Name
    tools: Tools

    @property
    def functions(self) -> dict[str, FunctionTool | CustomTool]:
        """The functions by the names under which the model sees them."""
        return {in_namespace(self.name, tool.name): tool for tool in self.tools if isinstance(tool, _CALLED)}


_CALLED = (FunctionTool, CustomTool)


class SkippedTool(Lenient):
    """A tool that runs on OpenAI's servers, or that this server does not know."""

    type: str


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "skipped"


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[SkippedTool, Tag("skipped")],
    Discriminator(_tool_kind),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
Namespace.model_rebuild()


class NamedFunction(Strict):
    type: Literal["function", "custom"]
    name: Name


class AllowedFunctions(Strict):
    """Some of the tools may be called; the prompt shows all of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class PlainText(Strict):
    type: Literal["text", "json_object"]


class SchemaText(Strict):
    type: Literal["json_schema"]
    name: Name = "schema"
    schema_: Annotated[Schema, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


def _flat_format(form: Any) -> Any:
    """Return a text format in the shape of this API: the schema of a chat's `response_format` lies one level deeper."""
    form = schema_format(form)
    inner = form.get("json_schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if not isinstance(inner, dict):
        return form
    return {**inner, **{key: value for key, value in form.items() if key != "json_schema"}}


class TextOptions(Strict):
    format: Annotated[
        Annotated[PlainText | SchemaText, Field(discriminator="type")] | None, BeforeValidator(_flat_format)
    ] = None
    verbosity: Annotated[Literal["medium"], Field(description="The only value that changes nothing.")] | None = None


@accepts(ignored("summary generate_summary", "the reasoning itself is returned"))
class ResponseReasoning(Strict):
    effort: Effort | None = None
    max_tokens: Annotated[Budget | None, Field(description="OpenRouter's.")] = None


@accepts(ignored("include_obfuscation", "streams are not padded"))
class ResponseStreamOptions(Strict):
    pass


@accepts(
    ignored(
        "client_metadata max_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
        "service_tier user enable_response_messages",
        "it has no effect on a local server",
    ),
    only((False,), "background", "a response is written while its client waits"),
    only((), "conversation prompt previous_input_messages", "send the whole conversation, or `previous_response_id`"),
    only((), "access_programs background_options context_management image moderation", "OpenAI's servers run it"),
)
class ResponsesRequest(ThinkingBudgets, Samplers, OtherServers, Generating):
    """Body of /v1/responses."""

    input: Text | Items = Field(default_factory=list)
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Penalty | None = None
    stop: Annotated[Stop | Stops | None, WITHOUT_EMPTY] = None
    tools: Tools | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ResponseReasoning | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Field(description="auto: leave out the oldest items that do not fit.")]
        | None
    ) = None
    include: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=32)] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Annotated[Schema, Field(max_length=64)] | None = None

    @property
    def callable_tools(self) -> list[FunctionTool | CustomTool]:
        """The tools that the model may call, those of namespaces under the names that it sees."""
        found = [tool for tool in self.tools or () if isinstance(tool, _CALLED)]
        for space in self._namespaces:
            found += [tool.model_copy(update={"name": name}) for name, tool in space.functions.items()]
        return found

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The same as functions, as the model sees them."""
        return [
            tool.function if isinstance(tool, CustomTool) else tool.model_dump(exclude_none=True, exclude={"type"})
            for tool in self.callable_tools
        ]

    @property
    def custom(self) -> frozenset[str]:
        """Names of the custom tools, as the model sees them."""
        return frozenset(tool.name for tool in self.callable_tools if isinstance(tool, CustomTool))

    @property
    def origins(self) -> dict[str, dict[str, str]]:
        """Name and namespace of the functions in namespaces, by the names that the model sees."""
        return {
            name: {"name": tool.name, "namespace": space.name}
            for space in self._namespaces
            for name, tool in space.functions.items()
        }

    @property
    def _namespaces(self) -> list[Namespace]:
        return [tool for tool in self.tools or () if isinstance(tool, Namespace)]

    @property
    def format(self) -> PlainText | SchemaText:
        """The form of the text."""
        return (self.text.format if self.text else None) or PlainText(type="text")

    @property
    def constrained(self) -> bool:
        """Whether a grammar must be compiled for the reply."""
        return self.format.type != "text" or self.tool_choice not in (None, "none", "auto")


class CompactRequest(ResponsesRequest):
    """Body of /v1/responses/compact: the conversation that is to be summarised."""
