"""StarCoder 2: layer norms, feed-forward networks without a gate, and biases, which are detected from the tensors."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import Family, GGUFLayout, Raw
from paceline.checkpoints.layer_plans import windows_everywhere
from paceline.files.schema import EPS
from paceline.models.config import ModelConfig, NormConfig


def _starcoder2(raw: Raw, base: ModelConfig) -> ModelConfig:
    base = windows_everywhere(raw, base)
    return replace(base, gated_mlp=False, norms=NormConfig(raw["norm_epsilon"], "layer"))


FAMILIES = (
    Family(
        "starcoder2",
        "StarCoder2",
        {
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": None,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        {"norm_epsilon": EPS},
        _starcoder2,
        names={".mlp.c_fc.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj."},
        gguf=(
            GGUFLayout(
                "starcoder2",
                read=lambda meta, config: {"norm_epsilon": config["rms_norm_eps"], "hidden_act": "gelu_pytorch_tanh"},
            ),
        ),
        goldens={"starcoder2": {}, "starcoder2, sliding": {"sliding_window": 21, "use_bias": False}},
    ),
)
