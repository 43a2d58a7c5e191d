"""Weight matrices that still lie where they were read or mapped, row by row, in ggml's types."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Float types, and ggml's numbers of them."""

Form = int | torch.dtype
"""Codes of 4 or 8 bits, or a float type."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A matrix [out, in] as rows in memory, which can be stacked and reordered without touching them.

    `rows`: addresses, int64 [out]. `types`: ggml's numbers, int32 [out]; `kinds`: those that may be among them. `held`:
    the tensors that the addresses point into; `mapped`: whether they are pages of a file, which can be read again.
    `form`: what rows of floats are to become; `fewer`: and codes of more bits than those.

    Arrays of NumPy's, since torch wakes all threads for a few thousand numbers.
    """

    rows: Any
    types: Any
    kinds: tuple[int, ...]
    width: int
    held: tuple[Tensor, ...]
    mapped: bool = False
    form: Form | None = None
    fewer: bool = False

    @classmethod
    def of(cls, data: Tensor, kind: int, width: int, mapped: bool = False) -> Stored:
        """`data`: bytes [out, those of a row] in this type, contiguous, on the CPU."""
        if not (data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 2):
            raise ValueError("rows must be contiguous bytes")
        rows = np.arange(len(data), dtype=np.int64) * data.shape[1] + data.data_ptr()
        return cls(rows, np.full(len(data), kind, np.int32), (kind,), width, (data,), mapped)

    @classmethod
    def floats(cls, weight: Tensor, form: Form | None, mapped: bool = False) -> Stored:
        """A matrix [out, in] of one of `FLOATS`."""
        data = weight.detach().contiguous().view(torch.uint8)
        return replace(cls.of(data, FLOATS[weight.dtype], weight.shape[1], mapped), form=form)

    @classmethod
    def stack(cls, parts: Sequence[Stored]) -> Stored:
        """Matrices of one width above each other, whatever their types. Floats of different forms become 8 bits."""
        if len(parts) == 1:
            return parts[0]
        rows, types = (np.concatenate(x) for x in zip(*((part.rows, part.types) for part in parts), strict=True))
        kinds = tuple({kind for part in parts for kind in part.kinds})
        held = tuple(data for part in parts for data in part.held)
        form = parts[0].form if len({part.form for part in parts}) == 1 else 8
        fewer = all(part.fewer for part in parts)
        return cls(rows, types, kinds, parts[0].width, held, all(part.mapped for part in parts), form, fewer)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.width

    @property
    def is_float(self) -> bool:
        return set(self.kinds) <= {*FLOATS.values()}

    def __getitem__(self, rows: Tensor | slice) -> Stored:
        """These rows, in this order."""
        which = rows.numpy() if isinstance(rows, Tensor) else rows
        return replace(self, rows=self.rows[which], types=self.types[which])

    def columns(self, first: int, end: int) -> Stored:
        """These columns of rows of one type; both are borders of its blocks."""
        size = self.held[0].shape[1]
        return replace(self, rows=self.rows + first * size // self.width, width=end - first)

    def release(self) -> None:
        """Give mapped pages back to the system, which reads them again if they are needed."""
        for data in self.held if self.mapped else ():
            _release(data.data_ptr(), data.nbytes)


@cache
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None


def _release(start: int, size: int) -> None:
    """Of whole pages alone: those at the ends belong to neighbours too."""
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and (advise := _madvise()):
        advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
