"""Hybrids from GGUF files in the layout of llama.cpp's `conversion/qwen.py`, compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.model_config import read_config
from paceline.errors import CorruptModel
from paceline.models.decoder import Decoder
from tests.support.gguf_writing import config_fields, stored_name, write_file
from tests.support.golden import models
from tests.support.logits import expected, feed, text
from tests.support.mtp_reference import Reference

ARCHITECTURES = {
    "qwen35": "qwen3.5",
    "qwen35moe": "qwen3.5 moe",
    "qwen3next": "qwen3 next, experts of unscaled weights",
}
NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
NAMES |= {f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")}
NAMES |= {f"mlp.shared_expert.{x}_proj.weight": f"ffn_{x}_shexp.weight" for x in ("gate", "up", "down")}
NAMES |= {f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"}
NAMES |= {"self_attn.o_proj.weight": "attn_output.weight"}
NAMES |= {f"self_attn.{x}_norm.weight": f"attn_{x}_norm.weight" for x in "qk"}
NAMES |= {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight"}
NEXT = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head_norm.weight",
}


def laid_out(c: Any, tensors: dict[str, Tensor], tiled: bool) -> Iterator[tuple[str, Tensor]]:
    values, keys = c.linear_num_value_heads, c.linear_num_key_heads
    kd, vd, each = c.linear_key_head_dim, c.linear_value_head_dim, values // keys
    for name, x in tensors.items():
        if name.startswith("mtp."):
            _, part = name.split(".", 1)
            last = f"blk.{c.num_hidden_layers}."
            if part in NEXT:
                yield f"{last}nextn.{NEXT[part]}", x + 1 if "norm" in part else x
                continue
            name = name.replace("mtp.layers.0", f"model.layers.{c.num_hidden_layers}")
        if not name.startswith("model.layers."):
            yield (
                {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}.get(
                    name, "output_norm.weight"
                ),
                x + 1 if name == "model.norm.weight" else x,
            )
            continue
        _, _, layer, part = name.split(".", 3)
        own = part.removeprefix("linear_attn.")
        if part.endswith("norm.weight") and own == part:
            x = x + 1
        if own == "A_log":
            x = -x.exp()
        if own == "conv1d.weight":
            x = x.squeeze(1)
        if part == "mlp.experts.gate_up_proj":
            gate, up = x.chunk(2, 1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
            continue
        if own == "in_proj_qkvz.weight":
            q, k, v, z = x.view(keys, -1, x.shape[1]).split([kd, kd, each * vd, each * vd], 1)
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([one.flatten(0, 1) for one in (q, k, v)])
            yield f"blk.{layer}.attn_gate.weight", z.flatten(0, 1)
            continue
        if tiled and own != part:
            order = torch.arange(values * vd).view(keys, each, vd).transpose(0, 1).flatten()
            if own in ("in_proj_qkv.weight", "conv1d.weight"):
                x = torch.cat([x[: 2 * keys * kd], x[2 * keys * kd :][order]])
            elif own == "in_proj_z.weight":
                x = x[order]
            elif own == "out_proj.weight":
                x = x[:, order]
            elif own != "norm.weight":
                x = x[torch.arange(values).view(keys, each).T.flatten()]
        yield f"blk.{layer}.{NAMES[own]}", x


def write(path: Path, arch: str, theirs: Any, mtp: dict[str, Tensor] | None = None) -> None:
    """Write a file. `mtp` has the tensors of the MTP layer by the names of Qwen's files; None truncates the layer."""
    c, mixture = theirs.config, "moe" in arch or arch == "qwen3next"
    experts = (
        {
            **{"feed_forward_length": None, "expert_feed_forward_length": c.moe_intermediate_size},
            **{"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok},
            "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        }
        if mixture
        else {}
    )
    recurrent = [kind == "linear_attention" for kind in c.layer_types]
    fields = (
        config_fields(c)
        | experts
        | {
            **{"block_count": c.num_hidden_layers + 1, "nextn_predict_layers": 1},  # and one that predicts later tokens
            "rope.dimension_count": c.head_dim // 4,
            **{"ssm.conv_kernel": c.linear_conv_kernel_dim, "ssm.state_size": c.linear_key_head_dim},
            **{"ssm.group_count": c.linear_num_key_heads, "ssm.time_step_rank": c.linear_num_value_heads},
            "ssm.inner_size": c.linear_value_head_dim * c.linear_num_value_heads,
            **({"full_attention_interval": 4} if arch == "qwen3next" else {}),
            **({} if arch == "qwen3next" else {"attention.recurrent_layers": [*recurrent, False]}),
        }
    )
    mtp = mtp or {"mtp.fc.weight": torch.zeros(4, 4)}
    write_file(path, arch, fields, laid_out(c, {**theirs.state_dict(), **mtp}, arch != "qwen3next"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_equal_transformers(arch: str, tmp_path: Path) -> None:
    theirs = deepcopy(models(ARCHITECTURES[arch])[0])
    if arch == "qwen3next":  # files do not say so, and all models do
        theirs.config.norm_topk_prob = True
        for layer in theirs.model.layers:
            layer.mlp.gate.norm_topk_prob = True
    write(tmp_path / "m.gguf", arch, theirs)
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    ours = Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(70)
    logits = feed(ours, cache, cache.acquire(), tokens)
    truth = expected(theirs, tokens)
    assert float((logits - truth).norm() / truth.norm()) < 1e-4, "the file is in float32"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_mtp_layer_equals_the_layer_of_the_safetensors(arch: str, tmp_path: Path) -> None:
    truth = Reference(ARCHITECTURES[arch])
    truth.save(tmp_path / "folder")
    write(tmp_path / "m.gguf", arch, truth.model, truth.tensors(stacked=True))
    folder, file = open_head(tmp_path / "folder"), open_head(tmp_path / "m.gguf")
    assert file.config.layer.plan == folder.config.layer.plan
    assert {*file.tensors} == {*folder.tensors}
    for name in folder.tensors:
        torch.testing.assert_close(file.tensors[name].double(), folder.tensors[name].double(), msg=name)


def test_short_convolutions(tmp_path: Path) -> None:
    """LFM2 in the layout of `conversion/lfm2.py`: layers without key heads have no attention."""
    theirs, _ = models("lfm2")
    c, tensors = theirs.config, theirs.state_dict()
    fields = config_fields(c) | {
        "attention.head_count_kv": [c.num_key_value_heads if kind != "conv" else 0 for kind in c.layer_types],
        **{"attention.layer_norm_rms_epsilon": c.norm_eps, "shortconv.l_cache": c.conv_L_cache},
        **{"attention.key_length": None, "attention.value_length": None},
        "feed_forward_length": len(tensors["model.layers.0.feed_forward.w1.weight"]),
    }
    named = (
        (stored_name("lfm2", name), x.squeeze(1) if "conv.conv" in name else x)
        for name, x in tensors.items()
        if name != "lm_head.weight"
    )
    write_file(tmp_path / "m.gguf", "lfm2", fields, named)
    config, found, _ = open_gguf(tmp_path / "m.gguf")
    ours = Decoder(read_config(config), found, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(70)
    logits, truth = feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens)
    assert float((logits - truth).norm() / truth.norm()) < 1e-4, "the file is in float32"


def test_a_state_beyond_any_model_is_refused() -> None:
    raw = {
        "model_type": "qwen3_5_text",
        "hidden_size": 8,
        "vocab_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "linear_num_value_heads": 4096,
        "linear_value_head_dim": 4096,
    }
    with pytest.raises(CorruptModel, match="heads=4096"):
        read_config(raw)
    with pytest.raises(CorruptModel, match="key_heads=2, heads=3"):
        read_config(raw | {"linear_num_value_heads": 3, "linear_num_key_heads": 2})
    with pytest.raises(CorruptModel, match="layer_types names 3 of 4"):
        read_config(
            raw | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "layer_types": ["full_attention"] * 3}
        )
