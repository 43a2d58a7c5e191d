"""Bodies of /v1/responses: items, tools and parameters, and the messages of a chat that items become."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from paceline.chat.calls import Call
from paceline.server.apis.openai_chat import CustomTool, arguments_of
from paceline.server.compat import (
    Lenient,
    OtherServers,
    Strict,
    accepted_values,
    accepts,
    ignored_parameters,
    part_as_text,
    placeholder_for,
    text_or_empty,
    type_discriminator,
)
from paceline.server.errors import bad_request
from paceline.server.request import (
    ChatMessage,
    OfferedFunction,
    SentImage,
    ToolOffer,
)
from paceline.server.schema import (
    MAX_TOOLS,
    WITHOUT_EMPTY,
    ArgumentsText,
    Budget,
    CalledName,
    Effort,
    Id,
    JsonSchema,
    Name,
    Penalty,
    PlainFormat,
    Probability,
    Samplers,
    Schema,
    Stop,
    Stops,
    Temperature,
    TemplateValues,
    Text,
    ThinkingBudgets,
    TokenPenalty,
    TopLogprobs,
    schema_format,
)

Kind = Annotated[str, Field(max_length=100)]
_TEXTUAL = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class ItemPart(Lenient):
    """A part of a message's content, or of reasoning. If it is not `textual`, `text` is a note."""

    type: Kind
    text: Text = ""
    image_url: Annotated[
        str | None,
        BeforeValidator(text_or_empty),
        Field(description="Image: a data URL, or a URL of a host that --allow-image-urls names."),
    ] = None
    detail: Annotated[
        str | None, BeforeValidator(text_or_empty), Field(description="low: the image is scaled down to 512 pixels.")
    ] = None

    @property
    def textual(self) -> bool:
        """True if the part is text."""
        return self.type in _TEXTUAL

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, part: Any) -> Any:
        return part_as_text(part, _TEXTUAL, "output_text", "input_image")


Parts = Annotated[list[ItemPart], Field(fail_fast=True, max_length=10_000)]


def join_texts(content: str | list[ItemPart]) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _parts(content: str | list[ItemPart], param: str, new: bool) -> list[str | SentImage]:
    """Return the parts of a content with images; nothing if there are none. `new`: it is the last item."""
    if isinstance(content, str) or not any(part.type == "input_image" for part in content):
        return []
    found: list[str | SentImage] = []
    for i, part in enumerate(content):
        if part.type != "input_image":
            found.append(part.text)
            continue
        where = f"{param}.{i}"
        refusal = f"{where}: a new part must be 'input_text', got 'input_image'" if new else None
        low = part.detail == "low"
        found.append(SentImage(source=part.image_url or "", param=where, kind=part.type, low=low, refusal=refusal))
    return found


class MessageItem(Lenient):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Parts


class CallItem(Lenient):
    """A function call that the model made."""

    type: Literal["function_call"]
    call_id: Id
    name: CalledName
    namespace: Name | None = None
    arguments: ArgumentsText = ""


class CallOutputItem(Lenient):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Text | Parts


class ReasoningItem(Lenient):
    """The model's reasoning before a message or a call."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


class OtherItem(Lenient):
    """An item that only OpenAI's servers or clients know, such as a search: a note stands for it."""

    type: Kind


_PACKED_PREFIX = "paceline:"


def pack_summary(summary: str) -> str:
    """Return a summary as the opaque content of a compaction."""
    return _PACKED_PREFIX + base64.b64encode(summary.encode()).decode()


def unpack_summary(content: Any) -> str | None:
    """Return the message for a compaction of this server; None for another's."""
    if not isinstance(content, str) or not content.startswith(_PACKED_PREFIX):
        return None
    try:
        summary = base64.b64decode(content.removeprefix(_PACKED_PREFIX), validate=True).decode()
    except ValueError:
        return None
    return f"Summary of the conversation so far:\n\n{summary}"


def _as_function(item: Any) -> Any:
    """Return a custom tool's call and its result as a function's call and result, and a compaction as a message."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "item_reference":
        raise ValueError("an item_reference is not resolved here. Send the item itself, or previous_response_id")
    if kind == "custom_tool_call":
        return {**item, "type": "function_call", "arguments": arguments_of(item.get("input"))}
    if kind in ("compaction", "compaction_summary") and (summary := unpack_summary(item.get("encrypted_content"))):
        return {"type": "message", "role": "user", "content": summary}
    return {**item, "type": "function_call_output"} if kind == "custom_tool_call_output" else item


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    type_discriminator("message", "function_call", "function_call_output", "reasoning", default="message"),
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

    @property
    def offered(self) -> OfferedFunction:
        """The function that the model may call."""
        return OfferedFunction(self.name, self.description, self.parameters)


class Namespace(Lenient):
    """Functions of one source. Codex sends the functions of an MCP server in this form."""

    type: Literal["namespace"]
    name: Name
    tools: Tools

    @property
    def functions(self) -> dict[str, FunctionTool | CustomTool]:
        """The functions by the names under which the model sees them."""
        return {in_namespace(self.name, tool.name): tool for tool in self.tools if isinstance(tool, CalledTool)}


CalledTool = FunctionTool | CustomTool


class SkippedTool(Lenient):
    """A tool that runs on OpenAI's servers, or that this server does not know."""

    type: str


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[SkippedTool, Tag("other")],
    type_discriminator("function", "custom", "namespace"),
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


def image_chars(items: Sequence[Item]) -> int:
    """Return the characters of all images in items."""
    contents = [
        item.output if isinstance(item, CallOutputItem) else item.content
        for item in items
        if isinstance(item, MessageItem | CallOutputItem)
    ]
    return sum(len(part.image_url or "") for content in contents if isinstance(content, list) for part in content)


def listed_item(item: Item) -> dict[str, Any]:
    """Return an item as a list of input items shows it. The text of a message becomes a part of its content."""
    found = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    return found


def chat_messages_of(items: Sequence[Item], instructions: str | None = None, earlier: int = 0) -> list[ChatMessage]:
    """Return the messages of a chat. Consecutive reasoning, text and calls are one message of the assistant. Without
    any item, the chat is one empty message of the user.

    Args:
        items: The items.
        instructions: The system message.
        earlier: Number of items that belong to earlier requests.
    """
    drafts = [_OpenMessage("system", instructions)] if instructions else list[_OpenMessage]()
    for i, item in enumerate(items, -earlier):
        param = f"input.{i}" if i >= 0 else "previous_response_id"
        match item:
            case ReasoningItem():
                drafts.append(
                    _OpenMessage("assistant", reasoning=join_texts(item.content or item.summary or []) or None)
                )
            case MessageItem(role="assistant"):
                _assistant(drafts, call=False).text = join_texts(item.content)
            case MessageItem(role="user"):
                parts = _parts(item.content, f"{param}.content", item is items[-1])
                drafts.append(_OpenMessage("user", join_texts(item.content), parts=parts))
            case MessageItem():
                _instruct(drafts, join_texts(item.content))
            case CallItem():
                call = Call(in_namespace(item.namespace, item.name), item.arguments, item.call_id)
                _assistant(drafts, call=True).calls.append(call)
            case CallOutputItem():
                parts = _parts(item.output, f"{param}.output", False)
                drafts.append(_OpenMessage("tool", join_texts(item.output), call_id=item.call_id, parts=parts))
            case OtherItem():
                draft = _assistant(drafts, call=True)
                draft.text = "\n".join(filter(None, [draft.text, placeholder_for(item.type)]))
    # Reasoning without text or calls is dropped.
    whole = [draft.message for draft in drafts if draft.text is not None or draft.calls]
    return whole or [ChatMessage(role="user")]


@dataclass(slots=True)
class _OpenMessage:
    """A message that may still get text and calls."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str | None = None
    calls: list[Call] = field(default_factory=list)
    reasoning: str | None = None
    call_id: str | None = None
    parts: Sequence[str | SentImage] = ()

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            content=self.parts or self.text or "",
            calls=self.calls,
            reasoning=self.reasoning,
            call_id=self.call_id,
        )


def _assistant(drafts: list[_OpenMessage], call: bool) -> _OpenMessage:
    """Return the message of the assistant that the next text, or call, belongs to."""
    last = drafts[-1] if drafts else None
    if last is None or last.role != "assistant" or (not call and (last.text is not None or last.calls)):
        drafts.append(_OpenMessage("assistant"))
    return drafts[-1]


def _instruct(drafts: list[_OpenMessage], text: str) -> None:
    """Add instructions. Consecutive instructions are one message, because templates expect one."""
    if drafts and drafts[-1].role == "system":
        drafts[-1].text = f"{drafts[-1].text}\n\n{text}"
    else:
        drafts.append(_OpenMessage("system", text))


class SchemaText(JsonSchema):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


def _flat_format(form: Any) -> Any:
    """Return a text format in the shape of this API. In a chat's `response_format`, the schema is one level deeper."""
    form = schema_format(form)
    inner = form.get("json_schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if not isinstance(inner, dict):
        return form
    return {**inner, **{key: value for key, value in form.items() if key != "json_schema"}}


class TextOptions(Strict):
    format: Annotated[
        Annotated[PlainFormat | SchemaText, Field(discriminator="type")] | None, BeforeValidator(_flat_format)
    ] = None
    verbosity: Annotated[Literal["medium"], Field(description="The only value that changes nothing.")] | None = None


@accepts(ignored_parameters("summary generate_summary", "the reasoning itself is returned"))
class ResponseReasoning(Strict):
    effort: Effort | None = None
    max_tokens: Annotated[Budget | None, Field(description="OpenRouter's.")] = None


@accepts(ignored_parameters("include_obfuscation", "streams are not padded"))
class ResponseStreamOptions(Strict):
    pass


@accepts(
    ignored_parameters(
        "client_metadata max_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
        "service_tier user enable_response_messages",
        "it has no effect on a local server",
    ),
    accepted_values((False,), "background", "a response is written while its client waits"),
    accepted_values(
        (), "conversation prompt previous_input_messages", "send the whole conversation, or `previous_response_id`"
    ),
    accepted_values(
        (), "access_programs background_options context_management image moderation", "OpenAI's servers run it"
    ),
)
class ResponsesRequest(ThinkingBudgets, Samplers, OtherServers):
    """Body of /v1/responses."""

    input: Text | Items = Field(default_factory=list)
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: TopLogprobs | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    presence_penalty: TokenPenalty | None = None
    frequency_penalty: TokenPenalty | None = None
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
    previous_response_id: Id | None = None
    store: bool | None = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Field(description="auto: leave out the oldest items if not all fit.")]
        | None
    ) = None
    include: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=32)] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: TemplateValues | None = None

    @property
    def image_chars(self) -> int:
        return image_chars(self.items)

    @property
    def callable_tools(self) -> list[FunctionTool | CustomTool]:
        """The tools that the model may call. Tools in a namespace have the names that the model sees."""
        found = [tool for tool in self.tools or () if isinstance(tool, CalledTool)]
        for space in self._namespaces:
            found += [tool.model_copy(update={"name": name}) for name, tool in space.functions.items()]
        return found

    @property
    def tool_offer(self) -> ToolOffer:
        """The functions and which of them may be called. Raises `ApiError` 400 for a choice that contradicts them."""
        offered = [tool.offered for tool in self.callable_tools]
        for i, function in enumerate(offered):
            if len(function.name) > 128:  # a namespace has its own name
                param = f"tools.{i}.function.name"
                raise bad_request(f"{param}: String should match pattern '^[a-zA-Z0-9_.-]{{1,128}}$'", param)
        choice = self.tool_choice or "auto"
        mode, names = "required", None
        if isinstance(choice, str):
            mode = choice
        elif isinstance(choice, NamedFunction):
            names = [choice.name]
        else:
            mode, names = choice.mode, [tool.name for tool in choice.tools]
        return ToolOffer.chosen(offered, mode, names, single=self.parallel_tool_calls is False)

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
    def items(self) -> list[Item]:
        """The input; a text is the user's message."""
        return self.input if isinstance(self.input, list) else [MessageItem(role="user", content=self.input)]

    @property
    def with_logprobs(self) -> bool:
        """True if the text has log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    @property
    def format(self) -> PlainFormat | SchemaText:
        """The form of the text."""
        return (self.text.format if self.text else None) or PlainFormat(type="text")

    @property
    def constrained(self) -> bool:
        return self.format.type != "text" or self.tool_choice not in (None, "none", "auto")
