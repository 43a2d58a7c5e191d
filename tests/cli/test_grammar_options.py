"""--json-schema, --regex and --grammar constrain the reply."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline.llm
from paceline.cli import app
from paceline.cli.options import parse_grammar
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.sampling.grammar import Grammar
from tests.support.vocabularies import byte_level, speaker

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, **rest: Any) -> LLM:
        return LLM(speaker(byte_level(), seed=3))

    monkeypatch.setattr(paceline.llm, "load", load)


def text(*args: str) -> str:
    result = CliRunner().invoke(app, ["generate", "hi", "-q", *args])
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def test_each_form_as_text_and_as_a_file(tmp_path: Path) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "form.lark"
    schema.write_text(json.dumps(SCHEMA))
    lark.write_text('start: "(" /[ab]/ ")"')
    for given in (str(schema), json.dumps(SCHEMA)):
        assert isinstance(json.loads(text("--json-schema", given))["ok"], bool)
    for given in (str(lark), lark.read_text()):
        assert re.fullmatch(r"\([ab]\)", text("--grammar", given))
    assert re.fullmatch("[xyz]{4}", text("--regex", "[xyz]{4}", "-t", "0.9"))


def test_binary_schema_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe{")
    with pytest.raises(InvalidOption, match="cannot be read"):
        parse_grammar(json_schema=str(tmp_path / "x"))


def test_a_long_text_is_no_file_name() -> None:
    assert parse_grammar(grammar="start: " + "|".join(["/a/"] * 3000)).kind == "lark"
    assert parse_grammar(json_schema="{}") == Grammar.json_schema({})
    assert parse_grammar(json_schema=json.dumps(SCHEMA | {"description": "x" * 300})).kind == "json_schema"
