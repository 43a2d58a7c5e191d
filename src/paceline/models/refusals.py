"""Errors for models that are not causal language models, as their configs show."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import FIX_INVALID_FILE, IDENTITY, check

Raw = Mapping[str, Any]


def refuse_other_heads(raw: Raw, where: str | Path = "config.json") -> None:
    """Raise `UnsupportedModel` for a decoder whose head classifies, embeds or scores texts.

    If the embedding is tied, only `architectures` distinguishes such a model from a language model.

    Args:
        raw: The model's config.
        where: Name of the config in error messages.
    """
    name, *_ = raw.get("architectures") or ["CausalLM"]
    if not any(head in name for head in ("CausalLM", "LMHead", "ConditionalGeneration", "GenerationDecoder")):
        raise UnsupportedModel(
            f"{where} describes a {name}, which is not a language model", "Use a model that generates text"
        )


def refuse_other_kinds(raw: Raw, where: str | Path = "config.json", native: Container[str] = ()) -> None:
    """Raise an error for models that are not text-only causal decoders.

    Args:
        raw: The model's config.
        where: Name of the config in error messages.
        native: Types of recurrent models that are supported, because Paceline can restore their states.

    Raises:
        UnsupportedModel: If the model is multimodal, encoder-decoder or recurrent.
        CorruptModel: If the config has no model type.
    """
    check(where, raw, IDENTITY)
    if "model_type" not in raw:
        raise CorruptModel(f"{where} lacks model_type", FIX_INVALID_FILE)
    name = (raw.get("architectures") or [raw["model_type"]])[0]
    if any(key in raw for key in ("vision_config", "audio_config", "text_config")):
        raise UnsupportedModel(f"{name} is a multimodal model", "Use a text-only model of the same family")
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name} is an encoder-decoder model", "Use a decoder-only model")
    recurrent = ("mamba", "rwkv", "recurrent", "jamba", "zamba", "xlstm", "ssm")
    if raw["model_type"] not in native and any(word in raw["model_type"].lower() for word in recurrent):
        raise UnsupportedModel(
            f"{name} is a recurrent model, whose state cannot drop rejected tokens", "Use an attention-only model"
        )
