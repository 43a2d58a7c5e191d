"""A weight matrix as its rows lie in a file, in GGUF's types, before the kernels pack it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """W [out, in]: the address of each row, its type by ggml's number, and the tensors that hold the rows.

    Rows can be stacked and reordered without touching them.
    """

    rows: Sequence[int]
    types: Sequence[int]
    width: int
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, data: Tensor, kind: int, width: int) -> Stored:
        """All rows of `data`, uint8 [out, bytes of a row]."""
        if not (data.dtype == torch.uint8 and data.is_contiguous() and data.ndim == 2):
            raise ValueError("rows must be contiguous bytes")
        first, step = data.data_ptr(), data.shape[1]
        return cls(range(first, first + step * len(data), step), [kind] * len(data), width, (data,))

    @classmethod
    def stack(cls, parts: Sequence[Stored]) -> Stored:
        """Matrices of one width above each other."""
        rows, types = [x for part in parts for x in part.rows], [x for part in parts for x in part.types]
        return cls(rows, types, parts[0].width, tuple(x for part in parts for x in part.held))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.width

    def __getitem__(self, rows: Sequence[int] | slice) -> Stored:
        """These rows, in this order."""
        if isinstance(rows, slice):
            return Stored(self.rows[rows], self.types[rows], self.width, self.held)
        return Stored([self.rows[i] for i in rows], [self.types[i] for i in rows], self.width, self.held)
