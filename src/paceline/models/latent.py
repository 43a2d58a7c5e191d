"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), over a cache of the latents alone.

What a token leaves is one vector that keys and values of all heads are products of, normed, and one key part that
encodes its position: 576 numbers in DeepSeek-V3, where keys and values of its 128 heads would be 40,960. The product
that makes a head's keys of the latents is moved to its query instead (it is the same sum in another order), and the one
that makes its values to what it has read. So all heads attend to the same rows, whose values are the rows themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.linear import Linear
from paceline.models.config import LatentConfig, LayerConfig, ModelConfig
from paceline.models.layers import Mixer
from paceline.models.norms import RMSNorm
from paceline.models.rope import Rope, rotate
from paceline.models.weights import Weights
from paceline.protocols import Pass

_EPS = 1e-6
"""Of the norms of latents, whatever the config says of the others: as in DeepSeek's code and transformers'."""


class LatentAttention(Mixer):
    """Attention of all heads to one row of the cache by token: its latent, then its rotary key."""

    sinks: Tensor | None = None

    def __init__(
        self,
        config: LatentConfig,
        heads: int,
        entry: Linear,
        norm: RMSNorm,
        queries: tuple[RMSNorm, Linear] | None,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """`entry`: queries, or their latent, then the latent of keys and values and the rotary key. `norm`: of the
        latter latent. `queries`: norm and product of theirs. `keys` [heads, rank, plain], `values` [heads, value,
        rank]: what makes the keys and values of each head."""
        c = self._config = config
        self._heads, self._entry, self._norm, self._queries = heads, entry, norm, queries
        self._keys, self._values = keys, values
        self._sizes = [c.query_rank or heads * (c.plain + c.rotary), c.rank, c.rotary]

    def mix(self, x: Tensor, layer: int, rope: Rope, attention: Pass) -> Tensor:
        """See `layers.Attention.mix`. Returns [B, T, heads * value]."""
        c = self._config
        assert rope
        queries, latent, key = self._entry(x).split(self._sizes, -1)
        if self._queries:
            norm, product = self._queries
            queries = product(norm(queries))
        plain, turning = queries.unflatten(-1, (self._heads, -1)).split([c.plain, c.rotary], -1)
        turned = rotate(torch.cat([turning, key[:, :, None]], 2), *rope)
        row = torch.cat([self._norm(latent)[:, :, None], turned[:, :, -1:]], -1)
        queries = torch.cat([_by_head(self._keys, plain), turned[:, :, :-1]], -1)
        mixed = attention.attend(layer, queries, row, row).unflatten(-1, (self._heads, -1))
        return _by_head(self._values, mixed[..., : c.rank]).flatten(2)


def _by_head(weight: Tensor, x: Tensor) -> Tensor:
    """Product of each head [heads, out, in] with its part of x [B, T, heads, in]: [B, T, heads, out]."""
    columns = x.flatten(0, 1).permute(1, 2, 0)
    made: Tensor = torch.bmm(weight, columns).permute(2, 0, 1).unflatten(0, x.shape[:2])
    return made


def make_latent(c: ModelConfig, layer: LayerConfig, weights: Weights, prefix: str, width: int) -> LatentAttention:
    """Build latent attention from DeepSeek's names; its files may hold the product of latents as one matrix or, as
    newer ones of llama.cpp, as two stacks. See `decoder.make_attention`."""
    m = c.attention.latent
    assert m
    outputs = c.heads * (m.plain + m.rotary)
    latent, direct = f"{prefix}kv_a_proj_with_mqa", f"{prefix}q_proj"
    interleaved = layer.rope is not None and layer.rope.interleaved
    own, key = _halves(m, c.heads, m.plain, interleaved), _halves(m, 1, m.rank, interleaved)
    if m.query_rank:
        parts = {f"{prefix}q_a_proj": m.query_rank, latent: m.rank + m.rotary}
        order = torch.cat([torch.arange(m.query_rank), m.query_rank + key])
        product = weights.linear({f"{prefix}q_b_proj": outputs}, m.query_rank, own)
        queries = _norm(weights, f"{prefix}q_a_layernorm.weight", m.query_rank), product
    else:
        parts, order, queries = {direct: outputs, latent: m.rank + m.rotary}, torch.cat([own, outputs + key]), None
    norm = _norm(weights, f"{prefix}kv_a_layernorm.weight", m.rank)
    entry = weights.linear(parts, width, order)
    return LatentAttention(m, c.heads, entry, norm, queries, *_products(c.heads, m, weights, prefix))


def _norm(weights: Weights, name: str, size: int) -> RMSNorm:
    return RMSNorm(weights.get(name, (size,)), _EPS)


def _halves(m: LatentConfig, heads: int, plain: int, interleaved: bool) -> Tensor:
    """The order of heads [plain + rotary] in which the first halves of rotary pairs come before the second ones."""
    size = plain + m.rotary
    within = [*range(plain), *range(plain, size, 2), *range(plain + 1, size, 2)] if interleaved else [*range(size)]
    return torch.arange(heads * size).view(heads, size)[:, within].flatten()


def _products(heads: int, m: LatentConfig, weights: Weights, prefix: str) -> tuple[Tensor, Tensor]:
    """`keys` and `values` of `LatentAttention`."""
    name, stacks = f"{prefix}kv_b_proj.weight", [f"{prefix}{x}_b_proj.weight" for x in "kv"]
    if stacks[0] in weights and name not in weights:
        keys = weights.get(stacks[0], (heads, m.rank, m.plain))
        return keys, weights.get(stacks[1], (heads, m.value, m.rank))
    for stack in stacks:  # which some files hold too
        weights.skip(stack)
    both = weights.get(name, (heads * (m.plain + m.value), m.rank)).view(heads, -1, m.rank)
    return both[:, : m.plain].transpose(1, 2).contiguous(), both[:, m.plain :].contiguous()
