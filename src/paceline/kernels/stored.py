"""Weight matrices that still lie where they were read or mapped, row by row, in one of ggml's types."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Float types, and ggml's numbers of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A matrix [out, in] as rows in memory.

    `rows`: int64 [out], addresses. `types`: int32 [out], ggml's numbers. `held`: the arrays that the addresses point
    into; `mapped`: whether they are pages of a file, which can be read again. `bits`: of the codes that rows of floats are
    to become, 4 or 8; None: they stay floats.
    """

    rows: Tensor
    types: Tensor
    width: int
    held: tuple[Tensor, ...]
    mapped: bool = False
    bits: int | None = None

    @classmethod
    def of(cls, data: Tensor, kind: int, width: int, mapped: bool = False) -> Stored:
        """`data` [out, bytes of a row]: contiguous rows on the CPU in this type."""
        data = data.contiguous()
        rows = torch.arange(len(data)) * (data.stride(0) * data.element_size()) + data.data_ptr()
        return cls(rows, torch.full((len(data),), kind, dtype=torch.int32), width, (data,), mapped)

    @classmethod
    def floats(cls, weight: Tensor, mapped: bool = False) -> Stored:
        """A matrix [out, in] of one of `TYPES`."""
        return cls.of(weight, TYPES[weight.dtype], weight.shape[1], mapped)

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


def stack_stored(parts: Sequence[Stored]) -> Stored:
    """Matrices of one width above each other, whatever their types."""
    if len(parts) == 1:
        return parts[0]
    return Stored(
        torch.cat([part.rows for part in parts]),
        torch.cat([part.types for part in parts]),
        parts[0].width,
        tuple(data for part in parts for data in part.held),
        all(part.mapped for part in parts),
        parts[0].bits,
    )


def _release(start: int, size: int) -> None:
    """Of whole pages alone: those at the ends belong to neighbours too."""
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None
    if advise and first < end:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
