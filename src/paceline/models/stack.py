"""Decoder layers with all they share, run one after the other by torch, or by one call of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPass
from paceline.cache.slab import SlabCache
from paceline.cache.state import StateCache
from paceline.kernels.low_rank import adapted_pass
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.cpu_layers import NativeLayers, runs_natively, whole
from paceline.models.layers import Attention, Layer, SharedAttention
from paceline.models.mamba import Parallel
from paceline.models.recurrent import RecurrentMixer
from paceline.models.rope import Rope, RotarySet
from paceline.protocols import Pass, TargetWithHead
from paceline.types import Tap


class LayerStack:
    """Layers of a config, their rotary factors (`ropes`) and caches, and the CPU kernels' copy of them (`native`) where
    they can run them."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[Layer], host: TargetWithHead, mutual: Sequence[bool] = ()
    ) -> None:
        """`host`: the target, for dtype, device and context length. `mutual`: for each layer whether rows of one pass
        all see each other; () for none."""
        self._layers, plan = layers, config.plan
        native = runs_natively(layers, host.dtype)
        self._attentions = [
            self._attention(config, spec, one, both, native) if (one := _attending(layer)) else None
            for layer, spec, both in zip(layers, plan, mutual or (False,) * len(plan), strict=True)
        ]
        mixers = [layer.attention for layer in layers]
        self._recurrences = {i: mixer.recurrence for i, mixer in enumerate(mixers) if isinstance(mixer, RecurrentMixer)}
        precise = torch.promote_types(host.dtype, torch.float32)
        ropes = [(layer.rope, layer.head_dim or config.head_dim) for layer in plan]
        self.ropes = RotarySet(ropes, precise, host.device)
        head_dim = whole(config.head_dim) if native else config.head_dim
        self._cache_sizes = config.kv_heads, head_dim, host.context_length, host.dtype, host.device
        self.native = NativeLayers(layers, [a for a in self._attentions if a], self.ropes.index) if native else None

    @staticmethod
    def _attention(
        config: ModelConfig, spec: LayerConfig, mixer: Attention | SharedAttention, mutual: bool, native: bool
    ) -> LayerAttention:
        """Attention of one layer, as the cache knows it."""
        own = config.of(spec)
        scale = config.query_scale or own.head_dim**-0.5
        sizes = own.kv_heads, whole(own.head_dim) if native else own.head_dim
        heads = sizes if spec.kv_heads or spec.head_dim else None
        return LayerAttention(scale, spec.window, config.softcap, mutual, mixer.sinks, heads, spec.source)

    def new_cache(self, kind: type[SlabCache] = SlabCache) -> SlabCache:
        """A cache for these layers, as long as the host's context: of this kind unless there are recurrent ones."""
        if self._recurrences:
            return StateCache(self._recurrences, self._attentions, *self._cache_sizes, self.ropes.spans)
        return kind(self._attentions, *self._cache_sizes, self.ropes.spans)

    def run(
        self,
        x: Tensor,
        first: int,
        end: int,
        ropes: Sequence[Rope],
        attention: Pass,
        entry: Tensor | None = None,
        taps: Sequence[int] = (),
        given: Tensor | None = None,
        adapters: Sequence[int] = (),
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """Run layers first..end - 1. Returns the stream after them, and the stream that enters each of `taps`.

        x [B, T, H]: the stream. `ropes`: all rotary factors. `entry` [B, T, *]: input of the first layer's attention,
        if not the normed stream. `taps`: first to end, ascending. `given` [B, T, layers, P]: see `layers.TokenInput`.
        `adapters`: of each slot (`kernels.low_rank`).
        """
        if self.native and isinstance(attention, SlabPass):
            return self.native.run(x, first, end, ropes, attention, entry, taps, adapters)
        states: dict[Tap, Tensor] = {}
        with adapted_pass(adapters):
            for index in range(first, end):
                if index in taps:
                    states[index] = x
                own = None if given is None else given[:, :, index]
                x = self._layers[index](x, index, ropes[self.ropes.index[index]], attention, entry, own)
                entry = None
        return x, states | ({end: x} if end in taps else {})


def _attending(layer: Layer) -> Attention | SharedAttention | None:
    """The attention of a layer, if it has any."""
    mixer = layer.attention.attention if isinstance(layer.attention, Parallel) else layer.attention
    return mixer if isinstance(mixer, (Attention, SharedAttention)) else None
