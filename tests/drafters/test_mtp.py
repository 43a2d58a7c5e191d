"""Multi-token-prediction layers: their numbers equal transformers' layers, and off-by-one errors break them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.drafters.base import Ask
from paceline.drafters.eagle import Eagle
from paceline.drafters.growth import TreeGrowth
from paceline.engine.engine import Engine
from paceline.errors import CorruptModel, InvalidOption, UnsupportedModel
from paceline.kernels.cpu.build import library
from paceline.kernels.quantize import GROUP
from paceline.llm import load
from paceline.models.heads import EagleConfig, kind_of
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Ranked
from paceline.testing import run, run_together
from paceline.types import DraftBudget, Tap
from tests.support.cover import cover, some
from tests.support.mtp_reference import Reference
from tests.support.toy_cli import run as run_command

PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
WARM = Sampling(max_new_tokens=16, temperature=0.8, seed=5)
CASES = ("qwen3 next", "qwen3.5", "qwen3.5 moe", "deepseek v3", "glm4.5", "mimo")
reference = cache(Reference)


def opened(case: str, folder: Path) -> tuple[EagleConfig, Mapping[str, Tensor]]:
    head = open_head(reference(case).save(folder))
    assert isinstance(head.config, EagleConfig)
    assert kind_of(head.config) == "mtp"
    return head.config, head.tensors


class Spy(Eagle):
    """Records every row that it ranks: the text, the drafted path, and the logits [V]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[list[int], list[int], Tensor]] = []

    def rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        for path, row in zip(paths, logits, strict=True):
            self.seen.append((list(growth.ask.token_ids), list(path), row.clone()))
        return super().rank(growth, logits, paths, count)


@some("case", CASES, fast=["qwen3.5", "deepseek v3", "mimo"])
def test_every_row_is_what_transformers_layer_gives_for_its_path(case: str, tmp_path: Path) -> None:
    """Check trees of a ragged batch, over rounds that replace drafted states with true states."""
    truth = reference(case)
    spy = Spy(*opened(case, tmp_path), truth.target)
    samplings = [Sampling(max_new_tokens=9, temperature=t, seed=3) for t in (0.0, 3.0, 1.0)]
    prompts = [PROMPT, [3, 4], [i * i % 101 for i in range(40)]]
    run_together(Engine(truth.target, spy, DraftBudget(9, 4, 3)), prompts, samplings)
    assert {len(path) for _, path, _ in spy.seen} == {0, 1, 2, 3}
    assert len({len(text) for text, _, _ in spy.seen}) > 8
    for text, path, row in spy.seen[::7]:
        torch.testing.assert_close(row, truth.after_path(text, path)[0], rtol=1e-5, atol=1e-5)


@cover(
    case=["deepseek v3", "glm4.5", "mimo"],
    shape={"chain": DraftBudget.chain(4), "tree": DraftBudget(9, 4, 3)},
    together=[("case",), ("shape",)],
)
def test_the_text_does_not_depend_on_it(case: str, shape: DraftBudget, tmp_path: Path) -> None:
    """Compare texts in a ragged batch, greedy and sampled."""
    target = reference(case).target
    samplings = [Sampling(max_new_tokens=20, temperature=t, seed=4) for t in (0.0, 0.8, 1.5)]
    prompts = [PROMPT, [3, 4], [i * i % 101 for i in range(40)]]
    engine = Engine(target, Eagle(*opened(case, tmp_path), target), shape)
    replies = run_together(engine, prompts, samplings)
    assert [reply for reply, *_ in replies] == [run(target, *one)[0] for one in zip(prompts, samplings, strict=True)]


class LateStates(Eagle):
    """Gets the target's features of the previous position at each position."""

    def _receive(self, state: Any, taps: Mapping[Tap, Tensor], path: Sequence[int] | None = None) -> None:
        kept = slice(None) if path is None else [0, *path]
        super()._receive(state, {tap: states[kept].roll(1, 0) for tap, states in taps.items()})


class Shifted(Eagle):
    """Commits one row too few to its cache, so that all later rows are one position early."""

    def _read(self, states: Any, counts: Any, prefill: bool = False) -> None:
        super()._read(states, counts, prefill)
        for state in states:
            self._cache.truncate(state.cache_slot, self._cache.lengths[state.cache_slot] - 1)

    def limit(self, ask: Ask) -> DraftBudget:
        return ask.budget


def test_a_fitted_layer_is_always_right_and_an_off_by_one_breaks_it(tmp_path: Path) -> None:
    """Ridge regression fits its head to predict the next token wherever a draft in one short text begins."""
    truth, (config, tensors) = reference("qwen3.5"), opened("qwen3.5", tmp_path)
    text = PROMPT + run(truth.target, PROMPT, WARM)[0]
    ends = [(end, k) for end in range(len(PROMPT), len(text)) for k in range(min(3, len(text) - end))]
    assert len(ends) < 48, "or no head could know all of them"
    states = torch.stack([truth.after_path(text[:end], text[end : end + k])[1] for end, k in ends])
    wanted = torch.nn.functional.one_hot(torch.tensor([text[end + k] for end, k in ends]), 101).double()
    gram = states.T @ states + 1e-6 * torch.eye(states.shape[1], dtype=torch.float64)
    solved = 60 * torch.linalg.solve(gram, states.T @ wanted).T
    rounds = {}
    for kind in (Eagle, LateStates, Shifted):
        drafter = kind(config, {**tensors, "lm_head.weight": solved}, truth.target)
        reply, _, stats = run(truth.target, PROMPT, WARM, drafter, DraftBudget.chain(3))
        assert reply == text[len(PROMPT) :]
        rounds[kind] = stats.acceptance
    assert rounds.pop(Eagle) == 1.0
    assert max(rounds.values()) < 0.5, rounds


def words(folder: Path, count: int = 101) -> None:
    """Return a tokenizer with one token per word."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@some("case", ["qwen3.5", "deepseek v3", "glm4.5", "mimo"], fast=["glm4.5"])
def test_a_model_that_has_one_drafts_with_it(case: str, tmp_path: Path) -> None:
    """Select it by name, by "auto" and by "found", from its folder and from another model's folder."""
    folder = reference(case).save(tmp_path / "model")
    words(folder)
    plain = load(folder, drafter=None, dtype="float32")
    sampling: Any = {"max_new_tokens": 12, "temperature": 0.7, "seed": 2}
    expected = plain.generate(PROMPT, **sampling).token_ids
    for name, used in {"mtp": "mtp", "auto": "suffix+mtp", "found": "suffix+mtp", f"mtp:{folder}": "mtp:model"}.items():
        llm = load(folder, drafter=name, dtype="float32", draft=3)
        assert [policy.name for policy in llm.engine.policies] == [used]
        reply = llm.generate(PROMPT, **sampling)
        assert reply.token_ids == expected
        assert reply.stats.drafted > 0
    assert "mtp: a layer for multi-token prediction" in run_command("info", str(folder)).stdout
    assert json.loads(run_command("info", str(folder), "--json").stdout)["built_in_drafter"] == "mtp"


@pytest.mark.skipif(library() is None, reason="codes are the CPU kernels'")
@some(
    "how",
    {
        "int8": ("int8", "auto", True),
        "int4": ("int4", "auto", True),
        "none": ("none", "auto", False),
        "int8, but not the layer": ("int8", "none", False),
    },
    fast=["int8"],
)
def test_that_of_a_quantised_model_has_4_bits(how: tuple[Any, Any, bool], tmp_path: Path) -> None:
    quantize, draft_quantize, few = how
    folder = reference("qwen3.5").save(tmp_path)
    words(folder)
    options: Any = {"quantize": quantize, "device": "cpu"}
    plain = load(folder, drafter=None, **options).generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    llm = load(folder, drafter="mtp", draft=3, draft_quantize=draft_quantize, **options)
    reply = llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert reply.token_ids == plain.token_ids
    assert reply.stats.drafted > 0
    (policy,) = llm.engine.policies
    assert isinstance(policy.drafter, Eagle)
    group = policy.drafter._net._input._fc.weight()[0, :GROUP]
    assert (len(group.unique()) <= 16) == few


def test_one_that_cannot_be_used_is_left_out_unless_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = reference("qwen3.5").save(tmp_path)
    words(folder)
    held = load_file(folder / "model.safetensors")
    save_file(
        {name: x for name, x in held.items() if name != "mtp.pre_fc_norm_hidden.weight"}, folder / "model.safetensors"
    )
    (last,) = load(folder, dtype="float32", drafter="auto").engine.policies
    assert last.name == "suffix"
    assert "the model's own MTP layer is not used for drafting" in caplog.text
    with pytest.raises(CorruptModel):
        load(folder, dtype="float32", drafter="mtp")


def test_a_model_without_one(tmp_path: Path) -> None:
    truth = reference("qwen3.5")
    truth.model.save_pretrained(tmp_path)
    words(tmp_path)
    llm = load(tmp_path, dtype="float32")
    assert [policy.name for policy in llm.engine.policies] == ["suffix"]
    with pytest.raises(InvalidOption, match="hold no MTP layer"):
        load(tmp_path, drafter="mtp")
    with pytest.raises(UnsupportedModel, match="no learned drafter"):
        open_head(tmp_path)
    assert "built-in" not in run_command("info", str(tmp_path)).stdout


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    config, tensors = opened("qwen3.5", tmp_path)
    for name in tensors:
        with pytest.raises(CorruptModel, match=name.replace(".", r"\.")):
            Eagle(config, {key: x for key, x in tensors.items() if key != name}, reference("qwen3.5").target)
