"""Reads pictures from files, bytes, data URLs and Pillow images.

Pictures are untrusted input. An encoded picture is decoded in a fork of the helper process (`paceline.text.sandbox`),
with limits on time and memory. The numbers of bytes and pixels and the sides are checked before decoding starts.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import InvalidOption, InvalidPrompt, TimedOut, install_line
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 * 2**20
"""Maximum size of an encoded picture in bytes."""
_SECONDS, _MEMORY = 4.1, 2**30
"""Limits for decoding a picture of maximum size: processor time in seconds, and memory in bytes. When the size of a
smaller picture is known, its time limit is reduced."""
_DECODED, _IMPORTED = "paceline.vision.decoding:decode_picture", "paceline.vision.decoding:import_decoders"
_HEADER = struct.Struct(">II")
_DATA_URL_CHARS = 500
"""Maximum number of characters in a data URL before the data."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded picture.

    Attributes:
        pixels: RGB values, uint8 [height, width, 3]. The rotation of the EXIF data is applied, and transparent pixels
            are placed on white. Read-only.
        digest: SHA-256 of the shape and the pixels, in hexadecimal.
    """

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    digest: str

    @staticmethod
    def of(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Picture:
        """Return the picture with these pixels, uint8 [height, width, 3]."""
        pixels = np.ascontiguousarray(pixels)
        pixels.flags.writeable = False
        found = hashlib.sha256(_HEADER.pack(*pixels.shape[:2]))
        found.update(pixels.data)
        return Picture(pixels, found.hexdigest())


def read_picture(source: str | Path | bytes | Image | Picture, most: int | None = None) -> Picture:
    """Read a picture in PNG, JPEG, WebP, GIF or BMP format. Only the first frame of an animation is read.

    Args:
        source: A path, a data URL, the bytes of a file, a Pillow image, or a `Picture`, which is returned as it is.
        most: Scale the picture down if a side has more pixels than this.

    Raises:
        InvalidPrompt: If the source is not a picture in one of these formats, is damaged, or exceeds the limits.
        InvalidOption: If Pillow is not installed.
        TimedOut: If the machine was too busy.
    """
    if isinstance(source, Picture):
        return source
    _check_installed()
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(source, pillow.Image):
        return _of_image(source, most)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return read_base64(data_of_url(source), most)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decoded(bytes(source), most)
    if not isinstance(source, (str, Path)):
        raise InvalidPrompt(
            f"an image must be a path, bytes, a data URL or a Pillow image, got {type(source).__name__}",
            "Convert it to one of these",
        )
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        raise InvalidPrompt("images are not fetched from URLs", "Download the image, and give its path or its bytes")
    return _decoded(_file_bytes(Path(source)), most)


def read_base64(text: str, most: int | None = None) -> Picture:
    """Read a picture from base64. For `most` and the errors, see `read_picture`."""
    _check_installed()
    return _decoded(text, most)


def data_of_url(url: str) -> str:
    """Return the base64 text of a data URL. The declared media type is ignored, because the content decides.

    Raises:
        InvalidPrompt: If the URL is malformed or its data is not base64.
    """
    head, comma, data = url[:_DATA_URL_CHARS].partition(",")
    if not comma or not head[:5].lower() == "data:" or not head.lower().endswith(";base64"):
        raise InvalidPrompt(f"the data URL {url[:40]!r} is malformed", "Write data:image/png;base64,... with the bytes")
    return data if len(url) <= _DATA_URL_CHARS else url[len(head) + 1 :]


def _check_installed() -> None:
    if find_spec("PIL") is None:
        raise InvalidOption("reading images requires Pillow", install_line("vision"))


def _file_bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise InvalidPrompt(f"{path} is not a file", "Give the path of an image")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise InvalidPrompt(f"cannot read the image {path}: {reason}", "Check the path and its permissions") from error


def _decoded(data: bytes | str, most: int | None) -> Picture:
    """Decode the bytes of a file, or base64, within the limits."""
    if (len(data) * 3 // 4 if isinstance(data, str) else len(data)) > MAX_BYTES:
        raise InvalidPrompt(f"an image must not exceed {MAX_BYTES >> 20} MiB", "Scale it down, or save it as JPEG")
    try:
        SANDBOX.prepare(_IMPORTED, _IMPORTED, lambda: None)
        found = SANDBOX.run(_DECODED, (data, most), _SECONDS, _MEMORY, prepared=_IMPORTED)
    except JobFailed as error:
        raise InvalidPrompt(f"the image cannot be decoded ({error})", "Save it again as PNG or JPEG") from error
    except OverLimit as error:
        raise InvalidPrompt(
            f"decoding the image takes too long, or more than {_MEMORY >> 20} MiB of memory",
            "Scale it down, or save it again as PNG or JPEG",
        ) from error
    except Unfinished as error:
        raise TimedOut("the machine was too busy to decode the image", "Try again") from error
    if not isinstance(found, bytes):
        raise InvalidPrompt(*found)
    shape = (*_HEADER.unpack_from(found), 3)
    return Picture.of(np.frombuffer(found, np.uint8, offset=_HEADER.size).reshape(shape))


def _of_image(image: Image, most: int | None) -> Picture:
    """Return a Pillow image as a picture. If it has not been decoded yet, it is decoded in this process."""
    from paceline.vision.decoding import BadImage, rgb

    try:
        converted = rgb(image, most)
    except BadImage as error:
        raise InvalidPrompt(*error.args) from error
    except Exception as error:  # Pillow's decoders raise errors of any type
        raise InvalidPrompt(f"the image cannot be decoded ({error})", "Save it again as PNG or JPEG") from error
    return Picture.of(np.array(converted))
