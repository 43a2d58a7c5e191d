"""The part of a chat message that stands for an image."""

from __future__ import annotations


class ImagePart(dict[str, str]):
    """The part of a message that stands for an image, as chat templates expect it.

    Only callers that add the image to the prompt make it. Other parts of type "image" are refused.
    """

    def __init__(self) -> None:
        super().__init__(type="image")
