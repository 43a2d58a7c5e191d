"""A tiny random model whose tokens are letters, and the command line over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer.testing
from typer.testing import CliRunner, Result

from paceline.checkpoints.loader import Loaded
from paceline.cli import app
from paceline.cli.show import Display
from paceline.engine.detokenizer import Chunk
from paceline.llm import LLM
from tests.support.toys import toy_target

# A runner rebuilds all commands for every call, which takes longer than most of the tests.
typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]

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
    loaded = Loaded(toy_target(layers=1), tokenizer, (), RECOMMENDED, Path("tiny"))

    def refuse(reference: str) -> Loaded:
        raise AssertionError(reference)

    made = make_drafter(drafter, loaded, refuse)
    return LLM(loaded, {spec_name(drafter): made} if drafter and made else None, to_tree(draft))


class Shop:
    """Replaces `paceline.load` and records its arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def load(self, model: str, *, drafter: Any, draft: Any, **rest: Any) -> LLM:
        from paceline.checkpoints.loader import pick_device, pick_dtype

        self.calls.append({"model": model, "drafter": drafter, "draft": draft, **rest})
        pick_dtype(rest["dtype"], pick_device(rest["device"]))
        return make_llm(drafter, draft)


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(args), input=stdin)


def generate(*args: str, stdin: str | bytes | None = None) -> Result:
    return run("generate", "-n", "24", *args, stdin=stdin)


def failure(result: Result) -> str:
    """Return the single line that a failed command wrote to stderr."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def stop_after(monkeypatch: pytest.MonkeyPatch, chunks: int, error: BaseException) -> None:
    """Make the display raise once, after this number of chunks."""
    write = Display.write
    seen = []

    def counted(self: Display, chunk: Chunk) -> None:
        write(self, chunk)
        seen.append(chunk)
        if len(seen) == chunks:
            raise error

    monkeypatch.setattr(Display, "write", counted)


def lines(path: Path, *rows: Any) -> str:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def chat(stdin: str, *args: str) -> Result:
    return run("chat", "-n", "8", *args, stdin=stdin)
