"""Low-rank adapters for linear layers (LoRA, Hu et al., arXiv 2106.09685), which are kept separate from the weights
instead of being merged.

A pass may contain rows with different adapters. The base layer is computed for all rows together, and each slot's
adapter adds B (A x) to the rows of that slot. So a row never depends on the adapter of another row, and a row without
an adapter has the same bits as in a model without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import Array, Structure, c_int32, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import AdapterMismatch
from paceline.kernels.cpu.matrix import LANES, NativeGated
from paceline.kernels.linear import Gated, Linear, linear

_ADAPTERS: ContextVar[Sequence[int]] = ContextVar("adapters", default=())


@contextmanager
def adapted_pass(adapters: Sequence[int]) -> Iterator[None]:
    """Select the adapter of each slot for the torch layers that run inside this context.

    Args:
        adapters: For each slot of the pass, the index of its adapter, counted from 1, or 0 for no adapter.
    """
    token = _ADAPTERS.set(adapters if any(adapters) else ())
    try:
        yield
    finally:
        _ADAPTERS.reset(token)


def adapters_of_pass() -> Sequence[int]:
    """Return the `adapters` of the surrounding `adapted_pass`. Empty if no slot has an adapter."""
    return _ADAPTERS.get()


@dataclass(frozen=True, slots=True)
class Factors:
    """A LoRA adapter of a model.

    Attributes:
        name: Name of the adapter.
        factors: A [r, in] and B [out, r] for each module that the adapter changes. B includes the adapter's scale.
    """

    name: str
    factors: Mapping[str, tuple[Tensor, Tensor]]

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        """Raise `AdapterMismatch` unless the factors of `module` fit weights of this shape [out, in]."""
        a, b = self.factors[module]
        if (b.shape[0], a.shape[1]) != shape:
            raise AdapterMismatch(
                f"the adapter {self.name} maps {a.shape[1]} to {b.shape[0]} elements in {module}, "
                f"but this model maps {shape[-1]} to {shape[0]} there",
                "Load the adapter with the model that it was trained for",
            )


@dataclass(frozen=True, slots=True)
class LowRank:
    """The factors of an adapter for one linear layer: `a` [r, in] and `b` [out, r]."""

    a: Tensor
    b: Tensor

    @staticmethod
    def stacked(parts: Sequence[tuple[Tensor, Tensor] | None], outputs: Sequence[int]) -> LowRank | None:
        """Combine the factors of several projections that are computed by one linear layer.

        Args:
            parts: (A, B) for each projection, or None for a projection that the adapter does not change.
            outputs: Number of outputs of each projection.

        Returns:
            The combined factors, or None if the adapter changes none of the projections.
        """
        changed = [part for part in parts if part]
        if not changed:
            return None
        a = torch.cat([a for a, _ in changed])
        b, row, rank = a.new_zeros(sum(outputs), len(a)), 0, 0
        for part, out in zip(parts, outputs, strict=True):
            if part:
                b[row : row + out, rank : rank + len(part[0])] = part[1]
                rank += len(part[0])
            row += out
        return LowRank(a, b)

    def ordered(self, order: Tensor) -> LowRank:
        """Return the factors for the same linear layer with its outputs in this order."""
        return LowRank(self.a, self.b[order])


class Adapted(Linear):
    """A linear layer with adapters, in the model's dtype.

    Attributes:
        base: The linear layer without adapters.
        factors: The factors of each adapter. None for an adapter that does not change this linear layer.
    """

    def __init__(self, base: Linear, factors: Sequence[LowRank | None], dtype: torch.dtype) -> None:
        self.base, self.factors, self.dtype = base, factors, dtype
        self._adapters: list[tuple[Linear, Linear] | None] = []
        """Linear layers with the weights A and B of each adapter."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._add_adapters(self.base(x), x)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Linear.onto`."""
        return self._add_adapters(self.base.onto(x, residual), x)

    def precise(self, x: Tensor) -> Tensor:
        """See `Linear.precise`."""
        y = self.base.precise(x)
        for slot, (down, up) in self._adapters_of_slots():
            y[slot] += up.precise(down(x[slot]))
        return y

    def weight(self) -> Tensor:
        """Return the weight without adapters."""
        return self.base.weight()

    def _add_adapters(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the results of the slots' adapters for x [B, T, in] to y [B, T, out], in place."""
        for slot, (down, up) in self._adapters_of_slots():
            y[slot] = up.onto(down(x[slot]), y[slot])
        return y

    def _adapters_of_slots(self) -> Iterator[tuple[int, tuple[Linear, Linear]]]:
        """Yield the slots whose adapter changes this linear layer, each with the linear layers A and B."""
        if not self._adapters:  # built on first use, because the CPU kernels keep their own copy and never need these
            self._adapters = [
                (linear(own.a.to(self.dtype)), linear(own.b.to(self.dtype))) if own else None for own in self.factors
            ]
            self.factors = ()
        for slot, number in enumerate(_ADAPTERS.get()):
            if number and (adapter := self._adapters[number - 1]):
                yield slot, adapter


def adapted(base: Linear, factors: Sequence[LowRank | None], dtype: torch.dtype) -> Linear:
    """Wrap a linear layer in `Adapted` if any adapter changes it. Otherwise, return it unchanged."""
    return Adapted(base, factors, dtype) if any(factors) else base


def adapt_gated(gate_up: Gated | NativeGated, factors: Sequence[LowRank | None], dtype: torch.dtype) -> None:
    """Add adapters to the stacked gate and up projections. `factors` has the order of the checkpoint's rows."""
    if isinstance(gate_up, NativeGated):
        factors = [own and own.ordered(gate_up.order) for own in factors]
    gate_up.linear = adapted(gate_up.linear, factors, dtype)


def without_adapters(layer: object) -> object:
    """Return the base of an `Adapted` linear layer. Return any other object unchanged."""
    return layer.base if isinstance(layer, Adapted) else layer


class CLowRank(Structure):
    """The structure `LowRank` in low_rank.h."""

    _fields_ = (("a", c_void_p), ("blocks", c_void_p), ("rank", c_int32))


_BLOCK = np.dtype([("b", np.uintp), ("first", np.int32), ("count", np.int32)], align=True)
"""The structure `LowRankBlock` in low_rank.h."""


class NativeAdapters:
    """The adapters of a linear layer in the layout of the CPU kernels.

    Attributes:
        c: One `LowRank` structure for each adapter.
        rank: The largest rank of all adapters.
    """

    def __init__(self, layer: Adapted) -> None:
        self._kept_alive: list[object] = []
        """The arrays that the structures point to."""
        self.c: Array[CLowRank] = (CLowRank * len(layer.factors))()
        for structure, factors in zip(self.c, layer.factors, strict=True):
            if factors:
                self._fill(structure, factors, layer.dtype)
        self.rank = max(structure.rank for structure in self.c)
        layer.factors = ()  # the kernels compute this linear layer, so torch needs no copy of the factors

    def _fill(self, structure: CLowRank, factors: LowRank, dtype: torch.dtype) -> None:
        (rank, width), out = factors.a.shape, len(factors.b)
        a = F.pad(factors.a.to(dtype), (0, -width % LANES, 0, -rank % 4)).contiguous()
        b = F.pad(factors.b.to(dtype), (0, 0, 0, -out % LANES)).view(-1, LANES, rank)
        table = np.zeros(len(b), _BLOCK)
        self._kept_alive += [a, table]
        # In stacked projections, a block uses only the columns of its own projection. All its other columns are zero.
        used = (b != 0).any(1).numpy()
        first = used.argmax(1)
        end = np.where(used.any(1), rank - used[:, ::-1].argmax(1), 0)
        for start, stop in np.unique(np.stack([first, end], 1), axis=0).tolist():
            if start < stop:
                here = np.flatnonzero((first == start) & (end == stop))
                part = b[torch.from_numpy(here), :, start:stop].transpose(1, 2).contiguous()
                self._kept_alive.append(part)
                table["b"][here] = part.data_ptr() + np.arange(len(here)) * part[0].nbytes
                table["first"][here], table["count"][here] = start, stop - start
        structure.a, structure.blocks, structure.rank = a.data_ptr(), table.ctypes.data, len(a)
