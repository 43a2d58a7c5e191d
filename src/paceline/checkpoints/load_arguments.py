"""The arguments of `paceline.load` in a single object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.cache.kv_types import KVType
from paceline.checkpoints.adapters import Adapter
from paceline.checkpoints.loader import Device, DType
from paceline.errors import InvalidOption
from paceline.kernels.quantize import Precision
from paceline.models.placement import DeviceMap

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"quantize": "int4"},
    "low-memory": {"quantize": "int4", "drafter": "suffix"},
    "exact": {"quantize": "none", "exact": True},
}
"""Preset -> the arguments that it sets."""


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """The arguments of `paceline.load`, which documents them. Only `load` has defaults, so there are none here."""

    model: Any
    adapter: str | Path | None
    adapters: Mapping[str, str | Path | Adapter] | None
    tokenizer: Any
    drafter: Any
    """A name, a `Drafter`, several names, or None."""
    draft: Any
    """A length, a `DraftBudget` or "auto"."""
    dtype: DType
    device: Device
    quantize: Precision
    kv_type: KVType
    draft_quantize: Precision
    draft_vocab: int | str | Path
    revision: str | None
    draft_revision: str | None
    token: str | None = field(repr=False)
    allow_pickle: bool
    progress: bool
    exact: bool
    tensor_parallel: bool
    device_map: DeviceMap | None
    draft_device_map: DeviceMap | None
    chat_template: str | Path | None
    prefix_memory: float
    prefix_dir: str | Path | None
    prefix_disk: float
    mmproj: str | Path | None

    def with_preset(self, name: str) -> LoadArguments:
        """Return these arguments with a preset applied. A preset only changes arguments that are "auto" or False.

        Raises:
            InvalidOption: If no preset has this name.
        """
        if name not in PRESETS:
            raise InvalidOption(f"preset {name!r} is unknown", f"Choose from {', '.join(PRESETS)}")
        chosen = {key: value for key, value in PRESETS[name].items() if getattr(self, key) in ("auto", False)}
        return replace(self, **chosen)
