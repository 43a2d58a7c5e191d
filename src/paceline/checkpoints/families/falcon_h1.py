"""Falcon-H1: every layer has both attention and a Mamba-2 state. Activations are multiplied by factors, which are moved
into the weights here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.families.mamba2 import (
    BAMBA_DEFAULTS,
    BAMBA_KEYS,
    BAMBA_NAMES,
    MAMBA_EXACT_NAMES,
    MAMBA_LAYER,
    TINY_STATE,
    bamba_state,
    read_state,
)
from paceline.checkpoints.family import Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.errors import CorruptModel
from paceline.files.schema import DECODER, FACTOR, FIX_INVALID_FILE, FLAG, MAX_ROWS, NULL, ROWS, check, list_of_length
from paceline.kernels.quantize import Codes
from paceline.kernels.stored import Stored
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.lazy import Renamed

Multiplier = Sequence[tuple[int, float]]
"""The factors for the rows of a tensor: pairs of a number of rows and their factor, in order."""
_ANY_ROWS = MAX_ROWS
_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_DEFAULTS: dict[str, Any] = {
    **BAMBA_DEFAULTS,
    **dict.fromkeys(_FACTORS, 1.0),
    "mlp_multipliers": None,
    "ssm_multipliers": None,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "rms_norm_eps": 1e-5,
}
_KEYS = {
    **BAMBA_KEYS,
    **dict.fromkeys(_FACTORS, FACTOR),
    "mamba_d_ssm": ROWS | NULL,
    "mamba_norm_before_gate": FLAG,
    "mlp_multipliers": list_of_length(FACTOR, 2) | NULL,
    "ssm_multipliers": list_of_length(FACTOR, 5) | NULL,
}


def _falcon_h1(raw: Raw, base: ModelConfig) -> ModelConfig:
    state = replace(bamba_state(raw, base), norm_first=raw["mamba_norm_before_gate"])
    return replace(
        base,
        special=(LayerConfig(base.rope, recurrent=state),) * base.layers,
        embed_scale=raw["embedding_multiplier"],
        logits_divisor=1 / raw["lm_head_multiplier"],
    )


def multipliers(raw: Raw) -> dict[str, Multiplier]:
    """Return the factors for tensors, by the suffix of their names. The original model applies these factors to
    activations.

    Raises:
        CorruptModel: If a key is wrong. It is checked here because tensors may be read before the rest of the config is
            checked.
    """
    raw = {**_DEFAULTS, **raw}
    check("config.json", raw, {**DECODER, **_KEYS})
    if "hidden_size" not in raw:
        raise CorruptModel("config.json of a falcon_h1 model lacks 'hidden_size'", FIX_INVALID_FILE)
    key, into, out = (raw[f"{x}_multiplier"] for x in ("key", "attention_in", "attention_out"))
    gate, down = raw["mlp_multipliers"] or (1.0, 1.0)
    values = raw["mamba_d_ssm"] or raw["mamba_expand"] * raw["hidden_size"]
    keys = raw["mamba_n_groups"] * raw["mamba_d_state"]
    sizes = values, values, keys, keys, raw["mamba_n_heads"]
    parts = list(zip(sizes, raw["ssm_multipliers"] or (1.0,) * 5, strict=True))
    # For each projection, the factors for its weight and for its bias.
    factors: dict[str, tuple[Multiplier, Multiplier]] = {
        "self_attn.k_proj": ([(_ANY_ROWS, into * key)], [(_ANY_ROWS, key)]),
        "mamba.in_proj": ([(count, raw["ssm_in_multiplier"] * factor) for count, factor in parts], parts),
    }
    for name in ("self_attn.q_proj", "self_attn.v_proj"):
        factors[name] = [(_ANY_ROWS, into)], [(_ANY_ROWS, 1.0)]
    both = {"self_attn.o_proj": out, "mamba.out_proj": raw["ssm_out_multiplier"]}
    for name, factor in {**both, "mlp.gate_proj": gate, "mlp.down_proj": down}.items():
        factors[name] = [(_ANY_ROWS, factor)], [(_ANY_ROWS, factor)]
    kinds = ("weight", "bias")
    return {f"{name}.{kind}": f for name, two in factors.items() for kind, f in zip(kinds, two, strict=True)}


class Scaled(Renamed):
    """Tensors, with the rows of some tensors multiplied by factors."""

    def __init__(self, tensors: Mapping[str, Tensor], factors: Mapping[str, Multiplier]) -> None:
        """Multiply tensors by `factors`, which maps the suffix of a tensor's name to the factors for its rows."""
        super().__init__(tensors)
        self._factors = {name: f for name in tensors for end, f in factors.items() if name.endswith(end)}

    def __getitem__(self, name: str) -> Tensor:
        tensor, factors = super().__getitem__(name), self._factors.get(name)
        if factors is None:
            return tensor
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        rows = torch.cat([wide.new_full((min(count, len(wide)),), factor) for count, factor in factors])
        return wide * rows[: len(wide)].view(-1, *(1,) * (wide.ndim - 1))

    def codes(self, name: str) -> Codes | None:
        return None if name in self._factors else super().codes(name)

    def stored(self, name: str) -> Stored | None:
        return None if name in self._factors else super().stored(name)


def _read(meta: Metadata, config: Config) -> Config:
    """Read the sizes of states. The tensors in GGUF files already include the factors."""
    return {"mamba_norm_before_gate": False, **read_state(meta), "mamba_d_ssm": meta["ssm.inner_size"]}


_TINY = {**TINY_STATE, "mamba_d_ssm": 96, "mamba_proj_bias": True, "projectors_bias": True}
_TINY_FACTORS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.9, 1.4],
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 1.1],
}

FAMILIES = (
    Family(
        "falcon_h1",
        "Falcon-H1",
        _DEFAULTS,
        _KEYS,
        _falcon_h1,
        names=BAMBA_NAMES,
        tensors=lambda raw, tensors: Scaled(tensors, multipliers(raw)),
        unlike_file=lambda raw, module: "multipliers of the config are in its weights",
        gguf=(
            GGUFLayout(
                "falcon-h1",
                MAMBA_LAYER,
                exact_names={**MAMBA_EXACT_NAMES, "ffn_norm": "post_attention_layernorm.weight"},
                read=_read,
            ),
        ),
        goldens={
            "falcon-h1": {**_TINY, **_TINY_FACTORS},
            "falcon-h1, normed": {**_TINY, "mamba_rms_norm": True, "attention_bias": True},
            "falcon-h1, normed after its gate": {
                **_TINY,
                **_TINY_FACTORS,
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
            },
        },
    ),
)
