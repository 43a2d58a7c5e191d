"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with a cache that stores only the latents.

The cache stores one normed latent vector and one rotary key per token. The keys and values of all heads are computed
from the latent. In DeepSeek-V3, the cache stores 576 numbers per token, instead of the 40,960 numbers for the keys and
values of 128 heads. The up-projection of the keys is applied to the queries instead, which gives the same sum in
another order. The up-projection of the values is applied to the output of attention. So all heads attend to the same
rows of the cache, and each row is both key and value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.cpu.matrix import NativeHeadLinear
from paceline.kernels.linear import Linear, head_linear
from paceline.models.config import LatentConfig, LayerConfig, ModelConfig
from paceline.models.layers import Mixer
from paceline.models.norms import RMSNorm
from paceline.models.rope import Rope, rotate
from paceline.models.weights import Weights
from paceline.protocols import Pass

_EPS = 1e-6
"""Epsilon of the latents' norms. DeepSeek's code and transformers always use this value, and ignore the config's
epsilon."""


class LatentAttention(Mixer):
    """Attention of all heads to one cache row per token, which consists of the token's latent and its rotary key."""

    sinks: Tensor | None = None

    def __init__(
        self,
        config: LatentConfig,
        heads: int,
        projection: Linear,
        norm: RMSNorm,
        queries: tuple[RMSNorm, Linear] | None,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Build the mixer.

        Args:
            config: Sizes.
            heads: Number of heads.
            projection: Linear layer that computes the queries (or their latent), the latent of keys and values, and the
                rotary key.
            norm: Norm of the latent of keys and values.
            queries: Norm and up-projection of the queries' latent. None if queries are computed directly.
            keys: Up-projection of the keys, [heads, rank, plain].
            values: Up-projection of the values, [heads, value, rank].
        """
        c = self._config = config
        self._heads, self._projection, self._norm, self._queries = heads, projection, norm, queries
        self._keys, self._values = head_linear(keys), head_linear(values)
        self._sizes = [c.query_rank or heads * (c.plain + c.rotary), c.rank, c.rotary]

    def mix(self, x: Tensor, layer: int, rope: Rope, view: Pass) -> Tensor:
        """See `layers.Attention.mix`. Returns [B, T, heads * value]."""
        c = self._config
        assert rope
        queries, latent, key = self._projection(x).split(self._sizes, -1)
        if self._queries:
            norm, up_projection = self._queries
            queries = up_projection(norm(queries))
        plain, rotary = queries.unflatten(-1, (self._heads, -1)).split([c.plain, c.rotary], -1)
        rotated = rotate(torch.cat([rotary, key[:, :, None]], 2), *rope)
        row = torch.cat([self._norm(latent)[:, :, None], rotated[:, :, -1:]], -1)
        queries = torch.cat([self._keys(plain), rotated[:, :, :-1]], -1)
        out = view.attend(layer, queries, row, row).unflatten(-1, (self._heads, -1))
        return self._values(out[..., : c.rank]).flatten(2)

    @property
    def runs_on_kernels(self) -> bool:
        """True if the CPU kernels compute the products by head."""
        return isinstance(self._keys, NativeHeadLinear) and isinstance(self._values, NativeHeadLinear)


def make_latent(c: ModelConfig, layer: LayerConfig, weights: Weights, prefix: str, width: int) -> LatentAttention:
    """Build latent attention from tensors with DeepSeek's names. `decoder.make_attention` has the same arguments.

    The up-projection of keys and values is stored as one matrix, or as two stacks of matrices (newer files of
    llama.cpp).
    """
    m = c.attention.latent
    assert m
    outputs = c.heads * (m.plain + m.rotary)
    latent, direct = f"{prefix}kv_a_proj_with_mqa", f"{prefix}q_proj"
    interleaved = layer.rope is not None and layer.rope.interleaved
    own, key = _halves(m, c.heads, m.plain, interleaved), _halves(m, 1, m.rank, interleaved)
    if m.query_rank:
        parts = {f"{prefix}q_a_proj": m.query_rank, latent: m.rank + m.rotary}
        order = torch.cat([torch.arange(m.query_rank), m.query_rank + key])
        up_projection = weights.linear({f"{prefix}q_b_proj": outputs}, m.query_rank, own)
        queries = _norm(weights, f"{prefix}q_a_layernorm.weight", m.query_rank), up_projection
    else:
        parts, order, queries = {direct: outputs, latent: m.rank + m.rotary}, torch.cat([own, outputs + key]), None
    norm = _norm(weights, f"{prefix}kv_a_layernorm.weight", m.rank)
    projection = weights.linear(parts, width, order)
    return LatentAttention(m, c.heads, projection, norm, queries, *_up_projections(c.heads, m, weights, prefix))


def _norm(weights: Weights, name: str, size: int) -> RMSNorm:
    return RMSNorm(weights.get(name, (size,)), _EPS)


def _halves(m: LatentConfig, heads: int, plain: int, interleaved: bool) -> Tensor:
    """Return the order of elements that puts, within each head [plain + rotary], the first elements of all rotary pairs
    before all second elements."""
    size = plain + m.rotary
    within = [*range(plain), *range(plain, size, 2), *range(plain + 1, size, 2)] if interleaved else [*range(size)]
    return torch.arange(heads * size).view(heads, size)[:, within].flatten()


def _up_projections(heads: int, m: LatentConfig, weights: Weights, prefix: str) -> tuple[Tensor, Tensor]:
    """Return `keys` and `values` of `LatentAttention`."""
    name, stacks = f"{prefix}kv_b_proj.weight", [f"{prefix}{x}_b_proj.weight" for x in "kv"]
    if stacks[0] in weights and name not in weights:
        keys = weights.get(stacks[0], (heads, m.rank, m.plain))
        return keys, weights.get(stacks[1], (heads, m.value, m.rank))
    for stack in stacks:  # some files contain the stacks in addition to the matrix
        weights.skip(stack)
    both = weights.get(name, (heads * (m.plain + m.value), m.rank)).view(heads, -1, m.rank)
    return both[:, : m.plain].transpose(1, 2).contiguous(), both[:, m.plain :].contiguous()
