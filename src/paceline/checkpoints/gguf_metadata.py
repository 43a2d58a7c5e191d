"""Metadata of a GGUF file, as the readers of its architecture take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.checkpoints.gguf_file import GGUFFile
from paceline.files.schema import GGUF_ARCHITECTURE, check_value

Fields = Mapping[str, Any]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's metadata by key without the architecture's name in front.

    Each value is checked against `schema.GGUF_ARCHITECTURE` when it is read.
    """

    file: GGUFFile
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` where the file has none."""
        name = f"{self.architecture}.{key}"
        if name in self.file.fields:
            check_value(self.file.path, name, self.file.fields[name], GGUF_ARCHITECTURE[key])
        value = self.file.fields.get(name, default)
        # Stored as float32; the shortest decimal that rounds to it is what config.json says.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise KeyError(f"{self.architecture}.{key}")
        return value

    def factors(self, name: str) -> list[float] | None:
        """Return the tensor `name` of `ROPE_FACTORS`, or None where the file has none."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        tensor.check()
        return tensor.read().to(torch.float64).flatten().tolist()


def each_layer(meta: Metadata, config: Config, key: str) -> list[int]:
    """A number for each of the model's own layers."""
    value, layers = meta[key], config["num_hidden_layers"]
    return value[:layers] if isinstance(value, list) else [value] * layers


def widest(value: int | list[int]) -> int:
    return max(value, default=0) if isinstance(value, list) else value
