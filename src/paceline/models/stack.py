"""Decoder layers with all they share, run one after the other by torch, or by one call of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPass, slab_indices
from paceline.cache.shared import SharedSlabCache
from paceline.cache.slab import SlabCache
from paceline.cache.state import StateCache
from paceline.kernels.cpu.matrix import LANES
from paceline.kernels.low_rank import adapted_pass
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.cpu_layers import NativeLayers, runs_natively, whole
from paceline.models.latent import LatentAttention
from paceline.models.layers import Attention, Layer, SharedAttention
from paceline.models.mamba import Parallel
from paceline.models.ranks import Ranks, Summed
from paceline.models.recurrent import RecurrentMixer
from paceline.models.rope import Rope, RotarySet
from paceline.protocols import Pass, TargetWithHead
from paceline.types import Tap

_Attending = Attention | SharedAttention | LatentAttention


class LayerStack:
    """Layers of a config, their rotary factors (`ropes`) and caches, in parts that each lie on one device."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        host: TargetWithHead,
        mutual: Sequence[bool] = (),
        ranks: Ranks | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """`host`: the target, for dtype, device and context length. `mutual`: for each layer whether rows of one pass
        all see each other; () for none. `ranks`: those that have the other parts of each layer. `devices`: of the
        layers; () for the host's."""
        plan, self._device = config.plan, host.device
        native = _natively(layers, plan, host.dtype)
        runs = [(device, len([*same])) for device, same in groupby(devices or [host.device] * len(plan))]
        numbers = [number for number, (_, count) in enumerate(runs) for _ in range(count)]
        self._attentions = [
            self._attention(config, spec, one, both, native, part) if (one := _attending(layer)) else None
            for layer, spec, both, part in zip(layers, plan, mutual or (False,) * len(plan), numbers, strict=True)
        ]
        mixers = [layer.attention for layer in layers]
        self._recurrences = {i: mixer.recurrence for i, mixer in enumerate(mixers) if isinstance(mixer, RecurrentMixer)}
        precise = torch.promote_types(host.dtype, torch.float32)
        rotary = config.attention.latent.rotary if config.attention.latent else config.head_dim
        ropes = [(layer.rope or layer.temperature, layer.head_dim or rotary) for layer in plan]
        self.ropes = RotarySet(ropes, precise, host.device)
        self._parts = list[_PlacedLayers]()
        indices = slab_indices(self._attentions)
        for device, count in runs:
            first = self._parts[-1].end if self._parts else 0
            self._parts.append(_PlacedLayers(first, layers[first : first + count], device, self.ropes.index, indices))
        for placed in self._parts:
            # Torch's attention reads heads without padding, and all parts have one cache.
            own = plan[placed.first : placed.end]
            if native or (config.head_dim % LANES == 0 and _natively(placed.layers, own, host.dtype)):
                placed.take(self._attentions, ranks)
        if ranks and not native:
            for layer in layers:  # of which all attend and feed, see `Division`
                assert layer.out
                assert layer.mlp
                layer.out, layer.mlp = Summed(layer.out, ranks), Summed(layer.mlp, ranks)
        head_dim = whole(config.head_dim) if native else config.head_dim
        self._cache_sizes = config.kv_heads, head_dim, host.context_length, host.dtype, host.device

    @property
    def native(self) -> NativeLayers | None:
        """The CPU kernels' copy of all layers, if they run all in one call."""
        return self._parts[0].native if len(self._parts) == 1 else None

    @property
    def devices(self) -> list[torch.device]:
        """The device of each part, in the order of the layers."""
        return [part.device for part in self._parts]

    @property
    def device_of(self) -> list[torch.device]:
        """The device of each layer."""
        return [part.device for part in self._parts for _ in part.layers]

    @staticmethod
    def _attention(
        config: ModelConfig,
        spec: LayerConfig,
        mixer: _Attending,
        mutual: bool,
        native: bool,
        part: int,
    ) -> LayerAttention:
        """Attention of one layer, as the cache knows it."""
        own = config.of(spec)
        scale = config.attention.scale or own.head_dim**-0.5
        sizes = own.kv_heads, whole(own.head_dim) if native else own.head_dim
        heads = sizes if spec.kv_heads or spec.head_dim else None
        return LayerAttention(
            scale,
            window=spec.window,
            softcap=config.attention.softcap,
            mutual=mutual,
            sinks=mixer.sinks,
            heads=heads,
            source=spec.source,
            part=part,
            single=config.attention.latent is not None,
            chunked=spec.chunked,
        )

    def new_cache(self, kind: type[SlabCache] = SlabCache) -> SlabCache:
        """A cache for these layers, as long as the host's context: of this kind unless there are recurrent ones."""
        if self._recurrences:
            return StateCache(self._recurrences, self._attentions, *self._cache_sizes, self.ropes.spans)
        if kind is SlabCache and any(device.type != "cpu" for device in self.devices):
            kind = SharedSlabCache  # each call of a kernel costs more there than the columns of some longer slot
        return kind(self._attentions, *self._cache_sizes, self.ropes.spans, self.devices)

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
        """Run layers first..end - 1. Returns the stream after them, and the stream that enters each of `taps`, both on
        the host's device.

        x [B, T, H]: the stream. `ropes`: all rotary factors. `entry` [B, T, *]: input of the first layer's attention,
        if not the normed stream. `taps`: first to end, ascending. `given` [B, T, layers, P]: see `layers.TokenInput`.
        `adapters`: of each slot (`kernels.low_rank`).
        """
        states: dict[Tap, Tensor] = {}
        for part in self._parts:
            start, stop = max(first, part.first), min(end, part.end)
            if start < stop:
                inner = [tap for tap in taps if start <= tap < stop]
                x, found = part.run(x, start, stop, ropes, attention, entry, inner, given, adapters)
                states |= {tap: state.to(self._device) for tap, state in found.items()}
                entry = None
        x = x.to(self._device)
        return x, states | ({end: x} if end in taps else {})


class _PlacedLayers:
    """Successive layers on one device."""

    def __init__(
        self,
        first: int,
        layers: Sequence[Layer],
        device: torch.device,
        rope_of: Sequence[int],
        indices: Sequence[tuple[int, int]],
    ) -> None:
        """`rope_of`: by layer, all layers. `indices`: their `slab_indices`."""
        self.first, self.end, self.layers, self.device = first, first + len(layers), layers, device
        self._rope_of = rope_of
        slabs = [slab for slab, _ in indices[first : self.end] if slab >= 0]
        self._slabs = slice(min(slabs), max(slabs) + 1) if slabs else slice(0)
        self.native: NativeLayers | None = None

    def take(self, attentions: Sequence[LayerAttention | None], ranks: Ranks | None) -> None:
        """Let the CPU kernels run the layers."""
        own = [attention for attention in attentions[self.first : self.end] if attention]
        self.native = NativeLayers(self.layers, own, self._rope_of[self.first : self.end], ranks)

    def run(
        self,
        x: Tensor,
        start: int,
        stop: int,
        ropes: Sequence[Rope],
        attention: Pass,
        entry: Tensor | None,
        taps: Sequence[int],
        given: Tensor | None,
        adapters: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `LayerStack.run`; all numbers are those of the model's layers."""
        x, entry = x.to(self.device), None if entry is None else entry.to(self.device)
        ropes = [rope and (rope[0].to(self.device), rope[1].to(self.device)) for rope in ropes]
        if self.native and isinstance(attention, SlabPass):
            plans, inner = attention.plans[self._slabs], [tap - self.first for tap in taps]
            x, found = self.native.run(x, start - self.first, stop - self.first, ropes, plans, entry, inner, adapters)
            return x, {self.first + tap: state for tap, state in found.items()}
        states = {}
        with adapted_pass(adapters):
            for index in range(start, stop):
                if index in taps:
                    states[index] = x
                own = None if given is None else given[:, :, index].to(self.device)
                x = self.layers[index - self.first](x, index, ropes[self._rope_of[index]], attention, entry, own)
                entry = None
        return x, states


def _natively(layers: Sequence[Layer], plan: Sequence[LayerConfig], dtype: torch.dtype) -> bool:
    """Whether the CPU kernels can run these layers, whose windows move with each position."""
    return not any(spec.chunked for spec in plan) and runs_natively(layers, dtype)


def _attending(layer: Layer) -> _Attending | None:
    """The attention of a layer, if it has any."""
    mixer = layer.attention.attention if isinstance(layer.attention, Parallel) else layer.attention
    return mixer if isinstance(mixer, _Attending) else None
