"""The recipe of a block drafter (DFlash, arXiv 2602.06036): one pass guesses a whole block.

Blocks begin at places spread over the answer, all in one pass: a block sees the target's states before its place, and
itself in both directions. Entry 0 is the real token there, the others are masks; entry k guesses the token k places on.
Earlier entries count more, since a draft is kept up to its first wrong token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.heads import BlockConfig
from paceline.models.rope import Rotary, rotate
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import MLP, Factors, Norm, factors
from paceline.train.recipe import Answered, Guesses, GuessTally, Recipe, Teacher
from paceline.train.states import DocumentBatch
from paceline.types import Tap

_DECAY = 0.8


def default_taps(layers: int, count: int = 3) -> tuple[Tap, ...]:
    """What leaves layers spread between the second and the last but two, as published block drafters have them."""
    ids = [round(1 + i * (layers - 4) / max(1, count - 1)) for i in range(count)] if layers > 4 else range(layers)
    return tuple(dict.fromkeys(min(i + 1, layers - 1) for i in ids))


class _BlockAttention(nn.Module):
    """Queries of blocks, over the context before each and over the block."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.norm_eps), Norm(c.head_dim, c.norm_eps)

    def keys(self, x: Tensor, rope: Factors) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, T, D] of x [B, T, H]."""
        both = F.linear(x, torch.cat([self.k_proj.weight, self.v_proj.weight]))
        k, v = both.unflatten(-1, (2 * self.kv_heads, self.head_dim)).chunk(2, 2)
        return rotate(self.k_norm(k), *rope).to(v.dtype).transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, rope: Factors, context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, N * S, H]: N blocks of S entries. mask [B, 1, N, 1, T]: 0 where a block sees the context, else -inf."""
        b, blocks, t = len(x), mask.shape[2], mask.shape[-1]
        q = self.q_proj(x).view(b, -1, self.heads, self.head_dim)
        q = rotate(self.q_norm(q), *rope).to(context[1].dtype).transpose(1, 2) * self.head_dim**-0.5
        k, v = (part.unflatten(2, (blocks, -1)) for part in self.keys(x, rope))  # [B, kv, N, S, D]
        group = self.heads // self.kv_heads
        before_k, before_v, k, v = (part.repeat_interleave(group, 1) for part in (*context, k, v))
        q = q.unflatten(2, (blocks, -1))  # [B, heads, N, S, D]
        seen = (q.flatten(2, 3) @ before_k.mT).view(*q.shape[:-1], t) + mask
        weights = torch.cat([seen, q @ k.mT], -1).float().softmax(-1).to(q.dtype)
        mixed = (weights[..., :t].flatten(2, 3) @ before_v).view(q.shape) + weights[..., t:] @ v
        out: Tensor = self.o_proj(mixed.permute(0, 2, 3, 1, 4).reshape(b, -1, self.heads * self.head_dim))
        return out


class _BlockLayer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden, c.norm_eps), Norm(c.hidden, c.norm_eps)
        self.self_attn, self.mlp = _BlockAttention(c), MLP(c)


class Network(nn.Module):
    """Parameters named as in `models/heads.py`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c = config.layer
        self.config = config
        self.fc = nn.Linear(len(config.taps) * c.hidden, c.hidden, bias=False)
        self.hidden_norm, self.norm = Norm(c.hidden, c.norm_eps), Norm(c.hidden, c.norm_eps)
        self.layers = nn.ModuleList(_BlockLayer(c) for _ in range(c.layers))
        self._rotary = Rotary(c.rope, c.head_dim, torch.float32, torch.device("cpu"))

    def forward(self, batch: DocumentBatch, pending: Tensor, x: Tensor) -> Tensor:
        """The normed states [B, N, S, H] of the embedded blocks x [B, N, S, H] that begin at `pending` [B, N]."""
        size = x.shape[2]
        taps = torch.cat([batch.states[tap].float() for tap in self.config.taps], -1)
        context = self.hidden_norm(self.fc(taps))
        places = torch.arange(context.shape[1], device=x.device)
        there = factors(self._rotary, places[None].expand(len(x), -1))
        here = factors(self._rotary, (pending[..., None] + torch.arange(size, device=x.device)).flatten(1))
        mask = torch.zeros(*pending.shape, len(places), device=x.device)
        mask = mask.masked_fill(places >= pending[..., None], -torch.inf)[:, None, :, None]
        x = x.flatten(1, 2)
        for layer in self.layers:
            attention: _BlockAttention = layer.self_attn  # type: ignore[assignment]
            x = x + attention(layer.input_layernorm(x), here, attention.keys(context, there), mask)  # type: ignore[operator]
            x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        y: Tensor = self.norm(x).unflatten(1, (-1, size))
        return y


class BlockRecipe(Recipe):
    """Cross-entropy of each entry against the target's distribution at the token it guesses."""

    module: Network

    def __init__(self, config: BlockConfig, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        """`vocabulary` [K]: the ids, ascending, over which distributions are compared."""
        self.taps, self.steps = config.taps, config.depth
        self.module = Network(config)
        self._config, self._target = config, target
        self._teacher = Teacher(target, vocabulary)
        with torch.no_grad():
            self.module.norm.weight.fill_(1 / (self._teacher.kept.std() * config.layer.hidden**0.5))

    @property
    def config(self) -> BlockConfig:
        return self._config

    def guess(self, batch: DocumentBatch) -> Guesses:
        answered = Answered.of(batch, self.steps)
        if self.module.training:
            size = self._config.size
            answered = answered.every(size, int(torch.randint(min(size, answered.pending.shape[1]), ())))
        taught = self._teacher.of(batch, answered, exact=not self.module.training)
        states = self.module(batch, answered.pending, self._embedded(batch, answered.pending))
        tally = GuessTally(self._teacher, taught, answered, _DECAY)
        for step, real in enumerate(answered.real):
            tally.add(F.linear(states[:, :, step + 1][real], self._teacher.kept))
        return tally.guesses()

    def _embedded(self, batch: DocumentBatch, pending: Tensor) -> Tensor:
        """The blocks before the first layer: the pending token, then masks."""
        tokens = batch.tokens.gather(1, pending)[..., None]
        masks = torch.full((*pending.shape, self._config.size - 1), self._config.mask_token, device=tokens.device)
        return self._target.embed(torch.cat([tokens, masks], -1)).float().clone()
