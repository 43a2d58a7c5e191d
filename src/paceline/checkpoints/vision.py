"""The vision towers of checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from paceline.checkpoints.checkpoint import open_weights
from paceline.checkpoints.mmproj import read_projector
from paceline.errors import CorruptModel, InvalidOption, PacelineError
from paceline.files.gguf_names import is_projector
from paceline.files.reading import read_json
from paceline.files.schema import IDENTITY
from paceline.models.config import ModelConfig
from paceline.vision.encoder import Vision
from paceline.vision.families import VISION

_LOG = logging.getLogger("paceline")


def open_vision(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    allow_pickle: bool = False,
    config: ModelConfig | None = None,
    mmproj: str | Path | None = None,
) -> Vision | None:
    """Open the vision tower of a checkpoint. Only its config is read before the first image.

    Args:
        path: The checkpoint's folder or GGUF file.
        dtype: Type of the computation.
        device: The tower's device.
        allow_pickle: See `open_checkpoint`.
        config: The language model, which an mmproj file must fit. None skips this check.
        mmproj: The mmproj file of a GGUF file. None looks for one in its folder.

    Returns:
        The tower, or None if the model has none. If Paceline cannot run the tower, a warning is logged and the result
        is None.

    Raises:
        InvalidOption: If `mmproj` is given for a folder.
        ModelNotFound: If `mmproj` does not exist.
        CorruptModel: If `mmproj` is damaged, or does not fit the model.
        UnsupportedModel: If `mmproj` holds no supported tower.
    """
    if path.is_dir():
        if mmproj is not None:
            raise InvalidOption("mmproj only works with a GGUF file", "Leave it out: a folder holds its vision tower")
        return _of_folder(path, dtype, device, allow_pickle)
    if mmproj is not None:
        return _of_projector(Path(mmproj).expanduser(), dtype, device, config)
    found = [one for one in sorted(path.parent.glob("*.gguf")) if is_projector(one.name)]
    if not found:
        return None
    try:
        return _of_projector(_best(found, path), dtype, device, config)
    except PacelineError as error:
        _LOG.warning("%s: images are not supported, so it runs as text: %s", path, error)
        return None


def has_vision(path: Path) -> bool:
    """Return True if a model takes images: its folder holds a vision tower of a known family, or its GGUF file has an
    mmproj file next to it."""
    if path.is_file():
        return any(is_projector(one.name) for one in path.parent.glob("*.gguf"))
    config = read_json(path / "config.json", IDENTITY)
    return "vision_config" in config and config.get("model_type") in VISION


def _of_folder(path: Path, dtype: torch.dtype, device: torch.device, allow_pickle: bool) -> Vision | None:
    raw = read_json(path / "config.json", IDENTITY)
    if "vision_config" not in raw:
        return None
    kind = raw.get("model_type")
    if kind not in VISION:
        _LOG.warning("%s: Paceline does not support the images of %s models, so it runs as text", path, kind)
        return None
    tensors = partial(open_weights, path, "model.safetensors", "pytorch_model.bin", allow_pickle)
    return Vision(VISION[kind], raw, tensors, path, dtype, device)


def _of_projector(path: Path, dtype: torch.dtype, device: torch.device, config: ModelConfig | None) -> Vision:
    found = read_projector(path)
    if config and found.width != config.hidden:
        raise CorruptModel(
            f"{path} has embeddings of size {found.width}, but the model's size is {config.hidden}",
            "Use the mmproj file that was made for this model",
        )
    if config and found.kind.startswith("qwen") and not any(layer.rope and layer.rope.axes for layer in config.plan):
        raise CorruptModel(f"the model of {path} has no sections of M-RoPE", "Convert the model again")
    return Vision(VISION[found.kind], found.config, found.tensors, found.settings, dtype, device)


def _best(files: Sequence[Path], model: Path) -> Path:
    """Return the file whose name has the most in common with the model's name. In a tie, return the largest file."""
    words = {*re.split("[-._]", model.stem.lower())}
    return max(files, key=lambda file: (len(words & {*re.split("[-._]", file.stem.lower())}), file.stat().st_size))
