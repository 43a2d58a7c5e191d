"""Pictures from every kind of source, and damaged or hostile files."""

from __future__ import annotations

import base64
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from paceline.errors import InvalidPrompt
from paceline.text.sandbox import can_fork
from paceline.vision import picture
from paceline.vision.decoding import MAX_PIXELS, MAX_SIDE, decode_picture
from paceline.vision.picture import read_picture
from tests.support.pictures import (
    SVG,
    animation,
    corpus,
    data_url,
    encoded,
    mutated,
    noise,
    png_bomb,
    scan_bomb,
    text_bomb,
)

PLAIN = encoded(noise())
pytestmark = pytest.mark.forks


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def test_every_kind_of_source_gives_the_same_picture(tmp_path: Path) -> None:
    path = tmp_path / "wrong-extension.jpg"
    path.write_bytes(PLAIN)
    wrapped = base64.encodebytes(PLAIN).decode()
    urlsafe = base64.urlsafe_b64encode(PLAIN).decode().rstrip("=")
    sources = [
        *(path, str(path), PLAIN, bytearray(PLAIN), noise(), data_url(PLAIN)),
        *(data_url(PLAIN, "text/html"), f"DATA:;base64,{wrapped}", f"data:;base64,{urlsafe}"),
    ]
    found = [read_picture(source) for source in sources]
    assert {one.digest for one in found} == {found[0].digest}
    assert all((one.pixels == pixels(noise())).all() for one in found)
    assert read_picture(found[0]) is found[0]
    with pytest.raises(ValueError, match="read-only"):
        found[0].pixels[0] = 0


@pytest.mark.parametrize("turned", [False, True])
def test_a_jpeg_that_is_scaled_down_is_decoded_at_a_reduced_size(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    whole = noise(size=(30, 14)).resize((3000, 1400))
    sizes, load = [], JpegImageFile.load
    monkeypatch.setattr(JpegImageFile, "load", lambda self: sizes.append(self.size) or load(self))
    found = decode_picture((encoded(whole, "JPEG", exif=exif), 512))
    assert sizes[0] == (1500, 700)
    assert isinstance(found, bytes)
    height, width = shape = struct.unpack_from(">II", found)
    assert shape == ((512, 239) if turned else (239, 512))
    shrunk = whole.rotate(-90, expand=True) if turned else whole
    shrunk.thumbnail((512, 512), Image.Resampling.LANCZOS)
    near = np.frombuffer(found, np.uint8, offset=8).reshape(height, width, 3).astype(int) - np.asarray(shrunk)
    assert abs(near).mean() < 2


def test_the_digest_depends_on_shape_and_pixels() -> None:
    white = Image.new("RGB", (8, 4), "white")
    one_off = white.copy()
    one_off.putpixel((7, 3), (255, 255, 254))
    digests = [read_picture(image).digest for image in (white, white.transpose(Image.Transpose.ROTATE_90), one_off)]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", "RGB"), ("PNG", "L"), ("PNG", "1"), ("BMP", "P"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("WEBP", "RGB")],
)
def test_opaque_modes_are_read_as_pillow_converts_them(kind: str, mode: str) -> None:
    data = encoded(noise(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert (read_picture(data).pixels == pixels(Image.open(BytesIO(data)))).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_transparent_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (4, 2), (10, 10, 10, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    options = {}
    if mode == "P":
        image = Image.new("P", (4, 2), 1)
        image.putpalette([0, 0, 0, 10, 10, 10])
        image.putpixel((0, 0), 0)
        options = {"transparency": 0}
    elif mode in ("L", "RGB"):  # one colour of the file is transparent
        options = {"transparency": 0 if mode == "L" else (0, 0, 0)}
        image = image.convert(mode)
    else:
        image = image.convert(mode)
    found = read_picture(encoded(image, "PNG", **options)).pixels
    assert found[0, 0].tolist() == [255] * 3
    assert found[1, 3].tolist() == [10] * 3


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    image = Image.fromarray(values)
    for source in (image, encoded(image), Image.fromarray(values.astype(np.int32))):
        assert (read_picture(source).pixels == (values >> 8)[..., None]).all()


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_exif_rotation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = noise()
    image.getexif()[0x0112] = orientation
    expected = pixels(ImageOps.exif_transpose(image))
    assert (read_picture(encoded(noise(), "PNG", exif=exif)).pixels == expected).all()
    assert read_picture(encoded(noise(), "JPEG", exif=exif)).pixels.shape == expected.shape


def test_damaged_exif_data_is_no_rotation() -> None:
    data = encoded(noise(), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert (read_picture(data).pixels == pixels(noise())).all()


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "GIF"])
def test_an_animation_is_read_as_its_first_frame(kind: str) -> None:
    first = noise().quantize() if kind == "GIF" else noise()
    found = read_picture(animation(kind)).pixels.astype(int)
    assert np.abs(found - pixels(first).astype(int)).mean() < 30  # other frames differ by 85


@pytest.mark.parametrize("more", [b"PK\3\4" + bytes(100), b"<html><script>x()</script></html>", bytes(1000), PLAIN])
def test_bytes_after_the_picture_are_ignored(more: bytes) -> None:
    assert (read_picture(PLAIN + more).pixels == pixels(noise())).all()
    jpeg = encoded(noise(), "JPEG", comment=b"<html><script>x()</script></html>")
    assert read_picture(jpeg + more).digest == read_picture(encoded(noise(), "JPEG")).digest


HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "empty": (b"", "is empty"),
    "no picture": (b"hello", "not a PNG, JPEG"),
    "SVG": (SVG, "is SVG"),
    "HTML": (b"<!doctype html><p>", "is HTML"),
    "PDF": (b"%PDF-1.7", "a PDF document"),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(20), "is HEIC"),
    "AVIF": (b"\0\0\0\x18ftypavif" + bytes(20), "is AVIF"),
    "TIFF": (encoded(noise(), "TIFF"), "is TIFF"),
    "icon": (encoded(noise(), "ICO"), "an icon file"),
    "zip": (b"PK\3\4" + bytes(30), "a ZIP archive"),
    "EPS": (encoded(noise(), "EPS"), "is PostScript"),
    "truncated PNG": (PLAIN[:200], "cannot be decoded"),
    "truncated JPEG": (encoded(noise(size=(200, 200)), "JPEG")[:2000], "cannot be decoded"),
    "only a header": (PLAIN[:20], "header is damaged"),
    "bomb": (lambda: png_bomb(30_000, 30_000), "Scale it down"),
    "huge": (lambda: png_bomb(2**31 - 1, 2**31 - 1), "Scale it down"),
    "wide": (lambda: png_bomb(MAX_SIDE + 1, 100), f"{MAX_SIDE} on a side"),
    "many pixels": (lambda: png_bomb(6001, 6000), f"{MAX_PIXELS // 10**6} million pixels"),
    "strip": (lambda: png_bomb(2010, 10), "One side must not exceed"),
    "bomb of text": (lambda: text_bomb(), "the image"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_picture_to_use_is_a_clear_error(name: str) -> None:
    made, cause = HOSTILE[name]
    data = made if isinstance(made, bytes) else made()
    tracemalloc.start()
    with pytest.raises(InvalidPrompt, match=cause) as error:
        read_picture(data)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.value.fix
    assert most < 2**25, "this process unpacks no file that it refuses"


@pytest.mark.skipif(not can_fork(), reason="processes cannot fork here")
def test_a_picture_that_needs_too_much_time_or_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidPrompt, match="takes too long"):
        read_picture(scan_bomb())
    print(f"refused after {time.monotonic() - began:.2f} s")
    monkeypatch.setattr(picture, "_MEMORY", 2**24)
    with pytest.raises(InvalidPrompt, match="more than 16 MiB"):
        read_picture(encoded(Image.new("RGB", (3000, 3000))))
    monkeypatch.undo()
    assert read_picture(PLAIN).pixels.shape == (16, 24, 3)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for source, cause in [
        (tmp_path / "none.png", "none.png: No such file"),
        (tmp_path, "is not a file"),
        (str(pipe), "is not a file"),
        ("a\0b", "null"),
        ("https://example.com/a.png", "not fetched"),
        ("data:image/png,abc", "is malformed"),
        ("data:image/png;base64,a*b=", "not valid base64"),
        ("data:" + "x" * 10_000, "is malformed"),
        (5, "got int"),
    ]:
        with pytest.raises(InvalidPrompt, match=cause) as error:
            read_picture(source)  # type: ignore[arg-type]
        assert error.value.fix


def test_the_size_of_a_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_BYTES", len(PLAIN) - 1)
    (tmp_path / "a.png").write_bytes(PLAIN)
    for source in (PLAIN, tmp_path / "a.png", data_url(PLAIN + b"ab")):
        with pytest.raises(InvalidPrompt, match="must not exceed"):
            read_picture(source)


@pytest.mark.parametrize("trials", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files_are_pictures_or_clear_errors(trials: int) -> None:
    rng, files, read, longest = random.Random(trials), corpus(), 0, 0.0
    errors = list[InvalidPrompt]()
    for _ in range(trials):
        data, began = mutated(rng, files), time.monotonic()
        try:
            found = read_picture(data)
        except InvalidPrompt as error:
            errors.append(error)
        else:
            assert found.pixels.dtype == np.uint8
            assert found.pixels.shape[2:] == (3,)
            read += 1
        longest = max(longest, time.monotonic() - began)
    assert all(str(error).isprintable() and error.fix for error in errors)
    assert trials / 20 < read < trials * 0.95, "most mutations either all harmless or all fatal test little"
    print(f"{read} of {trials} were read, the slowest took {longest:.2f} s")
