"""Families with recurrent layers against transformers, on tiny random models read back from disk."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoints.checkpoint import open_weights
from paceline.models.decoder import Decoder
from paceline.models.families import read_config
from paceline.models.hybrids import text_config
from paceline.models.tensor_names import translated
from tests.models.test_families import check_chunks, check_drafts, feed, text

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
LFM2: dict[str, Any] = {"head_dim": 12, "full_attn_idxs": [1], "block_multiple_of": 16}
TYPES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]

MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4},
}
GRANITE: dict[str, Any] = {
    **{**MAMBA, "layer_types": TYPES, "shared_intermediate_size": 56, "num_local_experts": 0},
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5},
}
FALCON: dict[str, Any] = {**MAMBA, "mamba_d_ssm": 96, "mamba_proj_bias": True, "projectors_bias": True}
MULTIPLIERS: dict[str, Any] = {
    **{"embedding_multiplier": 2.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "attention_in_multiplier": 1.3},
    **{"attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8},
    **{"mlp_multipliers": [0.9, 1.4], "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 1.1]},
}
NEMOTRON: dict[str, Any] = {
    **{"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "mlp_hidden_act": "relu2"},
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.7},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-2": ("Mamba2", {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2}),
    "mamba-2 with biases, one group": (
        "Mamba2",
        {"num_heads": 3, "head_dim": 32, "state_size": 5, "n_groups": 1, "use_bias": True, "use_conv_bias": False},
    ),
    "granite 4": ("GraniteMoeHybrid", GRANITE),
    "granite 4, experts, positions": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "position_embedding_type": "rope"},
    ),
    "granite 4, attention alone": (
        "GraniteMoeHybrid",
        {**GRANITE, "layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
    ),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1", {**FALCON, **MULTIPLIERS}),
    "falcon-h1, normed": ("FalconH1", {**FALCON, "mamba_rms_norm": True, "attention_bias": True}),
    "falcon-h1, normed after its gate": (
        "FalconH1",
        {**FALCON, **MULTIPLIERS, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron-h": (
        "NemotronH",
        {**NEMOTRON, "layer_types": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
    ),
    "nemotron-h, experts": (
        "NemotronH",
        {**NEMOTRON, "layer_types": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]},
    ),
    "lfm2 moe": (
        "Lfm2Moe",
        {**LFM2, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    ),
    "qwen3 next": ("Qwen3Next", {**EXPERTS, "layer_types": TYPES, "decoder_sparse_step": 2}),
    "qwen3 next, experts of unscaled weights": ("Qwen3Next", {**EXPERTS, "norm_topk_prob": False}),
    "qwen3.5": ("Qwen3_5Text", {}),
    "qwen3.5, as many key heads": ("Qwen3_5Text", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2}),
    "lfm2": ("Lfm2", {**LFM2, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "lfm2 with biases, own width": ("Lfm2", {**LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "qwen3.5 moe": ("Qwen3_5MoeText", {**EXPERTS, "layer_types": TYPES}),
}


@cache
def models(case: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Decoder]:
    """transformers' model, and ours from what it saves."""
    name, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**{**SIZES, **changes})
    theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for key, parameter in theirs.named_parameters():  # transformers starts norms and steps at 0 or 1
        if parameter.dim() == 1 and "A_log" not in key:
            torch.nn.init.normal_(parameter, float("linear_attn.norm" in key or "Qwen" not in name), 0.3)
    for key, buffer in theirs.named_buffers():
        if key.endswith(("expert_bias", "e_score_correction_bias")):
            torch.nn.init.normal_(buffer, 0.0, 0.3)
    theirs = theirs.to(dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        raw = json.loads((Path(folder) / "config.json").read_text())
        tensors = translated(raw, load_file(Path(folder) / "model.safetensors"))
        return theirs, Decoder(read_config(raw), tensors, dtype, CPU)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_chunks_and_token_by_token(case: str) -> None:
    check_chunks(*models(case), 150, (100, 102, 135))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [47, 253])
def test_a_drafted_nodes_logits_are_those_of_its_path(case: str, length: int) -> None:
    theirs, ours = models(case)
    tokens = text(length)
    cache = ours.new_cache()
    slot = cache.acquire(length)
    feed(ours, cache, slot, tokens)
    check_drafts(theirs, ours, cache, slot, tokens, rows=(2, 5, 7, 8))


def test_a_model_that_also_sees_runs_as_a_language_model(tmp_path: Path) -> None:
    """The names of Qwen3.5's files, which stack the experts and hold layers that predict later tokens."""
    theirs, ours = models("qwen3.5 moe")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    outer |= {"text_config": config, "vision_config": {"depth": 2}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in theirs.state_dict().items()}
    assert any("experts.gate_up_proj" in name for name in tensors)
    tensors |= {"model.visual.patch_embed.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file({name: x.clone() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    config = text_config(json.loads((tmp_path / "config.json").read_text()))
    weights = open_weights(tmp_path, "model.safetensors", "", False)
    again = Decoder(read_config(config), translated(config, weights), torch.float64, CPU)
    tokens = text(9)
    caches = [model.new_cache() for model in (ours, again)]
    one, other = (feed(m, c, c.acquire(), tokens) for m, c in zip((ours, again), caches, strict=True))
    assert torch.equal(one, other)
