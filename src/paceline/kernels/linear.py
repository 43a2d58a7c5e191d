"""Linear layers. This is the only module that chooses between kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.activations import ACTIVATIONS, UNGATED
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import FLOAT_KINDS, LANES, NativeGated, NativeHeadLinear, NativeLinear
from paceline.kernels.quantize import Codes, round_activations
from paceline.kernels.stored import Stored


class Linear(Protocol):
    """A linear layer with a weight W [out, in]: x W^T + b, from [..., in] to [..., out]."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + x W^T + b."""
        return residual + self(x)

    def precise(self, x: Tensor) -> Tensor:
        """Return x W^T + b in float32 or wider, for logits."""
        y = self(x)
        return y if y.dtype == torch.float64 else y.float()

    @abstractmethod
    def weight(self) -> Tensor:
        """Return W [out, in] as it was given. If it was given as codes, return it dequantised to float32."""
        ...


MakeLinear = Callable[[Tensor, Tensor | None], Linear]

_MAKE: ContextVar[MakeLinear | None] = ContextVar("make", default=None)


@contextmanager
def linear_layers_from(make: MakeLinear) -> Iterator[None]:
    """Build the linear layers of models inside this context with `make` instead of choosing the fastest kernel.

    Linear layers with quantised weights are exact, so they are built as usual.
    """
    token = _MAKE.set(make)
    try:
        yield
    finally:
        _MAKE.reset(token)


def linear(weight: Tensor | Codes | Stored, bias: Tensor | None = None) -> Linear:
    """Build the fastest linear layer for the weight's dtype and device.

    Linear layers with quantised weights round the activations to 8 bits, with separate scales for each row.

    Args:
        weight: W [out, in]. It may be copied into another layout.
        bias: b [out], or None.

    Returns:
        A linear layer whose results have the dtype of the activations.
    """
    if isinstance(weight, Stored):
        return NativeLinear(weight, bias)
    if (make := _MAKE.get()) and isinstance(weight, Tensor):
        return make(weight, bias)
    if _native(weight):
        return NativeLinear(weight, bias)
    if isinstance(weight, Codes):
        return _Coded(weight, bias)
    packs = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packs_bfloat16()
    return _Packed(weight, bias) if packs else _Plain(weight, bias)


def head_linear(weight: Tensor) -> HeadLinear | NativeHeadLinear:
    """Build a separate linear layer for each head.

    Args:
        weight: [heads, out, in].

    Returns:
        A function from x [..., heads, in] to [..., heads, out].
    """
    native = _native(weight) and not _MAKE.get() and weight.shape[1] % LANES == 0
    return NativeHeadLinear(weight) if native else HeadLinear(weight)


class HeadLinear:
    """See `head_linear`, with torch."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        columns = x.flatten(0, -3).permute(1, 2, 0)
        out: Tensor = torch.bmm(self._weight, columns).permute(2, 0, 1).unflatten(0, x.shape[:-2])
        return out


def gated(weight: Tensor | Codes | Stored, bias: Tensor | None, activation: str) -> Gated | NativeGated:
    """Build x -> `ACTIVATIONS[activation]`(x G^T, x U^T).

    Args:
        weight: [2 * out, in], the gate projection G followed by the up projection U.
        bias: [2 * out], or None.
        activation: A name in `ACTIVATIONS`.
    """
    if isinstance(weight, Stored) or (_native(weight) and not _MAKE.get()):
        return NativeGated(weight, bias, activation)
    return Gated(linear(weight, bias), activation)


class Gated:
    """Gated linear layers on top of one `Linear` that computes the gate and up projections together."""

    def __init__(self, gate_up: Linear, activation: str) -> None:
        self.linear, self._act = gate_up, ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.linear(x).chunk(2, -1)
        return self._act(gate, up)


class Ungated:
    """A linear layer, followed by an activation."""

    def __init__(self, up: Linear, activation: str) -> None:
        """`activation`: A name in `UNGATED`."""
        self.linear, self.activation, self._act = up, activation, UNGATED[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self._act(self.linear(x))


class _Plain(Linear):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def weight(self) -> Tensor:
        return self._weight


class _Packed(Linear):
    """A linear layer with oneDNN's blocked weights. It takes half the time of F.linear for 2 to 8 rows on AVX512-BF16
    (docs/notes/kernels.md#packed-weights)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias
        self._multiply = torch.ops.mkldnn._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return y

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self._multiply.binary(x, residual, self._weight, self._bias, "add")
        return y

    def weight(self) -> Tensor:
        weight: Tensor = self._weight.to_dense()
        return weight


class _Coded(Linear):
    """A linear layer with quantised weights, for any device. It computes one group at a time.

    Within a group, all partial sums are integers below 2^24, so float32 adds them exactly in any order. The groups are
    added in order. A row's result is therefore bit-identical whatever the other rows are. This is the slow path,
    for devices and builds without the CPU kernels.
    """

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        self._codes, self._bias = codes, bias

    def __call__(self, x: Tensor) -> Tensor:
        c, rows = self._codes, round_activations(x.reshape(-1, x.shape[-1]))
        total = rows.codes.new_zeros(len(rows.codes), c.shape[0])
        for group, (row_codes, row_scale) in enumerate(zip(rows.codes.unbind(1), rows.scale.unbind(1), strict=True)):
            part = (row_codes @ c.centred_codes(group).T).mul_(c.scale[:, group].float())
            if c.offset is not None:
                part += row_codes.sum(-1, keepdim=True) * c.offset[:, group].float()
            total += part.mul_(row_scale[:, None])
        if self._bias is not None:
            total += self._bias
        return total.to(x.dtype).view(*x.shape[:-1], c.shape[0])

    def precise(self, x: Tensor) -> Tensor:
        return self(x.float())

    def weight(self) -> Tensor:
        return self._codes.dequantised()


class FixedTile(Linear):
    """A linear layer on CUDA for exact mode, where each row's result is bit-identical whatever the other rows are
    (`cuda.kernels.fixed_product`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, None, x.dtype)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._run(x, residual, x.dtype)

    def precise(self, x: Tensor) -> Tensor:
        return self._run(x, None, torch.promote_types(x.dtype, torch.float32))

    def weight(self) -> Tensor:
        return self._weight

    def _run(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        from paceline.kernels.cuda.kernels import fixed_product

        added = None if residual is None else residual.reshape(-1, residual.shape[-1])
        y = fixed_product(x.reshape(-1, x.shape[-1]), self._weight, self._bias, added, dtype)
        return y.view(*x.shape[:-1], -1)


def _native(weight: Tensor | Codes) -> bool:
    """Return True if the kernels of `kernels/cpu/` are available and support this weight."""
    values = weight.codes if isinstance(weight, Codes) else weight
    if values.device.type != "cpu":
        return False
    # Ask for the library last, because the first call may compile it.
    return (isinstance(weight, Codes) or weight.dtype in FLOAT_KINDS) and library() is not None


def takes_stored(dtype: torch.dtype, coded: bool, device: torch.device) -> bool:
    """Return True if `linear` accepts weights as `Stored`.

    Args:
        dtype: Float type of the model.
        coded: True if the weights are quantised.
        device: Device of the model.
    """
    runs = coded or (dtype in FLOAT_KINDS and not _MAKE.get())
    return runs and device.type == "cpu" and library() is not None


def memory_bound_rows(device: torch.device) -> int:
    """Return the maximum number of rows for which reading the weights dominates the time of a pass.

    Learned drafters use it as the size of their first drafts. A pass of the demo model in bfloat16 takes 11.5 ms for 1
    row, 14.3 ms for 8 rows and 19.2 ms for 16 rows (docs/notes/kernels.md#the-time-budget-of-a-pass).
    """
    return 8 if device.type == "cpu" else 128


def fast_bfloat16() -> bool:
    """Return True if linear layers in bfloat16 are fast on this CPU."""
    return library() is not None or packs_bfloat16()


@cache
def packs_bfloat16() -> bool:
    """Return True if this CPU and this build of torch support oneDNN's packed bfloat16 weights. A small matrix
    multiplication is tried to find out."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    try:
        eye = torch.eye(32, dtype=torch.bfloat16)
        return bool(torch.equal(_Packed(eye, None).onto(eye, eye), 2 * eye))
    except (RuntimeError, AttributeError):
        return False
