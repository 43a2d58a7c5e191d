"""Tensors of families whose files have other names than Llama's, or values that the decoder does not compute with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.quantize import Codes
from paceline.kernels.stored import Stored
from paceline.models.deepseek import DEEPSEEK, mtp_names
from paceline.models.lazy import LanguageTensors, Renamed, renamed
from paceline.models.mamba_hybrids import Multiplier, multipliers

_LANGUAGE = {"model.language_model.": "model."}
_LFM2 = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.": ".mlp.",
}
_BAMBA = {
    "model.final_layernorm.": "model.norm.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
}
_MIXERS = {
    "backbone.": "model.",
    ".embeddings.": ".embed_tokens.",
    ".norm.": ".input_layernorm.",
    ".mixer.input_layernorm.": ".mamba.norm.",
    ".norm_f.": ".norm.",
    **{f".mixer.{x}_proj.": f".self_attn.{x}_proj." for x in "qkvo"},
    ".mixer.gate.e_score_correction_bias": ".mlp.expert_bias",
    **{f".mixer.{x}.": f".mlp.{x}." for x in ("up_proj", "down_proj", "experts", "gate", "shared_experts")},
    ".mixer.": ".mamba.",
}
_DEEPSEEK = {".mlp.gate.e_score_correction_bias": ".mlp.expert_bias"}
_NEOX = {
    "gpt_neox.": "model.",
    "embed_out.": "lm_head.",
    "model.embed_in.": "model.embed_tokens.",
    "model.final_layer_norm.": "model.norm.",
    ".attention.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".dense_h_to_4h.": ".up_proj.",
    ".dense_4h_to_h.": ".down_proj.",
}
_PHI = {
    "model.final_layernorm.": "model.norm.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    **{f".{x}_layernorm.": f".{x}_norm." for x in "qk"},
    ".mlp.fc1.": ".mlp.up_proj.",
    ".mlp.fc2.": ".mlp.down_proj.",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("gemma4_text", "qwen3_vl_text", "qwen3_5_text", "qwen3_5_moe_text"), _LANGUAGE),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("bamba", "falcon_h1"), _BAMBA),
    **dict.fromkeys(("mamba2", "nemotron_h"), _MIXERS),
    **dict.fromkeys((*DEEPSEEK, "glm4_moe"), _DEEPSEEK),
    "gpt_neox": _NEOX,
    "phi": _PHI,
    "stablelm": {f".{x}_layernorm.norms.": f".{x}_norm." for x in "qk"},
    "starcoder2": {".mlp.c_fc.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj."},
    "glm4": {
        ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    },
    "llama4_text": {"language_model.": "", ".feed_forward.": ".mlp."},
    "mimo": {
        "model.mtp_layers.": "mtp.layers.",
        "mtp.layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
        "mtp.layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
        "mtp.layers.0.input_proj.": "mtp.fc.",
        "mtp.layers.0.final_layernorm.": "mtp.norm.",
    },
    "granitemoehybrid": {
        ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
        ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.down_proj.",
    },
}
"""Model type -> parts of names in its files, and those of Llama's names in their place, one after the other."""


def translated(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors as the decoder takes them. `config`: the checkpoint's."""
    if names := _names(config):
        tensors = LanguageTensors(tensors, names, turned=config.get("model_type") == "llama4_text")
    return Scaled(tensors, multipliers(config)) if config.get("model_type") == "falcon_h1" else tensors


def _names(config: Mapping[str, Any]) -> Mapping[str, str]:
    return {**mtp_names(config), **_NAMES.get(config.get("model_type", ""), {})}


def module_name(config: Mapping[str, Any], module: str) -> str:
    """The name that the decoder has for a module of a model with this config."""
    return renamed(module + ".", _names(config)).removesuffix(".")


def unlike_file(config: Mapping[str, Any], module: str) -> str | None:
    """How the decoder's weights of a module differ from trained ones in more than their names; None: not at all."""
    if config.get("model_type") == "falcon_h1":
        return "multipliers of the config are in its weights"
    if config.get("linear_heads_tiled") and ".linear_attn." in module:
        return "the file has its heads in another order"
    return None


class Scaled(Renamed):
    """Tensors of which some are multiplied, by one number or each row by its own."""

    def __init__(self, tensors: Mapping[str, Tensor], factors: Mapping[str, Multiplier]) -> None:
        """`factors`: by the end of a tensor's name."""
        super().__init__(tensors)
        self._factors = {name: f for name in tensors for end, f in factors.items() if name.endswith(end)}

    def __getitem__(self, name: str) -> Tensor:
        tensor, factors = super().__getitem__(name), self._factors.get(name)
        if factors is None:
            return tensor
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        rows = torch.cat([wide.new_full((min(count, len(wide)),), factor) for count, factor in factors])
        return wide * rows[: len(wide)].view(-1, *(1,) * (wide.ndim - 1))

    def codes(self, name: str) -> Codes | None:
        return None if name in self._factors else super().codes(name)

    def stored(self, name: str) -> Stored | None:
        return None if name in self._factors else super().stored(name)
