"""The GGUF container through the `gguf` library: metadata as plain Python values, tensors read one at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import gguf
import numpy as np
import torch
from torch import Tensor

from paceline.checkpoints.gguf_codes import gguf_codes
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.reading import open_regular
from paceline.kernels.quantize import Codes, quantize

_DAMAGED = (ValueError, KeyError, IndexError, OverflowError, struct.error, MemoryError, TypeError)
_PIECE = 1 << 18
_LONGEST_ARRAY = 1 << 24
_FLOATS = ("BF16", "F16", "F32", "F64")
_open_files: WeakValueDictionary[Any, GGUFFile] = WeakValueDictionary()


class _FastReader(gguf.GGUFReader):
    """The library's reader, with its two slow ways replaced: a vocabulary of 262,144 tokens takes 0.5 s, not 12."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> Any:
        values = np.frombuffer(self.data, dtype, int(count), int(offset))
        order = self.byte_order if override_order is None else override_order
        return values if order in "I<" else values.view(values.dtype.newbyteorder(order))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if count > _LONGEST_ARRAY:  # of empty strings, which a sparse file holds for free
            raise ValueError(f"an array of {count} elements")
        if kind == gguf.GGUFValueType.STRING:
            parts, end = self._strings(start, count)
        elif kind in self.gguf_scalar_to_np:
            parts = [self._get(start, self.gguf_scalar_to_np[kind], count)]
            end = start + parts[0].nbytes
        else:
            raise ValueError(f"an array of {kind.name}")
        return end - orig_offs, parts, list(range(len(parts))), [gguf.GGUFValueType.ARRAY, kind]

    def _strings(self, start: int, count: int) -> tuple[list[Any], int]:
        """`count` strings, each behind its length, as views of the file; and where they end."""
        view, found = self.data.data, []
        for _ in range(count):
            end = start + 8 + int.from_bytes(view[start : start + 8], "little")
            if end > len(view):
                raise ValueError("a string runs past the end of the file")
            found.append(view[start + 8 : end])
            start = end
        return found, start


@dataclass(frozen=True)
class GGUFFile:
    """An open file: `fields` by key, `tensors` by GGUF name, their bytes still in the file."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as the file holds it, or where `index` is given that part of one stacked along its first dimension."""

    info: Any
    index: int | None = None

    @property
    def kind(self) -> str:
        """The GGML type's name, "Q4_1" for instance."""
        return str(self.info.tensor_type.name)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Outermost first, as torch has it."""
        whole = tuple(reversed(self.info.shape.tolist()))
        return whole if self.index is None else whole[1:]

    def read(self) -> Tensor:
        """In the file's own dtype where it is unquantised, else float32."""
        data = self._data()
        if self.kind == "BF16":
            return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).view(self.shape)
        if self.kind in _FLOATS:
            return torch.from_numpy(data).view(self.shape)
        return torch.from_numpy(dequantize(data, self.info.tensor_type)).view(self.shape)

    def codes(self) -> Codes | None:
        """A quantised matrix as the file's own codes, or in 8 bits where those have another form (groups of 16); None
        for floats."""
        if self.kind in _FLOATS:
            return None
        return gguf_codes(self._data(), self.kind, self.shape) or quantize(self.read(), 8)

    def _data(self) -> Any:
        return self.info.data if self.index is None else self.info.data[self.index]

    def check(self) -> None:
        """Raises `UnsupportedModel` if the `gguf` library cannot turn this type into numbers."""
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[self.info.tensor_type][1]), dtype=np.uint8)
        try:
            gguf.dequantize(block, self.info.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensors of type {self.kind} are not supported", "Use a file in Q8_0, Q4_K_M, F16 or BF16"
            ) from error


def dequantize(data: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Flat float32 values of an array of blocks.

    In pieces of our own size: the library's are 16 rows, too few where rows are short (an embedding takes five times
    as long), and it gathers all of them before the result.
    """
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, width)
    values = np.empty((len(blocks), size), np.float32)
    step = _PIECE // size
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        with np.errstate(all="ignore"):  # scales of a damaged file may be infinite
            values[start : start + step] = gguf.dequantize(piece.reshape(1, -1), kind).reshape(-1, size)
    return values.reshape(-1)


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and read its header; while someone holds the result, the same file is not read again.

    Raises `ModelNotFound`, `CorruptModel`, `UnsupportedModel`.
    """
    _check_start(path)
    state = path.stat()
    key = (path.resolve(), state.st_size, state.st_mtime_ns, state.st_ino)
    if (file := _open_files.get(key)) is None:
        file = _open_files[key] = _read(path)
    return file


def _read(path: Path) -> GGUFFile:
    try:
        # Copy-on-write: torch wants writable memory, and the file stays as it is.
        with np.errstate(all="ignore"):  # sums of sizes that overflow are found out where they are used
            reader = _FastReader(path, "c")
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except _DAMAGED as error:
        if "GGMLQuantizationType" in str(error):
            raise UnsupportedModel(f"a tensor type in {path} is not known ({error})", "Update gguf") from error
        raise CorruptModel(f"{path} is damaged or cut off ({error})", "Fetch the file again") from error
    tensors = {tensor.name: GGUFTensor(tensor) for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if not tensor.shape or math.prod(tensor.shape) == 0:
            raise CorruptModel(f"{name} in {path} is empty", "Fetch the file again")
    return GGUFFile(path, fields, tensors)


def _check_start(path: Path) -> None:
    """Magic and version, for a clear word before the library tries."""
    with open_regular(path) as file:
        start = file.read(24)
    if start[:4] != b"GGUF":
        raise CorruptModel(f"{path} is not a GGUF file", "Check the path, or fetch the file again")
    if len(start) < 24:
        raise CorruptModel(f"{path} is cut off after {len(start)} bytes", "Fetch the file again")
    version = int.from_bytes(start[4:8], "little")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{path} has GGUF version {version} or is big-endian", "Convert it to a little-endian GGUF of version 3"
        )
