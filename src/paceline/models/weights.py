"""Tensors of a checkpoint, and the matrix products made of them."""

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
"""Least bits of an output head: it is one product of many, and decides every token."""


class Weights:
    """Tensors of a checkpoint, taken one by one: their shapes are checked, and none may be left over.

    Of `Quantised` tensors, products are made of codes; what is taken as a tensor stays one.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        adapters: Sequence[Factors] = (),
    ) -> None:
        """`adapters`: held beside the weights of the products that they change."""
        self._adapters = adapters
        self._changes = {(adapter.name, module) for adapter in adapters for module in adapter.factors}
        """Those that no product has taken."""
        self._tensors, self.dtype, self.device = tensors, dtype, device
        self._bits = tensors.bits if isinstance(tensors, Quantised) else None
        self.requantises = isinstance(tensors, Quantised) and tensors.requantise
        """Whether nothing keeps the codes that the file has it in, if they have more bits."""
        self._head_bits = self._bits and (self._bits if self.requantises else _HEAD_BITS)
        if self._bits and dtype == torch.float64:
            raise InvalidOption("quantised weights do not run in float64", "Use float32 or bfloat16, or no quantize")
        self.precise = torch.float64 if dtype == torch.float64 else torch.float32
        # Layers that predict later tokens ("mtp") are no part of the model.
        self._left = {
            name
            for name in tensors
            if not name.endswith(("rotary_emb.inv_freq", "masked_bias", "self_attn.bias"))
            and not name.startswith("mtp.")
        }

    def at(self, device: torch.device) -> Weights:
        """The same tensors, to be taken to another device."""
        part = copy(self)
        part.device = device
        return part

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Take one tensor, in the model's dtype (or the one given) and on its device. Raises `CorruptModel`."""
        if name not in self._tensors:
            raise CorruptModel(f"the checkpoint lacks {name}", "Fetch the model again")
        tensor = self._tensors[name]
        self._check(name, tuple(tensor.shape), shape)
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def _check(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise CorruptModel(
                f"{name} has shape {found} where the config means {shape}",
                "Config and weights are of different models; fetch the model again",
            )
        self._left.discard(name)

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor | Codes | Stored:
        """Take the matrix of a product: in the model's dtype, or codes if the weights are quantised."""
        return self._matrix(name, shape, self._bits)

    def head(self, name: str, shape: tuple[int, int]) -> Tensor | Codes | Stored:
        """Take the matrix of an output head."""
        return self._matrix(name, shape, self._head_bits)

    def embedding(self, name: str, shape: tuple[int, int], tied: bool) -> Tensor | NativeLinear:
        """Take an embedding: a tensor in the model's dtype, or a product, which has its rows and is a tied head too: of
        the file's own codes, or, if the head is tied, of floats."""
        own = stored_of(self._tensors, name) if self._bits and name in self else None
        shared = own is not None and not own.is_float if self._bits else tied
        if shared and takes_stored(self.dtype, self._bits is not None, self.device):
            return NativeLinear(replace(self._stored(name, shape, self._bits), fewer=False), None)
        return self.get(name, shape)

    def _matrix(self, name: str, shape: tuple[int, int], bits: int | None) -> Tensor | Codes | Stored:
        if takes_stored(self.dtype, bits is not None, self.device):
            return self._stored(name, shape, bits)
        return self._coded(name, shape, bits) if bits else self.get(name, shape)

    def _stored(self, name: str, shape: tuple[int, int], bits: int | None) -> Stored:
        own = stored_of(self._tensors, name) if name in self else None
        if own is None or not (bits or own.is_float):
            own = Stored.floats(self.get(name, shape, torch.float32 if bits else None), None)
        self._check(name, own.shape, shape)
        return replace(own, form=(own.form or bits) if bits else self.dtype, fewer=self.requantises)

    def borrowed(self, rows: Tensor, cut: bool = False) -> Tensor | Codes:
        """An output head of rows of another model, quantised if these weights are. `cut`: one that was cut for speed
        has 4 bits where there are kernels for them."""
        fast = cut and rows.dtype != torch.float64 and takes_stored(rows.dtype, True, self.device)
        bits = 4 if fast else self._head_bits
        return quantize(rows, bits) if bits else rows

    def _coded(self, name: str, shape: tuple[int, int], bits: int) -> Codes:
        """The file's own codes, whatever their bits, since quantising twice would lose twice; else the nearest ones."""
        own = codes_of(self._tensors, name) if name in self._tensors else None
        if own is None or (self.requantises and own.bits > bits):
            return quantize(self.get(name, shape, torch.float32), bits)
        self._check(name, own.shape, shape)
        return own.to(self.device)

    def linear(self, parts: Mapping[str, int], width: int, order: Tensor | None = None) -> Linear:
        """One product for several projections of the same input, with any biases. `parts`: name -> outputs. `order`:
        numbers of the outputs wanted, in their order."""
        weight, bias = self._stacked(parts, width)
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        changes = [self._change(adapter, parts, width) for adapter in self._adapters]
        if order is not None:
            changes = [change and change.ordered(order) for change in changes]
        return adapted(linear(weight, bias), changes, self.dtype)

    def _change(self, adapter: Factors, parts: Mapping[str, int], width: int) -> LowRank | None:
        """What an adapter changes of a product of these projections. Rows choose experts, so theirs are left."""
        found = {name: adapter.factors.get(name) for name in parts if ".experts." not in name}
        for name in (name for name, factors in found.items() if factors):
            adapter.check(name, (parts[name], width))
            self._changes.discard((adapter.name, name))
        moved = [factors and (factors[0].to(self.device), factors[1].to(self.device)) for factors in found.values()]
        return LowRank.stacked(moved, list(parts.values()))

    def router(self, name: str, shape: tuple[int, int], order: Tensor | None = None) -> Linear:
        """A product in the model's dtype even if the others are quantised: it is small, and chooses experts. `order`:
        as in `linear`."""
        weight, bias = self.get(name + ".weight", shape), self._bias(name, shape[0]) if name + ".bias" in self else None
        if order is not None:
            weight, bias = weight[order.to(weight.device)], None if bias is None else bias[order.to(bias.device)]
        return linear(weight, bias)

    def gated(self, parts: Sequence[str], shape: tuple[int, int], activation: str) -> Activation:
        """The first half of a gated MLP. `parts`: gate and up projections, or one that holds both; each of `shape`
        [out, in]."""
        out, width = shape[0] * 2 // len(parts), shape[1]
        both = dict.fromkeys(parts, out)
        made = gated(*self._stacked(both, width), activation)
        adapt_gated(made, [self._change(adapter, both, width) for adapter in self._adapters], self.dtype)
        return made

    def _stacked(self, parts: Mapping[str, int], width: int) -> tuple[Tensor | Codes | Stored, Tensor | None]:
        """The projections stacked, and their biases if any has one."""
        weight = [self.matrix(name + ".weight", (out, width)) for name, out in parts.items()]
        bias = None
        if any(name + ".bias" in self for name in parts):
            bias = _joined([self._bias(name, out) for name, out in parts.items()])
        return _stack(weight), bias

    def _bias(self, name: str, out: int) -> Tensor:
        if name + ".bias" in self:
            return self.get(name + ".bias", (out,))
        return torch.zeros(out, dtype=self.dtype, device=self.device)

    def ones(self, size: int) -> Tensor:
        """The weight of a norm without one."""
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def skip(self, name: str) -> None:
        """Mark a tensor as known but unused."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raise `CorruptModel` if tensors are left over: the model would not be the one in the file; for what adapters
        change, `AdapterMismatch` where the model has no such module, `UnsupportedModel` where it is merged only."""
        for adapter, module in sorted(self._changes):
            if module + ".weight" in self._tensors:
                raise UnsupportedModel(
                    f"the adapter {adapter} changes {module}, which must be the same for all rows of a pass",
                    "Merge it into the model: give it as `adapter`, without a name",
                )
            raise AdapterMismatch(
                f"the adapter {adapter} changes {module}, which this model does not have",
                "It was trained for another model; load it with that",
            )
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise CorruptModel(
                f"the checkpoint holds {len(self._left)} tensors this architecture does not know ({some}, ...)",
                "It may be another architecture, or an adapter that must be merged first",
            )


def _stack(parts: Sequence[Tensor | Codes | Stored]) -> Tensor | Codes | Stored:
    """Stack matrices, which are all of one class."""
    if stored := [part for part in parts if isinstance(part, Stored)]:
        return Stored.stack(stored)
    if codes := [part for part in parts if isinstance(part, Codes)]:
        return stack(codes)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return tensors[0] if len(tensors) == 1 else _joined(tensors)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """As `torch.cat`, which on the meta device imports torch's compiler: two seconds."""
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        place.copy_(part)
    return whole
