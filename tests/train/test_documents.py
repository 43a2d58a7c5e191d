from __future__ import annotations

import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import InvalidData, InvalidOption
from paceline.llm import LLM
from paceline.train.documents import Document, Documents, cut
from paceline.train.prompts import Prompts, is_held
from tests.conftest import SHARED, packaged_model
from tests.support.toys import toy_llm
from tests.support.training_data import some_prompts, words, write_rows


@pytest.fixture(scope="module")
def llm() -> LLM:
    return toy_llm()


def answer(name: str | int, text: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "temperature": 0.0, "answer": text, **more}


def all_of(documents: Documents) -> set[Document]:
    return {*documents.train, *documents.held}


def expected(llm: LLM, prompts: list[str], rows: list[tuple[int, str]], held: bool, seed: int) -> list[Document]:
    """A second, plain implementation of the split, the order and the EOS rule."""
    part = [(row, text) for row, text in rows if (zlib.crc32(prompts[row].encode()) % 50 == 0) == held]
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed)).tolist()
    documents = []
    for row, text in (part[i] for i in order):
        ids = llm.tokenizer.encode(text, special=False)
        eos = [llm.model.eos[0]] if len(ids) < 192 - 8 else []
        documents.append(Document(tuple(llm.prompt_ids(prompts[row])), (*ids, *eos)))
    return documents


def test_documents_are_prompts_with_answers_split_by_prompt_and_shuffled(llm: LLM, tmp_path: Path) -> None:
    texts = words(150)
    prompts = some_prompts(tmp_path / "p.jsonl", 150)
    rows = [(i, text) for i in range(0, 150, 2) for text in (f"yes {i % 7}", "no " * (i % 90))]
    path = write_rows(tmp_path / "a.jsonl", (answer(f"p{i}", text) for i, text in rows))
    for seed in (0, 4):
        documents = Documents(llm, prompts, path, seed=seed)
        assert len(documents.held) > 2
        assert list(documents.train) == expected(llm, texts, rows, False, seed)
        assert list(documents.held) == expected(llm, texts, rows, True, seed)
    assert documents.train[-1] == documents.train[len(documents.train) - 1]
    with pytest.raises(IndexError):
        documents.train[len(documents.train)]


@pytest.mark.slow
@pytest.mark.model
def test_the_documents_of_the_demo_model(tmp_path: Path, shared_prompts: Path) -> None:
    """With the real template, tokenizer and answers, documents equal `LLM.prompt_ids` and the tokenizer's tokens."""
    asked, said = shared_prompts.parent / "train_prompts.jsonl", SHARED / "data" / "demo_answers.jsonl"
    if not (asked.exists() and said.exists()):
        pytest.skip("the prompts and answers to train on are not there (they are not shipped)")
    texts = {row["id"]: row["prompt"] for row in map(json.loads, asked.open())}
    rows = [(row["id"], row["answer"]) for row, _ in zip(map(json.loads, said.open()), range(100), strict=False)]
    few = write_rows(tmp_path / "a.jsonl", (answer(name, text) for name, text in rows))
    with packaged_model("demo") as model:
        llm = LLM(model)
        documents = Documents(llm, Prompts(asked), few)
        listed = [texts.get(i, "") for i in range(max(texts) + 1)]
        assert list(documents.train) == expected(llm, listed, rows, False, 0)
        assert list(documents.held) == expected(llm, listed, rows, True, 0)


def test_all_answers_to_one_prompt_lie_on_one_side(llm: LLM, tmp_path: Path) -> None:
    text = next(word for word in words(400) if is_held(word))
    prompts = Prompts(write_rows(tmp_path / "p.jsonl", [{"id": name, "prompt": text} for name in ("a", "b")]))
    documents = Documents(
        llm, prompts, write_rows(tmp_path / "a.jsonl", (answer(name, x) for name in "aab" for x in "xyz"))
    )
    assert (len(documents.train), len(documents.held)) == (0, 9)


def test_an_answer_has_its_own_tokens_and_ends_if_it_did(llm: LLM, tmp_path: Path) -> None:
    prompts = some_prompts(tmp_path / "p.jsonl", 1)
    encode = llm.tokenizer.encode
    cases = [
        (answer("p0", "ab"), (*encode("ab"), 36)),
        (answer("p0", "a" * 11), (*encode("a" * 11), 36)),
        (answer("p0", "a" * 12), tuple(encode("a" * 12))),
        (answer("p0", "cd", ended=False), tuple(encode("cd"))),
        (answer("p0", "a" * 20, ended=True), (*encode("a" * 20), 36)),
        (answer("p0", "what it shows", token_ids=[5, 6, 36], ended=True), (5, 6, 36)),
        (answer("p0", "cut off", token_ids=[5, 6]), (5, 6)),
    ]
    path = write_rows(tmp_path / "a.jsonl", (row for row, _ in cases))
    documents = Documents(llm, prompts, path, answer_tokens=20)
    asked = tuple(llm.prompt_ids(words(1)[0]))
    assert all_of(documents) == {Document(asked, ids) for _, ids in cases}


def test_too_long_documents_lose_the_answers_end_and_only_then_the_prompts_middle() -> None:
    prompt, said = tuple(range(100)), tuple(range(100, 140))
    assert cut(Document(prompt, said), 140) == Document(prompt, said)
    assert cut(Document(prompt, said), 134) == Document(prompt, said[:34])
    assert cut(Document(prompt, said), 80) == Document((*range(15), *range(55, 100)), said[:20])
    assert cut(Document(prompt, said[:2]), 80) == Document((*range(19), *range(41, 100)), said[:2])
    assert cut(Document(prompt, ()), 16) == Document((*range(4), *range(88, 100)), ())
    for length in range(16, 150):
        short = cut(Document(prompt, said), length)
        assert len(short.prompt) + len(short.answer) == min(length, 140)
        assert short.prompt[-1] == 99


def test_long_documents_are_cut_when_they_are_made(llm: LLM, tmp_path: Path) -> None:
    """This includes prompts that leave no room for a reply."""
    prompts = Prompts(write_rows(tmp_path / "p.jsonl", [{"id": 1, "prompt": "x" * 300}]))
    documents = Documents(llm, prompts, write_rows(tmp_path / "a.jsonl", [answer(1, "a" * 90)]), max_length=64)
    (document,) = all_of(documents)
    assert (len(document.prompt), len(document.answer)) == (48, 16)
    with pytest.raises(InvalidOption, match="max_length must be >= 16"):
        Documents(llm, prompts, tmp_path / "a.jsonl", max_length=15)


def test_the_digest_names_what_the_documents_depend_on(llm: LLM, tmp_path: Path) -> None:
    def digest(count: int = 3, text: str = "a", llm: LLM = llm, **options: int) -> str:
        rows = (answer(f"p{i}", text) for i in range(3))
        return Documents(
            llm, some_prompts(tmp_path / "p.jsonl", count), write_rows(tmp_path / "a.jsonl", rows), **options
        ).digest

    other = toy_llm()
    other.tokenizer.chat_template = "{{ messages[0].content }}"
    assert digest() == digest()
    changed = [digest(4), digest(text="b"), digest(llm=other), digest(seed=1), digest(max_length=99)]
    assert len({digest(), *changed, digest(answer_tokens=7)}) == 7


def test_answers_that_do_not_fit_the_prompts_are_named(llm: LLM, tmp_path: Path) -> None:
    prompts = some_prompts(tmp_path / "p.jsonl", 2)
    for rows, said in (
        ([answer("p0", "a"), answer("q", "a")], "line 2: no prompt has the id 'q'"),
        ([answer("p0", "a", token_ids=[37])], "line 1: 'token_ids' must be below the vocabulary size 37, got 37"),
        ([], "contains no answers"),
    ):
        with pytest.raises(InvalidData, match=said):
            Documents(llm, prompts, write_rows(tmp_path / "a.jsonl", rows))


def test_a_large_file_is_not_held_in_memory(llm: LLM, tmp_path: Path) -> None:
    prompts = some_prompts(tmp_path / "p.jsonl", 100)
    path = write_rows(tmp_path / "a.jsonl", (answer(f"p{i % 100}", "a" * 4000) for i in range(1000)))
    tracemalloc.start()
    documents = Documents(llm, prompts, path)
    assert len(documents.train[2].answer) > 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 1_000_000
