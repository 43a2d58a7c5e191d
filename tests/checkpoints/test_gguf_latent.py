"""Latent attention from GGUF files in the layout of llama.cpp's `conversion/deepseek.py`, against transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.model_config import read_config
from paceline.errors import UnsupportedModel
from paceline.models.decoder import Decoder
from tests.support.gguf_writing import config_fields, rope_scaling_fields, stored_name, write_file
from tests.support.golden import models
from tests.support.logits import assert_close, expected, feed, text
from tests.support.mtp_reference import Reference

CASES = ["deepseek v2", "deepseek v2, no query latent, groups, stretched", "deepseek v3", "glm 4.7 flash"]


def laid_out(c: Any, tensors: Mapping[str, Tensor], split: bool) -> Iterator[tuple[str, Tensor]]:
    """Return tensors by the converter's names. `split` stores the latents' keys and values in stacks by head."""
    for source, x in tensors.items():
        name = source.replace("correction_bias", "correction.bias")
        if found := re.fullmatch(r"(.*)\.experts\.gate_up_proj", name):
            gate, up = x.chunk(2, 1)
            yield f"{found[1]}.experts.gate_proj.weight", gate
            yield f"{found[1]}.experts.up_proj.weight", up
        elif name.endswith("kv_b_proj.weight") and split:
            both = x.view(c.num_attention_heads, -1, c.kv_lora_rank)
            yield name.replace("kv_b", "k_b"), both[:, : c.qk_nope_head_dim].transpose(1, 2)
            yield name.replace("kv_b", "v_b"), both[:, c.qk_nope_head_dim :]
        else:
            yield name + (".weight" if name.endswith("experts.down_proj") else ""), x


def write(path: Path, theirs: Any, split: bool, mtp: Mapping[str, Tensor] | None = None, **changes: Any) -> None:
    """`mtp`: the layer that predicts later tokens, by the names of DeepSeek's files. `changes`: of the metadata."""
    c, layers = theirs.config, theirs.config.num_hidden_layers + bool(mtp)
    rope, sigmoid = c.rope_parameters, c.model_type != "deepseek_v2"
    key, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    fields = config_fields(c) | {
        **{"block_count": layers, "nextn_predict_layers": int(bool(mtp)), "vocab_size": c.vocab_size},
        **{"attention.kv_lora_rank": c.kv_lora_rank, "attention.q_lora_rank": c.q_lora_rank},
        "attention.head_count_kv": 1 if split else c.num_attention_heads,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim if split else key,
        "attention.value_length": c.kv_lora_rank if split else value,
        **({"attention.key_length_mla": key, "attention.value_length_mla": value} if split else {}),
        **{"rope.dimension_count": c.qk_rope_head_dim, "leading_dense_block_count": 1},
        **{"expert_count": c.n_routed_experts, "expert_used_count": c.num_experts_per_tok},
        **{"expert_shared_count": c.n_shared_experts, "expert_feed_forward_length": c.moe_intermediate_size},
        **{"expert_weights_scale": c.routed_scaling_factor, "expert_gating_func": 2 if sigmoid else 1},
        **({"expert_weights_norm": True} if sigmoid else {}),
        **{"expert_group_count": c.n_group or 1, "expert_group_used_count": c.topk_group or 1},
        **rope_scaling_fields(rope),
    }
    if rope["rope_type"] == "yarn":
        fields["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    named = []
    for name, x in laid_out(c, {**theirs.state_dict(), **(mtp or {})}, split):
        found = re.fullmatch(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight", name)
        own = f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}.weight" if found else None
        named.append((own or stored_name("deepseek2", name), x))
    write_file(path, "deepseek2", fields | changes, named)


def opened(path: Path) -> Decoder:
    config, tensors, _ = open_gguf(path)
    return Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("split", [True, False], ids=["stacks by head", "one matrix"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, split: bool, tmp_path: Path) -> None:
    theirs, tokens = models(case)[0], text(70)
    write(tmp_path / "m.gguf", theirs, split)
    ours = opened(tmp_path / "m.gguf")
    cache = ours.new_cache()
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))


def test_a_matrix_is_taken_where_there_are_stacks_too(tmp_path: Path) -> None:
    theirs, tokens = models("deepseek v2")[0], text(20)
    write(tmp_path / "m.gguf", theirs, False)
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    stacks = {f"model.layers.{i}.self_attn.{x}_b_proj.weight": torch.zeros(3) for i in range(4) for x in "kv"}
    ours = Decoder(read_config(config), {**tensors, **stacks}, torch.float64, torch.device("cpu"))
    cache = ours.new_cache()
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))


def test_a_bias_of_the_experts_tells_v3_where_the_metadata_does_not(tmp_path: Path) -> None:
    for case, family in (("deepseek v3", "deepseek_v3"), ("deepseek v2", "deepseek_v2")):
        write(tmp_path / "m.gguf", models(case)[0], True, expert_gating_func=None)
        assert opened(tmp_path / "m.gguf").config.family == family


def test_queries_scaled_by_position_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", models("deepseek v3")[0], True, **{"attention.temperature_scale": 0.1})
    with pytest.raises(UnsupportedModel, match="by their position"):
        open_gguf(tmp_path / "m.gguf")


def test_the_mtp_layer_equals_the_layer_of_the_safetensors(tmp_path: Path) -> None:
    truth = Reference("deepseek v3")
    truth.save(tmp_path / "folder")
    write(tmp_path / "m.gguf", truth.model, False, truth.tensors(stacked=True))
    folder, file = open_head(tmp_path / "folder"), open_head(tmp_path / "m.gguf")
    assert file.config.layer.plan == folder.config.layer.plan
    assert {*file.tensors} == {*folder.tensors}
    for name in folder.tensors:
        torch.testing.assert_close(file.tensors[name].double(), folder.tensors[name].double(), msg=name)
