"""The same conversation in the dialect of each API, and small changes to it."""

from __future__ import annotations

import copy
import random
from typing import Any


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """Return a conversation that contains this text in all fields, as the body of each conversation API."""
    function = {"name": "look", "description": text, "parameters": {"type": "object", "description": text}}
    called = {"name": "look", "arguments": {text: text}}
    schema = function["parameters"]
    return {
        "/v1/chat/completions": {
            "messages": [
                {"role": "user", "content": text},
                {
                    "role": "assistant",
                    "content": text,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
                },
                {"role": "tool", "content": text, "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": function}],
            "max_tokens": 1,
        },
        "/v1/responses": {
            "instructions": text,
            "input": [
                {"role": "user", "content": text},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": text},
            ],
            "tools": [{"type": "function", **function}],
            "max_output_tokens": 1,
        },
        "/v1/messages": {
            "system": text,
            "messages": [
                {"role": "user", "content": text},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {text: text}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": text}]},
            ],
            "tools": [{"name": "look", "description": text, "input_schema": schema}],
            "max_tokens": 1,
        },
        "/api/chat": {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": text, "tool_calls": [{"function": called}]},
                {"role": "tool", "content": text},
            ],
            "tools": [{"type": "function", "function": function}],
            "stream": False,
            "options": {"num_predict": 1},
        },
        "/api/generate": {"prompt": text, "system": text, "stream": False, "options": {"num_predict": 1}},
    }


OTHERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "stop": ["b"], "logprobs": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "x", "text": "y"}]},
    "/v1/messages/count_tokens": {"system": "a", "messages": [{"role": "user", "content": "b"}]},
    "/v1/embeddings": {"input": ["a", [1, 2]], "dimensions": 4, "encoding_format": "float"},
    "/api/embed": {"input": ["a", "b"], "truncate": True},
    "/v1/rerank": {"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/apply-template": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""Bodies of the other APIs."""

OPTIONS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stream": True,
    "stop": "b",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "format": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "tool_choice": {"type": "function", "name": "look"},
    "reasoning": {"effort": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "speculation": {"drafter": "suffix", "max_draft": 3},
    "logit_bias": {"1": 2},
    "metadata": {"a": "b"},
}
"""Fields that change a reply. Each API knows some of them."""

_ODD: list[Any] = [
    *(None, True, 0, -1, 1, 16.0, 0.5, 2**63, -(2**70), 1e999, "", "a", "\ud800", "auto", "text", "a" * 300),
    *([], {}, [[]], ["a"], {"a": {}}, [{"type": "text", "text": "a"}], {"type": "object"}),
]


def altered(body: dict[str, Any], dice: random.Random) -> Any:
    """Return a copy of a body with one to three values replaced, removed, duplicated or exchanged."""
    whole = {"body": copy.deepcopy(body)}
    if dice.random() < 0.5:
        name = dice.choice(sorted(OPTIONS))
        whole["body"][name] = copy.deepcopy(OPTIONS[name])
    for _ in range(dice.randint(1, 3)):
        if not (places := _places(whole["body"])):
            break
        holder, place = dice.choice(places)
        change = dice.randrange(5)
        if change == 0:
            del holder[place]
        elif change == 1 and isinstance(holder, list):
            holder.insert(place, copy.deepcopy(holder[place]))
        elif change == 2:
            other, where = dice.choice(_places(whole))
            holder[place] = copy.deepcopy(other[where])
        else:
            holder[place] = copy.deepcopy(dice.choice(_ODD))
    return whole["body"]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return the location of each nested value, as its container and its key or index."""
    keys = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in ((value, key), *_places(value[key]))]
