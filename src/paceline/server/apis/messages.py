"""/v1/messages and /v1/messages/count_tokens: chats in the shape of Anthropic's API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from paceline.chat.calls import Call
from paceline.sampling.json_schema import with_leniency
from paceline.server.api import Api, Encoder, Event
from paceline.server.compat import (
    Lenient,
    OtherServers,
    Strict,
    accepted_values,
    accepts,
    ignored_parameters,
    placeholder_for,
    text_or_empty,
    type_discriminator,
)
from paceline.server.errors import ApiError
from paceline.server.prepare import PreparedRequest
from paceline.server.replies import BlockBegun, BlockEnded, BlockEvent, ReplyBlock, Usage
from paceline.server.request import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    OfferedFunction,
    Part,
    SentImage,
    ToolOffer,
    reasoning_values,
    refuse_media,
)
from paceline.server.schema import (
    MAX_TOOLS,
    WITHOUT_EMPTY,
    Arguments,
    Budget,
    CalledName,
    Id,
    Name,
    Probability,
    Samplers,
    Schema,
    Stops,
    TemplateValues,
    Text,
    ThinkingBudgets,
    without_none,
)
from paceline.server.worker import ReplyRound

_NO_THREADS = "thread: this server keeps no conversations. Send the whole conversation without thread"
_THREAD_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of the error after which Anthropic's SDK (`beta.messages.tool_runner`) and Claude Code continue without
threads."""

BILLING = "x-anthropic-billing-header:"
"""Beginning of a text that Claude Code puts before its instructions. The text is removed, because it differs in every
request and would prevent the reuse of prefixes."""


class TextBlock(Lenient):
    """Text."""

    type: Literal["text"]
    text: Text


class TextSource(Lenient):
    """The text of a document."""

    type: Literal["text"]
    data: Text


class DocumentBlock(Lenient):
    """A document of text."""

    type: Literal["document"]
    source: TextSource
    title: Annotated[str, Field(max_length=500)] | None = None


class ThinkingBlock(Lenient):
    """Reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Lenient):
    """Reasoning that only another server can read: it is skipped."""

    type: Literal["redacted_thinking"]


class ImageSource(Lenient):
    """The source of an image. `data`: base64. `url`: a URL of a host that --allow-image-urls names."""

    type: Annotated[str, BeforeValidator(text_or_empty)] = ""
    data: Annotated[str, BeforeValidator(text_or_empty)] = ""
    url: Annotated[str, BeforeValidator(text_or_empty)] = ""


def _source(value: Any) -> Any:
    """Return the source of an image. An image without data is refused later, if the model sees it at all."""
    return value if isinstance(value, dict) else {}


class ImageBlock(Lenient):
    """An image."""

    type: Literal["image"]
    source: Annotated[ImageSource, BeforeValidator(_source)] = Field(default_factory=ImageSource)

    def part(self, param: str, new: bool) -> SentImage:
        """Return the image. `new`: True if it is in the last message, and that message has no results of tools."""
        source = self.source.url if self.source.type == "url" else self.source.data
        refusal = f"{param}: {_WANTED}, got 'image'" if new else None
        return SentImage(source=source, param=f"{param}.source", kind=self.type, refusal=refusal)


class OtherBlock(Lenient):
    """A block that is neither text nor an image: a note stands for it."""

    type: Annotated[str, Field(max_length=100)]


class ToolUseBlock(Lenient):
    """A function call that the model made."""

    type: Literal["tool_use"]
    id: Id
    name: CalledName
    input: Arguments


class ToolResultBlock(Lenient):
    """The result of a function call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Text | Blocks | None = None
    is_error: bool | None = None


_WANTED = "a new block must be text or a document of text"
_KNOWN = ("text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _kind(block: Any) -> str:
    if not isinstance(block, dict):
        return "other" if isinstance(block, OtherBlock) else getattr(block, "type", "other")
    kind, source = block.get("type"), block.get("source")
    readable = kind != "document" or not isinstance(source, dict) or source.get("type") == "text"
    return kind if kind in _KNOWN and readable else "other"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_kind),
]
Blocks = Annotated[list[Block], Field(max_length=10_000, fail_fast=True)]
ToolResultBlock.model_rebuild()


class AnthropicMessage(Lenient):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class ClientTool(Lenient):
    """A function. Tools of Anthropic's own types are skipped."""

    name: Name
    type: Literal["custom"] | None = None
    description: Text | None = None
    input_schema: Schema


class ServerTool(Lenient):
    """A tool that runs on Anthropic's servers, or that this server does not know."""

    type: str


AnthropicTool = Annotated[
    Annotated[ClientTool, Tag("custom")] | Annotated[ServerTool, Tag("other")],
    type_discriminator("custom", default="custom"),
]


class ToolChoice(Strict):
    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("a tool_choice of type 'tool' must have a name, and other types must not")
        return self


class Thinking(Lenient):
    """`display` is accepted without effect."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


_HOSTED = "compaction container fallbacks fallback_credit_token"


@accepts(
    ignored_parameters(
        "betas billing_policy cache_control context_management diagnostics inference_geo metadata service_tier speed "
        "user_profile_id workspace_id",
        "it has no effect on a local server",
    ),
    accepted_values((), _HOSTED, "Anthropic's servers run it"),
    accepted_values(([],), "mcp_servers", "Anthropic's servers run it"),
)
class CountTokensRequest(ThinkingBudgets, Samplers, OtherServers):
    """Body of /v1/messages/count_tokens."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(max_length=1000, fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: Annotated[Schema, Field(description="Refused: this server keeps no conversations.")] | None = None
    chat_template_kwargs: TemplateValues | None = None

    @property
    def image_chars(self) -> int:
        return sum(_image_chars(message.content) for message in self.messages)

    @property
    def functions(self) -> list[ClientTool]:
        """The tools that are functions."""
        return [tool for tool in self.tools or () if isinstance(tool, ClientTool)]

    @property
    def format(self) -> OutputFormat | None:
        """The form of the text."""
        return self.output_format or (self.output_config.format if self.output_config else None)

    @property
    def constrained(self) -> bool:
        return self.format is not None or (self.tool_choice is not None and self.tool_choice.type in ("any", "tool"))


def _image_chars(content: str | Sequence[Block] | None) -> int:
    """Return the characters of all images in a content."""
    found = 0
    for block in () if isinstance(content, str) else content or ():
        if isinstance(block, ImageBlock):
            found += len(block.source.data) + len(block.source.url)
        elif isinstance(block, ToolResultBlock):
            found += _image_chars(block.content)
    return found


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stop_sequences: Annotated[Stops | None, Field(fail_fast=True), WITHOUT_EMPTY] = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None


def chat_prompt(body: CountTokensRequest) -> ChatPrompt:
    """Return the prompt of a request. Raises `ApiError` 400 for a thread, and for a new block that is not text."""
    if body.thread is not None:
        raise ApiError(400, _NO_THREADS, param="thread", details=_THREAD_DETAILS)
    asked = _refuse_media(body.messages)
    messages = [
        message
        for i, sent in enumerate(body.messages)
        for message in _messages(sent, f"messages.{i}.content", asked and sent is body.messages[-1])
    ]
    if system := _system(body.system):
        messages.insert(0, ChatMessage(role="system", content=system))
    effort: str | None = body.output_config.effort if body.output_config else None
    if body.thinking and body.thinking.type == "disabled":
        effort = "none"
    return ChatPrompt(
        messages=messages,
        tools=_tool_offer(body),
        values={**reasoning_values(effort), **(body.chat_template_kwargs or {})},
        continues_last=messages[-1].role == "assistant" and not messages[-1].calls,
    )


def _system(system: str | Sequence[TextBlock] | None) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "\n\n".join(filter(None, map(_without_billing, texts)))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING) else text


def _refuse_media(messages: Sequence[AnthropicMessage]) -> bool:
    """Raise `ApiError` 400 for a block of the user's last message that is neither text nor an image. If the message has
    results of tools, its blocks are not new, and False is returned."""
    last = messages[-1]
    blocks = last.content if last.role == "user" and not isinstance(last.content, str) else []
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        return False
    kinds = [f"{block.type}" if isinstance(block, OtherBlock) else "" for block in blocks]
    refuse_media(f"messages.{len(messages) - 1}.content", kinds, ("",), _WANTED)
    return last.role == "user"


def _messages(message: AnthropicMessage, param: str, new: bool) -> list[ChatMessage]:
    """Return a message, after the tool results that it holds. `param`: the path of its blocks. `new`: True if it is
    the user's last message."""
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    results = [
        ChatMessage(role="tool", call_id=block.tool_use_id, content=_result(block, f"{param}.{i}.content"))
        for i, block in enumerate(blocks)
        if isinstance(block, ToolResultBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        Call(block.name, json.dumps(block.input, ensure_ascii=False), block.id)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    content = _content_of(blocks, param, new)
    if not content and results and not calls:
        return results
    reasoning = "\n".join(thoughts) if any(thoughts) else None
    return [*results, ChatMessage(role=message.role, content=content, calls=calls, reasoning=reasoning)]


def _content_of(blocks: Sequence[Block], param: str, new: bool = False) -> str | list[Part]:
    """Return the text of blocks, or their parts if there are images."""
    texts: list[Part] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, DocumentBlock):
            texts.append(f"{block.title}\n\n{block.source.data}" if block.title else block.source.data)
        elif isinstance(block, OtherBlock):
            texts.append(placeholder_for(block.type))
        elif isinstance(block, ImageBlock):
            texts.append(block.part(f"{param}.{i}", new))
    if any(isinstance(part, SentImage) for part in texts):
        return texts
    return "\n".join(map(str, texts))


def _result(block: ToolResultBlock, param: str) -> str | list[Part]:
    content = block.content if isinstance(block.content, str) else _content_of(block.content or [], param)
    if not block.is_error:
        return content
    return f"Error: {content}" if isinstance(content, str) else ["Error:", *content]


def _tool_offer(body: CountTokensRequest) -> ToolOffer:
    """Return the functions, and which of them may be called. A choice of "auto" is valid even if all tools were
    skipped."""
    offered = [OfferedFunction(tool.name, tool.description, tool.input_schema) for tool in body.functions]
    choice = body.tool_choice or ToolChoice(type="auto")
    mode = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
    names = None if choice.name is None else [choice.name]
    return ToolOffer.chosen(offered, mode, names, single=bool(choice.disable_parallel_tool_use))


class Messages(Api[MessagesRequest]):
    """Anthropic's messages."""

    path = "/v1/messages"
    body = MessagesRequest
    id_prefix = "msg_"
    about = "Generate the next message of a chat (Anthropic's API)."

    def decode(self, body: MessagesRequest) -> GenerateRequest:
        form, param = body.format, "output_format" if body.output_format else "output_config.format"
        limit = body.thinking.budget_tokens if body.thinking and body.thinking.type == "enabled" else None
        return GenerateRequest(
            prompt=chat_prompt(body),
            sampling={**body.sampling, **without_none(stop=body.stop_sequences)},
            constraints={param: ("json_schema", with_leniency(form.schema_))} if form else {},
            max_tokens=body.max_tokens,
            thinking_budget=body.budget(thinking=limit),
            speculation=body.speculation,
        )

    def encoder(self, body: MessagesRequest, prepared: PreparedRequest) -> MessagesEncoder:
        return MessagesEncoder(body, prepared)


class MessagesEncoder(Encoder):
    """A message: a sequence of blocks of thinking, text and tool use."""

    def __init__(self, body: MessagesRequest, prepared: PreparedRequest) -> None:
        [job], [self._reply] = prepared.jobs, prepared.replies
        self._head = {"type": "message", "role": "assistant", "id": prepared.id, "model": prepared.model.name}
        self._full = body.max_tokens > prepared.model.llm.model.target.context_length - len(job.tokens)
        """True if `max_tokens` exceeds the rest of the context. A reply of maximum length has then filled the
        context."""

    def begin(self, usage: Usage) -> list[Event]:
        """Return the event of a message without content."""
        message: Event = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }
        return [{"type": "message_start", "message": message}]

    def add(self, round_: ReplyRound) -> list[Event]:
        return [event for block_event in self._reply.add(round_) for event in self._events(block_event)]

    def heartbeat(self) -> Event:
        """Return Anthropic's own event for a silent stream."""
        return {"type": "ping"}

    def end(self, usage: Usage) -> list[Event]:
        """Return the events with the stop reason and the usage."""
        counts = {**_usage(usage), "speculation": usage.speculation()}
        return [{"type": "message_delta", "delta": self._stop(), "usage": counts}, {"type": "message_stop"}]

    def document(self, usage: Usage) -> dict[str, Any]:
        counts = {**_usage(usage), "speculation": usage.speculation()}
        content = [_content(block) for block in self._reply.blocks]
        return {**self._head, "content": content, **self._stop(), "usage": counts, "metrics": usage.vllm()}

    def failed(self, error: ApiError) -> Event:
        return error.anthropic

    def _stop(self) -> dict[str, Any]:
        reply = self._reply
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = "stop_sequence" if reply.stop is not None else reasons.get(str(reply.finish_reason), "end_turn")
        if reason == "max_tokens" and self._full:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": reply.stop}

    def _events(self, event: BlockEvent) -> list[Event]:
        """Return the events of a block's beginning, growth or end."""
        block, found = event.block, list[Event]()
        if isinstance(event, BlockEnded):
            if block.kind == "reasoning":
                # Clients drop thinking that is not signed. This server accepts it back without a signature as well.
                found.append(_delta(block, "signature_delta", signature=_signature(block)))
            return [*found, {"type": "content_block_stop", "index": block.index}]
        if isinstance(event, BlockBegun):
            empty = _content(ReplyBlock(block.kind, block.index, "", block.name, block.id), signed=False)
            found.append({"type": "content_block_start", "index": block.index, "content_block": empty})
        if event.text:
            kind, key = _DELTAS[block.kind]
            found.append(_delta(block, kind, **{key: event.text}))
        return found


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a block -> type of its deltas, and key of their text."""


def _delta(block: ReplyBlock, kind: str, **more: str) -> Event:
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, **more}}


def _content(block: ReplyBlock, signed: bool = True) -> dict[str, Any]:
    """Return a block of a message."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _object(block.text)}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "thinking", "thinking": block.text, "signature": _signature(block) if signed else ""}


def _signature(block: ReplyBlock) -> str:
    return hashlib.sha256(block.text.encode()).hexdigest()


def _object(arguments: str) -> Any:
    """Return the arguments of a call, or {} if they were cut short."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's token counts. `input_tokens` does not count tokens from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }
