"""The file format of a cached text: its tokens, and the states of the target and the drafters after these tokens.

    magic, version, checksum and sizes of the header      32 bytes
    header: JSON, then tokens and checksums as arrays     see `PrefixHeader`
    tensors, each at a multiple of 4096 bytes             mapped into memory when they are loaded

Everything is verified before it is used: the header by its checksum, when a folder is opened, and the tensors by one
checksum per 4 MiB, when they are loaded. A file contains no code that is run. States are written field by field
(`_pack`), and only instances of the classes in `_KINDS` are created from a file.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from math import inf, prod
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.cache.slab import SavedSlabs
from paceline.cache.state import SavedHybrid
from paceline.drafters.cached import PendingStates, SavedStates
from paceline.drafters.model import SavedText
from paceline.drafters.stack import SavedStack
from paceline.protocols import Saved

MAGIC = b"paceline prefix\n"
VERSION = 1
"""Version of the format. Increase it with every change that makes old files unreadable."""

_FIXED_HEADER = struct.Struct("<16sIIII")
"""Magic, version, CRC-32 of the header, and the sizes of the header's JSON and arrays."""
_PAGE_BYTES = 4096
_CHECKSUM_BYTES = 4 << 20
"""Number of bytes of a tensor that share a checksum."""
_MAX_HEADER_BYTES = 64 << 20
_KINDS = {kind.__name__: kind for kind in (Saved, SavedSlabs, SavedHybrid, SavedStates, SavedText, SavedStack)}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}

JsonState = Any
"""A state in JSON form. Each tensor is replaced by its index in the file."""
NumberedTensors = dict[int, tuple[int, Tensor]]
"""`id` of a tensor -> its index in the file, and the tensor. A tensor that several states share is written once."""


class DamagedPrefix(Exception):
    """A file was written by Paceline, but is truncated or changed."""


class ForeignPrefix(Exception):
    """A file is not a prefix file of this version, or belongs to another model or user."""


class UnsupportedState(Exception):
    """A state cannot be written to a file."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedText:
    """A saved text.

    Attributes:
        tokens: Token ids of the prompt and the reply.
        prompt: Length of the prompt.
        target: State of the target.
        drafters: Name of a drafter -> its state.
        adapter: Adapter of the request.
    """

    tokens: NDArray[np.int64]
    prompt: int
    target: Saved
    drafters: Mapping[str, Saved]
    adapter: int

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.target.nbytes + sum(saved.nbytes for saved in self.drafters.values())


class TensorPlace(NamedTuple):
    """A tensor in a file: its dtype, its shape, the device that it belongs on, and its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PrefixHeader:
    """The checked header of a file.

    Attributes:
        key: A hash of everything, except the tokens, on which the bits of the target's state depend
            (`prefix_key.target_key`).
        keys: Name of a drafter -> the same kind of hash for its state.
        tokens: Token ids of the text.
        prompt: Length of the text's prompt, in tokens.
        adapter: Adapter of the text (see `KVCache.adapters`).
        target: The target's state, in JSON form.
        drafters: Name of a drafter -> its state, in JSON form.
        places: The tensors.
        sums: CRC-32 of each block of the tensors' bytes.
    """

    key: str
    keys: Mapping[str, str]
    tokens: NDArray[np.int64]
    prompt: int
    adapter: int
    target: JsonState
    drafters: Mapping[str, JsonState]
    places: Sequence[TensorPlace]
    sums: NDArray[np.uint32]

    def text(self, names: Sequence[str], tensors: Sequence[Tensor] | None = None) -> CachedText:
        """Return the text, with the state of the target and the states of the drafters in `names`.

        Without `tensors`, the states contain no data, only lengths and sizes.
        """
        held = tensors or [torch.empty(place.shape, dtype=place.dtype, device="meta") for place in self.places]
        drafters = {name: _unpack(form, held) for name, form in self.drafters.items() if name in names}
        return CachedText(self.tokens, self.prompt, _unpack(self.target, held), drafters, self.adapter)


@dataclass(frozen=True, slots=True)
class PreparedPrefix:
    """A text that is ready to be written: the JSON and the arrays of its header, and its tensors with their places."""

    json: Mapping[str, Any]
    tokens: NDArray[np.int64]
    tensors: Sequence[Tensor]
    places: Sequence[TensorPlace]

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return _end(self.places)


def prepare(text: CachedText, key: str, keys: Mapping[str, str]) -> PreparedPrefix:
    """Prepare a text to be written.

    Args:
        text: The text.
        key: See `PrefixHeader`.
        keys: See `PrefixHeader`. Drafters without a key are left out.

    Raises:
        UnsupportedState: If a state cannot be written to a file.
    """
    numbered: NumberedTensors = {}
    header = {
        "key": key,
        "keys": {name: keys[name] for name in text.drafters if name in keys},
        "tokens": len(text.tokens),
        "prompt": text.prompt,
        "adapter": text.adapter,
        "target": _pack(text.target, numbered),
        "drafters": {name: _pack(saved, numbered) for name, saved in text.drafters.items() if name in keys},
    }
    tensors = [tensor for _, tensor in numbered.values()]
    kinds = [(str(x.dtype).removeprefix("torch."), list(x.shape), str(x.device)) for x in tensors]
    if unknown := {name for name, *_ in kinds} - {*_DTYPES}:
        raise UnsupportedState(f"a tensor of type {min(unknown)}")
    blocks = sum(-(-x.nbytes // _CHECKSUM_BYTES) for x in tensors)
    # Reserve room for the header. Its JSON contains `end`, which is not known yet, so assume the longest number.
    end = (
        _FIXED_HEADER.size
        + len(json.dumps(header | {"places": [sys.maxsize, kinds]}))
        + 4 * (len(text.tokens) + blocks)
    )
    header["places"] = [end, kinds]
    return PreparedPrefix(header, text.tokens, tensors, _places([end, kinds]))


def write(file: BinaryIO, prepared: PreparedPrefix, until: float = inf) -> None:
    """Write a text to an empty file.

    Args:
        file: The file.
        prepared: The text.
        until: Time at which to give up, on the clock of `time.monotonic`.

    Raises:
        TimeoutError: If that time has passed.
        OSError: If the file cannot be written.
    """
    sums = []
    for place, tensor in zip(prepared.places, prepared.tensors, strict=True):
        file.seek(place.start)
        for block in _blocks(bytes_of(tensor)):
            if monotonic() > until:
                raise TimeoutError("no time left to write prefixes")
            sums.append(zlib.crc32(block))
            file.write(block)
    arrays = prepared.tokens.astype("<i4").tobytes() + np.array(sums, "<u4").tobytes()
    content = json.dumps(prepared.json).encode() + arrays
    # Write the header last, so that a file whose writing was interrupted has no header.
    file.seek(0)
    file.write(
        _FIXED_HEADER.pack(MAGIC, VERSION, zlib.crc32(content), len(content) - len(arrays), len(arrays)) + content
    )


def read_header(path: Path) -> PrefixHeader:
    """Read the header of a file.

    Raises:
        DamagedPrefix: If the file is truncated, or its header was changed.
        ForeignPrefix: If it is another kind of file, or belongs to another user.
        OSError: If it cannot be read.
    """
    with _opened(path) as file:
        return _read_header(file)


def load(path: Path, names: Sequence[str]) -> tuple[PrefixHeader, CachedText]:
    """Map a file into memory, verify it, and return its header and text with the drafters in `names`.

    The tensors are memory-mapped pages of the file. Copy them soon: if another program truncates the file, the system
    kills a process that reads the missing pages. Paceline itself never truncates a file. It replaces or deletes whole
    files, whose mapped pages stay valid.

    Raises:
        DamagedPrefix: See `read_header`.
        ForeignPrefix: See `read_header`.
        OSError: If the file cannot be read.
    """
    with _opened(path) as file:
        header = _read_header(file)
        # torch needs writable memory. The mapping is copy-on-write, so the file stays unchanged.
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(buffer)
    blocks = [block for place in header.places for block in _blocks(view[place.start : place.start + place.size])]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # crc32 releases the interpreter lock
        if [*pool.map(zlib.crc32, blocks)] != header.sums.tolist():
            raise DamagedPrefix("the checksum of its data is wrong")
    return header, header.text(names, [_tensor(buffer, place) for place in header.places])


def _opened(path: Path) -> BinaryIO:
    """Open a regular file of this user, never through a link."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or (hasattr(os, "geteuid") and state.st_uid != os.geteuid()):
        os.close(descriptor)
        raise ForeignPrefix("it is not a regular file of this user")
    return os.fdopen(descriptor, "rb")


def _read_header(file: BinaryIO) -> PrefixHeader:
    fixed = file.read(_FIXED_HEADER.size)
    if not MAGIC.startswith(fixed[: len(MAGIC)].rstrip(b"\0")):
        raise ForeignPrefix("it is another kind of file")
    if len(fixed) < _FIXED_HEADER.size or not fixed.startswith(MAGIC):
        raise DamagedPrefix("it has no header")
    _, version, checksum, size, arrays = _FIXED_HEADER.unpack(fixed)
    if version != VERSION:
        raise ForeignPrefix(f"it has version {version} of the format")
    content = file.read(size + arrays) if size + arrays <= _MAX_HEADER_BYTES else b""
    if zlib.crc32(content) != checksum:
        raise DamagedPrefix("the checksum of its header is wrong")
    try:
        header = _parse(content[:size], content[size:])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise DamagedPrefix(f"its header cannot be read ({error})") from error
    if os.fstat(file.fileno()).st_size < _end(header.places):
        raise DamagedPrefix("it is cut off")
    return header


def _parse(content: bytes, arrays: bytes) -> PrefixHeader:
    raw = json.loads(content)
    count, places = raw["tokens"], _places(raw["places"])
    tokens = np.frombuffer(arrays, "<i4", count).astype(np.int64)
    sums = np.frombuffer(arrays, "<u4", offset=4 * count)
    header = PrefixHeader(
        raw["key"], raw["keys"], tokens, raw["prompt"], raw["adapter"], raw["target"], raw["drafters"], places, sums
    )
    header.text([*header.drafters])  # raises an error if a state is malformed
    return header


def _end(places: Sequence[TensorPlace]) -> int:
    """Return the offset of the end of the last tensor, in bytes."""
    return max((place.start + place.size for place in places), default=0)


def _places(raw: Sequence[Any]) -> list[TensorPlace]:
    """Return the places of the tensors, given the end of the header and each tensor's dtype, shape and device."""
    end, places = int(raw[0]), []
    for name, shape, device in raw[1]:
        start = -(-end // _PAGE_BYTES) * _PAGE_BYTES
        places.append(place := TensorPlace(_DTYPES[name], tuple(map(int, shape)), device, start))
        if min(place.shape, default=0) < 0 or start < 0:
            raise ValueError("a size is negative")
        end = start + place.size
    return places


def _pack(value: Any, tensors: NumberedTensors) -> JsonState:
    """Return the JSON form of a state, or of a part of a state, and add its tensors to `tensors`.

    Raises:
        UnsupportedState: If it contains a value that cannot be written.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return {"tensor": tensors.setdefault(id(value), (len(tensors), value))[0]}
    if isinstance(value, tuple):
        return [_pack(one, tensors) for one in value]
    if isinstance(value, Mapping):
        return {"entries": [[_pack(key, tensors), _pack(one, tensors)] for key, one in value.items()]}
    if isinstance(value, PendingStates):
        return {"pending": [_pack(part, tensors) for part in value.parts]}
    if type(value) not in _KINDS.values():  # a subclass may hold more, for example one process's share of the state
        raise UnsupportedState(type(value).__name__)
    kept = {field.name: getattr(value, field.name) for field in fields(value)}
    return {
        "kind": type(value).__name__,
        # Functions are omitted. The running model adds its own (`protocols.Restorer`).
        "fields": {name: _pack(one, tensors) for name, one in kept.items() if not callable(one)},
    }


def _unpack(form: JsonState, tensors: Sequence[Tensor]) -> Any:
    """Return the state, or the part of a state, with this JSON form. Raise various errors if the form is malformed."""
    if isinstance(form, list):
        return tuple(_unpack(one, tensors) for one in form)
    if not isinstance(form, dict):
        return form
    if "tensor" in form:
        return tensors[form["tensor"]]
    if "entries" in form:
        return {_unpack(key, tensors): _unpack(one, tensors) for key, one in form["entries"]}
    if "pending" in form:
        return PendingStates([_unpack(part, tensors) for part in form["pending"]])
    kind: Callable[..., Saved] = _KINDS[form["kind"]]
    absent = {"choose": _unknown} if kind is SavedSlabs else {}
    return kind(**absent, **{name: _unpack(one, tensors) for name, one in form["fields"].items()})


def _unknown(prompt: int) -> None:
    """Stand in for `SavedSlabs.choose` until `SlabCache.restored` sets it."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, which may be on another device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _blocks(data: memoryview) -> Iterator[memoryview]:
    return (data[first : first + _CHECKSUM_BYTES] for first in range(0, len(data), _CHECKSUM_BYTES))


def _tensor(buffer: mmap.mmap, place: TensorPlace) -> Tensor:
    if not place.size:
        return torch.empty(place.shape, dtype=place.dtype, device=place.device)
    flat = torch.frombuffer(buffer, dtype=place.dtype, count=prod(place.shape), offset=place.start)
    return flat.view(place.shape).to(place.device)
