"""Adapters as models of the API: named in requests, listed, counted separately, each with its own drafter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.engine.draft_policy import SPECULATION_OFF
from paceline.engine.prefix_cache import PrefixCache
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.server.models import ModelSource
from paceline.server.worker import Worker
from paceline.testing import TINY, random_tensors
from tests.support.random_adapters import SETS, factors
from tests.support.running import Serving, serving
from tests.support.toys import loaded

TENSORS = random_tensors(TINY)
HELD = [factors(TENSORS, name, *what, scale=3.0) for name, what in SETS.items()]
NAMES = ["toy", *SETS]


@pytest.fixture(scope="module")
def adapted() -> Iterator[Serving]:
    target = Decoder(TINY, TENSORS, torch.float64, torch.device("cpu"), adapters=HELD)
    drafters = {"suffix": Suffix(), "ngram": NGram()}
    llm = LLM(
        loaded(target), drafters, adapters={"queries and values": None, "all": "ngram", "half of the gates": "none"}
    )
    llm.engine.prefixes = PrefixCache(1 << 28, chunk_invariant=True)  # float64 rounds too little to matter
    with serving(llm) as it:
        yield it


def chat(it: Serving, name: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "abc abc abc"}]
    return it.openai.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0, **more)


def test_requests_name_an_adapter_as_their_model(adapted: Serving) -> None:
    llm, messages = adapted.llm, [{"role": "user", "content": "abc abc abc"}]
    with ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda name: chat(adapted, name), NAMES * 2))
    for name, reply in zip(NAMES * 2, replies, strict=True):
        own = llm.generate(messages, adapter=None if name == "toy" else name, max_new_tokens=12, temperature=0.0)
        assert (reply.model, reply.choices[0].message.content) == (name, own.text)
    assert len({reply.choices[0].message.content for reply in replies}) == 4


def test_each_has_its_drafter(adapted: Serving) -> None:
    used = [chat(adapted, name).usage.speculation["drafter"] for name in NAMES]
    assert used == ["suffix", "suffix", "ngram", None]
    asked = chat(adapted, "all", extra_body={"speculation": {"drafter": "suffix"}})
    assert asked.usage.speculation["drafter"] == "suffix"


def test_a_server_without_a_drafter_leaves_adapters_theirs(adapted: Serving) -> None:
    worker = Worker(adapted.llm, default=SPECULATION_OFF)
    assert [worker.default_for(name).drafter for name in (None, *SETS)] == [None, None, "ngram", None]
    assert worker.default_for("queries and values") is SPECULATION_OFF


def test_the_list_names_them_and_their_model(adapted: Serving) -> None:
    listed = {model["id"]: model for model in adapted.get("/v1/models").json()["data"]}
    assert list(listed) == NAMES
    assert [model.get("parent") for model in listed.values()] == [None, "toy", "toy", "toy"]
    assert [model["paceline"]["default"] for model in listed.values()] == ["suffix", "suffix", "ngram", None]
    assert adapted.get("/v1/models/all").json()["id"] == "all"


def test_metrics_count_them_apart(adapted: Serving) -> None:
    counted = {}
    for name in ("all", "toy"):
        before = tokens(adapted)
        chat(adapted, name)
        counted[name] = {key for key, value in tokens(adapted).items() if value != before.get(key, 0.0)}
    assert counted == {"all": {"all"}, "toy": {"toy"}}
    text = adapted.get("/metrics").text
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="all"}' in text
    # A worker runs them all: its load is counted once.
    assert re.findall(r'vllm:num_requests_running\{model_name="([^"]*)"', text) == ["toy"]


def tokens(it: Serving) -> dict[str, float]:
    found = re.findall(r'vllm:generation_tokens_total\{model_name="([^"]*)"\} (\S+)', it.get("/metrics").text)
    return {name: float(count) for name, count in found}


def test_a_prompt_is_cached_for_its_own_adapter(adapted: Serving) -> None:
    def cached(name: str) -> int:
        prompt = "the same beginning, " * 10 + "and an end"
        reply = adapted.openai.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0)
        return int(reply.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr, arg-type]

    assert [cached(name) > 0 for name in ("toy", "all", "toy", "all")] == [False, False, True, True]


def test_other_names_are_refused(adapted: Serving) -> None:
    from openai import NotFoundError

    with pytest.raises(NotFoundError, match=r"'others' is not served here\. Use one of 'toy', 'queries and values'"):
        chat(adapted, "others")
    with pytest.raises(InvalidOption, match="both called a"):
        ModelSource(("a",), lambda: pytest.fail("loaded"), adapters=("a",))


def test_users_of_adapters_keep_the_model(adapted: Serving) -> None:
    for name in NAMES:
        chat(adapted, name)
    assert adapted.idle()
