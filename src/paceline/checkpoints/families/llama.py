"""Llama 1 to 3. Biases and fused projections are detected in the tensors."""

from __future__ import annotations

from paceline.checkpoints.family import LAYER, Family, GGUFLayout, Raw, experts_named
from paceline.checkpoints.gguf_metadata import Config, Metadata


def _read(meta: Metadata, config: Config) -> Config:
    """Distinguish Llama from Mistral and Mixtral by windows and experts, because GGUF files call all of them llama."""
    if meta.get("expert_count", 0):
        return {
            "model_type": "mixtral",
            "num_local_experts": meta["expert_count"],
            "num_experts_per_tok": meta["expert_used_count"],
        }
    return {"model_type": "mistral" if config["sliding_window"] else "llama"}


_GGUF = GGUFLayout(
    "llama",
    {**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts_named("block_sparse_moe.experts", ("w1", "w3", "w2")),
    interleaved=True,
    read=_read,
)
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 5.0, 12.0],
    "factor": 3.0,
    "original_max_position_embeddings": 40,
    "rope_theta": 5e3,
}
_GOLDENS: dict[str, Raw] = {
    "llama tied": {"tie_word_embeddings": True},
    "llama untied, many heads": {"num_key_value_heads": 6, "tie_word_embeddings": False},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama 3 rope": {"rope_parameters": _LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "own head size": {"head_dim": 16},
    "yarn": {"rope_parameters": _YARN},
    "yarn, own temperature": {
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False, "beta_fast": 16.0}
    },
    "longrope": {"rope_parameters": _LONGROPE},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 40},
}

FAMILIES = (
    Family(
        "llama",
        "Llama 1 to 3.x",
        names={"model.text_model.": "model."},
        part_of=("idefics3", "smolvlm"),
        gguf=(_GGUF,),
        goldens=_GOLDENS,
    ),
)
