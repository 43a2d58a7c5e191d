"""Vision towers in GGUF files: the mmproj file of llama.cpp, with config, settings and tensors under Hugging Face's
names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.gguf_file import read_gguf
from paceline.errors import CorruptModel, UnsupportedModel
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
    listed,
    number,
    whole,
)

Fields = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

_KEYS: Mapping[str, FieldKind] = {
    **each(TEXT, "projector_type", "vision.projector_type"),
    **each(SIZE, "vision.projection_dim", "vision.embedding_length", "vision.patch_size", "vision.image_size"),
    **each(ROWS, "vision.feed_forward_length", "vision.preproc_image_size"),
    "vision.block_count": LAYER_COUNT,
    "vision.attention.head_count": HEAD_COUNT,
    "vision.attention.layer_norm_epsilon": EPS,
    **each(whole(1, 16), "vision.projector.scale_factor", "vision.spatial_merge_size"),
    **each(listed(number(0, 1)), "vision.image_mean", "vision.image_std"),
    "vision.is_deepstack_layers": listed(FLAG),
}
"""Keys after "clip."."""


@dataclass(frozen=True, slots=True)
class Projector:
    """A vision tower of an mmproj file.

    Attributes:
        kind: Its family, a key of `VISION`.
        config: Config of the multimodal model.
        settings: Settings of the image processor.
        tensors: Returns the tensors by Hugging Face name.
        width: Size of the embeddings.
    """

    kind: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    tensors: Callable[[], Tensors]
    width: int


@dataclass(frozen=True, slots=True)
class _ProjectorLayout:
    """Layout of a projector type.

    Attributes:
        read: Function from the metadata and the tensors' shapes to the family, the config and the settings.
        names: Prefixes of GGUF names -> prefixes of Hugging Face's names. "{}" stands for a number.
    """

    read: Callable[[Fields, Shapes], tuple[str, dict[str, Any], dict[str, Any]]]
    names: Mapping[str, str]


def _sizes(fields: Fields) -> dict[str, Any]:
    return {
        "hidden_size": fields["vision.embedding_length"],
        "intermediate_size": fields["vision.feed_forward_length"],
        "patch_size": fields["vision.patch_size"],
    }


def _normed(fields: Fields) -> dict[str, Any]:
    return {"image_mean": fields["vision.image_mean"], "image_std": fields["vision.image_std"]}


def _idefics3(fields: Fields, shapes: Shapes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    tile = fields["vision.image_size"]
    vision = {
        **_sizes(fields),
        "num_hidden_layers": fields["vision.block_count"],
        "num_attention_heads": fields["vision.attention.head_count"],
        "image_size": tile,
        "layer_norm_eps": fields["vision.attention.layer_norm_epsilon"],
    }
    text = {"model_type": "llama", "hidden_size": fields["vision.projection_dim"]}
    largest = fields.get("vision.preproc_image_size", tile)
    settings = {"size": {"longest_edge": largest}, "max_image_size": {"longest_edge": tile}, **_normed(fields)}
    scale = fields["vision.projector.scale_factor"]
    return "idefics3", {"vision_config": vision, "text_config": text, "scale_factor": scale}, settings


_MOST_PATCHES = 4096
"""Maximum number of rows of an image, as in llama.cpp. The file has no limit."""


def _qwen3(fields: Fields, shapes: Shapes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    merged, patch = fields["vision.spatial_merge_size"], fields["vision.patch_size"]
    vision = {
        **_sizes(fields),
        "depth": fields["vision.block_count"],
        "num_heads": fields["vision.attention.head_count"],
        "spatial_merge_size": merged,
        "temporal_patch_size": 2,
        "out_hidden_size": fields["vision.projection_dim"],
        "num_position_embeddings": shapes["v.position_embd.weight"][0],
    }
    deep = [i for i, one in enumerate(fields.get("vision.is_deepstack_layers", ())) if one]
    kind = "qwen3_vl" if deep else "qwen3_5"
    vision |= {"deepstack_visual_indexes": deep} if deep else {}
    text = {"model_type": f"{kind}_text", "hidden_size": fields["vision.projection_dim"]}
    area = (patch * merged) ** 2
    settings = {
        "patch_size": patch,
        "merge_size": merged,
        "temporal_patch_size": 2,
        "min_pixels": 8 * area,
        "max_pixels": _MOST_PATCHES * area,
        **_normed(fields),
    }
    return kind, {"vision_config": vision, "text_config": text}, settings


_LAYOUTS = {
    "idefics3": _ProjectorLayout(
        _idefics3,
        {
            "mm.model.fc.": "model.connector.modality_projection.proj.",
            "v.patch_embd.": "model.vision_model.embeddings.patch_embedding.",
            "v.position_embd.": "model.vision_model.embeddings.position_embedding.",
            "v.post_ln.": "model.vision_model.post_layernorm.",
            **{
                f"v.blk.{{}}.{ours}.": f"model.vision_model.encoder.layers.{{}}.{theirs}."
                for ours, theirs in {
                    "ln1": "layer_norm1",
                    "ln2": "layer_norm2",
                    "ffn_up": "mlp.fc1",
                    "ffn_down": "mlp.fc2",
                    "attn_q": "self_attn.q_proj",
                    "attn_k": "self_attn.k_proj",
                    "attn_v": "self_attn.v_proj",
                    "attn_out": "self_attn.out_proj",
                }.items()
            },
        },
    ),
    "qwen3vl_merger": _ProjectorLayout(
        _qwen3,
        {
            "mm.0.": "model.visual.merger.linear_fc1.",
            "mm.2.": "model.visual.merger.linear_fc2.",
            "v.post_ln.": "model.visual.merger.norm.",
            "v.patch_embd.": "model.visual.patch_embed.proj.",
            "v.position_embd.": "model.visual.pos_embed.",
            **{
                f"v.deepstack.{{}}.{ours}.": f"model.visual.deepstack_merger_list.{{}}.{theirs}."
                for ours, theirs in {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}.items()
            },
            **{
                f"v.blk.{{}}.{ours}.": f"model.visual.blocks.{{}}.{theirs}."
                for ours, theirs in {
                    "ln1": "norm1",
                    "ln2": "norm2",
                    "ffn_up": "mlp.linear_fc1",
                    "ffn_down": "mlp.linear_fc2",
                    "attn_qkv": "attn.qkv",
                    "attn_out": "attn.proj",
                }.items()
            },
        },
    ),
}
"""Layout by projector type."""


def read_projector(path: Path) -> Projector:
    """Read an mmproj file. Tensors are read when they are needed.

    Raises:
        ModelNotFound: The file does not exist.
        CorruptModel: The file is damaged.
        UnsupportedModel: The file holds no vision tower, or one that Paceline does not support.
    """
    file = read_gguf(path)
    if file.fields.get("general.architecture") != "clip" or not file.fields.get("clip.has_vision_encoder"):
        raise UnsupportedModel(f"{path} holds no vision tower", "Name the mmproj file of the model")
    fields = {key.removeprefix("clip."): value for key, value in file.fields.items()}
    check(path, fields, _KEYS)
    name = fields.get("projector_type") or fields.get("vision.projector_type")
    if name not in _LAYOUTS:
        raise UnsupportedModel(
            f"the projector {name} of {path} is not supported", f"Supported: {', '.join(sorted(_LAYOUTS))}"
        )
    layout = _LAYOUTS[name]
    try:
        kind, config, settings = layout.read(fields, {key: one.shape for key, one in file.tensors.items()})
        width = fields["vision.projection_dim"]
    except KeyError as missing:
        raise CorruptModel(f"{path} lacks {missing}", "Fetch the file again") from missing

    def tensors() -> Tensors:
        later = {key.removesuffix(".1") for key in file.tensors if key.endswith(".weight.1")}
        found = {_renamed(key, layout.names): file.tensors[key].read() for key in file.tensors if key[-2:] != ".1"}
        for key in later:  # a convolution over two frames is stored as two convolutions
            both = file.tensors[key].read(), file.tensors[key + ".1"].read()
            found[_renamed(key, layout.names)] = torch.stack(both, 2)
        return _numbered(found)

    return Projector(kind, {"model_type": kind, **config}, settings, tensors, width)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return Hugging Face's name of a tensor. Unknown names stay, which `load_tower` then refuses."""
    front, _, kind = name.rpartition(".")
    parts = front.split(".")
    numbers = [part for part in parts[:3] if part.isdecimal() and parts[0] == "v"]
    pattern = ".".join("{}" if part in numbers else part for part in parts) + "."
    return names.get(pattern, names.get(front + ".", front + ".")).format(*numbers) + kind


def _numbered(tensors: Tensors) -> Tensors:
    """Number the deepstack mergers from 0. llama.cpp numbers them by the layer whose output they read."""
    block = "model.visual.deepstack_merger_list."
    layers = sorted({int(name[len(block) :].partition(".")[0]) for name in tensors if name.startswith(block)})
    places = {f"{block}{layer}.": f"{block}{place}." for place, layer in enumerate(layers)}

    def numbered(name: str) -> str:
        return next((new + name[len(old) :] for old, new in places.items() if name.startswith(old)), name)

    return {numbered(name): tensor for name, tensor in tensors.items()}
