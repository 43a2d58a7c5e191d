"""Random low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.low_rank import Factors

SETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "queries and values": (4, ("q_proj", "v_proj")),
    "all": (5, ("_proj", "in_proj_z", "per_layer_input_gate", "per_layer_projection")),
    "half of the gates": (3, ("up_proj", "down_proj")),
}
"""Name of an adapter -> its rank and its modules."""


def factors(tensors: dict[str, Tensor], name: str, rank: int, ends: Sequence[str], scale: float = 0.3) -> Factors:
    draw = torch.Generator().manual_seed(len(name))
    found = {}
    for key, tensor in tensors.items():
        module = key.removesuffix(".weight")
        if tensor.dim() == 2 and module.endswith(tuple(ends)) and ".experts." not in module:
            out, width = tensor.shape
            a, b = torch.randn(rank, width, generator=draw), torch.randn(out, rank, generator=draw)
            found[module] = a * width**-0.5, b * scale
    assert found
    return Factors(name, found)


def adapters(tensors: dict[str, Tensor]) -> list[Factors]:
    """Return adapters for everything except experts."""
    tensors = {name: x for name, x in tensors.items() if "expert" not in name}
    dense = any(name.endswith(".mlp.up_proj.weight") for name in tensors)
    return [factors(tensors, name, *what) for name, what in SETS.items() if dense or "q_proj" in what[1]]
