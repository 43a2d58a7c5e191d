"""What is no causal language model, told by its config."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import CORRECT, IDENTITY, check

Raw = Mapping[str, Any]


def refuse_other_heads(raw: Raw, where: str | Path = "config.json") -> None:
    """Raise `UnsupportedModel` for a decoder with a head that classifies, embeds or scores, which `architectures` alone
    may tell from a language model: with a tied embedding nothing else is missing. See `refuse_other_kinds`."""
    name, *_ = raw.get("architectures") or ["CausalLM"]
    if not any(head in name for head in ("CausalLM", "LMHead", "ConditionalGeneration", "GenerationDecoder")):
        raise UnsupportedModel(f"{where} is of a {name}, which is not a language model", "Use a model that writes text")


def refuse_other_kinds(raw: Raw, where: str | Path = "config.json", native: Container[str] = ()) -> None:
    """Raise `UnsupportedModel` for multimodal, encoder-decoder and recurrent models, `CorruptModel` for a config
    without a model type. `where`: name of the source in error messages. `native`: model types whose states can drop
    rejected tokens."""
    check(where, raw, IDENTITY)
    if "model_type" not in raw:
        raise CorruptModel(f"{where} lacks model_type", CORRECT)
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
