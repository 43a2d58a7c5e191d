"""Errors of `paceline generate`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import paceline.llm
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from tests.support.toy_cli import (
    Shop,
    failure,
    generate,
    make_llm,
    run,
    stop_after,
)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["x", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["x", "--top-p", "-1"], "top_p=-1.0"),
        (["x", "--seed", str(2**63)], "seed=9223372036854775808"),
        (["x", "--rule", "best"], "rule='best' is unknown"),
        (["x", "--stop", ""], "stop="),
        (["x", "--stop-token-id", "-1"], "stop_token_ids=-1"),
        (["x", "-n", "-1"], "max_new_tokens=-1"),
        (["x", "--repetition-penalty", "0"], "repetition_penalty=0.0 is out of range"),
        (["x", "--frequency-penalty", "3"], "frequency_penalty=3.0"),
        (["x", "--presence-penalty", "-3"], "presence_penalty=-3.0"),
        (["x", "--typical-p", "2"], "typical_p=2.0"),
        (["x", "--no-repeat-ngram-size", "-1"], "no_repeat_ngram_size=-1"),
        (["x", "--min-new-tokens", "99"], "min_new_tokens=99"),
        (["x", "--logit-bias", "a=1"], "--logit-bias must be ID=NUMBER, got 'a=1'"),
        (["x", "--logit-bias", "3=nan"], "logit_bias[3]=nan"),
        (["x", "--bad-word", ""], "bad_words contains an empty word"),
        (["x", "--regex", "("], "the regular expression cannot be used"),
        (["x", "--regex", "a", "--grammar", "start: /a/"], "only one grammar"),
        (["x", "--json-schema", "no-such-file"], "neither a file nor a JSON schema"),
        (["x", "--json-schema", "{'a'}"], "the JSON schema is not valid JSON"),
        (["x", "--grammar", "missing.lark"], "neither a file"),
        (["x", "--json-schema", "{}", "--ignore-eos"], "ignore_eos"),
        (["x", "--logprobs", "1"], "Add --json"),
        (["x", "--json", "--logprobs", "-1"], "logprobs=-1"),
        (["x", "--draft", "5x5"], "NODESxDEPTHxBRANCH, got '5x5'"),
        (["x", "--draft", "-3"], "NODESxDEPTHxBRANCH, got '-3'"),
        (["x", "--draft", "8x4x0"], "branch 0"),
        (["x", "--prompts", "y.jsonl"], "both a prompt and --prompts"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["--prompts", "."], ".: Is a directory"),
        (["x", "--output", "no/such/folder/out.txt"], "no/such/folder/out.txt: No such file or directory"),
        ([""], "the prompt is empty"),
        (["\udcff"], "not valid Unicode"),
    ],
)
def test_errors_before_anything_is_loaded(shop: Shop, args: list[str], part: str) -> None:
    assert part in failure(generate(*args))
    assert shop.calls == []


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--drafter", "magic"], "no drafter is called 'magic'"),
        (["--dtype", "int3"], "dtype 'int3' is unknown"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--drafter", ""], "drafter"),
    ],
)
def test_names_that_the_library_does_not_know(shop: Shop, args: list[str], part: str) -> None:
    assert part in failure(generate("x", *args))


@pytest.mark.parametrize(
    ("stdin", "part"), [("", "the prompt is empty"), ("\n", "the prompt is empty"), (b"\xff", "not UTF-8")]
)
def test_nothing_usable_on_stdin(shop: Shop, stdin: str | bytes, part: str) -> None:
    assert part in failure(generate(stdin=stdin))
    assert shop.calls == []


def test_no_prompt_at_a_terminal(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.prompts.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    assert "there is no prompt" in failure(generate())


def test_a_prompt_longer_than_the_context(shop: Shop) -> None:
    assert "the model's context has 256" in failure(generate("x" * 300))


@pytest.mark.parametrize("args", [["generate", "--nonsense"], ["generate", "x", "-n", "many"], ["nonsense"]])
def test_usage_errors_have_exit_code_2(args: list[str]) -> None:
    assert run(*args).exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141), (PermissionError(13, "Not yours", "f"), 1)],
)
def test_interruptions(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def load(*args: Any, **options: Any) -> LLM:
        raise error

    monkeypatch.setattr(paceline.llm, "load", load)
    result = generate("x")
    assert result.exit_code == code
    assert result.output == ("error: f: Not yours\n" if code == 1 else "")


def test_ctrl_c_in_a_reply_keeps_what_was_written(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(monkeypatch, 7, KeyboardInterrupt())
    result = generate("hello")
    assert result.exit_code == 130
    expected = make_llm(None).generate("hello", Sampling(max_new_tokens=7)).text
    assert result.stdout.rstrip("\n") == expected.rstrip("\n")
    assert result.stderr == ""
