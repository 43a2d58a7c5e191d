"""The metadata of a GGUF file, for the functions that read a certain architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.checkpoints.gguf_file import GGUFFile
from paceline.checkpoints.layer_plans import FULL, SLIDING
from paceline.errors import CorruptModel
from paceline.files.schema import GGUF_ARCHITECTURE, FieldKind, check_value

Fields = Mapping[str, Any]
Config = dict[str, Any]
_FETCH_AGAIN = "Fetch the file again"
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Names of tensors that belong to the config."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's metadata. Keys do not have the architecture's name as a prefix.

    Each value is checked on access, against `schema.GGUF_ARCHITECTURE` or the architecture's own `keys`.
    """

    file: GGUFFile
    architecture: str
    keys: Mapping[str, FieldKind] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` if the file does not contain it."""
        name = f"{self.architecture}.{key}"
        if name in self.file.fields:
            kind = self.keys.get(key) or GGUF_ARCHITECTURE[key]
            check_value(self.file.path, name, self.file.fields[name], kind)
        value = self.file.fields.get(name, default)
        # Metadata are float32. config.json contains the shortest decimal number that rounds to the same float32.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise KeyError(f"{self.architecture}.{key}")
        return value

    def factors(self, name: str) -> list[float] | None:
        """Return the values of a tensor in `ROPE_FACTORS`, or None if the file does not contain it."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        tensor.check()
        return tensor.read().to(torch.float64).flatten().tolist()


def layer_types(meta: Metadata, layers: int, every: int) -> list[str]:
    """Return the type of each layer: full attention for every `every`-th layer, and sliding attention for the others.

    The metadata may override this with another period, or with a list that has True for each layer with a window.

    Raises:
        CorruptModel: If the list is too short.
    """
    pattern = meta.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list) and len(pattern) < layers:
        raise CorruptModel(f"sliding_window_pattern names {len(pattern)} of {layers} layers", _FETCH_AGAIN)
    windowed = pattern[:layers] if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
    return [SLIDING if window else FULL for window in windowed]


def rotated_share(meta: Metadata, config: Config) -> Config:
    """Return the rotated fraction of each head, under the config's key."""
    return {"partial_rotary_factor": meta.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def has_part(meta: Metadata, part: str) -> bool:
    """Return True if the first layer has a weight with this name."""
    return f"blk.0.{part}.weight" in meta.file.tensors


def sizes_by_layer(value: Any, layers: int, least: int = 1) -> list[int]:
    """Return a size for each layer. The metadata may contain a single size for all layers. Raise `CorruptModel` if it
    contains anything else."""
    if not isinstance(value, list):
        return [int(value)] * layers
    if len(value) < layers or not all(isinstance(size, int) and least <= size < 2**24 for size in value):
        raise CorruptModel(f"sizes of {layers} layers must be whole numbers, got {value!r:.80}", _FETCH_AGAIN)
    return value[:layers]


def sizes_of_all_layers(meta: Metadata, config: Config, key: str) -> list[int]:
    """Return a size for each of the model's own layers, and 0 for layers without this part. Raise `CorruptModel` as
    `sizes_by_layer` does."""
    return sizes_by_layer(meta[key], config["num_hidden_layers"], 0)


def largest_size(value: Any) -> int:
    """Return the largest size among all layers."""
    sizes = value if isinstance(value, list) else [value]
    return max((size for size in sizes if isinstance(size, int)), default=0)
