"""Nearly valid bodies, generated from tables of valid fields."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")

ODD: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "\ud800", "0", "auto", "a" * 300, [], {}, [[]], {"a": {}}, 1e999, -0.0]),
)
_JSON: Any = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_ROLES = st.sampled_from(["user", "user", "assistant", "system", "tool", "developer"])
_PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "text", "text", "image_url"])}, optional={"text": st.text("ab ", max_size=4)}
)
_CALL = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", "f", "f", "g h"]), "arguments": st.sampled_from(["{}", "{}", "["])}
        )
    }
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": _ROLES,
        "content": st.one_of(
            st.text("ab ", max_size=8), st.text("ab ", max_size=8), st.lists(_PART, max_size=2), _JSON
        ),
    },
    optional={
        "tool_calls": st.lists(_CALL, max_size=2),
    },
)
_TOOL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.sampled_from("fg")})}
)
_SCHEMA = st.one_of(
    _JSON,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["object", "array", "string", "integer", "nonsense"])},
        optional={"properties": _JSON, "enum": _JSON, "pattern": st.text(max_size=5), "$ref": st.text(max_size=5)},
    ),
)
_VALID: dict[str, Any] = {
    "model": st.sampled_from(["toy", "other/name"]),
    "max_tokens": st.integers(1, 5),
    "max_completion_tokens": st.integers(1, 5),
    "temperature": st.floats(0.01, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 40),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 2**63 - 1),
    "stop": st.one_of(
        st.text("ab", min_size=1, max_size=2), st.lists(st.text("ab", min_size=1, max_size=2), max_size=3)
    ),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "36", "5"]), st.floats(-100, 100), max_size=3),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 21)),
    "top_logprobs": st.integers(0, 21),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 3),
    "min_tokens": st.integers(0, 2),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "speculation": st.one_of(
        st.sampled_from(["auto", "off"]),
        st.fixed_dictionaries(
            {}, optional={"drafter": st.sampled_from(["suffix", "x"]), "max_draft": st.integers(-1, 600)}
        ),
    ),
    "trace": st.booleans(),
    "timeout": st.floats(60, 90),
    "echo": st.booleans(),
    "best_of": st.integers(1, 3),
    "suffix": st.sampled_from(["", "x"]),
    "guided_regex": st.one_of(st.sampled_from(["a+", "(", "[a-c]{2}", "(?=a)"]), st.text(max_size=6)),
    "guided_grammar": st.one_of(st.sampled_from(['start: "a"', "start: (", ""]), st.text(max_size=12)),
    "guided_json": _SCHEMA,
    "response_format": st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "json_schema", "xml"])}),
        st.fixed_dictionaries(
            {
                "type": st.just("json_schema"),
                "json_schema": st.fixed_dictionaries({"name": st.just("x"), "schema": _SCHEMA}),
            }
        ),
    ),
    "tools": st.lists(_TOOL, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", "x"]),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=4), _JSON, max_size=2),
}
_NEEDED: dict[str, Any] = {
    "/v1/chat/completions": {"messages": st.lists(MESSAGE, min_size=1, max_size=2)},
    "/v1/completions": {
        "prompt": st.one_of(
            st.text("ab ", max_size=5),
            st.lists(st.integers(-1, 38), max_size=4),
            st.lists(st.text("ab", max_size=3), max_size=3),
        )
    },
    "/tokenize": {"prompt": st.text(max_size=5), "messages": st.lists(MESSAGE, max_size=2)},
    "/detokenize": {"tokens": st.one_of(st.lists(st.integers(-1, 40), max_size=4), _JSON)},
}


_CHAT = ("max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice", "chat_template_kwargs")
_TEXT = ("echo", "best_of", "suffix")


def _known(path: str) -> dict[str, Any]:
    """Return valid fields for a path."""
    if not path.startswith("/v1"):
        return _NEEDED[path]
    others = _TEXT if path.endswith("chat/completions") else _CHAT
    return {name: made for name, made in _VALID.items() if name not in others} | _NEEDED[path]


@st.composite
def _body(draw: Any, path: str) -> bytes:
    """Draw a body with a few fields, most of them plausible. Sometimes change some of its bytes."""
    known = _known(path)
    # Most bodies get their required field, so that they reach the later checks.
    names = set(draw(st.lists(st.sampled_from(sorted(known)), max_size=4)))
    if draw(st.integers(0, 9)):
        names |= set(list(_NEEDED[path])[:1])
    body = {name: draw(_JSON if draw(st.integers(0, 15)) == 0 else known[name]) for name in sorted(names)}
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.sampled_from([*_VALID, "odd", ""]))] = draw(_JSON)
    if path.startswith("/v1") and draw(st.booleans()):
        body["max_tokens"] = 2
    data = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 2)) :]
    return data


BODIES = {path: _body(path) for path in PATHS}


def check_response(answer: Any) -> None:
    """Check that a response is a reply or a client error in the format of its API. A stream may end with an error."""
    path = answer.request.url.path
    assert answer.status_code in (200, 400, 403, 404), (answer.status_code, answer.text)
    if answer.status_code != 200 and path.startswith("/api/"):
        assert list(answer.json()) == ["error"]
        assert answer.json()["error"]
    elif answer.status_code != 200:
        error = answer.json()["error"]
        if path.startswith("/v1/messages"):
            assert error["type"] in ("invalid_request_error", "not_found_error"), error
            return
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["type"] == "invalid_request_error", error
        assert isinstance(error["message"], str)
        assert error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        failed = ('"type":"server_error"', '"type":"api_error"', '"type":"response.failed"')
        assert not any(sign in answer.text for sign in failed), answer.text
    elif answer.headers["content-type"] == "application/x-ndjson":
        assert '{"error":' not in answer.text, answer.text
    else:
        answer.json()
