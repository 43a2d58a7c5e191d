"""What a request may say: every parameter with its kind and range. Whatever is not here is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MAX_STOPS, MAX_BIASES = 16, 4096

Text = Annotated[str, Field(max_length=4_000_000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# A list of a million wrong things is not told one by one: that takes seconds in which nobody else is served.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Schema = dict[str, Any]


def _null(value: Any) -> None:
    if value is not None:
        raise ValueError("not supported by this server. Leave it out")


def _few(value: Any) -> Any:
    """Before each of a hundred thousand wrong keys is told of by itself."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens are possible")
    return value


Unsupported = Annotated[None, BeforeValidator(_null), Field(description="Not supported: may be null only.")]
Ignored = Annotated[Any, Field(description="Accepted and ignored: it means nothing to a local server.")]


class Strict(BaseModel):
    """No conversions (a bool is no number, a number no text), no unknown keys, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class SpeculationOptions(Strict):
    """`drafter`: the name of one (`/v1/models` lists them), the default one if left out. `max_draft`: tokens drafted
    per round at most; 0 is off."""

    drafter: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    max_draft: Annotated[int, Field(ge=0, le=512)] | None = None


class Request(Strict):
    """What chats and completions share."""

    model: Annotated[str, Field(max_length=500)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_few)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored = None

    # Beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="-1 and 0: all tokens.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    guided_regex: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    guided_json: Schema | None = None
    speculation: Literal["auto", "off"] | SpeculationOptions | None = None
    timeout: Annotated[float, Field(gt=0, le=86400, description="Seconds.")] | None = None
    trace: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams. Send stream=true")
        return self


class TextPart(Strict):
    type: str
    text: str | None = None
    cache_control: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise ValueError(f"this server reads text only, and this part is of type {part['type']!r:.60}")
        return part

    @model_validator(mode="after")
    def _has_text(self) -> TextPart:
        if self.text is None:
            raise ValueError("a text part needs its text")
        return self


class CalledFunction(Strict):
    name: Name
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ToolCall(Strict):
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None
    reasoning_content: Text | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs its content (null only beside tool_calls)")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are for the assistant's messages")
        return self


class Function(Strict):
    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: Annotated[
        bool | None,
        Field(description="Arguments keep to the schema where tool_choice is required or names a function."),
    ] = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    name: Name
    description: Text | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[Schema, Field(max_length=64)] | None = None

    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    modalities: list[Literal["text"]] | None = None
    audio: Unsupported = None
    prediction: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ. Send one of them")
        offered = {tool.function.name for tool in self.tools or ()}
        if len(offered) != len(self.tools or ()):
            raise ValueError("tools holds two functions of one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in offered:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.tool_choice == "required" and not offered:
            raise ValueError("tool_choice is required, and there are no tools")
        return self


class CompletionRequest(Request):
    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None
    suffix: Unsupported = None

    @field_validator("suffix", mode="before")
    @classmethod
    def _no_suffix(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _agrees(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of other than n is not supported. Ask for n replies, and choose")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: a prompt's own are not reported. Leave one out")
        return self


class TokenizeRequest(Strict):
    """Text as it is, or messages by the chat template. Give one of them."""

    model: Annotated[str, Field(max_length=500)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    model: Annotated[str, Field(max_length=500)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]
