"""The demo model itself: real weights, real text, every drafter, bit for bit where this machine can."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import paceline
from paceline.bench.perplexity import score, windows
from paceline.checkpoints.loader import Loaded, load_model
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.factory import make_drafter
from paceline.engine.self_check import guarantee
from paceline.kernels.cpu.build import library
from paceline.llm import LLM
from paceline.models.heads import ExitConfig
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.conftest import packaged_model
from tests.support.cover import some

pytestmark = pytest.mark.model

PROMPTS = (
    "List five fruits, one per line, then list them again in reverse order.",
    "Write a Python function that reverses a string, then the same function with type hints.",
)
GREEDY = Sampling(max_new_tokens=28)
WARM = Sampling(max_new_tokens=56, temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(scope="module", params=["int8", pytest.param("none", marks=pytest.mark.slow)])
def demo(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    """The model in codes, as it runs by default, and in floats, which take three times as long to load."""
    with packaged_model("demo", request.param) as model:
        yield model


@pytest.fixture(scope="module")
def floats() -> Iterator[Loaded]:
    with packaged_model("demo") as model:
        yield model


def drafted(demo: Loaded, spec: str, draft: DraftBudget | None) -> LLM:
    return LLM(demo, make_drafter(spec, demo, lambda reference: demo), draft)


@pytest.fixture(scope="module")
def plain(demo: Loaded) -> Callable[[str, Sampling], list[int]]:
    """Plain texts, each written once."""
    llm = LLM(demo)

    @cache
    def text(prompt: str, how: Sampling) -> list[int]:
        return llm.generate(prompt, how).token_ids

    return text


DRAFTED = {
    "ngram": ("ngram", None),
    "suffix chain": ("suffix", DraftBudget.chain(7)),
    "suffix tree": ("suffix", DraftBudget(12, 6, 3)),
    "model chain": ("model:itself", DraftBudget.chain(4)),
    "model tree": ("model:itself", DraftBudget(9, 3, 3)),
    "both": ("suffix+model:itself", DraftBudget.chain(3)),
}
CASES = {
    f"{name}, {way}": (*DRAFTED[name], how) for name in DRAFTED for way, how in (("greedy", GREEDY), ("warm", WARM))
}


@some("case", CASES, fast=["suffix chain, greedy"])
def test_every_drafter_writes_the_plain_text(
    demo: Loaded,
    plain: Callable[[str, Sampling], list[int]],
    case: tuple[str, DraftBudget | None, Sampling],
) -> None:
    spec, draft, how = case
    llm = drafted(demo, spec, draft)
    if llm.guarantee != "bits":
        pytest.skip("rows depend on their neighbours here, so equality holds up to rounding only")
    accepted = 0
    for prompt in PROMPTS:
        out = llm.generate(prompt, how)
        assert out.token_ids == plain(prompt, how)
        accepted += out.stats.accepted
    assert accepted > 0 or how is WARM, "speculation that never helps is no test"


@pytest.mark.slow
@pytest.mark.parametrize("draft", [DraftBudget.chain(4), DraftBudget(9, 3, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("how", [GREEDY, WARM], ids=["greedy", "warm"])
def test_layers_that_drafted_are_not_run_again_and_the_text_is_plain(
    demo: Loaded, plain: Callable[[str, Sampling], list[int]], draft: DraftBudget, how: Sampling
) -> None:
    llm = LLM(demo, EarlyExit(ExitConfig(hidden=576, layers=28), {}, demo.target, threshold=0.3), draft)
    if llm.guarantee != "bits":
        pytest.skip("rows depend on their neighbours here, so equality holds up to rounding only")
    out = llm.generate(PROMPTS[0], how)
    assert out.token_ids == plain(PROMPTS[0], how)
    assert out.stats.acceptance > 0.1


def test_a_model_drafting_for_itself_is_nearly_always_right(demo: Loaded) -> None:
    how = Sampling(max_new_tokens=20, ignore_eos=True)
    stats = drafted(demo, "model:itself", DraftBudget.chain(4)).generate(PROMPTS[0], how).stats
    assert stats.acceptance > 0.9


@pytest.mark.slow
def test_its_codes_of_write_one_text_and_predict_nearly_as_well(floats: Loaded) -> None:
    coded = load_model("demo", quantize="int8")
    short = replace(GREEDY, max_new_tokens=10)
    plain_text = LLM(coded).generate(PROMPTS[0], short).token_ids
    assert drafted(coded, "model:float", None).generate(PROMPTS[0], short).token_ids == plain_text
    text = "The sky is blue because air scatters short waves of light more than long ones. " * 2
    ids = floats.tokenizer.encode(text)
    plain, ours = (score(model.target, windows(ids, 64, 8)) for model in (floats, coded))
    assert abs(ours.perplexity / plain.perplexity - 1) < 0.1
    assert ours.agreement(plain) > 0.85


@pytest.mark.slow
def test_it_runs_on_its_own_codes_unless_floats_are_asked_for(demo: Loaded) -> None:
    if library() is None:
        pytest.skip("no kernels for codes: the weights become floats")
    auto = paceline.load("demo", drafter=None)
    assert (auto.model.quantize, auto.model.target.dtype) == ("int8", torch.bfloat16)  # type: ignore[attr-defined]
    coded = load_model("demo", quantize="int8", dtype="bfloat16")
    short = replace(GREEDY, max_new_tokens=10)
    assert auto.generate(PROMPTS[0], short).token_ids == LLM(coded).generate(PROMPTS[0], short).token_ids
    for floats in ({"quantize": "none"}, {"quantize": "auto", "dtype": "bfloat16"}):
        assert load_model("demo", **floats).quantize is None  # type: ignore[arg-type]


def test_it_speaks_english_and_stops_at_its_own_eos(demo: Loaded) -> None:
    out = LLM(demo).generate("What is 2 + 2?", Sampling(max_new_tokens=60))
    assert "4" in out.text
    assert out.finish_reason == "eos"
    assert out.token_ids[-1] in demo.eos
    assert "<|im_end|>" not in out.text


def test_rows_agree_bit_for_bit(demo: Loaded) -> None:
    if demo.quantize is None and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    assert guarantee(demo.target) == "bits"


def test_a_second_load_needs_no_network(monkeypatch: pytest.MonkeyPatch, demo: Loaded) -> None:
    import subprocess

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a second load must fetch nothing")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    began = time.perf_counter()
    llm = paceline.load("demo", drafter=None)
    print(f"loaded in {time.perf_counter() - began:.2f} s")
    assert llm.model.path == demo.path


@pytest.mark.slow
def test_the_first_questions_of_spec_bench(demo: Loaded, shared_prompts: Path) -> None:
    rows = [json.loads(line) for line in shared_prompts.read_text().splitlines()[::80]]
    speculative, plain = drafted(demo, "auto", None), LLM(demo)
    for row in rows:
        how = Sampling(max_new_tokens=32)
        a, b = (llm.generate(row["turns"][0], how) for llm in (speculative, plain))
        assert a.token_ids == b.token_ids or plain.guarantee == "rounding"
