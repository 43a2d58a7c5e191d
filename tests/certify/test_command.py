"""`paceline certify` and `python -m paceline.certify`: endpoints, consent, reports, exit codes and keys."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from paceline.certify import command, own
from paceline.certify.certificate import Certificate
from paceline.certify.compare import Difference, Sides
from paceline.certify.options import CertifyOptions, parse_body
from paceline.certify.prompts import KINDS, answerable, tasks
from paceline.certify.report import as_html, as_json, as_junit
from paceline.certify.run import examine
from paceline.certify.servers import detect
from paceline.certify.side import Side
from paceline.certify.sizes import FULL, QUICK, WorkSizes
from paceline.certify.work import is_right
from paceline.cli import app
from paceline.errors import InvalidOption
from tests.support.fake_endpoint import FakeEndpoint, listening

TINY = WorkSizes(5, 12, 1, 2, 1, 1, 1, 1000)
OFF = '{"speculation": "off"}'


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.certify.options.QUICK", TINY)
    for name in ("PACELINE_CERTIFY_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_the_module_starts_without_torch_and_models() -> None:
    code = "import sys, paceline.certify.command, paceline.certify.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("paceline.")}
    assert rooms == {"certify", "errors", "files"}
    assert not {"torch", "numpy", "transformers", "httpx", "typer"} & set(loaded)


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("always_accept", 3)])
def test_exit_code_and_reports(fault: str, code: int, tiny: None, tmp_path: Path) -> None:
    outs = [tmp_path / f"c.{suffix}" for suffix in ("json", "html", "xml")]
    with listening(FakeEndpoint(fault)) as (base, seen):
        arguments = ["certify", base, "--plain-body", OFF, "--quick", "--yes"]
        result = CliRunner().invoke(app, [*arguments, *(f"--out={out}" for out in outs)])
    assert result.exit_code == code, result.output
    assert "requests" in result.stderr
    assert ("not lossless" in result.stdout) == bool(fault)
    assert set(seen) == {""}
    data = json.loads(outs[0].read_text())
    assert data["facts"]["plain body"] == OFF
    assert data["usage"]["requests"] <= len(seen)
    cases = ElementTree.fromstring(outs[2].read_text()).findall("testcase")
    assert len(cases) == len(data["checks"]) > 15
    assert any(case.find("failure") is not None for case in cases) == bool(fault)
    page = outs[1].read_text()
    assert "<svg" in page
    assert not any(word in page for word in ("http://www", "<script", "src=", "<link"))


def test_keys_come_from_the_environment_and_stay_out_of_reports(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("PACELINE_CERTIFY_KEY", "sk-secret")
    out = tmp_path / "c.json"
    with listening(FakeEndpoint()) as (base, seen):
        code = command.certify(base, CertifyOptions(plain_body=OFF, quick=True, yes=True, out=[out]))
    assert code == 0
    assert set(seen) == {"Bearer sk-secret"}
    assert "sk-" not in out.read_text()


def test_two_endpoints_and_own_prompts(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell {i}"}) + "\n" for i in range(6)))
    options = CertifyOptions(quick=True, yes=True, prompts=prompts)
    with listening(FakeEndpoint("stale_cache")) as (one, _), listening(FakeEndpoint()) as (other, seen):
        code = command.certify(one, replace(options, plain=other))
    assert code == 3
    assert len(seen) > 20
    assert "Tell" in capsys.readouterr().out


def test_nothing_is_sent_without_consent(tiny: None) -> None:
    with listening(FakeEndpoint()) as (base, seen):
        result = CliRunner().invoke(app, ["certify", base, "--plain-body", OFF, "--quick"])
    assert result.exit_code == 1
    assert "Add --yes" in result.stderr
    assert len(seen) < 20, "only what recognises the server"


def test_a_server_without_a_known_switch_needs_a_plain_side(tiny: None) -> None:
    with listening(FakeEndpoint()) as (base, _), pytest.raises(InvalidOption, match="--plain URL"):
        command.certify(base, CertifyOptions(quick=True, yes=True))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"quick": True, "full": True}, "does not work with"),
        ({"concurrency": 17}, "--concurrency must be 1 to 16"),
        ({"near_tie": -1.0}, "--near-tie"),
        ({"api": "chats"}, "--api"),
        ({"tokens": 0}, "--tokens"),
        ({"out": [Path("c.pdf")]}, ".json, .html or .xml"),
    ],
)
def test_options_are_checked_before_anything_is_sent(option: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        command.certify("http://127.0.0.1:9/v1", CertifyOptions(**option))  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="--body is not a JSON object"):
        parse_body("--body", "[1]")


def test_the_standalone_command_has_the_same_options(tiny: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.certify", "--help"], capture_output=True, text=True, check=True
    )
    for name in CertifyOptions.__slots__:
        assert f"--{name.replace('_', '-')}" in done.stdout
    with listening(FakeEndpoint()) as (base, _):
        wrong = [sys.executable, "-m", "paceline.certify", base, "--plain-body", "no", "--yes"]
        failed = subprocess.run(wrong, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("error: --plain-body is not a JSON object")


def test_known_servers_are_recognised() -> None:
    def answers(path: str, value: object) -> str | None:
        found = detect(
            lambda method, asked, body=None: (200, json.dumps(value).encode()) if asked == path else (404, b"")
        )
        return found and found.name

    assert answers("//props", {"default_generation_settings": {}}) == "llama.cpp"
    assert answers("/models", {"data": [{"id": "m", "owned_by": "vllm"}]}) == "vLLM"
    assert answers("/models", {"data": [{"id": "m", "owned_by": "paceline"}]}) == "Paceline"
    assert answers("//api/version", {"version": "0.9"}) == "ollama"
    assert answers("/models", {"data": [{"id": "m"}]}) is None
    assert answers("/nothing", []) is None


def test_prompts_are_of_all_kinds_and_lengths_and_depend_on_the_seed_only() -> None:
    made = tasks(200)
    assert made[:30] == tasks(30)
    assert len({task.text for task in made}) > 190
    assert {task.kind for task in made} == set(KINDS)
    words = [len(task.text.split()) for task in made]
    assert min(words) < 10
    assert max(words) > 3000
    assert tasks(20, 1) != tasks(20, 2)
    assert all(answer for _, answer in answerable(20))
    assert is_right("3 * 4 = 12. Answer: **1,234**", "1234")
    assert not is_right("Answer: 12", "13")
    assert not is_right("", "13")


def test_reports_escape_what_endpoints_write() -> None:
    server = FakeEndpoint()
    certificate: Certificate = examine(
        Sides(Side("speculative", server), Side("plain", server)), TINY, {"model": "<b>&"}
    )
    evil = '</pre><script>alert("1")</script>\x00\ud800'
    certificate.smallest = Difference("x", evil, {"max_tokens": 3}, evil, evil, evil)
    page = as_html(certificate)
    assert "<script" not in page
    assert "<b>" not in page
    page.encode()
    json.loads(as_json(certificate))
    ElementTree.fromstring(as_junit(certificate))


def test_quick_is_smaller_than_full() -> None:
    assert QUICK.requests() < FULL.requests()
    assert QUICK.most_tokens() < FULL.most_tokens()
    assert QUICK.seconds == 120


@pytest.mark.model
@pytest.mark.slow
def test_our_own_server_is_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.certify.options.QUICK", TINY)
    assert command.certify("demo", CertifyOptions(quick=True, yes=True)) == 0
    assert own.request_fields("suffix", "ngram")[1] == {"speculation": {"drafter": "ngram"}}
