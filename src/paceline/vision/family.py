"""The data that describe the vision towers of a family of models. The families are in `families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.vision.prompt import EncodedImage


@dataclass(frozen=True, slots=True)
class Tower:
    """A loaded vision tower, which consists of transformers' modules.

    Attributes:
        model: The multimodal model without its language model.
        processor: The image processor.
        config: The model's config.
    """

    model: Any
    processor: Any
    config: Any


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One `model_type` of config.json.

    Attributes:
        name: The `model_type`.
        model: Name of transformers' class of the multimodal model, without output head.
        processor: Name of transformers' class of the image processor, or a class of Paceline.
        language: Name of the language model in `model`.
        tensors: Prefixes of the tower's tensor names in checkpoints.
        encode: Maps the tower and a Pillow image to the image as the language model reads it.
        rows: Maps the tower and the height and width of an image to the minimum number of rows that the image gets.
        mark: Text that the chat template writes for an image.
        token: Text of the placeholder token. One placeholder stands for each row of an image.
    """

    name: str
    model: str
    processor: str | Callable[[Path | Mapping[str, Any]], Any]
    language: str
    tensors: tuple[str, ...]
    encode: Callable[[Tower, Any], EncodedImage]
    rows: Callable[[Tower, int, int], int]
    mark: str
    token: str
