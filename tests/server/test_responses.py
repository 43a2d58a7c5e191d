"""/v1/responses through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.apis.responses_request import MessageItem, ResponsesRequest, chat_messages_of
from paceline.server.apis.stored import ResponseStore, StoredResponse, estimated_bytes
from paceline.server.compat import placeholder_for
from paceline.server.errors import ApiError
from tests.support.calling import SCHEMA, THINKS, user
from tests.support.running import Serving, serving
from tests.support.scripted import fail_before_the_end, scripted

TOOL: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


def alone(plain: LLM, chat: list[dict[str, str]], **changes: Any) -> Any:
    return plain.generate(chat, Sampling(**{"max_new_tokens": 16, **changes}))


def test_a_response_equals_the_text_of_the_library(served: Serving, plain: LLM) -> None:
    chat = [{"role": "system", "content": "be brief"}, user("abc abc")]
    given: list[Any] = [{}, {"temperature": 1.0, "top_p": 0.9}]
    for how in given:
        made = served.openai.responses.create(
            model="toy",
            instructions="be brief",
            input="abc abc",
            max_output_tokens=16,
            extra_body={"seed": 5},
            **how,
        )
        whole = alone(plain, chat, seed=5, **how)
        assert made.output_text == whole.text
        cut = whole.finish_reason == "length"
        assert (made.status, made.object) == ("incomplete" if cut else "completed", "response")
        assert (made.incomplete_details is not None) == cut
        assert made.usage is not None
        assert (made.usage.input_tokens, made.usage.output_tokens) == (whole.prompt_tokens, len(whole.token_ids))
        assert made.usage.total_tokens == whole.prompt_tokens + len(whole.token_ids)


def test_input_items_are_messages(served: Serving, plain: LLM) -> None:
    items: Any = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "ab"}, {"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "?"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d", "annotations": []}], "id": "m"},
        user("e"),
    ]
    chat = [
        {"role": "system", "content": "be\n\nbrief"},
        user("ab\nc"),
        {"role": "assistant", "content": "d"},
        user("e"),
    ]
    made = served.openai.responses.create(model="toy", input=items, max_output_tokens=16)
    assert made.output_text == alone(plain, chat).text


def test_tools_that_take_text_are_functions_and_references_are_refused(served: Serving) -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+ a"}
    found = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    body = ResponsesRequest.model_validate({"model": "m", "input": [call, found]})
    called, result = (message.as_dict() for message in chat_messages_of(body.items))
    assert result["content"] == "done"
    assert called["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "+ a"}'}
    refused = served.post("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert refused.status_code == 400
    assert "Send the item itself" in refused.json()["error"]["message"]


def test_parts_that_are_not_text_leave_a_note_in_history_and_results(served: Serving) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,eA=="}
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
        {"type": "web_search_call", "id": "w", "action": {"query": "x"}},
        {"type": "computer_call_output", "call_id": "c", "output": {"image_url": "y"}},
        {"type": "function_call", "call_id": "d", "name": "look", "arguments": "{}", "namespace": "mcp__docs"},
        {"type": "function_call_output", "call_id": "d", "output": [image]},
    ]
    body = ResponsesRequest.model_validate({"input": items, "reasoning": {"effort": "max"}})
    asked, worked, result = (message.as_dict() for message in chat_messages_of(body.items))
    assert asked["content"] == f"a\n{placeholder_for('input_image')}"
    assert worked["content"] == f"{placeholder_for('web_search_call')}\n{placeholder_for('computer_call_output')}"
    assert worked["tool_calls"][0]["function"]["name"] == "mcp__docs__look"
    assert result["content"] == placeholder_for("input_image")
    answer = served.post("/v1/responses", {"input": [items[1], user("a")], "max_output_tokens": 1})
    assert answer.status_code in (200, 400)  # the toy's alphabet has no brackets
    assert "input.0" not in answer.text


def test_a_conversation_goes_on(served: Serving, plain: LLM) -> None:
    from openai import BadRequestError, NotFoundError

    client = served.openai
    first = client.responses.create(model="toy", input="abc", max_output_tokens=16)
    second = client.responses.create(model="toy", input="d", max_output_tokens=16, previous_response_id=first.id)
    chat = [user("abc"), {"role": "assistant", "content": first.output_text}, user("d")]
    assert second.output_text == alone(plain, chat).text
    assert second.previous_response_id == first.id
    third = client.responses.create(model="toy", input="e", max_output_tokens=4, previous_response_id=second.id)
    chat += [{"role": "assistant", "content": second.output_text}, user("e")]
    assert third.output_text == alone(plain, chat, max_new_tokens=4).text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    (item,) = client.responses.input_items.list(second.id).data
    assert json.loads(item.model_dump_json())["content"][0]["text"] == "d"
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(BadRequestError, match="not stored") as caught:
        client.responses.create(model="toy", input="f", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_response_with_store_false_is_not_stored(served: Serving) -> None:
    made = served.openai.responses.create(model="toy", input="abc", max_output_tokens=2, store=False)
    assert served.get(f"/v1/responses/{made.id}").status_code == 404


def test_the_store_has_a_limit() -> None:
    store = ResponseStore(max_bytes=100, max_count=3)

    def put(name: str, size: int, previous: str | None = None) -> None:
        store.put(StoredResponse({"id": name}, [MessageItem(role="user", content="")], previous, size))

    put("a", 40)
    put("b", 40, "a")
    assert [r.document["id"] for r in store.conversation("b", 80)] == ["a", "b"]
    with pytest.raises(ApiError, match="too long"):
        store.conversation("b", 79)
    put("c", 40)
    assert store.bytes == 80
    with pytest.raises(ApiError, match="'b' is not stored"):  # "a" was read after it
        store.get("b")
    put("large", 101)
    assert store.bytes == 80
    for name in "defg":
        put(name, 1)
    assert store.bytes == 3
    store.delete("g")
    assert store.bytes == 2
    assert estimated_bytes('{"a": {}}') > 2000


def events(it: Serving, **asked: Any) -> list[dict[str, Any]]:
    body = {"input": "go", "stream": True, **asked}
    lines = it.post("/v1/responses", body).text.strip().split("\n\n")
    found = []
    for part in lines:
        name, data = part.split("\n", 1)
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_the_events_of_a_stream_are_in_order() -> None:
    with serving(scripted(THINKS)) as it:
        found = events(it, tools=[TOOL], max_output_tokens=300)
        kinds = [event["type"].removeprefix("response.") for event in found]
        once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
        assert once == [
            *("created", "in_progress"),
            *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
            *("content_part.done", "output_item.done"),
            *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
            *("content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
            *("output_item.done", "completed"),
        ]
        whole = found[-1]["response"]
        reasoning, message, call = whole["output"]
        assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == whole["output"]
        assert [event["output_index"] for event in found if event["type"] == "response.output_item.done"] == [0, 1, 2]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "I add."}]
        assert message["content"][0]["text"] == "It is:"
        assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 7})
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        for kind, key, wanted in (
            ("output_text.delta", "delta", "It is:"),
            ("reasoning_text.delta", "delta", "I add."),
            ("function_call_arguments.delta", "delta", call["arguments"]),
        ):
            assert "".join(e[key] for e in found if e["type"] == f"response.{kind}") == wanted
        alone = it.openai.responses.create(input="go", tools=[TOOL], max_output_tokens=300, model="toy")
        assert [item.type for item in alone.output] == ["reasoning", "message", "function_call"]
        back: Any = [user("go"), *(item.model_dump() for item in alone.output)]
        back.append({"type": "function_call_output", "call_id": call["call_id"], "output": "8"})
        assert it.openai.responses.create(input=back, model="toy", max_output_tokens=1).usage is not None


def test_the_client_reads_the_stream() -> None:
    with (
        serving(scripted("Well.")) as it,
        it.openai.responses.stream(model="toy", input="go", max_output_tokens=50) as stream,
    ):
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert deltas == stream.get_final_response().output_text == "Well."


def test_formats_and_forced_calls(talker: Serving) -> None:
    pytest.importorskip("llguidance")
    client = talker.openai
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(model="talker", input="go", max_output_tokens=60, text=form)
    assert set(json.loads(made.output_text)) == {"a"}
    choices: list[Any] = ["required", {"type": "function", "name": "add"}]
    choices.append({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]})
    for choice in choices:
        tools: Any = [{"type": "web_search"}, TOOL, {"type": "namespace", "name": "x", "tools": []}]
        made = client.responses.create(
            model="talker", input="go", max_output_tokens=90, tools=tools, tool_choice=choice
        )
        (call,) = made.output
        assert call.type == "function_call"
        assert set(json.loads(call.arguments)) == {"a"}
        assert [tool.type for tool in made.tools] == ["function"]


def test_logprobs(served: Serving) -> None:
    made = served.openai.responses.create(model="toy", input="abc", max_output_tokens=3, top_logprobs=2)
    (content,) = made.output[0].content  # type: ignore[union-attr]
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert [len(each.top_logprobs) for each in content.logprobs] == [2, 2, 2]
    assert "".join(each.token for each in content.logprobs) == made.output_text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"type": 5}]}, "input.0.type"),
        ({"reasoning": {"effort": "great"}}, "reasoning.effort"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a" * 300}, "messages"),
    ],
    ids=str,
)
def test_refusals(served: Serving, body: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/responses", {"input": "abc", "max_output_tokens": 2, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_an_error_in_a_stream_fails_the_response() -> None:
    with serving(scripted("Once upon a time")) as it:
        fail_before_the_end(it.llm, "Once upon a time")
        found = events(it)
    assert (found[-1]["type"], found[-1]["response"]["status"]) == ("response.failed", "failed")
    assert found[-1]["response"]["error"]["code"] == "internal_error"
