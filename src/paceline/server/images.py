"""Images of chats: limits, reading, and notes in their place if a model reads text only."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from paceline.errors import InvalidPrompt, TimedOut
from paceline.llm import LLM
from paceline.server import image_urls
from paceline.server.errors import bad_request, retry_later
from paceline.server.limits import Settings
from paceline.server.request import ChatMessage, ChatPrompt, SentImage
from paceline.server.worker import Busy
from paceline.text.sandbox import is_abandoned
from paceline.vision.encoder import Vision
from paceline.vision.picture import Picture, data_of_url, read_base64, read_picture

_LOW_DETAIL_SIDE = 512
"""Longest side, in pixels, of an image that is sent with the detail "low", as in OpenAI's API."""
_MAX_PIXELS = 100_000_000
"""Maximum pixels of all images in a request. Each pixel takes three bytes."""
_MAX_HELD_BYTES = 1 << 30
"""A request with images is refused if the encoded images of other requests take more bytes than this."""
_IMAGE_DATA = re.compile(r"[A-Za-z0-9+/=_-]{1000,}")


def read_images(llm: LLM, settings: Settings, prompt: ChatPrompt) -> ChatPrompt:
    """Return a chat in which each `SentImage` is decoded to a `Picture`.

    If the model reads text only, the chat is returned as it is: notes stand for its images.

    Raises:
        ApiError: 400 if there are too many images, one cannot be read, or the model reads text only and the image is
            part of the user's last message.
        Busy: If the machine was too busy.
    """
    parts = [part for message in prompt.messages for part in message.parts if isinstance(part, SentImage)]
    if not parts:
        return prompt
    if llm.vision is None:
        refusal = next((part.refusal for part in parts if part.refusal), None)
        if refusal:
            raise bad_request(f"{refusal}. This model reads text only", refusal.partition(":")[0])
        return prompt
    if len(parts) > settings.max_images:
        raise bad_request(
            f"a request must not have more than {settings.max_images} images, got {len(parts)}", "messages"
        )
    reader = _ImageReader(settings)
    return replace(prompt, messages=[_read(reader, message) for message in prompt.messages])


def pictures_in(prompt: ChatPrompt) -> list[Picture]:
    """Return the pictures of a chat, in the order of its messages."""
    return [part for message in prompt.messages for part in message.parts if isinstance(part, Picture)]


def check_memory(vision: Vision) -> None:
    """Raise `ApiError` 503 if the images of other requests take too much memory. Call it before
    encoding an image."""
    if vision.held_bytes > _MAX_HELD_BYTES:
        raise retry_later(
            503,
            f"the images of other requests take more than {_MAX_HELD_BYTES >> 20} MiB. Try again later",
            "images_full",
        )


def check_client_present() -> None:
    """Raise `Busy` if the client has left. Call it between images: each may take seconds, and nothing else stops the
    thread."""
    if is_abandoned():
        raise Busy("the client has left")


def without_images(text: str) -> str:
    """Return a body as text with the data of images left out, for the log."""
    return _IMAGE_DATA.sub(lambda found: f"[{len(found[0])} characters]", text)


def _read(reader: _ImageReader, message: ChatMessage) -> ChatMessage:
    """Return a message with its images read. Only messages of the user and of tools may have images."""
    if isinstance(message.content, str) or message.role not in ("user", "tool"):
        return message
    content = [reader.picture(part) if isinstance(part, SentImage) else part for part in message.content]
    return replace(message, content=content)


class _ImageReader:
    """Reads the images of one request. Counts their bytes, their pixels, and the time to fetch them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bytes = self._pixels = 0
        self._seconds = image_urls.TOTAL_SECONDS
        self._read: dict[tuple[str, bool], Picture] = {}

    def picture(self, part: SentImage) -> Picture:
        """Return an image as a picture. An image that is sent several times is read once."""
        check_client_present()
        key = part.source, part.low
        if key not in self._read:
            try:
                self._read[key] = self._picture(part)
            except InvalidPrompt as error:
                raise bad_request(f"{part.param}: {error}", part.param) from error
            except TimedOut as error:
                raise Busy(error.cause, error.fix) from error
        return self._read[key]

    def _picture(self, part: SentImage) -> Picture:
        start = part.source[:8].lower()
        if not part.source:
            raise InvalidPrompt("the image has no data", "Send a data URL: data:image/png;base64,...")
        most = _LOW_DETAIL_SIDE if part.low else None
        if start.startswith(("http://", "https://")):
            found = read_picture(self._fetch(part.source), most)
        else:
            text = data_of_url(part.source) if start.startswith("data:") else part.source
            self._count(len(text) * 3 // 4)
            found = read_base64(text, most)
        self._pixels += found.pixels.size // 3
        if self._pixels > _MAX_PIXELS:
            raise InvalidPrompt(
                f"the images of a request must not have more than {_MAX_PIXELS // 1_000_000} million pixels in total",
                "Scale them down, or send fewer",
            )
        return found

    def _fetch(self, url: str) -> bytes:
        """Return the bytes at a URL, within the time and bytes that earlier images of the request have left."""
        began, left = time.monotonic(), self._settings.max_image_bytes - self._bytes
        data = image_urls.fetch(url, self._settings.image_hosts, left, self._seconds)
        self._seconds -= time.monotonic() - began
        self._count(len(data))
        return data

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._settings.max_image_bytes:
            raise InvalidPrompt(
                f"the images of a request must not exceed {self._settings.max_image_bytes} bytes in total",
                "Scale them down, or send fewer",
            )
