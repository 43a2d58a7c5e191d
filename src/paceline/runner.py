"""How matrix products run on this machine: the only file that chooses between kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.native.build import cpu_flags, library
from paceline.native.matrix import LANES, NativeGated, NativeLinear

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Linear(Protocol):
    """x W^T + b for W [out, in]: [..., in] -> [..., out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x W^T + b."""
        ...

    def precise(self, x: Tensor) -> Tensor:
        """The product in float32 at least, for logits."""
        ...

    def weight(self) -> Tensor:
        """W [out, in], as it was given."""
        ...


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product known for the weight's dtype and device. It may keep a copy in a layout of its own."""
    if _native(weight):
        return NativeLinear(weight, bias)
    return _Packed(weight, bias) if _packs(weight) else _Plain(weight, bias)


def gated(weight: Tensor, bias: Tensor | None, activation: str) -> Activation:
    """x -> act(x G^T) * (x U^T) for gate and up, one above the other in `weight` [2 * out, in]."""
    if _native(weight) and weight.shape[0] % (2 * LANES) == 0:
        return NativeGated(weight, bias, activation)
    both = linear(weight, bias)
    act = ACTIVATIONS[activation]

    def run(x: Tensor) -> Tensor:
        left, right = both(x).chunk(2, -1)
        return act(left) * right

    return run


class _Plain:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)

    def precise(self, x: Tensor) -> Tensor:
        y = self(x)
        return y if y.dtype == torch.float64 else y.float()

    def weight(self) -> Tensor:
        return self._weight


class _Packed:
    """oneDNN's blocked weights: half the time of F.linear at T = 2..8 on AVX512-BF16 (LOG.md)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias
        self._product = torch.ops.mkldnn._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self._product.binary(x, residual, self._weight, self._bias, "add")
        return y

    def precise(self, x: Tensor) -> Tensor:
        return self(x).float()

    def weight(self) -> Tensor:
        weight: Tensor = self._weight.to_dense()
        return weight


def _native(weight: Tensor) -> bool:
    """Whether the kernels of `native/` are the fastest: where bfloat16 products have an instruction of their own."""
    suits = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[1] % LANES == 0
    return suits and "avx512_bf16" in cpu_flags() and library() is not None


def _packs(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and fast_bfloat16()


def free_rows(device: torch.device) -> int:
    """Rows that requests may fill together with drafts, as long as weights and not products take the time.

    The packed products of the demo model take 9.9 ms for 4 rows, 13.3 for 8, 15.7 for 16 and 46 for 64 (LOG.md).
    """
    return 8 if device.type == "cpu" else 128


@cache
def fast_bfloat16() -> bool:
    """Whether this CPU and this torch have oneDNN's packed bfloat16 product, tried once on a small one."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    try:
        eye = torch.eye(32, dtype=torch.bfloat16)
        return bool(torch.equal(_Packed(eye, None).onto(eye, eye), 2 * eye))
    except (RuntimeError, AttributeError):
        return False
