"""/v1/messages. Anthropic's own client reads whole replies and streams in test_blocks_of_a_reply_and_back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.apis.messages import MessagesRequest, chat_prompt
from paceline.server.compat import placeholder_for
from paceline.server.errors import ApiError
from paceline.server.images import read_images
from paceline.server.limits import Settings
from tests.support.calling import SCHEMA, THINKS, user
from tests.support.plain_anthropic import PlainAnthropic
from tests.support.running import Serving, serving
from tests.support.scripted import fail_before_the_end, scripted
from tests.support.toys import toy_llm

TOOL: Any = {"name": "add", "input_schema": SCHEMA}


def own_client(it: Serving, **more: Any) -> Any:
    anthropic = pytest.importorskip("anthropic")
    how = {"base_url": it.client.base_url, "api_key": it.key, "http_client": it.client, "max_retries": 0}
    return anthropic.Anthropic(**{**how, **more})


@pytest.fixture(scope="module")
def client(served: Serving) -> Any:
    return PlainAnthropic(served)


def test_a_message_equals_the_text_of_the_library(client: Any, plain: LLM) -> None:
    blocks = [{"type": "text", "text": "be"}, {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]
    system = [*blocks, {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}]
    chat = [{"role": "system", "content": "be\n\nbrief"}, user("abc abc")]
    given: list[Any] = [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}]
    for how in given:
        made = client.messages.create(
            model="toy", system=system, messages=[user("abc abc")], max_tokens=16, extra_body={"seed": 5, **how}
        )
        whole = plain.generate(chat, Sampling(max_new_tokens=16, seed=5, **how))
        assert made.content[0].text == whole.text
        stop = {"length": "max_tokens", "eos": "end_turn"}[whole.finish_reason]
        assert (made.stop_reason, made.stop_sequence, made.role) == (stop, None, "assistant")
        assert made.usage.input_tokens + made.usage.cache_read_input_tokens == whole.prompt_tokens
        assert made.usage.output_tokens == len(whole.token_ids)
        counted = client.messages.count_tokens(model="toy", system=system, messages=[user("abc abc")])
        assert counted.input_tokens == whole.prompt_tokens


def test_a_stop_sequence_is_named(client: Any, plain: LLM) -> None:
    text = plain.generate([user("abc")], Sampling(max_new_tokens=16)).text
    stops = ["ZZ", text[5:7]]
    made = client.messages.create(model="toy", messages=[user("abc")], max_tokens=16, stop_sequences=stops)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", text[5:7])
    assert made.content[0].text == text[: text.index(text[5:7])]


def test_a_reply_continues_the_assistants_message(client: Any, plain: LLM) -> None:
    begun = [user("abc"), {"role": "assistant", "content": "so a"}]
    made = client.messages.create(model="toy", messages=begun, max_tokens=8)
    prompt = "<user:abc><assistant:so a"
    assert made.content[0].text == plain.generate(prompt, Sampling(max_new_tokens=8), raw=True).text


def test_a_context_that_is_full_says_so(client: Any) -> None:
    made = client.messages.create(model="toy", messages=[user("abc")], max_tokens=5000, extra_body={"timeout": 60})
    assert made.stop_reason in ("model_context_window_exceeded", "end_turn")


def test_blocks_of_a_reply_and_back() -> None:
    with serving(scripted(THINKS)) as it:
        client = own_client(it)
        asked: Any = {"model": "toy", "max_tokens": 300, "tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}
        made = client.messages.create(messages=[user("go")], **asked)
        assert [block.type for block in made.content] == ["thinking", "text", "tool_use"]
        thinking, text, call = made.content
        assert (thinking.thinking, text.text, call.input) == ("I add.", "It is:", {"a": 7})
        assert thinking.signature
        assert made.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "8"}]}
        back = [
            user("go"),
            {"role": "assistant", "content": [block.model_dump() for block in made.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ]
        assert client.messages.create(messages=back, **asked).usage.output_tokens > 0
        with client.messages.stream(messages=[user("go")], **asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert (final.content[2].input, final.stop_reason) == ({"a": 7}, "tool_use")
        assert final.usage.output_tokens == made.usage.output_tokens
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_results_are_messages_of_their_own(served: Serving, plain: LLM) -> None:
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": True}
    chat = [user("abc"), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    made = PlainAnthropic(served).messages.create(model="toy", messages=chat, max_tokens=8)
    prompt = "<user:abc><assistant:><tool:Error: x><a:"  # the toy's alphabet has no capitals
    assert made.content[0].text == plain.generate(prompt, Sampling(max_new_tokens=8), raw=True).text


def test_forced_calls_and_formats(talker: Serving) -> None:
    pytest.importorskip("llguidance")
    client = PlainAnthropic(talker)
    asked: Any = {"model": "talker", "max_tokens": 90, "messages": [user("go")]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
        made = client.messages.create(tools=[TOOL], tool_choice=choice, **asked)
        assert (made.stop_reason, set(vars(made.content[0].input))) == ("tool_use", {"a"})
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    made = client.messages.create(output_config=form, **asked)
    assert set(json.loads(made.content[0].text)) == {"a"}


IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
BILLED = "x-anthropic-billing-header: cch=1;"


def converted(**body: Any) -> list[dict[str, Any]]:
    prompt = chat_prompt(MessagesRequest.model_validate({"max_tokens": 1, **body}))
    return [message.as_dict() for message in prompt.messages]


def test_parts_that_are_not_text_leave_a_note_in_history_and_results() -> None:
    call = {"type": "tool_use", "id": "c", "name": "Read", "input": {}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "eA=="}}
    chat = converted(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE, pdf]},
            {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "x"}, call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]},
        ]
    )
    assert [message["content"] for message in chat] == [
        f"what?\n{placeholder_for('image')}\n{placeholder_for('document')}",
        placeholder_for("server_tool_use"),
        placeholder_for("image"),
    ]
    new = {"role": "user", "content": [{"type": "text", "text": "this:"}, IMAGE]}
    body = MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 1, "messages": [user("a"), {"role": "assistant", "content": "b"}, new]}
    )
    with pytest.raises(ApiError, match=r"messages.2.content.1: .*'image'. This model reads text only"):
        read_images(toy_llm(), Settings(), chat_prompt(body))


@pytest.mark.parametrize("system", [BILLED + "\n\nBe brief.", [{"type": "text", "text": BILLED + "\nBe brief."}]])
def test_instructions_after_the_billing_header_stay(system: Any) -> None:
    assert converted(messages=[user("a")], system=system)[0] == {"role": "system", "content": "Be brief."}
    assert converted(messages=[user("a")], system=BILLED)[0]["role"] == "user"


def test_thinking_can_be_disabled() -> None:
    with serving(
        scripted("yes", "{# </think> #}{% if enable_thinking is false %}no{% else %}yes it is{% endif %}")
    ) as it:
        client = PlainAnthropic(it)

        def count(**how: Any) -> int:
            return int(client.messages.count_tokens(model="toy", messages=[user("go")], **how).input_tokens)

        assert count(thinking={"type": "disabled"}) != count()
        assert (
            count(thinking={"type": "enabled", "budget_tokens": 2048})
            == count(thinking={"type": "adaptive"})
            == count()
        )


@pytest.mark.parametrize(
    ("body", "status", "kind", "named"),
    [
        ({"nonsense": 1}, 400, "invalid_request_error", "nonsense"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "messages.0"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
    ],
    ids=str,
)
def test_refusals(served: Serving, body: dict[str, Any], status: int, kind: str, named: str) -> None:
    answer = served.post("/v1/messages", {"messages": [user("abc")], "max_tokens": 2, **body})
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert named in told["error"]["message"]
    assert told["request_id"] == answer.headers["x-request-id"]


def test_an_error_in_a_stream_is_an_event() -> None:
    body = {"messages": [user("go")], "max_tokens": 99, "stream": True}
    with serving(scripted("Once upon a time")) as it:
        fail_before_the_end(it.llm, "Once upon a time")
        text = it.post("/v1/messages", body).text
    assert text.startswith("event: message_start\n")
    last = text.strip().split("\n\n")[-1]
    assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')


def test_anthropics_key_and_list(talker: Serving) -> None:
    with serving(talker.llm, api_keys=("secret",)) as it:
        headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        (listed,) = it.get("/v1/models", headers=headers).json()["data"]
        assert listed["id"] == "toy"
        assert it.get("/v1/models/toy", headers=headers).json()["display_name"] == "toy"
        assert it.get("/v1/models", headers={**headers, "x-api-key": "wrong"}).status_code == 401


@pytest.mark.slow
def test_the_client_sends_its_key_and_reads_the_list(talker: Serving) -> None:
    with serving(talker.llm, api_keys=("secret",)) as it:
        assert own_client(it).models.list().data[0].id == "toy"
        assert own_client(it).models.retrieve("toy").display_name == "toy"
        with pytest.raises(pytest.importorskip("anthropic").AuthenticationError):
            own_client(it, api_key="wrong").models.list()
