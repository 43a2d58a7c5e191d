"""Parameters of other local servers: llama.cpp's server, vLLM, Ollama, LM Studio.

Their clients send them along unasked, most of them at a value that switches them off. Those that change nothing here
are accepted, at any value or at the values that change nothing; all others are refused like any unknown parameter.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

DROPPED = BeforeValidator(lambda _: None)
"""Annotation of a value that is not kept: it may be megabytes of anything."""
Ignored = Annotated[Any, DROPPED, Field(description="Accepted and ignored: it means nothing to a local server.")]


class Only:
    """Annotation of a parameter that may be null or one of a few values, because it changes nothing then."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._values, None], "description": "Accepted at the value that changes nothing."}

    def _check(self, value: Any) -> None:
        if value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self._values
        ):
            return
        allowed = " or ".join(map(json.dumps, self._values))
        raise ValueError(f"not supported by this server: leave it out{f', or send {allowed}' if allowed else ''}")


class Strict(BaseModel):
    """Model without conversions (a bool is not a number, a number is not text), unknown keys or NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, body: Any) -> Any:
        """Of more keys than there are fields, keep enough to have an unknown one: pydantic reports each of them, and
        hundreds of thousands would take it seconds in which no other thread runs."""
        most = len(cls.model_fields)
        return dict(islice(body.items(), most + 1)) if isinstance(body, dict) and len(body) > most else body


class OtherServers(Strict):
    """What chats and completions take from other servers' APIs without effect."""

    # Where prompts are kept, who comes first, and what is reported beside the reply.
    cache_prompt: Ignored = None
    n_cache_reuse: Ignored = None
    n_keep: Ignored = None
    id_slot: Ignored = None
    keep_alive: Ignored = None
    ttl: Ignored = None
    timings_per_token: Ignored = None
    return_progress: Ignored = None
    sse_ping_interval: Ignored = None
    request_id: Ignored = None
    guided_decoding_backend: Ignored = None

    # Samplers that are off at these values, and their settings.
    mirostat: Annotated[Any, Only(0)] = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    dynatemp_range: Annotated[Any, Only(0)] = None
    dynatemp_exponent: Ignored = None
    xtc_probability: Annotated[Any, Only(0)] = None
    xtc_threshold: Ignored = None
    dry_multiplier: Annotated[Any, Only(0)] = None
    dry_base: Ignored = None
    dry_allowed_length: Ignored = None
    dry_penalty_last_n: Ignored = None
    dry_sequence_breakers: Ignored = None
    tfs_z: Annotated[Any, Only(1)] = None
    top_n_sigma: Annotated[Any, Only(-1, 0)] = None
    min_keep: Annotated[Any, Only(0, 1)] = None
    penalize_nl: Annotated[Any, Only(True)] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    early_stopping: Annotated[Any, Only(False)] = None
    allowed_token_ids: Annotated[Any, Only([])] = None
    bad_words: Annotated[Any, Only([])] = None
    logits_processors: Annotated[Any, Only([])] = None
    lora: Annotated[Any, Only([])] = None

    # How a reply is shown.
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    return_token_ids: Annotated[Any, Only(False)] = None
    return_tokens: Annotated[Any, Only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False)] = None
    prompt_logprobs: Annotated[Any, Only()] = None
    n_probs: Annotated[Any, Only(0)] = None
    post_sampling_probs: Annotated[Any, Only(False)] = None

    # What else may be asked of a request.
    n_cmpl: Annotated[Any, Only(1)] = None
    n_indent: Annotated[Any, Only(0)] = None
    t_max_predict_ms: Annotated[Any, Only(0, -1)] = None
    truncate_prompt_tokens: Annotated[Any, Only(-1)] = None
    priority: Annotated[Any, Only(0)] = None
    grammar: Annotated[Any, Only("")] = None
    json_schema: Annotated[Any, Only()] = None
