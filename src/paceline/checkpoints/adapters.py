"""LoRA adapters that are kept separate from the weights, so that each request may use a different one
(`kernels/low_rank.py`).

The weighted sum of several adapters, s B A + t D C, is one adapter with the sum of their ranks: [s B, t D] [A; C].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.lora import LoraAdapter
from paceline.errors import InvalidOption, UnsupportedModel
from paceline.files.locate import is_adapter, resolve
from paceline.kernels.low_rank import Factors

MAX_ADAPTERS, MAX_RANK = 64, 512
"""Maximum number of adapters and maximum rank. They limit memory and the duration of the self-check. The rank of a sum
of adapters is the sum of their ranks at a module."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter, or the sum of several adapters, that is loaded next to a model's weights under one name.

    Attributes:
        path: A folder in PEFT's layout, or a hub id. If it is a list, the changes of all adapters are added up.
        weights: The weight of each path in the sum. Empty if every weight is 1.
        drafter: Default drafter for requests that use the adapter (see `paceline.load`). None to use the model's
            default.
    """

    path: str | Path | Sequence[str | Path]
    weights: Sequence[float] = ()
    drafter: str | None = None

    def __post_init__(self) -> None:
        paths, weights = self.paths, self.weights
        if self.drafter in ("found", "auto"):
            raise InvalidOption(
                f"{self.drafter} chooses a drafter for the model, not for an adapter",
                "Give the name of a drafter, or none",
            )
        if not paths or not all(isinstance(path, (str, Path)) and str(path) for path in paths):
            raise InvalidOption(f"path={self.path!r:.80} names no adapter", "Give a folder or a hub id, or a list")
        valid = all(type(weight) in (int, float) and math.isfinite(weight) for weight in weights)
        if not valid or len(weights) not in (0, len(paths)):
            raise InvalidOption(
                f"weights={self.weights!r:.80} for {len(paths)} adapters", "Give one finite number for each"
            )

    @property
    def paths(self) -> list[str | Path]:
        """The paths of the adapters, as a list."""
        return [self.path] if isinstance(self.path, (str, Path)) else list(self.path)


def check_adapters(adapters: Mapping[str, Any]) -> dict[str, Adapter]:
    """Check adapters, and return them by name. A path stands for the adapter at this path.

    Raises:
        InvalidOption: If there are too many adapters, or a name or adapter is invalid.
    """
    if len(adapters) > MAX_ADAPTERS:
        raise InvalidOption(f"there are {len(adapters)} adapters", f"Load at most {MAX_ADAPTERS}")
    if bad := [name for name in adapters if not isinstance(name, str) or not name.strip()]:
        raise InvalidOption(f"an adapter is called {bad[0]!r:.80}", "Give it a name")
    return {name: given if isinstance(given, Adapter) else Adapter(given) for name, given in adapters.items()}


def read_factors(name: str, adapter: Adapter, base: Mapping[str, Any], **fetch: Any) -> Factors:
    """Read an adapter.

    Args:
        name: The adapter's name, for error messages.
        adapter: The adapter.
        base: The config of the base model.
        **fetch: Options of `resolve`.

    Raises:
        InvalidOption: If a path is not a LoRA adapter.
        UnsupportedModel: If the adapter changes more than linear layers, or its rank exceeds `MAX_RANK`.
        PacelineError: See `resolve` and `LoraAdapter`.
    """
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    paths = adapter.paths
    for path, weight in zip(paths, adapter.weights or [1.0] * len(paths), strict=True):
        folder = resolve(path, **fetch)
        if not is_adapter(folder):
            raise InvalidOption(f"{path} is not a LoRA adapter", "Name a folder that holds adapter_config.json")
        read = LoraAdapter(folder, base, allow_pickle=bool(fetch.get("allow_pickle")))
        for module, (a, b) in read.low_rank().items():
            parts.setdefault(module, []).append((a, b * weight))
    for module, found in parts.items():
        if (rank := sum(len(a) for a, _ in found)) > MAX_RANK:
            raise UnsupportedModel(
                f"the adapter {name} has rank {rank} at {module}, more than {MAX_RANK}",
                "Merge it, or add up fewer adapters",
            )
    joined = {
        module: (torch.cat([a for a, _ in found]), torch.cat([b for _, b in found], 1))
        for module, found in parts.items()
    }
    return Factors(name, joined)
