"""What runs which family: Paceline itself, transformers, or nothing. `python -m tests.models.test_coverage` writes the
table of docs/reference/models.md."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UnsupportedModel
from paceline.models.families import FAMILIES, read_config
from tests.support.lazy import transformers

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

SIZES: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 8},
    **{"num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 256, "pad_token_id": 0},
}
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "shared_expert_intermediate_size": 24,
    },
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
SLIDES: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OLDER = {"n_embd": 48, "n_layer": 2, "n_head": 6}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Arcee": ("Arcee", {}),
    "Apertus": ("Apertus", {}),
    "Bloom": ("Bloom", {"n_layer": 2, "n_head": 6}),
    "Bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "Command R (Cohere)": ("Cohere", {}),
    "Command R7B, A (Cohere 2)": ("Cohere2", SLIDES),
    "DeepSeek V2": ("DeepseekV2", {**EXPERTS, **LATENT, "num_key_value_heads": 6}),
    "DeepSeek V3, R1, Kimi K2": ("DeepseekV3", {**EXPERTS, **LATENT, "num_key_value_heads": 6}),
    "ERNIE 4.5": ("Ernie4_5", {}),
    "ERNIE 4.5, experts": ("Ernie4_5_Moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "EXAONE 4": ("Exaone4", {**SLIDES, "sliding_window_pattern": 2}),
    "Falcon-H1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 96}),
    "Gemma 1": ("Gemma", {}),
    "Gemma 2": ("Gemma2", SLIDES),
    "Gemma 3 (text)": ("Gemma3Text", SLIDES),
    "Gemma 4 (text)": ("Gemma4Text", {**SLIDES, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101}),
    "GLM-4 (2024)": ("Glm", {}),
    "GLM-4": ("Glm4", {}),
    "GLM-4.5 to 4.7": ("Glm4Moe", EXPERTS),
    "GLM-4.7-Flash": ("Glm4MoeLite", {**EXPERTS, **LATENT, "num_key_value_heads": 6}),
    "GPT-2": ("GPT2", OLDER),
    "GPT-J": ("GPTJ", {**OLDER, "rotary_dim": 8}),
    "GPT-NeoX, Pythia": ("GPTNeoX", {}),
    "gpt-oss": ("GptOss", {**EXPERTS, **SLIDES}),
    "Granite 3": ("Granite", {}),
    "Granite 3, experts": ("GraniteMoe", EXPERTS),
    "Granite 4": ("GraniteMoeHybrid", {**MAMBA, "layer_types": ["linear_attention", "full_attention"]}),
    "Helium": ("Helium", {}),
    "Hunyuan (dense)": ("HunYuanDenseV1", {}),
    "Llama 1 to 3.x": ("Llama", {}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "LFM2, experts": ("Lfm2Moe", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "Llama 4 (text)": ("Llama4Text", {**EXPERTS, "intermediate_size_mlp": 80, "attention_chunk_size": 32}),
    "Mamba": ("Mamba", {}),
    "Mamba 2, Codestral Mamba": ("Mamba2", {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 1}),
    "MiniMax Text 01, M1": ("MiniMax", EXPERTS),
    "Ministral": ("Ministral", SLIDES),
    "Mistral": ("Mistral", {"sliding_window": 16}),
    "Mixtral": ("Mixtral", EXPERTS),
    "MPT": ("Mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 256}),
    "Nemotron": ("Nemotron", {}),
    "Nemotron-H, Nemotron 2 and 3 Nano": (
        "NemotronH",
        {**EXPERTS, **NEMOTRON, "layer_types": ["linear_attention", "moe"], "moe_shared_expert_intermediate_size": 24},
    ),
    "OLMo": ("Olmo", {}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": ("Olmo3", SLIDES),
    "OLMoE": ("Olmoe", EXPERTS),
    "OPT": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "Phi-1, Phi-2": ("Phi", {}),
    "Phi-3, Phi-4, Phi-4-mini": ("Phi3", {}),
    "Phi-3.5, experts": ("Phimoe", EXPERTS),
    "Qwen1.5, Qwen2, experts": ("Qwen2Moe", EXPERTS),
    "Qwen2, Qwen2.5": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3, experts": ("Qwen3Moe", EXPERTS),
    "Qwen3-VL (text)": ("Qwen3VLText", {}),
    "Qwen3-Next": ("Qwen3Next", {**EXPERTS, **DELTA}),
    "Qwen3.5": ("Qwen3_5Text", DELTA),
    "Qwen3.5, experts": ("Qwen3_5MoeText", {**EXPERTS, **DELTA}),
    "Seed-OSS": ("SeedOss", {}),
    "SmolLM3": ("SmolLM3", {}),
    "StableLM": ("StableLm", {}),
    "StarCoder2": ("Starcoder2", {}),
}
"""Models -> transformers' name of their class, and what makes a small one."""


def runner(name: str) -> tuple[str, str]:
    """The model type, and what runs such a model with random weights: as `load` decides and checks."""
    from paceline.models.transformers import CausalLM

    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model_type = str(config.model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_config(config.to_dict())
            return model_type, "Paceline"
        except UnsupportedModel:
            pass
        try:
            torch.manual_seed(0)
            trees = CausalLM(transformers.AutoModelForCausalLM.from_config(config).eval()).trees
        except UnsupportedModel as error:
            return model_type, f"nothing: {error.cause.partition(' ')[2]}"
    return model_type, "transformers" if trees else "transformers, chains only"


def table() -> str:
    rows = [(name, *runner(name)) for name in MODELS]
    lines = [f"| {name} | `{model_type}` | {what} |" for name, model_type, what in rows]
    return "\n".join([BEGIN, "", "| models | `model_type` | run by |", "|---|---|---|", *lines, "", END])


def test_the_table_of_the_docs_is_what_runs() -> None:
    found = re.search(f"{BEGIN}.*{END}", PAGE.read_text(), re.DOTALL)
    assert found
    assert found[0] == table(), "write it again: python -m tests.models.test_coverage"


def test_every_native_family_is_in_the_table() -> None:
    kinds = {getattr(transformers, f"{kind}Config").model_type for kind, _ in MODELS.values()}
    others = {"kimi_k2", "mimo"}  # names for DeepSeek V3 and Qwen2
    assert kinds | others >= {*FAMILIES}


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table(), page, flags=re.DOTALL))
