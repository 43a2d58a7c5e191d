"""Anthropic's threads are refused in the way that makes its clients continue without them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lazy import anthropic
from tests.support.running import Serving, serving
from tests.support.scripted import scripted

CHAT = [{"role": "user", "content": "go"}]
DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_error_has_the_details(served: Serving, path: str, thread: dict[str, Any]) -> None:
    body = {"messages": CHAT, "thread": thread, **({} if "count" in path else {"max_tokens": 2})}
    answer = served.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["details"] == DETAILS
    assert served.post(path, {**body, "thread": None}).status_code == 200


def test_other_errors_have_none(served: Serving) -> None:
    assert "details" not in served.post("/v1/messages", {"messages": [], "max_tokens": 2}).json()["error"]


def test_the_tool_runner_of_anthropics_sdk_goes_on_without_a_thread() -> None:
    def ping(text: str) -> str:
        """Answer.

        Args:
            text: Anything.
        """
        return f"pong {text}"

    call = '<tool_call>\n{"name": "ping", "arguments": {"text": "a"}}\n</tool_call>'
    with serving(scripted(call)) as it:
        client = anthropic.Anthropic(base_url=it.address, api_key="none", max_retries=0)
        runner = client.beta.messages.tool_runner(
            model="toy", max_tokens=200, tools=[anthropic.beta_tool(ping)], messages=CHAT, max_iterations=2
        )
        replies = [[block.type for block in message.content] for message in runner]
    assert replies == [["tool_use"], ["tool_use"]]
