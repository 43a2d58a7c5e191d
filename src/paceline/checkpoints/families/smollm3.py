"""SmolLM3: every fourth layer encodes no positions, and only such a layer may have a sliding window."""

from __future__ import annotations

from paceline.checkpoints.family import Family, GGUFLayout, Raw
from paceline.checkpoints.layer_plans import layer_windows, rotates_by_interval, with_layers
from paceline.files.schema import FLAG, NULL, integer, list_of
from paceline.models.config import ModelConfig


def _smollm3(raw: Raw, base: ModelConfig) -> ModelConfig:
    rotates = rotates_by_interval(raw, base)
    window = raw.get("sliding_window") if raw["use_sliding_window"] else None
    windows = layer_windows(raw, base, window, lambda i: window is not None and not rotates[i])
    return with_layers(base, windows, [base.rope if one else None for one in rotates])


FAMILIES = (
    Family(
        "smollm3",
        "SmolLM3",
        {
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        {
            "use_sliding_window": FLAG | NULL,
            "no_rope_layers": list_of(integer(0, 1)) | NULL,
            "no_rope_layer_interval": integer(1),
        },
        _smollm3,
        gguf=(GGUFLayout("smollm3", interleaved=True),),
        goldens={
            "smollm3": {"mlp_bias": True, "attention_bias": True, "no_rope_layer_interval": 2},
            "smollm3, sliding": {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 20},
        },
    ),
)
