"""Embeddings of texts, with OpenAI's and Ollama's clients."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from paceline.engine.prompt_logprobs import PooledStates
from paceline.llm import LLM
from paceline.server.answers import RunningRequest
from paceline.server.bodies import BodyReader
from paceline.server.worker import Worker
from paceline.types import Rows, Want
from paceline.verify.tree import pack_prefix
from tests.support.running import Serving, serving
from tests.support.toys import toy_llm

TEXTS = ["abc abc", "the long text of a toy", "b"]


def expected(llm: LLM, text: str) -> list[float]:
    """Return the mean of the final states of one pass over the text."""
    target, tokens = llm.model.target, llm.encode(text, raw=True)
    cache = target.new_cache()
    rows: Rows = pack_prefix(tokens, cache.acquire(len(tokens)), 0, target.device)
    states = target.forward(rows, cache, Want("none", taps=("final",))).taps["final"][0, : len(tokens)]
    return torch.nn.functional.normalize(states.float().mean(0), dim=0).tolist()


def test_each_text_has_the_mean_of_its_states(served: Serving, plain: LLM) -> None:
    made = served.openai.embeddings.create(model="toy", input=TEXTS)  # which asks for base64
    assert [one.index for one in made.data] == [0, 1, 2]
    assert made.usage.prompt_tokens == sum(len(plain.encode(text, raw=True)) for text in TEXTS)
    for text, one in zip(TEXTS, made.data, strict=True):
        assert one.embedding == pytest.approx(expected(plain, text), abs=1e-6)
    assert served.idle()


def test_inputs_may_be_tokens_and_vectors_cut(served: Serving, plain: LLM) -> None:
    whole = expected(plain, TEXTS[0])
    for given in (TEXTS[0], plain.encode(TEXTS[0], raw=True), [plain.encode(TEXTS[0], raw=True)]):
        made = served.post("/v1/embeddings", {"input": given, "encoding_format": "float"}).json()["data"]
        assert [one["embedding"] for one in made] == [pytest.approx(whole, abs=1e-6)]
    [cut] = served.post("/v1/embeddings", {"input": TEXTS[0], "dimensions": 5}).json()["data"]
    assert cut["embedding"] == pytest.approx(torch.nn.functional.normalize(torch.tensor(whole[:5]), dim=0).tolist())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": ["a", "b" * 100_000]}, "input.1"),
        ({"input": "a", "dimensions": 10_000}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "nonsense": 1}, "nonsense"),
        ({"input": [99_999]}, "input"),
    ],
    ids=str,
)
def test_refusals(served: Serving, body: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/embeddings", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_that_are_not_finite_are_an_error(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PooledStates, "vector", lambda *_: [math.nan] * 4)
    with serving(toy_llm()) as it:
        answer = it.post("/v1/embeddings", {"input": "a", "encoding_format": encoding})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "NonFiniteLogits"


def test_ollamas_client(served: Serving, plain: LLM) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(served.address)
    made = client.embed("toy", TEXTS)
    assert made.prompt_eval_count == sum(len(plain.encode(text, raw=True)) for text in TEXTS)
    for text, vector in zip(TEXTS, made.embeddings, strict=True):
        assert vector == pytest.approx(expected(plain, text), abs=1e-6)
    assert client.embeddings("toy", TEXTS[0]).embedding == pytest.approx(expected(plain, TEXTS[0]), abs=1e-6)
    assert len(client.embed("toy", "abc" * 1000).embeddings) == 1, "cut, unless it is forbidden"
    with pytest.raises(ollama.ResponseError, match=r"maximum context length is 256 tokens\..*3000 tokens"):
        client.embed("toy", "abc" * 1000, truncate=False)


def test_embeddings_are_counted_and_logged_as_other_requests_are(plain: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with serving(plain, log_prompts=True) as it, caplog.at_level("INFO"):
        used = it.post("/v1/embeddings", {"input": ["abc abc", "b"]}).json()["usage"]["prompt_tokens"]
        metrics = it.get("/metrics").text
    assert '"input":["abc abc","b"]' in caplog.text
    assert used == sum(len(plain.encode(text, raw=True)) for text in ("abc abc", "b"))
    assert re.search(rf"vllm:prompt_tokens_total{{[^}}]*}} {used}\.0", metrics), metrics
    assert f"prompt tokens {used}, " in caplog.text


def test_a_body_is_released_before_its_texts_are_computed(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    finish, init = RunningRequest.finish, BodyReader.__init__
    readers: list[BodyReader] = []

    def made(reader: BodyReader, *given: Any) -> None:
        readers.append(reader)
        init(reader, *given)

    async def finishing(running: RunningRequest) -> None:
        held.append(len(readers[0]._held))
        await finish(running)

    monkeypatch.setattr(BodyReader, "__init__", made)
    monkeypatch.setattr(RunningRequest, "finish", finishing)
    with serving(plain) as it:
        it.post("/v1/embeddings", {"input": "abc"}).raise_for_status()
    assert held == [0]


def test_dimensions_are_checked_before_anything_is_computed(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "submit", lambda *_: pytest.fail("a text was submitted"))
    assert served.post("/v1/embeddings", {"input": "a", "dimensions": 10_000}).status_code == 400
