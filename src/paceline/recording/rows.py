"""Rows of a recording: its header and its replies, as JSON objects. They are checked when they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from paceline.errors import InvalidOption
from paceline.files.schema import NULL, OBJECT, TEXT, FieldKind, integer, number
from paceline.sampling.grammar import Grammar
from paceline.sampling.parameters import Sampling
from paceline.sampling.thinking import ThinkingBudget
from paceline.text.prompt_rows import parse_object
from paceline.types import FinishReason

FORMAT = 1
"""Version of the format. It increases with every change that older readers cannot read."""
RECORDED_FINISH_REASONS: tuple[FinishReason, ...] = ("eos", "stop", "length")
"""Stop reasons of recorded replies. A reply that was cancelled or failed ended independently of its text."""
_GRAMMAR = 1 << 16
"""Maximum length of a grammar in characters."""
_UNRECORDED_FIELDS = ("processors", "stop_when", "logprobs", "rule")
"""Fields of `Sampling` that are not recorded, because they are functions or do not affect tokens."""


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """First row of a recording.

    Attributes:
        model: Path or name that the model was read from.
        fingerprint: See `head_fit.fingerprint`.
        vocab_size: Vocabulary size of the target.
        context_length: Context length of the target, in tokens.
        quantize: Quantisation of the weights, or None.
        version: Version of Paceline.
    """

    model: str
    fingerprint: str
    vocab_size: int
    context_length: int
    quantize: str | None
    version: str

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary."""
        return {"paceline_recording": FORMAT, **asdict(self)}


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A recorded reply with everything that decided its text.

    Attributes:
        prompt: Token ids of the prompt.
        reply: Token ids of the reply, including EOS.
        finish: Stop reason, one of `RECORDED_FINISH_REASONS`.
        sampling: Sampling parameters, including the seed that was used.
        sample: Number of the reply among several replies to one prompt.
        started: Time of the request in seconds since 1970.
    """

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    finish: str
    sampling: Sampling
    sample: int = 0
    started: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of prompt and reply."""
        return self.prompt + self.reply

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary."""
        row: dict[str, Any] = {name: getattr(self, name) for name in ("started", "prompt", "reply", "finish", "sample")}
        return row | {"sampling": _to_json(self.sampling)}


def _to_json(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters that differ from the defaults, as JSON values."""
    plain = Sampling()
    values = {field.name: getattr(sampling, field.name) for field in fields(Sampling)}
    row = {name: x for name, x in values.items() if name not in _UNRECORDED_FIELDS and x != getattr(plain, name)}
    if sampling.grammar:
        grammar = sampling.grammar
        row["grammar"] = {"kind": grammar.kind, "text": grammar.text, "whitespace": grammar.whitespace}
    if isinstance(sampling.thinking_budget, ThinkingBudget):
        row["thinking_budget"] = asdict(sampling.thinking_budget)
    if sampling.logit_bias:  # null stands for -inf, which JSON lacks
        row["logit_bias"] = {t: None if by == -math.inf else by for t, by in sampling.logit_bias.items()}
    return row


_ID = integer(0, 2**31 - 1)
_LIST = FieldKind("a list of token ids", lambda x: isinstance(x, list), "lists of token ids")
_HEADER = {
    **dict.fromkeys(("model", "version"), TEXT),
    "fingerprint": FieldKind(
        "two hexadecimal numbers with a colon between them",
        lambda x: isinstance(x, str) and re.fullmatch("[0-9a-f]{1,64}:[0-9a-f]{1,4096}", x) is not None,
    ),
    "vocab_size": integer(1, 2**24),
    "context_length": integer(1, 2**40),
    "quantize": TEXT | NULL,
}
_REPLY = {
    **dict.fromkeys(("prompt", "reply"), _LIST),
    "finish": FieldKind(f"one of {', '.join(RECORDED_FINISH_REASONS)}", lambda x: x in RECORDED_FINISH_REASONS),
    "sampling": OBJECT,
    "sample": integer(0, 2**31 - 1),
    "started": number(0, 1e12),
}


def parse_header(line: bytes) -> RecordingHeader:
    """Parse the first row.

    Raises:
        ValueError: If it is not a header.
    """
    row = parse_object(line)
    version = row.pop("paceline_recording", None)
    if version is None:
        raise ValueError("not the header of a recording")
    if version != FORMAT:
        raise ValueError(f"this recording has format {version!r:.20}, but this version reads format {FORMAT}")
    _check(row, _HEADER)
    return RecordingHeader(**{name: row[name] for name in _HEADER})


def parse_reply(line: bytes, header: RecordingHeader) -> RecordedReply:
    """Parse a reply of the recording with this header.

    Raises:
        ValueError: If it is not a valid reply.
    """
    row = parse_object(line)
    _check(row, _REPLY)
    prompt, reply = (_token_ids(name, row[name], header.vocab_size) for name in ("prompt", "reply"))
    if len(prompt) + len(reply) > header.context_length:
        raise ValueError(f"prompt and reply exceed the model's context length of {header.context_length} tokens")
    sampling = _sampling(row["sampling"])
    if len(reply) > sampling.max_new_tokens:
        raise ValueError(f"the reply has {len(reply)} tokens, but max_new_tokens is {sampling.max_new_tokens}")
    return RecordedReply(prompt, reply, row["finish"], sampling, row["sample"], row["started"])


def _check(row: Mapping[str, Any], kinds: Mapping[str, FieldKind]) -> None:
    for name, kind in kinds.items():
        if name not in row:
            raise ValueError(f"{name!r} is missing")
        if not kind.accepts(row[name]):
            raise ValueError(f"{name!r} must be {kind.singular}, got {json.dumps(row[name])[:40]}")


def _token_ids(name: str, ids: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    if not ids:
        raise ValueError(f"{name!r} is empty")
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), None)
    if wrong is not None or None in ids:
        raise ValueError(f"{name!r} contains {wrong!r:.40}, which is not a token id below {vocab_size}")
    return tuple(ids)


def _sampling(row: dict[str, Any]) -> Sampling:
    known = {field.name for field in fields(Sampling)} - {*_UNRECORDED_FIELDS}
    if unknown := [name for name in row if name not in known]:
        raise ValueError(f"{unknown[0]!r:.40} is not a recorded sampling parameter")
    if row.get("seed") is None:
        raise ValueError("the sampling parameters have no seed")
    try:
        given = dict(row)
        if "logit_bias" in given:
            bias = given["logit_bias"]
            given["logit_bias"] = {int(token): -math.inf if by is None else by for token, by in bias.items()}
        if "grammar" in given:
            given["grammar"] = _grammar(given["grammar"])
        if "thinking_budget" in given:
            given["thinking_budget"] = ThinkingBudget(**given["thinking_budget"])
        return Sampling(**given)
    except InvalidOption as error:
        raise ValueError(str(error)) from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the sampling parameters are malformed: {error}") from error


def _grammar(row: Any) -> Grammar:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or len(row["text"]) > _GRAMMAR:
        raise ValueError(f"'grammar' must be an object with a 'text' of at most {_GRAMMAR} characters")
    return Grammar(row.get("kind", ""), row["text"], row.get("whitespace") is True)


def recorded_parameters(sampling: Sampling, seed: int) -> Sampling:
    """Return the parameters to record: with the seed that was used, and without `_UNRECORDED_FIELDS`."""
    return replace(sampling, seed=seed, processors=(), stop_when=(), logprobs=None)
