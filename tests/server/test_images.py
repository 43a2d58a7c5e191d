"""Images in the bodies of all APIs, with a toy vision model."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from paceline.errors import InvalidPrompt
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server import images
from paceline.server.apis.responses_request import image_chars
from paceline.server.errors import ApiError
from paceline.server.image_urls import fetch
from paceline.server.images import read_images
from paceline.server.limits import Settings
from paceline.server.request import ChatMessage, ChatPrompt, SentImage
from paceline.server.worker import Busy, WorkerLimits
from paceline.text.sandbox import ABANDONED
from paceline.text.template_text import TemplateText, concat
from paceline.vision import encoder, picture
from paceline.vision.picture import read_picture
from tests.support.pictures import SVG, data_url, encoded, noise, png_bomb
from tests.support.running import Serving, serving
from tests.support.toy_vision import ROWS, TEMPLATE, TOO_NARROW, seeing_llm

pytestmark = pytest.mark.forks
FIRST, SECOND = encoded(noise(seed=1)), encoded(noise(seed=2), "JPEG")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(data)}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return seeing_llm()


@pytest.fixture(scope="module")
def it(llm: LLM) -> Iterator[Serving]:
    with serving(llm, max_image_bytes=200_000, max_images=6) as it:
        yield it


def reply(it: Serving, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """Return the text and the number of prompt tokens, as an API reports them."""
    lengths = {"/api/chat": {"options": {"num_predict": 8}}, "/v1/responses": {"max_output_tokens": 8}}
    lengths["/api/generate"] = lengths["/api/chat"]
    answer = it.post(path, {"model": "toy", "stream": False, **lengths.get(path, {"max_tokens": 8}), **body})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path.startswith("/api/"):
        text = found["message"]["content"] if "message" in found else found["response"]
        return text, found["prompt_eval_count"]
    usage = found["usage"]
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        return "".join(one.get("text", "") for one in found["content"]), usage["input_tokens"] + cached
    if path == "/v1/responses":
        return found["output"][-1]["content"][0]["text"], usage["input_tokens"]
    return found["choices"][0]["message"]["content"], usage["prompt_tokens"]


def test_every_api_shows_the_model_the_same_image(it: Serving, llm: LLM) -> None:
    chat = [{"role": "user", "content": [{"type": "image", "image": FIRST}, {"type": "text", "text": "what?"}]}]
    whole = llm.generate(chat, Sampling(max_new_tokens=8))
    expected = whole.text, whole.prompt_tokens
    assert whole.prompt_tokens == len(llm.encode([{"role": "user", "content": "what?"}])) + ROWS
    chat_completion = {"messages": [user(url(FIRST), "what?")]}
    item = {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"}
    ollama = {"messages": [{"role": "user", "content": "what?", "images": [b64(FIRST)]}]}
    for path, body in [
        ("/v1/chat/completions", chat_completion),
        ("/v1/chat/completions", {"messages": [user({"type": "image_url", "image_url": data_url(FIRST)}, "what?")]}),
        ("/v1/messages", {"messages": [user(block(FIRST), "what?")]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [item, {"type": "input_text", "text": "what?"}]}]}),
        ("/api/chat", ollama),
        ("/api/generate", {"prompt": "what?", "images": [b64(FIRST)]}),
    ]:
        assert reply(it, path, body) == expected, path
    other = reply(it, "/v1/chat/completions", {"messages": [user(url(SECOND), "what?")]})
    assert (other[0] == expected[0], other[1]) == (False, expected[1])
    assert reply(it, "/v1/chat/completions", chat_completion) == expected


def test_an_image_in_a_tool_result_is_seen(it: Serving) -> None:
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "shot:"}, block(FIRST)]}
    sent = {"messages": [user("a"), {"role": "assistant", "content": [use]}, user(result)]}
    _, with_image = reply(it, "/v1/messages", sent)
    result["content"] = [{"type": "text", "text": "shot:"}]
    assert with_image == reply(it, "/v1/messages", sent)[1] + ROWS
    counted = it.post("/v1/messages/count_tokens", {"model": "toy", "messages": [user(block(FIRST), "a")]}).json()
    assert counted["input_tokens"] == reply(it, "/v1/messages", {"messages": [user(block(FIRST), "a")]})[1]
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c"}
    image = {"type": "input_image", "image_url": data_url(FIRST)}
    sizes = [
        reply(it, "/v1/responses", {"input": [{"role": "user", "content": "a"}, called, {**output, "output": shown}]})[
            1
        ]
        for shown in ([image], "")
    ]
    assert sizes[0] == sizes[1] + ROWS


_USER_IMAGES = TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and m.role == 'user'")
"""A template that ignores images in tool results."""
_ONE_USER = "{% for m in messages[1:] if m.role == 'user' %}{{ raise_exception('no') }}{% endfor %}" + _USER_IMAGES
_FOLLOWS, _BEFORE = "[image: see the next message of the user]", "<user>Images of the tool results above:<image><image>"
_LEFT_OUT = "[image left out: this model sees no images in tool results]"


def tool_chat(*more: Any) -> dict[str, Any]:
    """Return a chat with two tool results that have images."""
    calls = [{"id": one, "type": "function", "function": {"name": "look", "arguments": "{}"}} for one in "cd"]
    results = [
        {"role": "tool", "tool_call_id": one, "content": user(*parts)["content"]}
        for one, parts in (("c", ("shot:", url(FIRST))), ("d", (url(SECOND),)))
    ]
    return {"messages": [user("a"), {"role": "assistant", "tool_calls": calls}, *results, *more]}


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ((), "<assistant>"),
        ((user("and?"),), "and?<assistant>"),
        ((user("and", url(FIRST)),), "and<image><assistant>"),
        (({"role": "assistant", "content": "b"}, user(url(FIRST))), "<assistant>b<user><image><assistant>"),
    ],
)
def test_images_of_tool_results_follow_if_the_template_shows_none_there(more: tuple[Any, ...], end: str) -> None:
    llm = seeing_llm(_USER_IMAGES)
    with serving(llm) as it:
        prompt = it.post("/apply-template", tool_chat(*more)).json()["prompt"]
        assert it.post("/v1/chat/completions", {**tool_chat(*more), "max_tokens": 4}).status_code == 200
    assert prompt == f"<user>a<assistant><tool>shot:\n{_FOLLOWS}<tool>{_FOLLOWS}{_BEFORE}{end}"
    assert llm.vision
    assert len(llm.vision.sizes) == 2  # type: ignore[attr-defined]


def test_a_note_replaces_images_of_tool_results_that_the_template_can_show_nowhere() -> None:
    llm = seeing_llm(_ONE_USER)
    with serving(llm) as it:
        prompt = it.post("/apply-template", tool_chat()).json()["prompt"]
        assert it.post("/v1/chat/completions", {**tool_chat(), "max_tokens": 4}).status_code == 200
    assert prompt == f"<user>a<assistant><tool>shot:\n{_LEFT_OUT}<tool>{_LEFT_OUT}<assistant>"


def test_an_image_of_the_user_that_the_template_does_not_show_is_refused() -> None:
    with serving(seeing_llm(TEMPLATE.replace("part.type == 'image'", "false"))) as it:
        answer = it.post("/v1/chat/completions", tool_chat(user(url(FIRST))))
    assert (answer.status_code, "0 marks for 1 images" in answer.text) == (400, True)


def test_python_moves_images_of_tool_results_as_well() -> None:
    llm = seeing_llm(_USER_IMAGES)
    result = {"role": "tool", "content": [{"type": "image", "image": FIRST}]}
    ids = llm.encode([{"role": "user", "content": "a"}, result])
    text = llm.tokenizer.decode(ids, False)
    assert text == f"<user>a<tool>{_FOLLOWS}{_BEFORE[:-14]}{'<image>' * ROWS}<assistant>"


def test_a_model_that_sees_says_so(it: Serving) -> None:
    assert it.get("/v1/models").json()["data"][0]["paceline"]["modalities"] == ["text", "image"]
    assert it.get("/props").json()["modalities"]["vision"] is True
    assert "vision" in it.post("/api/show", {"model": "toy"}).json()["capabilities"]


def test_a_continued_response_still_sees_its_image(it: Serving, llm: LLM) -> None:
    image: Any = {"type": "input_image", "image_url": data_url(FIRST)}
    body = {"model": "toy", "input": [user(image, "a b c " * 50)], "max_output_tokens": 4}
    first = it.post("/v1/responses", body).json()
    listed = it.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert listed[0]["content"][0]["image_url"] == data_url(FIRST)
    assert llm.vision
    before = len(llm.vision.sizes)  # type: ignore[attr-defined]
    more = {"input": "and?", "previous_response_id": first["id"], "max_output_tokens": 4}
    again = it.post("/v1/responses", {"model": "toy", **more}).json()
    assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 4
    assert len(llm.vision.sizes) == before, "an image is encoded once"  # type: ignore[attr-defined]


def test_an_image_that_was_sent_before_comes_from_the_prefix_cache() -> None:
    llm = seeing_llm()
    llm.engine.__dict__["chunk_invariant"] = True  # rounding does not matter in float64
    large = encoded(Image.effect_noise((700, 600), 50))

    def cached(it: Serving, part: dict[str, Any], tail: str) -> int:
        body = {"messages": [user("a b c d " * 8, part, "e f g h " * 8 + tail)], "max_tokens": 2}
        count: int = it.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    with serving(llm, WorkerLimits(prefix_bytes=1 << 26)) as it:
        before = len(llm.encode("<user>" + "a b c d " * 8, raw=True))
        assert cached(it, url(large), "1") == 0
        assert cached(it, url(large), "2") > before + ROWS
        for other in (url(large, detail="low"), url(FIRST)):
            assert before - 4 < cached(it, other, "2") <= before, "only the text before the image is shared"
            assert cached(it, other, "3") > before + ROWS


def test_tokens_and_templates_count_images(it: Serving) -> None:
    body = {"messages": [user(url(FIRST), "<image>")]}
    tokens = it.post("/tokenize", body).json()["tokens"]
    [[token]] = [[one for one in set(tokens) if tokens.count(one) == ROWS]]
    assert tokens.count(token) == ROWS, "the user's text is not a mark"
    assert it.post("/apply-template", body).json()["prompt"].count("<image>") == 2


def test_little_detail_scales_an_image_down(it: Serving, llm: LLM) -> None:
    large = encoded(Image.new("RGB", (1500, 700), "red"))
    for detail, shape in (("low", (512, 239)), ("high", (1500, 700))):
        reply(it, "/v1/chat/completions", {"messages": [user(url(large, detail=detail))]})
        assert llm.vision
        assert llm.vision.sizes[-1] == shape  # type: ignore[attr-defined]


REFUSED: dict[str, tuple[Any, str]] = {
    "no image": (url(b"hello"), "not a PNG"),
    "SVG": (url(SVG), "SVG"),
    "bomb": (url(png_bomb(30_000, 30_000)), "Scale it down"),
    "truncated": (url(FIRST[:200]), "cannot be decoded"),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a*"}}, "not valid base64"),
    "no data": ({"type": "image_url", "image_url": {}}, "has no data"),
    "no object": ({"type": "image_url", "image_url": 5}, "has no data"),
    "null": ({"type": "image_url"}, "has no data"),
    "a path": ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "not a PNG"),
    "file URL": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not valid base64"),
    "remote": ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "--allow-image-urls"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_image_that_cannot_be_used_is_a_clear_400(it: Serving, name: str) -> None:
    part, cause = REFUSED[name]
    answer = it.post("/v1/chat/completions", {"messages": [user("a"), user("look", part)], "max_tokens": 2})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert cause in error["message"]
    assert error["param"] == "messages.1.content.1.image_url"


def test_an_image_that_the_tower_cannot_encode_is_a_clear_400(it: Serving) -> None:
    narrow = url(encoded(Image.new("RGB", TOO_NARROW)))
    answer = it.post("/v1/chat/completions", {"messages": [user(narrow)], "max_tokens": 2})
    assert answer.status_code == 400
    assert "toy cannot encode an image of 1 x 50 pixels" in answer.json()["error"]["message"]


def test_images_of_other_apis_that_cannot_be_used_are_named(it: Serving) -> None:
    bad = b64(b"hello")
    for path, body, param in [
        ("/v1/messages", {"messages": [user(block(b"x"))], "max_tokens": 1}, "messages.0.content.0.source"),
        ("/v1/messages", {"messages": [user({"type": "image", "source": 1})], "max_tokens": 1}, "messages.0.content.0"),
        ("/v1/responses", {"input": [user({"type": "input_image", "file_id": "f"})]}, "input.0.content.0"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["", bad]}]}, "messages.0.images.0"),
        ("/api/chat", {"messages": [{"role": "user", "images": [3]}]}, "messages.0.images.0"),
        ("/api/generate", {"prompt": "a", "images": [bad]}, "images.0"),
        ("/api/generate", {"prompt": "a", "images": [bad], "raw": True}, "images"),
    ]:
        answer = it.post(path, {"model": "toy", **body})
        assert answer.status_code == 400, (path, answer.text)
        assert param in answer.text


def test_count_and_size_of_images_are_limited(it: Serving) -> None:
    many = {"messages": [user(*[url(FIRST)] * 7)]}
    answer = it.post("/v1/chat/completions", many)
    assert (answer.status_code, "more than 6 images" in answer.text) == (400, True)
    large = encoded(noise(size=(300, 300)))  # 350 kB
    answer = it.post("/v1/chat/completions", {"messages": [user(url(large))]})
    assert answer.status_code == 400
    assert "must not exceed 200000 bytes in total" in answer.text
    text = {"messages": [user("a" * 2_200_000, "b" * 2_200_000)]}
    answer = it.post("/v1/chat/completions", text)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large"), "room for images only"


def test_the_oldest_images_are_left_out_of_a_chat_that_is_too_long(llm: LLM) -> None:
    turn = {"role": "user", "content": "a" * 20, "images": [b64(FIRST)]}
    chat = [turn, {"role": "assistant", "content": "b"}] * 5 + [turn]
    with serving(llm, max_prompt=100) as it:
        _, size = reply(it, "/api/chat", {"messages": chat})
    assert 2 * ROWS < size <= 100


def test_a_prompt_that_is_too_long_is_refused_before_an_image_is_encoded(llm: LLM) -> None:
    assert llm.vision
    before = len(llm.vision.sizes)  # type: ignore[attr-defined]
    shown = [url(encoded(noise(seed=seed))) for seed in range(20, 26)]
    with serving(llm, max_prompt=50) as it:
        for parts in (shown * 3, (*shown, "a" * 40)):  # too many rows, and too much text with them
            answer = it.post("/v1/chat/completions", {"messages": [user(*parts)]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert len(llm.vision.sizes) == before  # type: ignore[attr-defined]
        assert it.post("/v1/chat/completions", {"messages": [user(*shown)], "max_tokens": 2}).status_code == 200
    assert len(llm.vision.sizes) == before + len(shown)  # type: ignore[attr-defined]


def test_the_memory_of_encoded_images_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_CACHED", 0)  # only the latest image is kept
    llm = seeing_llm()
    vision: Any = llm.vision
    chats = [[{"role": "user", "content": [{"type": "image", "image": one}]}] for one in (FIRST, SECOND)]
    prompts = [llm.encode(chat) for chat in chats]
    size = prompts[0].images[0].image.nbytes  # type: ignore[attr-defined]
    assert vision.held_bytes == size, "the latest image does not count"
    monkeypatch.setattr(images, "_MAX_HELD_BYTES", size - 1)
    with serving(llm) as it:
        answer = it.post("/v1/chat/completions", {"messages": [user(url(encoded(noise(seed=7))))]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "images_full")
        assert answer.headers["retry-after"]
        assert llm.encode(chats[0]) == prompts[0]
        assert len(vision.sizes) == 2, "nothing was encoded: an image of a prompt is found"
        prompts.clear()
        for seed in range(4):
            body = {"messages": [user(url(encoded(noise(seed=seed))))], "max_tokens": 2}
            assert it.post("/v1/chat/completions", body).status_code == 200, "requests release their images"
            assert it.idle()


def test_images_are_not_read_for_a_client_that_has_left(it: Serving, llm: LLM) -> None:
    gone = threading.Event()
    gone.set()
    part = SentImage(source=data_url(FIRST), param="")
    context = copy_context()
    context.run(ABANDONED.set, gone)
    with pytest.raises(Busy):
        context.run(read_images, llm, Settings(), ChatPrompt(messages=[ChatMessage(role="user", content=[part])]))


def test_the_token_of_images_in_a_text_is_refused(llm: LLM) -> None:
    def encode(text: str) -> list[int]:
        return llm.tokenizer.encode(TemplateText.written(text), special=False)

    assert llm.vision
    text = concat([TemplateText.written("<image>"), "<image>"])
    with pytest.raises(InvalidPrompt, match="stands for a part of an image"):
        llm.vision.prompt(text, [read_picture(FIRST)], encode)


def test_replies_to_images_are_not_recorded(tmp_path: Path) -> None:
    llm = seeing_llm()
    with llm.record(tmp_path / "r.jsonl") as recorder:
        chat = [{"role": "user", "content": [{"type": "image", "image": FIRST}]}]
        llm.generate(chat, Sampling(max_new_tokens=2, ignore_eos=True))
        llm.generate("a", Sampling(max_new_tokens=2, ignore_eos=True))
    assert (recorder.count, recorder.skipped) == (1, 1)


def test_the_log_of_prompts_has_no_data_of_images(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    data = encoded(noise(size=(40, 40)))
    with serving(llm, log_prompts=True) as it, caplog.at_level(logging.INFO, "paceline.server"):
        reply(it, "/v1/chat/completions", {"messages": [user("what?", url(data))]})
    assert "what?" in caplog.text
    assert f"[{len(b64(data))} characters]" in caplog.text
    assert b64(data)[:200] not in caplog.text


def test_decoding_an_image_does_not_delay_other_clients(it: Serving, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    held, reached = threading.Event(), threading.Event()
    decode = picture._decoded

    def slow(*given: Any) -> Any:
        reached.set()
        assert held.wait(30)
        return decode(*given)

    monkeypatch.setattr(picture, "_decoded", slow)
    answers = list[Any]()

    def ask(key: str) -> None:
        body = {"messages": [user("x" * 70_000 if key == "long" else "a", url(FIRST))], "max_tokens": 2}
        answers.append(it.post("/v1/chat/completions", body, headers={"X-Api-Key": key}))

    threads = [threading.Thread(target=ask, args=(key,)) for key in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    assert reached.wait(30)
    began = time.monotonic()
    assert it.post("/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 2}).status_code == 200
    assert it.post("/tokenize", {"prompt": "a" * 100_000}).status_code == 200
    assert not answers, f"others were answered first, after {time.monotonic() - began:.2f} s"
    held.set()
    for thread in threads:
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert read_picture(FIRST).pixels.shape == (16, 24, 3)
    assert image_chars([]) == 0
    with pytest.raises((ApiError, ValueError)):
        fetch("https://example.com", (), 5)
