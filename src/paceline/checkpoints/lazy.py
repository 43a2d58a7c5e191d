"""Tensors that stay in their file until they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from paceline.kernels.quantize import Codes, Mode
from paceline.models.weights import CodedTensors


class LazyTensors(CodedTensors):
    """Tensors by name, read (dequantised, merged) at each access and by nothing else.

    `Mapping` itself would read one to say whether its name is there.
    """

    _names: Mapping[str, object]
    """All there are, in order."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Subclasses whose tensors are costly to read know it without reading them."""
        return tuple(self[name].shape)


def own_codes(tensors: Mapping[str, Tensor], name: str) -> Codes | None:
    """See `CodedTensors.codes`. Tensors in memory have none."""
    return tensors.codes(name) if isinstance(tensors, LazyTensors) else None


def shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """A tensor's shape, read as cheaply as these tensors allow."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tuple(tensors[name].shape)


class Outlines(LazyTensors):
    """The tensors of a checkpoint without their values: on the meta device, which has none."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return torch.empty(shape_of(self._tensors, name), device="meta")


class Renamed(LazyTensors):
    """Tensors of which one has another name than in the file."""

    def __init__(self, tensors: Mapping[str, Tensor], old: str, new: str) -> None:
        self._tensors = tensors
        self._names: Mapping[str, str] = {new if name == old else name: name for name in tensors}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def codes(self, name: str) -> Codes | None:
        return own_codes(self._tensors, self._names[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._tensors, self._names[name])


class Quantised(LazyTensors):
    """Tensors whose matrices are to be held as codes, of `bits` where they have none of their own.

    The wish travels with the tensors, so that whatever is built of them (`models.weights.Weights`) follows it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], mode: Mode) -> None:
        self._names = self._tensors = tensors
        self.bits = {"int8": 8, "int4": 4}[mode]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def codes(self, name: str) -> Codes | None:
        return own_codes(self._tensors, name)
