"""Low-rank changes to products (LoRA, Hu et al., arXiv 2106.09685), beside the weights instead of merged into them.

A pass may hold rows of several adapters: the base product is computed for all of them at once, and each slot's adapter
adds B (A x) to its own rows. So no row depends on the adapters beside it, and one without is as if there were none.
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
    """Context of a pass whose slots have these adapters, numbered from 1 on; 0: none. For layers that torch runs."""
    token = _ADAPTERS.set(adapters if any(adapters) else ())
    try:
        yield
    finally:
        _ADAPTERS.reset(token)


@dataclass(frozen=True, slots=True)
class Factors:
    """An adapter of a model: `name`, and the factors A [r, in] and B [out, r] of each module that it changes, B with
    the adapter's scale."""

    name: str
    factors: Mapping[str, tuple[Tensor, Tensor]]

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        """Raise `AdapterMismatch` unless this is a change of weights [out, in] of this shape."""
        a, b = self.factors[module]
        if (b.shape[0], a.shape[1]) != shape:
            raise AdapterMismatch(
                f"the adapter {self.name} changes {module} from {a.shape[1]} to {b.shape[0]} elements, "
                f"and this model's is from {shape[-1]} to {shape[0]}",
                "It was trained for another model; load it with that",
            )


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's change to one product: a [r, in], b [out, r]."""

    a: Tensor
    b: Tensor

    @staticmethod
    def stacked(parts: Sequence[tuple[Tensor, Tensor] | None], outputs: Sequence[int]) -> LowRank | None:
        """The change to a product of several projections, of so many outputs each; None if none is changed."""
        held = [part for part in parts if part]
        if not held:
            return None
        a = torch.cat([a for a, _ in held])
        b, row, rank = a.new_zeros(sum(outputs), len(a)), 0, 0
        for part, out in zip(parts, outputs, strict=True):
            if part:
                b[row : row + out, rank : rank + len(part[0])] = part[1]
                rank += len(part[0])
            row += out
        return LowRank(a, b)

    def ordered(self, order: Tensor) -> LowRank:
        """The change to a product whose outputs are these."""
        return LowRank(self.a, self.b[order])


class Adapted(Linear):
    """A product with the changes of adapters, in the model's dtype; None for those that leave it as it is."""

    def __init__(self, base: Linear, changes: Sequence[LowRank | None], dtype: torch.dtype) -> None:
        self.base, self.changes, self.dtype = base, changes, dtype
        self._products: list[tuple[Linear, Linear] | None] = []

    def __call__(self, x: Tensor) -> Tensor:
        return self._changed(self.base(x), x)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `Linear.onto`."""
        return self._changed(self.base.onto(x, residual), x)

    def precise(self, x: Tensor) -> Tensor:
        """See `Linear.precise`."""
        y = self.base.precise(x)
        for slot, (down, up) in self._changed_slots():
            y[slot] += up.precise(down(x[slot]))
        return y

    def weight(self) -> Tensor:
        """See `Linear.weight`: the base's."""
        return self.base.weight()

    def _changed(self, y: Tensor, x: Tensor) -> Tensor:
        """y [B, T, out], in place, with what each slot's adapter adds for x [B, T, in]."""
        for slot, (down, up) in self._changed_slots():
            y[slot] = up.onto(down(x[slot]), y[slot])
        return y

    def _changed_slots(self) -> Iterator[tuple[int, tuple[Linear, Linear]]]:
        """The slots whose adapter changes this product, and its factors as products."""
        if not self._products:  # made when torch first runs them: the kernels have a copy of their own
            self._products = [self._product(change) if change else None for change in self.changes]
            self.changes = ()
        for slot, number in enumerate(_ADAPTERS.get()):
            if number and (change := self._products[number - 1]):
                yield slot, change

    def _product(self, change: LowRank) -> tuple[Linear, Linear]:
        return linear(change.a.to(self.dtype)), linear(change.b.to(self.dtype))


def adapted(product: Linear, changes: Sequence[LowRank | None], dtype: torch.dtype) -> Linear:
    """The product with these changes, if there are any."""
    return Adapted(product, changes, dtype) if any(changes) else product


def adapt_gated(product: Gated | NativeGated, changes: Sequence[LowRank | None], dtype: torch.dtype) -> None:
    """Add changes to gate and up, stacked, to their product."""
    if isinstance(product, NativeGated):
        changes = [change and change.ordered(product.order) for change in changes]
    product.both = adapted(product.both, changes, dtype)


def base_of(product: object) -> object:
    """The product without adapters."""
    return product.base if isinstance(product, Adapted) else product


class CLowRank(Structure):
    """`LowRank` of low_rank.h."""

    _fields_ = (("a", c_void_p), ("blocks", c_void_p), ("rank", c_int32))


_BLOCK = np.dtype([("b", np.uintp), ("first", np.int32), ("count", np.int32)], align=True)
"""`LowRankBlock` of low_rank.h."""


class NativeChanges:
    """A product's changes as the CPU kernels read them. `rank`: the largest."""

    def __init__(self, product: Adapted) -> None:
        self._held: list[object] = []
        self.c: Array[CLowRank] = (CLowRank * len(product.changes))()
        for own, change in zip(self.c, product.changes, strict=True):
            if change:
                self._fill(own, change, product.dtype)
        self.rank = max(own.rank for own in self.c)
        product.changes = ()  # torch does not run what the kernels do

    def _fill(self, own: CLowRank, change: LowRank, dtype: torch.dtype) -> None:
        (rank, width), out = change.a.shape, len(change.b)
        a = F.pad(change.a.to(dtype), (0, -width % LANES, 0, -rank % 4)).contiguous()
        b = F.pad(change.b.to(dtype), (0, 0, 0, -out % LANES)).view(-1, LANES, rank)
        table = np.zeros(len(b), _BLOCK)
        self._held += [a, table]
        # Of stacked projections each block has columns of its own; the zeros beside them are left out.
        used = (b != 0).any(1).numpy()
        first = used.argmax(1)
        end = np.where(used.any(1), rank - used[:, ::-1].argmax(1), 0)
        for start, stop in np.unique(np.stack([first, end], 1), axis=0).tolist():
            if start < stop:
                here = np.flatnonzero((first == start) & (end == stop))
                part = b[torch.from_numpy(here), :, start:stop].transpose(1, 2).contiguous()
                self._held.append(part)
                table["b"][here] = part.data_ptr() + np.arange(len(here)) * part[0].nbytes
                table["first"][here], table["count"][here] = start, stop - start
        own.a, own.blocks, own.rank = a.data_ptr(), table.ctypes.data, len(a)
