"""Tensors that stay in their file until they are accessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy

import torch
from torch import Tensor

from paceline.errors import CorruptModel
from paceline.files.schema import EXPERTS
from paceline.kernels.quantize import Codes, Mode
from paceline.kernels.stored import FLOATS, Stored


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name. Each access reads a tensor from its file, and dequantises or merges it if necessary.

    Unlike in `Mapping`, testing membership does not read the tensor.
    """

    _names: Mapping[str, object]
    """The names of all tensors, in order."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def codes(self, name: str) -> Codes | None:
        """Return the quantisation codes of a matrix, or None for floats and for tensors that are computed on access."""
        return None

    def stored(self, name: str) -> Stored | None:
        """Return a matrix in the type and the memory of the file, or None for tensors that are computed on access."""
        return None

    def kind(self, name: str) -> str:
        """Return the name of a tensor's storage type."""
        return str(self[name].dtype)

    def mostly_codes(self) -> bool:
        """Return True if most weights are stored as quantisation codes."""
        return False

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Subclasses override this if reading a tensor is slow."""
        return tuple(self[name].shape)


def codes_of(tensors: Mapping[str, Tensor], name: str) -> Codes | None:
    """Return `LazyTensors.codes`, or None for tensors in memory."""
    return tensors.codes(name) if isinstance(tensors, LazyTensors) else None


def stored_of(tensors: Mapping[str, Tensor], name: str) -> Stored | None:
    """Return `LazyTensors.stored`, or None for tensors in memory."""
    return tensors.stored(name) if isinstance(tensors, LazyTensors) else None


def mostly_codes(tensors: Mapping[str, Tensor]) -> bool:
    """Return `LazyTensors.mostly_codes`, or False for tensors in memory."""
    return isinstance(tensors, LazyTensors) and tensors.mostly_codes()


def shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return a tensor's shape, without reading the tensor where possible."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tuple(tensors[name].shape)


def kind_of(tensors: Mapping[str, Tensor], name: str) -> str:
    """Return `LazyTensors.kind`, or the dtype for tensors in memory."""
    return tensors.kind(name) if isinstance(tensors, LazyTensors) else str(tensors[name].dtype)


class Renamed(LazyTensors):
    """Tensors under other names, or a subset of them."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> None:
        """`names`: Name in this object -> name in `tensors`. None keeps all names."""
        self._tensors = tensors
        self._names: Mapping[str, str] = {name: name for name in tensors} if names is None else names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def codes(self, name: str) -> Codes | None:
        return codes_of(self._tensors, self._names[name])

    def stored(self, name: str) -> Stored | None:
        return stored_of(self._tensors, self._names[name])

    def kind(self, name: str) -> str:
        return kind_of(self._tensors, self._names[name])

    def mostly_codes(self) -> bool:
        return mostly_codes(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._tensors, self._names[name])


_SENSES = (
    *(f"model.{part}" for part in ("visual.", "vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")),
    *("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.connector.", "visual."),
    *("vision_tower.", "model.multi_modal_projector."),
)
"""Name prefixes of tensors that process images and audio."""


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """Replace parts of a name, one part after the other. Each part is replaced at its first occurrence."""
    for old, new in parts.items():
        name = name.replace(old, new, 1)
    return name


class LanguageTensors(LazyTensors):
    """The language model's tensors of a checkpoint that may be multimodal (Qwen3.5).

    The names are the same as in a text-only checkpoint. If the file stacks all experts of a layer in one tensor, each
    expert becomes a separate tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str], transposed: bool = False) -> None:
        """`names`: Parts of names to replace (see `renamed`). `transposed`: True if stacks have the shape [experts, in,
        out]."""
        self._tensors, self._transposed = tensors, transposed
        self._names = self._sources = dict[str, tuple[str, int, slice]]()
        for source in tensors:
            if source.startswith(_SENSES):
                continue
            name, whole = renamed(source, names), slice(None)
            block, _, part = name.rpartition(".experts.")
            if part not in ("gate_up_proj", "down_proj"):
                self._names[name] = source, -1, whole
                continue
            shape = shape_of(tensors, source)
            if len(shape) != 3 or not 0 < shape[0] <= EXPERTS:
                what = f"{source} has shape {list(shape)} and is no stack of experts (1 to {EXPERTS})"
                raise CorruptModel(what, "Fetch the file again")
            count, out = shape[0], shape[1 + transposed]
            half = slice(out // 2), slice(out // 2, out)
            parts = [("gate_proj", half[0]), ("up_proj", half[1])] if part == "gate_up_proj" else [(part, whole)]
            for one in range(count):
                self._names |= {f"{block}.experts.{one}.{x}.weight": (source, one, rows) for x, rows in parts}

    def __getitem__(self, name: str) -> Tensor:
        source, expert, rows = self._sources[name]
        if expert < 0:
            return self._tensors[source]
        return self._tensors[source][expert, :, rows].T if self._transposed else self._tensors[source][expert, rows]

    def stored(self, name: str) -> Stored | None:
        source, expert, _ = self._sources[name]
        if expert < 0:
            return stored_of(self._tensors, source)
        tensor = self[name]
        return Stored.floats(tensor, None) if tensor.dtype in FLOATS else None

    def shape(self, name: str) -> tuple[int, ...]:
        source, expert, rows = self._sources[name]
        shape = shape_of(self._tensors, source)
        if expert < 0:
            return shape
        out, width = shape[1:] if not self._transposed else shape[:0:-1]
        return len(range(*rows.indices(out))), width


class Outlines(Renamed):
    """The tensors of a checkpoint as shapes without values: matrices on the meta device, and vectors of zeros.

    Vectors need values, because models compute with vectors while they are built. On the meta device, such computation
    would import torch's compiler, which takes over a second.
    """

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return torch.empty(shape, device="meta") if len(shape) > 1 else torch.zeros(()).expand(shape)


class Quantised(Renamed):
    """Tensors whose matrices are quantised to `bits` bits on loading, unless the file already stores codes.

    With `requantise`, the output head is quantised to `bits` bits too, and so are codes in the file that have more than
    `bits` bits. Draft models use this, because the text does not depend on their precision. The settings belong to the
    tensors, so all modules that are built from them (`models.weights.Weights`) apply the settings.
    """

    def __init__(self, tensors: Mapping[str, Tensor], mode: Mode, requantise: bool = False) -> None:
        super().__init__(tensors)
        self.bits, self.requantise = {"int8": 8, "int4": 4}[mode], requantise

    def over(self, tensors: Mapping[str, Tensor]) -> Quantised:
        """Return other tensors that have the same names (such as parts of these tensors), with the same settings."""
        part = copy(self)
        part._tensors = tensors
        return part
