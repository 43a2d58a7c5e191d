"""The multi-token-prediction (MTP) layer that some models include, as a learned drafter.

Its tensors have the names in Qwen's files: mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.layers.0.*
and mtp.norm. The names in other files and in GGUF files are translated. If mtp.norm is missing, the model's own norm
replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from paceline.checkpoints.checkpoint import open_folder
from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.registry import FAMILIES
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.heads import EagleConfig, HeadFile
from paceline.models.lazy import Renamed

_MTP = "mtp."


def has_mtp(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if a checkpoint contains an MTP layer."""
    return _MTP + "fc.weight" in tensors


def open_mtp(path: Path, *, allow_pickle: bool = False) -> HeadFile | None:
    """Open the MTP layer in a model's folder or GGUF file, without reading tensors. Return None if there is none.

    If the model has several MTP layers, open the first one. All of them share the projection before them. Raise the
    errors of `open_checkpoint`.
    """
    config, tensors = open_gguf(path)[:2] if path.is_file() else open_folder(path, allow_pickle=allow_pickle)
    if not has_mtp(tensors):
        return None
    names = {"norm.weight": "model.norm.weight"} | {
        name.removeprefix(_MTP): name
        for name in tensors
        if name.startswith(_MTP) and not name.startswith(tuple(f"{_MTP}layers.{digit}" for digit in "123456789"))
    }
    return HeadFile(path, "built in", _config(read_config(config, path), names), Renamed(tensors, names))


def _config(model: ModelConfig, names: Mapping[str, str]) -> EagleConfig:
    """Return the config. `names`: Names of the layer's tensors, which show if its MLP is a mixture of experts."""
    experts = model.mixture
    sparse = experts is not None and f"layers.0.{experts.block}.{experts.router}.weight" in names
    layer = replace(model, layers=1, special=(LayerConfig(model.rope, sparse=sparse),))
    early = FAMILIES[model.family].mtp_early
    return EagleConfig(
        layer,
        taps=(model.layers if early else "final",),
        target_hidden=model.hidden,
        draft_vocab=model.vocab_size,
        version=1,
        norm_output=True,
        built_in=True,
        hidden_first=early,
    )
