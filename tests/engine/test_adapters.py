"""Requests with adapters: no drafter, cached text or other request in the batch changes the text of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch

from paceline.drafters.base import Drafter
from paceline.drafters.block import Block
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.request import Request
from paceline.engine.results import Batch
from paceline.engine.scheduler import Task
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors, run
from paceline.types import DraftBudget
from tests.support.cover import cover
from tests.support.random_adapters import SETS, factors
from tests.support.tiny_heads import TINY_BLOCK, TINY_MEDUSA, block_tensors, eagle_config, eagle_tensors, medusa_tensors
from tests.support.toys import loaded, toy_target

CPU = torch.device("cpu")
TENSORS = random_tensors(TINY)
HELD = [factors(TENSORS, name, *what, scale=3.0) for name, what in SETS.items()]
TARGET = Decoder(TINY, TENSORS, torch.float64, CPU, adapters=HELD)
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]


def merged(number: int) -> Decoder:
    """Return the model with this adapter merged."""
    tensors = {name: x.double() for name, x in TENSORS.items()}
    for module, (a, b) in HELD[number - 1].factors.items() if number else ():
        tensors[module + ".weight"] = tensors[module + ".weight"] + b.double() @ a.double()
    return Decoder(TINY, tensors, torch.float64, CPU)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "suffix": lambda: Suffix(remember=True),
    "ngram": NGram,
    "model": lambda: DraftModel(toy_target(), 37),
    "eagle": lambda: Eagle(eagle_config(), eagle_tensors(eagle_config()), TARGET),
    "medusa": lambda: Medusa(TINY_MEDUSA, medusa_tensors(), TARGET),
    "block": lambda: Block(TINY_BLOCK, block_tensors(), TARGET),
    "early exit": lambda: EarlyExit(ExitConfig(32, 1), {}, TARGET, threshold=0.0),
}


def begin(engine: Engine, prompt: Sequence[int], sampling: Sampling, number: int, source: Request | None) -> Request:
    stream = TextStream(sampling, (), lambda ids: "".join(map(chr, ids)), TINY.context_length - len(prompt))
    return engine.start(prompt, sampling.sampler(), stream, Stats(0, "bits"), source, adapter=number)


def texts(engine: Engine, requests: Sequence[tuple[Sequence[int], int]], sampling: Sampling) -> list[list[int]]:
    """Return replies to (prompt, adapter number), generated in one group, like samples of one prompt."""
    tasks = [Task(partial(begin, engine, prompt, sampling, number), group=0) for prompt, number in requests]
    for _ in Batch(engine, tasks, len(tasks)):
        pass
    made = [task.request for task in tasks if task.request]
    return [request.token_ids[request.num_prompt_tokens :] for request in made]


@cache
def expected(number: int, temperature: float) -> list[int]:
    """Return the text of the merged model."""
    return run(merged(number), PROMPT, Sampling(max_new_tokens=16, temperature=temperature, seed=4))[0]


@cover(
    name=[*DRAFTERS],
    draft=[None, DraftBudget(6, 3, 2)],
    temperature=[0.0, 0.9],
    together=[("name",), ("draft", "temperature")],
)
def test_texts_equal_the_merged_models_texts(name: str, draft: DraftBudget | None, temperature: float) -> None:
    """Requests share a batch. Prompts share prefill only if they have the same adapter."""
    sampling = Sampling(max_new_tokens=16, temperature=temperature, seed=4)
    numbers = [0, 1, 1, 2, 3, 0]
    together = texts(Engine(TARGET, DRAFTERS[name](), draft), [(PROMPT, number) for number in numbers], sampling)
    assert together == [expected(number, temperature) for number in numbers]
    assert len({tuple(text) for text in together}) == 4


@pytest.mark.parametrize("name", ["none", "eagle", "model"])
def test_a_prefix_is_found_only_under_its_own_adapter(name: str) -> None:
    engine, sampling = Engine(TARGET, DRAFTERS[name]()), Sampling(max_new_tokens=16, temperature=0.0, seed=4)
    prefixes = engine.prefixes = PrefixCache(1 << 30, chunk_invariant=True)  # float64 rounds too little to matter
    for found in (False, True):
        for number in (0, 1, 2, 3):
            hits = prefixes.hits
            assert texts(engine, [(PROMPT, number)], sampling) == [expected(number, 0.0)]
            assert (prefixes.hits > hits) == found


def test_a_request_that_gave_its_slot_back_has_its_adapter_again() -> None:
    engine, sampling = Engine(TARGET, Suffix()), Sampling(max_new_tokens=16, temperature=0.0, seed=4)
    request = begin(engine, PROMPT, sampling, 2, None)
    engine.prefill(request)
    while not request.finish:
        engine.step([request])
        if not request.finish:
            engine.suspend(request)
            engine.resume(request)
            engine.prefill(request)
    engine.finish(request)
    assert request.token_ids[len(PROMPT) :] == expected(2, 0.0)


def test_a_session_has_an_adapter() -> None:
    llm = LLM(loaded(TARGET))
    for number, name in enumerate([None, *SETS]):
        with llm.session(adapter=name) as ours, LLM(loaded(merged(number))).session() as theirs:
            for session in (ours, theirs):
                session.observe(PROMPT)
            torch.testing.assert_close(ours.logits_after([3, 4]), theirs.logits_after([3, 4]))
            for session in (ours, theirs):
                session.reset()  # it takes another slot
                session.observe(PROMPT[2:])
            torch.testing.assert_close(ours.next_logits(), theirs.next_logits())
    with pytest.raises(InvalidOption, match="no adapter 'other' is loaded"):
        llm.session(adapter="other")
