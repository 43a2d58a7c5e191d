"""Replies follow their grammar, and are the same with every drafter and any other parameters."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.factory import make_drafter
from paceline.drafters.medusa import Medusa
from paceline.drafters.stack import DrafterWrapper
from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption, NoTokenLeft
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.heads import MedusaConfig
from paceline.sampling.grammar import Grammar
from paceline.sampling.grammar_matcher import Matcher
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import Draft, DraftBudget, Tap, Verdict
from tests.support.cover import cover, some
from tests.support.grammars import (
    DRAFTERS,
    END,
    GRAMMARS,
    SIZE,
    SPACES,
    WORDS,
    Unruly,
    allowed,
    how,
    matcher,
    undrafted,
)
from tests.support.tiny_heads import eagle_config, eagle_tensors, medusa_tensors
from tests.support.vocabularies import speaker

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def plain() -> LLM:
    """Return a toy that never ends a text and prefers earlier tokens."""
    return LLM(speaker(WORDS, seed=3))


@cache
def spoken(name: str, temperature: float) -> tuple[Sampling, list[int]]:
    """Return the sampling with a grammar, and the reply without drafts."""
    # A random toy continues forever with brackets and spaces.
    bias = {WORDS.vocabulary["x"]: 1.0} | dict.fromkeys(SPACES, -9.0)
    sampling = how(GRAMMARS[name][0], temperature, logit_bias=bias)
    return sampling, undrafted(LLM(speaker(WORDS, seed=3)), sampling, pytest.MonkeyPatch())


FORCED = {"forced": True, "unforced": False}


@cover(name=GRAMMARS.keys(), temperature=[0.0, 0.8], forced=FORCED, which=DRAFTERS.keys())
def test_every_drafter_writes_the_plain_text_and_it_is_valid(
    plain: LLM, name: str, temperature: float, forced: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, expected = spoken(name, temperature)
    assert expected[-1] == END
    text = plain.tokenizer.decode(expected)
    assert GRAMMARS[name][1](text)
    if not forced:
        monkeypatch.setattr(Sampler, "forced", lambda self, prefix, limit: [])
    make, draft = DRAFTERS[which]
    out = LLM(plain.model, make(plain, expected), draft).generate("Hi", sampling)
    assert out.token_ids == expected
    assert out.finish_reason == "eos"
    assert out.text == text


@cover(name=GRAMMARS.keys(), temperature=[0.0, 0.8], forced=FORCED)
def test_forced_tokens_are_never_wrong(
    plain: LLM, name: str, temperature: float, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, expected = spoken(name, temperature)
    if not forced:
        monkeypatch.setattr(Sampler, "forced", lambda self, prefix, limit: [])
    free = plain.generate("Hi", sampling)
    assert free.token_ids == expected
    assert free.stats.accepted == free.stats.drafted, "a forced token cannot be wrong"
    if name in ("schema", "literal", "nothing") and forced:
        assert free.stats.rounds < len(expected)


class Watched(DrafterWrapper):
    """Checks every draft: tokens that a drafter ranked with the sampler must be allowed after their path."""

    def __init__(self, inner: Drafter, grammar: Grammar) -> None:
        super().__init__(inner)
        self._grammar = grammar
        self.seen = 0
        self._prompts: dict[int, int] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._prompts[slot] = len(prompt)
        super().admit(slot, prompt)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            reply = list(ask.token_ids[self._prompts[ask.slot] :])
            paths: list[list[int]] = [[]]
            may: dict[int, set[int]] = {}
            for parent, token in zip(draft.parents, draft.tokens, strict=True):
                if parent not in may:
                    may[parent] = allowed(matcher(self._grammar), reply, paths[parent])
                assert token in may[parent]
                paths.append([*paths[parent], token])
                self.seen += 1
        return drafts


def eagle(llm: LLM, draft_vocab: int) -> Drafter:
    target = llm.model.target
    assert isinstance(target, Decoder)
    config = eagle_config(target.config, taps=(0, "final", "final"), draft_vocab=draft_vocab)
    return Eagle(config, eagle_tensors(config), target)


RANKED: dict[str, Callable[[LLM], Drafter]] = {
    "eagle": lambda llm: eagle(llm, SIZE),
    "few": lambda llm: eagle(llm, SIZE // 2),
    "itself": lambda llm: make_drafter("model:itself", llm.model, lambda reference: llm.model),
    "other": lambda llm: make_drafter("model:other", llm.model, lambda reference: speaker(WORDS, seed=8)),
}
"""Drafters that choose tokens with the sampler, after the true path."""
LONG = ["schema", "letters", "nested"]


@cache
def spoken_with_spaces(name: str, temperature: float) -> tuple[Sampling, list[int]]:
    """As `spoken`."""
    sampling = how(GRAMMARS[name][0], temperature, logit_bias={WORDS.vocabulary["x"]: 1.0})
    return sampling, undrafted(LLM(speaker(WORDS, seed=3)), sampling, pytest.MonkeyPatch())


RANKS = {"chain": (0.0, DraftBudget.chain(4)), "tree": (0.8, DraftBudget(10, 4, 3))}


@some(
    "case",
    {"-".join(names): names for names in product(LONG, RANKS, RANKED)},
    fast=[
        *("schema-chain-other", "schema-tree-few", "letters-chain-few", "letters-tree-eagle"),
        *("letters-tree-itself", "nested-chain-eagle", "nested-chain-itself", "nested-tree-other"),
    ],
)
def test_tokens_ranked_for_a_draft_are_allowed_there(
    plain: LLM, case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, how, which = case
    temperature, draft = RANKS[how]
    sampling, expected = spoken_with_spaces(name, temperature)
    monkeypatch.setattr(Sampler, "forced", lambda self, prefix, limit: [])
    watched = Watched(RANKED[which](plain), sampling.grammar or Grammar.json())
    out = LLM(plain.model, watched, draft).generate("Hi", sampling)
    assert out.token_ids == expected
    assert watched.seen
    assert out.stats.accepted or name != "schema"


@cover(name=LONG, temperature=[0.0, 0.8], draft={"chain": DraftBudget.chain(3), "tree": DraftBudget(12, 3, 3)})
def test_medusa_heads_draft_along_a_grammar(plain: LLM, name: str, temperature: float, draft: DraftBudget) -> None:
    """The rows assume the most likely path, so the grammar forbids some of the drafted tokens."""
    target = plain.model.target
    assert isinstance(target, Decoder)
    config = MedusaConfig(hidden=target.config.hidden, vocab_size=SIZE, heads=3, layers=1)
    sampling, expected = spoken_with_spaces(name, temperature)
    drafter = Medusa(config, medusa_tensors(config), target)
    assert LLM(plain.model, drafter, draft).generate("Hi", sampling).token_ids == expected


@cover(
    name=LONG,
    rule=["rejection", "block", "typical"],
    draft={"chain": DraftBudget.chain(5), "tree": DraftBudget(8, 3, 2)},
)
def test_other_rules_keep_to_the_grammar_too(plain: LLM, name: str, rule: Any, draft: DraftBudget) -> None:
    grammar, valid = GRAMMARS[name]
    drafter = make_drafter("model:other", plain.model, lambda reference: speaker(WORDS, seed=8))
    out = LLM(plain.model, drafter, draft).generate("Hi", how(grammar, 0.9, rule=rule))
    assert out.finish_reason == "eos"
    assert valid(out.text)


def test_a_matcher_that_is_not_rolled_back_fails(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the negative control of the tests above."""
    grammar, _ = GRAMMARS["digits"]
    expected = undrafted(plain, how(grammar, 0.8), monkeypatch)

    def forget(self: Matcher, count: int) -> bool:
        if count:
            del self._read[-count:], self._forced_runs[-count:]
        return True

    monkeypatch.setattr(Matcher, "_roll_back", forget)
    drafter = make_drafter("model:other", plain.model, lambda reference: speaker(WORDS, seed=8))
    llm = LLM(plain.model, drafter, DraftBudget(8, 3, 2))
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
    """Return True if a value follows a schema of `schemas`."""
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


@settings(max_examples=settings.default.max_examples // 2)
@given(schemas(), st.sampled_from([0.0, 0.8]), st.integers(0, 99))
def test_schemas_of_any_form(schema: dict[str, Any], temperature: float, seed: int) -> None:
    sampling = Sampling(
        max_new_tokens=400, temperature=temperature, seed=seed, grammar=Grammar.json_schema(schema), top_p=0.95
    )
    llm = LLM(speaker(WORDS, seed=3))
    expected = undrafted(llm, sampling, pytest.MonkeyPatch())
    said = json.loads(WORDS.decode(expected))
    assert expected[-1] == END
    assert fits(schema, said)
    for draft in (DraftBudget.chain(6), DraftBudget(12, 4, 3)):
        drafter = Unruly([*llm.encode("Hi"), *expected], 0.8)
        assert LLM(llm.model, drafter, draft).generate("Hi", sampling).token_ids == expected
    assert llm.generate("Hi", sampling).token_ids == expected


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
        expected = undrafted(plain, sampling, monkeypatch)
        assert out.token_ids == expected
        drafter = Unruly([*plain.encode("Hi"), *expected], 0.7)
        assert LLM(plain.model, drafter, DraftBudget(9, 3, 3)).generate("Hi", sampling).token_ids == expected


def test_stops_and_limits_cut_what_is_valid_so_far(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = GRAMMARS["schema"][0]
    whole = plain.tokenizer.decode(undrafted(plain, how(grammar, 0.0), monkeypatch))
    for more in ({"stop": '"age'}, {"stop": "}"}, {"stop_when": lambda ids, text: '"kind' in text}):
        sampling = how(grammar, 0.0, **more)
        expected = undrafted(plain, sampling, monkeypatch)
        for make, draft in (DRAFTERS[which] for which in ("right", "often right", "wrong", "suffix")):
            out = LLM(plain.model, make(plain, expected), draft).generate("Hi", sampling)
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


def test_a_ban_of_all_allowed_tokens_ends_only_that_request(plain: LLM) -> None:
    grammar = Grammar.regex("[xy]z{3}")
    banned = {token: -float("inf") for token, said in WORDS.token_bytes.items() if said.startswith(b"z")}
    sampling = how(grammar, 0.0, logit_bias=banned)
    for drafter in (None, Unruly([*plain.encode("Hi"), *WORDS.spell("xzzz")], 1.0)):
        llm = LLM(plain.model, drafter, DraftBudget.chain(3))
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
    """Records the requests to a drafter."""

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
    expected = [undrafted(plain, sampling, monkeypatch) for sampling in samplings]
    for drafter, draft in ((None, None), (Suffix(), DraftBudget(9, 4, 2)), (Suffix(), None)):
        llm = LLM(plain.model, drafter, draft)
        assert [out.token_ids for out in llm.generate(["Hi"] * 4, samplings)] == expected


def test_forced_text_takes_few_rounds_and_no_drafts(plain: LLM) -> None:
    drafter = Slots()
    out = LLM(plain.model, drafter, DraftBudget.chain(3)).generate("Hi", how(GRAMMARS["literal"][0], 0.8))
    assert out.stats.rounds <= 1 + len(out.token_ids) // 20
    assert sum(map(bool, drafter.asked)) <= 1, "only where the text ends"
