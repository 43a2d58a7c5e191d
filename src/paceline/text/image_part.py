"""Parts of chat messages that stand for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ImagePart(dict[str, str]):
    """The part of a message that stands for an image, as chat templates expect it.

    Only code that also adds the image to the prompt creates this object. Other parts of type "image" are rejected.
    """

    def __init__(self) -> None:
        super().__init__(type="image")


def with_images(text: str, pictures: Sequence[object]) -> str | list[dict[str, Any]]:
    """Return the content of a message: its images, if there are any, followed by its text."""
    if not pictures:
        return text
    return [*({"type": "image", "image": one} for one in pictures), {"type": "text", "text": text}]
