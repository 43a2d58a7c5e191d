"""Parameters of other local servers: llama.cpp's server, vLLM, SGLang, Ollama, LM Studio.

Their clients send these parameters by default, usually at the value that switches them off. A parameter that cannot
change the text is accepted at any value, and the log names it once. A parameter that could change the text is accepted
only at values that change nothing. All others are rejected like any unknown parameter. docs/reference/fields.md is made
from these tables.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
    model_validator,
)

LOG = logging.getLogger("paceline.server")

M = TypeVar("M", bound=BaseModel)

_MAX_NAMES = 1000
_logged: set[str] = set()
"""Parameters that were logged as ignored."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for parameters that have no effect on this server.

    Attributes:
        names: The parameters.
        why: The reason, for the OpenAPI document and the log.
        values: The accepted values. Null is always accepted. If `values` is None, every value is accepted.
    """

    names: tuple[str, ...]
    why: str
    values: tuple[Any, ...] | None = None

    def field(self, name: str) -> Any:
        """Return the definition of one of the parameters, for pydantic."""
        if self.values is None:
            # Drop the value before validation, because it may be large and of any type.
            kind: Any = Annotated[Any, self, BeforeValidator(partial(_ignore, name, self.why))]
            about = f"Accepted and ignored: {self.why}."
        else:
            schema = WithJsonSchema({"enum": [*self.values, None]})
            kind = Annotated[Any, self, PlainValidator(partial(_check_neutral, self.values)), schema]
            about = f"Accepted only with a value that has no effect: {self.why}."
        more: dict[str, Any] = {} if name.isidentifier() and name[0] != "_" else {"alias": name}
        return kind, Field(None, description=about, **more)


def ignored_parameters(names: str, why: str) -> Rule:
    """Return the rule for parameters that are accepted with any value. `names`: separated by spaces."""
    return Rule(tuple(names.split()), why)


def accepted_values(values: tuple[Any, ...], names: str, why: str) -> Rule:
    """Return the rule for parameters that are accepted with these values or null. `names`: separated by spaces."""
    return Rule(tuple(names.split()), why, values)


def _ignore(name: str, why: str, value: Any) -> None:
    if value is not None:
        log_ignored_once(name, why)


def log_ignored_once(name: str, why: str) -> None:
    """Log that a parameter is ignored, unless the log already says so."""
    if name not in _logged and len(_logged) < _MAX_NAMES:
        _logged.add(name)
        LOG.info("parameter ignored, here and in later requests: %s (%s)", ascii(name[:100])[1:-1], why)


def _check_neutral(values: tuple[Any, ...], value: Any) -> None:
    same_kind = (other for other in values if isinstance(value, bool) == isinstance(other, bool))
    if value is not None and value not in same_kind:
        allowed = " or ".join(map(json.dumps, values))
        raise ValueError(f"not supported by this server. Leave it out{f', or send {allowed}' if allowed else ''}")


@lru_cache(maxsize=256)
def _integers(model: type[BaseModel]) -> frozenset[str]:
    """Return the parameters that take whole numbers, but no fractions."""
    found = {field.alias or name: _kinds(field.annotation) for name, field in model.model_fields.items()}
    return frozenset(name for name, kinds in found.items() if int in kinds and float not in kinds)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation consists of. The items of lists and dicts are not included."""
    if getattr(annotation, "__origin__", None) in (list, dict):
        return {annotation.__origin__}
    return {annotation}.union(*map(_kinds, get_args(annotation))) if get_args(annotation) else {annotation}


class Strict(BaseModel):
    """Base class of schemas that refuse conversions (a bool is not a number, a number is not text), unknown keys and
    NaN. Whole numbers may be written as 16.0, because JavaScript and Lua have only floats."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _take_whole_numbers(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        whole = {name: int(body[name]) for name in _integers(cls) if _is_whole(body.get(name))}
        return {**body, **whole} if whole else body

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, body: Any) -> Any:
        """Drop keys beyond the number of fields plus one, so that at least one unknown key is left to report.

        Pydantic reports every unknown key. Hundreds of thousands of them would take seconds, during which no other
        thread runs.
        """
        count = len(cls.model_fields)
        return dict(islice(body.items(), count + 1)) if isinstance(body, dict) and len(body) > count else body


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**63


class Lenient(Strict):
    """Base class of schemas that ignore unknown keys, because clients send back whole objects of other servers."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, body: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: body[key] for key in known if key in body} if isinstance(body, dict) else body


class OllamaObject(Lenient):
    """Base class of the objects in Ollama's API. As in Ollama, unknown keys are ignored, and the log names them."""

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, body: Any) -> Any:
        known = Lenient._limit_keys.__func__(cls, body)
        if isinstance(body, dict) and len(known) < len(body):
            for name in islice((key for key in body if key not in known), 20):
                log_ignored_once(name, "unknown, as in Ollama")
        return known


def type_discriminator(*types: str, default: str | None = None) -> Discriminator:
    """Return the discriminator of a union. The tag of a value is its `type`, or "other" if `types` does not contain it.

    Args:
        types: The types that have a member in the union.
        default: The type of objects without `type`.
    """

    def tag(value: Any) -> str:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        found = default if found is None else found
        return found if found in types else "other"

    return Discriminator(tag)


class PlainAnswer(BaseModel):
    """Base class of response schemas."""

    model_config = ConfigDict(extra="forbid")


def placeholder_for(kind: str) -> str:
    """Return the note that stands for content of a kind that is not text."""
    return f"[{kind} left out: this model cannot read it]"


def text_or_empty(value: Any) -> str:
    """Return a text; "" for any other value."""
    return value if isinstance(value, str) else ""


def part_as_text(part: Any, textual: Collection[str], refused_as: str, image: str) -> Any:
    """Return a part of a message. If its type is not textual, a note becomes its text.

    Args:
        part: The part, as it was sent.
        textual: The types that are text.
        refused_as: The type to give to a refusal, which the assistant wrote and the client sends back.
        image: The type of an image, which is kept in addition to the note.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return {"type": refused_as, "text": part.get("refusal")}
    if not isinstance(kind, str) or kind in textual:
        return part
    return {**(part if kind == image else {}), "type": kind, "text": placeholder_for(kind)}


def accepts(*rules: Rule) -> Callable[[type[M]], type[M]]:
    """Return a class decorator that adds parameters without effect to a request schema."""

    def extend(model: type[M]) -> type[M]:
        fields = {name.strip("_").replace(".", "_"): rule.field(name) for rule in rules for name in rule.names}
        return create_model(
            model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **fields
        )

    return extend


Ignored = Rule((), "it has no effect on a local server").field("user")[0]

_OFF = "settings of samplers that are off"
_MORE = "the answer has no such part"
_MACHINES = "for servers that run on several machines"

REASONING_BUDGETS = (
    "thinking_token_budget thinking_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens"
)
"""Names of the limit on reasoning in chats, on various servers."""
NO_REASONING = ignored_parameters(REASONING_BUDGETS, "a prompt without a chat has no reasoning to limit")


@accepts(
    ignored_parameters(
        "cache_prompt n_cache_reuse id_slot session_id session_params extra_key",
        "prompts are always cached, which changes no text",
    ),
    ignored_parameters("cache_salt", "all clients share one prefix cache, which changes no text"),
    ignored_parameters(
        "n_keep n_discard truncation_side", "a full context ends the reply, and no tokens are discarded"
    ),
    ignored_parameters("keep_alive ttl", "the server's own option decides how long a model stays loaded"),
    ignored_parameters(
        "draft_model ngram_corpus_id speculative.n_max speculative.n_min speculative.p_min speculative.type "
        "speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_min_hits",
        "drafters change no text; `speculation` selects one",
    ),
    ignored_parameters(
        "timings_per_token sse_ping_interval stream_interval stream_reasoning verbose",
        "streams send each round as it comes, and every answer contains statistics",
    ),
    ignored_parameters("request_id rid custom_labels", "the header X-Request-Id names a request"),
    ignored_parameters("priority", "clients take turns"),
    ignored_parameters("samplers", "samplers are applied in one order"),
    ignored_parameters(
        "mirostat_tau mirostat_eta dynatemp_exponent adaptive_decay",
        _OFF,
    ),
    ignored_parameters(
        "guided_decoding_backend guided_whitespace_pattern",
        "there is only one grammar compiler, and JSON is written on one line",
    ),
    ignored_parameters(
        "backend_sampling chat_format chat_parser generation_prompt grammar_type preserved_tokens reasoning_control",
        "internal to llama.cpp's server",
    ),
    ignored_parameters(
        "reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags",
        "the chat template determines how reasoning ends",
    ),
    ignored_parameters(
        "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank disagg_prefill_dp_rank routed_dp_rank "
        "routed_experts_prompt_start routed_experts_start_len kv_transfer_params ec_transfer_params",
        _MACHINES,
    ),
    ignored_parameters("media_io_kwargs use_audio_in_video", "no model here reads audio or video"),
    ignored_parameters("return_mm_kwargs", _MORE),
    ignored_parameters(
        "vllm_xargs custom_params return_token_offsets", "for extensions and endpoints that do not exist here"
    ),
    ignored_parameters("options", "an Ollama parameter, which Ollama also ignores outside its own API"),
    ignored_parameters("provider route transforms usage", "for OpenRouter, which forwards requests to providers"),
    accepted_values(("",), "reasoning_budget_message", "reasoning ends without a message"),
    accepted_values((0,), "mirostat dynatemp_range", "this sampler is not implemented"),
    accepted_values((-1,), "adaptive_target", "this sampler is not implemented"),
    accepted_values((1,), "tfs_z", "this sampler is not implemented"),
    accepted_values((0, 1), "min_keep", "truncation keeps at least one token, and no other minimum is supported"),
    accepted_values((True,), "penalize_nl", "penalties apply to all tokens"),
    accepted_values((False,), "use_beam_search early_stopping", "beam search is not implemented"),
    accepted_values((1,), "length_penalty", "beam search is not implemented"),
    accepted_values((1,), "n_cmpl", "`n` is the number of replies"),
    accepted_values((0,), "n_probs", "`logprobs` asks for probabilities"),
    accepted_values((0,), "n_indent", "only /infill has it"),
    accepted_values((0, -1), "t_max_predict_ms", "`timeout` limits the time"),
    accepted_values((-1,), "truncate_prompt_tokens", "a prompt that is too long is refused"),
    accepted_values((True,), "skip_special_tokens spaces_between_special_tokens", "replies have no special tokens"),
    accepted_values((False,), "include_stop_str_in_output no_stop_trim", "replies end before a stop string"),
    accepted_values((True,), "separate_reasoning", "`reasoning_format` controls this"),
    accepted_values(
        (False,),
        "return_token_ids return_tokens return_tokens_as_token_ids post_sampling_probs return_prompt_text "
        "return_prompt_token_ids return_hidden_states return_routed_experts return_cached_tokens_details "
        "return_meta_info _debug_render_only",
        _MORE,
    ),
    accepted_values((), "prompt_logprobs logprob_token_ids", _MORE),
    accepted_values((False,), "grammar_lazy", "a grammar applies from the first token of the answer"),
    accepted_values(([],), "grammar_triggers", "a grammar applies from the first token of the answer"),
    accepted_values((False,), "watermarking", "replies have no watermark"),
    accepted_values(([],), "allowed_token_ids bad_words", "`logit_bias` bans tokens"),
    accepted_values(([],), "logits_processors", "requests must not contain code"),
    accepted_values((), "custom_logit_processor", "requests must not contain code"),
    accepted_values(([],), "lora", "`model` selects an adapter"),
    accepted_values((), "lora_path", "`model` selects an adapter"),
    accepted_values(([],), "plugins", "for OpenRouter, and would change the answer"),
    accepted_values(({},), "mm_processor_kwargs images_config", "images are read with the model's own settings"),
    accepted_values((), "max_dynamic_patch min_dynamic_patch", "images are read with the model's own settings"),
    accepted_values((), "stop_regex", "`stop` takes texts"),
    accepted_values((), "repetition_detection", "`no_repeat_ngram_size` and penalties avoid repetition"),
    accepted_values((), "structural_tag", "`tools` and `response_format` use the model's own format"),
)
class OtherServers(Strict):
    """Parameters of other servers that requests for text accept without effect."""
