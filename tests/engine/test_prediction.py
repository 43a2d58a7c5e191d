"""Predicted replies: the same text, with fewer rounds if the prediction is right and hardly more if it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.drafters.base import Drafter
from paceline.drafters.model import DraftModel
from paceline.drafters.suffix import Suffix
from paceline.engine.draft_policy import SPECULATION_OFF
from paceline.engine.prediction import PredictedReply, predicted_ids
from paceline.errors import InvalidOption
from paceline.sampling.grammar import Grammar
from paceline.sampling.parameters import Sampling
from paceline.types import Draft
from tests.support.counted_lines import counted
from tests.support.cover import cover
from tests.support.toys import toy_llm, toy_target

LENGTH = 80
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=LENGTH, ignore_eos=True),
    "warm": Sampling(max_new_tokens=LENGTH, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3),
    "rejection": Sampling(max_new_tokens=120, ignore_eos=True, temperature=1.0, seed=4, rule="rejection"),
}
DRAFTERS: dict[str, Any] = {
    "none": lambda: None,
    "suffix": Suffix,
    "model": lambda: DraftModel(toy_target(seed=9, layers=1), 37),
}


def edited(text: Sequence[int], *places: int) -> list[int]:
    """Return the text with one token replaced, one removed and one inserted at each of the positions."""
    found = list(text)
    for place in sorted(places, reverse=True):
        found[place : place + 3] = [(found[place] + 1) % 37, found[place + 2], 7]
    return found


@cover(name=["greedy", "warm"], drafter=[*DRAFTERS], together=[("name",), ("drafter",)])
def test_no_prediction_changes_the_text(name: str, drafter: str) -> None:
    sampling = SAMPLINGS[name]
    plain = toy_llm().generate("hello", sampling)
    predictions = {
        "right": plain.token_ids,
        "edited": edited(plain.token_ids, 20, 45, 65),
        "in part": plain.token_ids[40:70],
        "of another text": [int(i * i) % 37 for i in range(200)],
        "of one token": [5] * 500,
        "longer than the reply": plain.token_ids * 3,
        "text": plain.text,
    }
    made: Drafter | None = DRAFTERS[drafter]()
    llm, rounds = toy_llm(made), {}
    for kind, prediction in predictions.items():
        out = llm.generate("hello", sampling, prediction=prediction)
        assert out.token_ids == plain.token_ids, kind
        rounds[kind] = out.stats.rounds
    assert rounds["right"] <= LENGTH / 10, "4, 8, 16 and then 32 tokens a round"
    assert rounds["right"] < rounds["edited"] <= LENGTH / 2
    if drafter == "none":
        assert rounds["of another text"] > 0.9 * LENGTH


def test_rules_that_draw_reproduce_their_text() -> None:
    """Two runs give the same text at any speed: drafts are point masses, and their length does not depend on timing."""
    llm, sampling = toy_llm(layers=2), SAMPLINGS["rejection"]
    prediction = toy_llm(layers=2).generate("hello", replace(sampling, rule="match")).token_ids
    first = llm.generate("hello", sampling, prediction=prediction)
    assert first.stats.accepted > 0
    assert llm.generate("hello", sampling, prediction=prediction).token_ids == first.token_ids


def test_batches_and_samples_are_predicted_too() -> None:
    llm, sampling = toy_llm(), SAMPLINGS["warm"]
    plain = llm.generate(["one", "two"], sampling, n=2)
    predicted = llm.generate(["one", "two"], sampling, n=2, prediction=plain[0].token_ids)
    assert [out.token_ids for out in predicted] == [out.token_ids for out in plain]
    assert predicted[0].stats.rounds < LENGTH / 10


def test_a_grammar_comes_first() -> None:
    llm, sampling = toy_llm(), Sampling(max_new_tokens=30, grammar=Grammar.regex("(yes|no), (yes|no)"))
    plain = llm.generate("hello", sampling)
    assert llm.generate("hello", sampling, prediction="maybe, maybe not").text == plain.text


def test_without_speculation_nothing_is_drafted() -> None:
    llm = toy_llm()
    sampling = Sampling(max_new_tokens=16, prediction=[1, 2, 3])
    request = llm.start([1, 2], sampling, speculation=SPECULATION_OFF)
    llm.engine.prefill(request)
    while not request.finish:
        llm.engine.step([request])
    llm.engine.finish(request)
    assert request.stats.drafted == 0


def test_accepted_tokens_are_counted() -> None:
    llm, sampling = toy_llm(), SAMPLINGS["greedy"]
    plain = llm.generate("hello", sampling).token_ids
    out = llm.generate("hello", sampling, prediction=[*plain[:50], (plain[50] + 1) % 37])
    assert (out.stats.predicted, out.stats.confirmed) == (51, 50)
    assert out.stats.as_dict()["confirmed"] == 50
    assert "predicted" not in llm.generate("hello", sampling).stats.as_dict()


def follow(prediction: PredictedReply, text: Sequence[int]) -> list[int]:
    """Simulate a reply. Return the number of accepted draft tokens in each round."""
    at, kept = 0, []
    while at < len(text):
        draft = prediction.propose(len(text) - at - 1)
        count = next(
            (i for i, (a, b) in enumerate(zip(draft.tokens, text[at:], strict=False)) if a != b), len(draft.tokens)
        )
        prediction.observe(draft, tuple(text[at : at + count + 1]))
        kept.append(count)
        at += count + 1
    return kept


def test_the_draft_grows_while_it_is_kept_and_starts_over_after_a_difference() -> None:
    text = list(range(200))
    kept = follow(PredictedReply(text), text)
    assert kept[:5] == [4, 8, 16, 32, 32]
    changed = [*text[:100], 999, *text[101:]]
    kept = follow(PredictedReply(text), changed)
    assert sum(kept) + len(kept) == len(text)
    assert kept.count(0) <= 3, "the difference, and the pair that shows where the reply goes on"
    assert follow(PredictedReply(text), [999] * 50) == [0] * 50


def test_insertions_and_deletions_are_followed() -> None:
    text = list(range(300))
    for changed in ([*text[:100], 901, 902, 903, *text[100:]], text[:100] + text[150:]):
        assert len(follow(PredictedReply(text), changed)) < 30
    moved = text[200:] + text[:200]
    assert len(follow(PredictedReply(text), moved)) < 30


def test_a_prediction_that_keeps_failing_is_used_less_often() -> None:
    """Pairs of tokens from the prediction occur everywhere in this text, but never with the same successor."""
    prediction = PredictedReply([token for i in range(200) for token in (1, 2, 100 + i)])
    drafts = 0
    for i in range(100):
        for token in (1, 2, 500 + i):
            draft = prediction.propose(8)
            drafts += bool(draft.tokens)
            prediction.observe(draft, (token,))
    assert drafts < 10


@pytest.mark.parametrize("tokens", [[5] * 30_000, [5, 6] * 15_000, list(range(30_000)), []])
def test_hostile_predictions_cost_little(tokens: list[int]) -> None:
    with counted() as lines:
        prediction = PredictedReply(tokens)
        begun = lines()
        for i in range(2000):
            draft = prediction.propose(32)
            assert len(draft.tokens) <= 32
            prediction.observe(draft, (5, 6 + i % 3))
    assert prediction.accepted <= len(tokens)
    assert begun < 5 * 30_000
    assert lines() - begun < 100 * 2000, "bounded for each round, whatever the prediction's length"


def test_of_a_long_text_only_what_a_reply_can_hold_is_encoded() -> None:
    seen: list[str] = []

    def encode(text: str, special: bool) -> list[int]:
        seen.append(text)
        return [1] * len(text)

    assert predicted_ids("x" * 10_000_000, encode, 100, 8) == (1,) * 100
    assert len(seen[0]) <= 100 * 64
    assert predicted_ids([3] * 500, encode, 100, 8) == (3,) * 100
    assert predicted_ids([3, 7, 8, 1], encode, 100, 8) == (3, 7), "up to a token that the model lacks"


@pytest.mark.parametrize("wrong", [[37], [-1], [True], 5, {"a": 1}])
def test_invalid_predictions_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="prediction"):
        toy_llm().generate("hello", Sampling(max_new_tokens=4), prediction=wrong)


def test_an_empty_prediction_is_none() -> None:
    out = toy_llm().generate("hello", Sampling(max_new_tokens=4), prediction="")
    assert out.stats.drafted == 0
    assert PredictedReply(()).propose(5) == Draft()
