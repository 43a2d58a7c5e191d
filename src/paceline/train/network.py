"""Modules of drafters in training. Their parameters are named as in Llama checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.rope import Rotary, rotate

Factors = tuple[Tensor, Tensor]


class Norm(nn.RMSNorm):
    """RMS norm in float32, whatever the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class MLP(nn.Module):
    """Gated feed-forward network of a layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class DraftAttention(nn.Module):
    """Projections of grouped-query attention over rows of `width` numbers. Subclasses define which rows see which."""

    def __init__(self, c: ModelConfig, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(width, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm, self.k_norm = (
            Norm(c.head_dim, c.norms.eps) if c.norms.heads else nn.Identity() for _ in ("query", "key")
        )

    def queries(self, x: Tensor, rope: Factors) -> Tensor:
        """Return the scaled queries [B, heads, T, D] of rows x [B, T, width]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        scaled: Tensor = rotate(self.q_norm(q), *rope).to(q.dtype).transpose(1, 2) * self.head_dim**-0.5
        return scaled

    def keys(self, x: Tensor, rope: Factors) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, kv_heads, T, D] of rows x [B, T, width]."""
        both = F.linear(x, torch.cat([self.k_proj.weight, self.v_proj.weight]))
        k, v = both.unflatten(-1, (2 * self.kv_heads, self.head_dim)).chunk(2, 2)
        return rotate(self.k_norm(k), *rope).to(v.dtype).transpose(1, 2), v.transpose(1, 2)


def factors(rotary: Rotary, positions: Tensor) -> Factors:
    """Return the rotary factors for positions [B, T], on the device of `positions`."""
    cos, sin = rotary(positions.cpu(), int(positions.max()) + 1, [0] * len(positions))
    return cos.to(positions.device), sin.to(positions.device)
