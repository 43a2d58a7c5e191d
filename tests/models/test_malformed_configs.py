"""Every config field of any family, with values of wrong types, lengths and ranges, is read or refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest

from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.registry import FAMILIES, ties_head
from paceline.checkpoints.tensor_names import decoder_tensors
from paceline.errors import CorruptModel, PacelineError
from paceline.files.schema import DECODER

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 5},
    "deepseek_v2": {"num_experts_per_tok": 6, "num_key_value_heads": 4},
    "nemotron_h": {"hybrid_override_pattern": "M*-E"},
}
NESTED = ("rope_parameters", "rope_scaling", "per_layer_config")
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**40, 0.5, -0.5, float("nan"), float("inf"), "", "x", "full_attention"),
    *([], [1], [1] * 4, [None], ["x"] * 4, [[1]], [2.0, "x"], [1.0] * 3),
    *({}, {"a": 1}, {"full_attention": 1}, {"full_attention": {"rope_theta": "x"}}, {"sliding_attention": []}),
    *({"full_attention": None}, {"0": 1}, {"1": {"head_dim": "x"}}, {"rope_type": 1}, {"rope_type": "linear"}),
    *({"rope_type": "yarn", "factor": "x"}, {"rope_type": "proportional"}, {"type": []}),
)


def base(family: str) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **MORE.get(family, {})}


def changed(values: Mapping[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield copies of `values` with each value replaced by each kind of junk, in nested objects too."""
    for key, value in values.items():
        for junk in JUNK:
            yield {**values, key: deepcopy(junk)}
        if isinstance(value, Mapping) and depth < 2:
            for inner in changed(value, depth + 1):
                yield {**values, key: inner}


def configs(family: str) -> Iterator[dict[str, Any]]:
    own = FAMILIES[family]
    known = dict.fromkeys((*DECODER, *own.keys, *NESTED)) | dict(own.defaults) | base(family)
    del known["model_type"]
    present = base(family)
    for config in changed(known):
        (key,) = [key for key in known if config[key] is not known[key]] or ["model_type"]
        yield present | {key: config.get(key, family)}
    for key in SIZES:
        yield {name: value for name, value in present.items() if name != key}


def read(config: dict[str, Any]) -> None:
    """Read a config in each way that checkpoints use. Raise errors other than `PacelineError`."""
    for reader in (read_config, ties_head, lambda raw: decoder_tensors(raw, {})):
        with suppress(PacelineError):
            reader(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unchanged_config_is_read(family: str) -> None:
    read_config(base(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_malformed_field_is_refused_by_name(family: str) -> None:
    every = list(configs(family))
    for config in random.Random(1).sample(every, 150):
        read(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_malformed_field_is_refused_by_name(family: str) -> None:
    for config in configs(family):
        read(config)


@pytest.mark.parametrize("value", ["x", 1, [1.0], [1.0, "x"], [1.0, float("nan")], {"gate": 1.0}])
@pytest.mark.parametrize("name", ["mlp_multipliers", "ssm_multipliers"])
def test_falcon_h1_s_multipliers_are_checked_where_tensors_are_scaled(name: str, value: object) -> None:
    with pytest.raises(CorruptModel, match=name):
        decoder_tensors({**base("falcon_h1"), name: value}, {})


@pytest.mark.parametrize("value", ["x", 1, [1], True])
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_gemma_4_s_rope_parameters_are_checked_by_layer_type(kind: str, value: object) -> None:
    ropes = {**FAMILIES["gemma4_text"].defaults["rope_parameters"], kind: value}
    with pytest.raises(CorruptModel, match="rope"):
        read_config({**base("gemma4_text"), "rope_parameters": ropes})
