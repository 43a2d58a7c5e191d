"""The parts of a decoder layer, as plain callables over tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.config import RopeConfig
from paceline.protocols import Pass
from paceline.runner import Activation, Linear


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._doubled = torch.cat([weight, torch.zeros_like(weight)])

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # On the CPU rms_norm is eight kernels and layer_norm one, and [x, -x] has mean 0 and variance mean(x^2).
        doubled = torch.cat([x, -x], -1)
        return F.layer_norm(doubled, self._doubled.shape, self._doubled, None, self.eps)[..., : x.shape[-1]]


class Rotary:
    """Rotary position embedding (Su et al. 2021), halves rotated against each other as in Hugging Face models."""

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of the factors, float32 or better."""
        self._inverse = inverse_frequencies(config, head_dim).to(dtype)
        self._device = device
        self._table = torch.empty(2, 0, head_dim, dtype=dtype, device=device)

    def __call__(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [B, T, 1, D] of `positions` [B, T], none above `highest`."""
        if highest >= self._table.shape[1]:
            self._grow(max(highest + 1, 2 * self._table.shape[1], 512))
        cos, sin = self._table[:, positions, None]
        return cos, sin

    def _grow(self, length: int) -> None:
        angles = torch.arange(length, dtype=self._inverse.dtype)[:, None] * self._inverse
        cos, sin = angles.cos(), angles.sin()
        self._table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).to(self._device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply `Rotary`'s factors to [B, T, heads, D]. A roll by D / 2 and signed sines stand for "rotate half"."""
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the D / 2 planes, float32 as the published models were trained with."""
    inverse = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.factors:
        return inverse / torch.tensor(config.factors)
    if config.kind == "linear":
        return inverse / dict(config.scaling)["factor"]
    return _llama3(inverse, **dict(config.scaling)) if config.kind == "llama3" else inverse


def _llama3(
    inverse: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Llama 3.1: slow planes are stretched by `factor`, fast ones kept, those between blended."""
    turns = original_max_position_embeddings * inverse / (2 * math.pi)
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return inverse * (blend + (1 - blend) / factor)


class Attention:
    """Grouped-query attention with q, k and v from one product."""

    def __init__(self, qkv: Linear, out: Linear, heads: int, kv_heads: int, head_dim: int) -> None:
        self.qkv, self.out = qkv, out
        self.split = (heads + kv_heads, kv_heads)
        self.heads, self.head_dim = heads, head_dim

    def mix(self, x: Tensor, layer: int, rope: tuple[Tensor, Tensor], attention: Pass) -> Tensor:
        """The attended values [B, T, heads * D], before the output product."""
        b, t, _ = x.shape
        qk, v = self.qkv(x).view(b, t, -1, self.head_dim).split(self.split, 2)
        qk = rotate(qk, *rope)
        return attention.attend(layer, qk[:, :, : self.heads], qk[:, :, self.heads :], v)


class Layer:
    """One pre-norm decoder layer."""

    def __init__(
        self, attn_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, gate_up: Activation, down: Linear
    ) -> None:
        self.attn_norm, self.attention, self.mlp_norm = attn_norm, attention, mlp_norm
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor, layer: int, rope: tuple[Tensor, Tensor], attention: Pass) -> Tensor:
        mixed = self.attention.mix(self.attn_norm(x), layer, rope, attention)
        x = self.attention.out.onto(mixed, x)
        return self.down.onto(self.gate_up(self.mlp_norm(x)), x)
