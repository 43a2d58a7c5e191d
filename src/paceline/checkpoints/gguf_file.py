"""GGUF containers, read with the `gguf` library: metadata as plain Python values, tensors one at a time."""

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

from paceline.checkpoints.gguf_codes import BITS, gguf_codes
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.reading import open_regular
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import packs
from paceline.kernels.quantize import Codes, quantize
from paceline.kernels.stored import Stored

_DAMAGED = (ValueError, KeyError, IndexError, OverflowError, struct.error, MemoryError, TypeError)
_PIECE = 1 << 18
_LONGEST_ARRAY = 1 << 24
FLOATS = ("BF16", "F16", "F32", "F64")
_open_files: WeakValueDictionary[Any, GGUFFile] = WeakValueDictionary()


class _FastReader(gguf.GGUFReader):
    """The library's reader with its two slow methods replaced: a vocabulary of 262,144 tokens takes 0.5 s, not 12."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> Any:
        values = np.frombuffer(self.data, dtype, int(count), int(offset))
        order = self.byte_order if override_order is None else override_order
        return values if order in "I<" else values.view(values.dtype.newbyteorder(order))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if count > _LONGEST_ARRAY:  # empty strings cost a sparse file nothing
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
        """Return `count` length-prefixed strings as views of the file, and the offset where they end."""
        view, limit, found = self.data.data, len(self.data), list[Any]()
        read, append = struct.Struct("<Q").unpack_from, found.append
        for _ in range(count):
            first = start + 8
            start = first + read(view, start)[0]
            if start > limit:
                raise ValueError("a string runs past the end of the file")
            append(view[first:start])
        return found, start


@dataclass(frozen=True)
class GGUFFile:
    """An open file: metadata `fields` by key, `tensors` by GGUF name, not read yet."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file, or the part `index` of one that is stacked along its first dimension."""

    info: Any
    index: int | None = None

    @property
    def kind(self) -> str:
        """Name of the GGML type, such as "Q4_1"."""
        return str(self.info.tensor_type.name)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape, outermost dimension first as in torch."""
        whole = tuple(reversed(self.info.shape.tolist()))
        return whole if self.index is None else whole[1:]

    def read(self) -> Tensor:
        """Return the tensor, in the file's dtype where it is unquantised, else in float32."""
        data = self._data()
        if self.kind == "BF16":
            return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).view(self.shape)
        if self.kind in FLOATS:
            return torch.from_numpy(data).view(self.shape)
        return torch.from_numpy(dequantize(data, self.info.tensor_type)).view(self.shape)

    def codes(self) -> Codes | None:
        """Return a quantised matrix as the file's own codes, or in 8 bits where those have another form (groups of 16);
        None for floats."""
        if self.kind in FLOATS:
            return None
        return gguf_codes(self._data(), self.kind, self.shape) or quantize(self.read(), 8)

    def kept_bits(self) -> int | None:
        """Return the bits of the codes that a matrix keeps on a CPU; None if it is of floats or changes its codes."""
        if self.kind in FLOATS:
            return None
        if library() is None:
            return BITS.get(self.kind)
        return int(next(filter(str.isdigit, self.kind))) if packs(int(self.info.tensor_type)) else None

    def stored(self) -> Stored:
        """Return a matrix where it lies; of a type that the kernels do not read, as floats that become 8-bit codes."""
        number = int(self.info.tensor_type)
        if not packs(number):
            return Stored.floats(self.read().float(), 8)
        data = torch.from_numpy(self._data()).view(self.shape[0], -1).view(torch.uint8)
        return Stored.of(data, number, self.shape[1], mapped=True)

    def _data(self) -> Any:
        return self.info.data if self.index is None else self.info.data[self.index]

    def check(self) -> None:
        """Raise `UnsupportedModel` if the `gguf` library cannot dequantise this type."""
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[self.info.tensor_type][1]), dtype=np.uint8)
        try:
            gguf.dequantize(block, self.info.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensors of type {self.kind} are not supported", "Use a file in Q8_0, Q4_K_M, F16 or BF16"
            ) from error


def dequantize(data: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Return the flat float32 values of an array of blocks.

    In larger pieces than the library's 16 rows, which take five times as long for an embedding's short rows.
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
    """Map a file and read its header; as long as the result is alive, the same file is not read again.

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
        # Copy-on-write: torch wants writable memory, and the file stays unchanged.
        with np.errstate(all="ignore"):  # overflows in sums of sizes are detected where they are used
            reader = _FastReader(path, "c")
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except _DAMAGED as error:
        if "GGMLQuantizationType" in str(error):
            raise UnsupportedModel(f"{path} has an unknown tensor type ({error})", "Update gguf") from error
        raise CorruptModel(f"{path} is damaged or cut off ({error})", "Fetch the file again") from error
    tensors = {tensor.name: GGUFTensor(tensor) for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if not tensor.shape or math.prod(tensor.shape) == 0:
            raise CorruptModel(f"{name} in {path} is empty", "Fetch the file again")
    return GGUFFile(path, fields, tensors)


def _check_start(path: Path) -> None:
    """Check magic and version, for clearer errors than the library's."""
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
