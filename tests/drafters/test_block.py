"""The block drafter against the same network written out densely, over the whole text at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafters.block import Block
from paceline.engine import Engine
from paceline.errors import CorruptModel
from paceline.models.config import LayerConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import BlockConfig
from paceline.models.loader import Loaded
from paceline.protocols import Ask
from paceline.sampling import Sampling
from paceline.testing import TINY_BLOCK, block_tensors, check_drafter, run, run_together, tiny_target
from paceline.tree import pack_prefix
from paceline.types import Draft, Tree, Verdict, Want
from tests.toys import toy_tokenizer

TOY = tiny_target()
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
ROPE = RopeConfig(theta=500.0)
WINDOWED = replace(
    TINY_BLOCK,
    layer=replace(TINY_BLOCK.layer, special=(LayerConfig(ROPE, window=7), LayerConfig(ROPE))),
    causal=(True, False),
)
NARROW = replace(WINDOWED, causal=(), from_anchor=True)
CONFIGS = {"full": TINY_BLOCK, "causal windows": WINDOWED, "mutual windows, from the anchor": NARROW}


def block(config: BlockConfig = TINY_BLOCK, target: Decoder = TOY, seed: int = 0, **tensors: Tensor) -> Block:
    made = block_tensors(config, seed) | tensors
    return Block(config, made, Loaded(target, toy_tokenizer(), (), {}, Path("toy")))


def taps_of(target: Decoder, text: Sequence[int], taps: Sequence[int]) -> Tensor:
    """The target's hidden states of a whole text [T, taps * H]."""
    cache = target.new_cache()
    rows = pack_prefix([*text, 0, 0, 0], cache.acquire(), 0, target.device)
    out = target.forward(rows, cache, Want("none", tuple(taps))).taps
    return torch.cat([out[tap][0, : len(text)] for tap in taps], -1)


class Dense:
    """The network over a whole text, in plain torch and so with gradients: [.., T, H] in, logits of a block out."""

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], target: Decoder) -> None:
        self.config, self.target, self.tensors = config, target, tensors

    def __call__(self, features: Tensor, block: Tensor, start: int) -> Tensor:
        """features [start, taps * H] of the text before the pending token, block [size] of tokens: logits [size, V]."""
        w, c = self.tensors, self.config.layer
        context = norm(F.linear(features, w["fc.weight"]), w["hidden_norm.weight"])
        x = self.target.embed(block).to(context.dtype)
        size = len(block)
        here, there = torch.arange(start, start + size)[:, None], torch.arange(start + size)[None]
        for i, plan in enumerate(c.plan):
            late = bool(self.config.causal) and self.config.causal[i]
            seen = (there <= here) if late else torch.ones(size, start + size, dtype=torch.bool)
            if plan.window:
                seen = seen & (there > here - plan.window)
            assert plan.rope
            x = self._layer(x, context, seen, f"layers.{i}.", plan.rope.theta)
        return F.linear(norm(x, w["norm.weight"]), self.target.embed(torch.arange(c.vocab_size)).to(x.dtype))

    def _layer(self, x: Tensor, context: Tensor, seen: Tensor, name: str, theta: float) -> Tensor:
        w, c = self.tensors, self.config.layer
        attn, start = name + "self_attn.", len(context)
        normed = norm(x, w[name + "input_layernorm.weight"])
        both = torch.cat([context, normed])
        q = F.linear(normed, w[attn + "q_proj.weight"]).view(len(x), c.heads, c.head_dim)
        k = F.linear(both, w[attn + "k_proj.weight"]).view(len(both), c.kv_heads, c.head_dim)
        v = F.linear(both, w[attn + "v_proj.weight"]).view(len(both), c.kv_heads, c.head_dim)
        q = turned(norm(q, w[attn + "q_norm.weight"]), torch.arange(start, start + len(x)), theta)
        k = turned(norm(k, w[attn + "k_norm.weight"]), torch.arange(len(both)), theta)
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), w[attn + "o_proj.weight"])
        normed = norm(x, w[name + "post_attention_layernorm.weight"])
        gate = F.silu(F.linear(normed, w[name + "mlp.gate_proj.weight"]))
        return x + F.linear(gate * F.linear(normed, w[name + "mlp.up_proj.weight"]), w[name + "mlp.down_proj.weight"])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Each pair (j, j + D / 2) as a complex number, turned by its angle."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def expected(drafter: Block, dense: Dense, text: Sequence[int], depth: int) -> Tensor:
    """What the drafter should guess after a text: logits [depth, V]."""
    config = dense.config
    block = torch.tensor([text[-1]] + [config.mask_token] * (config.size - 1))
    features = taps_of(dense.target, text[:-1], config.taps)  # type: ignore[arg-type]
    first = 0 if config.from_anchor else 1
    return dense(features, block, len(text) - 1)[first : first + depth]


class Watched(Block):
    """Keeps what was guessed, and after which texts."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: list[tuple[list[int], Tensor]] = []

    def _guess(self, asks: Sequence[Ask], depth: int) -> Tensor:
        logits = super()._guess(asks, depth)
        self.seen += [(list(ask.sampler.text), row) for ask, row in zip(asks, logits, strict=True)]
        return logits


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_round_guesses_what_the_whole_text_says(config: BlockConfig) -> None:
    """Ragged requests that share rounds, over many rounds of catching up with trees half accepted."""
    tensors = {name: tensor.double() for name, tensor in block_tensors(config).items()}
    drafter = Watched(config, tensors, Loaded(TOY, toy_tokenizer(), (), {}, Path("toy")))
    prompts = [PROMPT, [3], PROMPT * 5, [7, 7, 8]]
    samplings = [Sampling(max_new_tokens=24, temperature=0.8, seed=seed) for seed in range(4)]
    run_together(Engine(TOY, drafter, Tree(8, 4, 2)), prompts, samplings)
    assert len(drafter.seen) > 20
    dense = Dense(config, tensors, TOY)
    for text, logits in drafter.seen:
        torch.testing.assert_close(logits, expected(drafter, dense, text, len(logits)), atol=1e-5, rtol=0)
