"""The headers of GGUF files: metadata as plain Python values, and the positions of tensors. ggml's documentation
describes the format."""

from __future__ import annotations

from mmap import mmap
from struct import Struct, calcsize, unpack_from
from typing import Any, NamedTuple

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF type of a value -> its format character in `struct`."""
_STRING, _ARRAY = 8, 9

_MAX_HEADER_BYTES, _MAX_ELEMENTS, _MAX_DIMENSIONS = 1 << 28, 1 << 23, 8
"""Limits on the bytes of a header, on the number of elements in all its arrays, and on the dimensions of a tensor. The
number of elements needs its own limit, because a sparse file can contain any number of empty strings."""


class TensorEntry(NamedTuple):
    """A tensor's entry: its shape (outermost dimension first), the number of its type in ggml, and its first byte in
    the file."""

    shape: tuple[int, ...]
    number: int
    start: int


class Header(NamedTuple):
    """A header: its metadata (`fields`) by key, its `tensors` by name, and its `size` in bytes."""

    fields: dict[str, Any]
    tensors: dict[str, TensorEntry]
    size: int


def read_header(data: mmap) -> Header:
    """Read the header that follows the magic number and the version. Raise `ValueError` or `struct.error` if it is
    damaged."""
    reader = _Reader(data)
    tensor_count, field_count = reader.numbers("Q", 2)
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        key = reader.new_name(fields)
        fields[key] = reader.value(reader.number("I"))
    tensors: dict[str, TensorEntry] = {}
    for _ in range(tensor_count):
        name = reader.new_name(tensors)
        if (count := reader.number("I")) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {count} dimensions")
        shape = reader.numbers("Q", count)
        tensors[name] = TensorEntry(shape[::-1], reader.number("I"), reader.number("Q"))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment}")
    start = -(-reader.at // alignment) * alignment
    placed = {name: entry._replace(start=start + entry.start) for name, entry in tensors.items()}
    return Header(fields, placed, reader.at)


def count_tokens(data: mmap) -> int:
    """Return the size of the vocabulary, or 0 if there is none. Reading stops there. Raise the errors of
    `read_header`."""
    reader = _Reader(data)
    _, field_count = reader.numbers("Q", 2)
    for _ in range(field_count):
        key, kind = reader.new_name({}), reader.number("I")
        if key == "tokenizer.ggml.tokens":
            reader.number("I")
            return int(reader.number("Q"))
        reader.value(kind)
    return 0


class _Reader:
    """Reads one value after the other."""

    def __init__(self, data: mmap) -> None:
        self._data, self.at, self._elements = memoryview(data)[:_MAX_HEADER_BYTES], 8, 0

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = unpack_from(layout, self._data, self.at)
        self.at += calcsize(layout)
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def new_name(self, known: dict[str, Any]) -> str:
        name = self._strings(1)[0]
        if name in known:
            raise ValueError(f"{name} occurs twice")
        return name

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            self._elements += count
            if self._elements > _MAX_ELEMENTS:
                raise ValueError(f"arrays of {self._elements} elements")
            return self._strings(count) if kind == _STRING else list(self.numbers(_code(kind), count))
        return self._strings(1)[0] if kind == _STRING else self.number(_code(kind))

    def _strings(self, count: int) -> list[str]:
        """Read strings. This is optimised for speed, because a vocabulary and its merges have half a million
        strings."""
        data, at, end, found = self._data, self.at, len(self._data), list[str]()
        size_at, append = Struct("<Q").unpack_from, found.append
        for _ in range(count):
            first = at + 8
            at = first + size_at(data, at)[0]
            if at > end:
                raise ValueError("a string runs past the end")
            append(str(data[first:at], "utf-8"))
        self.at = at
        return found


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of type {kind}")
    return _SCALARS[kind]
