"""Families with layer norms, mostly with parallel attention and MLP: texts, batches, rollbacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import pytest
import torch

from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.tensor_names import decoder_tensors
from paceline.drafters.base import Drafter
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.kernels.activations import UNGATED
from paceline.kernels.cpu.build import library
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.models.layers import Layer, ParallelLayer
from paceline.models.lazy import Outlines
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, check_target, run, run_together
from paceline.types import DraftBudget
from tests.support.cover import some
from tests.support.golden import decoder, read, reference, tensors_of, weights
from tests.support.logits import assert_close, expected, feed, text
from tests.support.tiny_families import SIZES, VOCAB

CASES = (
    *("cohere, norms of heads", "cohere2, sliding", "starcoder2", "stablelm, parallel", "phi"),
    *("gpt-neox", "gpt-neox, one after the other"),
)
PROMPTS = [text(34), text(9) * 2, text(34), text(50)]
WAYS = [Sampling(max_new_tokens=20, temperature=t, seed=3) for t in (0.0, 0.0, 0.8, 0.8)]
CHAIN, TREE = DraftBudget.chain(4), DraftBudget(8, 4, 3)
DRAFTERS: dict[str, tuple[Callable[[Decoder], Drafter], DraftBudget]] = {
    "ngram": (lambda target: NGram(), CHAIN),
    "suffix": (lambda target: Suffix(), TREE),
    "itself": (lambda target: DraftModel(target, VOCAB), CHAIN),
    "another": (lambda target: DraftModel(decoder("qwen3", target.dtype), VOCAB), TREE),
    "early exit": (lambda target: EarlyExit(ExitConfig(target.config.hidden, 2), {}, target, threshold=0.0), TREE),
}


# Every family once and every drafter once in the fast tier.
FAST = {*zip(CASES, itertools.cycle(DRAFTERS), strict=False)}


@cache
def alone(case: str) -> list[list[int]]:
    """Return replies with `WAYS` to `PROMPTS`, one at a time and without drafts."""
    target = decoder(case, torch.bfloat16)
    return [run(target, prompt, how)[0] for prompt, how in zip(PROMPTS, WAYS, strict=True)]


@pytest.mark.skipif(library() is None, reason="no bfloat16 products that keep bits")
@pytest.mark.parametrize(
    ("case", "drafter"),
    [
        pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow)
        for pair in itertools.product(CASES, DRAFTERS)
    ],
)
def test_the_text_is_the_same_with_drafters_and_in_batches(case: str, drafter: str) -> None:
    """The comparison is bit for bit in bfloat16."""
    target = decoder(case, torch.bfloat16)
    assert guarantee(target) == "bits"
    make, budget = DRAFTERS[drafter]
    replies = run_together(Engine(target, make(target), budget), PROMPTS, WAYS)
    assert [tokens for tokens, _, _ in replies] == alone(case)
    assert sum(stats.drafted for _, _, stats in replies)


@pytest.mark.slow
def test_they_keep_the_contract_of_targets() -> None:
    """Check trees, chunks, ragged passes, rollback, forks and saved slots."""
    check_target(lambda: decoder("cohere2, sliding"), tolerance=2e-5, taps=(1, "final"))


def test_sequential_attention_and_mlp_would_change_the_logits() -> None:
    ours = decoder("cohere2, sliding")
    wrong, tokens = copy(ours), text(20)
    wrong._stack = copy(ours._stack)
    wrong._stack._parts = [copy(part) for part in ours._stack._parts]
    for part in wrong._stack._parts:
        part.layers = [copy(layer) for layer in part.layers]
        for layer in part.layers:
            assert isinstance(layer, ParallelLayer)
            layer.__class__, layer.mlp_norm = Layer, layer.mixer_norm  # type: ignore[assignment]
    cache = wrong.new_cache()
    logits = feed(wrong, cache, cache.acquire(), tokens)
    with pytest.raises(AssertionError):
        assert_close(logits, expected(ours, tokens))


@some("truth", {"float64": decoder, "transformers": reference}, fast=["float64"])
@pytest.mark.parametrize("case", CASES)
def test_float32_is_within_a_millionth_of(truth: Callable[[str], Any], case: str) -> None:
    tokens, ours = text(60), decoder(case, torch.float32)
    cache = ours.new_cache()
    logits, right = feed(ours, cache, cache.acquire(), tokens), expected(truth(case), tokens)
    assert float((logits - right).norm() / right.norm()) < 1e-6


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_an_activation_gives_a_row_the_same_bits_with_other_rows(name: str) -> None:
    x = torch.randn(64, 83, generator=torch.Generator().manual_seed(0)).mul(2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = UNGATED[name](x.to(dtype))
        for count in (1, 2, 5, 17):
            assert torch.equal(UNGATED[name](x[3 : 3 + count].to(dtype)), whole[3 : 3 + count])


def raw(kind: str, **changes: object) -> dict[str, object]:
    return {"model_type": kind, **SIZES, **changes}


def test_older_configs_are_read_the_same() -> None:
    """These are configs on the hub from before transformers 5."""
    neox = read_config(raw("gpt_neox", rotary_pct=0.5, rotary_emb_base=20000, use_parallel_residual=True))
    assert (neox.rope.share, neox.rope.theta, neox.kv_heads) == (0.5, 20000.0, 6)
    assert read_config(raw("stablelm", partial_rotary_factor=0.5)).rope.share == 0.5
    assert read_config(raw("stablelm")).rope.share == 0.25
    cohere2 = read_config(raw("cohere2", sliding_window=16, sliding_window_pattern=2, logit_scale=0.25, rotary_pct=1.0))
    assert [layer.window for layer in cohere2.plan] == [16, None] * 2
    assert [layer.rope is None for layer in cohere2.plan] == [False, True] * 2
    assert cohere2.logits_divisor == 4.0
    assert read_config(raw("cohere", model_max_length=131072, use_qk_norm=None)).context_length == 131072


def test_a_rotary_share_of_nothing_is_refused_and_null_is_no_share() -> None:
    for config in (
        raw("gpt_neox", rotary_pct=0),
        raw("gpt_neox", partial_rotary_factor=0.0, rotary_pct=0.5),
        raw("gpt_neox", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0}),
        raw("stablelm", partial_rotary_factor=0),
        raw("glm4", partial_rotary_factor=0.0),
    ):
        with pytest.raises(CorruptModel, match="does not fit 0 rotated dimensions"):
            read_config(config)
    with pytest.raises(CorruptModel, match="rotary_pct must be"):
        read_config(raw("gpt_neox", rotary_pct=None))
    nulls = raw("gpt_neox", partial_rotary_factor=None, rope_parameters={"partial_rotary_factor": None})
    assert read_config(nulls).rope.share == 0.25
    assert read_config(raw("glm4", partial_rotary_factor=None)).rope.share == 1.0  # as in transformers


def test_an_activation_without_a_gate_must_be_known() -> None:
    with pytest.raises(UnsupportedModel, match="activation 'silu' is not known"):
        read_config(raw("phi", hidden_act="silu"))


@some("budget", {"chain": DraftBudget.chain(6), "tree": DraftBudget(12, 4, 3)}, fast=["tree"])
def test_a_wrong_draft_is_rolled_back_past_the_window(budget: DraftBudget) -> None:
    """The drafter is mostly wrong, over more tokens than the ring buffer of the sliding-window layers."""
    target, prompt, how = decoder("cohere2, sliding"), text(600), Sampling(max_new_tokens=60)
    plain = run(target, prompt, how)[0]
    tokens, _, stats = run(target, prompt, how, Oracle([*prompt, *plain], 0.3, VOCAB), budget)
    assert tokens == plain
    assert 0 < stats.accepted < stats.drafted


def test_older_files_of_gpt_neox_are_read() -> None:
    """Their output head has another name, and they contain masks, which are not weights."""
    ours = decoder("gpt-neox")
    tensors = weights(read("gpt-neox").shapes, read("gpt-neox").config)
    tensors = {name.replace("lm_head", "embed_out"): x for name, x in tensors.items()}
    for i in range(ours.layers):
        layer = f"gpt_neox.layers.{i}.attention."
        tensors |= {layer + "bias": torch.ones(1, 1, 8, 8).bool(), layer + "masked_bias": torch.tensor(-1e9)}
        tensors[layer + "rotary_emb.inv_freq"] = torch.ones(6)
    again = Decoder(ours.config, decoder_tensors({"model_type": "gpt_neox"}, tensors), torch.float64, ours.device)
    caches, tokens = (again.new_cache(), ours.new_cache()), text(20)
    first, second = (feed(one, c, c.acquire(), tokens) for one, c in zip((again, ours), caches, strict=True))
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", ["cohere, norms of heads", "stablelm, parallel", "phi", "gpt-neox"])
def test_names_and_shapes_are_checked_before_weights_are_read(case: str) -> None:
    ours = decoder(case)
    tensors = tensors_of(read(case))
    Decoder(ours.config, Outlines(tensors), torch.float32, torch.device("meta"))
    less = {name: tensors[name] for name in tensors if not name.endswith("layers.1.self_attn.o_proj.weight")}
    with pytest.raises(CorruptModel, match=r"lacks model.layers.1.self_attn.o_proj.weight"):
        Decoder(ours.config, Outlines(less), torch.float32, torch.device("meta"))


def test_one_projection_may_lack_the_bias_that_the_others_have() -> None:
    ours = decoder("phi")
    tensors = tensors_of(read("phi"))
    less = {name: x for name, x in tensors.items() if not name.endswith("k_proj.bias")}
    assert len(less) < len(tensors)
    Decoder(ours.config, Outlines(less), torch.float32, torch.device("meta"))
    Decoder(ours.config, less, torch.float32, torch.device("cpu"))
