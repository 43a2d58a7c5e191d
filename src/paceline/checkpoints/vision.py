"""The vision towers of checkpoints."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from paceline.checkpoints.checkpoint import open_weights
from paceline.files.reading import read_json
from paceline.files.schema import IDENTITY
from paceline.vision.encoder import Vision
from paceline.vision.families import VISION

_LOG = logging.getLogger("paceline")


def open_vision(path: Path, dtype: torch.dtype, device: torch.device, allow_pickle: bool = False) -> Vision | None:
    """Open the vision tower of a checkpoint. Nothing but its config is read before the first image.

    Args:
        path: The checkpoint's folder or GGUF file.
        dtype: Type of the computation.
        device: The tower's device.
        allow_pickle: See `open_checkpoint`.

    Returns:
        The tower. None if the model does not see. If Paceline cannot run the tower, this is logged.
    """
    if path.is_file():
        return None
    config = read_json(path / "config.json", IDENTITY)
    if "vision_config" not in config:
        return None
    kind = config.get("model_type")
    if kind not in VISION:
        _LOG.warning("%s: Paceline does not support the images of %s models, so it runs as text", path, kind)
        return None
    tensors = partial(open_weights, path, "model.safetensors", "pytorch_model.bin", allow_pickle)
    return Vision(VISION[kind], config, tensors, path, dtype, device)
