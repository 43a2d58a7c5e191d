"""Every schema that pydantic, msgspec, attrs, zod and schemars emit for ordinary types is accepted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidOption
from paceline.sampling.grammar import Grammar
from paceline.sampling.json_schema import with_leniency
from paceline.sampling.lark import json_expression
from tests.support.cover import some
from tests.support.grammars import END, SIZE, WORDS

pytest.importorskip("llguidance")

PAGE = Path(__file__).parents[1] / "support" / "schema_page"
SCHEMAS = {
    f"{file.stem}: {name}": schema
    for file in sorted(PAGE.glob("*.json"))
    for name, schema in json.loads(file.read_text()).items()
    if (file.stem, name) != ("zod-openapi-3.0", "null")
}
UNCHECKED = ("pydantic: big", "emptyTuple", "openapi", "draft-7: base64", "uniqueItems")
"""Not checked by the other implementation: bounds of more than 64 bits are left out of a guide, as sets are; it refuses
the dialect of OpenAPI 3.0 and empty tuples, and in draft 7 takes contentEncoding for a condition."""


def walk(grammar: Grammar, rng: random.Random) -> str | None:
    """Return a random text of a grammar, or None if it does not end soon."""
    rows, text = grammar._compile(WORDS, SIZE, frozenset([END])).matcher.deep_copy(), b""
    closing = {token for token, said in WORDS.token_bytes.items() if said in (b'"', b"}", b"]")}
    for _ in range(400):
        mask = rows.compute_bitmask()
        allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]
        if END in allowed:
            return text.decode()
        closers = [token for token in allowed if token in closing]
        token = rng.choice(closers if closers and rng.random() < 0.6 else allowed)
        rows.consume_token(token)
        text += WORDS.token_bytes[token]
    return None


@some("tool", sorted({name.partition(":")[0] for name in SCHEMAS}), fast=["pydantic", "zod-draft-2020-12"])
def test_each_schema_is_accepted_as_a_guide(tool: str) -> None:
    """Texts that follow the guide are valid according to another implementation."""
    validators = pytest.importorskip("jsonschema_rs")
    for name, schema in SCHEMAS.items():
        if not name.startswith(f"{tool}:"):
            continue
        text = walk(
            Grammar.json_schema(with_leniency(schema) if isinstance(schema, dict) else schema), random.Random(name)
        )
        if text is not None and not any(part in name + json.dumps(schema) for part in UNCHECKED):
            value = json.loads(text, parse_float=lambda number: max(-1e308, min(float(number), 1e308)))
            assert validators.validator_for(schema, validate_formats=False).is_valid(value), (name, text)
        if isinstance(schema, dict):
            assert json_expression(schema).startswith("%json {")


def refusal(schema: Any) -> str:
    try:
        Grammar.json_schema(schema)
    except InvalidOption as error:
        return str(error)
    return ""


def test_nearly_all_are_taken_as_a_promise() -> None:
    refused = {name: said for name, schema in SCHEMAS.items() if (said := refusal(schema))}
    assert len(refused) <= 12
    assert all("uniqueItems" in said or "minimum 9223372036854775808" in said for said in refused.values()), refused


def test_the_page_contains_schemas_of_all_libraries() -> None:
    kinds = {name.partition(":")[0] for name in SCHEMAS}
    assert kinds == {
        "attrs",
        "msgspec",
        "pydantic",
        "schemars",
        *(f"zod-{x}" for x in ("draft-2020-12", "draft-7", "openapi-3.0")),
    }
    assert len(SCHEMAS) > 550
