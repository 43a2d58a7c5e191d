"""Images on the command line."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.prompts import STDIN
from paceline.errors import InvalidOption
from paceline.text.image_part import with_images

if TYPE_CHECKING:
    from paceline.vision.picture import Picture


def read_images(paths: Sequence[str] | None) -> list[Picture]:
    """Read the images of --image. "-" is stdin.

    Raises:
        InvalidPrompt: If an image cannot be read.
        InvalidOption: If Pillow is not installed, or stdin is given twice.
    """
    from paceline.vision.picture import MAX_BYTES, read_picture

    if list(paths or ()).count(STDIN) > 1:
        raise InvalidOption("--image - was given more than once", "Only one image can come from stdin")
    return [
        read_picture(sys.stdin.buffer.read(MAX_BYTES + 1) if path == STDIN else Path(path).expanduser())
        for path in paths or ()
    ]


def data_url(picture: Any) -> str:
    """Return a picture as the data URL of a PNG file. This is the `default` of `json.dumps`."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(picture.pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def saved_content(content: Any) -> str | list[dict[str, Any]]:
    """Return the content of a message that `/save` or the page has saved.

    Raises:
        InvalidPrompt: If an image cannot be read.
        TypeError: If the content is anything else.
    """
    from paceline.vision.picture import read_picture

    if isinstance(content, str):
        return content
    *images, text = content
    # The page's files have the form of OpenAI's API.
    urls = [one["image"] if "image" in one else one["image_url"]["url"] for one in images]
    if not isinstance(text["text"], str) or not all(url.startswith("data:") for url in urls):
        raise TypeError
    return with_images(text["text"], [read_picture(url) for url in urls])
