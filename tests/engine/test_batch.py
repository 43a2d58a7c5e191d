"""Replies in a batch equal the replies to each prompt without the others."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cache.attention import SlabPlan
from paceline.cache.shared import SharedSlabCache
from paceline.drafters.base import Drafter
from paceline.drafters.model import DraftModel
from paceline.drafters.suffix import Suffix
from paceline.engine.results import Completion
from paceline.errors import InvalidOption, InvalidPrompt, NonFiniteLogits
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.testing import tiny_target
from paceline.types import DraftBudget, Forward
from tests.support.cover import cover, some
from tests.support.toys import loaded, toy_llm, toy_model, toy_target

PROMPTS = [
    "hello, world",
    [1, 2, 3],
    [{"role": "user", "content": "abcabcabcabc"}],
    "a",
    list(range(30)),
    "the cat, the dog, the cat, the",
    [7] * 12,
]
DRAFTERS: dict[str, tuple[Drafter | None, DraftBudget | None]] = {
    "none": (None, None),
    "suffix": (Suffix(), DraftBudget(9, 5, 2)),
    "another model": (DraftModel(toy_target(seed=9, layers=1), 37), DraftBudget.chain(4)),
    "the model itself": (DraftModel(toy_target(layers=1), 37), DraftBudget(7, 4, 2)),
}


@cache
def alone_of(*samplings: Sampling) -> list[Completion]:
    """Return the reply to each prompt without the others and without a drafter."""
    llm = toy_llm()
    return [llm.generate(prompt, how) for prompt, how in zip(PROMPTS, samplings, strict=True)]  # type: ignore[call-overload]


@cover(
    name=[*DRAFTERS],
    temperature=[0.0, 0.9],
    width=[1, 3, 32],
    together=[("name", "temperature"), ("width", "temperature")],
)
def test_a_batch_writes_the_same_as_single_requests(name: str, temperature: float, width: int) -> None:
    samplings = [
        Sampling(max_new_tokens=5 + 9 * (i % 4), temperature=temperature, seed=i, stop_token_ids=[i])
        for i in range(len(PROMPTS))
    ]
    alone = alone_of(*samplings)
    together = toy_llm(*DRAFTERS[name]).generate(PROMPTS, samplings, width=width)  # type: ignore[arg-type]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.text for c in together] == [c.text for c in alone]
    assert [c.finish_reason for c in together] == [c.finish_reason for c in alone]
    assert [c.prompt_tokens for c in together] == [c.prompt_tokens for c in alone]


def test_samples_of_one_prompt_differ_and_repeat() -> None:
    llm, how = toy_llm(Suffix()), Sampling(max_new_tokens=20, temperature=1.0, seed=5)
    several = llm.generate("hello, world", how, n=4)
    assert len({c.text for c in several}) == 4
    assert several[0].token_ids == llm.generate("hello, world", how).token_ids, "sample 0 equals the only reply"
    assert [c.token_ids for c in llm.generate("hello, world", how, n=4, width=3)] == [c.token_ids for c in several]
    both = llm.generate(["abc", "hello, world"], how, n=4)
    assert [c.token_ids for c in both[4:]] == [c.token_ids for c in several]


def test_samples_without_a_seed_share_one_and_differ() -> None:
    # So hot that no two of them are equal by chance.
    how = Sampling(max_new_tokens=24, temperature=5.0, ignore_eos=True)
    several = toy_llm().generate("hello", how, n=3)
    assert len({c.stats.seed for c in several}) == 1
    assert len({tuple(c.token_ids) for c in several}) == 3


def test_samples_share_the_prefill_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm()
    assert llm.guarantee
    fed: list[bool] = []
    honest = llm.model.target.forward
    monkeypatch.setattr(
        llm.model.target,
        "forward",
        lambda rows, cache, want: (fed.append(rows.prefill), honest(rows, cache, want))[1],
    )
    llm.generate(["hello, world", "abc"], Sampling(max_new_tokens=3, temperature=1.0), n=4)
    assert sum(fed) == 2
    assert len(fed) == 2 + 3, "and all eight share each round"


def test_chunks_come_as_they_are_written() -> None:
    llm = toy_llm(Suffix())
    batch = llm.batch(["hello", "abc", "x"], Sampling(max_new_tokens=6))
    seen = list(batch)
    texts = ["".join(chunk.text for i, chunk in seen if i == index) for index in range(3)]
    assert texts == [c.text for c in batch.completions]
    assert [i for i, _ in seen[:3]] == [0, 1, 2], "all move in every round"


def test_leaving_early_gives_every_slot_back() -> None:
    llm = toy_llm(Suffix())
    with llm.batch(["hello", "abc", "x"], Sampling(max_new_tokens=60), width=2) as batch:
        for _ in itertools.islice(batch, 7):
            pass
    assert [c.finish_reason for c in batch.completions] == ["cancelled"] * 2
    assert llm.engine.cache.acquire() in (0, 1)
    assert sum(len(c.token_ids) for c in batch.completions) == 7


def test_replies_can_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever request ends, the slots of a shared slab are adjacent and in the order of their requests."""
    read = SlabPlan.read

    def read_views(plan: SlabPlan, index: int) -> tuple[Tensor, Tensor]:
        assert plan._views, "slots were copied together"
        return read(plan, index)

    monkeypatch.setattr(SlabPlan, "read", read_views)
    rng = random.Random(3)
    how = [Sampling(max_new_tokens=rng.randint(1, 30)) for _ in range(20)]
    prompts = [[rng.randrange(36) for _ in range(rng.randint(1, 9))] for _ in how]
    model = toy_model()
    model.target._cache_type = SharedSlabCache  # type: ignore[attr-defined]
    done = LLM(model, Suffix()).generate(prompts, how, width=6)
    assert [len(c.token_ids) for c in done if c.finish_reason == "length"] == [
        h.max_new_tokens for c, h in zip(done, how, strict=True) if c.finish_reason == "length"
    ]


def test_a_failed_request_ends_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm()
    alone = [toy_llm().generate(p, Sampling(max_new_tokens=9)).token_ids for p in ("hello", "abc", "x")]
    honest = llm.model.target.forward

    def failing(rows, cache, want) -> Forward:  # type: ignore[no-untyped-def]
        logits = honest(rows, cache, want).logits.clone()
        if not rows.prefill and len(rows.slots) == 3:
            logits[1] = torch.nan
        return Forward(logits)

    monkeypatch.setattr(llm.model.target, "forward", failing)
    with pytest.raises(NonFiniteLogits) as caught:
        llm.generate(["hello", "abc", "x"], Sampling(max_new_tokens=9))
    partial = caught.value.partial
    assert isinstance(partial, list)
    assert [c.token_ids for c in partial] == [alone[0], [], alone[2]]
    assert [c.finish_reason for c in partial] == ["length", "error", "length"]


@pytest.mark.parametrize("wrong", [{"n": 0}, {"width": 0}, {"sampling": [Sampling()]}])
def test_a_batch_that_makes_no_sense_is_refused_before_any_work(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        toy_llm().generate(["a", "b"], **wrong)  # type: ignore[call-overload]


def test_one_bad_prompt_is_refused_before_any_work() -> None:
    llm = toy_llm()
    with pytest.raises(InvalidPrompt):
        llm.generate(["a", [99]])  # type: ignore[list-item]
    assert llm.engine.cache.lengths == []


def test_several_share_a_model() -> None:
    """A stream that is open during a batch has a slot among the batch's slots."""
    model = toy_model()
    llm = LLM(model)
    stream = llm.stream("hello", Sampling(max_new_tokens=12))
    head = [next(stream).token_id for _ in range(3)]
    batch = llm.generate(["abc", "x"], Sampling(max_new_tokens=8))
    assert [c.token_ids for c in batch] == [
        LLM(model).generate(p, Sampling(max_new_tokens=8)).token_ids for p in ("abc", "x")
    ]
    rest = [chunk.token_id for chunk in stream]
    assert head + rest == LLM(model).generate("hello", Sampling(max_new_tokens=12)).token_ids


@some("rule", ["rejection", "block", "typical"], fast=["block"])
def test_company_decides_nothing_under_rules_that_follow_the_draft_either(rule: str) -> None:
    how = Sampling(max_new_tokens=20, temperature=0.9, seed=4, rule=rule)  # type: ignore[arg-type]
    make = lambda: toy_llm(DraftModel(toy_target(seed=9, layers=1), 37))  # noqa: E731
    alone = [make().generate(prompt, how).token_ids for prompt in PROMPTS]  # type: ignore[call-overload]
    assert [c.token_ids for c in make().generate(PROMPTS, how)] == alone  # type: ignore[call-overload]


def test_threads_that_share_a_model_take_turns() -> None:
    llm = toy_llm(Suffix())
    how = [Sampling(max_new_tokens=40, temperature=0.9, seed=i) for i in range(6)]
    alone = [llm.generate(PROMPTS[i], how[i]).token_ids for i in range(6)]  # type: ignore[call-overload]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda i: llm.generate(PROMPTS[i], how[i]).token_ids, range(6)))  # type: ignore[call-overload]
    assert together == alone


def test_a_stream_dropped_in_the_middle_of_a_pass_keeps_its_slot_until_the_end() -> None:
    llm = toy_llm()
    other = llm.stream("abc", Sampling(max_new_tokens=9))
    next(other)

    def drop(prefix, logits):  # type: ignore[no-untyped-def]
        other.close()
        return logits

    plain = toy_llm().generate("hello", Sampling(max_new_tokens=9)).token_ids
    assert llm.generate("hello", Sampling(max_new_tokens=9, processors=[drop])).token_ids == plain
    assert llm.engine.cache.nbytes == 0, "and is given back then"  # type: ignore[attr-defined]


def test_a_failed_processor_or_criterion_ends_only_its_own_reply() -> None:
    def fails(prefix, logits):  # type: ignore[no-untyped-def]
        if len(prefix.reply) == 3:
            raise ZeroDivisionError
        return logits

    fine = Sampling(max_new_tokens=9)
    alone = toy_llm().generate("abc", fine).token_ids
    for drafter in (None, DraftModel(toy_target(seed=9, layers=1), 37)):
        for bad in (Sampling(processors=[fails]), Sampling(stop_when=lambda ids, text: 1 / (3 - len(ids)) < 0)):
            batch = toy_llm(drafter).batch(["hello", "abc"], [bad, fine])
            with pytest.raises(ZeroDivisionError):
                list(batch)
            assert list(batch.errors) == [0]
            assert batch.completions[1].token_ids == alone


def test_memory_of_a_wide_batch_or_a_long_text_is_not_held_for_the_next() -> None:
    llm = LLM(loaded(tiny_target(context_length=2048)))  # whose heads are stored without padding
    cache: Any = llm.engine.cache
    llm.generate(["a"] * 8, Sampling(max_new_tokens=2))
    assert cache.nbytes == 0
    bytes_of = llm.model.target.cache_bytes  # type: ignore[attr-defined]
    with llm.batch(["a"] * 8 + [[1] * 900], Sampling(max_new_tokens=400)) as batch:
        next(batch)
        assert cache.nbytes == bytes_of(8 * 256 + 1024)
    with llm.stream([1] * 900, Sampling(max_new_tokens=4)) as stream:
        next(stream)
        assert cache.nbytes == bytes_of(1024)


def test_samples_that_wait_begin_like_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm(Suffix())
    assert llm.guarantee
    fed = 0
    honest = llm.model.target.forward

    def count(rows, cache, want) -> Forward:  # type: ignore[no-untyped-def]
        nonlocal fed
        fed += rows.prefill
        return honest(rows, cache, want)

    how = Sampling(max_new_tokens=9, temperature=1.0, seed=1, ignore_eos=True)
    whole = llm.generate("hello, world", how, n=6)
    monkeypatch.setattr(llm.model.target, "forward", count)
    assert [c.token_ids for c in llm.generate("hello, world", how, n=6, width=2)] == [c.token_ids for c in whole]
    assert fed <= 3


@pytest.mark.parametrize("prompt", [None, 5, b"hi", {"role": "user"}, {1, 2}])
def test_invalid_prompts_are_named(prompt: Any) -> None:
    with pytest.raises(InvalidPrompt, match=r"a prompt must be .*, got (None|int|bytes|dict|set)\."):
        toy_llm().generate(prompt)
    with pytest.raises(InvalidPrompt, match="prompt 1 of the batch"):
        toy_llm().generate(["a", prompt])


def test_tensors_are_prompts() -> None:
    llm = toy_llm()
    assert llm.generate(torch.tensor([1, 2, 3])).token_ids == llm.generate([1, 2, 3]).token_ids  # type: ignore[call-overload]
