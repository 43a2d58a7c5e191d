"""JSON as models write it: what is repaired, what is refused, and the work that reading takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.growing import GrowingText, Malformed, overlap, result_of
from paceline.text.loose_json import MAX_DEPTH, JsonReader, parse
from tests.support.counted_lines import counted

fuzz = settings(max_examples=2 * settings.default.max_examples)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
        ("[1, 2,]", [1, 2]),
        ('{"a": 1,}', {"a": 1}),
        ("{'a': 'it\\'s', 'b': 'it's'}", {"a": "it's", "b": "it's"}),
        ("{a: True, b-c: None, d: (1, 2)}", {"a": True, "b-c": None, "d": [1, 2]}),
        (r'"C:\dir \d+ \u00e9 \uZZ"', r"C:\dir \d+ é \uZZ"),
        (r'"\ud83d\ude00 \ud83d"', "\U0001f600 \N{REPLACEMENT CHARACTER}"),
        (' \n{"</tool_call>": "}"}\n', {"</tool_call>": "}"}),
        ('{"a": 1, "a": 2}', {"a": 2}),
    ],
)
def test_clear_mistakes_are_repaired(text: str, value: Any) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "NaN", "1e999", "-Infinity", "01", "1.", "+1", "[1 2]", "[,]", "[1,,2]", '{"a"}', '{"a": }'),
        *('{"a": 1', "[1", '"x', '{"a": 1} x', '{"a": [1}', "{1: 2", '"a" "b"', "\\", "9" * 5000, "open('x')"),
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "{" * 100_000,
    ],
)
def test_anything_else_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        parse(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@fuzz
@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_json_is_read_as_json(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert parse(text) == json.loads(text)


@fuzz
@given(VALUES, st.data())
def test_a_prefix_is_never_another_whole_value(value: Any, data: st.DataObject) -> None:
    text = json.dumps([value])
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(Malformed):
        parse(text[:cut])


PIECES = ['"', "'", "\\", "{", "}", "[", "]", ":", ",", " ", "\n", "a", "1", "-", ".5", "true", "None", "\\u12", "é"]


def scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from scalars(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from scalars(inner)
    else:
        yield value


@fuzz
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.integers(1, 4))
def test_only_contents_of_the_text_are_read(text: str, step: int) -> None:
    """The result does not depend on the pieces of the text."""
    growing = GrowingText()
    reading = JsonReader(growing).value()
    outcome: Any = Malformed
    try:
        for at in range(0, len(text), step):
            growing.push(text[at : at + step])
            next(reading)
        growing.is_complete = True
        outcome = result_of(reading)
    except StopIteration as ended:
        outcome = ended.value
    except Malformed:
        pass
    whole = GrowingText(text, is_complete=True)
    try:
        expected = result_of(JsonReader(whole).value())
    except Malformed:
        expected = Malformed
    assert outcome == expected
    if outcome is not Malformed:
        for one in scalars(outcome):
            words = str(abs(one)) if isinstance(one, float) else str(one)
            assert all(mark in text.lower() for mark in words.lower() if mark not in "0e+")
        try:
            strict = json.loads(text)
        except ValueError:
            return
        assert outcome == strict


HARD = ['{"a": "x\\n', '[{"a": [', '["\\"', "[' ", '{"a": 1, ', '"' + "x" * 40, "[1, ", " \n"]


@pytest.mark.parametrize("piece", HARD)
@pytest.mark.parametrize("step", [1, 10_000])
def test_the_work_is_linear(piece: str, step: int) -> None:
    def work(text: str) -> int:
        growing = GrowingText()
        reading = JsonReader(growing).value()
        with counted() as lines:
            for at in range(0, len(text), step):
                growing.push(text[at : at + step])
                try:
                    next(reading)
                except (StopIteration, Malformed):
                    break
                assert len(growing._held) <= step + 10  # the text before is not kept to be read again
            return lines()

    assert work(piece * 400) < 2.3 * work(piece * 200) + 500


def test_the_overlap_is_the_longest() -> None:
    assert [overlap(text, "<a>") for text in ("", "x", "<", "x<a", "<a>", "<<")] == [0, 0, 1, 2, 3, 1]
