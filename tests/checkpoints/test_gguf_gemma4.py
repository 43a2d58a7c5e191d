"""Gemma 4 from GGUF files in the layout of llama.cpp's `conversion/gemma.py`, compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.model_config import read_config
from paceline.errors import UnsupportedModel
from paceline.models.decoder import Decoder
from tests.support.gguf_writing import config_fields, write_file
from tests.support.golden import models
from tests.support.logits import assert_close, expected, feed, text
from tests.support.tiny_families import GEMMA4

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
    **{f"post_feedforward_layernorm_{x}": f"post_ffw_norm_{x}" for x in (1, 2)},
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
}


def name_in_file(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    whole = PARTS.get(part)
    return f"blk.{layer}.{whole or PARTS[part.removesuffix('.weight')] + '.weight'}"


def write(path: Path, theirs: Any, factors: Tensor | None = None) -> None:
    c, near, wide = theirs.config, theirs.config.per_layer_config[0], theirs.config.per_layer_config[2]
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    first = c.num_hidden_layers - c.num_kv_shared_layers
    double = [c.intermediate_size * (2 if i >= first else 1) for i in range(c.num_hidden_layers)]
    experts = {
        **{"expert_count": c.num_experts, "expert_used_count": c.top_k_experts},
        "expert_feed_forward_length": c.moe_intermediate_size,
    }
    fields = config_fields(near) | {
        "attention.head_count_kv": [(near if one else wide).num_key_value_heads for one in slides],
        "feed_forward_length": double if c.use_double_wide_mlp else c.intermediate_size,
        **{"attention.sliding_window": c.sliding_window, "attention.sliding_window_pattern": slides},
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), wide.head_dim),
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), near.head_dim
        ),
        **{"rope.freq_base": 1000000.0, "rope.freq_base_swa": 10000.0},
        **{"final_logit_softcapping": c.final_logit_softcapping, "attention.shared_kv_layers": c.num_kv_shared_layers},
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input,
        **(experts if c.enable_moe_block else {}),
    }
    turning = torch.tensor([1.0] * (wide.head_dim // 8) + [1e30] * (wide.head_dim * 3 // 8))
    tensors = {name_in_file(name): x for name, x in theirs.state_dict().items() if name != "lm_head.weight"}
    tensors["rope_freqs.weight"] = turning if factors is None else factors
    write_file(path, "gemma4", fields, tensors.items())


@pytest.mark.parametrize("case", GEMMA4)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs, _ = models(case)
    write(tmp_path / "m.gguf", theirs)
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    ours = Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(70)
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))


def test_wavelengths_that_are_neither_turned_nor_still_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", models("gemma4, large")[0], torch.tensor([1.0, 1.0, 4.0, 1e30, 1e30, 1e30, 1e30, 1e30]))
    with pytest.raises(UnsupportedModel, match="scales some rotary wavelengths"):
        open_gguf(tmp_path / "m.gguf")
