"""The choice between the CPU kernels and torch for a model's linear layers, and the reason for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from paceline.kernels.cpu.build import built_for, library, obstacle
from paceline.kernels.cpu.matrix import FLOAT_KINDS


@dataclass(frozen=True, slots=True)
class Runner:
    """A description of the software that computes the linear layers, and a hint on how to make it faster (empty if
    there is none)."""

    name: str
    remedy: str = ""


def runner_of(device: torch.device, dtype: torch.dtype) -> Runner:
    """Return the runner for this device and this dtype of activations. Compile the CPU kernels if they are needed and
    missing.

    For most models, the CPU kernels run whole layers. For other models, torch runs the rest of a layer
    (`cpu_layers.runs_natively`).
    """
    if device.type != "cpu":
        return Runner(f"torch, on {device.type}")
    kind = str(dtype).removeprefix("torch.")
    if dtype not in FLOAT_KINDS:
        return Runner(f"torch, in {kind}")  # there is no hint, because the caller chose this dtype
    kernels, reason = library(), obstacle()
    if kernels is None:
        assert reason is not None
        return Runner(f"torch, since {reason.cause}", reason.fix)
    return Runner(f"the CPU kernels ({built_for(kernels)})")


@cache
def warn_of(runner: Runner) -> None:
    """Log, once, that a model runs slower than it could, and how to make it faster."""
    if runner.remedy:
        line = "warning: slow: the layers run on %s. %s"
        logging.getLogger("paceline").warning(line, " ".join(runner.name.split()), runner.remedy)


_LARGE = 1 << 30


@cache
def suggest_codes(folder: Path, device: torch.device) -> None:
    """Log, once, that quantisation would make a large float model faster on the CPU."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if device.type == "cpu" and size > _LARGE and library():
        line = "note: every pass reads %.1f GB of floats; --quantize int8 makes that about half, "
        line += "int4 less than a third (`paceline perplexity` measures the loss)"
        logging.getLogger("paceline").warning(line, size / 1e9)
