"""The tensors of a checkpoint, and the linear layers that are built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from paceline.errors import AdapterMismatch, CorruptModel, InvalidOption, UnsupportedModel
from paceline.kernels.activations import Activation
from paceline.kernels.cpu.matrix import NativeLinear
from paceline.kernels.linear import Linear, gated, linear, takes_stored
from paceline.kernels.low_rank import Factors, LowRank, adapt_gated, adapted
from paceline.kernels.quantize import Codes, quantize, stack
from paceline.kernels.stored import Stored
from paceline.models.lazy import Quantised, codes_of, stored_of

_HEAD_BITS = 8
"""Minimum number of bits of an output head. It is only one of many linear layers, but it decides every token."""


class Weights:
    """The tensors of a checkpoint. Modules take them one by one. Shapes are checked, and no tensor may be left over.

    If the tensors are `Quantised`, linear layers hold quantisation codes. Tensors that `get` returns stay floats.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        adapters: Sequence[Factors] = (),
    ) -> None:
        """Prepare the tensors.

        Args:
            tensors: Tensors by name.
            dtype: Dtype of the computation.
            device: Device to which tensors are moved when they are taken.
            adapters: LoRA adapters. They are not merged, but computed next to the linear layers that they change.

        Raises:
            InvalidOption: If the weights are quantised and `dtype` is float64.
        """
        self._adapters = adapters
        self._unused_factors = {(adapter.name, module) for adapter in adapters for module in adapter.factors}
        """The pairs (adapter, module) that no linear layer has used yet."""
        self._tensors, self.dtype, self.device = tensors, dtype, device
        self._bits = tensors.bits if isinstance(tensors, Quantised) else None
        self.requantises = isinstance(tensors, Quantised) and tensors.requantise
        """True if codes in the file are quantised again when they have more bits than requested."""
        self._head_bits = self._bits and (self._bits if self.requantises else _HEAD_BITS)
        if self._bits and dtype == torch.float64:
            raise InvalidOption(
                "quantised weights do not run in float64", "Use float32 or bfloat16, or leave quantize out"
            )
        self.precise_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # Multi-token-prediction layers ("mtp") are loaded as a drafter, not with the model.
        self._unused = {
            name
            for name in tensors
            if not name.endswith(("rotary_emb.inv_freq", "masked_bias", "self_attn.bias"))
            and not name.startswith("mtp.")
        }

    def at(self, device: torch.device) -> Weights:
        """Return the same weights, but with another device for the tensors that are taken from the result."""
        part = copy(self)
        part.device = device
        return part

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Take a tensor, on the model's device and in this dtype. The default is the model's dtype.

        Raises:
            CorruptModel: If the tensor is missing or has another shape.
        """
        if name not in self._tensors:
            raise CorruptModel(f"the checkpoint lacks {name}", "Fetch the model again")
        tensor = self._tensors[name]
        self._check(name, tuple(tensor.shape), shape)
        device = self._vectors if len(shape) == 1 else self.device
        return tensor.to(device=device, dtype=dtype or self.dtype)

    @property
    def _vectors(self) -> torch.device:
        """The device of vectors. Vectors have values even in a check without data (`lazy.Outlines`)."""
        return torch.device("cpu") if self.device.type == "meta" else self.device

    def _check(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise CorruptModel(
                f"{name} has shape {found}, but the config requires {shape}",
                "Config and weights are from different models. Fetch the model again",
            )
        self._unused.discard(name)

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor | Codes | Stored:
        """Take the matrix of a linear layer. It consists of floats in the model's dtype, or of codes if the weights are
        quantised."""
        return self._matrix(name, shape, self._bits)

    def head(self, name: str, shape: tuple[int, int]) -> Tensor | Codes | Stored:
        """Take the matrix of an output head."""
        return self._matrix(name, shape, self._head_bits)

    def embedding(self, name: str, shape: tuple[int, int], is_head: bool) -> Tensor | NativeLinear | Stored:
        """Take an embedding.

        Args:
            name: Name of the tensor.
            shape: (vocabulary, width).
            is_head: True if the matrix is also the output head.

        Returns:
            The output head, whose rows are the embedding, if `is_head` and the CPU kernels run it. Otherwise, the
            file's codes if it has any, because only the rows of a few tokens are read. Otherwise, a tensor of floats in
            the model's dtype.
        """
        own = stored_of(self._tensors, name) if self._bits and name in self else None
        is_coded = own is not None and not own.is_float
        if not ((is_coded or (is_head and not self._bits)) and takes_stored(self.dtype, bool(self._bits), self.device)):
            return self.get(name, shape)
        stored = replace(self._stored(name, shape, self._bits), requantises=False)
        return NativeLinear(stored, None) if is_head else stored

    def _matrix(self, name: str, shape: tuple[int, int], bits: int | None) -> Tensor | Codes | Stored:
        if takes_stored(self.dtype, bits is not None, self.device):
            return self._stored(name, shape, bits)
        return self._coded(name, shape, bits) if bits else self.get(name, shape)

    def _stored(self, name: str, shape: tuple[int, int], bits: int | None) -> Stored:
        own = stored_of(self._tensors, name) if name in self else None
        if own is None or not (bits or own.is_float):
            own = Stored.floats(self.get(name, shape, torch.float32 if bits else None), None)
        self._check(name, own.shape, shape)
        return replace(own, target=(own.target or bits) if bits else self.dtype, requantises=self.requantises)

    def borrowed(self, rows: Tensor, cut: bool = False) -> Tensor | Codes:
        """Return an output head that consists of another model's rows. It is quantised if these weights are quantised.

        `cut`: True if the head was reduced to some tokens for speed. It is then quantised to 4 bits, if the CPU kernels
        can run it.
        """
        fast = cut and rows.dtype != torch.float64 and takes_stored(rows.dtype, True, self.device)
        bits = 4 if fast else self._head_bits
        return quantize(rows, bits) if bits else rows

    def _coded(self, name: str, shape: tuple[int, int], bits: int) -> Codes:
        """Return the file's own codes if there are any, whatever their number of bits, because quantising twice loses
        more. Otherwise, return new codes."""
        own = codes_of(self._tensors, name) if name in self._tensors else None
        if own is None or (self.requantises and own.bits > bits):
            return quantize(self.get(name, shape, torch.float32), bits)
        self._check(name, own.shape, shape)
        return own.to(self.device)

    def linear(self, parts: Mapping[str, int], width: int, order: Tensor | None = None) -> Linear:
        """Build one linear layer for several projections of the same input, including biases.

        Args:
            parts: Number of outputs of each projection, by name.
            width: Number of inputs.
            order: The outputs to keep, in this order. None for all outputs.
        """
        weight, bias = self._stacked(parts, width)
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        factors = [self._factors(adapter, parts, width) for adapter in self._adapters]
        if order is not None:
            factors = [own and own.ordered(order) for own in factors]
        return adapted(linear(weight, bias), factors, self.dtype)

    def _factors(self, adapter: Factors, parts: Mapping[str, int], width: int) -> LowRank | None:
        """Return an adapter's factors for a linear layer of these projections. Experts are excluded, because each of
        them runs on only a few rows."""
        found = {name: adapter.factors.get(name) for name in parts if ".experts." not in name}
        for name in (name for name, factors in found.items() if factors):
            adapter.check(name, (parts[name], width))
            self._unused_factors.discard((adapter.name, name))
        moved = [factors and (factors[0].to(self.device), factors[1].to(self.device)) for factors in found.values()]
        return LowRank.stacked(moved, list(parts.values()))

    def router(self, name: str, shape: tuple[int, int], order: Tensor | None = None) -> Linear:
        """Build a linear layer that stays in the model's dtype, even if other linear layers are quantised.

        A router is small, and rounding it would change the choice of experts. `linear` describes `order`.
        """
        weight, bias = self.get(name + ".weight", shape), self._bias(name, shape[0]) if name + ".bias" in self else None
        if order is not None:
            weight, bias = weight[order.to(weight.device)], None if bias is None else bias[order.to(bias.device)]
        return linear(weight, bias)

    def gated(self, parts: Sequence[str], shape: tuple[int, int], activation: str) -> Activation:
        """Build the first half of a gated MLP.

        Args:
            parts: Names of the gate and up projections, or the name of a single tensor that contains both.
            shape: Shape [out, in] of each projection.
            activation: Name of the activation.
        """
        out, width = shape[0] * 2 // len(parts), shape[1]
        both = dict.fromkeys(parts, out)
        made = gated(*self._stacked(both, width), activation)
        adapt_gated(made, [self._factors(adapter, both, width) for adapter in self._adapters], self.dtype)
        return made

    def _stacked(self, parts: Mapping[str, int], width: int) -> tuple[Tensor | Codes | Stored, Tensor | None]:
        """Return the stacked projections, and their stacked biases if any projection has a bias."""
        weight = [self.matrix(name + ".weight", (out, width)) for name, out in parts.items()]
        bias = None
        if any(name + ".bias" in self for name in parts):
            bias = _joined([self._bias(name, out) for name, out in parts.items()])
        return _stack(weight), bias

    def _bias(self, name: str, out: int) -> Tensor:
        if name + ".bias" in self:
            return self.get(name + ".bias", (out,))
        return torch.zeros(out, dtype=self.dtype, device=self._vectors)

    def ones(self, size: int) -> Tensor:
        """Return the weight of a norm that has no weight in the checkpoint."""
        return torch.ones(size, dtype=self.dtype, device=self._vectors)

    def skip(self, name: str) -> None:
        """Mark a tensor as known, although it is not used."""
        self._unused.discard(name)

    def finish(self) -> None:
        """Check that every tensor and every change by an adapter was used.

        Raises:
            CorruptModel: If tensors are left over, which means that the file has another architecture.
            AdapterMismatch: If an adapter changes a module that the model does not have.
            UnsupportedModel: If an adapter changes a module for which adapters must be merged.
        """
        for adapter, module in sorted(self._unused_factors):
            if module + ".weight" in self._tensors:
                raise UnsupportedModel(
                    f"the adapter {adapter} changes {module}, which must be the same for all rows of a pass",
                    "Merge it into the model: give it as `adapter`, without a name",
                )
            raise AdapterMismatch(
                f"the adapter {adapter} changes {module}, which this model does not have",
                "It was trained for another model. Load it with that model",
            )
        if self._unused:
            some = ", ".join(sorted(self._unused)[:3])
            raise CorruptModel(
                f"the checkpoint holds {len(self._unused)} tensors that this architecture does not know ({some}, ...)",
                "It may be another architecture, or an adapter that must be merged first",
            )


def _stack(parts: Sequence[Tensor | Codes | Stored]) -> Tensor | Codes | Stored:
    """Stack matrices that all have the same type."""
    if stored := [part for part in parts if isinstance(part, Stored)]:
        return Stored.stack(stored)
    if codes := [part for part in parts if isinstance(part, Codes)]:
        return stack(codes)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return tensors[0] if len(tensors) == 1 else _joined(tensors)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate like `torch.cat`. On the meta device, `torch.cat` would import torch's compiler, which takes two
    seconds."""
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        place.copy_(part)
    return whole
