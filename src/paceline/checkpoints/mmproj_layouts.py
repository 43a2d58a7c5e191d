"""The projector types of mmproj files, and their translation from llama.cpp's metadata and names to Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Fields = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def _same(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True, slots=True)
class ProjectorLayout:
    """Layout of a projector type.

    Attributes:
        read: Maps the metadata and the shapes of the tensors to the family, the config and the settings.
        names: Prefixes of GGUF names -> prefixes of Hugging Face's names. "{}" stands for a number.
        mend: Converts the contents of tensors, which already have Hugging Face's names, to Hugging Face's layout.
    """

    read: Callable[[Fields, Shapes], tuple[str, dict[str, Any], dict[str, Any]]]
    names: Mapping[str, str]
    mend: Callable[[Tensors], Tensors] = _same


def _sizes(fields: Fields) -> dict[str, Any]:
    return {
        "hidden_size": fields["vision.embedding_length"],
        "intermediate_size": fields["vision.feed_forward_length"],
        "patch_size": fields["vision.patch_size"],
    }


def _normed(fields: Fields) -> dict[str, Any]:
    return {"image_mean": fields["vision.image_mean"], "image_std": fields["vision.image_std"]}


def _siglip(fields: Fields) -> dict[str, Any]:
    return {
        **_sizes(fields),
        "num_hidden_layers": fields["vision.block_count"],
        "num_attention_heads": fields["vision.attention.head_count"],
        "layer_norm_eps": fields["vision.attention.layer_norm_epsilon"],
    }


def _idefics3(fields: Fields, shapes: Shapes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    tile = fields["vision.image_size"]
    vision = {**_siglip(fields), "image_size": tile}
    text = {"model_type": "llama", "hidden_size": fields["vision.projection_dim"]}
    largest = fields.get("vision.preproc_image_size", tile)
    settings = {"size": {"longest_edge": largest}, "max_image_size": {"longest_edge": tile}, **_normed(fields)}
    scale = fields["vision.projector.scale_factor"]
    return "idefics3", {"vision_config": vision, "text_config": text, "scale_factor": scale}, settings


def _gemma3(fields: Fields, shapes: Shapes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    side, scale = fields["vision.image_size"], fields.get("vision.projector.scale_factor", 4)
    rows = (side // fields["vision.patch_size"] // scale) ** 2
    vision = {**_siglip(fields), "image_size": side, "vision_use_head": False}
    text = {"model_type": "gemma3_text", "hidden_size": fields["vision.projection_dim"]}
    settings = {"size": {"height": side, "width": side}, "image_seq_length": rows, **_normed(fields)}
    return "gemma3", {"vision_config": vision, "text_config": text, "mm_tokens_per_image": rows}, settings


def _lfm2(fields: Fields, shapes: Shapes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    vision = {
        **_siglip(fields),
        "model_type": "siglip2_vision_model",
        "num_patches": shapes["v.position_embd.weight"][0],
        "vision_use_head": False,
    }
    scale = fields["vision.projector.scale_factor"]
    config = {
        "vision_config": vision,
        "text_config": {"model_type": "lfm2", "hidden_size": fields["vision.projection_dim"]},
        "downsample_factor": scale,
        "projector_hidden_size": shapes["mm.1.weight"][0],
        "projector_use_layernorm": "mm.input_norm.weight" in shapes,
    }
    settings = {"encoder_patch_size": fields["vision.patch_size"], "downsample_factor": scale, **_normed(fields)}
    return "lfm2_vl", config, settings


_MAX_PATCHES = 4096
"""Maximum number of rows of an image, as in llama.cpp. The files do not contain this limit."""


def _qwen_settings(fields: Fields) -> dict[str, Any]:
    merged, patch = fields.get("vision.spatial_merge_size", 2), fields["vision.patch_size"]
    area = (patch * merged) ** 2
    return {
        "patch_size": patch,
        "merge_size": merged,
        "temporal_patch_size": 2,
        "min_pixels": 8 * area,
        "max_pixels": _MAX_PATCHES * area,
        **_normed(fields),
    }


def _qwen2_5(fields: Fields, shapes: Shapes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    depth, every = fields["vision.block_count"], fields["vision.n_wa_pattern"]
    vision = {
        **_sizes(fields),
        "depth": depth,
        "num_heads": fields["vision.attention.head_count"],
        "spatial_merge_size": fields.get("vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": fields["vision.projection_dim"],
        "fullatt_block_indexes": [*range(every - 1, depth, every)],
        "window_size": fields.get("vision.window_size", 112),
    }
    text = {"model_type": "qwen2_5_vl_text", "hidden_size": fields["vision.projection_dim"]}
    return "qwen2_5_vl", {"vision_config": vision, "text_config": text}, _qwen_settings(fields)


def _qwen3(fields: Fields, shapes: Shapes) -> tuple[str, dict[str, Any], dict[str, Any]]:
    vision = {
        **_sizes(fields),
        "depth": fields["vision.block_count"],
        "num_heads": fields["vision.attention.head_count"],
        "spatial_merge_size": fields["vision.spatial_merge_size"],
        "temporal_patch_size": 2,
        "out_hidden_size": fields["vision.projection_dim"],
        "num_position_embeddings": shapes["v.position_embd.weight"][0],
    }
    deep = [i for i, one in enumerate(fields.get("vision.is_deepstack_layers", ())) if one]
    kind = "qwen3_vl" if deep else "qwen3_5"
    vision |= {"deepstack_visual_indexes": deep} if deep else {}
    text = {"model_type": f"{kind}_text", "hidden_size": fields["vision.projection_dim"]}
    return kind, {"vision_config": vision, "text_config": text}, _qwen_settings(fields)


def _patch_convolution_as_linear(tensors: Tensors) -> Tensors:
    """Convert LFM2-VL's convolution over patches to a linear layer. The channels come last in its input."""
    name = "model.vision_tower.embeddings.patch_embedding.weight"
    return {**tensors, name: tensors[name].permute(0, 2, 3, 1).flatten(1)}


def _subtract_one(tensors: Tensors) -> Tensors:
    """Subtract 1 from the norm of Gemma 3's projector. Hugging Face's norm adds it."""
    name = "model.multi_modal_projector.mm_soft_emb_norm.weight"
    return {**tensors, name: tensors[name] - 1}


def _join_projections(tensors: Tensors) -> Tensors:
    """Join the query, key and value projections."""
    joined = dict(tensors)
    for name in tensors:
        if ".attn.q." in name:
            parts = [joined.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
            joined[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return joined


def _renumber_mergers(tensors: Tensors) -> Tensors:
    """Renumber the deepstack mergers from 0. llama.cpp numbers them by the layer whose output they read."""
    block = "model.visual.deepstack_merger_list."
    layers = sorted({int(name[len(block) :].partition(".")[0]) for name in tensors if name.startswith(block)})
    places = {f"{block}{layer}.": f"{block}{place}." for place, layer in enumerate(layers)}

    def numbered(name: str) -> str:
        return next((new + name[len(old) :] for old, new in places.items() if name.startswith(old)), name)

    return {numbered(name): tensor for name, tensor in tensors.items()}


_SIGLIP = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
}
"""llama.cpp's names of the parts of a SigLIP layer -> Hugging Face's names."""


def _siglip_names(tower: str) -> dict[str, str]:
    return {
        "v.patch_embd.": f"{tower}.embeddings.patch_embedding.",
        "v.position_embd.": f"{tower}.embeddings.position_embedding.",
        "v.post_ln.": f"{tower}.post_layernorm.",
        **{f"v.blk.{{}}.{ours}.": f"{tower}.encoder.layers.{{}}.{theirs}." for ours, theirs in _SIGLIP.items()},
    }


LAYOUTS = {
    "idefics3": ProjectorLayout(
        _idefics3,
        {
            "mm.model.fc.": "model.connector.modality_projection.proj.",
            **_siglip_names("model.vision_model"),
        },
    ),
    "gemma3": ProjectorLayout(
        _gemma3,
        {
            "mm.input_projection.": "model.multi_modal_projector.mm_input_projection_",
            "mm.soft_emb_norm.": "model.multi_modal_projector.mm_soft_emb_norm.",
            **_siglip_names("model.vision_tower"),
        },
        _subtract_one,
    ),
    "lfm2": ProjectorLayout(
        _lfm2,
        {
            "mm.input_norm.": "model.multi_modal_projector.layer_norm.",
            "mm.1.": "model.multi_modal_projector.linear_1.",
            "mm.2.": "model.multi_modal_projector.linear_2.",
            **_siglip_names("model.vision_tower"),
        },
        _patch_convolution_as_linear,
    ),
    "qwen2.5vl_merger": ProjectorLayout(
        _qwen2_5,
        {
            "mm.0.": "visual.merger.mlp.0.",
            "mm.2.": "visual.merger.mlp.2.",
            "v.post_ln.": "visual.merger.ln_q.",
            "v.patch_embd.": "visual.patch_embed.proj.",
            **{
                f"v.blk.{{}}.{ours}.": f"visual.blocks.{{}}.{theirs}."
                for ours, theirs in {
                    "ln1": "norm1",
                    "ln2": "norm2",
                    "ffn_gate": "mlp.gate_proj",
                    "ffn_up": "mlp.up_proj",
                    "ffn_down": "mlp.down_proj",
                    "attn_q": "attn.q",
                    "attn_k": "attn.k",
                    "attn_v": "attn.v",
                    "attn_out": "attn.proj",
                }.items()
            },
        },
        _join_projections,
    ),
    "qwen3vl_merger": ProjectorLayout(
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
        _renumber_mergers,
    ),
}
"""Layout by projector type."""
