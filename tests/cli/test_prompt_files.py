"""`paceline generate --prompts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.engine import Engine
from paceline.errors import NonFiniteLogits, OutOfMemory
from tests.support.toy_cli import (
    Shop,
    failure,
    generate,
    lines,
    stop_after,
)

ROWS = [
    {"id": 81, "category": "writing", "source": None, "turns": ["hello", "and again"]},
    {"id": "b", "prompt": "hello"},
    {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]},
    "",
    {"prompt": "a\u2028b"},
]


def test_rows_with_all_kinds_of_prompts_are_answered(shop: Shop, tmp_path: Path) -> None:
    file = lines(tmp_path / "p.jsonl", *ROWS)
    result = generate("--prompts", file, "--json")
    assert result.exit_code == 0, result.output
    replies = [json.loads(line) for line in result.stdout.splitlines()]
    assert [reply["id"] for reply in replies] == [81, "b", 3, 5]
    assert {tuple(reply) for reply in replies} == {("id", "token_ids", "text", "finish_reason", "stats")}
    assert (
        replies[0]["token_ids"]
        == replies[1]["token_ids"]
        == json.loads(generate("hello", "--json").stdout)["token_ids"]
    )
    assert replies[2]["token_ids"] == json.loads(generate("<s><u>hello", "--raw", "--json").stdout)["token_ids"]
    assert "4/4 prompts" in result.stderr
    assert len(shop.calls) == 3


def test_rows_from_stdin_with_a_byte_order_mark(shop: Shop) -> None:
    result = generate("--prompts", "-", "--json", "-q", stdin=b'\xef\xbb\xbf{"prompt": "hi"}\r\n')
    assert json.loads(result.stdout)["id"] == 1
    assert result.stderr == ""


def test_rows_as_text_are_told_apart(shop: Shop, tmp_path: Path) -> None:
    result = generate("--prompts", lines(tmp_path / "p.jsonl", {"id": "one", "prompt": "a"}, {"prompt": "b"}))
    assert result.stdout.startswith("==> one <==\n")
    assert "\n==> 2 <==\n" in result.stdout


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("{", "not valid JSON"),
        ('{"prompt": "a"} x', "not valid JSON"),
        ("[" * 100000, "JSON that is nested too deeply"),
        ('["a"]', "not a JSON object"),
        ("7", "not a JSON object"),
        ({"id": 5}, "no prompt"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": 5}, "'prompt' is not text"),
        ({"prompt": "\ud800"}, "not valid Unicode"),
        ({"turns": []}, "'turns' is not a list"),
        ({"turns": "hi"}, "'turns' is not a list"),
        ({"turns": [""]}, "'turns' is empty"),
        ({"messages": []}, "'messages' is not a list"),
        ({"messages": ["hi"]}, "message 1 is not an object"),
        ({"messages": [{"role": "user"}]}, "message 1 is not an object"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of message 1 is not text"),
        ({"messages": [{"role": "user", "content": ""}]}, "all messages are empty"),
        ({"prompt": "a", "turns": ["b"]}, "only one of them"),
        ({"id": "first", "prompt": "a"}, "the id 'first' was already used on line 1"),
        ({"id": [1], "prompt": "a"}, "whole number, got [1]"),
        ({"id": True, "prompt": "a"}, "whole number, got true"),
    ],
)
def test_a_malformed_row_is_named_before_anything_is_loaded(shop: Shop, tmp_path: Path, row: Any, part: str) -> None:
    file = lines(tmp_path / "p.jsonl", {"id": "first", "prompt": "a"}, "", row, {"prompt": "b"})
    message = failure(generate("--prompts", file, "--json"))
    assert f"{file}, line 3: " in message
    assert part in message
    assert shop.calls == []


def test_a_row_in_another_encoding(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert "p.jsonl, line 2: not UTF-8" in failure(generate("--prompts", str(tmp_path / "p.jsonl")))
    assert shop.calls == []


def test_a_file_without_rows(shop: Shop, tmp_path: Path) -> None:
    assert "contains no prompts" in failure(generate("--prompts", lines(tmp_path / "p.jsonl", "", "")))


@pytest.mark.parametrize("form", [("--json",), ()])
def test_a_row_that_fails_costs_no_other(shop: Shop, tmp_path: Path, form: tuple[str, ...]) -> None:
    rows = [{"prompt": "a"}, {"id": "long", "prompt": "x" * 300}, {"prompt": "c"}]
    result = generate("--prompts", lines(tmp_path / "p.jsonl", *rows), "-q", *form)
    assert result.exit_code == 1
    assert failure(result).startswith("error: row long: the prompt has 303 tokens")
    if form:
        assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [1, 3]
    else:
        assert "==> 3 <==" in result.stdout


def test_a_batch_writes_what_one_after_the_other_does(shop: Shop, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": "ab c" * (1 + i % 3)} for i in range(7)] + [{"id": "long", "prompt": "a" * 999}]
    file = lines(tmp_path / "p.jsonl", *rows)
    options = ("--json", "--max-new-tokens", "9", "--temperature", "0.9", "--seed", "3")
    alone = generate("--prompts", file, *options)
    together = generate("--prompts", file, "--batch", "3", *options)
    assert alone.exit_code == together.exit_code == 1
    replies = [[json.loads(line) for line in result.stdout.splitlines()] for result in (alone, together)]
    one_by_one, at_once = ([(reply["id"], reply["token_ids"]) for reply in some] for some in replies)
    assert at_once == one_by_one
    assert len(at_once) == 7
    assert "row long: the prompt has" in together.stderr
    assert "8/8 prompts" in together.stderr
    assert "1 failed" in together.stderr


def test_an_error_of_the_whole_batch_is_told_and_what_was_whole_is_written(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, rounds = Engine.step, 0

    def full(self: Engine, requests: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds >= 8:
            raise OutOfMemory("no memory for a pass", "Use less")
        return honest(self, requests)

    monkeypatch.setattr(Engine, "step", full)
    rows = [{"id": i, "prompt": "ab"} for i in range(5)]
    options = ("--json", "--max-new-tokens", "5", "--drafter", "none", "--ignore-eos", "--batch", "2")
    result = generate("--prompts", lines(tmp_path / "p.jsonl", *rows), *options)
    assert result.exit_code == 1
    assert "no memory for a pass" in result.stderr
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [0, 1]


def test_samples_of_one_prompt_are_numbered(shop: Shop) -> None:
    options = ("--temperature", "1", "--seed", "3", "--max-new-tokens", "9")
    result = generate("abc", "--samples", "3", "--json", *options)
    replies = [json.loads(line) for line in result.stdout.splitlines()]
    assert [r["sample"] for r in replies] == [0, 1, 2]
    assert len({tuple(r["token_ids"]) for r in replies}) == 3
    text = generate("abc", "--samples", "2", "-q", *options).stdout
    assert text.startswith("==> sample 0 <==\n")
    assert text.count("==>") == 2


def test_an_error_in_the_middle_of_a_text_comes_after_what_was_written(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 7, NonFiniteLogits("the logits are not finite"))
    result = generate("--prompts", lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}), "-q")
    assert failure(result) == "error: row 1: the logits are not finite\n"
    assert "\n==> 2 <==\n" in result.stdout


def test_output_to_a_file(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("old and long " * 100)
    result = generate("hello", "-o", str(out))
    assert result.stdout == ""
    assert out.read_text() == generate("hello").stdout


def test_output_keeps_its_old_content_when_the_model_does_not_load(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("precious")
    failure(generate("hello", "-o", str(out), "--dtype", "int3"))
    assert out.read_text() == "precious"


def test_output_never_overwrites_the_prompts(shop: Shop, tmp_path: Path) -> None:
    file = lines(tmp_path / "p.jsonl", {"prompt": "a"})
    assert "would overwrite the prompts" in failure(generate("--prompts", file, "--output", file))
    assert "prompt" in Path(file).read_text()
