"""Tensors out of a checkpoint, as the products they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.errors import CorruptModel
from paceline.runner import Activation, Linear, gated, linear


class Weights:
    """Takes tensors out of a checkpoint one by one, checks their shapes, and knows what was left over."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self.precise = torch.float64 if dtype == torch.float64 else torch.float32
        self._left = {name for name in tensors if not name.endswith(("rotary_emb.inv_freq", "masked_bias"))}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor in the model's dtype (or the one given), on its device."""
        if name not in self._tensors:
            raise CorruptModel(f"the checkpoint lacks {name}", "Fetch the model again")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise CorruptModel(
                f"{name} has shape {tuple(tensor.shape)} where the config means {shape}",
                "Config and weights are of different models; fetch the model again",
            )
        self._left.discard(name)
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def linear(self, parts: Mapping[str, int], width: int) -> Linear:
        """One product for several projections of the same input, biases included where there are any."""
        return linear(*self._stacked(parts, width))

    def gated(self, parts: Sequence[str], shape: tuple[int, int], activation: str) -> Activation:
        """The first half of a gated MLP: the projections `parts` are gate and up, or one that holds both, to `shape`
        [out, in] each."""
        out, width = shape[0] * 2 // len(parts), shape[1]
        return gated(*self._stacked(dict.fromkeys(parts, out), width), activation)

    def _stacked(self, parts: Mapping[str, int], width: int) -> tuple[Tensor, Tensor | None]:
        """The projections one above the other, and their biases if any has one."""
        weight = [self.get(name + ".weight", (out, width)) for name, out in parts.items()]
        bias = None
        if any(name + ".bias" in self for name in parts):
            bias = torch.cat([self._bias(name, out) for name, out in parts.items()])
        return weight[0] if len(weight) == 1 else torch.cat(weight), bias

    def _bias(self, name: str, out: int) -> Tensor:
        if name + ".bias" in self:
            return self.get(name + ".bias", (out,))
        return torch.zeros(out, dtype=self._dtype, device=self._device)

    def skip(self, name: str) -> None:
        """Leave a tensor unread that the model has no use for."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises `CorruptModel` where tensors were left over: the model would not be the one in the file."""
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise CorruptModel(
                f"the checkpoint holds {len(self._left)} tensors this architecture does not know ({some}, ...)",
                "It may be another architecture, or an adapter that must be merged first",
            )
