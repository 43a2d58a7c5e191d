"""A model's vision tower: from pictures to the rows of a prompt."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paceline.errors import CorruptModel, InvalidPrompt, UnsupportedModel, install_line, memory_named
from paceline.text.template_text import TemplateText, concat, flags_of
from paceline.vision.family import Tower, VisionFamily
from paceline.vision.picture import Picture
from paceline.vision.prompt import EncodedImage, ImagePrompt, PlacedImage

_CACHED = 256 << 20
"""Maximum memory of encoded images that are kept for later prompts, in bytes."""

Encode = Callable[[str], list[int]]
"""Converts text to token ids."""


class Vision:
    """The vision tower of a model. It is loaded when it gets its first image. It is thread-safe.

    Images are encoded one at a time, so that a result does not depend on other images, and requests do not compete for
    processors. Encoded images are found by the hash of their pixels. They are kept as long as a prompt uses them, and
    the latest images are kept longer.
    """

    def __init__(
        self,
        family: VisionFamily,
        config: Mapping[str, Any],
        tensors: Callable[[], Mapping[str, Tensor]],
        settings: Path | Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Prepare a tower.

        Args:
            family: The family.
            config: Contents of the multimodal model's config.json.
            tensors: A function that opens the checkpoint and returns its tensors.
            settings: Settings of the image processor, or the folder that contains them.
            dtype: Dtype of the computation.
            device: The tower's device.
        """
        self.family, self._config, self._tensors, self._settings = family, config, tensors, settings
        self._dtype, self._device = dtype, device
        self._lock, self._loading = Lock(), Lock()
        self._latest: OrderedDict[str, EncodedImage] = OrderedDict()
        """Digest of a picture -> the encoded image, least recently used first."""
        self._encoded: WeakValueDictionary[str, EncodedImage] = WeakValueDictionary()
        """Digest of a picture -> the encoded image, for all images in memory."""

    @property
    def name(self) -> str:
        """Name of the family, such as "smolvlm"."""
        return self.family.name

    @property
    def held_bytes(self) -> int:
        """Memory, in bytes, of the encoded images that only prompts keep alive."""
        # Iterating over the dictionary itself could fail, because other threads encode images and drop prompts.
        only = (ref for ref in self._encoded.valuerefs() if ref.key not in self._latest)
        return sum(image.nbytes for ref in only if (image := ref()) is not None)

    def prompt(
        self, text: str, pictures: Sequence[Picture], encode: Encode, check: Callable[[int], object] | None = None
    ) -> ImagePrompt:
        """Return a prompt with images.

        Args:
            text: A rendered chat template. The template must have written one mark per picture.
            pictures: The pictures, in order.
            encode: Converts text to token ids.
            check: Called before each picture is encoded, with the minimum number of tokens that the prompt will have.
                It may raise an error.

        Raises:
            InvalidPrompt: If the text does not have one mark per picture, or contains the placeholder token.
            UnsupportedModel: If a package is missing.
        """
        marks = self._marks(text)
        if len(marks) != len(pictures):
            raise InvalidPrompt(
                f"the chat template wrote {len(marks)} marks for {len(pictures)} images",
                "Use the model's own chat template, and do not write its marks into messages",
            )
        images = list[EncodedImage]()
        least = len(encode(text)) + sum(self.rows(one) - 1 for one in pictures) if check else 0
        for picture in pictures:
            if check:
                check(least)
            images.append(self.encode(picture))
        parts, done = list[str](), 0
        for (start, end), image in zip(marks, images, strict=True):
            parts += [text[done:start], TemplateText.written(image.text)]
            done = end
        tokens = encode(concat([*parts, text[done:]]))
        (token,) = encode(TemplateText.written(self.family.token))
        rows = (place for place, one in enumerate(tokens) if one == token)
        placed = [PlacedImage(image, [*islice(rows, len(image.embeddings))]) for image in images]
        if next(rows, None) is not None:
            raise InvalidPrompt(
                f"the messages contain {self.family.token}, which stands for a part of an image", "Remove it"
            )
        if any(len(one.rows) != len(one.image.embeddings) for one in placed):
            raise CorruptModel("the tokenizer does not fit the vision tower", "Fetch the model again")
        return ImagePrompt(tokens, placed)

    def shown(self, text: str) -> int:
        """Return the number of images that a rendered chat template shows."""
        return len(self._marks(text))

    def _marks(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of the marks that the template wrote."""
        found, flags = re.finditer(re.escape(self.family.mark), str.__str__(text)), flags_of(text)
        return [hit.span() for hit in found if all(flags[slice(*hit.span())])]

    def rows(self, picture: Picture) -> int:
        """Return the minimum number of rows of an image, which follows from its size. Raise the errors of `encode`."""
        tower, (height, width, _) = self._loaded(), picture.pixels.shape
        with self._refusals(picture):
            return self.family.rows(tower, height, width)

    def encode(self, picture: Picture) -> EncodedImage:
        """Return a picture as the language model reads it.

        Raises:
            InvalidPrompt: If the tower cannot encode an image of this size.
            UnsupportedModel: If a package is missing.
        """
        with self._lock:
            if (found := self._encoded.get(picture.digest)) is None:
                found = self._encoded[picture.digest] = self._encode(picture)
            self._latest[picture.digest] = found
            self._latest.move_to_end(picture.digest)
            while len(self._latest) > 1 and sum(image.nbytes for image in self._latest.values()) > _CACHED:
                self._latest.popitem(last=False)
            return found

    @torch.inference_mode()
    def _encode(self, picture: Picture) -> EncodedImage:
        from PIL import Image

        tower = self._loaded()
        with self._refusals(picture), memory_named("no memory to encode the image", "Scale it down"):
            return self.family.encode(tower, Image.fromarray(picture.pixels))

    @contextmanager
    def _refusals(self, picture: Picture) -> Iterator[None]:
        """Convert the errors of transformers' processors to `InvalidPrompt`."""
        try:
            yield
        except (ValueError, IndexError, RuntimeError, ZeroDivisionError) as error:
            height, width, _ = picture.pixels.shape
            raise InvalidPrompt(
                f"{self.name} cannot encode an image of {width} x {height} pixels ({error})", "Crop or scale it"
            ) from error

    def _loaded(self) -> Tower:
        with self._loading:
            return self._tower

    @cached_property
    def _tower(self) -> Tower:
        """Load the tower."""
        if missing := [package for package in ("transformers", "PIL") if find_spec(package) is None]:
            raise UnsupportedModel(f"images need the package {missing[0]}", install_line("vision"))
        from paceline.vision.tower import load_tower

        return load_tower(self.family, self._config, self._tensors(), self._settings, self._dtype, self._device)
