"""`paceline generate` with one prompt."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from paceline.cli.prompts import single_prompt
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.support.toy_cli import (
    LETTERS,
    RECOMMENDED,
    STATS,
    Letters,
    Shop,
    chat,
    failure,
    generate,
    lines,
    make_llm,
    run,
)


def test_a_pipe_gets_plain_text_and_stderr_the_statistics(shop: Shop) -> None:
    result = generate("hello hello hello")
    assert result.exit_code == 0
    expected = make_llm(None).generate("hello hello hello", Sampling(max_new_tokens=24)).text
    assert result.stdout == expected.removesuffix("\n") + "\n"
    assert "\x1b" not in result.output
    assert "24 tokens" in result.stderr
    assert "tok/s" in result.stderr
    assert "seed" not in result.stderr


def test_quiet_leaves_stderr_empty(shop: Shop) -> None:
    assert generate("hello", "--quiet").stderr == ""


def test_json_of_one_prompt_has_the_promised_keys(shop: Shop) -> None:
    result = generate("hello", "--json")
    assert result.stdout.count("\n") == 1
    reply = json.loads(result.stdout)
    assert set(reply) == {"token_ids", "text", "finish_reason", "stats"}
    assert set(reply["stats"]) == STATS
    assert set(reply["stats"]["seconds"]) == {"prefill", "draft", "verify", "commit", "other"}
    assert len(reply["token_ids"]) == 24
    assert reply["finish_reason"] == "length"


@pytest.mark.parametrize(
    "sampling", [(), ("--temperature", "0.8", "--seed", "3"), ("-t", "1", "--top-k", "5", "-s", "0")]
)
def test_every_drafter_writes_the_same(shop: Shop, sampling: tuple[str, ...]) -> None:
    replies = [
        json.loads(generate("abcabcabc", "--json", "-q", *sampling, "--drafter", *drafter).stdout)
        for drafter in (
            ("none",),
            ("ngram",),
            ("suffix", "--draft", "3"),
            ("suffix", "--draft", "8x4x2"),
            ("ngram+suffix",),
        )
    ]
    assert [reply["token_ids"] for reply in replies] == [replies[0]["token_ids"]] * len(replies)
    assert replies[0]["stats"]["drafted"] == 0
    assert replies[2]["stats"]["drafted"] > 0


def test_options_reach_the_library(shop: Shop) -> None:
    model = ("-m", "m", "--adapter", "a", "--revision", "r", "--token", "t")
    modes = ("--quantize", "int8", "--draft-quantize", "int4", "--draft-revision", "d", "--kv-type", "int8")
    generate("hi", *model, *modes, "--draft", "6x3x2", "--dtype", "float32", "--device", "cpu")
    assert shop.calls == [
        {
            "model": "m",
            "drafter": "auto",
            "draft": DraftBudget(6, 3, 2),
            "dtype": "float32",
            "device": "cpu",
            "revision": "r",
        }
        | {"adapter": "a", "adapters": {}, "token": "t", "allow_pickle": False, "progress": False}
        | {"device_map": None, "draft_device_map": None, "tensor_parallel": False}
        | {"quantize": "int8", "draft_quantize": "int4", "draft_revision": "d", "draft_vocab": "auto"}
        | {"chat_template": None, "kv_type": "int8", "mmproj": None, "prefix_memory": 0}
    ]


def test_penalties_and_bans_reach_the_reply(shop: Shop) -> None:
    def text(*args: str) -> str:
        return json.loads(generate("abcabc", "--json", "-q", *args).stdout)["text"]

    plain = text()
    letter = max(set(plain), key=plain.count)
    assert letter not in text("--bad-word", letter)
    assert letter not in text("--logit-bias", f"{LETTERS.index(letter)}=-inf")
    often = text("--repetition-penalty", "8", "--frequency-penalty", "2", "--presence-penalty", "2")
    assert len(set(often)) > len(set(plain))
    once = text("--no-repeat-ngram-size", "1")
    assert len(set(once)) == len(once) == 24
    assert text("-t", "1", "-s", "3", "--typical-p", "0.01") != text("-t", "1", "-s", "3")
    assert text("-t", "1", "-s", "3", "--top-n-sigma", "0.001") == text("-t", "1", "-s", "3", "--top-k", "1")
    xtc = ("--xtc-probability", "1", "--xtc-threshold", "0.01")
    assert text("-t", "1", "-s", "3", *xtc) != text("-t", "1", "-s", "3")
    assert len(text("--stop-token-id", str(LETTERS.index(letter)))) < 15
    assert len(text("--stop-token-id", str(LETTERS.index(letter)), "--min-new-tokens", "15")) >= 15


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_logprobs_in_json(shop: Shop, drafter: str) -> None:
    reply = json.loads(generate("hello", "--json", "--logprobs", "2", "--drafter", drafter).stdout)
    assert len(reply["logprobs"]) == len(reply["token_ids"]) == 24
    for token, entry in zip(reply["token_ids"], reply["logprobs"], strict=True):
        assert entry["top"][0] == [token, entry["chosen"]], "greedy text takes the likeliest"
        assert entry["top"][1][1] <= entry["chosen"] < 0


def test_raw_skips_the_template(shop: Shop) -> None:
    def ids(*args: str) -> list[int]:
        return list(json.loads(generate(*args, "--json").stdout)["token_ids"])

    assert ids("hello") == ids("<u>hello", "--raw") != ids("hello", "--raw")


def test_stops(shop: Shop) -> None:
    whole = json.loads(generate("hello", "--json").stdout)
    part = whole["text"][5:8]
    reply = json.loads(generate("hello", "--json", "--stop", part, "--stop", "never").stdout)
    assert (reply["text"], reply["finish_reason"]) == (whole["text"][: whole["text"].index(part)], "stop")
    token = whole["token_ids"][9]
    reply = json.loads(generate("hello", "--json", "--stop-token-id", str(token)).stdout)
    assert reply["token_ids"][-1] == token
    assert reply["finish_reason"] == "stop"


def test_a_drawn_seed_is_reported_and_repeats_the_text(shop: Shop) -> None:
    first = generate("hello", "-t", "1")
    seed = first.stderr.rpartition("seed ")[2].split()[0]
    assert generate("hello", "-t", "1", "--seed", seed).stdout == first.stdout


def test_a_lossy_text_is_labelled(shop: Shop) -> None:
    assert "lossy" in generate("hello", "-t", "1", "--rule", "typical").stderr
    assert "lossy" not in generate("hello", "--rule", "typical").stderr, "greedy text is the target's own"
    assert "lossy" not in generate("hello", "-t", "1", "--rule", "block").stderr


def test_the_models_recommendation_applies_and_is_told(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sampling" not in generate("hello").stderr
    monkeypatch.setitem(RECOMMENDED, "do_sample", True)
    monkeypatch.setitem(RECOMMENDED, "temperature", 0.9)
    monkeypatch.setitem(RECOMMENDED, "top_p", 0.5)
    recommended = generate("hello", "-s", "3")
    wanted = Sampling(max_new_tokens=24, temperature=0.9, top_p=0.5, seed=3)
    assert recommended.stdout.rstrip("\n") == make_llm(None).generate("hello", wanted).text.rstrip("\n")
    line = "sampling: from the model: temperature 0.9, top_p 0.5 (-t 0 writes greedy text)\n"
    assert recommended.stderr.startswith(line)
    assert generate("hello", "-t", "1").stderr.startswith("sampling: temperature 1; from the model: top_p 0.5 (")
    greedy = generate("hello", "-t", "0")
    assert "sampling" not in greedy.stderr
    assert greedy.stdout == generate("hello", "--top-p", "1", "-t", "0").stdout
    assert generate("hello", "-q").stderr == ""
    assert line in chat("hi\n").stderr


def test_the_drafter_is_named(shop: Shop) -> None:
    assert "suffix: " in generate("hello hello hello").stderr
    assert "drafted" not in generate("hello hello hello", "--drafter", "none").stderr
    assert json.loads(generate("hello", "--json").stdout)["stats"]["drafter"] == "suffix"
    assert json.loads(generate("hello", "--json", "-d", "none").stdout)["stats"]["drafter"] is None


def test_a_reply_that_is_cut_says_so(shop: Shop, tmp_path: Path) -> None:
    assert "cut at 24 tokens; raise -n" in generate("hello").stderr
    text = generate("hello", "-q").stdout
    assert "cut" not in generate("hello", "--stop", text[3:6]).stderr
    assert "the model's context is full" in generate("x" * 240).stderr
    assert "cut at 8 tokens; /set max_new_tokens" in chat("hi\n").stderr
    rows = lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert "2 cut at the token limit; raise -n" in generate("--prompts", rows, "--json").stderr
    assert "2 cut at the token limit" in generate("--prompts", rows, "--batch", "2").stderr


def test_a_loop_is_told_that_its_input_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "q").write_text("two\nthree\n")
    said: list[str] = []
    monkeypatch.setattr("paceline.cli.prompts.note", said.append)
    with (tmp_path / "q").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert single_prompt("one", with_stdin=True) == "one\n\ntwo\nthree"
    assert said == ["added 2 lines from stdin to the prompt; </dev/null prevents this"]
    assert "</dev/null" in run("generate", "--help").stdout


def test_the_line_about_a_silent_pipe_comes_under_quiet_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cli.prompts._PATIENCE", 0.01)
    monkeypatch.setattr("paceline.cli.prompts.note", lambda text: None)
    read, write = os.pipe()
    with os.fdopen(read) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        closing = threading.Timer(0.5, lambda: os.close(write))
        closing.start()
        assert single_prompt("one", with_stdin=True) == "one"
        closing.join()
    assert "waiting for text on stdin" in capsys.readouterr().err


def test_help_shows_the_default_length() -> None:
    assert Sampling().max_new_tokens == 512
    assert "[default: (512)]" in run("generate", "--help").stdout
    assert "[default: (512)]" in run("chat", "--help").stdout
    assert json.loads(generate("hello", "--json", "--max-tokens", "3").stdout)["token_ids"][3:] == []


@pytest.mark.parametrize("name", [["m"], ["-m", "m"], ["m", "--model", "m"]])
def test_a_model_is_named_the_same_way_everywhere(shop: Shop, name: list[str]) -> None:
    assert generate(*name, "hello").exit_code == 0
    assert chat("hi\n", *name).exit_code == 0
    assert [call["model"] for call in shop.calls] == ["m", "m"]
    for command in ("info", "doctor", "chat", "serve"):
        assert "Name the model once" in failure(run(command, "m", "-m", "other"))


def test_a_prompt_without_quotes_is_told_to_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "If 'Why' is part of the prompt, quote the prompt" in failure(generate("Why", "is"))
    assert "(is the sky). Quote the prompt" in failure(generate("Why", "is", "the", "sky"))
    assert "quote" not in failure(generate("./absent", "is"))


def test_a_path_is_no_prompt(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    for path in (tmp_path, tmp_path / "m.gguf"):
        fix = f'Write `paceline generate {path} "PROMPT"`, or -m {path}'
        assert fix in failure(generate(str(path)))
        assert fix in failure(generate(str(path), "--prompts", "questions.jsonl"))
        assert generate("-m", "m", str(path)).exit_code == generate(str(path), "hello").exit_code == 0


def test_options_without_effect_are_told(shop: Shop) -> None:
    one = "--top-p has no effect: decoding is greedy; set -t\n"
    assert generate("hello", "--top-p", "0.5").stderr.startswith(one)
    both = generate("hello", "--top-k", "3", "--seed", "1", "-t", "0").stderr
    assert both.startswith("--top-k, --seed have no effect: decoding is greedy; set -t\n")
    for args in (["--top-p", "1"], ["--top-p", "0.5", "-t", "1"], ["--top-p", "0.5", "-q"]):
        assert "no effect" not in generate("hello", *args).stderr


def test_a_model_without_a_chat_template_is_told(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "no chat template: the model continues your text\n"
    assert line not in generate("hello").stderr
    monkeypatch.setattr(Letters, "chat_template", None)
    assert generate("hello").stderr.startswith(line)
    assert generate("hello", "-q").stderr == ""
    assert line not in generate("hello", "--raw").stderr


def test_piped_text_follows_the_prompt(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_text("a text\n")
    (tmp_path / "empty").write_text("")
    for name, expected in (("f", "Summarise\n\na text"), ("empty", "Summarise")):
        with (tmp_path / name).open() as file:
            monkeypatch.setattr("sys.stdin", file)
            assert single_prompt("Summarise", with_stdin=True) == expected
            file.seek(0)
            assert single_prompt("Summarise") == "Summarise"
    read, write = os.pipe()
    monkeypatch.setattr("paceline.cli.prompts._PATIENCE", 0.01)
    with os.fdopen(read) as pipe, os.fdopen(write, "w") as end:
        monkeypatch.setattr("sys.stdin", pipe)
        closing = threading.Timer(0.5, lambda: (end.write("late"), end.close()))
        closing.start()
        assert single_prompt("Summarise", with_stdin=True) == "Summarise\n\nlate"
        closing.join()
    error = capsys.readouterr().err
    assert error.count("added 1 line from stdin to the prompt; </dev/null prevents this\n") == 2
    assert "waiting for text on stdin" in error
    assert "not valid Unicode" in run("generate", "-m", "/absent", "\udcff", stdin="x").stderr
    assert not shop.calls, "checked before the model is looked for"


@pytest.mark.parametrize("text", ["hello\n", "hello", "hello\r\n", b"hello\n"])
def test_prompt_from_stdin_without_its_last_newline(shop: Shop, text: str | bytes) -> None:
    assert generate(stdin=text).stdout == generate("hello").stdout == generate("-", stdin=text).stdout


def test_threads(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        assert "--threads" not in generate("hello", "--threads", "1").stderr
        assert torch.get_num_threads() == 1
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
        assert "--threads 3 is more than the 2 cores available" in generate("hello", "--threads", "3").stderr
    finally:
        torch.set_num_threads(before)


def test_another_chat_template_reaches_the_library(shop: Shop) -> None:
    for command in (("generate", "hello", "-n", "1"), ("chat",)):
        assert run(*command, "--chat-template", "tool_use", stdin="").exit_code == 0
        assert shop.calls[-1]["chat_template"] == "tool_use"
