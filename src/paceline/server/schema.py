"""Request bodies: every parameter with its type and range. Unknown parameters are rejected, not ignored."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.server.compat import BUDGETS, Ignored, Lenient, OtherServers, Strict, accepts, ignored, left_out, only
from paceline.server.custom_tools import chat_call, chat_tool
from paceline.text.past_calls import as_object

MAX_STOPS, MAX_BIASES, MAX_TOOLS = 16, 4096, 512

Text = Annotated[str, Field(max_length=4_000_000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Without fail_fast pydantic reports each of a million wrong entries, which takes seconds and holds up other requests.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES)]
Schema = dict[str, Any]
ModelName = Annotated[str, Field(max_length=500)]


def _at_most(limit: int, name: str) -> BeforeValidator:
    """A limit that is checked before pydantic reports each of a hundred thousand wrong entries."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise ValueError(f"at most {limit} {name} are allowed, got {len(value)}")
        return value

    return BeforeValidator(check)


def _without_empty(stop: Any) -> Any:
    """Return stop strings without empty ones, which clients send for none."""
    if isinstance(stop, list) and len(stop) <= MAX_STOPS:
        return [text for text in stop if text != ""]
    return None if stop == "" else stop


WITHOUT_EMPTY = BeforeValidator(_without_empty)


def _as_biases(value: Any) -> Any:
    """Return llama.cpp's list of pairs of a token and its bias as an object; false bans a token."""
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        return value
    return {str(token): -100 if bias is False else bias for token, bias in value}


def _alias_value(body: Any, *names: str) -> Any:
    """Return the value of a parameter that has several names. Raises `ValueError` if they differ."""
    given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(given)} must not differ. Send one of them")
    return next(iter(given.values()), None)


Length = Annotated[int, Field(ge=-1, le=2**31, description="-1: as many as fit.")]
Penalty = Annotated[float, Field(ge=0.01, le=1000)]

_LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Names of the maximum reply length."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class JsonSchema(Strict):
    name: Name = "schema"
    description: Text | None = None
    schema_: Annotated[Schema | None, Field(alias="schema", description="Left out: any JSON object.")] = None
    strict: bool | None = None


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


_OF_SCHEMAS = {"type", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"}
"""Keywords by which a JSON schema is told from an object that holds one."""


def schema_format(form: Any) -> Any:
    """Return a response format of other servers in OpenAI's shape: a schema beside the type, or without an envelope."""
    if not isinstance(form, dict):
        return form
    plain, schema = {key: value for key, value in form.items() if key != "schema"}, form.get("schema")
    if form.get("type") == "json_object" and isinstance(schema, dict):
        return {**plain, "type": "json_schema", "json_schema": {"schema": schema}}
    inner = form.get("json_schema")
    if form.get("type") == "json_schema" and isinstance(schema, dict) and inner is None:
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    if isinstance(inner, dict) and "schema" not in inner and inner.keys() & _OF_SCHEMAS:
        return {**form, "json_schema": {"schema": inner}}
    return form


ResponseFormat = Annotated[
    Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")], BeforeValidator(schema_format)
]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=10_000)]], Field(min_length=1, max_length=1000)]
GrammarText = Annotated[str, Field(min_length=1, max_length=100_000)]


@accepts(
    ignored(
        "disable_fallback disable_any_whitespace disable_additional_properties whitespace_pattern backend",
        "grammars are compiled in one way, JSON on one line",
    ),
    only((), "structural_tag", "`tools` and `response_format` have the model's own form"),
)
class StructuredOutputs(Strict):
    """vLLM's constraints, of which a request has one."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


Budget = Annotated[int, Field(ge=-1, lt=2**31, description="Maximum tokens of reasoning. -1: no limit.")]


class ReasoningOptions(Lenient):
    """OpenRouter's `reasoning`. Its other keys have no effect."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None


class ThinkingOptions(Lenient):
    """Anthropic's `thinking`, which DeepSeek, GLM and others take too."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


@accepts(
    ignored("include_obfuscation", "streams are not padded"),
    only((False,), "continuous_usage_stats", "usage follows at the end"),
)
class StreamOptions(Strict):
    include_usage: bool | None = None


class SpeculationOptions(Strict):
    """`drafter`: a name from `/v1/models`, by default the server's. `max_draft`: maximum draft tokens per round; 0 is
    off."""

    drafter: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    max_draft: Annotated[int, Field(ge=0, le=512)] | None = None


class Generating(Strict):
    """Parameters of every request for generated text."""

    model: ModelName | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    # Paceline's own
    speculation: Literal["auto", "off"] | SpeculationOptions | None = None
    timeout: Annotated[float, Field(gt=0, le=86400, description="Seconds.")] | None = None

    @property
    @abstractmethod
    def constrained(self) -> bool:
        """Whether a grammar must be compiled for the reply."""


class Samplers(Strict):
    """Samplers of llama.cpp, under its names."""

    dry_multiplier: Annotated[float, Field(ge=0, le=1000, description="0: DRY is off.")] | None = None
    dry_base: Annotated[float, Field(ge=0, le=1000, description="Below 1: 1.75, as in llama.cpp.")] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31, description="-1: the whole text.")] | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=40)]], Field(max_length=64, fail_fast=True)] | None
    ) = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000, description="0 and -1: off.")] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def own_samplers(self) -> dict[str, Any]:
        """What is given of them."""
        return {name: value for name in Samplers.model_fields if (value := getattr(self, name)) is not None}


class ThinkingBudgets(Strict):
    """Names of the maximum tokens of reasoning."""

    thinking_budget: Annotated[
        Budget | None, Field(description="Maximum tokens of reasoning, whose end is then forced.")
    ] = None
    thinking_budget_tokens: Annotated[Budget | None, Field(description="llama.cpp's `thinking_budget`.")] = None
    thinking_token_budget: Annotated[Budget | None, Field(description="vLLM's `thinking_budget`.")] = None
    reasoning_budget: Annotated[Budget | None, Field(description="The same as `thinking_budget`.")] = None
    reasoning_budget_tokens: Annotated[Budget | None, Field(description="llama.cpp's `thinking_budget`.")] = None

    @property
    def named_budget(self) -> int | None:
        """The limit, under any of its names. Raises `ValueError` if they differ."""
        limit: int | None = _alias_value(self, *BUDGETS.split())
        return limit


class RequestBody(Samplers, OtherServers, Generating):
    """Parameters of both chats and completions."""

    max_tokens: Length | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: Annotated[Stop | Stops | None, _at_most(MAX_STOPS, "stop strings"), WITHOUT_EMPTY] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[Biases | None, BeforeValidator(_as_biases), _at_most(MAX_BIASES, "tokens")] = None
    stream_options: StreamOptions | None = None
    user: Ignored = None

    # Beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="-1 and 0: all tokens.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Penalty | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_regex: GrammarText | None = None
    guided_grammar: Annotated[GrammarText | None, Field(description="A Lark grammar, or GBNF.")] = None
    guided_json: Annotated[Schema | str | None, Field(description="A JSON schema, or the same as text.")] = None
    guided_choice: Annotated[Choices | None, Field(description="The reply is one of these texts.")] = None
    trace: bool | None = None

    # Names that other servers use
    grammar: Annotated[str, Field(max_length=100_000, description="llama.cpp's `guided_grammar`.")] | None = None
    ebnf: Annotated[GrammarText | None, Field(description="SGLang's `guided_grammar`.")] = None
    regex: Annotated[GrammarText | None, Field(description="SGLang's `guided_regex`.")] = None
    json_schema: Annotated[Schema | str | None, Field(description="llama.cpp's and SGLang's `guided_json`.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, Field(description="vLLM's constraints.")] = None
    n_predict: Length | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: (
        Annotated[int, Field(ge=-1, description="-1: the whole text, the only value allowed with a penalty.")] | None
    ) = None

    @property
    def samples(self) -> int:
        """Replies to generate for each prompt."""
        return self.n or 1

    @property
    def constrained(self) -> bool:
        """Whether a grammar must be compiled for the reply."""
        forms = (self.guided_json, self.guided_regex, self.guided_grammar, self.guided_choice, self.structured_outputs)
        others = (self.grammar or None, self.ebnf, self.regex, self.json_schema)
        formatted = self.response_format is not None and self.response_format.type != "text"
        return formatted or any(form is not None for form in (*forms, *others))

    @property
    def length(self) -> int | None:
        """Maximum tokens of the reply; -1: as many as fit."""
        length: int | None = _alias_value(self, *_LENGTHS)
        return length

    @property
    def penalty(self) -> float | None:
        """The repetition penalty, under either name."""
        penalty: float | None = _alias_value(self, "repetition_penalty", "repeat_penalty")
        return penalty

    @model_validator(mode="after")
    def _check_combination(self) -> RequestBody:
        _, penalty = self.length, self.penalty
        if self.repeat_last_n not in (None, -1) and penalty not in (None, 1):
            raise ValueError("repeat_last_n must be -1 with a penalty, which applies to the whole text")
        return self


def _argument_text(value: Any) -> Any:
    """Return a past call's arguments as text, as which they should have been sent."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ArgumentsText = Annotated[
    Text,
    BeforeValidator(_argument_text),
    Field(description="A JSON object, as text. Any other text is shown as it is."),
]
Arguments = Annotated[Schema, BeforeValidator(as_object)]
"""A past call's arguments as an object, however they were sent."""
CalledName = Annotated[str, Field(max_length=500)]
"""Name in a past call, which a model may have made up."""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch reasoning on and off."""


class TextPart(Lenient):
    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") == "refusal":  # an assistant's, sent back
            return {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise ValueError(f"type must be 'text', got {part['type']!r:.60}")
        return part

    @model_validator(mode="after")
    def _has_text(self) -> TextPart:
        if self.text is None:
            raise ValueError("a text part must have a text")
        return self


class ContentPart(Lenient):
    """A part of a message's content. If it is not text, such as an image, `text` is a note."""

    type: Annotated[str, Field(max_length=100)]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":  # an assistant's, sent back
            return {"type": "text", "text": part.get("refusal")}
        return part if not isinstance(kind, str) or kind == "text" else {"type": kind, "text": left_out(kind)}


class CalledFunction(Lenient):
    name: CalledName
    arguments: ArgumentsText = ""


class ToolCall(Lenient):
    """A function call in an assistant's message. One of a custom tool counts as a function of one text, `input`."""

    _custom = model_validator(mode="before")(chat_call)

    id: Annotated[str, Field(max_length=200)] | None = None
    type: str | None = "function"
    function: CalledFunction


@accepts(only((), "audio", "this server reads text only"))
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
    def calls(self) -> list[ToolCall]:
        """The message's function calls, sent as `tool_calls` or as the legacy `function_call`."""
        legacy = [ToolCall(function=self.function_call)] if self.function_call else []
        return [*(self.tool_calls or ()), *legacy]

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.calls and self.role != "assistant":
            raise ValueError("tool_calls and function_call require the role 'assistant'")
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


class Tool(Lenient):
    """A function, or a custom tool as the function by which the model sees it."""

    type: Literal["function", "custom"]
    function: Function

    _custom = model_validator(mode="before")(chat_tool)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as chat templates know it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


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


class PredictedContent(Strict):
    """OpenAI's predicted outputs."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=10_000)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


@accepts(
    ignored(
        "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options",
        "it has no effect on a local server",
    ),
    only((1,), "best_of", "only /v1/completions has it"),
    only((False,), "echo", "`continue_final_message` continues a message"),
    only((False,), "add_special_tokens", "the chat template has the special tokens"),
    only((True,), "include_reasoning", "reasoning is returned apart from the text"),
    only((True,), "parse_tool_calls", "calls are parsed where tools are sent"),
    only(([],), "documents", "put documents into a message"),
    only(("",), "chat_template", "the model's own template is used"),
    only((), "input_ids", "/v1/completions takes token ids"),
    only((), "task", "put the task into a message"),
    only(("medium",), "verbosity", "put it into a message"),
    only((), "audio", "this server writes text only"),
    only((), "web_search_options moderation", "this server writes text only"),
)
class ChatRequest(ThinkingBudgets, RequestBody):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prediction: PredictedContent | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[Schema, Field(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="The reply continues the last message, which must be the assistant's.")
    ] = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS, description="OpenAI's legacy `tools`.")] | None = (
        None
    )
    function_call: Literal["none", "auto"] | FunctionName | None = None

    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    reasoning: (
        Annotated[Literal["off", "auto"], Field(description="off: the model does not reason.")]
        | ReasoningOptions
        | None
    ) = None
    reasoning_effort: (
        Annotated[Effort, Field(description="none: as `reasoning` off; others are passed to the chat template.")] | None
    ) = None
    reasoning_format: (
        Annotated[Literal["none", "auto", "deepseek"], Field(description="none: reasoning is not split off.")] | None
    ) = None

    # Names that other servers use
    enable_thinking: bool | None = None
    think: bool | Effort | None = None
    thinking: bool | ThinkingOptions | None = None

    @property
    def constrained(self) -> bool:
        """Whether a grammar must be compiled for the reply."""
        return self.choice not in ("none", "auto") or super().constrained

    @property
    def template_values(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = next(iter(self._efforts), None)
        # Templates of Qwen, GLM and others know the one, those of DeepSeek, Kimi and Granite the other.
        values: dict[str, Any] = {} if effort is None else dict.fromkeys(_SWITCHES, effort != "none")
        if effort not in (None, "none", "on"):
            values["reasoning_effort"] = {"minimal": "low", "xhigh": "high", "max": "high"}.get(str(effort), effort)
        return {**values, **(self.chat_template_kwargs or {})}

    @property
    def _efforts(self) -> dict[str, str]:
        """The efforts that the request asks for, with the parameters that do: "none", a level, or "on" for any."""
        reasoning, thinking = self.reasoning, self.thinking
        given: dict[str, Any] = {
            "reasoning": "none" if reasoning == "off" else None,
            "reasoning_effort": self.reasoning_effort,
            "enable_thinking": self.enable_thinking,
            "think": self.think,
            "thinking": thinking.type != "disabled" if isinstance(thinking, ThinkingOptions) else thinking,
        }
        if isinstance(reasoning, ReasoningOptions):
            given["reasoning"] = reasoning.effort or reasoning.enabled
        named = {True: "on", False: "none"}
        found = {named.get(value, value): name for name, value in given.items() if value is not None}
        levels = {effort: name for effort, name in found.items() if effort != "on"}
        return found if "none" in found else levels or found

    @property
    def budget(self) -> int | None:
        """Maximum tokens of reasoning; None for no limit. Raises `ValueError` for several that differ."""
        inner = [
            self.reasoning.max_tokens if isinstance(self.reasoning, ReasoningOptions) else None,
            self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOptions) else None,
        ]
        given = {limit for limit in (self.named_budget, *inner) if limit is not None}
        if len(given) > 1:
            raise ValueError("reasoning must not have several budgets that differ. Send one of them")
        return next((limit for limit in given if limit >= 0), None)

    @property
    def offered(self) -> list[Tool]:
        """The tools, sent as `tools` or as the legacy `functions`."""
        legacy = [Tool(type="function", function=function) for function in self.functions or ()]
        return [*(self.tools or ()), *legacy]

    @property
    def custom(self) -> frozenset[str]:
        """Names of the custom tools."""
        return frozenset(tool.function.name for tool in self.tools or () if tool.type == "custom")

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedTool | AllowedTools:
        """The tool choice, sent as `tool_choice` or as the legacy `function_call`."""
        if isinstance(self.function_call, FunctionName):
            return NamedTool(type="function", function=self.function_call)
        return self.tool_choice or self.function_call or "auto"

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        if self.length == 0:
            name = next(name for name in _LENGTHS if getattr(self, name) == 0)
            raise ValueError(f"{name} must be >= 1, or -1 for as many as fit, got 0")
        if self.tools and (self.functions or self.function_call):
            raise ValueError(
                "functions and function_call are the legacy names of tools and tool_choice. Send only tools"
            )
        if len(self._efforts) > 1:
            raise ValueError(f"{' and '.join(self._efforts.values())} must not differ. Send one of them")
        _ = self.budget
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other. Send one of them")
        if self.continue_final_message and (self.messages[-1].role != "assistant" or self.messages[-1].calls):
            raise ValueError("continue_final_message requires the last message to be the assistant's, without calls")
        self._check_choice()
        return self

    def _check_choice(self) -> None:
        offered = [tool.function.name for tool in self.offered]
        where = "functions" if self.functions else "tools"
        param = "function_call" if self.function_call else "tool_choice"
        if len(set(offered)) != len(offered):
            raise ValueError(f"{where} must not have the same name twice")
        named = [self.choice] if isinstance(self.choice, NamedTool) else []
        if isinstance(self.choice, AllowedTools):
            named = self.choice.allowed_tools.tools
        for name in (tool.function.name for tool in named):
            if name not in offered:
                raise ValueError(f"{param} names {name!r}, which is not in {where}")
        if self.choice == "required" and not offered:
            raise ValueError("tool_choice 'required' requires tools")
