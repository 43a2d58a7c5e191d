"""Qwen2, Qwen3 (dense and with experts), the language models of Qwen2-VL and Qwen3-VL, and MiMo, which is Qwen2 with an
MTP layer."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import LAYER, MIXTURE_KEYS, QK_NORMS, Family, GGUFLayout, Raw, experts_named
from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.checkpoints.layer_plans import layer_windows, sparse_layers, with_layers
from paceline.errors import CorruptModel
from paceline.files.schema import FIX_INVALID_FILE, FLAG, NULL, check_value, integer, list_of
from paceline.models.config import MixtureConfig, ModelConfig
from paceline.models.rope import scaling_of

LANGUAGE = {"model.language_model.": "model."}
"""Prefix of tensor names in multimodal models -> the language model's prefix."""
_SLIDES = {"use_sliding_window": FLAG | NULL}
_KEYS = {**_SLIDES, "max_window_layers": integer()}
_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


def text_axes(scaling: Raw) -> Raw:
    """Remove the keys that assign rotary planes to the axes of images. In text, the position is the same on all
    axes."""
    own = {key: value for key, value in scaling.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: value for key, value in own.items() if value != "mrope"}


def with_axes(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Assign the rotary planes to the axes of images: section by section, or alternating (Qwen3-VL and later)."""
    scaling = scaling_of(raw)
    sections, count = scaling.get("mrope_section"), int(base.head_dim * base.rope.share) // 2
    if not sections:
        return base
    check_value("config.json", "mrope_section", sections, list_of(integer(0, count)))
    if len(sections) != 3 or sum(sections) != count:
        raise CorruptModel(f"mrope_section {sections} does not fit {count} rotary planes", FIX_INVALID_FILE)
    if scaling.get("mrope_interleaved"):
        axes = tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count))
    else:
        axes = tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return replace(base, rope=replace(base.rope, axes=axes))


def read_axes(meta: Metadata, config: Config) -> Config:
    """Read the sections of M-RoPE. The axes' planes alternate in all models that have a GGUF layout."""
    sections = meta.get("rope.dimension_sections")
    if not sections:
        return {}
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    return {"rope_scaling": {**scaling, "mrope_section": sections[:3], "mrope_interleaved": True}}


def _read_axes_apart(meta: Metadata, config: Config) -> Config:
    """Read the sections of M-RoPE. The planes of each axis are consecutive."""
    found = read_axes(meta, config)
    return found and {"rope_scaling": {**found["rope_scaling"], "mrope_interleaved": False}}


def _qwen2_vl(raw: Raw, base: ModelConfig) -> ModelConfig:
    return _qwen2(raw, with_axes(raw, base))


def _qwen3_vl(raw: Raw, base: ModelConfig) -> ModelConfig:
    return normed(raw, with_axes(raw, base))


def _qwen2(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add sliding windows. Only upper layers have them."""
    window, first = raw["sliding_window"] if raw["use_sliding_window"] else None, raw["max_window_layers"]
    return with_layers(base, layer_windows(raw, base, window, lambda i: window is not None and i >= first))


def normed(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add QK-norm."""
    return replace(base, norms=replace(base.norms, heads="shared"))


def _qwen3(raw: Raw, base: ModelConfig) -> ModelConfig:
    return normed(raw, _qwen2(raw, base))


def _qwen3_moe(raw: Raw, base: ModelConfig) -> ModelConfig:
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    count = raw.get("num_experts", raw.get("num_local_experts", 128))
    experts = MixtureConfig(
        count, raw["num_experts_per_tok"], raw["moe_intermediate_size"], normalised=raw["norm_topk_prob"]
    )
    base = replace(normed(raw, base), mixture=experts)
    return with_layers(base, [window] * base.layers, sparse=sparse_layers(raw, base))


def _read_moe(meta: Metadata, config: Config) -> Config:
    return {
        "num_experts": meta["expert_count"],
        "num_experts_per_tok": meta["expert_used_count"],
        "moe_intermediate_size": meta["expert_feed_forward_length"],
        # The metadata has no key for this. llama.cpp always normalises the weights of the experts.
        "norm_topk_prob": True,
    }


_NORMED = {**LAYER, **QK_NORMS}
_SLIDING = {"use_sliding_window": True, "sliding_window": 20}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

FAMILIES = (
    Family(
        "qwen2",
        "Qwen2, Qwen2.5",
        _DEFAULTS,
        _KEYS,
        _qwen2,
        gguf=(GGUFLayout("qwen2"),),
        goldens={
            "qwen2": {},
            "qwen2 tied": {"tie_word_embeddings": True},
            "qwen2, sliding upper layers": {"max_window_layers": 1, **_SLIDING},
        },
    ),
    *(
        Family(
            f"{model_type}_text",
            title,
            _DEFAULTS,
            _KEYS,
            _qwen2_vl,
            text_axes,
            names=LANGUAGE,
            part_of=(model_type,),
            gguf=(GGUFLayout("qwen2vl", read=_read_axes_apart),) if model_type == "qwen2_5_vl" else (),
        )
        for model_type, title in (("qwen2_vl", "Qwen2-VL (text)"), ("qwen2_5_vl", "Qwen2.5-VL (text)"))
    ),
    Family(
        "mimo",
        "",
        _DEFAULTS,
        _KEYS,
        _qwen2,
        names={
            "model.mtp_layers.": "mtp.layers.",
            "mtp.layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
            "mtp.layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
            "mtp.layers.0.input_proj.": "mtp.fc.",
            "mtp.layers.0.final_layernorm.": "mtp.norm.",
        },
        mtp_early=True,  # according to Xiaomi's code for vLLM
    ),
    Family(
        "qwen3",
        "Qwen3",
        {**_DEFAULTS, "head_dim": 128},
        _KEYS,
        _qwen3,
        gguf=(GGUFLayout("qwen3", _NORMED),),
        goldens={
            "qwen3": {"head_dim": 16},
            "qwen3 with biases, sliding upper layers": {
                "head_dim": 8,
                "attention_bias": True,
                "max_window_layers": 2,
                **_SLIDING,
            },
        },
    ),
    Family(
        "qwen3_moe",
        "Qwen3, experts",
        {
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        {**MIXTURE_KEYS, **_SLIDES},
        _qwen3_moe,
        gguf=(
            GGUFLayout(
                "qwen3moe", {**_NORMED, "ffn_gate_inp": "mlp.gate"}, experts_named("mlp.experts"), read=_read_moe
            ),
        ),
        goldens={
            "qwen3 moe": {"norm_topk_prob": True, **_EXPERTS},
            "qwen3 moe, some layers dense": {"decoder_sparse_step": 2, "mlp_only_layers": [3], **_EXPERTS},
            "qwen3 moe, sliding": {"mlp_only_layers": [0], **_SLIDING, **_EXPERTS},
        },
    ),
    Family(
        "qwen3_vl_text",
        "Qwen3-VL (text)",
        {"head_dim": 128, "rope_theta": 5000000.0},
        refine=_qwen3_vl,
        rope=text_axes,
        names=LANGUAGE,
        part_of=("qwen3_vl",),
        gguf=(GGUFLayout("qwen3vl", _NORMED, read=read_axes),),
    ),
)
