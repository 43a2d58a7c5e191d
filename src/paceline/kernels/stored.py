"""Weight matrices that stay in the memory where they were read or mapped. They are described row by row, with ggml's
types."""

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
"""Float types -> ggml's type numbers."""

Format = int | torch.dtype
"""Format of a matrix: codes of 4 or 8 bits, or a float type."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A matrix [out, in] whose rows may lie anywhere in memory. Stacking and reordering change only the list of row
    addresses.

    The lists are NumPy arrays, because torch wakes all its threads even for a few thousand numbers.

    Attributes:
        rows: Address of each row, int64 [out].
        types: ggml type number of each row, int32 [out].
        kinds: The ggml type numbers that `types` may contain.
        width: Number of inputs.
        tensors: The tensors that the addresses point into.
        mapped: True if `tensors` are pages of a memory-mapped file, which the system can read again.
        target: Format to which rows of floats are converted. None keeps them as they are.
        requantises: True if codes that have more bits than `target` are converted too.
    """

    rows: Any
    types: Any
    kinds: tuple[int, ...]
    width: int
    tensors: tuple[Tensor, ...]
    mapped: bool = False
    target: Format | None = None
    requantises: bool = False

    @classmethod
    def of(cls, data: Tensor, kind: int, width: int, mapped: bool = False) -> Stored:
        """Describe a matrix of one ggml type.

        Args:
            data: uint8 [out, bytes per row], contiguous, on the CPU.
            kind: ggml type number of the rows.
            width: Number of inputs.
            mapped: True if `data` is a mapped file.

        Raises:
            ValueError: If `data` does not have this form.
        """
        if not (data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 2):
            raise ValueError(
                f"rows must be a contiguous uint8 matrix, got {data.dtype} of shape {tuple(data.shape)}; "
                "call contiguous() and view(torch.uint8) first"
            )
        rows = np.arange(len(data), dtype=np.int64) * data.shape[1] + data.data_ptr()
        return cls(rows, np.full(len(data), kind, np.int32), (kind,), width, (data,), mapped)

    @classmethod
    def floats(cls, weight: Tensor, target: Format | None, mapped: bool = False) -> Stored:
        """Describe a matrix [out, in] of one of the float types in `FLOATS`."""
        data = weight.detach().contiguous().view(torch.uint8)
        return replace(cls.of(data, FLOATS[weight.dtype], weight.shape[1], mapped), target=target)

    @classmethod
    def stack(cls, parts: Sequence[Stored]) -> Stored:
        """Stack matrices of the same width along the outputs, whatever their types.

        If the parts differ in `target`, all floats are converted to 8 bits.
        """
        if len(parts) == 1:
            return parts[0]
        rows, types = (np.concatenate(x) for x in zip(*((part.rows, part.types) for part in parts), strict=True))
        kinds = tuple({kind for part in parts for kind in part.kinds})
        tensors = tuple(data for part in parts for data in part.tensors)
        target = parts[0].target if len({part.target for part in parts}) == 1 else 8
        requantises = all(part.requantises for part in parts)
        return cls(rows, types, kinds, parts[0].width, tensors, all(part.mapped for part in parts), target, requantises)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.width

    @property
    def is_float(self) -> bool:
        return set(self.kinds) <= {*FLOATS.values()}

    def __getitem__(self, rows: Tensor | slice) -> Stored:
        """Return these rows, in this order."""
        which = rows.numpy() if isinstance(rows, Tensor) else rows
        return replace(self, rows=self.rows[which], types=self.types[which])

    def columns(self, first: int, end: int) -> Stored:
        """Return the columns `first` to `end` - 1 of a matrix with a single type. Both numbers must be block boundaries
        of that type."""
        size = self.tensors[0].shape[1]
        return replace(self, rows=self.rows + first * size // self.width, width=end - first)

    def release(self) -> None:
        """Release memory-mapped pages. The system reads them again when they are needed."""
        for data in self.tensors if self.mapped else ():
            _release(data.data_ptr(), data.nbytes)


@cache
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None


def _release(start: int, size: int) -> None:
    """Release the pages that lie completely in this range, because the first and the last page may hold other data
    too."""
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and (advise := _madvise()):
        advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
