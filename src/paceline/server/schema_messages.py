"""Bodies of /v1/messages and /v1/messages/count_tokens (Anthropic's API)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from paceline.server.compat import Lenient, OtherServers, Strict, accepts, ignored, only
from paceline.server.schema import (
    MAX_TOOLS,
    WITHOUT_EMPTY,
    Arguments,
    Budget,
    CalledName,
    Generating,
    Name,
    Samplers,
    Schema,
    Stops,
    Text,
    ThinkingBudgets,
)

BILLING = "x-anthropic-billing-header:"
"""Beginning of a text that Claude Code puts before its instructions. It is another in every request, and no part of the
prompt: with it no prefix could be reused."""


class TextBlock(Lenient):
    """Text."""

    type: Literal["text"]
    text: Text


class TextSource(Lenient):
    """The text of a document."""

    type: Literal["text"]
    data: Text


class DocumentBlock(Lenient):
    """A document whose source is text."""

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


class OtherBlock(Lenient):
    """A block that is not text, such as an image: a note stands for it."""

    type: Annotated[str, Field(max_length=100)]


class ToolUseBlock(Lenient):
    """A function call that the model made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=200)]
    name: CalledName
    input: Arguments


class ToolResultBlock(Lenient):
    """The result of a function call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=200)]
    content: Text | Blocks | None = None
    is_error: bool | None = None


_TEXTUAL = ("text", "document", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _kind(block: Any) -> str:
    if not isinstance(block, dict):
        return "other" if isinstance(block, OtherBlock) else getattr(block, "type", "other")
    kind, source = block.get("type"), block.get("source")
    readable = kind != "document" or not isinstance(source, dict) or source.get("type") == "text"
    return kind if kind in _TEXTUAL and readable else "other"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
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


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "client" if kind in (None, "custom") else "server"


AnthropicTool = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[ServerTool, Tag("server")], Discriminator(_tool_kind)
]


class ToolChoice(Strict):
    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("a tool_choice of type 'tool' must have a name, and no other may")
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
    ignored(
        "betas billing_policy cache_control context_management diagnostics inference_geo metadata service_tier speed "
        "user_profile_id workspace_id",
        "it has no effect on a local server",
    ),
    only((), _HOSTED, "Anthropic's servers run it"),
    only(([],), "mcp_servers", "Anthropic's servers run it"),
)
class CountTokensRequest(ThinkingBudgets, Samplers, OtherServers, Generating):
    """Body of /v1/messages/count_tokens."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(max_length=1000, fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: Annotated[Schema, Field(description="Refused: this server keeps no conversations.")] | None = None
    chat_template_kwargs: Annotated[Schema, Field(max_length=64)] | None = None

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
        """Whether a grammar must be compiled for the reply."""
        return self.format is not None or (self.tool_choice is not None and self.tool_choice.type in ("any", "tool"))


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stop_sequences: Annotated[Stops | None, Field(fail_fast=True), WITHOUT_EMPTY] = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
