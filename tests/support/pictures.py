"""Pictures for tests, made with Pillow: valid pictures, hostile pictures, and mutated files."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>x()</script></svg>'


def noise(mode: str = "RGB", size: tuple[int, int] = (24, 16), seed: int = 0) -> Image.Image:
    """Return a random image."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), np.uint8)
    image = Image.fromarray(values, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as the bytes of a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Return the data URL of a file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@cache
def _zeros(size: int) -> bytes:
    """Return compressed zeros. Level 1 takes half the time of the highest level and only slightly more bytes."""
    return zlib.compress(bytes(size), 1)


def png_bomb(width: int, height: int) -> bytes:
    """Return a small PNG file that declares any size, and has data for many rows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header), png_chunk(b"IDAT", _zeros(2**24)), png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def text_bomb() -> bytes:
    """Return a PNG file with compressed text of many MiB."""
    whole = encoded(noise())
    text = png_chunk(b"zTXt", b"Comment\0\0" + _zeros(2**27))
    return whole[:33] + text + whole[33:]


def scan_bomb(size: int = 1000) -> bytes:
    """Return a progressive JPEG file with thousands of scans of a large picture."""
    whole = encoded(Image.new("L", (size, size)), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * 20_000 + b"\xff\xd9"


def animation(kind: str) -> bytes:
    """Return an animation. Its first frame is `noise("RGB")` in the colours of the format."""
    more = [noise(seed=i) for i in (1, 2)]
    options = {"lossless": True} if kind == "WEBP" else {}
    return encoded(noise(), kind, save_all=True, append_images=more, duration=50, **options)


def corpus() -> list[bytes]:
    """Return small files of all formats, for mutations."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        *(encoded(noise(mode), "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
        encoded(noise(), "PNG", exif=exif),
        *(encoded(noise(mode), "JPEG") for mode in ("RGB", "L", "CMYK")),
        encoded(noise(size=(64, 48)), "JPEG", progressive=True, exif=exif),
        *(encoded(noise(mode), "WEBP", lossless=lossless) for mode in ("RGB", "RGBA") for lossless in (True, False)),
        *(encoded(noise(mode), "BMP") for mode in ("RGB", "L", "1", "P")),
        encoded(noise(), "GIF"),
        *(animation(kind) for kind in ("GIF", "WEBP", "PNG")),
    ]


def mutated(rng: random.Random, files: list[bytes]) -> bytes:
    """Return a damaged file: with bytes changed, cut or repeated, or joined with another file."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(len(data), rng.choice((40, 100, 10**6)))) if data else 0
        match rng.randrange(6):
            case 0 | 1:
                data[at : at + 1] = bytes([rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))])
            case 2:
                data[at : at + 4] = struct.pack(rng.choice("<>") + "I", rng.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1)))
            case 3:
                del data[at : at + rng.choice((1, 4, 100, 10**6))]
            case 4:
                data[at:at] = data[at : at + rng.choice((1, 8, 200))] * rng.choice((1, 3, 50))
            case 5:
                other = rng.choice(files)
                data[at:at] = other[rng.randrange(len(other)) :]
    return bytes(data)
