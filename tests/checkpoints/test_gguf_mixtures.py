"""Mixtures that score experts independently, from GGUF files with the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.model_config import read_config
from paceline.models.decoder import Decoder
from tests.support.gguf_writing import config_fields, rope_tensors, stored_name, write_file
from tests.support.golden import models
from tests.support.logits import assert_close, expected, feed, text
from tests.support.mtp_reference import Reference

CASES = {"glm4.5": "glm4moe", "glm4.5 without groups": "glm4moe", "llama4 as published": "llama4"}
CASES["llama4 without experts"] = "llama4"


def write(path: Path, arch: str, theirs: Any, later: Mapping[str, Tensor]) -> None:
    """`later`: the layer that predicts later tokens, by the names of the family's files; empty for none."""
    c = theirs.config
    fields = config_fields(c) | (_llama4(c) if arch == "llama4" else _glm4_moe(c))
    if later:
        fields |= {"block_count": c.num_hidden_layers + 1, "nextn_predict_layers": 1}
    parts = (split(name, tensor, arch == "llama4") for name, tensor in {**theirs.state_dict(), **later}.items())
    named = ((stored_name(arch, name), x) for part in parts for name, x in part.items())
    write_file(path, arch, fields, [*named, *rope_tensors(c)])


def _llama4(c: Any) -> dict[str, Any]:
    return {
        **{"feed_forward_length": c.intermediate_size_mlp, "expert_feed_forward_length": c.intermediate_size},
        **{"rope.dimension_count": c.head_dim, "interleave_moe_layer_step": c.interleave_moe_layer_step},
        **{"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok},
        "attention.sliding_window": None if c.num_local_experts else 0,
    }


def _glm4_moe(c: Any) -> dict[str, Any]:
    groups = {"expert_group_count": c.n_group, "expert_group_used_count": c.topk_group}
    return {
        **{"expert_feed_forward_length": c.moe_intermediate_size, "rope.dimension_count": c.head_dim // 2},
        **{"expert_count": c.n_routed_experts, "expert_used_count": c.num_experts_per_tok},
        **{"expert_shared_count": c.n_shared_experts, "leading_dense_block_count": c.first_k_dense_replace},
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        **{"expert_weights_scale": c.routed_scaling_factor, "expert_weights_norm": c.norm_topk_prob},
        **(groups if c.n_group > 1 else {}),
    }


def split(name: str, tensor: Tensor, turned: bool) -> dict[str, Tensor]:
    """By the names that the converter looks up. `turned`: stacks are [experts, in, out]."""
    block, _, part = name.rpartition(".")
    tensor = tensor.transpose(1, 2) if turned and tensor.ndim == 3 else tensor
    if part == "gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        return {f"{block}.gate_proj.weight": gate, f"{block}.up_proj.weight": up}
    if part == "down_proj":
        return {f"{name}.weight": tensor}
    return {name.replace("correction_bias", "correction.bias"): tensor}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs, _ = models(case)
    write(tmp_path / "m.gguf", CASES[case], theirs, {})
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    ours = Decoder(read_config(config), tensors, torch.float64, torch.device("cpu"))
    cache, tokens = ours.new_cache(), text(70)
    assert_close(feed(ours, cache, cache.acquire(), tokens), expected(theirs, tokens))


def test_the_mtp_layer_equals_the_layer_of_the_safetensors(tmp_path: Path) -> None:
    truth = Reference("glm4.5")
    truth.save(tmp_path / "folder")
    write(tmp_path / "m.gguf", "glm4moe", truth.model, truth.tensors(stacked=True))
    folder, file = open_head(tmp_path / "folder"), open_head(tmp_path / "m.gguf")
    assert file.config.layer.plan == folder.config.layer.plan
    assert file.config.layer.mixture == folder.config.layer.mixture
    assert {*file.tensors} == {*folder.tensors}
    for name in folder.tensors:
        torch.testing.assert_close(file.tensors[name].double(), folder.tensors[name].double(), msg=name)
