"""Parameters of other local servers: llama.cpp's server, vLLM, Ollama, LM Studio.

Their clients send them unasked, most of them at the value that switches them off. Parameters without effect here are
accepted, at any value or at their neutral values; all others are rejected like any unknown parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
    model_validator,
)

M = TypeVar("M", bound=BaseModel)

Ignored = Annotated[
    Any,
    BeforeValidator(lambda _: None),  # it may be megabytes of anything
    Field(description="Accepted and ignored: it has no effect on a local server."),
]


def _only(values: tuple[Any, ...]) -> Any:
    """Return the type of a parameter that may be null or one of a few neutral values."""

    def check(value: Any) -> None:
        same_kind = (other for other in values if isinstance(value, bool) == isinstance(other, bool))
        if value is not None and value not in same_kind:
            allowed = " or ".join(map(json.dumps, values))
            raise ValueError(f"not supported by this server. Leave it out{f', or send {allowed}' if allowed else ''}")

    about = "Accepted at the value that changes nothing." if values else "Not supported: must be null."
    return Annotated[Any, PlainValidator(check), WithJsonSchema({"enum": [*values, None], "description": about})]


class Strict(BaseModel):
    """Model without conversions (a bool is not a number, a number is not text), unknown keys or NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, body: Any) -> Any:
        """Of more keys than there are fields, keep enough to have an unknown one: pydantic reports each of them, and
        hundreds of thousands would take it seconds in which no other thread runs."""
        count = len(cls.model_fields)
        return dict(islice(body.items(), count + 1)) if isinstance(body, dict) and len(body) > count else body


class Lenient(Strict):
    """Model that ignores unknown keys: what servers have returned, clients send back whole."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, body: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: body[key] for key in known if key in body} if isinstance(body, dict) else body


def left_out(kind: str) -> str:
    """Return the note that stands for content of a kind that is not text."""
    return f"[{kind} left out: this server reads text only]"


def accepts(ignored: str, neutral: Sequence[tuple[tuple[Any, ...], str]]) -> Callable[[type[M]], type[M]]:
    """Add parameters that have no effect to a model of bodies: names that are `ignored` at any value, and those that
    may have a `neutral` value, after these values."""

    def extend(model: type[M]) -> type[M]:
        fields: dict[str, Any] = dict.fromkeys(ignored.split(), (Ignored, None))
        fields |= {name: (_only(values), None) for values, names in neutral for name in names.split()}
        return create_model(
            model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **fields
        )

    return extend


@accepts(
    """
    cache_prompt n_cache_reuse n_keep id_slot keep_alive ttl timings_per_token return_progress sse_ping_interval
    request_id guided_decoding_backend mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    """,
    (
        ((0,), "mirostat dynatemp_range xtc_probability dry_multiplier n_probs n_indent priority"),
        ((1,), "tfs_z length_penalty n_cmpl"),
        ((0, 1), "min_keep"),
        ((-1, 0), "top_n_sigma"),
        ((0, -1), "t_max_predict_ms"),
        ((-1,), "truncate_prompt_tokens"),
        ((True,), "penalize_nl skip_special_tokens spaces_between_special_tokens"),
        ((False,), "use_beam_search early_stopping include_stop_str_in_output return_token_ids return_tokens"),
        ((False,), "return_tokens_as_token_ids post_sampling_probs"),
        (([],), "allowed_token_ids bad_words logits_processors lora"),
        (("",), "grammar"),
        ((), "prompt_logprobs json_schema"),
    ),
)
class OtherServers(Strict):
    """Parameters of other servers that chats and completions accept without effect."""
