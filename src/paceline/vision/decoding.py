"""Decodes pictures with Pillow. This runs in forks of the helper process, so it imports neither torch nor numpy."""

from __future__ import annotations

import base64
import binascii
import math
import signal
import struct
from contextlib import suppress
from io import BytesIO

from PIL import Image, ImageFile, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 36_000_000
"""Maximum number of pixels in a picture. An A4 page at 600 dots per inch has 35 million."""
MAX_SIDE = 16_384
MAX_RATIO = 200
"""Maximum ratio of the sides. Vision models have no use for longer strips."""
SECONDS, SECONDS_PER_PIXEL = 0.5, 1e-7
"""Limit of processor time for a picture. Noise that was saved as PNG, which is the slowest legitimate input, takes half
of it."""
_KNOWN = "PNG, JPEG, WebP, GIF or BMP"
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIGNS = {
    b"%PDF": "a PDF document",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"8BPS": "a Photoshop file",
    b"\0\0\1\0": "an icon file",
    b"PK\3\4": "a ZIP archive",
    b"%!PS": "PostScript",
    b"\1\0\0\0": "EMF",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL": "JPEG XL",
    b"\0\0\0\x0cjP": "JPEG 2000",
}
"""The first bytes of files that people may mistake for supported pictures."""


class BadImage(ValueError):
    """The picture cannot be used. Arguments: the cause and the fix."""


def import_decoders(_: None) -> None:
    """Import the decoders of all formats, so that forks need not import them."""
    Image.preinit()
    for name in FORMATS:
        __import__(f"PIL.{name.title().replace('Webp', 'WebP')}ImagePlugin")
    ImageFile.LOAD_TRUNCATED_IMAGES = False


def decode_picture(argument: tuple[bytes | str, int | None]) -> bytes | tuple[str, str]:
    """Decode a picture.

    Args:
        argument: A pair: the bytes of a file (or the bytes in base64), and the maximum side to which the picture is
            scaled down (or None).

    Returns:
        Height and width as big-endian 32-bit integers, followed by the RGB values [height, width, 3]. If the picture
        cannot be used, the cause and the fix.
    """
    data, most = argument
    try:
        image = _opened(_raw(data) if isinstance(data, str) else data)
        _check_size(*image.size)
        _limit_time(image.width * image.height)
        if most is not None and max(image.size) > most:
            # A JPEG can be decoded at half, a quarter or an eighth of its size. At twice the final size, it stays
            # sharp.
            scale = 2 * most / max(image.size)
            image.draft(None, (math.ceil(scale * image.width), math.ceil(scale * image.height)))
        image = rgb(image, most)
        return struct.pack(">II", image.height, image.width) + image.tobytes()
    except BadImage as error:
        return error.args[0], error.args[1]


def rgb(image: Image.Image, most: int | None = None) -> Image.Image:
    """Return an image as RGB. It is rotated as its EXIF data says, and transparent pixels are placed on white.

    Args:
        image: The image.
        most: The maximum side, to which the image is scaled down. None keeps its size.

    Raises:
        BadImage: If the image has too many pixels.
    """
    _check_size(*image.size)
    image.load()
    turn = _TURNS.get(_orientation(image) or 1)
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")  # Pillow would clip at 255
    elif image.mode == "I":
        image = image.point(lambda value: value / 256 + 0).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        image = white
    image = image if image.mode == "RGB" else image.convert("RGB")
    if most is not None and max(image.size) > most:
        image = image.copy()
        image.thumbnail((most, most), Image.Resampling.LANCZOS)
    return image if turn is None else image.transpose(turn)


def _raw(text: str) -> bytes:
    """Decode base64, which may contain line breaks, lack padding, or use the URL-safe alphabet."""
    compact = "".join(text.split()).translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage("the image is not valid base64", "Encode the bytes of the file as base64") from error


def _opened(data: bytes) -> Image.Image:
    """Open a picture. Pillow reads only its header."""
    if not data:
        raise BadImage("the image is empty", f"Send a {_KNOWN} file")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise BadImage(f"the image has more than {MAX_PIXELS // 1_000_000} million pixels", "Scale it down") from None
    except (UnidentifiedImageError, OSError) as error:
        kind = _kind(data)
        cause = f"the image is {kind}" if kind else f"the image is not a {_KNOWN} file, or its header is damaged"
        raise BadImage(cause, f"Convert it to {_KNOWN}") from error
    return image


def _kind(data: bytes) -> str | None:
    """Return the name of the unsupported format that the data has, or None if it is not known."""
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if data[4:8] == b"ftyp":
        return "AVIF" if data[8:12].startswith(b"avi") else "HEIC or a video"
    if b"<svg" in start.lower() or start.startswith(b"<?xml"):
        return "SVG or XML"
    if start[:1] == b"<":
        return "HTML"
    return next((name for sign, name in _SIGNS.items() if data.startswith(sign)), None)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise BadImage(
            f"the image has {width} x {height} pixels. "
            f"The limits are {MAX_PIXELS // 1_000_000} million pixels, and {MAX_SIDE} on a side",
            "Scale it down",
        )
    if not min(width, height) or max(width, height) > MAX_RATIO * min(width, height):
        raise BadImage(
            f"the image has {width} x {height} pixels. One side must not exceed {MAX_RATIO} times the other", "Crop it"
        )


def _limit_time(pixels: int) -> None:
    """In a fork, replace the time limit with the limit for this number of pixels."""
    with suppress(AttributeError):  # Windows has no timers, and no forks
        if signal.getitimer(signal.ITIMER_PROF)[0]:
            signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_PIXEL * pixels)


def _orientation(image: Image.Image) -> int:
    """Return the orientation in the EXIF data. It is 1, which means upright, if there is none or the data is
    damaged."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # Pillow raises errors of many types for damaged EXIF data
        return 1
