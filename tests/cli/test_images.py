"""Images on the command line and in terminal conversations, with a toy vision model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.options import ModelOptions
from paceline.llm import LLM
from tests.support.pictures import encoded, noise
from tests.support.toy_vision import seeing_llm
from tests.support.toys import toy_llm

PNG = encoded(noise())


@pytest.fixture(scope="module")
def seeing() -> LLM:
    return seeing_llm()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seeing: LLM) -> Any:
    """Return a function that runs a command with the toy model in a folder with an image."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(PNG)
    state = SimpleNamespace(llm=seeing)
    monkeypatch.setattr(ModelOptions, "open", lambda *_, **__: state.llm)

    def command(*words: str, text: bytes | str = "", code: int = 0, llm: LLM | None = None) -> Any:
        state.llm = llm or seeing
        result = CliRunner().invoke(app, [*words, "-n", "4"], input=text, env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result

    return command


def tokens_of(result: Any) -> list[int]:
    return list(json.loads(result.stdout)["token_ids"])


def test_generate_shows_the_model_the_images(run: Any, seeing: LLM) -> None:
    plain = tokens_of(run("generate", "What does it say?", "--json"))
    seen = tokens_of(run("generate", "What does it say?", "--image", "a.png", "--json"))
    assert seen != plain
    assert tokens_of(run("generate", "What does it say?", "--image", "-", "--json", text=PNG)) == seen
    image = {"type": "image", "image": "a.png"}
    chat = [{"role": "user", "content": [image, image, {"type": "text", "text": "What?"}]}]
    both = tokens_of(run("generate", "What?", "--image", "a.png", "--image", "a.png", "--json"))
    assert both == list(seeing.generate(chat, seeing.sampling(max_new_tokens=4)).token_ids)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("generate", "x", "--image", "none.png"), "cannot read the image none.png"),
        (("generate", "x", "--image", "a.png", "--raw"), "--image does not work with --raw"),
        (("generate", "--image", "-"), "--image - reads stdin, so the prompt must come from elsewhere"),
        (("generate", "x", "--image", "-", "--image", "-"), "only one image|more than once"),
        (("generate", "x", "--image", "-"), "the image is empty"),
        (("run", "m", "--image", "a.png"), "--image needs a prompt"),
    ],
)
def test_images_that_cannot_be_used_are_named(run: Any, words: tuple[str, ...], error: str) -> None:
    result = run(*words, code=1)
    assert any(part in " ".join(result.output.split()) for part in error.split("|")), result.output


def test_a_model_that_reads_text_only_refuses_images(run: Any) -> None:
    for words in (("generate", "x", "--image", "a.png"), ("run", "m", "x", "--image", "a.png")):
        assert "reads text only" in run(*words, code=1, llm=toy_llm()).output
    assert "reads text only" in run("chat", text="/image a.png\n", llm=toy_llm()).output


def test_run_and_chat_show_the_same_image(run: Any) -> None:
    once = run("run", "m", "What?", "--image", "a.png", "-q").stdout.strip()
    chatted = run("chat", "-q", text="/image a.png\nWhat?\n")
    assert "24 x 16 pixels" in chatted.output
    assert once in chatted.stdout


def test_a_saved_conversation_keeps_its_images(run: Any, tmp_path: Path) -> None:
    run("chat", text="/image a.png\nWhat?\n/save c.json\n")
    first, *_ = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert first["content"][0]["image"].startswith("data:image/png;base64,")
    assert first["content"][1] == {"type": "text", "text": "What?"}
    again = run("chat", text="/load c.json\nAnd?\n/save d.json\n")
    assert "The conversation has 2 messages" in again.output
    assert json.loads((tmp_path / "d.json").read_text())["messages"][0] == first
    first["content"][0]["image"] = "data:image/png;base64,eA=="
    (tmp_path / "c.json").write_text(json.dumps({"messages": [first]}))
    assert "not a PNG" in run("chat", text="/load c.json\n").output
    assert io.BytesIO(PNG).read(4) == b"\x89PNG"
