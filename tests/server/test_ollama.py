"""Ollama's endpoints with Ollama's own client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoints.gguf import open_gguf
from paceline.errors import ModelNotFound
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.models import ModelSource
from paceline.server.worker import Worker
from tests.support.calling import SCHEMA, THINKS, user
from tests.support.gguf_writing import Q, write_gguf
from tests.support.running import Serving, serving, serving_models
from tests.support.scripted import fail_before_the_end, scripted
from tests.support.toys import toy_llm

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


def client_of(it: Serving) -> Any:
    return pytest.importorskip("ollama").Client(it.address)


def refuses(match: str) -> Any:
    return pytest.raises(pytest.importorskip("ollama").ResponseError, match=match)


@pytest.fixture(scope="module")
def client(served: Serving) -> Any:
    return client_of(served)


def test_a_chat_equals_the_text_of_the_library(client: Any, plain: LLM) -> None:
    chat = [{"role": "system", "content": "be"}, user("abc abc")]
    given: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_k": 5, "seed": 5, "num_ctx": 8192}]
    for options in given:
        how = {name: value for name, value in options.items() if name != "num_ctx"}
        whole = plain.generate(chat, Sampling(max_new_tokens=16, **how))
        made = client.chat("toy:latest", chat, options={"num_predict": 16, **options})
        assert (made.message.content, made.message.role, made.done) == (whole.text, "assistant", True)
        assert made.done_reason == {"length": "length", "eos": "stop"}[whole.finish_reason]
        assert (made.prompt_eval_count, made.eval_count) == (whole.prompt_tokens, len(whole.token_ids))
        assert made.total_duration >= made.eval_duration > 0
        lines = list(client.chat("toy", chat, options={"num_predict": 16, **options}, stream=True))
        assert "".join(line.message.content for line in lines) == whole.text
        assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def test_options_as_clients_of_ollama_send_them(client: Any, plain: LLM) -> None:
    chat = [user("abc abc")]
    expected = {
        repeated: plain.generate(chat, Sampling(max_new_tokens=16, repetition_penalty=repeated)).text
        for repeated in (1.0, 1.5)
    }
    assert expected[1.0] != expected[1.5]
    for last, repeated in ((64, 1.5), (-1, 1.5), (0, 1.0)):
        options = {"num_predict": 16, "repeat_penalty": 1.5, "repeat_last_n": last}
        assert client.chat("toy", chat, options=options).message.content == expected[repeated]
        assert client.generate("toy", chat[0]["content"], options=options).response == expected[repeated]
    hot = {"temperature": 5.0, "seed": 3, "num_predict": 16}
    text = plain.generate(chat, Sampling(max_new_tokens=16, temperature=5.0, seed=3)).text
    assert client.chat("toy", chat, options=hot).message.content == text
    long = "abc" * 75
    for asked in ({"num_predict": 0}, {"num_predict": -1}):  # as many as fit
        assert client.chat("toy", [user(long)], options=asked).message == client.chat("toy", [user(long)]).message
        raw = client.generate("toy", long, raw=True, options=asked)
        assert raw.eval_count == len(plain.generate(long, Sampling(max_new_tokens=255), raw=True).token_ids) > 16


def test_prompts(client: Any, plain: LLM) -> None:
    options = {"num_predict": 8}
    made = client.generate("toy", "abc", system="be", options=options)
    chat = [{"role": "system", "content": "be"}, user("abc")]
    assert made.response == plain.generate(chat, Sampling(max_new_tokens=8)).text
    raw = client.generate("toy", "abc", raw=True, options=options)
    assert raw.response == plain.generate("abc", Sampling(max_new_tokens=8), raw=True).text
    lines = list(client.generate("toy", "abc", raw=True, options=options, stream=True))
    assert "".join(line.response for line in lines) == raw.response


def test_without_a_prompt_the_model_is_loaded(client: Any) -> None:
    assert client.chat("toy").done_reason == client.generate("toy").done_reason == "load"
    assert [line.done for line in client.chat("toy", stream=True)] == [True]


def test_thinking_and_tools() -> None:
    with serving(scripted(THINKS)) as it:
        client = client_of(it)
        asked: Any = {"model": "toy", "messages": [user("go")], "tools": [TOOL]}
        made = client.chat(**asked)
        assert (made.message.thinking, made.message.content) == ("I add.", "It is:")
        (call,) = made.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", {"a": 7})
        lines = list(client.chat(**asked, stream=True))
        assert "".join(line.message.thinking or "" for line in lines) == "I add."
        assert [call.function.name for line in lines for call in line.message.tool_calls or ()] == ["add"]
        back = [user("go"), made.message, {"role": "tool", "tool_name": "add", "content": "8"}]
        assert client.chat("toy", back, tools=[TOOL], think="high").eval_count > 0
        counts = [client.chat("toy", [user("go")], think=think).prompt_eval_count for think in (None, True, False)]
        assert counts[0] == counts[1] < counts[2]  # the prompt ends with reasoning that is over
        assert client.generate("toy", "go").thinking == "I add."


def test_formats(talker: Serving) -> None:
    pytest.importorskip("llguidance")
    client = client_of(talker)
    made = client.chat("talker", [user("go")], format=SCHEMA, options={"num_predict": 60})
    assert set(json.loads(made.message.content)) == {"a"}
    made = client.generate("talker", "go", raw=True, format=SCHEMA, options={"num_predict": 60})
    assert set(json.loads(made.response)) == {"a"}


def test_logprobs(client: Any) -> None:
    made = client.chat("toy", [user("abc")], logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert [len(each.top_logprobs) for each in made.logprobs] == [2, 2, 2]
    assert "".join(each.token for each in made.logprobs) == made.message.content


def test_served_models_are_listed_and_described(client: Any, served: Serving) -> None:
    (model,) = client.list().models
    assert model.model == "toy"
    assert len(model.digest) == 64
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("toy", 256)
    shown = client.show("toy")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 256
    version = served.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # the oldest that Copilot accepts
    with serving(scripted("yes")) as it:
        assert client_of(it).show("toy").capabilities == ["completion", "tools", "thinking"]
    for path in ("/", "/api/tags", "/api/version"):
        assert served.request("HEAD", path).status_code == 200


def test_models_are_described_without_loading_them(tmp_path: Path) -> None:
    template = "{% if tools %}{% endif %}<think></think>"
    fields = {"tokenizer.chat_template": template, "general.file_type": 15}
    words = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<s>", "</s>"]
    write_gguf(tmp_path / "m.gguf", "qwen2", kind=Q.Q4_0, fields=fields, tokens=words)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {word: i for i, word in enumerate(words)}}}))
    (folder / "chat_template.jinja").write_text("a template")
    save_file({"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}, folder / "model.safetensors")

    def source(path: Path) -> ModelSource:
        return ModelSource((path.stem,), lambda: pytest.fail("loaded"), 7, path=path)

    paths = tmp_path / "m.gguf", folder, tmp_path / "missing.gguf"
    with serving_models([source(path) for path in paths]) as it:
        client = client_of(it)
        for _ in range(2):
            first, second, third = client.list().models
            about = first.details
            assert (about.format, about.family, about.quantization_level) == ("gguf", "qwen2", "Q4_K_M")
            assert (first.size, third.size) == (paths[0].stat().st_size, 7)
            assert (second.details.format, second.details.family) == ("safetensors", "llama")
            assert second.details.quantization_level == "BF16"
        shown = client.show("m:latest")
        assert shown.capabilities == ["completion", "tools", "insert", "thinking"]
        assert shown.template == template
        assert (shown.modelinfo["qwen2.context_length"], shown.modelinfo["general.basename"]) == (256, "m")
        count = shown.modelinfo["general.parameter_count"]
        assert count == sum(x.numel() for x in open_gguf(paths[0])[1].values())
        assert (about.parameter_size, shown.details.parameter_size) == (f"{count / 1e6:.2f}M",) * 2
        shown = client.show("folder")
        assert shown.modelinfo["llama.context_length"] == 64
        assert (shown.modelinfo["general.parameter_count"], shown.template) == (4, "a template")
        assert shown.capabilities == ["completion", "tools", "insert"]
        assert client.show("missing").capabilities == ["completion"]
        write_gguf(tmp_path / "m.gguf", "llama", kind=Q.F16)
        assert client.list().models[0].details.family == "llama"
        assert client.ps().models == []


def test_models_are_unloaded_as_ollama_stop_does() -> None:
    loads: list[str] = []

    def load() -> Worker:
        loads.append("b")
        return Worker(toy_llm())

    sources = [ModelSource(("a",), lambda: Worker(toy_llm()), stays=True), ModelSource(("b",), load)]
    with serving_models(sources) as it:
        client = client_of(it)

        def loaded() -> list[str]:
            return [model.model for model in client.ps().models]

        def until(names: list[str]) -> bool:
            return any(loaded() == names or time.sleep(0.02) for _ in range(500))

        assert (
            client.generate("b", keep_alive=0).done_reason == client.chat("b", keep_alive="0s").done_reason == "unload"
        )
        assert (loaded(), loads) == (["a"], [])
        client.generate("b", "abc", keep_alive="5m", options={"num_predict": 2})
        assert loaded() == ["a", "b"]
        (line,) = client.generate("b", keep_alive=0, stream=True)
        assert (line.done, line.done_reason) == (True, "unload")
        assert until(["a"])
        assert client.chat("b", [user("abc")], keep_alive=0, options={"num_predict": 2}).eval_count == 2
        assert until(["a"])
        assert loads == ["b", "b"]
        client.generate("a", keep_alive=0)
        assert client.chat("a", [user("abc")], keep_alive=0, options={"num_predict": 2}).done
        assert loaded() == ["a"], "it stays"
        with refuses("'none' is not served"):
            client.generate("none", keep_alive=0)


def test_models_that_are_not_served(client: Any) -> None:
    for ask in (lambda: client.chat("none", [user("a")]), lambda: client.show("none"), lambda: client.generate("none")):
        with refuses("'none' is not served") as caught:
            ask()
        assert caught.value.status_code == 404


def test_pull(talker: Serving) -> None:
    assert client_of(talker).pull("talker").status == "success"
    with refuses("this server fetches none"):
        client_of(talker).pull("other")

    gate = threading.Event()

    def pull(name: str, progress: Callable[[str, int, int], None]) -> ModelSource:
        progress("model.gguf", 3, 10)
        if name == "broken":
            raise ModelNotFound("the hub has no such model", "Check its name")
        assert name != "slow" or gate.wait(30)
        progress("model.gguf", 10, 10)
        return ModelSource((name,), lambda: Worker(toy_llm()))

    with serving(talker.llm, pull=pull) as it:
        client = client_of(it)
        first, *others, last = list(client.pull("new", stream=True))
        assert (first.status, last.status) == ("pulling manifest", "success")
        assert (others[-1].status, others[-1].completed, others[-1].total) == ("pulling model.gguf", 10, 10)
        assert client.pull("new").status == "success"
        assert [model.model for model in client.list().models] == ["toy", "new"]
        assert client.generate("new", "abc", options={"num_predict": 3}).done
        with refuses("no such model"):
            list(client.pull("broken", stream=True))
        with refuses("no such model"):
            client.pull("broken")
        slow = client.pull("slow", stream=True)
        assert [next(slow).status, next(slow).status] == ["pulling manifest", "pulling model.gguf"]
        with refuses("another model is being fetched"):
            client.pull("third")
        gate.set()
        assert [step.status for step in slow][-1] == "success"


def test_models_are_not_changed_over_the_network(client: Any) -> None:
    for ask in (lambda: client.delete("toy"), lambda: client.copy("toy", "new"), lambda: client.create("a", from_="b")):
        with refuses("not allowed over the network"):
            ask()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, "images"),
        ("chat", {"options": {"mirostat": 2}}, "mirostat"),
        ("chat", {"options": {"temperature": -1}}, "temperature"),
        ("chat", {"format": "xml"}, "format"),
        ("generate", {"template": "x"}, "template"),
        ("generate", {"context": [1]}, "context"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("show", {"model": None}, "model"),
    ],
    ids=str,
)
def test_refusals(served: Serving, path: str, body: dict[str, Any], named: str) -> None:
    ask = {"model": "toy", "prompt": "a"} if path == "generate" else {"model": "toy"}
    answer = served.post(f"/api/{path}", {**ask, **body})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert named in answer.json()["error"]


def test_an_error_in_a_stream_is_a_line() -> None:
    with serving(scripted("Once upon a time")) as it:
        fail_before_the_end(it.llm, "Once upon a time")
        with refuses("internal error"):
            list(client_of(it).chat("toy", [user("go")], stream=True))
