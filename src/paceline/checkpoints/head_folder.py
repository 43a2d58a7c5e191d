"""The folder of a learned drafter, in the form that the readers for its layout receive."""

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
    """A folder, its config.json, and its tensors under the names that the files use."""

    path: Path
    raw: Raw
    tensors: Tensors

    def number(self, key: str, raw: Raw | None = None) -> int:
        """Return a required number from the config, or from `raw`, which is a part of the config. Raise `CorruptModel`
        if it is missing."""
        value: int | None = (self.raw if raw is None else raw).get(key)
        if value is None:
            raise CorruptModel(f"config.json of the head {self.path} lacks {key}", "Fetch the head again")
        return value


ReadHead = tuple[str, TrainableConfig, Tensors]
"""A head as its reader returns it: the name of its layout, its config, and its tensors by canonical name."""
