"""Parts of a network in training, with parameters named as in Llama's checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.rope import Rotary

Factors = tuple[Tensor, Tensor]


class Norm(nn.RMSNorm):
    """In float32, whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


def factors(rotary: Rotary, positions: Tensor) -> Factors:
    """`Rotary`'s factors for positions [B, T] on any device."""
    cos, sin = rotary(positions.cpu(), int(positions.max()) + 1, [0] * len(positions))
    return cos.to(positions.device), sin.to(positions.device)
