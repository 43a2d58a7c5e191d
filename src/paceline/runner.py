"""How matrix products run on this machine: the only file that knows packed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

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

    def weight(self) -> Tensor:
        """W [out, in], as it was given."""
        ...


Make = Callable[[Tensor, Tensor | None], Linear]

_MAKE: ContextVar[Make | None] = ContextVar("make", default=None)


@contextmanager
def products(make: Make) -> Iterator[None]:
    """Models that are made within get their products from `make`, and not the fastest ones."""
    token = _MAKE.set(make)
    try:
        yield
    finally:
        _MAKE.reset(token)


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product known for the weight's dtype and device. It may keep a copy in a layout of its own."""
    if make := _MAKE.get():
        return make(weight, bias)
    return _Packed(weight, bias) if _packs(weight) else _Plain(weight, bias)


def gated(weight: Tensor, bias: Tensor | None, activation: str) -> Activation:
    """x -> act(x G^T) * (x U^T) for gate and up, one above the other in `weight` [2 * out, in]."""
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

    def weight(self) -> Tensor:
        weight: Tensor = self._weight.to_dense()
        return weight


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
