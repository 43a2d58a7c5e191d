"""Translation of a checkpoint's tensor names to Llama's names, which the decoder uses."""

from __future__ import annotations

from paceline.checkpoints.family import Names, Raw, Tensors
from paceline.checkpoints.registry import family_of
from paceline.models.lazy import LanguageTensors, renamed


def decoder_tensors(config: Raw, tensors: Tensors) -> Tensors:
    """Return a checkpoint's tensors under the names, and in the form, that the decoder expects."""
    family = family_of(config)
    if names := _names(config):
        tensors = LanguageTensors(tensors, names, transposed=family.transposed)
    return family.tensors(config, tensors)


def module_name(config: Raw, module: str) -> str:
    """Return the decoder's name for a module of a model with this config."""
    return renamed(module + ".", _names(config)).removesuffix(".")


def _names(config: Raw) -> Names:
    family = family_of(config)
    return {**(_mtp_names(config) if family.mtp_follows else {}), **family.names}


def _mtp_names(config: Raw) -> Names:
    """Return Qwen's names for MTP layers that follow the model's own layers."""
    layers, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(layers, int):
        return {}
    first = f"model.layers.{layers}."
    later = [(f"model.layers.{layers + i}.", f"mtp.layers.{i}.") for i in range(_count(count))]
    return {first + old: "mtp." + new for old, new in _MTP.items()} | dict(later)


def _count(given: object) -> int:
    """Return the number of MTP layers. A file may contain an MTP layer that its config does not count."""
    return max(1, min(given, 8)) if isinstance(given, int) else 1


_MTP = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "embed_tokens.",
}
