"""Configs of every family: read as in transformers, and refused if they mean something else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from paceline.checkpoints.model_config import read_config
from paceline.errors import CorruptModel, UnsupportedModel
from tests.support.lazy import transformers
from tests.support.older_configs import OLDER
from tests.support.tiny_families import SIZES


@pytest.mark.parametrize("family", OLDER)
def test_configs_as_they_lie_on_the_hub_mean_what_transformers_reads_in_them(family: str) -> None:
    raw = {"model_type": family} | SIZES | OLDER[family]
    newer = transformers.AutoConfig.for_model(**deepcopy(raw)).to_dict()
    assert read_config(raw) == read_config(newer)


def test_phi3_knows_longrope_by_older_names() -> None:
    rope = OLDER["phi3"]["rope_scaling"]
    configs = [read_config(raw("phi3", **OLDER["phi3"] | {"rope_scaling": rope | {"type": t}})) for t in ("su", "yarn")]
    assert configs == [read_config(raw("phi3", **OLDER["phi3"]))] * 2
    assert configs[0].rope.kind == "longrope"


def raw(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family} | SIZES | changes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (raw("llama", sliding_window=64), "sliding_window"),
        (raw("qwen3", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (raw("gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (raw("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (raw("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (raw("llama", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (raw("llama", no_rope_layers=[1, 1, 1, 0]), "no_rope_layers"),
        (raw("llama", residual_multiplier=0.22), "residual_multiplier"),
        (raw("mistral", layer_types=["sliding_attention", "full_attention"] * 2), "layer_types"),
        (raw("qwen2", layer_types=["chunked_attention"] * 4), "chunked_attention"),
        (raw("llama", rope_scaling={"rope_type": "yarn", "factor": 2.0, "mrope_section": [1, 2]}), "mrope_section"),
        (raw("gemma3", text_config={}), "multimodal"),
        (raw("deepseek_v2", num_experts_per_tok=6, norm_topk_prob=True), "norm_topk_prob"),
        (raw("deepseek_v2", num_experts_per_tok=6, topk_method="noaux_tc"), "softmax and noaux_tc"),
        (raw("deepseek_v3", scoring_func="softmax"), "softmax and noaux_tc"),
        (raw("deepseek_v3", moe_layer_freq=2), "moe_layer_freq of 2"),
    ],
)
def test_unsupported_configs_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read_config(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (raw("gemma3_text", layer_types=["full_attention"]), "1 of 4"),
        (raw("qwen2", layer_types=["sliding_attention"] * 4), "no sliding_window"),
        (raw("smollm3", no_rope_layers=[1, 0]), "2 of 4"),
        (raw("mistral", sliding_window=-5), "-5"),
        (raw("llama4_text", num_local_experts=0, num_experts_per_tok=0), "experts, 0, got 0"),
        (raw("mixtral", num_local_experts=2, num_experts_per_tok=3), "experts, 2, got 3"),
        (raw("qwen3_moe", moe_intermediate_size=0), "moe_intermediate_size must be .* got 0"),
        (
            raw("gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=None, moe_intermediate_size=8),
            "top_k",
        ),
        (raw("deepseek_v2"), "num_experts_per_tok must be a whole number"),
        (raw("deepseek_v3", n_group=6), "8 of 256 experts in 4 of 6 groups"),
        (raw("deepseek_v3", n_group=256, topk_group=7), "8 of 256 experts in 7 of 256 groups"),
        (raw("deepseek_v3", mlp_layer_types=["dense"] * 3), "must name 4 layers"),
        (raw("deepseek_v3", num_attention_heads=2**17), "exceed the maximum of"),
        (raw("phi3", rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}), "1 factors"),
        (
            raw("llama", rope_scaling="linear"),
            "rope_scaling must be an object or null, got 'linear'. Correct the file or fetch",
        ),
    ],
)
def test_configs_that_contradict_themselves_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CorruptModel, match=said):
        read_config(config)


@pytest.mark.parametrize(
    ("family", "key", "known"),
    [
        ("qwen3", "layer_types", "full_attention or sliding_attention"),
        ("olmo3", "layer_types", "full_attention or sliding_attention"),
        ("gemma4_text", "layer_types", "full_attention or sliding_attention"),
        ("qwen3_next", "layer_types", "full_attention or linear_attention"),
        ("lfm2", "layer_types", "full_attention or conv"),
        ("granitemoehybrid", "layer_types", "attention or full_attention or mamba or linear_attention"),
        ("nemotron_h", "layers_block_type", "attention or full_attention or mamba or linear_attention or mlp or moe"),
    ],
)
def test_unknown_layer_types_are_refused_with_a_list_of_known_ones(family: str, key: str, known: str) -> None:
    said = rf"^{key} names layers of type chunked, which are not supported in {family}\. Use a model .* {known}$"
    with pytest.raises(UnsupportedModel, match=said):
        read_config(raw(family, **{key: ["chunked"] * 4}))
    with pytest.raises(CorruptModel, match=f"{key} names 1 of 4 layers"):
        read_config(raw(family, **{key: ["full_attention"]}))


def test_switched_off_peculiarities_are_no_matter() -> None:
    plain = read_config(raw("llama"))
    assert read_config(raw("llama", sliding_window=None, attn_logit_softcapping=None)) == plain
    assert read_config(raw("llama", sliding_window=64, use_sliding_window=False, logit_scale=1.0)) == plain
    assert read_config(raw("llama", no_rope_layers=[1, 1, 1, 1], layer_types=["full_attention"] * 4)) == plain
    assert all(layer.window is None for layer in read_config(raw("mistral", sliding_window=4096)).plan), (
        "wider than all"
    )
