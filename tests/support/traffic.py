"""Mixed traffic: valid and invalid requests of every kind, drawn from a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST, LONG, MOST = 6000, 200, 4
"""Maximum prompt length in characters, reply length in tokens, and number of samples."""

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
PERSON = "Describe a person as JSON with a name and an age."


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """A request and its client's behaviour: "read" everything, "leave" after `count` parts, or "stall" for `count`
    tenths of a second. `valid` is True to expect 200, and False to expect 4xx in OpenAI's format."""

    kind: str
    path: str
    body: bytes
    behaviour: str = "read"
    count: int = 0
    valid: bool = True


class Traffic:
    """An endless mix of requests. `questions` are prompts, `drafters` are names for the field `speculation`."""

    def __init__(self, model: str, questions: Sequence[str], drafters: Sequence[str], tokens: int, seed: int) -> None:
        self._model, self._questions, self._drafters, self._tokens = model, questions, drafters, tokens
        self._dice = random.Random(seed)
        kinds: dict[Callable[[], TrafficRequest], int] = {
            self.chat: 6,
            self.long: 2,
            self.completion: 2,
            self.leave: 3,
            self.stall: 1,
            self.structured: 2,
            self.samples: 1,
            self.logprobs: 1,
            self.penalised: 1,
            self.invalid: 3,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def draw(self) -> TrafficRequest:
        return self._dice.choices(self._kinds, self._weights)[0]()

    def _body(self, **fields: Any) -> dict[str, Any]:
        dice = self._dice
        common: dict[str, Any] = {"model": self._model, "max_tokens": dice.randint(4, self._tokens)}
        common |= {"temperature": dice.choice((0.0, 0.0, 0.7, 1.0)), "seed": dice.randrange(2**31)}
        common["speculation"] = dice.choice(("auto", "auto", "off", *self._named()))
        if fields.get("stream", dice.random() < 0.7):
            common |= {"stream": True, "stream_options": {"include_usage": True}}
        if not {"messages", "prompt"} & set(fields):
            common["messages"] = [{"role": "user", "content": dice.choice(self._questions)}]
        return common | fields

    def _named(self) -> list[dict[str, Any]]:
        return [{"drafter": name, "max_draft": self._dice.randint(1, 6)} for name in self._drafters]

    def _request(
        self, kind: str, behaviour: str = "read", count: int = 0, path: str = CHAT, **fields: Any
    ) -> TrafficRequest:
        return TrafficRequest(kind, path, json.dumps(self._body(**fields)).encode(), behaviour, count)

    def chat(self) -> TrafficRequest:
        return self._request("chat")

    def long(self) -> TrafficRequest:
        text = "\n\n".join(self._dice.sample(self._questions, min(12, len(self._questions))))[:LONGEST]
        return self._request("long prompt", messages=[{"role": "user", "content": text}])

    def completion(self) -> TrafficRequest:
        return self._request("completion", path=COMPLETION, prompt=self._dice.choice(self._questions)[:200])

    def leave(self) -> TrafficRequest:
        return self._request("client leaves", "leave", self._dice.randint(0, 12), stream=True, max_tokens=LONG)

    def stall(self) -> TrafficRequest:
        return self._request("client stalls", "stall", self._dice.randint(5, 40), stream=True, max_tokens=self._tokens)

    def structured(self) -> TrafficRequest:
        if self._dice.random() < 0.5:
            return self._request("guided regex", guided_regex=r"[A-Z][a-z]{2,12} (is|was) \d{1,3}", max_tokens=32)
        messages = [{"role": "user", "content": PERSON}]
        return self._request("JSON schema", messages=messages, response_format=FORMAT, max_tokens=96)

    def samples(self) -> TrafficRequest:
        return self._request("n > 1", n=self._dice.randint(2, MOST), temperature=0.9)

    def logprobs(self) -> TrafficRequest:
        return self._request("logprobs", logprobs=True, top_logprobs=self._dice.randint(0, 5))

    def penalised(self) -> TrafficRequest:
        fields = {"presence_penalty": 0.5, "top_p": 0.9, "stop": ["\n\n", "."]}
        return self._request("penalties, stop", **fields)

    def invalid(self) -> TrafficRequest:
        path = self._dice.choice((CHAT, COMPLETION))
        what, body = corrupt(self._dice, self._body())
        return TrafficRequest(f"invalid: {what}", path, body, valid=False)


def largest(model: str, questions: Sequence[str], seed: int) -> TrafficRequest:
    """Return the largest request of `Traffic`: its longest prompt and most samples."""
    text = ("\n\n".join(questions) * 2)[seed:][:LONGEST]
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 64}
    more = {"n": MOST, "temperature": 1.0, "seed": seed}
    return TrafficRequest("largest", CHAT, json.dumps(body | more).encode())


def corrupt(dice: random.Random, body: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the name of a fault, and a body with this fault, which must be refused."""
    wrong: dict[str, dict[str, Any]] = {
        "max_tokens": {"max_tokens": "many"},
        "temperature": {"temperature": dice.choice((-1, 1e9, "warm"))},
        "unknown field": {"no_such_field": 1},
        "messages": {"messages": 7, "prompt": {"a": []}},
        "stop": {"stop": 5},
        "speculation": {"speculation": "no such"},
        "n": {"n": 0},
        "model": {"model": "no-such-model"},
    }
    whole = json.dumps(body).encode()
    bodies = {what: json.dumps({**body, **fields}).encode() for what, fields in wrong.items()}
    bodies["cut off"] = whole[: dice.randrange(1, len(whole) - 1)]
    bodies["bytes"] = dice.randbytes(dice.randint(1, 400))
    bodies["no object"] = b"[1, 2]"
    return dice.choice(list(bodies.items()))


def probes(model: str, questions: Sequence[str], drafters: Sequence[str]) -> dict[str, TrafficRequest]:
    """Return fixed requests with replies that must never change. None of them streams, so a reply is one object."""
    ask = [{"role": "user", "content": questions[0]}]
    chat = {"model": model, "messages": ask, "max_tokens": 32, "seed": 5, "temperature": 0.0}
    warm = chat | {"temperature": 0.8}
    found: dict[str, dict[str, Any]] = {
        "greedy": chat,
        "greedy, off": chat | {"speculation": "off"},
        "sampled": warm,
        "sampled, n=2": warm | {"n": 2},
        "long": warm | {"messages": [{"role": "user", "content": "\n\n".join(questions[:8])[:3000]}]},
        "logprobs": chat | {"logprobs": True, "top_logprobs": 2, "max_tokens": 12},
        "JSON": warm | {"messages": [{"role": "user", "content": PERSON}], "response_format": FORMAT, "max_tokens": 64},
    }
    found |= {f"sampled, {name}": warm | {"speculation": {"drafter": name, "max_draft": 4}} for name in drafters}
    return {name: TrafficRequest(name, CHAT, json.dumps(body).encode()) for name, body in found.items()}
