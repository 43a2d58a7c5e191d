"""The runner of each family: Paceline itself, transformers, or none. `python -m tests.models.test_coverage` writes the
table in docs/reference/models.md."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.registry import FAMILIES
from paceline.errors import UnsupportedModel
from tests.support.lazy import transformers
from tests.support.tiny_families import CASES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

SIZES: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 8},
    **{"num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 256, "pad_token_id": 0},
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 24,
}
OLDER = {"n_embd": 48, "n_layer": 2, "n_head": 6}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Apertus": ("apertus", {}),
    "Bloom": ("bloom", {"n_layer": 2, "n_head": 6}),
    "ERNIE 4.5, experts": ("ernie4_5_moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "GPT-2": ("gpt2", OLDER),
    "GPT-J": ("gptj", {**OLDER, "rotary_dim": 8}),
    "Granite 3, experts": ("granitemoe", EXPERTS),
    "Mamba": ("mamba", {}),
    "MiniMax Text 01, M1": ("minimax", EXPERTS),
    "MPT": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 256}),
    "Nemotron": ("nemotron", {}),
    "OLMo": ("olmo", {}),
    "OPT": ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "Phi-3.5, experts": ("phimoe", EXPERTS),
    "Qwen1.5, Qwen2, experts": ("qwen2_moe", EXPERTS),
}
"""Models without a native implementation -> their model type, and sizes for a small one."""
MODELS: dict[str, dict[str, Any]] = {
    **{
        family.title: CASES[next(iter(family.goldens))] if family.goldens else {**SIZES, "model_type": family.name}
        for family in FAMILIES.values()
        if family.title
    },
    **{title: {**SIZES, **changes, "model_type": name} for title, (name, changes) in OTHERS.items()},
}


def runner(title: str) -> tuple[str, str]:
    """Return the model type, and the runner that `load` chooses and checks for such a model with random weights."""
    from paceline.models.transformers import CausalLM

    config = transformers.AutoConfig.for_model(**deepcopy(MODELS[title]))
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
    rows = [(title, *runner(title)) for title in sorted(MODELS, key=str.lower)]
    lines = [f"| {title} | `{model_type}` | {what} |" for title, model_type, what in rows]
    return "\n".join([BEGIN, "", "| models | `model_type` | run by |", "|---|---|---|", *lines, "", END])


def test_the_table_in_the_docs_matches_the_code() -> None:
    found = re.search(f"{BEGIN}.*{END}", PAGE.read_text(), re.DOTALL)
    assert found
    assert found[0] == table(), "write it again: python -m tests.models.test_coverage"


def test_every_native_family_has_a_golden_test_or_is_an_alias() -> None:
    aliases = {"kimi_k2", "mimo"}  # DeepSeek V3; Qwen2
    aliases |= {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}  # tests/vision compares them with images
    assert {name for name, family in FAMILIES.items() if not family.goldens} == aliases


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table(), page, flags=re.DOTALL))
