"""Read the files of a model folder, which are untrusted input.

Only regular files (or links to them) are opened, so that a pipe or a device cannot block the reader. File sizes are
limited. The nesting depth of JSON is limited too, so that recursive code cannot exhaust the stack.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from paceline.errors import CorruptModel, ModelNotFound, PacelineError, UnsupportedModel
from paceline.files.gc_pause import gc_paused
from paceline.files.schema import FIX_INVALID_FILE, FieldKind, check

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
_MAX_CONFIG_BYTES = 8 * MIB
_MAX_JSON_DEPTH = 64
"""Maximum nesting depth of JSON lists and objects."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        ModelNotFound: If the file cannot be opened.
        CorruptModel: If it is not a regular file.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait until another program writes to it.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} is missing", "The model is incomplete; download it again") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"cannot open {path}: {reason}", "Check the path and its permissions") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptModel(f"{path} is not a regular file", "Replace it with a copy of the model's file")
    return os.fdopen(descriptor, "rb")


class MappedFile(NamedTuple):
    """A memory-mapped file.

    Attributes:
        buffer: The mapped memory.
        identity: A key that identifies the file and its version: path, size, modification time, device and inode.
    """

    buffer: mmap
    identity: tuple[Any, ...]

    def bytes(self, start: int, size: int) -> Tensor:
        """Return `size` > 0 bytes of the file, from byte `start`, as a uint8 tensor that shares the mapped memory. The
        bytes are read from disk when they are used."""
        import torch  # imported here because commands that only look for files start faster without it

        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=size, offset=start)


def map_file(path: Path) -> MappedFile:
    """Map a regular file into memory.

    Raises:
        ModelNotFound: If the file cannot be opened or mapped.
        CorruptModel: If it is empty or not a regular file.
    """
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if not state.st_size:
            raise CorruptModel(f"{path} is empty", "Download the model again")
        try:
            # torch needs writable memory. The mapping is copy-on-write, so the file stays unchanged.
            buffer = mmap(file.fileno(), 0, access=ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelNotFound(f"cannot map {path} into memory ({error})", "Check memory and file system") from error
    return MappedFile(buffer, (path.resolve(), state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino))


def read_text(path: Path, limit: int = _MAX_CONFIG_BYTES) -> str:
    """Read a UTF-8 file of at most `limit` bytes.

    Raises:
        ModelNotFound: If the file is missing or cannot be read.
        UnsupportedModel: If it is too large.
        CorruptModel: If it is not UTF-8 text.
    """
    with open_regular(path) as file:
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise ModelNotFound(f"cannot read {path}: {error.strerror}", "Check the disk") from error
    if len(data) > limit:
        raise UnsupportedModel(f"{path} is larger than {limit // MIB} MiB", "Check that it is the model's own file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptModel(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})", FIX_INVALID_FILE
        ) from error


def read_json(path: Path, fields: Mapping[str, FieldKind], limit: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        path: The file.
        fields: Fields to check.
        limit: Maximum size in bytes.

    Raises:
        ModelNotFound: If the file is missing or cannot be read.
        UnsupportedModel: If it is too large.
        CorruptModel: If it is not a JSON object, is nested too deeply, or a field has the wrong kind.
    """
    text = read_text(path, limit)
    try:
        with gc_paused():
            data = json.loads(text)
            depth = _depth(data)
    except RecursionError:
        data, depth = {}, _MAX_JSON_DEPTH + 1
    except ValueError as error:
        raise CorruptModel(f"{path} is not valid JSON ({error})", FIX_INVALID_FILE) from error
    if not isinstance(data, dict):
        raise CorruptModel(f"{path} must contain a JSON object", FIX_INVALID_FILE)
    if depth > _MAX_JSON_DEPTH:
        raise CorruptModel(f"{path} is nested deeper than {_MAX_JSON_DEPTH} levels", FIX_INVALID_FILE)
    check(path, data, fields)
    return data


def read_json_if_exists(path: Path, fields: Mapping[str, FieldKind]) -> dict[str, Any]:
    """Return the JSON object in a file (see `read_json`), or an empty dict if the file does not exist."""
    return read_json(path, fields) if path.exists() else {}


@contextmanager
def library_errors(cause: str, fix: str = FIX_INVALID_FILE) -> Iterator[None]:
    """Convert any error of a library to a `CorruptModel` with this cause and the library's reason.

    A `MemoryError` is not converted, because the file is not its cause. The library tokenizers raises plain
    `Exception`. For a panic in its Rust code, it raises a `BaseException` of a class that cannot be imported.
    """
    try:
        yield
    except (PacelineError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorruptModel(f"{cause} ({error})", fix) from error


def _depth(data: Any) -> int:
    """Return the nesting depth of lists and objects. Stop counting beyond `_MAX_JSON_DEPTH`."""
    depth, level = 0, [data] if isinstance(data, (dict, list)) else []
    while level and depth <= _MAX_JSON_DEPTH:
        depth += 1
        children = (x for one in level for x in (one.values() if isinstance(one, dict) else one))
        level = [x for x in children if isinstance(x, (dict, list))]
    return depth
