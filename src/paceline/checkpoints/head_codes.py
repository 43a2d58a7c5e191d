"""Four-bit matrices of learned drafters. Their rows are GGUF's Q4_1 blocks, stored as bytes in safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.gguf_codes import gguf_codes, pack_q4_1
from paceline.checkpoints.head_check import MAPS
from paceline.errors import CorruptModel
from paceline.kernels.quantize import GROUP, Codes, quantize
from paceline.kernels.stored import Stored
from paceline.models.lazy import LazyTensors

FORMAT = "Q4_1"
"""Name of the blocks' type, which config.json contains under "paceline"."""

_NUMBER, _BYTES = 3, 20
"""The type's number in ggml, and the size of a block in bytes."""


def encode(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantise each matrix whose rows consist of whole blocks, to bytes [out, bytes per row]. Other tensors stay
    unchanged."""
    return {name: pack_q4_1(quantize(x, 4)) if _has_blocks(name, x) else x for name, x in tensors.items()}


def _has_blocks(name: str, tensor: Tensor) -> bool:
    return name not in MAPS and tensor.ndim == 2 and tensor.shape[1] % GROUP == 0


class CodedTensors(LazyTensors):
    """Tensors that `encode` may have quantised. Each access dequantises such a tensor to float32."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `CorruptModel` if the bytes of a tensor are not whole blocks."""
        self._names = self._tensors = tensors
        for name in tensors:
            if self._is_coded(name) and (tensors[name].ndim != 2 or tensors[name].shape[1] % _BYTES):
                raise CorruptModel(f"{name} is not made of {FORMAT} blocks", "Fetch the head again")

    def _is_coded(self, name: str) -> bool:
        return name not in MAPS and self._tensors[name].dtype == torch.uint8

    def __getitem__(self, name: str) -> Tensor:
        codes = self.codes(name)
        return codes.dequantised() if codes else self._tensors[name]

    def codes(self, name: str) -> Codes | None:
        return gguf_codes(self._tensors[name], FORMAT, self.shape(name)) if self._is_coded(name) else None

    def stored(self, name: str) -> Stored | None:
        if not self._is_coded(name):
            return None
        return Stored.of(self._tensors[name].contiguous(), _NUMBER, self.shape(name)[1])

    def kind(self, name: str) -> str:
        return FORMAT if self._is_coded(name) else str(self._tensors[name].dtype)

    def mostly_codes(self) -> bool:
        return any(map(self._is_coded, self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *rest = self._tensors[name].shape
        return (rows, rest[0] // _BYTES * GROUP) if self._is_coded(name) else (rows, *rest)


def decode(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return a file's tensors, decoded if necessary. `about`: The "paceline" entry of the file's config."""
    return CodedTensors(tensors) if about.get("matrices") == FORMAT else tensors
