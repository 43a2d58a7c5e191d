"""The GGUF container through the `gguf` library: metadata as plain Python values, tensors read one at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel

_DAMAGED = (ValueError, KeyError, IndexError, OverflowError, struct.error, MemoryError, TypeError)


class _Reader(gguf.GGUFReader):
    """Reads through `numpy.frombuffer`: slicing a memmap per string takes 2.4 s on the demo model, this 0.5 s."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> Any:
        values = np.frombuffer(self.data, dtype, int(count), int(offset))
        order = self.byte_order if override_order is None else override_order
        return values if order in "I<" else values.view(values.dtype.newbyteorder(order))


@dataclass(frozen=True)
class GGUFFile:
    """An open file: `fields` by key, `tensors` by GGUF name, their bytes still in the file."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as the file holds it."""

    info: Any

    @property
    def kind(self) -> str:
        """The GGML type's name, "Q4_1" for instance."""
        return str(self.info.tensor_type.name)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Outermost first, as torch has it."""
        return tuple(reversed(self.info.shape.tolist()))

    def read(self) -> Tensor:
        """In the file's own dtype where it is unquantised, else float32."""
        if self.kind == "BF16":
            return torch.from_numpy(self.info.data.view(np.int16)).view(torch.bfloat16).view(self.shape)
        if self.kind in ("F16", "F32", "F64"):
            return torch.from_numpy(self.info.data).view(self.shape)
        return torch.from_numpy(gguf.dequantize(self.info.data, self.info.tensor_type)).view(self.shape)

    def check(self) -> None:
        """Raises `UnsupportedModel` if the `gguf` library cannot turn this type into numbers."""
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[self.info.tensor_type][1]), dtype=np.uint8)
        try:
            gguf.dequantize(block, self.info.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensors of type {self.kind} are not supported", "Use a file in Q8_0, Q4_K_M, F16 or BF16"
            ) from error


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and read its header. Raises `ModelNotFound`, `CorruptModel`, `UnsupportedModel`."""
    _check_start(path)
    try:
        # Copy-on-write: torch wants writable memory, and the file stays as it is.
        reader = _Reader(path, "c")
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except _DAMAGED as error:
        if "GGMLQuantizationType" in str(error):
            raise UnsupportedModel(f"a tensor type in {path} is not known ({error})", "Update gguf") from error
        raise CorruptModel(f"{path} is damaged or cut off ({error})", "Fetch the file again") from error
    tensors = {tensor.name: GGUFTensor(tensor) for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) == 0:
            raise CorruptModel(f"{name} in {path} is empty", "Fetch the file again")
    return GGUFFile(path, fields, tensors)


def _check_start(path: Path) -> None:
    """Magic and version, for a clear word before the library tries."""
    try:
        with path.open("rb") as file:
            start = file.read(24)
    except OSError as error:
        raise ModelNotFound(f"cannot open {path}: {error.strerror}", "Check the path and its permissions") from error
    if start[:4] != b"GGUF":
        raise CorruptModel(f"{path} is not a GGUF file", "Check the path, or fetch the file again")
    if len(start) < 24:
        raise CorruptModel(f"{path} is cut off after {len(start)} bytes", "Fetch the file again")
    version = int.from_bytes(start[4:8], "little")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{path} has GGUF version {version} or is big-endian", "Convert it to a little-endian GGUF of version 3"
        )
