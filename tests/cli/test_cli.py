"""The command line, over a tiny random model whose tokens are letters."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import paceline.llm
from paceline.checkpoints.loader import Loaded
from paceline.cli import app
from paceline.cli.demo import _first_difference, _report
from paceline.cli.options import parse_draft
from paceline.cli.prompts import single_prompt
from paceline.cli.show import Display, amount
from paceline.cli.writing import _ProgressLine
from paceline.engine.detokenizer import Chunk
from paceline.engine.engine import Engine
from paceline.engine.results import Completion
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption, NonFiniteLogits, OutOfMemory, PacelineError
from paceline.kernels.cpu import build
from paceline.kernels.cpu.build import built_for, library
from paceline.kernels.linear import fast_bfloat16
from paceline.llm import LLM
from paceline.models import runner_choice as choice
from paceline.models.config import LayerConfig
from paceline.models.runner_choice import Runner, runner_of
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors, tiny_target
from paceline.types import DraftBudget

LETTERS = "abcdefghijklmnopqrstuvwxyz .,\n?!<>012"
STATS = {"rounds", "drafted", "accepted", "tokens_per_round", "accepted_at", "cached", "seed", "guarantee"}
STATS |= {"drafter", "seconds"}

RECOMMENDED: dict[str, Any] = {}
"""The toy model's generation_config."""


class Letters:
    """A tokenizer of one letter per token."""

    chat_template: str | None = "template"
    vocabulary: ClassVar[dict[str, int]] = {letter: i for i, letter in enumerate(LETTERS)}

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [LETTERS.find(letter) % len(LETTERS) for letter in text.lower()]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(LETTERS[i] for i in ids)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **extra: Any) -> str:
        return "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)


def make_llm(drafter: str | None = "auto", draft: Any = "auto") -> LLM:
    from paceline.drafters.factory import make_drafter, spec_name, to_tree

    tokenizer: Any = Letters()
    loaded = Loaded(tiny_target(), tokenizer, (), RECOMMENDED, Path("tiny"))

    def refuse(reference: str) -> Loaded:
        raise AssertionError(reference)

    made = make_drafter(drafter, loaded, refuse)
    return LLM(loaded, {spec_name(drafter): made} if drafter and made else None, to_tree(draft))


class Shop:
    """Stands in for `paceline.load` and remembers what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def load(self, model: str, *, drafter: Any, draft: Any, **rest: Any) -> LLM:
        from paceline.checkpoints.loader import pick_device, pick_dtype

        self.calls.append({"model": model, "drafter": drafter, "draft": draft, **rest})
        pick_dtype(rest["dtype"], pick_device(rest["device"]))
        return make_llm(drafter, draft)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop()
    monkeypatch.setattr(paceline.llm, "load", shop.load)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return shop


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(args), input=stdin)


def generate(*args: str, stdin: str | bytes | None = None) -> Result:
    return run("generate", "-n", "24", *args, stdin=stdin)


def failure(result: Result) -> str:
    """The one line a failed command leaves on stderr."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


# --- one prompt ---------------------------------------------------------------------------------------------------


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
    modes = ("--quantize", "int8", "--draft-quantize", "int4")
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
        | {"adapter": "a", "token": "t", "allow_pickle": False, "progress": False}
        | {"quantize": "int8", "draft_quantize": "int4"}
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


def test_the_server_names_its_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules["paceline.cli.serve"]._announce("m", "suffix", True, False, "http://127.0.0.1:1")
    assert capsys.readouterr().err.startswith("m (drafter: suffix) at http://127.0.0.1:1/v1 ")


def test_a_reply_that_is_cut_says_so(shop: Shop, tmp_path: Path) -> None:
    assert "cut at 24 tokens; raise -n" in generate("hello").stderr
    text = generate("hello", "-q").stdout
    assert "cut" not in generate("hello", "--stop", text[3:6]).stderr
    assert "the model's context is full" in generate("x" * 240).stderr
    assert "cut at 8 tokens; raise -n" in chat("hi\n").stderr
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
    assert said == ["added 2 lines from stdin to the prompt; </dev/null keeps them out"]
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
    assert "waiting for stdin" in capsys.readouterr().err


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
    assert "If 'Why' begins the prompt, quote the prompt" in failure(generate("Why", "is"))
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


def test_what_is_piped_in_follows_the_prompt(
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
    assert error.count("added 1 line from stdin to the prompt; </dev/null keeps them out\n") == 2
    assert "waiting for stdin" in error
    piped = [sys.executable, "-m", "paceline", "generate", "-m", "/absent", "\udcff"]
    done = subprocess.run(piped, input="x", capture_output=True, text=True, check=False)
    assert "not valid Unicode" in done.stderr, "checked before the model is looked for"


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


# --- what can be wrong with it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["x", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["x", "--top-p", "-1"], "top_p=-1.0"),
        (["x", "--seed", str(2**63)], "seed=9223372036854775808"),
        (["x", "--rule", "best"], "rule='best' is unknown"),
        (["x", "--stop", ""], "stop="),
        (["x", "--stop-token-id", "-1"], "stop_token_ids=-1"),
        (["x", "-n", "0"], "max_new_tokens=0"),
        (["x", "--repetition-penalty", "0"], "repetition_penalty=0.0 is out of range"),
        (["x", "--frequency-penalty", "3"], "frequency_penalty=3.0"),
        (["x", "--presence-penalty", "-3"], "presence_penalty=-3.0"),
        (["x", "--typical-p", "2"], "typical_p=2.0"),
        (["x", "--no-repeat-ngram-size", "-1"], "no_repeat_ngram_size=-1"),
        (["x", "--min-new-tokens", "99"], "min_new_tokens=99"),
        (["x", "--logit-bias", "a=1"], "--logit-bias must be ID=NUMBER, got 'a=1'"),
        (["x", "--logit-bias", "3=nan"], "logit_bias[3]=nan"),
        (["x", "--bad-word", ""], "bad_words holds an empty word"),
        (["x", "--regex", "("], "the regular expression cannot be used"),
        (["x", "--regex", "a", "--grammar", "start: /a/"], "only one grammar"),
        (["x", "--json-schema", "no-such-file"], "neither a file nor a JSON schema"),
        (["x", "--json-schema", "{'a'}"], "the JSON schema is no JSON"),
        (["x", "--grammar", "missing.lark"], "neither a file"),
        (["x", "--json-schema", "{}", "--ignore-eos"], "ignore_eos"),
        (["x", "--logprobs", "1"], "Give --json too"),
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
    assert "the model's context 256" in failure(generate("x" * 300))


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


def stop_after(monkeypatch: pytest.MonkeyPatch, chunks: int, error: BaseException) -> None:
    """Makes the display raise after so many chunks, once."""
    write = Display.write
    seen = []

    def counted(self: Display, chunk: Chunk) -> None:
        write(self, chunk)
        seen.append(chunk)
        if len(seen) == chunks:
            raise error

    monkeypatch.setattr(Display, "write", counted)


# --- a file of prompts --------------------------------------------------------------------------------------------


def lines(path: Path, *rows: Any) -> str:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


ROWS = [
    {"id": 81, "category": "writing", "source": None, "turns": ["hello", "and again"]},
    {"id": "b", "prompt": "hello"},
    {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]},
    "",
    {"prompt": "a\u2028b"},
]


def test_rows_of_all_forms(shop: Shop, tmp_path: Path) -> None:
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
        ("[" * 100000, "not usable JSON"),
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
        ({"id": [1], "prompt": "a"}, "the id is [1]"),
        ({"id": True, "prompt": "a"}, "the id is true"),
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


# --- terminals ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO) -> str:
    display = Display(file)
    for chunk in (Chunk("a", 1, "plain"), Chunk("", 2, "draft"), Chunk("b\x1b]0;\x07", 3, "draft")):
        display.write(chunk)
    display.end()
    return file.getvalue()


def test_accepted_tokens_are_green_and_no_escape_of_the_model_reaches_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown(Terminal()) == "a\x1b[32mb\ufffd]0;\ufffd\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == "ab\ufffd]0;\ufffd\n"
    assert shown(io.StringIO()) == "ab\x1b]0;\x07\n"


def test_progress_on_a_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = _ProgressLine(2, quiet=False)
    progress.advance(5)
    progress.advance(6)
    progress.finish(1)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "2/2 prompts · 11 tokens" in err
    assert err.endswith("1 failed\n")


# --- chat ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations the model was given."""
    seen: list[list[dict[str, str]]] = []
    stream = LLM.stream

    def noted(self: LLM, prompt: Any, *args: Any, **options: Any) -> Any:
        seen.append(list(prompt))
        return stream(self, prompt, *args, **options)

    monkeypatch.setattr(LLM, "stream", noted)
    return seen


def chat(stdin: str, *args: str) -> Result:
    return run("chat", "-n", "8", *args, stdin=stdin)


def test_chat_keeps_its_history_and_forgets_it_when_told(asked: list[list[dict[str, str]]]) -> None:
    result = chat("one\n\ntwo\n/reset\n/tmp/x is a path\n/quit\nnever\n", "--system", "be brief")
    assert result.exit_code == 0, result.output
    system = {"role": "system", "content": "be brief"}
    assert [[m["content"] for m in c if m["role"] != "assistant"] for c in asked] == [
        ["be brief", "one"],
        ["be brief", "one", "two"],
        ["be brief", "/tmp/x is a path"],
    ]
    assert asked[1][:2] == [system, {"role": "user", "content": "one"}]
    assert asked[1][2]["role"] == "assistant"
    assert asked[1][2]["content"] in result.stdout
    assert "\x1b" not in result.output


def test_chat_commands(shop: Shop) -> None:
    result = chat("/stats\n/help\n/nonsense\nhi\n/stats\n")
    assert result.exit_code == 0
    for part in ("There is no reply yet", "Ctrl-C stops a reply", "no command /nonsense", "prefill", "8 tokens"):
        assert part in result.stdout


def test_several_lines_are_one_message(asked: list[list[dict[str, str]]]) -> None:
    result = chat('"""one\n\n  two\n"""\n"""/quit"""\n"""\n/reset\n"""\n"""three\nfour')
    assert result.exit_code == 0, result.output
    said = [m["content"] for m in asked[-1] if m["role"] == "user"]
    assert said == ["one\n\n  two", "/quit", "/reset", "three\nfour"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_pasted_lines_are_one_message() -> None:
    import pty
    import readline

    if "GNU" not in (readline.__doc__ or ""):
        pytest.skip("libedit takes pasted lines one by one")
    code = "from paceline.cli.chat import _edit_lines, _read_message as read; _edit_lines(); print(repr(read().text))"
    main, terminal = pty.openpty()
    with os.fdopen(main, "rb", buffering=0) as screen:
        command = [sys.executable, "-c", code]
        child = subprocess.Popen(command, stdin=terminal, stdout=terminal, env=os.environ | {"TERM": "xterm"})
        os.close(terminal)
        shown = b""
        while b"> " not in shown:
            shown += screen.read(1024)
        os.write(main, b"\x1b[200~one\n  two\n\nthree\x1b[201~\r")
        with contextlib.suppress(OSError):  # what Linux says once the other end is closed
            while piece := screen.read(1024):
                shown += piece
        assert child.wait(60) == 0
    assert b"'one\\n  two\\n\\nthree'" in shown


def test_ctrl_c_stops_the_reply_and_not_the_chat(
    asked: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 3, KeyboardInterrupt())
    result = chat("one\ntwo\n")
    assert result.exit_code == 0
    assert len(asked[1][1]["content"]) == 3
    assert asked[1][2] == {"role": "user", "content": "two"}


def test_a_question_that_fails_is_dropped(asked: list[list[dict[str, str]]]) -> None:
    result = chat(f"one\n{'x' * 300}\ntwo\n", "-q")
    assert result.exit_code == 0
    assert failure_lines(result) == 1
    assert [m["content"] for m in asked[2] if m["role"] == "user"] == ["one", "two"]


def failure_lines(result: Result) -> int:
    return result.stderr.count("error: the prompt has")


def test_chat_needs_a_template(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "chat_template", None)
    assert "no chat template" in failure(chat("hi\n", "-q"))


# --- demo ---------------------------------------------------------------------------------------------------------


def test_demo_writes_twice_the_same_and_says_so(shop: Shop) -> None:
    result = run("demo", "abcabc", "-n", "12", "--temperature", "1")
    assert result.exit_code == 0, result.output
    text = result.stdout
    first, second = text.index("With speculation"), text.index("Without")
    assert text[first:second].split("\n", 1)[1].strip() == text[second : text.index("┏")].split("\n", 1)[1].strip()
    assert "texts identical: yes, all 12 tokens" in text
    for part in ("plain", "With speculation, by suffix", "decode tok/s", "speedup", "tokens/round", "acceptance"):
        assert part in text


def completion(exact: Any, ids: list[int]) -> Completion:
    stats = Stats(0, exact, rounds=1, tokens=len(ids))
    stats.seconds["verify"] = 1.0
    return Completion("", ids, "length", stats, 1)


def test_demo_says_where_texts_differ(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    _report(completion("rounding", [1, 2, 3]), completion("rounding", [1, 2, 4]))
    assert "texts identical: NO, they differ from token 2 on" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as caught:
        _report(completion("bits", [1, 2, 3]), completion("bits", [1, 2]))
    assert caught.value.exit_code == 1


def test_first_difference() -> None:
    assert _first_difference([1, 2], [1, 2]) is None
    assert _first_difference([1, 2], [1, 2, 3]) == 2
    assert _first_difference([], [3]) == 0


# --- the rest -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model as a Hugging Face folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    c = TINY
    sizes = {"hidden_size": c.hidden, "num_hidden_layers": c.layers, "num_attention_heads": c.heads}
    sizes |= {"num_key_value_heads": c.kv_heads, "intermediate_size": c.ffn, "vocab_size": c.vocab_size}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes}
    config |= {"max_position_embeddings": c.context_length, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    words = {f"w{i}": i for i in range(c.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_file(random_tensors(c), tmp_path / "model.safetensors")
    return tmp_path


def test_info(folder: Path) -> None:
    facts = json.loads(run("info", str(folder), "--json").stdout)
    assert facts["parameters"] == sum(tensor.numel() for tensor in random_tensors(TINY).values())
    assert (facts["layers"], facts["kv_heads"], facts["family"], facts["format"]) == (2, 2, "llama", "safetensors")
    assert facts["eos"] == [{"id": 2, "token": "w2"}]
    assert facts["dtypes"] == {"float32": facts["parameters"]}
    assert facts["cache_bytes"] == facts["context_length"] * 2 * 2 * 2 * 2 * 8
    assert facts["own_codes"] == {}
    table = run("info", str(folder)).stdout
    for part in ("LlamaForCausalLM (llama)", "WordLevel", "temperature 0.6 (recommended by the model)", "'w2' (id 2)"):
        assert part in table
    assert f"file             │ safetensors, {amount(facts['file_bytes'], 'bytes')}: float32" in table


def test_amounts_are_for_people() -> None:
    sizes = (300, 16_400, 98_362_432, 4.1e9)
    assert [amount(n, "bytes") for n in sizes] == ["300 bytes", "16.4 kB", "98.4 MB", "4.1 GB"]
    assert [amount(n) for n in (300, 134_515_008, 7.24e9)] == ["300", "135 million", "7.24 billion"]


def test_a_missing_package_is_installed_from_where_paceline_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules["paceline.cli.serve"], "find_spec", lambda _: None)
    root = Path(paceline.__file__).parents[2]
    assert f'pip install -e "{root}[serve]"' in failure(run("serve", "-q"))
    monkeypatch.setattr("paceline.errors.__file__", str(tmp_path / "site-packages" / "paceline" / "errors.py"))
    assert 'pip install "paceline[serve]"' in failure(run("serve", "-q"))


@pytest.mark.model
def test_info_of_a_gguf() -> None:
    facts = json.loads(run("info", "demo", "--json").stdout)
    assert facts["format"] == "GGUF"
    assert facts["parameters"] == 134_515_008
    assert facts["chat_template"]
    assert facts["own_codes"].keys() == {"4", "8"}
    table = run("info", "demo").stdout
    assert "79 % in 4 bits and 21 %" in table
    assert "135 million parameters" in table
    assert "KV cache at full length: 189 MB" in table


@pytest.mark.parametrize("modes", [("--quantize", "int8"), ("--quantize", "int4", "--draft-quantize", "int8")])
def test_a_quantised_model_writes_from_the_command_line(folder: Path, modes: tuple[str, ...]) -> None:
    asked = ("-n", "12", "-t", "0", "--raw", "--json", "-q", "-m", str(folder), "--dtype", "bfloat16", *modes)
    plain, drafted = (
        json.loads(run("generate", "w1 w5 w9", *asked, "--drafter", drafter).stdout)
        for drafter in (f"model:{folder}", f"suffix+model:{folder}")
    )
    llm = paceline.llm.load(folder, drafter=None, dtype="bfloat16", quantize=modes[1])  # type: ignore[arg-type]
    expected = llm.generate("w1 w5 w9", Sampling(max_new_tokens=12), raw=True)
    assert llm.model.quantize == modes[1]
    assert plain["token_ids"] == drafted["token_ids"] == expected.token_ids


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--quantize", "int3"], "quantize='int3' is unknown"),
        (["--draft-quantize", "q4"], "draft_quantize='q4' is unknown"),
        (["--draft-quantize", "int8", "--drafter", "suffix"], "suffix has no weights"),
    ],
)
def test_quantisation_that_is_not_possible(folder: Path, args: list[str], part: str) -> None:
    assert part in failure(run("generate", "x", "-m", str(folder), *args))


# --- perplexity ---------------------------------------------------------------------------------------------------


def test_perplexity_of_a_file(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * 7 % 37}" for i in range(90)))
    asked = ("perplexity", str(text), "-m", str(folder), "--dtype", "float32", "-q", "--window", "32", "--context", "8")
    facts = json.loads(run(*asked, "--json").stdout)
    plain, *coded = facts["results"]
    assert [row["weights"] for row in facts["results"]] == ["float32", "int8", "int4"]
    assert {row["tokens"] for row in facts["results"]} == {89}
    assert plain["same_top1"] == 1.0
    assert coded[0]["same_top1"] > 0.7
    assert abs(coded[0]["perplexity"] / plain["perplexity"] - 1) < 0.1
    table = run(*asked, "--quantize", "int4", "--tokens", "40").stdout
    assert "int4" in table
    assert "int8" not in table
    assert " 39 " in table


def test_perplexity_of_what_cannot_be_measured(folder: Path, tmp_path: Path) -> None:
    def told(*args: str) -> str:
        return failure(run("perplexity", *args, "-m", str(folder)))

    empty, binary, good = (tmp_path / name for name in ("empty", "binary", "good"))
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe")
    good.write_text("w1 w2 w3")
    assert "fewer than two tokens" in told(str(empty))
    assert "is not UTF-8" in told(str(binary))
    assert "No such file" in told(str(tmp_path / "absent"))
    assert "cannot share 512" in told(str(good), "--context", "512")
    assert "'int2' is unknown" in told(str(good), "--quantize", "int2")


SIZES = replace(TINY, head_dim=16)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    """What runs the layers of a model under these environment variables."""

    def under(config: Any = SIZES, dtype: Any = torch.bfloat16, mode: Any = None, **env: str) -> Runner:
        build._found.cache_clear()
        with monkeypatch.context() as context:
            for name, value in env.items():
                context.setenv(name, value)
            return runner_of(config, torch.device("cpu"), dtype, mode)

    yield under
    build._found.cache_clear()


def test_what_runs_the_layers_and_the_remedy(
    kernels: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = kernels()
    if library() and "BF16" in built_for(library()):
        assert here == Runner(f"the CPU kernels ({built_for(library())})")
        assert kernels(TINY) == Runner("torch, since its sizes are not multiples of 16")
        assert "mixture" in kernels(replace(TINY, head_dim=16, special=(LayerConfig(None, sparse=True),))).name
    assert kernels(PACELINE_NATIVE="0") == Runner("torch, since PACELINE_NATIVE is 0")
    (tmp_path / "file").write_text("")
    for env, cause, fix in (
        ({"CXX": "/bin/false"}, "/bin/false could not compile the CPU kernels: exit code 1", "another compiler in CXX"),
        ({"CXX": "'"}, "CXX cannot be read", "as for a shell"),
        ({"CXX": "", "PATH": ""}, "there is no C++ compiler", "Install g++"),
        ({"PACELINE_CACHE": str(tmp_path / "file")}, "cannot be stored", "PACELINE_CACHE"),
    ):
        runner = kernels(**({"PACELINE_CACHE": str(tmp_path / "cache")} | env))
        assert cause in runner.name
        assert fix in runner.remedy
    monkeypatch.setattr(choice, "built_for", lambda _: "AVX2")
    assert "no product of bfloat16" in kernels().name
    assert kernels(mode="int8").remedy == ""
    monkeypatch.setattr(choice, "fast_bfloat16", lambda: False)
    assert "int8 or int4" in kernels(dtype=torch.float32).remedy


@pytest.mark.parametrize("env", [{"CXX": "/bin/false"}, {"PACELINE_CACHE": "FILE"}])
def test_the_slow_path_is_told_once_and_info_says_the_same(folder: Path, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    env = {"PACELINE_CACHE": str(tmp_path / "empty"), **env}
    env = os.environ | {name: value.replace("FILE", str(tmp_path / "file")) for name, value in env.items()}

    def paceline(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env)

    # Through int8 the kernels are wanted on every processor.
    code = f"import paceline; [paceline.load({str(folder)!r}, quantize='int8') for _ in '12']"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stderr
    assert told.count("warning: slow: the layers run on torch") == told.count("\n") == 1
    quiet = ("generate", "w1", "--raw", "-n", "2", "-m", str(folder), "--quantize", "int8", "-q")
    assert paceline(*quiet).stderr == ""
    if fast_bfloat16():
        runner = json.loads(paceline("info", str(folder), "--json").stdout)["runner"]
        assert runner == told.removeprefix("warning: slow: the layers run on ").rstrip("\n")


def test_compile_says_where_the_kernels_lie_or_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if library() is not None:
        facts = json.loads(run("compile", "--json").stdout)
        assert facts["built_for"] == built_for(library())
        assert Path(facts["path"]).is_file()
        assert not facts["compiled"]
        assert "compiled before" in run("compile").stdout
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    assert "Name another compiler in CXX" in failure(run("compile"))


def test_info_of_nothing(tmp_path: Path) -> None:
    assert "there is no model" in failure(run("info", str(tmp_path / "absent")))
    assert "config.json is missing" in failure(run("info", str(tmp_path)))


def test_version_and_help() -> None:
    assert run("--version").stdout == run("-V").stdout == f"paceline {paceline.__version__}\n"
    assert run("-h").exit_code == 0
    assert "--drafter" in run("generate", "--help").stdout


def test_completion_can_be_installed() -> None:
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline per", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "paceline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | asked)
    assert done.stdout.split() == ["perplexity"]
    assert "--install-completion" in run("--help").stdout


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"paceline {paceline.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, paceline.cli; print(sorted({'torch', 'numpy', 'rich', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("text", "meaning"), [("auto", "auto"), ("0", 0), ("7", 7), ("16x4x2", DraftBudget(16, 4, 2))])
def test_parse_draft(text: str, meaning: Any) -> None:
    assert parse_draft(text) == meaning


def test_errors_stay_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> LLM:
        raise PacelineError("two\nlines", "and a fix")

    monkeypatch.setattr(paceline.llm, "load", load)
    assert failure(generate("x")) == "error: two lines. and a fix\n"


def test_parse_draft_names_the_fix() -> None:
    with pytest.raises(InvalidOption, match="NODESxDEPTHxBRANCH"):
        parse_draft("1.5")
