"""How matrix products run on this machine: the only file that knows packed weights."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.layers import Linear


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x -> x W^T + b for `weight` [out, in], in the fastest way known for its dtype and device.

    May keep a copy in a layout of its own and not the weight itself.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and fast_bfloat16():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        # Half of the weight's read time at T = 2..8 against F.linear on AVX512-BF16 (LOG.md).
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


@cache
def fast_bfloat16() -> bool:
    """Whether this CPU and this torch have oneDNN's packed bfloat16 product, tried once on a small one."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    try:
        weight = torch.eye(32, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return bool(torch.equal(torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], ""), weight))
    except (RuntimeError, AttributeError):
        return False
