"""From a request's parameters to the library's: sampling, drafting, which drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.engine.draft_policy import OFF, Speculation
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.sampling.grammar import Grammar
from paceline.sampling.grammar_cache import Kind
from paceline.sampling.parameters import Sampling
from paceline.server.errors import ApiError, bad_request
from paceline.server.grammar_trials import Trials
from paceline.server.limits import Settings
from paceline.server.planning import Lane
from paceline.server.schema import ChatRequest, ObjectFormat, RequestBody, SchemaFormat, SpeculationOptions
from paceline.server.worker import Busy, ReplyJob
from paceline.types import DraftBudget

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "seed",
    "stop_token_ids",
    "ignore_eos",
)
_WIDEST = 512
"""Branches of a drafted tree at most: no limit of its own."""


def check_model(settings: Settings, name: str | None) -> None:
    """Raises `ApiError` 404 for a model that is not served here; a request may leave it out."""
    served = (settings.model, *settings.aliases)
    if name is not None and name not in served:
        raise ApiError(
            404,
            f"the model {name!r:.200} is not served here. This server has {', '.join(map(repr, served))}",
            param="model",
            code="model_not_found",
        )


def sampling(llm: LLM, body: RequestBody, length: int, logprobs: int | None, grammar: Any) -> Sampling:
    """The model's own recommendation, with what the request says. `length`: tokens of the reply at most."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.penalty is not None:
        given["repetition_penalty"] = body.penalty
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.stop is not None:
        given["stop"] = body.stop
    if body.min_tokens is not None:
        given["min_new_tokens"] = body.min_tokens
    if body.logit_bias:
        given["logit_bias"] = {int(token): by for token, by in body.logit_bias.items()}
    if grammar is not None:
        given["grammar"] = grammar
    if logprobs is None and body.trace:
        logprobs = 0
    return llm.sampling(max_new_tokens=length, logprobs=logprobs, **given).seeded()


def speculation(llm: LLM, asked: str | SpeculationOptions | None) -> Speculation | None:
    """None leaves it to the server. Raises `ApiError` 400 for a drafter that is not loaded."""
    if asked is None or asked == "auto":
        return None
    if isinstance(asked, str) or asked.max_draft == 0:
        return OFF
    drafter = asked.drafter or llm.engine.policies.default.drafter
    try:
        _ = llm.engine.policies[drafter]
    except PacelineError as error:
        raise bad_request(str(error), "speculation.drafter") from error
    most = None if asked.max_draft is None else DraftBudget(asked.max_draft, asked.max_draft, _WIDEST)
    return Speculation(drafter, most)


def grammar(trials: Trials, body: RequestBody, calls: str | None = None) -> Grammar | None:
    """What the reply must be. `calls`: a Lark grammar that has function calls and all else that is asked for.

    Blocks until the grammar has been tried out. Raises `ApiError` 400 for two wishes at once and for a schema,
    expression or grammar that is malformed or takes too much to compile, `Busy` where it cannot be tried out now.
    """
    wishes: dict[str, tuple[Kind, Any]] = dict(_wishes(body)) if calls is None else {"tools": ("lark", calls)}
    if len(wishes) > 1:
        raise bad_request(f"{' and '.join(wishes)} exclude each other. Send one of them", next(iter(wishes)))
    for param, (kind, content) in wishes.items():
        text = content if isinstance(content, str) else json.dumps(content)
        try:
            return Grammar(kind, text, size=trials.size(kind, text))
        except Busy:
            raise
        except PacelineError as error:
            raise bad_request(f"{param}: {error}", param) from error
    return None


def content_schema(body: RequestBody) -> Any:
    """The JSON schema of a reply that calls no function; None: it may be any text.

    Raises `ApiError` 400 for forms that cannot stand beside tools.
    """
    wishes = dict(_wishes(body))
    for param, (kind, _) in wishes.items():
        if len(wishes) > 1 or kind != "json_schema":
            raise bad_request(f"tools and {' and '.join(wishes)} exclude each other. Send one of them", param)
    return next((content for _, content in wishes.values()), None)


def _wishes(body: RequestBody) -> list[tuple[str, tuple[Kind, Any]]]:
    found: list[tuple[str, tuple[Kind, Any]]] = []
    wanted = body.response_format if isinstance(body, ChatRequest) else None
    if isinstance(wanted, ObjectFormat):
        found.append(("response_format", ("json_schema", {"type": "object"})))
    if isinstance(wanted, SchemaFormat):
        schema = wanted.json_schema.schema_
        found.append(("response_format", ("json_schema", {"type": "object"} if schema is None else schema)))
    if body.guided_json is not None:
        found.append(("guided_json", ("json_schema", body.guided_json)))
    if body.guided_regex is not None:
        found.append(("guided_regex", ("regex", body.guided_regex)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", ("lark", body.guided_grammar)))
    return found


def lane(body: RequestBody, given: Lane) -> Lane:
    """Return the lane that plans a request. `given`: the one for its size."""
    forced = isinstance(body, ChatRequest) and body.choice not in ("none", "auto")
    return "grammar" if forced or _wishes(body) else given


def check_fits(llm: LLM, settings: Settings, text: str, param: str) -> None:
    """Raises `ApiError` 400 for a text that is too long whatever its tokens are: said before it is tokenised."""
    longest = llm.tokenizer.max_token_chars
    most = _most(llm, settings)
    if longest is not None and len(text) > longest * most:
        raise bad_request(
            f"the prompt has {len(text)} characters, more than {most} tokens can hold. Shorten it",
            param,
            "context_length_exceeded",
        )


def _most(llm: LLM, settings: Settings) -> int:
    context = llm.model.target.context_length
    return min(context - 1, settings.max_prompt or context)


def check_length(llm: LLM, settings: Settings, tokens: Sequence[int], param: str) -> None:
    """Raises `ApiError` 400 for a prompt that is too long, or leaves no room for a reply."""
    most = _most(llm, settings)
    if len(tokens) > most:
        raise bad_request(
            f"the prompt has {len(tokens)} tokens, {most} are possible here. Shorten it",
            param,
            "context_length_exceeded",
        )


def length(llm: LLM, body: RequestBody, default: int = -1) -> int:
    """Tokens of the reply at most. -1, asked for or as the default: as many as fit."""
    asked = default if body.length is None else body.length
    return llm.model.target.context_length if asked < 0 else asked


def jobs(
    llm: LLM, settings: Settings, body: RequestBody, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[ReplyJob]:
    """`n` replies per prompt, n in a row. Raises what `Sampling.sampler` raises, and `ApiError` 400 for too many."""
    n = body.n or 1
    if n > settings.max_n or n * len(prompts) > settings.max_choices:
        raise bad_request(
            f"n={n} replies to {len(prompts)} prompts are too many: "
            f"up to {settings.max_n} to one prompt and {settings.max_choices} in all are possible here",
            "n",
        )
    how = speculation(llm, body.speculation)
    timeout = settings.timeout if body.timeout is None else body.timeout
    made = []
    for tokens in prompts:
        # Refuses what it must before anything is queued, and keeps what was compiled until the reply begins.
        sampler = sampling.sampler(vocabulary=llm.vocabulary)
        group = object()
        made += [ReplyJob(tokens, sampling, sample, how, timeout, group, held=sampler) for sample in range(n)]
    return made
