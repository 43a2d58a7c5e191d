"""From a request's parameters to the library's: sampling, drafting, which drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.drafting import OFF, Speculation
from paceline.errors import PacelineError, install_line
from paceline.llm import LLM
from paceline.sampling import Sampling
from paceline.server.errors import ApiError, bad_request
from paceline.server.limits import Settings
from paceline.server.schema import ChatRequest, ObjectFormat, Request, SchemaFormat, SpeculationOptions
from paceline.server.worker import Job
from paceline.types import Tree

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
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
    if name is not None and name != settings.model and name not in settings.aliases:
        raise ApiError(
            404,
            f"the model {name!r:.200} is not served here, {settings.model!r} is",
            param="model",
            code="model_not_found",
        )


def sampling(llm: LLM, body: Request, length: int, logprobs: int | None, grammar: Any) -> Sampling:
    """The model's own recommendation, with what the request says. `length`: tokens of the reply at most."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
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
    drafter = asked.drafter or llm.engine.pilots.default.drafter
    try:
        _ = llm.engine.pilots[drafter]
    except PacelineError as error:
        raise bad_request(str(error), "speculation.drafter") from error
    most = None if asked.max_draft is None else Tree(asked.max_draft, asked.max_draft, _WIDEST)
    return Speculation(drafter, most)


def grammar(body: Request, forced: str | None = None) -> Any:
    """What the reply must be, as a `paceline.grammar.Grammar`, or None. `forced`: a Lark grammar of tool calls.

    Raises `ApiError` 400 for two wishes at once and for a schema, expression or grammar that is none.
    """
    wishes = dict(_wishes(body))
    if forced is not None:
        wishes["tool_choice"] = ("lark", forced)
    if len(wishes) > 1:
        raise bad_request(f"{' and '.join(wishes)} exclude each other. Send one of them", next(iter(wishes)))
    for param, (kind, content) in wishes.items():
        return _grammar(param, kind, content)
    return None


def _wishes(body: Request) -> list[tuple[str, tuple[str, Any]]]:
    found: list[tuple[str, tuple[str, Any]]] = []
    wanted = body.response_format if isinstance(body, ChatRequest) else None
    if isinstance(wanted, ObjectFormat):
        found.append(("response_format", ("json", None)))
    if isinstance(wanted, SchemaFormat):
        found.append(("response_format", ("json_schema", wanted.json_schema.schema_)))
    if body.guided_json is not None:
        found.append(("guided_json", ("json_schema", body.guided_json)))
    if body.guided_regex is not None:
        found.append(("guided_regex", ("regex", body.guided_regex)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", ("lark", body.guided_grammar)))
    return found


def _grammar(param: str, kind: str, content: Any) -> Any:
    """The one place that knows `paceline.grammar`."""
    try:
        from paceline.grammar import Grammar
    except ImportError as error:
        raise bad_request(
            f"structured output needs llguidance. Install it on the server: {install_line('serve')}", param
        ) from error
    try:
        make = getattr(Grammar, kind)
        return make() if kind == "json" else make(content)
    except PacelineError as error:
        raise bad_request(f"{param}: {error}", param) from error


def wants_grammar(body: Request) -> bool:
    return bool(_wishes(body))


def check_length(llm: LLM, settings: Settings, tokens: Sequence[int], param: str) -> None:
    """Raises `ApiError` 400 for a prompt that is too long, or leaves no room for a reply."""
    context = llm.model.target.context_length
    most = min(context - 1, settings.max_prompt or context)
    if len(tokens) > most:
        raise bad_request(
            f"the prompt has {len(tokens)} tokens, {most} are possible here. Shorten it",
            param,
            "context_length_exceeded",
        )


def jobs(
    llm: LLM, settings: Settings, body: Request, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Job]:
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
        sampling.sampler(tokens, vocabulary=llm.vocabulary)  # refuses what it must before anything is queued
        group = object()
        made += [Job(tokens, sampling, sample, how, timeout, group) for sample in range(n)]
    return made
