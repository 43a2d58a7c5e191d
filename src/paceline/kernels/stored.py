"""Weight matrices that still lie where they were read or mapped, row by row, in one of ggml's types."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.cpu.build import kernel

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Float types, and ggml's numbers of them."""

FOUR_BITS = {2, 3, 12}
"""Types of 4-bit codes with floors: Q4_0, Q4_1, Q4_K."""

FLOORS = FOUR_BITS | {7, 13}
"""All types of codes with floors: Q5_1 and Q5_K too."""

BLOCKS = {
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
}
"""Types of codes that the kernels read: elements and bytes of a block."""


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
        """`data` [out, *]: rows on the CPU in this type."""
        data = data.contiguous()
        block, size = BLOCKS.get(kind, (1, 2 if kind in (1, 30) else 4))
        if data.stride(0) * data.element_size() * block != width * size:
            raise AssertionError(f"rows of {width} elements of type {kind} in {data.stride(0)} bytes")
        rows = torch.arange(len(data)) * (data.stride(0) * data.element_size()) + data.data_ptr()
        return cls(rows, torch.full((len(data),), kind, dtype=torch.int32), width, (data,), mapped)

    @classmethod
    def of_floats(cls, weight: Tensor, mapped: bool = False) -> Stored:
        """A matrix [out, in] of one of `TYPES`."""
        return cls.of(weight, TYPES[weight.dtype], weight.shape[1], mapped)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.width

    def __getitem__(self, rows: Tensor | slice) -> Stored:
        """These rows, in this order."""
        return replace(self, rows=self.rows[rows].contiguous(), types=self.types[rows].contiguous())

    def floats(self, rows: Tensor) -> Tensor:
        """These rows [*, in], float32."""
        chosen, found = self[rows.flatten()], torch.empty(*rows.shape, self.width)
        run = kernel("paceline_read_rows", c_void_p, c_void_p, c_int64, c_int32, c_void_p)
        run(chosen.rows.data_ptr(), chosen.types.data_ptr(), rows.numel(), self.width, found.data_ptr())
        return found

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
