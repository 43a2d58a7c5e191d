"""A learned drafter's folder, as passed to the reader of its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import CorruptModel
from paceline.models.heads import TrainableConfig

Raw = Mapping[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class HeadFolder:
    """The folder, its config.json, and its tensors under the file's names."""

    path: Path
    raw: Raw
    tensors: Tensors

    def number(self, key: str, raw: Raw | None = None) -> int:
        """Return a required number from the config, or from `raw`, a part of it. Raises `CorruptModel` if it is
        missing."""
        value: int | None = (self.raw if raw is None else raw).get(key)
        if value is None:
            raise CorruptModel(f"config.json of the head {self.path} lacks {key}", "Fetch the head again")
        return value


Found = tuple[str, TrainableConfig, Tensors]
"""Layout, config, and tensors by canonical name."""
