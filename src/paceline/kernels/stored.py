"""Weight matrices that still lie where they were read or mapped, row by row, in ggml's types."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Float types, and ggml's numbers of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A matrix [out, in] as rows in memory, which can be stacked and reordered without touching them.

    `rows`: addresses, int64 [out]. `types`: ggml's numbers, int32 [out]. `held`: the arrays that the addresses point
    into; `mapped`: whether they are pages of a file, which can be read again. `bits`: of the codes that rows of floats
    are to become, 4 or 8; None: they stay floats.
    """

    rows: Tensor
    types: Tensor
    width: int
    held: tuple[Tensor, ...]
    mapped: bool = False
    bits: int | None = None

    @classmethod
    def of(cls, data: Tensor, kind: int, width: int, mapped: bool = False) -> Stored:
        """`data`: bytes [out, those of a row] in this type, contiguous, on the CPU."""
        if not (data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 2):
            raise ValueError("rows must be contiguous bytes")
        rows = torch.arange(len(data)) * data.shape[1] + data.data_ptr()
        return cls(rows, torch.full((len(data),), kind, dtype=torch.int32), width, (data,), mapped)

    @classmethod
    def floats(cls, weight: Tensor, bits: int | None, mapped: bool = False) -> Stored:
        """A matrix [out, in] of one of `FLOATS`."""
        data = weight.contiguous().view(torch.uint8)
        return replace(cls.of(data, FLOATS[weight.dtype], weight.shape[1], mapped), bits=bits)

    @classmethod
    def stack(cls, parts: Sequence[Stored]) -> Stored:
        """Matrices of one width above each other, whatever their types."""
        rows, types = torch.cat([part.rows for part in parts]), torch.cat([part.types for part in parts])
        held = tuple(data for part in parts for data in part.held)
        return cls(rows, types, parts[0].width, held, all(part.mapped for part in parts), parts[0].bits)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.width

    def __getitem__(self, rows: Tensor | slice) -> Stored:
        """These rows, in this order."""
        return replace(self, rows=self.rows[rows].contiguous(), types=self.types[rows].contiguous())

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
