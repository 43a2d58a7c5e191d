"""Replayed requests of agents, and the parts of the answer that each agent needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.agents import (
    CLAUDE,
    CLAUDE_CALL,
    CLAUDE_HEADERS,
    CLAUDE_PATH,
    CLAUDE_QUOTA,
    CODEX,
    CODEX_CALL,
    CODEX_HEADERS,
    CODEX_NAMESPACED,
    COPILOT,
    OPEN_WEBUI,
    OPEN_WEBUI_OLLAMA,
    OPEN_WEBUI_TITLE,
)
from tests.support.running import Serving, serving
from tests.support.scripted import scripted

THOUGHT = "<think>\nI look.\n</think>\n\n"


def streamed(it: Serving, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    answer = it.post(path, {"model": "toy", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_codex() -> None:
    """Codex reads `response.created`, whole items, deltas of text, and `response.completed` with its usage."""
    with serving(scripted(THOUGHT + CODEX_CALL)) as it:
        assert it.get("/v1/models").status_code == 200
        found = streamed(it, "/v1/responses", CODEX, **CODEX_HEADERS)
        assert found[0]["type"] == "response.created"
        reasoning, call = (event["item"] for event in found if event["type"] == "response.output_item.done")
        assert "".join(e["delta"] for e in found if e["type"] == "response.reasoning_text.delta") == "I look."
        assert (call["name"], json.loads(call["arguments"])) == ("exec_command", {"cmd": "ls"})
        last = found[-1]
        assert last["type"] == "response.completed"
        assert last["response"]["id"].startswith("resp_")
        counts = last["response"]["usage"]
        assert counts["total_tokens"] == counts["input_tokens"] + counts["output_tokens"]
        assert isinstance(counts["input_tokens_details"]["cached_tokens"], int)
        assert counts["output_tokens_details"]["reasoning_tokens"] > 0
        sent = [
            {**reasoning, "encrypted_content": None},
            {k: call[k] for k in ("type", "name", "arguments", "call_id")},
        ]
        sent.append({"type": "function_call_output", "call_id": call["call_id"], "output": "src"})
        again = streamed(it, "/v1/responses", CODEX | {"input": [*CODEX["input"], *sent]}, **CODEX_HEADERS)
        assert again[-1]["type"] == "response.completed"
        probe = streamed(it, "/v1/responses", {"input": [], "max_output_tokens": 1, "stream": True, "store": False})
        assert probe[-1]["type"] == "response.incomplete"


def test_codex_finds_the_tools_of_its_servers() -> None:
    """A call of a function in a namespace has the inner name and the namespace, and Codex sends both back."""
    with serving(scripted(CODEX_NAMESPACED)) as it:
        found = streamed(it, "/v1/responses", CODEX)
        kinds = ("response.output_item.added", "response.output_item.done")
        call, done = (event["item"] for event in found if event["type"] in kinds)
        assert (call["name"], call["namespace"]) == (done["name"], done["namespace"]) == ("search", "mcp__docs")
        assert [tool["name"] for tool in found[0]["response"]["tools"]] == [
            "exec_command",
            "apply_patch",
            "mcp__docs__search",
        ]
        result = {"type": "function_call_output", "call_id": done["call_id"], "output": "src"}
        again = streamed(it, "/v1/responses", CODEX | {"input": [*CODEX["input"], done, result]})
        assert again[-1]["type"] == "response.completed"


def test_claude_code() -> None:
    with serving(scripted(THOUGHT + CLAUDE_CALL)) as it:
        assert it.request("HEAD", "/").status_code == 200
        assert it.request("HEAD", "/v1/models/toy").status_code == 200
        assert it.request("OPTIONS", "/v1/messages").status_code == 204
        assert it.post(CLAUDE_PATH, {"model": "toy", **CLAUDE_QUOTA}, headers=CLAUDE_HEADERS).status_code == 200
        counted = {name: CLAUDE[name] for name in ("messages", "system", "tools", "thinking")}
        tokens = it.post("/v1/messages/count_tokens?beta=true", {"model": "toy", **counted}).json()["input_tokens"]
        found = streamed(it, CLAUDE_PATH, CLAUDE, **CLAUDE_HEADERS)
        assert found[0]["message"]["usage"]["input_tokens"] == tokens
        blocks = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
        assert blocks == ["thinking", "tool_use"]
        deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
        assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"command": "ls"}
        assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        whole = it.post(CLAUDE_PATH, {"model": "toy", **CLAUDE, "stream": False}).json()
        call = whole["content"][1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "src", "is_error": False}
        turn = [{"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}]
        assert streamed(it, CLAUDE_PATH, CLAUDE | {"messages": [*CLAUDE["messages"], *turn]}, **CLAUDE_HEADERS)


def test_instructions_of_claude_code_do_not_change_its_prefix(talker: Serving) -> None:
    """The billing header changes with every request, but the prompt must not change."""
    changed = json.loads(json.dumps(CLAUDE["system"]).replace("fa690", "0b1c2"))
    counts = [
        talker.post("/v1/messages", {**CLAUDE, "system": system, "stream": False, "max_tokens": 1, "tools": []})
        for system in (CLAUDE["system"], changed, CLAUDE["system"][1:])
    ]
    texts = {(answer.json()["usage"]["input_tokens"], str(answer.json()["content"])) for answer in counts}
    assert len(texts) == 1


def test_copilot() -> None:
    """Copilot checks the version, reads each model's `/api/show`, and then uses OpenAI's API."""
    with serving(scripted("It is src.")) as it:
        version = it.get("/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)
        (listed,) = it.get("/api/tags").json()["models"]
        shown = it.post("/api/show", {"model": listed["model"]}).json()
        info = shown["model_info"]
        assert info[f"{info['general.architecture']}.context_length"] == 2048
        assert info["general.basename"] == "toy"
        assert "tools" in shown["capabilities"]
        assert "vision" not in shown["capabilities"]
        found = streamed(it, "/v1/chat/completions", COPILOT)
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in found[:-1]) == "It is src."
        assert found[-1]["usage"]["completion_tokens"] > 0


def test_open_webui_with_openais_api() -> None:
    """Open WebUI lists the models, reads the deltas and the usage of a stream, and asks for a title."""
    key = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "a%20b"}
    with serving(scripted(THOUGHT + "It is noon.")) as it:
        assert it.get("/v1/models", headers=key).json()["data"][0]["id"] == "toy"
        found = streamed(it, "/v1/chat/completions", OPEN_WEBUI, **key)
        deltas = [choice["delta"] for event in found for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "It is noon."
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I look."
        assert found[-1]["usage"]["total_tokens"] > 0
        title = it.post("/v1/chat/completions", {"model": "toy", **OPEN_WEBUI_TITLE}, headers=key).json()
        assert title["choices"][0]["message"]["content"] == "It is noon."


def test_open_webui_with_ollamas_api() -> None:
    """Open WebUI merges `/api/tags` with `/api/ps` by `model`, and reads the lines of a chat."""
    with serving(scripted("It is noon.")) as it:
        assert it.get("/api/version").json()["version"]
        (listed,), (loaded,) = (it.get(f"/api/{name}").json()["models"] for name in ("tags", "ps"))
        assert listed["model"] == loaded["model"]
        assert loaded["expires_at"]
        answer = it.post("/api/chat", {"model": listed["model"], **OPEN_WEBUI_OLLAMA})
        assert answer.status_code == 200, answer.text
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == "It is noon."
        assert lines[-1]["done"] is True
        assert lines[-1]["eval_count"] > 0
        assert it.post("/api/embed", {"model": "toy", "input": ["a"], "truncate": True}).status_code == 200


@pytest.mark.parametrize("refuses", ["system", "twice"])
def test_instructions_that_come_late_are_moved_if_the_template_refuses_them(refuses: str) -> None:
    """Codex sends such messages after it has compacted a conversation."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "{% if 'twice' == '"
        + refuses
        + "' and not loop.first and m.role == loop.previtem.role %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    with serving(scripted("yes", template)) as it:
        items = [
            {"role": "user", "content": "a"},
            {"role": "developer", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        made = it.post("/v1/responses", {"input": items, "instructions": "d", "max_output_tokens": 1}).json()
        text = "<system>d\n\nb<user>a\n\nc"
        assert made["usage"]["input_tokens"] == it.post("/tokenize", {"prompt": text}).json()["count"]
        chat = [{"role": "system", "content": "d"}, *items]
        made = it.post("/v1/chat/completions", {"messages": chat, "max_tokens": 1}).json()
        assert made["usage"]["prompt_tokens"] == it.post("/tokenize", {"prompt": text}).json()["count"]
