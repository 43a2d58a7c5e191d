"""`paceline run`: one answer to a prompt, like `ollama run`, or a conversation."""

from __future__ import annotations

import pytest

from paceline.cli import prompts
from tests.support.toy_cli import Shop, failure, run


def replies(*args: str, stdin: str | None = None) -> str:
    done = run("run", "-n", "8", "--quiet", *args, stdin=stdin)
    assert done.exit_code == 0, done.output
    return done.stdout


def answer(prompt: str, *more: str) -> str:
    """Return the expected output for a prompt, from another command that accepts messages."""
    return run("chat", "-n", "8", "--quiet", *more, stdin=prompt + "\n").stdout.removesuffix("\n")


def test_a_prompt_after_the_model_is_answered_once(shop: Shop) -> None:
    assert replies("tiny", "hello") == answer("hello")
    assert shop.calls[0]["model"] == "tiny"
    assert replies("tiny", "hello", "you") == replies("tiny", "hello you") == answer("hello you")
    assert replies("tiny", "hello", "--system", "be brief") == answer("hello", "--system", "be brief")


def test_a_command_in_a_prompt_is_text(shop: Shop) -> None:
    assert "/help" not in replies("tiny", "/help")


@pytest.mark.parametrize("text", ["hello", "two\nlines"])
def test_piped_text_is_a_prompt(shop: Shop, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(prompts, "_is_piped", lambda: True)
    assert replies("tiny", stdin=text + "\n") == replies("tiny", text, stdin="")
    assert replies("tiny", "read this", stdin=text) == replies("tiny", f"read this\n\n{text}", stdin="")


def test_without_a_prompt_it_is_a_conversation(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "show this text" in replies("tiny", stdin="/help\n")
    monkeypatch.setattr(prompts, "_is_piped", lambda: True)  # and empty
    assert replies("tiny", stdin="") == "\n"


def test_a_prompt_that_fails_is_an_error(shop: Shop) -> None:
    assert "tokens" in failure(run("run", "tiny", "--quiet", "a" * 1000))
