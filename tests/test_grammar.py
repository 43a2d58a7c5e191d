"""Replies keep to their grammar, and are the same whatever drafts: masks, rollback, forced tokens, ends, errors."""

from __future__ import annotations

import builtins
import contextlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import grammar as module
from paceline.drafters.around import Around
from paceline.drafters.eagle import Eagle
from paceline.drafters.make import make_drafter
from paceline.drafters.medusa import Medusa
from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption, NoTokenLeft
from paceline.grammar import Grammar, Matcher
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.heads import MedusaConfig
from paceline.protocols import Ask, Drafter
from paceline.sampler import Prefix, Sampler
from paceline.sampling import Sampling, Vocabulary
from paceline.testing import Oracle, eagle_config, eagle_tensors, medusa_tensors
from paceline.tokenizer import Tokenizer
from paceline.types import Draft, Tap, Tree, Verdict
from tests.vocabularies import KINDS, byte_level, renumbered, speaker, tokenizer

pytest.importorskip("llguidance")

WORDS = byte_level()
SIZE = max(WORDS.vocabulary.values()) + 1
END = WORDS.vocabulary["</s>"]
SPACES = [token for token, said in WORDS.surfaces.items() if said.isspace()]

PERSON = {
    "type": "object",
    "properties": {
        "full_name_of_the_person": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["alpha", "beta", "naïve ☃", 3, None]},
        "version": {"const": "a rather long constant that leaves no choice at all"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "at": {"$ref": "#/$defs/point"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2}$"},
        "either": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    },
    "required": ["full_name_of_the_person", "age", "kind", "version", "tags", "at", "code", "either"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NESTED = 'start: "(" start ")" | "[" start "]" | "x"'

Valid = Callable[[str], object]


def full(pattern: str) -> Valid:
    return lambda text: re.fullmatch(pattern, text)


def balanced(text: str) -> bool:
    while (shorter := text.replace("(x)", "x").replace("[x]", "x")) != text:
        text = shorter
    return text == "x"


GRAMMARS: dict[str, tuple[Grammar, Valid]] = {
    "schema": (Grammar.json_schema(PERSON), lambda text: person(json.loads(text))),
    "spaced": (Grammar.json_schema({"enum": [{"a": 1}, [True, None]]}, whitespace=True), json.loads),
    "nothing": (Grammar.json_schema({"type": "object", "additionalProperties": False}), lambda text: text == "{}"),
    "empty": (Grammar.regex(""), lambda text: text == ""),
    "digits": (Grammar.regex(r"[0-9]{3}(-[0-9]{2})?"), full(r"[0-9]{3}(-[0-9]{2})?")),
    "letters": (Grammar.regex("(é|日本|☃|naïve){2,5}"), full("(é|日本|☃|naïve){2,5}")),
    "literal": (Grammar.regex("The quick answer isn't always the best one: about 40% of all readers."), len),
    "nested": (Grammar.lark(NESTED), balanced),
}


def person(said: Any) -> bool:
    """What `PERSON` asks for, by hand."""
    assert list(said) == PERSON["required"]
    assert len(said["full_name_of_the_person"]) <= 6
    assert 0 <= said["age"] <= 99
    assert said["kind"] in PERSON["properties"]["kind"]["enum"]  # type: ignore[index]
    assert said["version"] == PERSON["properties"]["version"]["const"]  # type: ignore[index]
    assert len(said["tags"]) <= 3
    assert "x" in said["at"]
    assert set(said["at"]) <= {"x", "y"}
    assert re.fullmatch("[A-Z]{2}-[0-9]{2}", said["code"])
    assert said["either"] is None or 0 <= said["either"] <= 9
    return True


@pytest.fixture(scope="module")
def plain() -> LLM:
    """A toy that ends no text by itself, and bends towards what it has said."""
    return LLM(speaker(WORDS, seed=3))


def how(grammar: Grammar, temperature: float, **more: Any) -> Sampling:
    return Sampling(max_new_tokens=240, temperature=temperature, seed=5, grammar=grammar, **more)


def alone(llm: LLM, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The reply without any draft."""
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "forced", lambda self, most: [])
        out = llm.generate("Hi", sampling)
    assert out.stats.drafted == 0
    return out.token_ids


class Unruly(Oracle):
    """An oracle whose drafts go on after the end, with whatever comes."""

    def __init__(self, text: Sequence[int], accuracy: float) -> None:
        super().__init__([*text, END, 7, 8, END, 9, END, END], accuracy, SIZE)


def drafters(llm: LLM, reply: Sequence[int]) -> list[tuple[Drafter, Tree]]:
    text = [*llm.encode("Hi"), *reply]
    return [
        (Unruly(text, 1.0), Tree.chain(7)),
        (Unruly(text, 0.7), Tree(14, 5, 3)),
        (Unruly(text, 0.0), Tree.chain(4)),
        (Suffix(), Tree(9, 4, 2)),
        (make_drafter("model:itself", llm.model, lambda reference: llm.model), Tree.chain(4)),
        (make_drafter("model:itself", llm.model, lambda reference: llm.model), Tree(10, 4, 3)),
        (make_drafter("model:other", llm.model, lambda reference: speaker(WORDS, seed=8)), Tree(8, 3, 2)),
        (make_drafter("model:foreign", llm.model, lambda reference: renumbered(WORDS, seed=8)), Tree.chain(3)),
    ]


@pytest.mark.parametrize("forced", [True, False], ids=["forced", "unforced"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", GRAMMARS)
def test_every_drafter_writes_the_plain_text_and_it_is_valid(
    plain: LLM, name: str, temperature: float, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, valid = GRAMMARS[name]
    # A random toy goes on with brackets and spaces for ever.
    sampling = how(grammar, temperature, logit_bias={WORDS.vocabulary["x"]: 1.0} | dict.fromkeys(SPACES, -9.0))
    expected = alone(plain, sampling, monkeypatch)
    assert expected[-1] == END
    text = plain.tokenizer.decode(expected)
    assert valid(text)
    if not forced:
        monkeypatch.setattr(Sampler, "forced", lambda self, most: [])
    for drafter, draft in drafters(plain, expected):
        out = LLM(plain.model, drafter, draft).generate("Hi", sampling)
        assert out.token_ids == expected
        assert out.finish_reason == "eos"
        assert out.text == text
    free = plain.generate("Hi", sampling)
    assert free.token_ids == expected
    assert free.stats.accepted == free.stats.drafted, "a forced token cannot be wrong"
    if name in ("schema", "literal", "nothing") and forced:
        assert free.stats.rounds < len(expected)


class Watched(Around):
    """Looks at every draft: what a drafter ranked with the sampler must be allowed along its path."""

    def __init__(self, inner: Drafter, grammar: Grammar) -> None:
        super().__init__(inner)
        self._grammar = grammar
        self.seen = 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            reply = ask.sampler.text[ask.sampler.prompt :]
            paths: list[list[int]] = [[]]
            for parent, token in zip(draft.parents, draft.tokens, strict=True):
                assert token in allowed(matcher(self._grammar), reply, paths[parent])
                paths.append([*paths[parent], token])
                self.seen += 1
        return drafts


def ranked(llm: LLM) -> list[Drafter]:
    """Those that choose what to draft with the sampler, at the true path."""
    target = llm.model.target
    assert isinstance(target, Decoder)
    eagle = eagle_config(target.config, taps=(0, "final", "final"), draft_vocab=SIZE)
    few = eagle_config(target.config, taps=(0, "final", "final"), draft_vocab=SIZE // 2)
    return [
        Eagle(eagle, eagle_tensors(eagle), target),
        Eagle(few, eagle_tensors(few), target),
        make_drafter("model:itself", llm.model, lambda reference: llm.model),  # type: ignore[list-item]
        make_drafter("model:other", llm.model, lambda reference: speaker(WORDS, seed=8)),  # type: ignore[list-item]
    ]


@pytest.mark.parametrize("draft", [Tree.chain(4), Tree(10, 4, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["schema", "letters", "nested"])
def test_what_is_ranked_for_a_draft_is_allowed_there(
    plain: LLM, name: str, temperature: float, draft: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = how(GRAMMARS[name][0], temperature, logit_bias={WORDS.vocabulary["x"]: 1.0})
    expected = alone(plain, sampling, monkeypatch)
    monkeypatch.setattr(Sampler, "forced", lambda self, most: [])
    for drafter in ranked(plain):
        watched = Watched(drafter, sampling.grammar or Grammar.json())
        out = LLM(plain.model, watched, draft).generate("Hi", sampling)
        assert out.token_ids == expected
        assert watched.seen
        assert out.stats.accepted or name != "schema"


def test_medusa_heads_draft_along_a_grammar(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows know of the likeliest path alone, so some of what they draft is forbidden where it stands."""
    target = plain.model.target
    assert isinstance(target, Decoder)
    config = MedusaConfig(hidden=target.config.hidden, vocab_size=SIZE, heads=3, layers=1)
    for name in ("schema", "letters", "nested"):
        for temperature in (0.0, 0.8):
            sampling = how(GRAMMARS[name][0], temperature, logit_bias={WORDS.vocabulary["x"]: 1.0})
            expected = alone(plain, sampling, monkeypatch)
            for draft in (Tree.chain(3), Tree(12, 3, 3)):
                drafter = Medusa(config, medusa_tensors(config), target)
                assert LLM(plain.model, drafter, draft).generate("Hi", sampling).token_ids == expected


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("name", ["schema", "letters", "nested"])
def test_other_rules_keep_to_the_grammar_too(plain: LLM, name: str, rule: Any) -> None:
    grammar, valid = GRAMMARS[name]
    for draft in (Tree.chain(5), Tree(8, 3, 2)):
        drafter = make_drafter("model:other", plain.model, lambda reference: speaker(WORDS, seed=8))
        out = LLM(plain.model, drafter, draft).generate("Hi", how(grammar, 0.9, rule=rule))
        assert out.finish_reason == "eos"
        assert valid(out.text)


def test_a_matcher_that_is_not_rolled_back_fails(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""
    grammar, _ = GRAMMARS["digits"]
    expected = alone(plain, how(grammar, 0.8), monkeypatch)

    def forget(self: Matcher, count: int) -> bool:
        if count:
            del self._read[-count:], self._runs[-count:]
        return True

    monkeypatch.setattr(Matcher, "_back", forget)
    drafter = make_drafter("model:other", plain.model, lambda reference: speaker(WORDS, seed=8))
    llm = LLM(plain.model, drafter, Tree(8, 3, 2))
    with contextlib.suppress(NoTokenLeft, InvalidOption):
        assert llm.generate("Hi", how(grammar, 0.8)).token_ids != expected


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    names = st.text('abcxyzé _-"\\', min_size=1, max_size=12)
    leaves: list[st.SearchStrategy[dict[str, Any]]] = [
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 3}]),
        st.integers(0, 999).map(lambda most: {"type": "integer", "minimum": 0, "maximum": most}),
        st.lists(names, min_size=1, max_size=4, unique=True).map(lambda found: {"enum": found}),
        names.map(lambda name: {"const": {name: [1, name]}}),
    ]
    if depth and draw(st.booleans()):
        fields = draw(st.lists(names, max_size=4, unique=True))
        return {
            "type": "object",
            "properties": {name: draw(schemas(depth=depth - 1)) for name in fields},
            "required": draw(st.lists(st.sampled_from(fields), unique=True)) if fields else [],
            "additionalProperties": False,
        }
    if depth and draw(st.booleans()):
        return {"type": "array", "items": draw(schemas(depth=depth - 1)), "maxItems": 2}
    return draw(st.one_of(leaves))


def fits(schema: Mapping[str, Any], said: Any) -> bool:
    """Whether a value is what a schema of `schemas` asks for."""
    if "const" in schema or "enum" in schema:
        return said in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "boolean":
            return isinstance(said, bool)
        case "null":
            return said is None
        case "string":
            return isinstance(said, str) and len(said) <= schema["maxLength"]
        case "integer":
            return isinstance(said, int) and 0 <= said <= schema["maximum"]
        case "array":
            return len(said) <= 2 and all(fits(schema["items"], item) for item in said)
    known = schema["properties"]
    return set(schema["required"]) <= set(said) <= set(known) and all(fits(known[k], v) for k, v in said.items())


@settings(max_examples=40)
@given(schemas(), st.sampled_from([0.0, 0.8]), st.integers(0, 99))
def test_schemas_of_any_form(schema: dict[str, Any], temperature: float, seed: int) -> None:
    sampling = Sampling(
        max_new_tokens=400, temperature=temperature, seed=seed, grammar=Grammar.json_schema(schema), top_p=0.95
    )
    llm = LLM(speaker(WORDS, seed=3))
    expected = alone(llm, sampling, pytest.MonkeyPatch())
    said = json.loads(WORDS.decode(expected))
    assert expected[-1] == END
    assert fits(schema, said)
    for draft in (Tree.chain(6), Tree(12, 4, 3)):
        drafter = Unruly([*llm.encode("Hi"), *expected], 0.8)
        assert LLM(llm.model, drafter, draft).generate("Hi", sampling).token_ids == expected
    assert llm.generate("Hi", sampling).token_ids == expected


# Rows, one by one


def matcher(grammar: Grammar, words: Tokenizer = WORDS, **more: Any) -> Matcher:
    size = max(words.vocabulary.values()) + 1
    return grammar.matcher(words, size, [words.vocabulary["</s>"]], **more)


def allowed(rows: Matcher, text: Sequence[int], path: Sequence[int] = (), size: int = SIZE) -> set[int]:
    """What may follow; the text is all reply."""
    row = rows(Prefix(list(text), path, 0), torch.zeros(size, dtype=torch.float64))
    return set(torch.nonzero(row == 0)[:, 0].tolist())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word piece"])
def test_rows_allow_what_can_still_become_one_of_the_texts(kind: str) -> None:
    """Against all texts of a finite language, for tokenizers of every kind."""
    words = tokenizer(kind)
    texts = [b"the best", b"then", b"them all", b"t", b"about the other"]
    texts = [text for text in texts if words.spell(text.decode()) and spelled(words, text) == text]
    rows = matcher(Grammar.regex("|".join(text.decode() for text in texts)), words)
    end, size = words.vocabulary["</s>"], max(words.vocabulary.values()) + 1
    told = random.Random(1)
    assert len(texts) > 2
    for _ in range(60):
        path: list[int] = []
        while end not in path:
            said = b"".join(words.surfaces[token] for token in path)
            left = [text for text in texts if text.startswith(said)]
            could = {t for t, more in words.surfaces.items() if more and any(x.startswith(said + more) for x in left)}
            may = allowed(rows, [], path, size)
            assert may
            assert may - {end} <= could
            assert (end in may) == (said in texts)
            assert len(left) == 1 or may - {end} == could or len(may) == 1
            path.append(told.choice(sorted(may)))
        assert b"".join(words.surfaces[token] for token in path[:-1]) in texts


def spelled(words: Tokenizer, text: bytes) -> bytes:
    return b"".join(words.surfaces[token] for token in words.spell(text.decode()))


def follow(rows: Matcher, count: int, told: random.Random) -> list[int]:
    """A random text that the grammar allows."""
    text: list[int] = []
    while len(text) < count and END not in text:
        text.append(told.choice(sorted(allowed(rows, [], text))))
    return text


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_row_depends_on_its_prefix_alone(name: str) -> None:
    """Rows in any order, with forbidden tokens and ends in their paths, against a fresh matcher for each."""
    grammar, _ = GRAMMARS[name]
    told = random.Random(7)
    for _ in range(6):
        text = follow(matcher(grammar), 60, told)
        rows, done = matcher(grammar), 0
        while done < len(text):
            for _ in range(4):
                path = text[done : done + told.randrange(7)]
                if told.random() < 0.6:
                    path = [*path[: told.randrange(len(path) + 1)], told.randrange(SIZE), *path[-1:]]
                if told.random() < 0.3:
                    most = told.randrange(9)
                    prefix = Prefix(text[:done], (), 0)
                    assert rows.forced(prefix, most) == matcher(grammar).forced(prefix, most)
                assert allowed(rows, text[:done], path) == allowed(matcher(grammar), text[:done], path)
            done += told.randrange(1, 5)


def test_forced_tokens_are_those_that_rows_leave() -> None:
    rows = matcher(GRAMMARS["schema"][0])
    forced = rows.forced(Prefix([], (), 0), 99)
    assert WORDS.decode(forced).startswith('{"full_name_of_the_person"')
    for at, token in enumerate(forced):
        assert allowed(rows, [], forced[:at]) == {token}
    assert rows.forced(Prefix([], (), 0), 3) == forced[:3]
    assert rows.forced(Prefix([], (), 0), 0) == []
    assert rows.forced(Prefix(forced[:4], (), 0), 99) == forced[4:]


def test_nothing_is_forced_where_the_text_may_end_or_has_ended() -> None:
    rows = matcher(Grammar.regex("ab(cd)?"))
    ab, cd = WORDS.spell("ab"), WORDS.spell("cd")
    assert allowed(rows, [], [END]) == set()
    assert rows.forced(Prefix(ab, (), 0), 9) == []
    assert END in allowed(rows, ab)
    assert len(allowed(rows, ab, [*cd, END])) == SIZE
    assert len(allowed(rows, ab, [*cd, END, 5, END])) == SIZE
    assert len(allowed(rows, ab, [END, *cd])) == SIZE
    assert allowed(rows, ab, cd) == {END}
    assert allowed(rows, [*ab, *cd]) == {END}
    assert rows.forced(Prefix([*ab, *cd], (), 0), 9) == []
    assert len(allowed(rows, [*ab, *cd, END])) == SIZE
    assert rows.forced(Prefix([*ab, *cd, END], (), 0), 9) == []


def test_a_literal_of_thousands_of_tokens_is_spelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    spell = Tokenizer.spell

    def counted(self: Tokenizer, text: str) -> list[int]:
        nonlocal asked
        asked += len(text)
        return spell(self, text)

    monkeypatch.setattr(Tokenizer, "spell", counted)
    words, text = byte_level(), "The quick answer. " * 200
    rows = matcher(Grammar.regex("(The quick answer[.] ){200}"), words)
    done: list[int] = []
    while not done or done[-1] != END:
        done += allowed(rows, done)
    assert words.decode(done) == text
    assert asked < 3 * len(text)


def test_rows_of_any_width_and_precision() -> None:
    for grammar, some in ((Grammar.regex("[a-c]+"), True), (Grammar.regex("abc"), False)):
        rows = matcher(grammar)
        wide = allowed(rows, [])
        assert (len(wide) > 1) == some
        for size in (SIZE - 7, SIZE + 40, 3):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                row = rows(Prefix([], (), 0), torch.ones(size, dtype=dtype))
                assert row.dtype == dtype
                assert set(torch.nonzero(row == 1)[:, 0].tolist()) == {t for t in wide if t < size}


def test_a_model_with_rows_beyond_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(speaker(WORDS, seed=3, padded=13))
    sampling = how(GRAMMARS["letters"][0], 0.8)
    expected = alone(llm, sampling, monkeypatch)
    assert GRAMMARS["letters"][1](WORDS.decode(expected))
    assert (
        LLM(llm.model, Unruly([*llm.encode("Hi"), *expected], 0.8), Tree.chain(4)).generate("Hi", sampling).token_ids
        == expected
    )


def test_special_tokens_are_no_text_and_lark_may_name_them() -> None:
    rows = matcher(Grammar.regex("(?s:.*)"))
    assert WORDS.vocabulary["<s>"] not in allowed(rows, [])
    assert END in allowed(rows, [])
    rows = matcher(Grammar.lark('start: "a" <s> "b"'))
    assert allowed(rows, WORDS.spell("a")) == {WORDS.vocabulary["<s>"]}


def test_rows_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, calls = matcher(Grammar.regex("[a-z]+")), 0
    compute = Matcher._allowed

    def counted(self: Matcher, prefix: Prefix) -> Any:
        nonlocal calls
        calls += 1
        return compute(self, prefix)

    monkeypatch.setattr(Matcher, "_allowed", counted)
    sampler = Sampler(processors=(rows,), text=[5, 6], prompt=2)
    path = WORDS.spell("ab")
    logits = torch.randn(2, SIZE)
    ranked = sampler.rank(logits, [[], path], 3)
    assert [sampler.choose(logits[0]), sampler.choose(logits[1], path)] == [best.tokens[0] for best in ranked]
    assert calls == 2


def test_a_row_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = matcher(GRAMMARS["schema"][0])
    text = follow(matcher(GRAMMARS["schema"][0]), 40, random.Random(3))
    take, left = Matcher._take, 5

    def failing(self: Matcher, token: int) -> bool:
        nonlocal left
        left -= 1
        if not left:
            raise MemoryError
        return take(self, token)

    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "_take", failing)
        with pytest.raises(MemoryError):
            allowed(rows, text[:20], text[20:30])
    for done in (20, 25):
        assert allowed(rows, text[:done], text[done:32]) == allowed(matcher(GRAMMARS["schema"][0]), text[:32])


def test_a_library_that_cannot_roll_back_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an error of its own, or beyond some limit."""

    class Stiff:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def deep_copy(self) -> Stiff:
            return Stiff(self._inner.deep_copy())

        def rollback(self, count: int) -> bool:
            return False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    grammar = GRAMMARS["nested"][0]
    inner = module._compiled(grammar, WORDS, SIZE, frozenset({END}))
    rows = Matcher(Stiff(inner), frozenset({END}))  # type: ignore[arg-type]
    text = follow(matcher(grammar), 12, random.Random(2))
    for done in range(len(text)):
        for path in ([], text[done : done + 3], WORDS.spell("(")):
            assert allowed(rows, text[:done], path) == allowed(matcher(grammar), text[:done], path)


# Beside other parameters


def test_min_new_tokens_holds_as_far_as_the_grammar_lets_it(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    short = how(Grammar.regex("[ab]{1,4}"), 0.0, logit_bias={END: 99.0})
    assert len(plain.generate("Hi", short).token_ids) == 2
    for least, tokens in ((3, 4), (100, 5)):
        sampling = how(Grammar.regex("[ab]{1,4}"), 0.0, logit_bias={END: 99.0}, min_new_tokens=least)
        out = plain.generate("Hi", sampling)
        assert out.finish_reason == "eos"
        assert len(out.text) >= min(least, 4)
        assert len(out.token_ids) <= tokens
        expected = alone(plain, sampling, monkeypatch)
        assert out.token_ids == expected
        drafter = Unruly([*plain.encode("Hi"), *expected], 0.7)
        assert LLM(plain.model, drafter, Tree(9, 3, 3)).generate("Hi", sampling).token_ids == expected


def test_stops_and_limits_cut_what_is_valid_so_far(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = GRAMMARS["schema"][0]
    whole = plain.tokenizer.decode(alone(plain, how(grammar, 0.0), monkeypatch))
    for more in ({"stop": '"age'}, {"stop": "}"}, {"stop_when": lambda ids, text: '"kind' in text}):
        sampling = how(grammar, 0.0, **more)
        expected = alone(plain, sampling, monkeypatch)
        for drafter, draft in drafters(plain, expected)[:4]:
            out = LLM(plain.model, drafter, draft).generate("Hi", sampling)
            assert out.token_ids == expected
            assert out.finish_reason == "stop"
            assert whole.startswith(out.text)
    for limit in (1, 3, 17):
        sampling = Sampling(max_new_tokens=limit, grammar=grammar)
        out = plain.generate("Hi", sampling)
        assert out.finish_reason == "length"
        assert len(out.token_ids) == limit
        assert whole.startswith(out.text)


def test_a_stop_token_that_is_text_is_not_the_grammars_end(plain: LLM) -> None:
    b = WORDS.vocabulary["b"]
    out = plain.generate("Hi", how(Grammar.regex("[xy]bb"), 0.0, stop_token_ids=[b]))
    assert out.finish_reason == "stop"
    assert out.text in ("x", "y")
    assert out.token_ids[1:] == [b]


def test_a_special_stop_token_ends_a_grammar(plain: LLM) -> None:
    start = WORDS.vocabulary["<s>"]
    sampling = how(Grammar.regex("[ab]{2}"), 0.0, stop_token_ids=[start], logit_bias={END: -float("inf")})
    out = plain.generate("Hi", sampling)
    assert out.finish_reason == "stop"
    assert re.fullmatch("[ab]{2}", out.text)


def test_a_ban_of_all_that_is_allowed_ends_that_request_alone(plain: LLM) -> None:
    grammar = Grammar.regex("[xy]z{3}")
    banned = {token: -float("inf") for token, said in WORDS.surfaces.items() if said.startswith(b"z")}
    sampling = how(grammar, 0.0, logit_bias=banned)
    for drafter in (None, Unruly([*plain.encode("Hi"), *WORDS.spell("xzzz")], 1.0)):
        llm = LLM(plain.model, drafter, Tree.chain(3))
        with pytest.raises(NoTokenLeft, match="grammar"):
            llm.generate("Hi", sampling)
        with llm.batch(["Hi", "Hi"], [sampling, how(grammar, 0.0)]) as batch, pytest.raises(NoTokenLeft):
            for _ in batch:
                pass
        assert list(batch.errors) == [0]
        assert re.fullmatch("[xy]z{3}", batch.completions[1].text)


def test_a_processor_of_the_users_cannot_allow_what_the_grammar_forbids(plain: LLM) -> None:
    def loud(prefix: Prefix, logits: Tensor) -> Tensor:
        return logits.fill_(3.0)

    assert re.fullmatch("[ab]{3}", plain.generate("Hi", how(Grammar.regex("[ab]{3}"), 0.0, processors=[loud])).text)


class Slots(Drafter):
    """Sees which requests a drafter is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def admit(self, slot: int, prompt: Sequence[int]) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asked += [ask.budget.nodes for ask in asks]
        return [Draft() for _ in asks]

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None: ...

    def release(self, slot: int) -> None: ...


def test_requests_with_and_without_a_grammar_share_rounds(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("schema", "literal", "letters")
    samplings = [*(how(GRAMMARS[name][0], 0.8) for name in names), Sampling(max_new_tokens=30, seed=1)]
    expected = [alone(plain, sampling, monkeypatch) for sampling in samplings]
    for drafter, draft in ((None, None), (Suffix(), Tree(9, 4, 2)), (Suffix(), None)):
        llm = LLM(plain.model, drafter, draft)
        assert [out.token_ids for out in llm.generate(["Hi"] * 4, samplings)] == expected


def test_a_forced_stretch_takes_few_rounds_and_asks_no_drafter(plain: LLM) -> None:
    drafter = Slots()
    out = LLM(plain.model, drafter, Tree.chain(3)).generate("Hi", how(GRAMMARS["literal"][0], 0.8))
    assert out.stats.rounds <= 1 + len(out.token_ids) // 20
    assert sum(map(bool, drafter.asked)) <= 1, "only where the text ends"


# What is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
        (lambda: Grammar.json_schema({"not": {}}), "not"),
        (lambda: Grammar.json_schema({"$ref": "#/nope"}), "nope"),
        (lambda: Grammar.json_schema({"enum": []}), "empty"),
        (lambda: Grammar.json_schema({"minLength": 5, "maxLength": 2, "type": "string"}), "minLength"),
        (lambda: Grammar.json_schema({"oneOf": [{"type": "string"}, {"type": "string"}]}), "oneOf"),
        (lambda: Grammar.json_schema("{"), "JSON schema"),
        (lambda: Grammar.json_schema("3"), "object schema"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "no JSON"),
        (lambda: Grammar.json_schema(False), "Unsatisfiable"),
        (lambda: Grammar.json_schema("false"), "Unsatisfiable"),
        (lambda: Grammar.regex("("), "unclosed group"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.lark("strt: /a/"), "start"),
        (lambda: Grammar.lark("start: a"), "unknown name"),
        (lambda: Grammar("gbnf", "root"), "gbnf"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_enforced_is_refused_before_anything_begins(make: Callable[[], Grammar], said: str) -> None:
    with pytest.raises(InvalidOption, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_what_the_model_lacks_is_refused_before_anything_begins(plain: LLM) -> None:
    with pytest.raises(InvalidOption, match="special token"):
        plain.stream("Hi", how(Grammar.lark("start: <|tool|>"), 0.0))
    with pytest.raises(InvalidOption, match="ignore_eos"):
        how(Grammar.json(), 0.0, ignore_eos=True)
    with pytest.raises(InvalidOption, match="no grammar"):
        Sampling(grammar="a+")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="no tokenizer"):
        how(Grammar.json(), 0.0).sampler([1], vocabulary=Vocabulary(SIZE, [END]))
    with pytest.raises(InvalidOption, match="end-of-sequence"):
        how(Grammar.json(), 0.0).sampler([1], vocabulary=Vocabulary(SIZE, (), None, WORDS))


def test_a_grammar_too_complex_to_follow_fails_alone(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    limits = llguidance.LLParserLimits(max_items_in_row=3, step_max_items=4)
    compiled = llguidance.LLMatcher(
        module._words(WORDS, SIZE, frozenset({END})), module._source(Grammar.lark(NESTED)), log_level=0, limits=limits
    )
    rows = Matcher(compiled, frozenset({END}))
    with pytest.raises(InvalidOption, match="cannot be followed"):
        allowed(rows, [WORDS.vocabulary["("]] * 30)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidOption, match=r"paceline\[grammar\]"):
        Grammar.regex("a{17}")


def test_any_json_object(plain: LLM) -> None:
    rows = matcher(Grammar.json(whitespace=True))
    for text in ("{}", '{"a": [1, -2.5e3, {"b": null}], "ü": "\\n\\"\\\\"}', '{\n  "a" : 1\n}', '{"a":"☃日"}'):
        tokens = WORDS.spell(text)
        assert allowed(rows, [], tokens) == {END}
    for text in ("[", "1", '{"a" 1', "{a", '{"a": tru1', '{"a": 1}}'):
        tokens = WORDS.spell(text)
        assert not any(tokens[-1] in allowed(rows, [], tokens[:at]) for at in [len(tokens) - 1])


def test_a_grammar_is_compiled_once() -> None:
    grammar = Grammar.json_schema(PERSON)
    assert grammar == GRAMMARS["schema"][0]
    assert hash(Sampling(grammar=grammar)) == hash(Sampling(grammar=GRAMMARS["schema"][0]))
    before = module._compiled.cache_info().misses
    matcher(grammar)
    once = module._compiled.cache_info().misses
    matcher(Grammar.json_schema(json.dumps(PERSON)))
    assert module._compiled.cache_info().misses == once
    assert once - before <= 1
