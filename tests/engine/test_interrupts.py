"""Errors and interrupts while slots are acquired and released: no error is hidden, and no slot stays occupied."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import Any

import pytest

from paceline.cache.slots import SlotTable
from paceline.drafters.eagle import Eagle
from paceline.engine.detokenizer import TextStream
from paceline.engine.scheduler import Scheduler
from paceline.errors import OutOfMemory, PromptTooLong
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.testing import run_together
from paceline.testing.tiny import start
from paceline.types import DraftBudget
from tests.support.inject import raising
from tests.support.tiny_heads import eagle_config, eagle_tensors
from tests.support.toys import toy_llm, toy_model

MODEL = toy_model()
EAGLE = eagle_config()
PROMPT = [1, 2, 3]
HOW: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.8, "seed": 1}


def drafted(remember: bool) -> tuple[LLM, Eagle]:
    """Return a model with a head, and with a prefix cache if `remember` is True."""
    eagle = Eagle(EAGLE, eagle_tensors(EAGLE), MODEL.target)
    llm = LLM(MODEL, eagle, DraftBudget.chain(3))
    if remember:
        llm.engine.remember(1 << 24)
    return llm, eagle


def taken(*caches: Any) -> int:
    """Return the number of occupied slots."""
    assert all(isinstance(cache, SlotTable) for cache in caches)
    return sum(len(cache.lengths) - len(cache._free) for cache in caches)


def fail_once(eagle: Eagle, method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, left = getattr(eagle._cache, method), [error]

    def fails(*args: Any) -> Any:
        if left:
            raise left.pop()
        return honest(*args)

    monkeypatch.setattr(eagle._cache, method, fails)


@pytest.mark.parametrize("remember", [False, True])
@pytest.mark.parametrize(("method", "prompt", "n"), [("fork", PROMPT, 2), ("acquire", [1], 1), ("acquire", PROMPT, 2)])
def test_an_interrupt_while_a_drafter_takes_a_slot_ends_the_call(
    method: str, prompt: list[int], n: int, remember: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, eagle = drafted(remember)
    expected = [one.token_ids for one in LLM(MODEL).generate(prompt, n=n, **HOW)]
    fail_once(eagle, method, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, n=n, **HOW)
    assert taken(llm.engine.cache, eagle._cache) == 0
    assert [one.token_ids for one in llm.generate(prompt, n=n, **HOW)] == expected


@pytest.mark.parametrize("remember", [False, True])
def test_lack_of_memory_while_a_drafter_takes_a_slot_is_recognised(
    remember: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, eagle = drafted(remember)
    expected = [one.token_ids for one in LLM(MODEL).generate(PROMPT, n=2, **HOW)]
    fail_once(eagle, "fork", OutOfMemory("no memory", "Use less"), monkeypatch)
    assert [one.token_ids for one in llm.generate(PROMPT, n=2, **HOW)] == expected, "the second sample waits"
    fail_once(eagle, "acquire", OutOfMemory("no memory", "Use less"), monkeypatch)
    with pytest.raises(OutOfMemory):
        llm.generate([1], **HOW)
    assert taken(llm.engine.cache, eagle._cache) == 0


def test_a_state_that_cannot_be_saved_does_not_fail_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, eagle = drafted(remember=True)
    expected = LLM(MODEL).generate(PROMPT, **HOW).token_ids
    monkeypatch.setattr(eagle, "save", lambda slot: {}[slot])
    assert llm.generate(PROMPT, **HOW).token_ids == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of interrupts within `__del__`
@pytest.mark.parametrize("lines", [False, True])
def test_an_interrupt_at_the_beginning_of_two_samples_leaks_no_slot(lines: bool) -> None:
    llm, eagle = drafted(remember=True)
    gc.freeze()  # collections then look at this test's objects only
    for moment in range(1, 1200 if lines else 300, 29):
        with raising(KeyboardInterrupt(), moment, lines), suppress(KeyboardInterrupt):
            llm.generate(PROMPT, n=2, **HOW)
        gc.collect()  # the error and the frames of its traceback refer to each other, and to the request
        # An interrupt may hit the release itself. The next request then takes the slot back.
        llm.generate(PROMPT, max_new_tokens=1)
        assert taken(llm.engine.cache) == 0, moment
    gc.unfreeze()
    assert taken(llm.engine.cache, eagle._cache) <= 1, "the drafter takes its slot back with the next request"


def test_the_slot_of_a_deleted_request_is_free() -> None:
    engine = toy_llm().engine
    request = start(engine, PROMPT, Sampling(), (), None)
    assert taken(engine.cache) == 1
    del request
    assert taken(engine.cache) == 0


@pytest.mark.parametrize("make", ["batch", "stream"])
def test_an_interrupt_in_a_constructor_leaves_nothing_to_complain_about(
    make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, ignored = toy_llm(), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.batch([PROMPT]) if make == "batch" else llm.stream(PROMPT)
    monkeypatch.undo()
    assert not ignored
    assert llm.generate(PROMPT, **HOW).token_ids
    assert taken(llm.engine.cache) == 0


def test_a_prompt_longer_than_the_context_is_an_error_by_every_door() -> None:
    llm = toy_llm(context_length=16)
    sampling = Sampling(max_new_tokens=4)
    long = [1] * 20
    for door in (
        lambda: llm.generate(long, sampling),
        lambda: llm.generate([long, [1]], sampling),
        lambda: llm.start(long, sampling),
        lambda: TextStream(sampling, (), str, -1),
        lambda: run_together(llm.engine, [long], [sampling]),
    ):
        with pytest.raises(PromptTooLong):
            door()
    assert run_together(llm.engine, [[1] * 16], [sampling])[0][:2] == ([], "length"), "no room is no error"
