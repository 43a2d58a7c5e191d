"""Renders chats with images, even with chat templates that show no images in tool results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from paceline.errors import InvalidPrompt
from paceline.text.image_part import ImagePart
from paceline.vision.encoder import Vision
from paceline.vision.picture import Picture

Chat = list[dict[str, Any]]

_FOLLOWS = "[image: see the next message of the user]"
_LEFT_OUT = "[image left out: this model sees no images in tool results]"
_INTRODUCTION = "Images of the tool results above:"


def render_images(
    vision: Vision, chat: Chat, pictures: Sequence[Picture], render: Callable[[Chat], str]
) -> tuple[str, Sequence[Picture]]:
    """Render a chat such that the prompt shows its images, even if the template shows no images in tool results.

    Images in tool results are then moved to the next user message. If the template does not allow that either, a note
    replaces them, because a client cannot remove a result from the conversation.

    Args:
        vision: The tower.
        chat: Checked messages with an `ImagePart` for each image.
        pictures: The pictures, in order.
        render: Applies the chat template.

    Returns:
        The text, and the pictures that it shows.

    Raises:
        InvalidPrompt: If the template rejects the messages.
    """
    *others, (last, fewer) = _forms(chat, pictures)
    for form, shown in others:
        with suppress(InvalidPrompt):
            text = render(form)
            if vision.shown(text) == len(shown):
                return text, shown
    return render(last), fewer


def _forms(chat: Chat, pictures: Sequence[Picture]) -> Iterator[tuple[Chat, Sequence[Picture]]]:
    """Yield forms of a chat, each with the pictures that it shows. The best form comes first."""
    yield chat, pictures
    roles = [message["role"] for message in chat for _ in _images(message)]
    if "tool" in roles:
        yield _moved(chat), pictures
        kept = [picture for picture, role in zip(pictures, roles, strict=True) if role != "tool"]
        yield [_noted(message, _LEFT_OUT) for message in chat], kept


def _moved(chat: Chat) -> Chat:
    """Move images of tool results to the user message after them. If there is none, add one."""
    moved, waiting = Chat(), list[Any]()
    for message in chat:
        if waiting and message["role"] != "tool":
            own = message["content"] if message["role"] == "user" else ""
            moved.append(_with_results(waiting, own))
            waiting = []
            if message["role"] == "user":
                continue
        if message["role"] == "tool":
            waiting += _images(message)
        moved.append(_noted(message, _FOLLOWS))
    return [*moved, _with_results(waiting, "")] if waiting else moved


def _with_results(images: Sequence[ImagePart], content: Any) -> dict[str, Any]:
    """Return a user message with the images of results, followed by its own content."""
    own = content if isinstance(content, list) else [_text(content)] if content else []
    return {"role": "user", "content": [_text(_INTRODUCTION), *images, *own]}


def _noted(message: dict[str, Any], note: str) -> dict[str, Any]:
    """Return a message. If it is a tool result, notes replace its images."""
    if message["role"] != "tool" or not _images(message):
        return message
    return {**message, "content": [_text(note) if isinstance(x, ImagePart) else x for x in message["content"]]}


def _images(message: dict[str, Any]) -> list[ImagePart]:
    content = message["content"]
    return [part for part in content if isinstance(part, ImagePart)] if isinstance(content, list) else []


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
