"""Constraints on a reply, as llguidance grammars. Each is compiled in a sandbox before the server compiles it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidOption, PacelineError
from paceline.llm import LLM
from paceline.sampling.grammar import Cache, Grammar, Kind, check_installed, grammar_error, live_bytes, token_texts
from paceline.sampling.json_schema import with_leniency
from paceline.sampling.lark import json_expression, quoted_text
from paceline.server.errors import bad_request
from paceline.server.worker import Busy
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished

Constraint = tuple[Kind, Any]
"""The kind of a grammar and its content."""

ANY_OBJECT = {"type": "object"}
_MAX_SECONDS, _MAX_BYTES = 2.0, 128 * 2**20
"""Limits for reading or compiling a grammar: processor time and bytes."""
_MAX_COMPILED_BYTES = 2**30
"""Bytes of all compiled grammars, including the grammars of running replies."""
_MAX_RESULTS = 1024


def of_schema(param: str, schema: Any) -> Constraint | None:
    """Return the constraint of a JSON schema, which may be JSON text. The schema is strict unless it says otherwise.

    Raises `ApiError` 400 for text that is not a schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise bad_request(f"{param} must be a JSON schema, got text that is not JSON", param) from None
        if not isinstance(schema, dict):
            raise bad_request(f"{param} must be a JSON schema, got {type(schema).__name__}", param)
    return None if schema is None else ("json_schema", with_leniency(schema, lenient=False))


def of_regex(_: str, expression: str | None) -> Constraint | None:
    """Return the constraint of a regular expression."""
    return None if expression is None else ("regex", expression)


def of_texts(_: str, texts: list[str] | None) -> Constraint | None:
    """Return the constraint that a reply is one of several texts."""
    return None if texts is None else ("lark", f"start: {' | '.join(map(quoted_text, texts))}")


def of_grammar(param: str, text: str | None) -> Constraint | None:
    """Return the constraint of a Lark grammar, or of llama.cpp's GBNF, in which rules have "::=".

    Raises `ApiError` 400 for a malformed grammar, and `Busy` if it cannot be read now.
    """
    if not text or not re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
        return ("lark", text) if text else None
    check_installed()
    try:
        return "lark", str(SANDBOX.run("paceline.sampling.gbnf:to_lark", text, _MAX_SECONDS, _MAX_BYTES))
    except (JobFailed, OverLimit) as error:
        reason = f"{error}" or f"reading it takes more than {_MAX_SECONDS:g} s or {_MAX_BYTES >> 20} MiB"
        raise bad_request(f"{param} is not a valid GBNF grammar: {reason}", param) from error
    except Unfinished:
        raise Busy("the machine is too busy to read a new grammar") from None


def content_schema(constraints: Mapping[str, Constraint]) -> Any:
    """Return the JSON schema of a reply that calls no function, None for any text.

    Raises `ApiError` 400 for constraints that cannot be combined with tools.
    """
    for param, (kind, _) in constraints.items():
        if len(constraints) > 1 or kind != "json_schema":
            raise bad_request(f"tools and {' and '.join(constraints)} are mutually exclusive. Send one of them", param)
    return next((content for _, content in constraints.values()), None)


def grammar(
    trials: GrammarTrials,
    constraints: Mapping[str, Constraint],
    call_rules: str | None = None,
    thought_rules: str | None = None,
) -> Grammar | None:
    """Return the grammar of a reply, None if it has no constraint. Blocks until the grammar has been tried.

    Args:
        trials: The trials of the model's grammars.
        constraints: The request's constraints by parameter.
        call_rules: A Lark grammar of the function calls and of constrained content, in place of `constraints`.
        thought_rules: Lark rules for reasoning followed by the rule `answer`. The constraint becomes that rule.

    Raises:
        ApiError: 400 for more than one constraint, and for a schema, expression or grammar that is malformed or too
            expensive to compile.
        Busy: The grammar cannot be tried now.
    """
    if call_rules is not None:
        constraints = {"tools": ("lark", call_rules)}
    if len(constraints) > 1:
        raise bad_request(
            f"{' and '.join(constraints)} are mutually exclusive. Send one of them", next(iter(constraints))
        )
    for param, (kind, content) in constraints.items():
        text = content if isinstance(content, str) else json.dumps(content)
        if thought_rules is not None:
            kind, text = "lark", f"{thought_rules}answer: {_as_lark(kind, content)}\n"
        try:
            return Grammar(kind, text, size=trials.size(kind, text))
        except Busy:
            raise
        except PacelineError as error:
            raise bad_request(f"{param}: {error}", param) from error
    return None


def _as_lark(kind: Kind, content: Any) -> str:
    """Return a constraint as an expression of a Lark grammar."""
    if kind == "json_schema":
        return json_expression(content)
    if kind == "lark":
        return f"%lark {{\n{content}\n}}"
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), content, flags=re.DOTALL
    )
    return f"/{escaped}/"


class GrammarTrials:
    """Trial compilation of clients' grammars in the sandbox. Results are cached.

    A grammar of a few bytes may take minutes and gigabytes to compile, and a thread that compiles cannot be stopped.
    Therefore, each new grammar is first compiled in a fork with limits. The server compiles it only if the fork stayed
    within the limits.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self._key = llm, llm.tokenizer.digest
        self._results: Cache[bytes, int | PacelineError] = Cache(_MAX_RESULTS)

    def size(self, kind: Kind, text: str) -> int:
        """Return the bytes that the compiled grammar takes.

        Blocks for a few seconds at most. Raises `InvalidOption` for a grammar that is malformed or exceeds the limits,
        and `Busy` if there is no time or memory for it now.
        """
        check_installed()
        digest = hashlib.blake2b(f"{kind}\0{text}".encode()).digest()
        result = self._results.get(digest, lambda: (self._compile(kind, text), 1))
        if isinstance(result, PacelineError):
            raise type(result)(result.cause, result.fix)
        if live_bytes() + result > _MAX_COMPILED_BYTES:
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
                lambda: (self._key, *token_texts(model.tokenizer, size, ends), sorted(ends)),
            )
            return int(
                SANDBOX.run("paceline.sampling.grammar_compile:measure", job, _MAX_SECONDS, _MAX_BYTES, self._key)
            )
        except JobFailed as error:
            return grammar_error(kind, f"{error}")
        except OverLimit:  # not cached: the fork may have been killed for another reason
            raise grammar_error(
                kind, f"compiling it takes more than {_MAX_SECONDS:g} s or {_MAX_BYTES >> 20} MiB"
            ) from None
        except Unfinished:
            raise Busy("the machine is too busy to compile a new grammar") from None
