"""The layers of a decoder, run one after the other by torch, or by one call of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPass
from paceline.models.cpu_layers import NativeLayers, runs_natively
from paceline.models.layers import Layer
from paceline.models.rope import Rope
from paceline.protocols import Pass
from paceline.types import Tap


class LayerStack:
    """Decoder layers, with the CPU kernels' copy of them (`native`) where they can run them."""

    def __init__(
        self, layers: Sequence[Layer], attentions: Sequence[LayerAttention], rope_of: Sequence[int], dtype: torch.dtype
    ) -> None:
        """`attentions`: the layers' attention, as their cache has it. `rope_of`: index of the rotary factors each layer
        takes. `dtype`: of the stream and the cache."""
        self._layers, self._rope_of = layers, rope_of
        self.native = NativeLayers(layers, attentions, rope_of) if runs_natively(layers, dtype) else None

    def run(
        self,
        x: Tensor,
        first: int,
        end: int,
        ropes: Sequence[Rope],
        attention: Pass,
        entry: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """Run layers first..end - 1. Returns the stream after them, and the stream that enters each of `taps`.

        x [B, T, H]: the stream. `ropes`: all rotary factors. `entry` [B, T, *]: input of the first layer's attention,
        if not the normed stream. `taps`: first to end, ascending.
        """
        if self.native and isinstance(attention, SlabPass):
            return self.native.run(x, first, end, ropes, attention, entry, taps)
        states: dict[Tap, Tensor] = {}
        for index in range(first, end):
            if index in taps:
                states[index] = x
            x = self._layers[index](x, index, ropes[self._rope_of[index]], attention, entry)
            entry = None
        return x, states | ({end: x} if end in taps else {})
