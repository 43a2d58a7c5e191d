"""A block drafter's network in plain torch, for a whole text at once and without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.heads import BlockConfig
from paceline.types import Want
from paceline.verify.tree import pack_prefix


def taps_of(target: Decoder, text: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Return the target's hidden states for a whole text [T, taps * H]."""
    cache = target.new_cache()
    rows = pack_prefix([*text, 0, 0, 0], cache.acquire(), 0, target.device)
    out = target.forward(rows, cache, Want("none", tuple(taps))).taps
    return torch.cat([out[tap][0, : len(text)] for tap in taps], -1)


class Dense:
    """The network in plain torch, with gradients. One pass computes many blocks over one text, without a cache."""

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], target: Decoder) -> None:
        self.config, self.target, self.tensors = config, target, tensors

    def __call__(self, text: Sequence[int], starts: Sequence[int], features: Tensor) -> Tensor:
        """Return the logits of blocks that begin with the tokens text[starts], [blocks, size, V].

        A block sees only the `features` [T, taps * H] of tokens before its start.
        """
        w, c, size = self.tensors, self.config.layer, self.config.size
        context = norm(F.linear(features, w["fc.weight"]), w["hidden_norm.weight"])
        tokens = torch.tensor([[text[start]] + [self.config.mask_token] * (size - 1) for start in starts])
        x = self.target.embed(tokens.flatten()).clone()
        start = torch.tensor(starts).repeat_interleave(size)
        here = start + torch.arange(size).repeat(len(starts))
        there = torch.cat([torch.arange(len(context)), here])
        # Columns of the context belong to no block.
        owner = torch.cat([torch.full((len(context),), -1), torch.arange(len(here)) // size])
        mine = owner == (torch.arange(len(here)) // size)[:, None]
        read = (owner == -1) & (there < start[:, None])
        for i, plan in enumerate(c.plan):
            late = bool(self.config.causal) and self.config.causal[i]
            seen = read | (mine & (there <= here[:, None]) if late else mine)
            if plan.window:
                seen = seen & (there > here[:, None] - plan.window)
            assert plan.rope
            x = self._layer(x, context, seen, there, f"layers.{i}.", plan.rope.theta)
        logits = F.linear(norm(x, w["norm.weight"]), self.target.embed(torch.arange(c.vocab_size)).clone())
        return logits.view(len(starts), size, -1)

    def _layer(self, x: Tensor, context: Tensor, seen: Tensor, places: Tensor, name: str, theta: float) -> Tensor:
        w, c = self.tensors, self.config.layer
        attn = name + "self_attn."
        normed = norm(x, w[name + "input_layernorm.weight"])
        both = torch.cat([context, normed])
        q = F.linear(normed, w[attn + "q_proj.weight"]).view(len(x), c.heads, c.head_dim)
        k = F.linear(both, w[attn + "k_proj.weight"]).view(len(both), c.kv_heads, c.head_dim)
        v = F.linear(both, w[attn + "v_proj.weight"]).view(len(both), c.kv_heads, c.head_dim)
        q = turned(norm(q, w[attn + "q_norm.weight"]), places[len(context) :], theta)
        k = turned(norm(k, w[attn + "k_norm.weight"]), places, theta)
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
    """Apply the rotary embedding: rotate each pair (j, j + D / 2) as a complex number."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)
