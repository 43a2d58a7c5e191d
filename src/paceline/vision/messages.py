"""Chat messages with image parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidPrompt
from paceline.text.image_part import ImagePart
from paceline.types import Message, Prompt
from paceline.vision.picture import Picture, read_picture

Chat = list[dict[str, Any]]

_KINDS = ("image", "image_url")


def has_images(prompt: Prompt) -> bool:
    """Return True if a prompt is a chat with image parts."""
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return is_chat and any(_is_image(part) for message in prompt for part in _parts(message))


def split_images(messages: Sequence[Message]) -> tuple[Chat, list[Picture]]:
    """Return the messages with an `ImagePart` in place of each image, and the pictures.

    An image is {"type": "image", "image": SOURCE}, where SOURCE is any source that `read_picture` accepts, or {"type":
    "image_url", "image_url": {"url": "data:..."}}.

    Raises:
        InvalidPrompt: If an image has no source, or cannot be read.
    """
    chat, pictures = Chat(), list[Picture]()
    for index, message in enumerate(messages):
        parts = _parts(message)
        pictures += [read_picture(_source(index, part)) for part in parts if _is_image(part)]
        content = [ImagePart() if _is_image(part) else part for part in parts]
        chat.append({**message, "content": content} if content else message)  # type: ignore[arg-type]  # checked later
    return chat, pictures


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _source(index: int, part: Mapping[str, Any]) -> Any:
    source = part.get(part["type"])
    source = source.get("url") if isinstance(source, Mapping) else source
    if source is None:
        raise InvalidPrompt(
            f"message {index} contains an image part without an image",
            'Write {"type": "image", "image": a path, bytes, data URL or Pillow image}',
        )
    return source
