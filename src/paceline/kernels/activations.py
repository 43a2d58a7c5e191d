"""Activations of feed-forward networks, by their names in model configs."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]

LIMIT, SLOPE = 7.0, 1.702
"""Clamping bound and sigmoid slope of gpt-oss's activation."""


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU with clamped inputs, as in gpt-oss (OpenAI's reference implementation, `gpt_oss/torch/model.py`)."""
    gate = gate.clamp(max=LIMIT)
    return (up.clamp(-LIMIT, LIMIT) + 1) * (gate * (SLOPE * gate).sigmoid())


def _gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU that gives each row the same bits in every pass.

    On CPUs, torch computes the elements that do not fill a SIMD vector with another function. The number of rows
    decides which elements these are. In float64, the difference disappears when the result is rounded.
    """
    return F.gelu(x.double() if x.device.type == "cpu" else x, approximate=approximate).to(x.dtype)


ACTIVATIONS: dict[str, Gate] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: _gelu(gate, "none") * up,
    "gelu_pytorch_tanh": lambda gate, up: _gelu(gate, "tanh") * up,
    "clamped_swiglu": _clamped,
}
"""Activations that combine the gate projection and the up projection."""


UNGATED: dict[str, Activation] = {
    "relu2": lambda up: F.relu(up).square(),
    "gelu": lambda up: _gelu(up, "none"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), lambda up: _gelu(up, "tanh")),
}
"""Activations of feed-forward networks without a gate."""
