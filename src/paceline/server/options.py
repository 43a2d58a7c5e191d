"""From a request's parameters to the library's: sampling, speculation, grammar, lengths, jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from paceline.engine.draft_policy import OFF, Speculation
from paceline.errors import InvalidOption, PacelineError
from paceline.llm import LLM
from paceline.sampling.grammar import Cache, Grammar, Kind, check_installed, live_bytes, refused, spelled
from paceline.sampling.parameters import Sampling
from paceline.server.constraints import as_lark, constraints_of
from paceline.server.errors import ContextExceeded, bad_request
from paceline.server.limits import Settings
from paceline.server.schema import RequestBody, SpeculationOptions
from paceline.server.worker import Busy, ReplyJob
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished
from paceline.types import DraftBudget

_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    *("no_repeat_ngram_size", "seed", "stop", "stop_token_ids", "ignore_eos"),
)
_ATTRIBUTES = {name: name for name in _SAME_NAMES} | {"repetition_penalty": "penalty", "min_new_tokens": "min_tokens"}
"""Field of `Sampling` -> attribute of `RequestBody`."""
_MAX_BRANCHES = 512
"""Branches of a drafted tree: no limit of its own."""
_SECONDS, _MEMORY = 2.0, 128 * 2**20
"""Limits for compiling a grammar: processor time and bytes."""
_MAX_LIVE = 2**30
"""Bytes of all compiled grammars, including those that running replies use."""
_MAX_RESULTS = 1024


def sampling(llm: LLM, body: RequestBody, length: int, logprobs: int | None, grammar: Grammar | None) -> Sampling:
    """Return the model's recommended sampling, overridden by the request. `length`: maximum tokens of the reply."""
    given: dict[str, Any] = {name: getattr(body, attribute) for name, attribute in _ATTRIBUTES.items()}
    given["top_k"] = None if body.top_k is None else max(0, body.top_k)
    given["logit_bias"] = {int(token): bias for token, bias in (body.logit_bias or {}).items()} or None
    given["grammar"] = grammar
    given |= _samplers(body)
    given = {name: value for name, value in given.items() if value is not None}
    if logprobs is None and body.trace:
        logprobs = 0
    return llm.sampling(max_new_tokens=length, logprobs=logprobs, **given).seeded()


def _samplers(body: RequestBody) -> dict[str, Any]:
    """Return llama.cpp's samplers, whose numbers out of range stand for its defaults."""
    given = body.own_samplers
    if given.get("dry_base", 1) < 1:
        del given["dry_base"]
    if "top_n_sigma" in given:
        given["top_n_sigma"] = max(0.0, given["top_n_sigma"])
    return given


def speculation(llm: LLM, options: str | SpeculationOptions | None) -> Speculation | None:
    """Return how to draft, None for the server's default. Raises `ApiError` 400 for a drafter that is not loaded."""
    if options is None or options == "auto":
        return None
    if isinstance(options, str) or options.max_draft == 0:
        return OFF
    drafter = options.drafter or llm.engine.policies.default.drafter
    try:
        _ = llm.engine.policies[drafter]
    except PacelineError as error:
        raise bad_request(str(error), "speculation.drafter") from error
    limit = options.max_draft
    return Speculation(drafter, None if limit is None else DraftBudget(limit, limit, _MAX_BRANCHES))


class GrammarTrials:
    """Trial compilation of clients' grammars in the sandbox, before they are compiled here. Results are cached.

    A grammar of a few bytes may take minutes and gigabytes to compile, and a thread that compiles cannot be stopped. So
    each new grammar is first compiled in a fork with limits, and by the server itself only if it stays within them.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self._key = llm, llm.tokenizer.digest
        self._results: Cache[bytes, int | PacelineError] = Cache(_MAX_RESULTS)

    def size(self, kind: Kind, text: str) -> int:
        """Return the bytes that the compiled grammar takes.

        Blocks for some seconds at most. Raises `InvalidOption` for a grammar that is malformed or exceeds the limits,
        and `Busy` if there is no time or memory for it now.
        """
        check_installed()
        digest = hashlib.blake2b(f"{kind}\0{text}".encode()).digest()
        result = self._results.get(digest, lambda: (self._compile(kind, text), 1))
        if isinstance(result, PacelineError):
            raise type(result)(result.cause, result.fix)
        if live_bytes() + result > _MAX_LIVE:
            raise Busy("grammars of other requests use all the memory for grammars")
        return result

    def _compile(self, kind: Kind, text: str) -> int | PacelineError:
        model = self._llm.model
        ends = frozenset(model.eos)
        if not ends:
            return InvalidOption("a grammar requires an end-of-sequence token, which the model does not have")
        size = model.target.vocab_size
        job = (self._key, kind, text, False)
        try:
            SANDBOX.prepare(
                self._key,
                "paceline.sampling.grammar_compile:prepare",
                lambda: (self._key, *spelled(model.tokenizer, size, ends), sorted(ends)),
            )
            return int(SANDBOX.run("paceline.sampling.grammar_compile:measure", job, _SECONDS, _MEMORY, self._key))
        except JobFailed as error:
            return refused(kind, f"{error}")
        except OverLimit:  # not cached: the fork may have been killed for another reason
            raise refused(kind, f"compiling it takes more than {_SECONDS:g} s or {_MEMORY >> 20} MiB") from None
        except Unfinished:
            raise Busy("the machine is too busy to compile a new grammar") from None


def grammar(
    trials: GrammarTrials, body: RequestBody, tool_grammar: str | None = None, thought: str | None = None
) -> Grammar | None:
    """Return the grammar of the reply. `tool_grammar`: a Lark grammar with the function calls and the content's schema.
    `thought`: rules for an `answer` after reasoning.

    Blocks until the grammar has been tried. Raises `ApiError` 400 for more than one constraint and for a schema,
    expression or grammar that is malformed or too expensive to compile, `Busy` if it cannot be tried now.
    """
    tools: dict[str, tuple[Kind, Any]] = {"tools": ("lark", tool_grammar)}
    constraints = constraints_of(body) if tool_grammar is None else tools
    if len(constraints) > 1:
        raise bad_request(f"{' and '.join(constraints)} exclude each other. Send one of them", next(iter(constraints)))
    for param, (kind, content) in constraints.items():
        text = content if isinstance(content, str) else json.dumps(content)
        if thought is not None:
            kind, text = "lark", f"{thought}answer: {as_lark(kind, content)}\n"
        try:
            return Grammar(kind, text, size=trials.size(kind, text))
        except Busy:
            raise
        except PacelineError as error:
            raise bad_request(f"{param}: {error}", param) from error
    return None


def content_schema(body: RequestBody) -> Any:
    """Return the JSON schema of a reply that calls no function, None for any text.

    Raises `ApiError` 400 for constraints that cannot be combined with tools.
    """
    constraints = constraints_of(body)
    for param, (kind, _) in constraints.items():
        if len(constraints) > 1 or kind != "json_schema":
            raise bad_request(f"tools and {' and '.join(constraints)} exclude each other. Send one of them", param)
    return next((content for _, content in constraints.values()), None)


def token_ids(llm: LLM, prompt: Any, param: str, chat: bool = False) -> list[int]:
    """Return the token ids of a text, or of a prompt that is token ids already. `chat`: the text of a chat, which has
    its special tokens. Raises `ApiError` 400 naming the parameter."""
    try:
        return llm.encode(llm.tokenizer.encode(prompt, special=False) if chat else prompt, raw=True)
    except PacelineError as error:
        raise bad_request(str(error), param) from error


def prompt_limit(llm: LLM, settings: Settings) -> int:
    """Return the most tokens of a prompt, which leaves room for one of the reply."""
    context = llm.model.target.context_length
    return min(context - 1, settings.max_prompt or context)


def check_length(llm: LLM, settings: Settings, prompt: str | Sequence[int], param: str) -> None:
    """Raise `ContextExceeded` for a prompt that is too long, or leaves no room for a reply; for a text that is so
    whatever its tokens are, before it is tokenised."""
    limit, size = prompt_limit(llm, settings), len(prompt)
    if is_text := isinstance(prompt, str):
        longest = llm.tokenizer.max_token_chars
        size = 0 if longest is None else -(-size // longest)
    if size > limit:
        context = llm.model.target.context_length
        raise ContextExceeded(size, context if limit == context - 1 else limit, param, exact=not is_text)


def length(llm: LLM, body: RequestBody, default: int = -1) -> int:
    """Return the maximum tokens of the reply; -1, requested or as the default, is as many as fit."""
    limit = default if body.length is None else body.length
    return llm.model.target.context_length if limit < 0 else limit


def jobs(
    llm: LLM, settings: Settings, body: RequestBody, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[ReplyJob]:
    """Return `n` jobs for each prompt in turn. Raises `ApiError` 400 for too many, and as `Sampling.sampler` does."""
    n = body.samples
    if n > settings.max_n or n * len(prompts) > settings.max_choices:
        raise bad_request(
            f"n={n} replies to {len(prompts)} prompts are too many: "
            f"the limits are {settings.max_n} per prompt and {settings.max_choices} in all",
            "n",
        )
    how = speculation(llm, body.speculation)
    made = []
    for tokens in prompts:
        # Fails before anything is queued if it must, and keeps compiled grammars alive until the reply begins.
        sampler = sampling.sampler(vocabulary=llm.vocabulary)
        group = object()
        made += [ReplyJob(tokens, sampling, i, how, group=group, keep_alive=sampler) for i in range(n)]
    return made
