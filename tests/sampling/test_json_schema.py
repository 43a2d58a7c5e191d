"""Keywords of JSON schemas: allowed texts, ignored keywords, refused schemas."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import Any

import pytest

from paceline.errors import InvalidOption
from paceline.sampling import json_schema, schema_document
from paceline.sampling.grammar import Grammar
from paceline.sampling.json_schema import enforceable_schema, with_leniency
from tests.support.counted_lines import counted
from tests.support.grammars import END, SIZE, WORDS

pytest.importorskip("llguidance")


def allows(schema: Any, *values: Any) -> list[bool]:
    """Return, for each value, True if a grammar of the schema allows it."""
    return [accepts(Grammar.json_schema(schema), json.dumps(value)) for value in values]


def accepts(grammar: Grammar, text: str) -> bool:
    rows = grammar._compile(WORDS, SIZE, frozenset([END])).matcher.deep_copy()
    tokens = WORDS.encode(text, special=False)
    return bool(rows.try_consume_tokens(tokens) == len(tokens) and rows.is_accepting())


def thing(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


STRING, INTEGER, YES = {"type": "string"}, {"type": "integer"}, {"const": True}


def test_annotations_are_ignored() -> None:
    for name in ("path", "binary", "password", "url", "ipvanyaddress", "int64", "regex", "my own", ["email"], None):
        assert allows({"type": "string", "format": name}, "x") == [True]
    assert allows({"type": "string", "format": "date"}, "x", "2026-01-02") == [False, True]
    assert allows({"type": ["string", "null"], "format": "date"}, "x", "2026-01-02", None) == [False, True, True]
    about = {
        "title": "T",
        "examples": [1],
        "default": 2,
        "deprecated": True,
        "$comment": "c",
        "x-own": {},
        "nullable": 1,
    }
    assert allows({**INTEGER, **about, "$schema": "https://example.com/own", "format": "uuid"}, 7, "x") == [True, False]


@pytest.mark.parametrize(
    "nothing",
    [
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"propertyNames": {"type": "string", "title": "Key", "format": "uuid"}},
        {"if": {"type": "array"}},
        {"then": False, "else": False},
        {"minContains": 3, "maxContains": 4},
        {"unevaluatedItems": True, "unevaluatedProperties": {}},
        {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
        {"maximum": 1.7976931348623157e308, "minimum": -1.7976931348623157e308},
    ],
)
def test_empty_keywords_are_no_error(nothing: Any) -> None:
    assert allows(nothing, 5, {"a": 1}, [1, 1], "x") == [True] * 4


def test_integers_have_64_bits() -> None:
    low, high = -(2**63), 2**63 - 1
    assert allows({**INTEGER, "minimum": low, "maximum": high}, 0, high - 5000, low + 5000) == [True] * 3
    assert allows({**INTEGER, "minimum": 0, "maximum": 2**64 - 1}, 0, -1, high - 5000) == [True, False, True]
    assert allows({**INTEGER, "exclusiveMinimum": low, "exclusiveMaximum": 7}, 6, 7, low + 5000) == [True, False, True]
    assert allows({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, 1.5, -7) == [True, True]
    with pytest.raises(InvalidOption, match="minimum 9223372036854775808 cannot be enforced"):
        Grammar.json_schema({**INTEGER, "minimum": 2**63})


def test_items_of_few_values_may_differ() -> None:
    colours = {"enum": ["red", "green", "blue"]}
    unique = {"type": "array", "items": {"$ref": "#/$defs/c"}, "uniqueItems": True, "$defs": {"c": colours}}
    assert allows(unique, [], ["blue"], ["blue", "red", "green"], ["red", "red"]) == [True, True, True, False]
    some = {**unique, "minItems": 1, "maxItems": 2, "title": "Some"}
    assert allows(some, [], ["blue", "red"], ["blue", "red", "green"]) == [False, True, False]
    assert allows({"items": {"type": "boolean"}, "uniqueItems": True}, [True, False], [True, True]) == [True, False]
    assert allows({"type": "array", "uniqueItems": True, "maxItems": 1}, [], ["x"], [1, 2]) == [True, True, False]
    for items in (STRING, {"enum": [*range(6)]}, {}):
        with pytest.raises(InvalidOption, match="uniqueItems cannot be enforced"):
            Grammar.json_schema({"type": "array", "uniqueItems": True, "items": items})


def test_names_of_properties() -> None:
    few = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}
    assert allows(few, {}, {"a": 1}, {"a": 1, "b": 2}, {"c": 1}, {"a": "x"}) == [True, True, True, False, False]
    assert allows({**few, "required": ["b"]}, {"a": 1}, {"b": 1}) == [False, True]
    for names in ({"pattern": "^k"}, {"minLength": 1, "maxLength": 3}):
        named = {"type": "object", "propertyNames": names, "additionalProperties": INTEGER}
        assert allows(named, {}, {"k": 1}, {"xxxx": 1}, {"k": "x"}) == [True, True, False, False]
    for names in (False, {"not": {}}, {"pattern": "a", "minLength": 1}, {"anyOf": [{}]}):
        with pytest.raises(InvalidOption, match="propertyNames"):
            Grammar.json_schema({"type": "object", "propertyNames": names})


def test_an_object_with_properties_is_closed() -> None:
    point = thing("x", x=INTEGER)
    assert allows(point, {"x": 1}, {"x": 1, "y": 2}) == [True, False]
    assert allows({"properties": {"x": point}}, {"x": {"x": 1}}, {"x": {"x": 1, "y": 2}}, 5) == [True, False, False]
    assert allows({**point, "required": ["x", "z"]}, {"x": 1}, {"x": 1, "z": 9}) == [False, True]
    assert allows(thing(), {}, {"a": 1}) == [True, False]
    for more in ({"additionalProperties": True}, {"additionalProperties": INTEGER}, {"unevaluatedProperties": True}):
        assert allows({**point, **more}, {"x": 1, "y": 2}) == [True]
    for map_ in ({"type": "object"}, {"type": "object", "additionalProperties": INTEGER}):
        assert allows(map_, {"y": 2}) == [True]
    patterned = {**point, "patternProperties": {"^k": INTEGER}}
    assert allows(patterned, {"x": 1, "k": 2}, {"x": 1, "y": 2}) == [True, False]


BASE = {"$defs": {"base": thing("id", id=INTEGER), "more": {"allOf": [{"$ref": "#/$defs/base"}, thing(n=STRING)]}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/base"}, thing(n=STRING)]},
        {"$ref": "#/$defs/base", **thing(n=STRING)},
        {"$ref": "#/$defs/more", "description": "d"},
        {"allOf": [{"$ref": "#/$defs/more"}], "description": "d"},
        {"allOf": [{"$ref": "#/$defs/more"}], "unevaluatedProperties": False},
        {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"n": STRING}},
        {**thing("id", id=INTEGER), "anyOf": [thing(n=STRING), thing(m=STRING)]},
        {"anyOf": [{"allOf": [{"$ref": "#/$defs/base"}, thing(n=STRING)]}, {"type": "null"}]},
        {"items": {"$ref": "#/$defs/more"}},
    ],
)
def test_an_object_of_several_schemas_is_closed_as_one(schema: Any) -> None:
    whole = {**BASE, **schema}
    wrap = (lambda value: [value]) if "items" in schema else lambda value: value
    texts = [{"id": 1}, {"id": 1, "n": "a"}, {"n": "a"}, {"id": 1, "z": 2}, {"id": 1, "n": 5}]
    assert allows(whole, *map(wrap, texts)) == [True, True, False, False, False]


def test_keys_of_another_branch_are_forbidden() -> None:
    choice = {**thing("k", k=STRING), "oneOf": [thing("a", a=INTEGER), thing("b", b=INTEGER, k=STRING)]}
    assert allows(choice, {"k": "", "a": 1}, {"k": "", "b": 1}, {"k": "", "a": 1, "b": 1}) == [True, True, False]
    flat = {
        "allOf": [{"oneOf": [thing("a", a=YES), thing("b", b=YES)]}, {"oneOf": [thing("c", c=YES), thing("d", d=YES)]}]
    }
    texts = [dict.fromkeys(keys, True) for keys in ("ac", "bd", "ab", "abc", "a")]
    assert allows(flat, *texts) == [True, True, False, False, False]


KIND = {
    "$defs": {
        "cat": thing("kind lives", kind={"const": "cat"}, lives=INTEGER),
        "dog": {"allOf": [{"$ref": "#/$defs/pet"}, thing("kind", kind={"enum": ["dog", "wolf"]})]},
        "pet": thing(name=STRING),
    }
}
REFS = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
OBJECT = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("branches", "good", "bad"),
    [
        (REFS, [{"kind": "cat", "lives": 9}, {"name": "x", "kind": "wolf"}], [{"kind": "cat"}, {"kind": "cow"}]),
        ([*REFS, {"type": "null"}, INTEGER], [None, 4, {"kind": "dog"}], ["x"]),
        (
            [{"const": "a", "title": "A"}, {"enum": ["b", "c"]}, {"const": 1}, {"const": True}],
            ["a", "c", 1, True],
            ["d", 0],
        ),
        ([{"type": "string", "enum": ["u"]}, {**OBJECT, **thing("v", v=INTEGER), **OBJECT}], ["u", {"v": 1}], ["w"]),
        ([thing("a", a=INTEGER), thing("b", b=INTEGER)], [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ([thing("a", a=INTEGER), {**thing(c=INTEGER), "additionalProperties": False}], [{"a": 1}, {"c": 1}, {}], []),
        ([{"type": ["string", "null"]}, {"type": "number"}], ["x", None, 1.5], [True]),
        ([STRING], ["x"], [1]),
    ],
)
def test_branches_that_can_be_told_apart_are_a_choice(branches: Any, good: Any, bad: Any) -> None:
    for schema in ({**KIND, "oneOf": branches}, {**KIND, "oneOf": branches, "discriminator": {"propertyName": "kind"}}):
        assert allows(schema, *good) == [True] * len(good)
        assert allows(schema, *bad) == [False] * len(bad)


@pytest.mark.parametrize(
    "branches",
    [
        [STRING, {"type": ["string", "null"]}],
        [INTEGER, {"type": "number"}],
        [{"enum": ["a", "b"]}, {"enum": ["b"]}],
        [thing("a", a=INTEGER), thing(b=INTEGER)],
        [thing("a", a=INTEGER), thing("a", a=STRING, b=STRING)],
        [{**thing("a", a=INTEGER), "additionalProperties": True}, thing("b", b=INTEGER)],
        [{}, {"type": "null"}],
    ],
)
def test_branches_that_overlap_are_a_choice_only_as_a_guide(branches: Any) -> None:
    assert "oneOf" in enforceable_schema({"oneOf": branches}, {})
    made = enforceable_schema(with_leniency({"oneOf": branches}), {})
    assert len(made["anyOf"]) == len(branches)


UNENFORCED: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": INTEGER},
    {"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": INTEGER},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"type": "string", "pattern": "^(a)\\1$"},
    {"type": "string", "pattern": "a(?=b)"},
    {"type": "object", "patternProperties": {"a(?=b)": INTEGER}},
    {"type": "integer", "maximum": -1e30},
]


@pytest.mark.parametrize("schema", UNENFORCED)
def test_a_guide_is_followed_as_far_as_possible(schema: Any, caplog: pytest.LogCaptureFixture) -> None:
    json_schema._log_ignored.cache_clear()
    for whole in (schema, {"items": schema}, {"$defs": {"a": schema}, "$ref": "#/$defs/a"}, thing(a=schema)):
        with pytest.raises(InvalidOption, match=r'cannot be enforced; .*"lenient": true'):
            Grammar.json_schema(whole)
        with caplog.at_level(logging.WARNING, "paceline"):
            Grammar.json_schema(with_leniency(whole))
    assert len(caplog.records) == 1


def test_a_schema_decides_itself_whether_it_is_a_guide() -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True, "item_separator": ","}}
    assert accepts(Grammar.json_schema(with_leniency(schema, lenient=False)), '["a","a"]')
    with pytest.raises(InvalidOption):
        Grammar.json_schema(with_leniency({**schema, "x-guidance": {"lenient": False}}))


def test_items_that_should_differ_end_in_a_guide_too() -> None:
    """A guide allows repeated items, but not endless lists."""
    many, free = [*"abcdefgh"], {"type": "array", "items": STRING, "uniqueItems": True}
    known = {**free, "items": {"enum": many}}
    assert allows(with_leniency(known), ["a"] * 8, ["a"] * 9, many) == [True, False, True]
    assert allows(with_leniency({**known, "maxItems": 7}), ["a"] * 7, ["a"] * 8) == [True, False]
    assert allows(with_leniency({**known, "maxItems": 20}), ["a"] * 8, ["a"] * 9) == [True, False]
    assert allows(with_leniency(free), ["a"] * 100, ["a"] * 101) == [True, False]
    assert allows(with_leniency({**free, "maxItems": 102}), ["a"] * 102, ["a"] * 103) == [True, False]
    assert allows(with_leniency({**free, "minItems": 102}), ["a"] * 102, ["a"] * 103) == [True, False]
    assert allows(with_leniency({"type": "array", "items": STRING}), ["a"] * 101) == [True]


def test_patterns_with_look_ahead() -> None:
    decimal = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert allows(decimal, "1.5", "-0", ".", "", "1.5.") == [True, True, False, False, False]
    both = {"type": "string", "pattern": r"^(?=.*\d)[a-z\d]{2,}$", "allOf": [{"pattern": "^a"}]}
    assert allows(both, "a1", "aa", "b1") == [True, False, False]
    keys = {"type": "object", "patternProperties": {"^(?=a)..$": INTEGER}, "additionalProperties": False}
    with pytest.raises(InvalidOption, match="patternProperties"):
        Grammar.json_schema(keys)
    assert allows(with_leniency(keys), {"b": 1}, {"b": "x"}) == [True, False]


def test_references_are_read_as_pointers() -> None:
    names = {"a b": {"const": "x"}, "c/d": {"const": "y"}}
    references = [{"$ref": "#/definitions/a%20b"}, {"$ref": "#/definitions/c~1d"}]
    assert allows({"definitions": names, "oneOf": references}, "x", "y", "z") == [True, True, False]
    for broken in ("#/nope", "https://example.com/x", "#/definitions/a/0", 5):
        with pytest.raises(InvalidOption):
            Grammar.json_schema({"allOf": [{"$ref": broken}, thing(a=INTEGER)], "definitions": {"a": []}})
    loop = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, thing(x=INTEGER)]}}, "$ref": "#/$defs/a"}
    assert enforceable_schema(loop, {})["$defs"]


def _nested(depth: int, key: str) -> Any:
    schema: Any = {}
    for i in range(depth):
        schema = {key: [schema, thing(**{f"p{i}": {}})]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        _nested(150, "allOf"),
        _nested(150, "oneOf"),
        _nested(900, "anyOf"),
        {"oneOf": [thing(f"k{i}", **{f"k{i}": {}}) for i in range(3000)], "properties": {"a": {}}},
        {
            "$defs": {"a": thing(**{f"k{i}": {} for i in range(3000)})},
            "anyOf": [{"allOf": [{"$ref": "#/$defs/a"}, thing(b={})]}] * 500,
        },
        {"type": "array", "items": {"enum": [*range(20_000)]}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": "x", "maxItems": -1},
        {"required": 5, "properties": [], "allOf": {}, "anyOf": [5, None, True], "$ref": [], "enum": 3, "type": 4},
        {"propertyNames": 5, "uniqueItems": 7, "not": [], "pattern": {}, "format": {}, "minimum": "x", "oneOf": [[]]},
    ],
)
def test_unusual_and_large_schemas_take_few_steps(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that the limit does not include would run millions of lines."""
    monkeypatch.setattr(schema_document, "_MAX_STEPS", 10_000)
    with counted() as lines, suppress(ValueError):  # too large, or too deep
        enforceable_schema(with_leniency(schema), {})
    assert lines() < 600_000
