"""Activations of gated feed-forward networks, by their names in configs: what becomes of gate and up projection."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]

LIMIT, SLOPE = 7.0, 1.702
"""Bound of both projections of gpt-oss, and the slope of its sigmoid."""


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's SwiGLU, of clamped projections (OpenAI's reference implementation, `gpt_oss/torch/model.py`)."""
    gate = gate.clamp(max=LIMIT)
    return (up.clamp(-LIMIT, LIMIT) + 1) * (gate * (SLOPE * gate).sigmoid())


ACTIVATIONS: dict[str, Gate] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _clamped,
}


def _gelu(x: Tensor, approximate: str) -> Tensor:
    """In float64 on the CPU: torch computes the last elements of a tensor or of a thread's part of it, those that fill
    no vector, by another function, so that a row's bits would depend on the number of rows."""
    return F.gelu(x.double() if x.device.type == "cpu" else x, approximate=approximate).to(x.dtype)


UNGATED: dict[str, Activation] = {
    "squared_relu": lambda up: F.relu(up).square(),
    "gelu": lambda up: _gelu(up, "none"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), lambda up: _gelu(up, "tanh")),
}
"""Activations of feed-forward networks without a gate."""
