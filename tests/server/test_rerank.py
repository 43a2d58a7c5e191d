"""/v1/rerank: scores of a model that judges documents, and the error of one that does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paceline.checkpoints.loader import Loaded
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.testing import tiny_target
from paceline.text.tokenizer import Tokenizer
from paceline.types import Forward
from tests.support.running import Serving, serving
from tests.support.toys import toy_llm
from tests.support.vocabularies import byte_level

QUERY, DOCUMENTS = "what is a paceline?", ["riders in a line", "a cake", "drafting", "a line of riders drafting"]


def judge(name: str = "my-reranker") -> LLM:
    backend = tokenizers.Tokenizer.from_str(byte_level()._backend.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["yes", "no", "<think>", "</think>"])
    words = Tokenizer(backend, {})
    target = tiny_target(vocab_size=words.vocab_size, context_length=1024)
    return LLM(Loaded(target, words, (), {}, Path(name)))


@pytest.fixture(scope="module")
def judging() -> Iterator[Serving]:
    with serving(judge()) as it:
        yield it


def expected(llm: LLM, document: str, task: str) -> float:
    prompt = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    size = llm.model.target.vocab_size
    made = llm.generate(prompt, Sampling(max_new_tokens=1, logprobs=size), raw=True)
    assert made.logprobs
    found = {llm.tokenizer.decode([token]): value for token, value in made.logprobs[0].top}
    return 1 / (1 + math.exp(found["no"] - found["yes"]))


TASK = "Given a web search query, retrieve relevant passages that answer the query"


def test_documents_are_ranked_by_the_probability_of_yes(judging: Serving) -> None:
    answer = judging.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()
    scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
    wanted = [expected(judging.llm, document, TASK) for document in DOCUMENTS]
    assert [scores[i] for i in range(4)] == pytest.approx(wanted, rel=1e-6)
    assert len({f"{score:.6f}" for score in wanted}) == 4, "or this would say nothing"
    assert [*scores] == sorted(range(4), key=lambda i: -wanted[i])
    assert answer["usage"]["prompt_tokens"] > 100


def test_the_parameters_of_a_ranking(judging: Serving) -> None:
    body = {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1], "id": 7}], "instruction": "Rank."}
    whole = judging.post("/rerank", {**body, "return_documents": True}).json()["results"]
    assert [one["document"]["text"] for one in whole] == [DOCUMENTS[one["index"]] for one in whole]
    assert whole[0]["relevance_score"] == pytest.approx(expected(judging.llm, DOCUMENTS[whole[0]["index"]], "Rank."))
    [best] = judging.post("/v1/rerank", {**body, "top_n": 1}).json()["results"]
    assert best == {key: whole[0][key] for key in ("index", "relevance_score")}


def test_a_document_forms_no_control_tokens(judging: Serving) -> None:
    body = {"query": QUERY, "documents": ["<|im_end|>", "a"]}
    used = judging.post("/v1/rerank", body).json()["usage"]["prompt_tokens"]
    alone = judging.post("/v1/rerank", {**body, "documents": ["a"]}).json()["usage"]["prompt_tokens"]
    assert used > 2 * alone + 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"documents": []},
        {"documents": ["a"] * 129},
        {"query": " "},
        {"top_n": 0},
        {"documents": ["a" * 9999]},
        {"query": "a" * 40_000, "documents": ["a"] * 128},
        {"x": 1},
    ],
)
def test_malformed_requests_are_refused(judging: Serving, wrong: dict[str, object]) -> None:
    answer = judging.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, **wrong})
    assert answer.status_code == 400, answer.text
    assert judging.idle()


def test_a_query_is_not_repeated_without_limit() -> None:
    with serving(judge(), max_body=1000) as it:
        few = it.post("/v1/rerank", {"query": "a" * 40, "documents": ["a"] * 8})
        many = it.post("/v1/rerank", {"query": "a" * 40, "documents": ["a"] * 32})
    assert few.status_code == 200
    assert many.status_code == 400
    assert "Send fewer documents" in many.json()["error"]["message"]


def test_scores_that_are_not_finite_are_an_error() -> None:
    llm = judge()
    forward = llm.model.target.forward

    def damaged(*pass_: Any) -> Forward:
        out = forward(*pass_)
        return replace(out, logits=out.logits * math.nan)

    llm.model.target.forward = damaged  # type: ignore[method-assign]
    with serving(llm) as it:
        answer = it.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "NonFiniteLogits"


def test_a_model_that_cannot_judge_says_so() -> None:
    for llm in (toy_llm(), judge("a-chat-model")):
        with serving(llm) as it:
            error = it.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
            assert error.status_code == 400
            assert error.json()["error"]["param"] == "model"
            assert "not trained to judge documents" in error.json()["error"]["message"]
