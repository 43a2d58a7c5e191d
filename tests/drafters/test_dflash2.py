"""DFlash 2: the convolutions around each part of its layers, and the path selector, compared element by element with
their formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoints.head_write import write_head
from paceline.drafters.block import Block
from paceline.drafters.factory import make_drafter
from paceline.drafters.growth import TreeGrowth
from paceline.drafters.markov import BlockTrees
from paceline.engine.engine import Engine
from paceline.errors import CorruptModel
from paceline.kernels.quantize import Mode
from paceline.models.config import LayerConfig, RopeConfig
from paceline.models.heads import BlockConfig
from paceline.models.lazy import Quantised
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Ranked
from paceline.testing import check_drafter, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget
from tests.support.cover import cover, some
from tests.support.dense_block import norm, taps_of, turned
from tests.support.random_heads import DFLASH2, head_of, loaded
from tests.support.tiny_heads import TINY_BLOCK, block_tensors
from tests.support.toys import ask_for

TOY = tiny_target()
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
PLAIN = replace(TINY_BLOCK, conv=2, conv_group=8, selector=6, candidates=5)
_WINDOW = LayerConfig(RopeConfig(theta=500.0), window=7)
CONFIGS = {
    "full": PLAIN,
    "windows": replace(PLAIN, layer=replace(TINY_BLOCK.layer, special=(_WINDOW, _WINDOW))),
    "three taps": replace(PLAIN, conv=3, conv_group=16),
}


def tensors_of(config: BlockConfig) -> dict[str, Tensor]:
    return {name: x.double() for name, x in block_tensors(config).items()}


def convolved(x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
    """Convolve rows [S, H] with kernels [S, taps, groups], added to a base [taps, H]."""
    out, width = torch.zeros_like(x), x.shape[1] // kernels.shape[2]
    for t, channel, tap in product(range(len(x)), range(x.shape[1]), range(len(base))):
        if t >= tap:
            k = base[tap, channel] + kernels[t, tap, channel // width]
            out[t, channel] += k * x[t - tap, channel]
    return out


def states(config: BlockConfig, w: Mapping[str, Tensor], text: Sequence[int]) -> Tensor:
    """Return the states [size, H] after the final norm of the block that begins with the last token of the text."""
    c, size = config.layer, config.size
    taps = taps_of(TOY, text, config.taps)[:-1]  # type: ignore[arg-type]
    context = norm(F.linear(taps, w["fc.weight"]), w["hidden_norm.weight"])
    x = TOY.embed(torch.tensor([text[-1]] + [config.mask_token] * (size - 1))).clone()
    places = torch.arange(len(context) + size)
    here = places[len(context) :]
    for i, plan in enumerate(c.plan):
        assert plan.rope
        name, theta = f"layers.{i}.", plan.rope.theta
        attn, sizes = name + "self_attn.", (2, config.conv, c.hidden // config.conv_group)

        def around(part: str, y: Tensor, name: str = name, sizes: tuple[int, ...] = sizes) -> tuple[Tensor, Tensor]:
            kernels = F.linear(y, w[f"{name}{part}_conv.kernel_projection.weight"]).view(len(y), *sizes)
            return convolved(y, kernels[:, 0], w[f"{name}{part}_conv.base_kernel"][0]), kernels[:, 1]

        normed, kernels = around("attention", norm(x, w[name + "input_layernorm.weight"]))
        both = torch.cat([context, normed])
        q = F.linear(normed, w[attn + "q_proj.weight"]).view(size, c.heads, c.head_dim)
        k = F.linear(both, w[attn + "k_proj.weight"]).view(len(both), c.kv_heads, c.head_dim)
        v = F.linear(both, w[attn + "v_proj.weight"]).view(len(both), c.kv_heads, c.head_dim)
        q = turned(norm(q, w[attn + "q_norm.weight"]), here, theta)
        k = turned(norm(k, w[attn + "k_norm.weight"]), places, theta)
        k, v = (y.repeat_interleave(c.heads // c.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
        if plan.window:
            scores = scores.masked_fill(places <= here[:, None] - plan.window, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + convolved(
            F.linear(mixed, w[attn + "o_proj.weight"]), kernels, w[name + "attention_conv.base_kernel"][1]
        )
        normed, kernels = around("mlp", norm(x, w[name + "post_attention_layernorm.weight"]))
        gate = F.silu(F.linear(normed, w[name + "mlp.gate_proj.weight"]))
        out = F.linear(gate * F.linear(normed, w[name + "mlp.up_proj.weight"]), w[name + "mlp.down_proj.weight"])
        x = x + convolved(out, kernels, w[name + "mlp_conv.base_kernel"][1])
    return norm(x, w["norm.weight"])


def truth(config: BlockConfig, w: Mapping[str, Tensor], text: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return scores [V] after a text and drafted tokens: S(a, b) = U(b) + <A(a) * H(h), B(b)>, -inf below the best."""
    state = states(config, w, text)[1 + len(path)]
    unary = F.linear(state, TOY.embed(torch.arange(config.layer.vocab_size)).clone())
    name, before = "candidate_selector.", [*text, *path][-1]
    a = w[name + "predecessor_codebook"][before] * (w[name + "hidden_projection.weight"] @ state)
    scores = torch.full_like(unary, -torch.inf)
    for b in unary.argsort(descending=True)[: config.candidates].tolist():
        scores[b] = unary[b] + (a * w[name + "successor_codebook"][b]).sum()
    return scores


@some("name", [*CONFIGS], fast=["windows", "three taps"])
def test_every_row_follows_its_own_parent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    tensors = tensors_of(config)
    seen: list[tuple[list[int], list[int], Tensor]] = []

    def noted(
        self: BlockTrees, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int
    ) -> list[Ranked]:
        for path, row in zip(paths, logits, strict=True):
            seen.append((list(growth.ask.token_ids), list(path), row.clone()))
        return plain(self, growth, logits, paths, count)

    plain = BlockTrees._rank
    monkeypatch.setattr(BlockTrees, "_rank", noted)
    samplings = [Sampling(max_new_tokens=6, temperature=t, seed=2) for t in (0.0, 1.0, 3.0)]
    engine = Engine(TOY, Block(config, tensors, TOY), DraftBudget(8, 3, 2))
    run_together(engine, [PROMPT, [3, 4], PROMPT * 3], samplings)
    assert {len(path) for _, path, _ in seen} == {0, 1, 2}
    for text, path, row in seen[::11]:
        # `turned` uses float32 angles, and scores reach 10.
        torch.testing.assert_close(row, truth(config, tensors, text, path), rtol=0, atol=1e-5)


def drafted(config: BlockConfig, tensors: Mapping[str, Tensor], sampling: Sampling) -> Draft:
    drafter = Block(config, tensors, TOY)
    drafter.admit(0, PROMPT)
    taps = taps_of(TOY, PROMPT[:-1], (0, 1)).chunk(2, -1)
    drafter.feed(0, PROMPT[:-1], dict(zip((0, 1), taps, strict=True)))
    return drafter.propose([ask_for(0, DraftBudget.chain(4), sampling, PROMPT)])[0]


def test_a_chain_is_the_walk_along_the_best_pairs() -> None:
    tensors = tensors_of(PLAIN)
    path: list[int] = []
    for _ in range(4):
        path.append(int(truth(PLAIN, tensors, PROMPT, path).argmax()))
    assert list(drafted(PLAIN, tensors, Sampling(temperature=0.0)).tokens) == path
    mute = tensors | {"candidate_selector.successor_codebook": torch.zeros(37, 6, dtype=torch.float64)}
    alone = list(drafted(PLAIN, mute, Sampling(temperature=0.0)).tokens)
    assert alone != path, "the pairs decide something here"


def test_rules_that_draw_use_the_candidates_and_their_probabilities() -> None:
    tensors = tensors_of(PLAIN)
    draft = drafted(PLAIN, tensors, Sampling(temperature=0.7, seed=4, rule="rejection"))
    assert draft.q
    for row, q in draft.q.items():
        wanted = (truth(PLAIN, tensors, PROMPT, draft.tokens[:row]) / 0.7).softmax(-1)
        torch.testing.assert_close(q.double(), wanted, rtol=0, atol=1e-6)


@cover(
    rule=["match", "rejection", "block"],
    shape={"chain": DraftBudget.chain(4), "tree": DraftBudget(8, 4, 3)},
    together=[("rule",), ("shape",)],
)
def test_the_text_does_not_depend_on_the_drafter(shape: DraftBudget, rule: str) -> None:
    drafter = Block(CONFIGS["windows"], tensors_of(CONFIGS["windows"]), TOY)
    samplings = [Sampling(max_new_tokens=12, temperature=t, seed=2, rule=rule) for t in (0.0, 1.0)]  # type: ignore[arg-type]
    replies = run_together(Engine(TOY, drafter, shape), [PROMPT] * 2, samplings)
    assert all(stats.drafted for _, _, stats in replies)
    if rule == "match":
        assert [reply[0] for reply in replies] == [run(TOY, PROMPT, sampling)[0] for sampling in samplings]


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    check_drafter(lambda: Block(PLAIN, tensors_of(PLAIN), TOY))


@pytest.mark.parametrize("mode", [None, "int4"])
def test_the_text_is_the_same_on_the_cpu_kernels(mode: Mode | None) -> None:
    """Matrix products run on the kernels, and the layers around them in torch."""
    target = tiny_target(dtype=torch.float32)
    tensors: Mapping[str, Tensor] = block_tensors(PLAIN)
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    drafter = Block(PLAIN, Quantised(tensors, mode) if mode else tensors, target)
    tokens, _, stats = run(target, PROMPT, sampling, drafter, DraftBudget.chain(4))
    assert stats.drafted
    assert tokens == run(target, PROMPT, sampling)[0]


def test_a_folder_in_its_authors_layout_is_a_drafter_by_name(tmp_path: Path) -> None:
    target = loaded()
    drafter = make_drafter(f"head:{write_head(tmp_path / 'head', head_of(DFLASH2))}", target, lambda name: target)
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    tokens, _, stats = run(target.target, PROMPT, sampling, drafter, DraftBudget.chain(3))
    assert stats.drafted > 12, "about three tokens a round"
    assert tokens == run(target.target, PROMPT, sampling)[0]


def test_heads_that_are_incomplete_are_refused() -> None:
    tensors = tensors_of(PLAIN)
    for name in tensors:
        if "_conv." in name or "selector" in name:
            with pytest.raises(CorruptModel, match="lacks " + name):
                Block(PLAIN, {key: x for key, x in tensors.items() if key != name}, TOY)
