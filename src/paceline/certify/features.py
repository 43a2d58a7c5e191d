"""Features that a drafter can corrupt: stop strings, limits, log-probabilities, streams, tools and others.

A probe is a function that asks one side, and returns texts and violated promises. Both sides get the same probes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from paceline.certify.compare import ALPHA, Sides, explain
from paceline.certify.side import NotOffered, Reply, ScoredToken, Side
from paceline.certify.statistics import exchange_test
from paceline.certify.transport import EndpointError

_REPEATS = 10
_UNSCORED = ("stream", "stream_options", "n")
"""Fields that are left out of requests for log-probabilities."""
_TOLERANCE = 0.25
"""Difference of log-probabilities that rounding can explain, in nats."""
_TOKENS = 32
_ECHO = "Repeat this line six times, exactly:\nred lamps, blue maps, green kites and 12 boats\n"
_COUNT = "Count from one to thirty in words, separated by commas."
_SHORT = ("Answer with one word: which animal says meow?", "Say yes.", "What is 3 + 4? Answer with the number.")
_EMOJI = "Repeat this line four times, exactly:\n🚲 👩‍🚀 ❤️‍🔥 日本語 naïve 🇳🇿\n"
_LINES = " ".join(f"Line {i}: the {('red', 'blue', 'green')[i % 3]} boat carries {i * 7} lamps." for i in range(1, 25))

Outcome = tuple[tuple[str, ...], Hashable]
"""Violated promises, and everything else that must be equal on both sides."""


@dataclass(frozen=True, slots=True)
class FeatureResult:
    """The result of one probe.

    Attributes:
        feature: Name of the feature.
        state: "same", "differs", "not offered", "not run", or "rounding" if rounding explains the difference.
        detail: Explanation. May be empty.
        p_value: Exchange test of repeated outcomes, times the number of features. None if the outcomes are equal.
    """

    feature: str
    state: str
    detail: str = ""
    p_value: float | None = None


def _stop(side: Side, plain: Side) -> Outcome:
    text = plain.ask(_ECHO, max_tokens=_TOKENS).text
    if len(text) < 16:
        raise NotOffered("the reply is too short")
    found: list[Hashable] = []
    broken = set()
    for share, width in ((0.3, 5), (0.45, 9), (0.6, 3), (0.75, 7)):
        at = int(len(text) * share)
        stop = text[at : at + width]
        reply = side.ask(_ECHO, max_tokens=_TOKENS, stop=[stop])
        broken |= {"a stop string is in the text"} if stop in reply.text else set()
        found.append((reply.text, reply.finish))
    return tuple(sorted(broken)), tuple(found)


def _max_tokens(side: Side, plain: Side) -> Outcome:
    replies = [(n, side.ask(_COUNT, max_tokens=n)) for n in (1, 2, 3, 5, 8, 13, 16)]
    over = any(reply.tokens is not None and reply.tokens > n for n, reply in replies)
    under = any(reply.tokens is not None and reply.tokens < n and reply.finish == "length" for n, reply in replies)
    broken = (("more tokens than max_tokens",) if over else ()) + (("fewer tokens than max_tokens",) if under else ())
    return broken, tuple((reply.text, reply.finish, reply.tokens) for _, reply in replies)


def _end(side: Side, plain: Side) -> Outcome:
    replies = [side.ask(prompt, max_tokens=_TOKENS) for prompt in _SHORT]
    return (), tuple((reply.text, reply.finish, reply.tokens) for reply in replies)


def _scored(side: Side, prompt: str) -> Reply:
    reply = side.ask(prompt, max_tokens=_TOKENS, logprobs=True, top_logprobs=4)
    if not reply.scores:
        raise NotOffered("the reply has no log-probabilities")
    return reply


def _common(own: Reply, other: Reply) -> list[tuple[ScoredToken, ScoredToken]]:
    """Return the tokens of two replies up to the first that differs."""
    both = zip(own.scores, other.scores, strict=False)
    return list(takewhile(lambda pair: pair[0].text == pair[1].text, both))


def _logprobs(side: Side, plain: Side) -> Outcome:
    broken, found = set(), []
    for prompt in (_ECHO, _LINES):
        reply, without = _scored(side, prompt), side.ask(prompt, max_tokens=_TOKENS)
        common = _common(reply, _scored(plain, prompt))
        if any(abs(own.logprob - other.logprob) > _TOLERANCE for own, other in common):
            broken.add("log-probabilities differ from the plain side's")
        if reply.tokens is not None and abs(len(reply.scores) - reply.tokens) > 1:
            broken.add("not every token has a log-probability")
        found.append((reply.text, without.text, len(reply.scores)))
    return tuple(sorted(broken)), tuple(found)


def _top_logprobs(side: Side, plain: Side) -> Outcome:
    broken, found = set(), []
    for prompt in (_ECHO, _LINES):
        reply = _scored(side, prompt)
        if side is plain and not any(token.top for token in reply.scores):
            raise NotOffered("the reply has no top_logprobs")
        for own in reply.scores:
            if own.text in own.top and abs(own.top[own.text] - own.logprob) > 0.01:
                broken.add("a token's log-probability differs from its entry in top_logprobs")
            if own.top and max(own.top.values()) > own.logprob + _TOLERANCE:
                broken.add("a greedy token is not the most likely one")
        for own, other in _common(reply, _scored(plain, prompt)):
            likely = {text for text in own.top.keys() & other.top.keys() if other.top[text] > -5}
            if any(abs(own.top[text] - other.top[text]) > _TOLERANCE for text in likely):
                broken.add("top_logprobs differ from the plain side's")
        found.append(
            (reply.text, tuple(max(token.top, key=lambda text: token.top[text], default="") for token in reply.scores))
        )
    return tuple(sorted(broken)), tuple(found)


def _json_schema(side: Side, plain: Side) -> Outcome:
    row: dict[str, Any] = {"type": "object", "required": ["city", "count"], "additionalProperties": False}
    row["properties"] = {"city": {"enum": ["Oslo", "Lima"]}, "count": {"type": "integer"}}
    schema = {"type": "array", "items": row, "minItems": 3, "maxItems": 3}
    named = {"name": "rows", "strict": True, "schema": schema}
    prompt = "Give three rows as a JSON array: Oslo has 4, Lima has 7, Oslo has 4."
    fields = {"max_tokens": 160, "response_format": {"type": "json_schema", "json_schema": named}}
    reply = side.ask(prompt, **fields)
    try:
        rows = json.loads(reply.text)
        valid = isinstance(rows, list) and len(rows) == 3 and all(row["city"] in ("Oslo", "Lima") for row in rows)
    except (ValueError, TypeError, KeyError, RecursionError):
        valid = reply.finish == "length"
    return (() if valid else ("the reply does not follow the schema",)), (reply.text, reply.finish)


def _tool_calls(side: Side, plain: Side) -> Outcome:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    }
    tool = {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": parameters}}
    if side.raw:
        raise NotOffered("tools need the chat API")
    reply = side.ask(
        "What will the weather be in Lima for 3 days?", max_tokens=120, tools=[tool], tool_choice="required"
    )
    broken = []
    for name, arguments in reply.calls:
        try:
            fine = name == "weather" and isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            fine = reply.finish == "length"
        broken += [] if fine else ["a tool call is not valid"]
    return tuple(sorted(set(broken))), (reply.calls, reply.text, reply.finish)


def _stream(side: Side, plain: Side) -> Outcome:
    found = []
    for prompt in (_ECHO, _EMOJI, _SHORT[0]):
        streamed, whole = side.ask(prompt, max_tokens=_TOKENS, stream=True), side.ask(prompt, max_tokens=_TOKENS)
        found.append((streamed.text == whole.text, streamed.text, streamed.finish == whole.finish))
    return (), tuple(found)


def _usage(side: Side, plain: Side) -> Outcome:
    whole = side.ask(_COUNT, max_tokens=17)
    if whole.tokens is None:
        raise NotOffered("the reply has no usage")
    streamed = side.ask(_COUNT, max_tokens=17, stream=True, stream_options={"include_usage": True})
    broken = (
        [] if streamed.tokens in (None, whole.tokens) else ["a stream counts more or fewer tokens than a whole reply"]
    )
    return tuple(broken), (whole.text, whole.tokens, whole.prompt_tokens, streamed.tokens, streamed.prompt_tokens)


def _several(side: Side, plain: Side) -> Outcome:
    reply = side.ask(_ECHO, max_tokens=_TOKENS, n=3)
    if len(reply.others) != 2:
        raise NotOffered("n is ignored")
    one = side.ask(_ECHO, max_tokens=_TOKENS).text
    return (), (reply.text, reply.others, one)


def _penalties(side: Side, plain: Side) -> Outcome:
    kinds: tuple[dict[str, Any], ...] = ({"frequency_penalty": 1.5}, {"presence_penalty": 1.5})
    return (), tuple(side.ask(_ECHO, max_tokens=_TOKENS, **kind).text for kind in kinds)


def _logit_bias(side: Side, plain: Side) -> Outcome:
    texts = []
    for start in (0, 1000):
        banned = {str(token): -100 for token in range(start, start + 3000, 11)}
        texts.append(side.ask(_ECHO, max_tokens=_TOKENS, logit_bias=banned).text)
    return (), tuple(texts)


def _prefix(side: Side, plain: Side) -> Outcome:
    edited = _LINES.replace("Line 12: the red", "Line 12: the golden")
    asked = (_LINES, edited, _LINES, edited[: len(edited) // 2])
    return (), tuple(side.ask(f"{text}\nContinue with the next two lines.", max_tokens=_TOKENS).text for text in asked)


def _characters(side: Side, plain: Side) -> Outcome:
    texts = [side.ask(_EMOJI, max_tokens=_TOKENS).text, side.ask(_EMOJI, max_tokens=_TOKENS, stream=True).text]
    # A limit may cut the last character.
    broken = any("\ufffd" in text[:-4] for text in texts)
    return (("characters are broken",) if broken else ()), tuple(texts)


PROBES: dict[str, Callable[[Side, Side], Outcome]] = {
    "stop strings": _stop,
    "max_tokens": _max_tokens,
    "end of the reply": _end,
    "logprobs": _logprobs,
    "top_logprobs": _top_logprobs,
    "streams": _stream,
    "usage": _usage,
    "characters": _characters,
    "JSON schema": _json_schema,
    "tool calls": _tool_calls,
    "n > 1": _several,
    "penalties": _penalties,
    "logit_bias": _logit_bias,
    "prefix reuse": _prefix,
}
"""Feature -> probe. A probe gets the side to ask, and the plain side for reference."""


def compare_features(sides: Sides, is_bitwise: bool) -> list[FeatureResult]:
    """Probe both sides.

    Args:
        sides: Both sides.
        is_bitwise: True if all greedy texts were identical. Otherwise only violated promises count, since texts can
            differ by near-ties or noise.
    """
    results = []
    for feature, probe in sides.in_time(PROBES.items()):
        sides.note(f"features: {feature}")
        results.append(_compare(sides, feature, probe, is_bitwise))
    late = list(PROBES)[len(results) :]
    return [*results, *(FeatureResult(feature, "not run", "there was no time left") for feature in late)]


def _compare(sides: Sides, feature: str, probe: Callable[[Side, Side], Outcome], is_bitwise: bool) -> FeatureResult:
    sides.speculative.history.clear()
    sides.plain.history.clear()
    try:
        plain = _outcome(probe, sides.plain, sides.plain)
        own = _outcome(probe, sides.speculative, sides.plain)
    except (NotOffered, EndpointError) as error:
        return FeatureResult(feature, "not offered", str(error)[:200])
    if own == plain:
        return FeatureResult(feature, "same", "; ".join(own[0]))
    if own[0] == plain[0] and (not is_bitwise or _are_near_ties(sides)):
        return FeatureResult(
            feature, "rounding", "texts differ, but near-ties or noise change this endpoint's texts anyway"
        )
    a, b = [own], [plain]
    while len(a) < _REPEATS:
        if sides.out_of_time:
            return FeatureResult(
                feature, "not run", "the sides differed once, but there was no time to repeat the probe"
            )
        a.append(_outcome(probe, sides.speculative, sides.plain))
        b.append(_outcome(probe, sides.plain, sides.plain))
    kept: Sequence[tuple[Hashable, ...]] = ([x[0] for x in a], [x[0] for x in b]) if not is_bitwise else (a, b)  # type: ignore[assignment]
    p_value = min(1.0, len(PROBES) * exchange_test([(kept[0], kept[1])]))
    new = sorted({*own[0]} - {*plain[0]})
    detail = "; ".join(new) or _shown(own, plain)
    return FeatureResult(feature, "differs" if p_value < ALPHA else "rounding", detail, p_value)


def _are_near_ties(sides: Sides) -> bool:
    """Return True if the latest replies to equal requests differ, and only at near-ties."""
    found = []
    for (prompt, fields), own in list(sides.speculative.history.items()):
        plain = sides.plain.history.get((prompt, fields), own)
        if own != plain:
            kept = {name: value for name, value in json.loads(fields).items() if name not in _UNSCORED}
            found.append(explain(sides, "", prompt, kept, own, plain).is_near_tie)
    return bool(found) and all(found)


def _outcome(probe: Callable[[Side, Side], Outcome], side: Side, plain: Side) -> Outcome:
    try:
        return probe(side, plain)
    except EndpointError as error:
        if side is plain:
            raise
        return (f"the server fails: {error.status or error}",), ()


def _shown(own: Hashable, plain: Hashable) -> str:
    """Return the first parts of two outcomes that differ."""
    while isinstance(own, tuple) and isinstance(plain, tuple) and own != plain and len(own) == len(plain):
        own, plain = next((x, y) for x, y in zip(own, plain, strict=True) if x != y)
    return f"{own!r:.300} instead of {plain!r:.300}"
