"""The multi-token-prediction (MTP) layer that some models bring, as a learned drafter.

Under the names of Qwen's files, to which those of others and of GGUF are translated: mtp.fc, mtp.pre_fc_norm_embedding,
mtp.pre_fc_norm_hidden, mtp.layers.0.* and mtp.norm, of which the last may be the model's own.
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
    """Return whether a checkpoint holds an MTP layer."""
    return _MTP + "fc.weight" in tensors


def open_mtp(path: Path, *, allow_pickle: bool = False) -> HeadFile | None:
    """Return the MTP layer in the files of a model, a folder or a GGUF file; None where there is none.

    Of several, which share the projection before them, it is the first. No tensor is read. Raises as `open_checkpoint`.
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
    """`names`: of its tensors, which tell whether its feed-forward part is a mixture of experts."""
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
