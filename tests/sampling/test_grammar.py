"""Rows of a grammar: masks, rollback, forced tokens, ends, and refused grammars."""

from __future__ import annotations

import builtins
import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.sampling import grammar as module
from paceline.sampling.grammar import Grammar
from paceline.sampling.grammar_matcher import Matcher
from paceline.sampling.parameters import Sampling, Vocabulary
from paceline.sampling.sampler import Prefix, Sampler
from paceline.text.tokenizer import Tokenizer
from paceline.types import DraftBudget
from tests.support.grammars import (
    END,
    GRAMMARS,
    NESTED,
    PERSON,
    SIZE,
    WORDS,
    Unruly,
    allowed,
    how,
    matcher,
    undrafted,
)
from tests.support.vocabularies import KINDS, byte_level, speaker, tokenizer

pytest.importorskip("llguidance")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word piece"])
def test_rows_allow_what_can_still_become_one_of_the_texts(kind: str) -> None:
    """Compare with all texts of a finite language, for every kind of tokenizer."""
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
            said = b"".join(words.token_bytes[token] for token in path)
            left = [text for text in texts if text.startswith(said)]
            rest = words.token_bytes.items()
            could = {t for t, more in rest if more and any(x.startswith(said + more) for x in left)}
            may = allowed(rows, [], path, size)
            assert may
            assert may - {end} <= could
            assert (end in may) == (said in texts)
            assert len(left) == 1 or may - {end} == could or len(may) == 1
            path.append(told.choice(sorted(may)))
        assert b"".join(words.token_bytes[token] for token in path[:-1]) in texts


def spelled(words: Tokenizer, text: bytes) -> bytes:
    return b"".join(words.token_bytes[token] for token in words.spell(text.decode()))


def follow(rows: Matcher, count: int, told: random.Random) -> list[int]:
    """Return a random text that the grammar allows."""
    text: list[int] = []
    while len(text) < count and END not in text:
        text.append(told.choice(sorted(allowed(rows, [], text))))
    return text


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_row_depends_only_on_its_prefix(name: str) -> None:
    """Compare rows in any order, with forbidden tokens and ends in their paths, with a new matcher for each."""
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


def test_forced_tokens_equal_the_only_allowed_tokens() -> None:
    rows = matcher(GRAMMARS["schema"][0])
    forced = rows.forced(Prefix([], (), 0), 99)
    assert WORDS.decode(forced).startswith('{"full_name_of_the_person"')
    for at, token in enumerate(forced):
        assert allowed(rows, [], forced[:at]) == {token}
    assert rows.forced(Prefix([], (), 0), 3) == forced[:3]
    assert rows.forced(Prefix([], (), 0), 0) == []
    assert rows.forced(Prefix(forced[:4], (), 0), 99) == forced[4:]


def test_forced_text_in_another_spelling_is_forbidden() -> None:
    """The bytes are right, but no row would have chosen these tokens."""
    rows = matcher(GRAMMARS["literal"][0])
    first = rows.forced(Prefix([], (), 0), 2)
    letters = [WORDS.vocabulary[letter] for letter in "The"]
    assert first[0] not in letters
    assert allowed(rows, [], letters[:1]) == set()
    assert allowed(rows, [], letters) == set()
    assert allowed(rows, [], first[:1]) == {first[1]}


def test_an_end_token_spelled_like_text_only_ends_the_reply() -> None:
    x, y = WORDS.vocabulary["x"], WORDS.vocabulary["y"]
    rows = Grammar.regex("x?y").matcher(WORDS, SIZE, [x, END])
    assert allowed(rows, []) == {y}
    assert allowed(rows, [y]) == {x, END}


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
    expected = undrafted(llm, sampling, monkeypatch)
    assert GRAMMARS["letters"][1](WORDS.decode(expected))
    assert (
        LLM(llm.model, Unruly([*llm.encode("Hi"), *expected], 0.8), DraftBudget.chain(4))
        .generate("Hi", sampling)
        .token_ids
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
    compute = Matcher._compute_allowed

    def counted(self: Matcher, prefix: Prefix) -> Any:
        nonlocal calls
        calls += 1
        return compute(self, prefix)

    monkeypatch.setattr(Matcher, "_compute_allowed", counted)
    sampler = Sampler(processors=(rows,))
    prefix = Prefix([5, 6], (), 2)
    path = WORDS.spell("ab")
    logits = torch.randn(2, SIZE)
    ranked = sampler.rank(prefix, logits, [[], path], 3)
    chosen = [sampler.choose(prefix, logits[0]), sampler.choose(prefix.after(path), logits[1])]
    assert chosen == [best.tokens[0] for best in ranked]
    assert calls == 2


class Wrapped:
    """An llguidance matcher with methods that a test can replace."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def deep_copy(self) -> Wrapped:
        return type(self)(self._inner.deep_copy())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Failing(Wrapped):
    """Fails once, after completing the call."""

    left = 5

    def try_consume_tokens(self, tokens: list[int]) -> int:
        Failing.left -= 1
        done: int = self._inner.try_consume_tokens(tokens)
        if not Failing.left:
            raise MemoryError
        return done


class Stiff(Wrapped):
    """Cannot roll back, as after an internal error or past a limit."""

    def rollback(self, count: int) -> bool:
        return False


def test_a_failing_row_leaves_no_trace() -> None:
    grammar = GRAMMARS["digits"][0]
    text = follow(matcher(grammar), 40, random.Random(3))
    Failing.left = len(text) - 1
    inner = grammar._compile(WORDS, SIZE, frozenset({END})).matcher
    rows = Matcher(Failing(inner), frozenset({END}))  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        allowed(rows, text[:1], text[1:])
    assert Failing.left == 0
    for done in range(1, len(text)):
        assert allowed(rows, text[:1], text[1:done]) == allowed(matcher(grammar), text[:done])


def test_a_matcher_that_cannot_roll_back_is_rebuilt() -> None:
    grammar = GRAMMARS["nested"][0]
    inner = grammar._compile(WORDS, SIZE, frozenset({END})).matcher
    rows = Matcher(Stiff(inner), frozenset({END}))  # type: ignore[arg-type]
    text = follow(matcher(grammar), 12, random.Random(2))
    for done in range(len(text)):
        for path in ([], text[done : done + 3], WORDS.spell("(")):
            assert allowed(rows, text[:done], path) == allowed(matcher(grammar), text[:done], path)


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
        (lambda: Grammar.json_schema("3"), "must be an object"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "not valid JSON"),
        (lambda: Grammar.json_schema(False), "Unsatisfiable"),
        (lambda: Grammar.json_schema("false"), "Unsatisfiable"),
        (lambda: Grammar.regex("("), "unclosed group"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.lark("strt: /a/"), "start"),
        (lambda: Grammar.lark("start: a"), "unknown name"),
        (lambda: Grammar("gbnf", "root"), "gbnf"),  # type: ignore[arg-type]
    ],
)
def test_unsupported_grammars_are_refused_before_anything_begins(make: Callable[[], Grammar], said: str) -> None:
    with pytest.raises(InvalidOption, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_tokens_that_the_model_lacks_are_refused_before_anything_begins() -> None:
    with pytest.raises(InvalidOption, match="special token"):
        LLM(speaker(WORDS)).stream("Hi", how(Grammar.lark("start: <|tool|>"), 0.0))
    with pytest.raises(InvalidOption, match="ignore_eos"):
        how(Grammar.json(), 0.0, ignore_eos=True)
    with pytest.raises(InvalidOption, match="is not a Grammar"):
        Sampling(grammar="a+")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="needs a tokenizer"):
        how(Grammar.json(), 0.0).sampler(vocabulary=Vocabulary(SIZE, [END]))
    with pytest.raises(InvalidOption, match="end-of-sequence"):
        how(Grammar.json(), 0.0).sampler(vocabulary=Vocabulary(SIZE, (), None, WORDS))


def test_a_grammar_too_complex_to_follow_is_an_error_and_no_end() -> None:
    import llguidance

    limits = llguidance.LLParserLimits(max_items_in_row=3, step_max_items=4)
    compiled = llguidance.LLMatcher(
        module._llguidance_tokenizer(WORDS, SIZE, frozenset({END})),
        Grammar.lark(NESTED)._source(),
        log_level=0,
        limits=limits,
    )
    rows = Matcher(compiled, frozenset({END}))
    with pytest.raises(InvalidOption, match="became too complex"):
        allowed(rows, [WORDS.vocabulary["("]] * 30)
    sampler = Sampler(processors=(rows,))
    prefix = Prefix([WORDS.vocabulary["("]] * 30)
    assert sampler.forced(prefix, 9) == [], "the target raises the error, and only its request ends"
    assert sampler.rank(prefix, torch.zeros(1, SIZE), [()], 3)[0].tokens == []
    with pytest.raises(InvalidOption, match="became too complex"):
        sampler.choose(prefix, torch.zeros(SIZE))


def test_the_error_names_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidOption, match=r"\[grammar\]"):
        Grammar.regex("a{17}")


def test_any_json_object() -> None:
    rows = matcher(Grammar.json(whitespace=True))
    for text in ("{}", '{"a": [1, -2.5e3, {"b": null}], "ü": "\\n\\"\\\\"}', '{\n  "a" : 1\n}', '{"a":"☃日"}'):
        tokens = WORDS.spell(text)
        assert allowed(rows, [], tokens) == {END}
    for text in ("[", "1", '{"a" 1', "{a", '{"a": tru1', '{"a": 1}}'):
        tokens = WORDS.spell(text)
        assert not any(tokens[-1] in allowed(rows, [], tokens[:at]) for at in [len(tokens) - 1])


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar.json_schema(PERSON)
    assert grammar == GRAMMARS["schema"][0]
    assert hash(Sampling(grammar=grammar)) == hash(Sampling(grammar=GRAMMARS["schema"][0]))
    matcher(grammar)
    monkeypatch.setattr(module.grammar_compile, "compile_matcher", None)
    matcher(Grammar.json_schema(json.dumps(PERSON)))


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted grammar still counts while a reply uses it."""
    monkeypatch.setattr(module, "_compiled", module.Cache(30 * 2**20))
    before = module.live_bytes()
    rows = [Grammar("regex", f"kept{n}", size=2**20).matcher(WORDS, SIZE, [END]) for n in range(5)]
    assert module.live_bytes() - before == 5 * 13 * 2**20
    del rows
    gc.collect()
    assert module.live_bytes() - before == 2 * 13 * 2**20


def test_evicted_grammars_are_not_compiled_again_while_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", module.Cache(1))
    grammar = Grammar.regex("held[0-9]{3}")
    rows = grammar.matcher(WORDS, SIZE, [END])
    before = module.live_bytes()
    monkeypatch.setattr(module.grammar_compile, "compile_matcher", None)
    again = grammar.matcher(WORDS, SIZE, [END])
    assert module.live_bytes() == before
    assert allowed(again, []) == allowed(rows, [])


def test_additional_end_tokens_share_the_compiled_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, each set of end tokens would need its own llguidance tokenizer: half a second and ten megabytes."""
    grammar = Grammar.regex("ab?")
    a, b, start = WORDS.vocabulary["a"], WORDS.vocabulary["b"], WORDS.vocabulary["<s>"]
    matcher(grammar)
    monkeypatch.setattr(module.grammar_compile, "compile_matcher", None)
    rows = grammar.matcher(WORDS, SIZE, [END], extra_ends=[start])
    assert not {END, start} & allowed(rows, [])
    assert {b, END, start} <= allowed(rows, [a])
    assert allowed(rows, [a, b]) == {END, start}
    late = grammar.matcher(WORDS, SIZE, [END], min_tokens=2, delayed_ends=[END, start], extra_ends=[start])
    assert allowed(late, [a]) == {b}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("start: s\ns: /[a-z ]/ | s s | s s s\n", marks=pytest.mark.slow),
        "start: a\na: b a c | b c |\nb: /[a-z]/ | a b\nc: /[a-z]/ | c a\n",
    ],
)
def test_a_grammar_that_becomes_slower_and_slower_is_abandoned(text: str) -> None:
    """Its masks would soon take half a second each, between all requests' rounds.

    See `grammar_compile._MAX_PARSER_ITEMS`.
    """
    rows, told, read = matcher(Grammar.lark(text)), random.Random(0), list[int]()

    def walk() -> None:
        for _ in range(200):
            read.append(told.choice(sorted(allowed(rows, [], read) - {END})))

    with pytest.raises(InvalidOption, match="became too complex"):
        walk()


@pytest.mark.slow
def test_llguidance_is_imported_by_the_first_grammar() -> None:
    code = "import paceline.llm, paceline.sampling.grammar, paceline.cli, sys; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
