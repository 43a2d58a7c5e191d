"""GGUF files as containers: metadata as plain Python values, and tensors as bytes of the memory-mapped file."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoints.gguf_codes import BITS, gguf_codes
from paceline.checkpoints.gguf_header import TensorEntry, count_tokens, read_header
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.gguf_names import parts_of
from paceline.files.reading import MappedFile, map_file
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import packs
from paceline.kernels.quantize import Codes, quantize
from paceline.kernels.stored import Stored

_FETCH_AGAIN = "Fetch the file again"
_CHUNK_ELEMENTS = 1 << 18

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""The float types, by name."""
_UNQUANTISED = FLOATS | {"I32": torch.int32, "I64": torch.int64}
"""The types that are read without dequantisation, by name."""


class GGMLType(NamedTuple):
    """A tensor type: its number in ggml, and the size of a block in elements and in bytes."""

    name: str
    number: int
    elements: int
    size: int


_TYPES = {
    number: GGMLType(name, number, elements, size)
    for name, number, elements, size in (
        *(("F32", 0, 1, 4), ("F16", 1, 1, 2), ("F64", 28, 1, 8), ("BF16", 30, 1, 2)),
        *(("I32", 26, 1, 4), ("I64", 27, 1, 8)),
        *(("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34)),
        *(("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176)),
        *(("Q6_K", 14, 256, 210), ("IQ4_NL", 20, 32, 18), ("IQ4_XS", 23, 256, 136)),
    )
}
"""The types that every version of the `gguf` library dequantises. `gguf` is imported only for other types, because the
import takes 0.1 s."""


def _type(number: int) -> GGMLType:
    """Return the tensor type with this number. Raise `UnsupportedModel` if neither the table nor the `gguf` library
    knows it."""
    if number in _TYPES:
        return _TYPES[number]
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        return GGMLType(kind.name, number, *gguf.GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError) as unknown:
        raise UnsupportedModel(f"the tensor type {number} is unknown", "Update the gguf package") from unknown


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a file: its type, its shape (outermost dimension first, as in torch), and its memory-mapped bytes
    [n]."""

    type: GGMLType
    shape: tuple[int, ...]
    data: Tensor

    @property
    def kind(self) -> str:
        """Name of the GGML type, such as "Q4_1"."""
        return self.type.name

    def part(self, index: int) -> GGUFTensor:
        """Return one of the tensors that this tensor stacks along its first dimension."""
        return GGUFTensor(self.type, self.shape[1:], self.data.view(self.shape[0], -1)[index])

    def read(self) -> Tensor:
        """Return the tensor, in the file's dtype or, if it is quantised, in float32."""
        if self.kind in _UNQUANTISED:
            return self.data.view(_UNQUANTISED[self.kind]).view(self.shape)
        return dequantize(self.data, self.type).view(self.shape)

    def codes(self) -> Codes | None:
        """Return the file's own codes of a quantised matrix, or None for floats.

        Types whose codes have another form (groups of 16) are quantised again, to 8 bits.
        """
        if self.kind in FLOATS:
            return None
        return gguf_codes(self.data, self.kind, self.shape) or quantize(self.read(), 8)

    def kept_bits(self) -> int | None:
        """Return the number of bits of the codes that a matrix keeps on a CPU, or None for floats and for codes that
        are converted."""
        if self.kind in FLOATS:
            return None
        if library() is None:
            return BITS.get(self.kind)
        return int(next(filter(str.isdigit, self.kind))) if packs(self.type.number) else None

    def stored(self) -> Stored:
        """Return a matrix without copying it. If the kernels do not read its type, return floats, which are then
        quantised to 8 bits."""
        if not packs(self.type.number):
            return Stored.floats(self.read().float(), 8)
        return Stored.of(self.data.view(self.shape[0], -1), self.type.number, self.shape[1], mapped=True)

    def check(self) -> None:
        """Raise `UnsupportedModel` if the `gguf` library cannot dequantise this type."""
        if self.type.number in _TYPES:
            return
        try:
            dequantize(torch.zeros(self.type.size, dtype=torch.uint8), self.type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensors of type {self.kind} are not supported", "Use a file in Q8_0, Q4_K_M, F16 or BF16"
            ) from error


def dequantize(data: Tensor, kind: GGMLType) -> Tensor:
    """Return the float32 values of a sequence of blocks, as a flat tensor.

    Blocks are decoded in large pieces. The library decodes 16 rows at a time, which takes five times as long for the
    short rows of an embedding.
    """
    import gguf

    blocks = data.view(-1, kind.size).numpy()
    values = np.empty((len(blocks), kind.elements), np.float32)
    step = max(1, _CHUNK_ELEMENTS // kind.elements)
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step].reshape(1, -1)
        with np.errstate(all="ignore"):  # a damaged file may hold infinite scales
            decoded = gguf.dequantize(piece, gguf.GGMLQuantizationType(kind.number))
        values[start : start + step] = decoded.reshape(-1, kind.elements)
    return torch.from_numpy(values).view(-1)


@dataclass(frozen=True)
class GGUFFile:
    """An open file: its metadata (`fields`) by key, and its `tensors` by GGUF name. The tensors are read on access."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


_open_files: WeakValueDictionary[Any, GGUFFile] = WeakValueDictionary()


def read_gguf(path: Path) -> GGUFFile:
    """Map a file into memory and read its header. A file is not read again as long as an earlier result exists.

    Raises:
        ModelNotFound: If the file does not exist.
        CorruptModel: If the file is damaged.
        UnsupportedModel: If the format is not supported.
    """
    mapped = map_file(path)
    if (file := _open_files.get(mapped.identity)) is None:
        file = _open_files[mapped.identity] = _read(path, mapped)
    return file


def gguf_vocab_size(path: Path) -> int:
    """Return the size of the vocabulary, or 0 if there is none, without reading the whole header. Raise the errors of
    `read_gguf`."""
    mapped = map_file(path)
    _check_start(path, mapped.buffer[:24])
    with _damage_errors(path):
        return count_tokens(mapped.buffer)


@contextmanager
def _damage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, struct.error) as error:
        raise CorruptModel(f"{path} is damaged or cut off ({error})", _FETCH_AGAIN) from error


def _read(path: Path, mapped: MappedFile) -> GGUFFile:
    file = _read_part(path, mapped)
    count = file.fields.get("split.count", 1)
    return _joined(file, count) if isinstance(count, int) and count > 1 else file


def _read_part(path: Path, mapped: MappedFile) -> GGUFFile:
    _check_start(path, mapped.buffer[:24])
    with _damage_errors(path):
        header = read_header(mapped.buffer)
        tensors = {name: _tensor(name, entry, mapped) for name, entry in header.tensors.items()}
    return GGUFFile(path, header.fields, tensors)


def _joined(first: GGUFFile, count: int) -> GGUFFile:
    """Join the parts of a split file (llama.cpp's gguf-split). The result has the metadata of the first part and the
    tensors of all parts."""
    path = first.path
    names = parts_of(path.name)
    if names is None or len(names) != count:
        raise UnsupportedModel(
            f"{path.name} is one part of a split GGUF, and its name does not say which",
            "Join the parts with `llama-gguf-split --merge`, or restore the names that it wrote",
        )
    if path.name != names[0] or first.fields.get("split.no", 0) != 0:
        raise UnsupportedModel(f"{path.name} is a later part of a split GGUF", f"Name the first, {names[0]}")
    tensors = dict(first.tensors)
    for number, name in enumerate(names[1:], 1):
        part = _read_part(path.with_name(name), map_file(path.with_name(name)))
        twice = part.tensors.keys() & tensors.keys()
        if twice or part.fields.get("split.no") != number or part.fields.get("split.count") != count:
            raise CorruptModel(f"{part.path} is not part {number + 1} of {path.name}", _FETCH_AGAIN)
        tensors |= part.tensors
    if len(tensors) != first.fields.get("split.tensors.count", len(tensors)):
        raise CorruptModel(
            f"the parts of {path.name} hold {len(tensors)} tensors, but its metadata gives another number", _FETCH_AGAIN
        )
    return GGUFFile(path, first.fields, tensors)


def _tensor(name: str, entry: TensorEntry, mapped: MappedFile) -> GGUFTensor:
    """Return a tensor of the file. Raise `ValueError` if the file cannot contain such a tensor."""
    kind, count = _type(entry.number), math.prod(entry.shape)
    if not entry.shape or not count:
        raise ValueError(f"{name} is empty")
    if entry.shape[-1] % kind.elements:
        raise ValueError(f"{name} has rows of {entry.shape[-1]} elements in blocks of {kind.elements}")
    size = count // kind.elements * kind.size
    if entry.start + size > len(mapped.buffer):
        raise ValueError(f"{name} runs past the end")
    return GGUFTensor(kind, entry.shape, mapped.bytes(entry.start, size))


def _check_start(path: Path, start: bytes) -> None:
    """Check the magic number and the version."""
    if start[:4] != b"GGUF":
        raise CorruptModel(f"{path} is not a GGUF file", "Check the path, or fetch the file again")
    if len(start) < 24:
        raise CorruptModel(f"{path} is cut off after {len(start)} bytes", _FETCH_AGAIN)
    version = int.from_bytes(start[4:8], "little")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{path} has GGUF version {version} or is big-endian", "Convert it to a little-endian GGUF of version 3"
        )
