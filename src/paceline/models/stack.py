"""The layers of a decoder, run one after the other: by torch, or where every part is native by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPass
from paceline.models.cpu_layers import NativeStack, runs
from paceline.models.layers import Layer
from paceline.models.rope import Rope
from paceline.types import Tap


class LayerStack(Protocol):
    def run(
        self,
        x: Tensor,
        first: int,
        end: int,
        ropes: Sequence[Rope],
        attention: SlabPass,
        entry: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """The stream x [B, T, H] through the layers first..end - 1, and what it was where each of `taps` (first to end,
        ascending) enters. `ropes`: of every kind. `entry` [B, T, *]: what the first layer's attention is made from, if
        not the normed stream."""
        ...


def stack(
    layers: Sequence[Layer], how: Sequence[LayerAttention], rope_of: Sequence[int], dtype: torch.dtype
) -> LayerStack:
    """`how`: the layers' attention, as their cache has it. `rope_of`: which of the factors each one takes. `dtype`: of
    the stream and the cache."""
    return NativeStack(layers, how, rope_of) if runs(layers, dtype) else TorchStack(layers, rope_of)


class TorchStack:
    def __init__(self, layers: Sequence[Layer], rope_of: Sequence[int]) -> None:
        self._layers, self._rope_of = layers, rope_of

    def run(
        self,
        x: Tensor,
        first: int,
        end: int,
        ropes: Sequence[Rope],
        attention: SlabPass,
        entry: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        found: dict[Tap, Tensor] = {}
        for index in range(first, end):
            if index in taps:
                found[index] = x
            x = self._layers[index](x, index, ropes[self._rope_of[index]], attention, entry)
            entry = None
        return x, found | ({end: x} if end in taps else {})
