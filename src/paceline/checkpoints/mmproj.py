"""Vision towers in GGUF files (llama.cpp's mmproj files), with config, settings and tensors under Hugging Face's
names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.gguf_file import read_gguf
from paceline.checkpoints.mmproj_layouts import LAYOUTS, Tensors
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.reading import library_errors
from paceline.files.schema import (
    EPS,
    FLAG,
    HEAD_COUNT,
    LAYER_COUNT,
    ROWS,
    SIZE,
    TEXT,
    FieldKind,
    check,
    each,
    integer,
    list_of,
    number,
)

_KEYS: Mapping[str, FieldKind] = {
    **each(TEXT, "projector_type", "vision.projector_type"),
    **each(SIZE, "vision.projection_dim", "vision.embedding_length", "vision.patch_size", "vision.image_size"),
    **each(ROWS, "vision.feed_forward_length", "vision.preproc_image_size"),
    "vision.block_count": LAYER_COUNT,
    "vision.attention.head_count": HEAD_COUNT,
    "vision.attention.layer_norm_epsilon": EPS,
    **each(integer(1, 16), "vision.projector.scale_factor", "vision.spatial_merge_size"),
    "vision.n_wa_pattern": integer(1, 1 << 10),
    "vision.window_size": SIZE,
    **each(list_of(number(0, 1)), "vision.image_mean", "vision.image_std"),
    "vision.is_deepstack_layers": list_of(FLAG),
}
"""Types of the metadata, by the part of the key after "clip."."""


@dataclass(frozen=True, slots=True)
class Projector:
    """A vision tower of an mmproj file.

    Attributes:
        kind: The tower's family, a key of `VISION`.
        config: Config of the multimodal model.
        settings: Settings of the image processor.
        tensors: A function that reads the tensors and returns them by Hugging Face name.
        width: Size of the embeddings that the tower produces.
    """

    kind: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    tensors: Callable[[], Tensors]
    width: int


def read_projector(path: Path) -> Projector:
    """Read an mmproj file. Tensors are read when they are needed.

    Raises:
        ModelNotFound: If the file does not exist.
        CorruptModel: If the file is damaged.
        UnsupportedModel: If the file holds no vision tower, or holds a tower that Paceline does not support.
    """
    file = read_gguf(path)
    if file.fields.get("general.architecture") != "clip" or not file.fields.get("clip.has_vision_encoder"):
        raise UnsupportedModel(f"{path} holds no vision tower", "Name the mmproj file of the model")
    fields = {key.removeprefix("clip."): value for key, value in file.fields.items()}
    check(path, fields, _KEYS)
    name = fields.get("projector_type") or fields.get("vision.projector_type")
    if name not in LAYOUTS:
        raise UnsupportedModel(
            f"the projector {name} of {path} is not supported", f"Supported: {', '.join(sorted(LAYOUTS))}"
        )
    layout = LAYOUTS[name]
    try:
        kind, config, settings = layout.read(fields, {key: one.shape for key, one in file.tensors.items()})
        width = fields["vision.projection_dim"]
    except KeyError as missing:
        raise CorruptModel(f"{path} lacks {missing}", "Fetch the file again") from missing

    def tensors() -> Tensors:
        later = {key.removesuffix(".1") for key in file.tensors if key.endswith(".weight.1")}
        found = {_renamed(key, layout.names): file.tensors[key].read() for key in file.tensors if key[-2:] != ".1"}
        with library_errors(f"the tensors of {path} do not fit each other", "Fetch the file again"):
            for key in later:  # a convolution over two frames is stored as two convolutions
                both = file.tensors[key].read(), file.tensors[key + ".1"].read()
                found[_renamed(key, layout.names)] = torch.stack(both, 2)
            return layout.mend(found)

    return Projector(kind, {"model_type": kind, **config}, settings, tensors, width)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return Hugging Face's name of a tensor. Unknown names stay as they are, and `load_tower` rejects them later."""
    front, _, kind = name.rpartition(".")
    parts = front.split(".")
    numbers = [part for part in parts[:3] if part.isdecimal() and parts[0] == "v"]
    pattern = ".".join("{}" if part in numbers else part for part in parts) + "."
    return names.get(pattern, names.get(front + ".", front + ".")).format(*numbers) + kind
