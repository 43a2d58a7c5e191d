"""Types of fields, formats of replies, and parameters that requests for text share, whatever their API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.sampling.json_schema import with_leniency
from paceline.server import grammars
from paceline.server.compat import (
    REASONING_BUDGETS,
    Ignored,
    Lenient,
    OtherServers,
    Strict,
    accepted_values,
    accepts,
    ignored_parameters,
)
from paceline.server.errors import WrongParameter
from paceline.server.grammars import ANY_OBJECT, Constraint
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
TemplateValues = Annotated[Schema, Field(max_length=64)]
Id = Annotated[str, Field(min_length=1, max_length=200)]
ModelName = Annotated[str, Field(max_length=500)]


def at_most(limit: int, name: str) -> BeforeValidator:
    """Return a limit on the number of entries. It is checked first, so that pydantic does not report each of a hundred
    thousand wrong entries."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise ValueError(f"at most {limit} {name} are allowed, got {len(value)}")
        return value

    return BeforeValidator(check)


def _without_empty(stop: Any) -> Any:
    """Remove empty stop strings, which clients send if they want none."""
    if isinstance(stop, list) and len(stop) <= MAX_STOPS:
        return [text for text in stop if text != ""]
    return None if stop == "" else stop


WITHOUT_EMPTY = BeforeValidator(_without_empty)
Length = Annotated[int, Field(ge=-1, le=2**31, description="-1: as many as fit.")]
Penalty = Annotated[float, Field(ge=0.01, le=1000)]
TokenPenalty = Annotated[float, Field(ge=-2, le=2)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=-1, lt=2**31, description="Maximum tokens of reasoning. -1: no limit.")]


def _argument_text(value: Any) -> Any:
    """Return a past call's arguments as text. Some clients send them as an object."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ArgumentsText = Annotated[
    Text,
    BeforeValidator(_argument_text),
    Field(description="A JSON object, as text. Any other text is shown as it is."),
]
Arguments = Annotated[Schema, BeforeValidator(as_object)]
"""A past call's arguments as an object, however they were sent."""
CalledName = Annotated[str, Field(max_length=500)]
"""Function name in a past call. A model wrote it, so it may be the name of no function."""


def without_none(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


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
"""Keywords that tell a JSON schema from an object that contains one."""


def schema_format(form: Any) -> Any:
    """Return response formats of other servers in OpenAI's shape. Some lack the envelope around the schema."""
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


def schema_constraint(asked: JsonSchema) -> Constraint:
    """Return the constraint of a JSON schema. It is a guide unless it is strict."""
    return "json_schema", with_leniency(
        ANY_OBJECT if asked.schema_ is None else asked.schema_, lenient=not asked.strict
    )


def format_constraint(form: PlainFormat | SchemaFormat | None) -> Constraint | None:
    """Return the constraint of a response format."""
    if form is None or form.type == "text":
        return None
    return schema_constraint(form.json_schema if isinstance(form, SchemaFormat) else JsonSchema())


Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=10_000)]], Field(min_length=1, max_length=1000)]
GrammarText = Annotated[str, Field(min_length=1, max_length=100_000)]


@accepts(
    ignored_parameters(
        "disable_fallback disable_any_whitespace disable_additional_properties whitespace_pattern backend",
        "there is only one grammar compiler, and JSON is written on one line",
    ),
    accepted_values((), "structural_tag", "`tools` and `response_format` use the model's own format"),
)
class StructuredOutputs(Strict):
    """vLLM's constraints. A request has one of them."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


def _as_biases(value: Any) -> Any:
    """Return llama.cpp's list of pairs of a token and its bias as an object; false bans a token."""
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        return value
    return {str(token): -100 if bias is False else bias for token, bias in value}


def _alias_value(body: Any, *names: str) -> Any:
    """Return the value of a parameter that has several names. Raises `WrongParameter` if they differ."""
    given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    if len(set(given.values())) > 1:
        raise WrongParameter(f"{' and '.join(given)} have different values. Send one of them", next(iter(given)))
    return next(iter(given.values()), None)


_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "no_repeat_ngram_size", "seed", "stop", "stop_token_ids", "ignore_eos"),
)
"""Parameters that have the same name in `Sampling`."""


def same_named_parameters(parameters: Any) -> dict[str, Any]:
    """Return the fields of `Sampling` that these parameters set under the same names."""
    same, top_k = {name: getattr(parameters, name, None) for name in _SAME_NAMES}, getattr(parameters, "top_k", None)
    return without_none(**same, top_k=None if top_k is None else max(0, top_k))


LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Names of the maximum reply length."""


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
    ignored_parameters("include_obfuscation", "streams are not padded"),
    accepted_values((False,), "continuous_usage_stats", "the usage is sent at the end"),
)
class StreamOptions(Strict):
    include_usage: bool | None = None


class SpeculationOptions(Strict):
    """`drafter`: a name from `/v1/models`, by default the server's. `max_draft`: maximum draft tokens per round; 0 is
    off."""

    drafter: Id | None = None
    max_draft: Annotated[int, Field(ge=0, le=512)] | None = None


class NamedBody(Strict):
    """A body that names a model. None is the first one."""

    model: ModelName | None = None

    @property
    def image_chars(self) -> int:
        """Characters of all images in the body."""
        return 0


class Generating(NamedBody):
    """Parameters of every request for generated text."""

    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    # Paceline's own
    speculation: Literal["auto", "off"] | SpeculationOptions | None = None
    timeout: Annotated[float, Field(gt=0, le=86400, description="Seconds.")] | None = None

    @property
    def constrained(self) -> bool:
        """True if a grammar must be compiled for the reply."""
        return False

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of `Sampling` that the request sets."""
        return same_named_parameters(self)


class Samplers(Generating):
    """Samplers of llama.cpp, under its names."""

    dry_multiplier: Annotated[float, Field(ge=0, le=1000, description="0: DRY is off.")] | None = None
    dry_base: Annotated[float, Field(ge=0, le=1000, description="Below 1: 1.75, as in llama.cpp.")] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31, description="-1: the whole text.")] | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=40)]], Field(max_length=64, fail_fast=True)] | None
    ) = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000, description="0 and -1: off.")] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of `Sampling` that the request sets. As in llama.cpp, some numbers out of range mean the default."""
        found = without_none(**{name: getattr(self, name) for name in _SAMPLERS})
        if found.get("dry_base", 1) < 1:
            del found["dry_base"]
        if "top_n_sigma" in found:
            found["top_n_sigma"] = max(0.0, found["top_n_sigma"])
        return {**super().sampling, **found}


_SAMPLERS = tuple(Samplers.__annotations__)


class ThinkingBudgets(Strict):
    """Names of the maximum tokens of reasoning."""

    thinking_budget: Annotated[
        Budget | None, Field(description="Maximum tokens of reasoning. Then the end of the reasoning is forced.")
    ] = None
    thinking_budget_tokens: Annotated[Budget | None, Field(description="llama.cpp's `thinking_budget`.")] = None
    thinking_token_budget: Annotated[Budget | None, Field(description="vLLM's `thinking_budget`.")] = None
    reasoning_budget: Annotated[Budget | None, Field(description="The same as `thinking_budget`.")] = None
    reasoning_budget_tokens: Annotated[Budget | None, Field(description="llama.cpp's `thinking_budget`.")] = None

    def budget(self, **others: int | None) -> int | None:
        """Return the maximum tokens of reasoning; None for no limit. Raises `WrongParameter` if several limits differ.

        `others`: limits in other parameters, by their names.
        """
        named: int | None = _alias_value(self, *REASONING_BUDGETS.split())
        limits = {**others, **without_none(thinking_budget=named)}
        found = {limit: name for name, limit in limits.items() if limit is not None}
        if len(found) > 1:
            raise WrongParameter(
                "the budgets of reasoning have different values. Send one of them", next(iter(found.values()))
            )
        return next((limit for limit in found if limit >= 0), None)


class RequestBody(Samplers, OtherServers):
    """Parameters of both chats and completions."""

    max_tokens: Length | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: Annotated[Stop | Stops | None, at_most(MAX_STOPS, "stop strings"), WITHOUT_EMPTY] = None
    presence_penalty: TokenPenalty | None = None
    frequency_penalty: TokenPenalty | None = None
    logit_bias: Annotated[Biases | None, BeforeValidator(_as_biases), at_most(MAX_BIASES, "tokens")] = None
    stream_options: StreamOptions | None = None
    user: Ignored = None

    # Beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="-1 and 0: all tokens.")] | None = None
    min_p: Probability | None = None
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
    return_progress: Annotated[
        bool | None, Field(description="Streams report how much of a long prompt has been read.")
    ] = None
    repeat_last_n: (
        Annotated[int, Field(ge=-1, description="-1: the whole text, the only value allowed with a penalty.")] | None
    ) = None

    @property
    def samples(self) -> int:
        """Replies to generate for each prompt."""
        return self.n or 1

    @property
    def constrained(self) -> bool:
        formatted = self.response_format is not None and self.response_format.type != "text"
        return (
            formatted
            or self.structured_outputs is not None
            or any(value not in (None, "") for _, _, value in self._grammars)
        )

    @property
    def length(self) -> int | None:
        """Maximum tokens of the reply; -1: as many as fit."""
        length: int | None = _alias_value(self, *LENGTHS)
        return length

    @property
    def penalty(self) -> float | None:
        """The repetition penalty, under either name."""
        penalty: float | None = _alias_value(self, "repetition_penalty", "repeat_penalty")
        return penalty

    @property
    def sampling(self) -> dict[str, Any]:
        own = without_none(
            repetition_penalty=self.penalty,
            min_new_tokens=self.min_tokens,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()} or None,
        )
        return {**super().sampling, **own}

    def constraints(self) -> dict[str, Constraint]:
        """Return the request's constraints by parameter.

        Raises `ApiError` 400 for a malformed schema or grammar, and `Busy` if a grammar cannot be read now.
        """
        found = {param: read(param, value) for param, read, value in self._grammars}
        return without_none(response_format=format_constraint(self.response_format), **found)

    @property
    def _grammars(self) -> list[tuple[str, Callable[[str, Any], Constraint | None], Any]]:
        """The parameters with a grammar: the path of each, the function that reads it, and its value."""
        own = self.structured_outputs or StructuredOutputs()
        return [
            ("guided_json", grammars.of_schema, self.guided_json),
            ("json_schema", grammars.of_schema, self.json_schema),
            ("guided_regex", grammars.of_regex, self.guided_regex),
            ("regex", grammars.of_regex, self.regex),
            ("guided_grammar", grammars.of_grammar, self.guided_grammar),
            ("grammar", grammars.of_grammar, self.grammar),
            ("ebnf", grammars.of_grammar, self.ebnf),
            ("guided_choice", grammars.of_texts, self.guided_choice),
            ("structured_outputs.json", grammars.of_schema, own.json_),
            ("structured_outputs.json_object", grammars.of_schema, ANY_OBJECT if own.json_object else None),
            ("structured_outputs.regex", grammars.of_regex, own.regex),
            ("structured_outputs.grammar", grammars.of_grammar, own.grammar),
            ("structured_outputs.choice", grammars.of_texts, own.choice),
        ]

    @model_validator(mode="after")
    def _check_combination(self) -> RequestBody:
        _, penalty = self.length, self.penalty
        if self.repeat_last_n not in (None, -1) and penalty not in (None, 1):
            raise WrongParameter(
                "repeat_last_n must be -1 with a penalty, which applies to the whole text", "repeat_last_n"
            )
        return self
