"""Requests generated from the server's OpenAPI document: valid requests, and requests with one invalid value."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
from hypothesis import strategies as st

from tests.support.fuzz import MESSAGE, ODD, check_response
from tests.support.running import Serving

EXAMPLES = int(os.environ.get("PACELINE_EXAMPLES", "100"))
"""Requests per operation in the slow tests. .ci/run uses fewer to save time."""
_LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
_LIMITS = dict.fromkeys(("ChatRequest", "CompletionRequest", "MessagesRequest"), "max_tokens")
_LIMITS["ResponsesRequest"] = "max_output_tokens"
"""Schema of a body -> the field that limits the length of the reply."""
_SMALL: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@dataclass(frozen=True)
class FuzzRequest:
    """A request; `body` is None if the operation has no body."""

    method: str
    path: str
    body: Any
    documented: frozenset[str]

    def send(self, served: Serving) -> httpx.Response:
        """Return the server's response."""
        sent = None if self.body is None else json.dumps(self.body)
        kind = {"Content-Type": "application/json"}
        return served.request(self.method, self.path, timeout=120, content=sent, headers=kind)

    def check(self, served: Serving) -> None:
        """Check that the response has a documented status below 500."""
        answer = self.send(served)
        assert answer.status_code < 500, (self, answer.text)
        assert str(answer.status_code) in self.documented, (self, answer.status_code)
        if self.body is not None:
            check_response(answer)


class Document:
    """Generates requests from an OpenAPI document."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self._said = said

    def requests(self) -> st.SearchStrategy[FuzzRequest]:
        found = [
            self._operation(path, method, operation)
            for path, operations in self._said["paths"].items()
            for method, operation in operations.items()
        ]
        return st.one_of(found)

    def _operation(self, path: str, method: str, operation: Mapping[str, Any]) -> st.SearchStrategy[FuzzRequest]:
        documented = frozenset(operation["responses"])
        names = st.sampled_from(["toy", "other/name", "a b", "../x", "%", "é"]).map(quote)
        paths = names.map(lambda name: path.replace("{name}", name))
        body: Any = st.none()
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            name = schema["$ref"].rpartition("/")[2]
            body = self.values(schema).flatmap(with_odd_value).map(partial(bounded, name))
        return st.builds(partial(FuzzRequest, method.upper(), documented=documented), path=paths, body=body)

    def values(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        """Return values that a schema allows."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            made = st.deferred(lambda: self.values(self._said["components"]["schemas"][name]))
            # The content of a message depends on its role, which the document does not describe.
            return st.one_of(MESSAGE, MESSAGE, MESSAGE, made) if name == "Message" else made
        if "const" in schema or "enum" in schema:
            return st.sampled_from(schema.get("enum", [schema.get("const")]))
        if several := schema.get("anyOf") or schema.get("oneOf"):
            return st.one_of([self.values(one) for one in several])
        made = {"array": self._array, "object": self._object, "string": _string, "integer": _integer, "number": _number}
        kind = schema.get("type")
        if kind in made:
            return made[kind](schema)
        return {"boolean": st.booleans(), "null": st.none()}.get(str(kind), _SMALL)

    def _array(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        least = schema.get("minItems", 0)
        return st.lists(self.values(schema.get("items", {})), min_size=least, max_size=least + 2)

    def _object(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        known = {name: self.values(value) for name, value in schema.get("properties", {}).items()}
        if "model" in known:
            known["model"] = st.sampled_from(["toy", "toy", "other/name", "toy:latest", "none"])
        if not known:
            pattern, value = next(iter(schema.get("patternProperties", {}).items()), (None, _SMALL))
            keys = st.sampled_from(["type", "a"]) if pattern is None else st.sampled_from(["1", "36"])
            return st.dictionaries(keys, self.values(value) if isinstance(value, dict) else value, max_size=2)
        needed = [name for name in schema.get("required", ()) if name in known]
        optional = st.lists(st.sampled_from(sorted(known)), max_size=5)
        return optional.flatmap(lambda names: st.fixed_dictionaries({name: known[name] for name in (*needed, *names)}))


def _string(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    least = schema.get("minLength", 0)
    return st.text('abc {}<>\n"é', min_size=least, max_size=least + 8)


def _integer(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low, high = (
        schema.get("minimum", -(2**63)),
        min(schema.get("maximum", 2**63), schema.get("exclusiveMaximum", 2**63) - 1),
    )
    return st.integers(low, high) | st.integers(max(low, -3), min(high, 5))


def _number(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    return st.floats(
        low, schema.get("maximum"), exclude_min="exclusiveMinimum" in schema, allow_nan=False, allow_infinity=False
    )


def with_odd_value(body: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return the body, sometimes with one invalid value."""
    one = st.sampled_from([*body, "odd"]).flatmap(lambda name: ODD.map(lambda value: {**body, name: value}))
    return st.one_of(st.just(body), st.just(body), st.just(body), one)


def bounded(schema: str, body: dict[str, Any]) -> dict[str, Any]:
    """Limit a body of this schema to a short reply without a timeout."""
    body = {k: v for k, v in body.items() if k != "timeout"}
    name = _LIMITS.get(schema)
    if name is None:
        return body
    given = next((body[length] for length in (name, *_LENGTHS) if isinstance(body.get(length), int)), 4)
    return {k: v for k, v in body.items() if k not in _LENGTHS} | {name: min(given, 4)}
