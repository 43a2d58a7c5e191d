"""Parts of chat messages that stand for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ImagePart(dict[str, str]):
    """The part of a message that stands for an image, as chat templates expect it.

    Only callers that add the image to the prompt make it. Other parts of type "image" are refused.
    """

    def __init__(self) -> None:
        super().__init__(type="image")


def with_images(text: str, pictures: Sequence[object]) -> str | list[dict[str, Any]]:
    """Return the content of a message: its text, after the images if there are any."""
    if not pictures:
        return text
    return [*({"type": "image", "image": one} for one in pictures), {"type": "text", "text": text}]
