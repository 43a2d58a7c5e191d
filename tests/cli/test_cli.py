"""Commands without a separate test file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.llm
from paceline.cli.options import parse_draft
from paceline.cli.show import amount
from paceline.errors import InvalidOption, PacelineError
from paceline.kernels.cpu import build
from paceline.kernels.cpu.build import built_for, library
from paceline.kernels.linear import packs_bfloat16
from paceline.llm import LLM
from paceline.models.runner_choice import Runner, runner_of
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors
from paceline.types import DraftBudget
from tests.support.toy_cli import (
    failure,
    generate,
    run,
)


def test_info(folder: Path) -> None:
    facts = json.loads(run("info", str(folder), "--json").stdout)
    assert facts["parameters"] == sum(tensor.numel() for tensor in random_tensors(TINY).values())
    assert (facts["layers"], facts["kv_heads"], facts["family"], facts["format"]) == (2, 2, "llama", "safetensors")
    assert facts["eos"] == [{"id": 2, "token": "w2"}]
    assert facts["dtypes"] == {"float32": facts["parameters"]}
    assert facts["cache_bytes"] == facts["context_length"] * 2 * 2 * 2 * 2 * 8
    assert facts["cache_bytes_int8"] == facts["context_length"] * 2 * 2 * 2 * (8 + 4)
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
        (["--quantize", "int3"], "quantize must be auto, none, int8 or int4, got 'int3'"),
        (["--draft-quantize", "q4"], "draft_quantize must be auto, none, int8 or int4, got 'q4'"),
        (["--draft-quantize", "int8", "--drafter", "suffix"], "suffix has no weights"),
        (["--draft-vocab", "many"], "draft_vocab: there is no file many"),
        (["--kv-type", "q4"], "kv_type 'q4' is unknown. Choose from auto, bf16, f16, f32, int8"),
    ],
)
def test_quantisation_that_is_not_possible(folder: Path, args: list[str], part: str) -> None:
    assert part in failure(run("generate", "x", "-m", str(folder), *args))


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
    assert "less than the window" in told(str(good), "--context", "512")
    assert "got 'int2'" in told(str(good), "--quantize", "int2")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    """Return a function that returns the matrix kernels under given environment variables."""

    def under(dtype: Any = torch.bfloat16, **env: str) -> Runner:
        build._library_or_error.cache_clear()
        with monkeypatch.context() as context:
            for name, value in env.items():
                context.setenv(name, value)
            return runner_of(torch.device("cpu"), dtype)

    yield under
    build._library_or_error.cache_clear()


def test_info_names_the_matrix_kernels_and_the_remedy(
    kernels: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = kernels()
    if library():
        assert here == Runner(f"the CPU kernels ({built_for(library())})")
    assert kernels(PACELINE_NATIVE="0") == Runner("torch, since PACELINE_NATIVE is 0")
    (tmp_path / "file").write_text("")
    for env, cause, fix in (
        ({"CXX": "/bin/false"}, "/bin/false could not compile the CPU kernels: exit code 1", "another compiler in CXX"),
        ({"CXX": "'"}, "CXX cannot be parsed", "as in a shell"),
        ({"CXX": "", "PATH": ""}, "need a C++ compiler, and none is installed", "Install g++"),
        ({"PACELINE_CACHE": str(tmp_path / "file")}, "cannot be stored", "PACELINE_CACHE"),
    ):
        runner = kernels(**({"PACELINE_CACHE": str(tmp_path / "cache")} | env))
        assert cause in runner.name
        assert fix in runner.remedy
    assert kernels(dtype=torch.float64) == Runner("torch, in float64")
    assert kernels(dtype=torch.float32) == here
    assert "Install g++" in kernels(dtype=torch.float32, CXX="", PATH="", PACELINE_CACHE=str(tmp_path / "c")).remedy


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"CXX": "/bin/false"}, {"PACELINE_CACHE": "FILE"}])
def test_the_slow_path_is_told_once_and_info_says_the_same(folder: Path, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    env = {"PACELINE_CACHE": str(tmp_path / "empty"), **env}
    env = os.environ | {name: value.replace("FILE", str(tmp_path / "file")) for name, value in env.items()}

    def paceline(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env)

    # With int8, every processor uses the kernels.
    code = f"import paceline; [paceline.load({str(folder)!r}, quantize='int8') for _ in '12']"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stderr
    assert told.count("warning: slow: the layers run on torch") == told.count("\n") == 1
    quiet = ("generate", "w1", "--raw", "-n", "2", "-m", str(folder), "--quantize", "int8", "-q")
    assert paceline(*quiet).stderr == ""
    if packs_bfloat16():
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


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("auto", "auto"), ("0", DraftBudget.chain(0)), ("7", DraftBudget.chain(7)), ("16x4x2", DraftBudget(16, 4, 2))],
)
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


def test_verbose_says_what_is_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for more, logged in ((["--verbose"], True), ([], False)):
        caplog.clear()
        done = run("generate", "--raw", "-n", "2", "-m", str(folder), "w1 w2", *more)
        assert done.exit_code == 0, done.output
        assert any(line.startswith(f"{folder}: loaded as ") for line in caplog.messages) is logged
