"""A stack of decoder layers. It runs layer by layer with torch, or in one call of the CPU kernels. If the kernels lack
only a mixer, torch runs the mixers, and the kernels run the feed-forward blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPass, slab_indices
from paceline.cache.shared import SharedSlabCache
from paceline.cache.slab import SlabCache
from paceline.cache.state import StateCache, StatePass
from paceline.kernels.cpu.attention import attend, attends_natively, padded_size
from paceline.kernels.low_rank import adapted_pass
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.cpu_layers import NativeLayers, native_mlp, runs_natively
from paceline.models.latent import LatentAttention
from paceline.models.layers import Attention, Layer
from paceline.models.mamba import Parallel
from paceline.models.ranks import Ranks, Summed
from paceline.models.recurrent import RecurrentMixer
from paceline.models.rope import Rope, RotarySet
from paceline.protocols import Pass, TargetWithHead
from paceline.types import Tap

_AnyAttention = Attention | LatentAttention


class LayerStack:
    """The layers of a model, split into one part per device. It computes their rotary factors (`ropes`), and creates
    their caches."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        host: TargetWithHead,
        mutual: Sequence[bool] = (),
        ranks: Ranks | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Prepare the layers.

        Args:
            config: The architecture.
            layers: The layers.
            host: The target. Its dtype, device and context length apply.
            mutual: For each layer, True if all rows of a pass see each other. Empty if this is the case in no layer.
            ranks: The ranks that hold the other parts of each layer. None without tensor parallelism.
            devices: Device of each layer. Empty if all layers are on the host's device.
        """
        plan, self._device, self._dtype = config.plan, host.device, host.dtype
        places = devices or [host.device] * len(plan)
        runs = [(device, len([*same])) for device, same in groupby(places)]
        # The kernels need heads that are padded to whole lanes. All parts of a model share one cache layout.
        padded = any(attends_natively(host.dtype, device) for device, _ in runs)
        parts = [(number, device) for number, (device, count) in enumerate(runs) for _ in range(count)]
        self._attentions = [
            self._attention(config, spec, one, both, padded, *part) if (one := _attention_of(layer)) else None
            for layer, spec, both, part in zip(layers, plan, mutual or (False,) * len(plan), parts, strict=True)
        ]
        mixers = [layer.mixer for layer in layers]
        self._recurrences = {i: mixer.recurrence for i, mixer in enumerate(mixers) if isinstance(mixer, RecurrentMixer)}
        self.multiplies_on_kernels = all(m.runs_on_kernels for m in mixers if isinstance(m, LatentAttention))
        """False if torch computes the products by head in a layer with latent attention."""
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
            if padded and runs_natively(placed.layers, host.dtype):
                placed.use_kernels(self._attentions, ranks)
            elif padded and placed.device.type == "cpu" and not ranks:
                for layer in placed.layers:
                    layer.native_mlp = native_mlp(layer, host.dtype)
        if ranks and not self.native:
            for layer in layers:  # `Division` supports only layers with both attention and an MLP
                assert layer.out
                assert layer.mlp
                layer.out, layer.mlp = Summed(layer.out, ranks), Summed(layer.mlp, ranks)
        head_dim = padded_size(config.head_dim) if padded else config.head_dim
        self._cache_sizes = config.kv_heads, head_dim, host.context_length

    @property
    def native(self) -> NativeLayers | None:
        """The structures of the CPU kernels, if one call of the kernels runs all layers. Otherwise None."""
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
        mixer: _AnyAttention,
        mutual: bool,
        padded: bool,
        part: int,
        device: torch.device,
    ) -> LayerAttention:
        """Return the description of a layer's attention that the cache needs."""
        own = config.of(spec)
        scale = config.attention.scale or own.head_dim**-0.5
        sizes = own.kv_heads, padded_size(own.head_dim) if padded else own.head_dim
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
            kernel=attend if padded and device.type == "cpu" else None,
        )

    def new_cache(self, kind: type[SlabCache] = SlabCache, dtype: torch.dtype | None = None) -> SlabCache:
        """Create a cache for these layers and the host's context length.

        Args:
            kind: Class of the cache. Models with recurrent layers get a `StateCache` instead.
            dtype: Dtype of keys and values (see `kv_types.py`). None for the host's dtype.
        """
        sizes = (*self._cache_sizes, dtype or self._dtype, self._device, self.ropes.spans)
        if self._recurrences:
            return StateCache(self._recurrences, self._attentions, *sizes)
        if kind is SlabCache and any(device.type != "cpu" for device in self.devices):
            kind = SharedSlabCache  # on a GPU, padding short slots costs less than more kernel launches
        return kind(self._attentions, *sizes, self.devices)

    def run(
        self,
        x: Tensor,
        first: int,
        end: int,
        ropes: Sequence[Rope],
        view: Pass,
        mixer_input: Tensor | None = None,
        taps: Sequence[int] = (),
        token_embeddings: Tensor | None = None,
        adapters: Sequence[int] = (),
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """Run layers `first` to `end` - 1.

        Args:
            x: The stream [B, T, H].
            first: Index of the first layer.
            end: Index after the last layer.
            ropes: The rotary factors of the pass, for all embeddings.
            view: The pass's view of the cache.
            mixer_input: Input of the first layer's mixer, [B, T, *], if it is not the normed stream.
            taps: Indices of layers from `first` to `end`, in ascending order. The stream that enters each of them is
                returned.
            token_embeddings: Per-layer token embeddings, [B, T, layers, P] (see `layers.TokenInput`).
            adapters: Index of each slot's adapter (see `kernels.low_rank`).

        Returns:
            The stream after the last layer, and the stream at each tap, on the host's device.
        """
        states: dict[Tap, Tensor] = {}
        for part in self._parts:
            start, stop = max(first, part.first), min(end, part.end)
            if start < stop:
                inner = [tap for tap in taps if start <= tap < stop]
                x, found = part.run(x, start, stop, ropes, view, mixer_input, inner, token_embeddings, adapters)
                states |= {tap: state.to(self._device) for tap, state in found.items()}
                mixer_input = None
        x = x.to(self._device)
        return x, states | ({end: x} if end in taps else {})


class _PlacedLayers:
    """Consecutive layers on one device."""

    def __init__(
        self,
        first: int,
        layers: Sequence[Layer],
        device: torch.device,
        rope_of: Sequence[int],
        indices: Sequence[tuple[int, int]],
    ) -> None:
        """`rope_of` and `indices` (see `slab_indices`) have an entry for each layer of the whole model."""
        self.first, self.end, self.layers, self.device = first, first + len(layers), layers, device
        self._rope_of = rope_of
        own = indices[first : self.end]
        slabs = [slab for slab, _ in own if slab >= 0]
        self._slabs = slice(min(slabs), max(slabs) + 1) if slabs else slice(0, 0)
        self._places = [(slab - self._slabs.start, index) for slab, index in own]
        self.native: NativeLayers | None = None

    def use_kernels(self, attentions: Sequence[LayerAttention | None], ranks: Ranks | None) -> None:
        """Run the layers on the CPU kernels from now on."""
        own = slice(self.first, self.end)
        self.native = NativeLayers(self.layers, attentions[own], self._places, self._rope_of[own], ranks, self.first)

    def run(
        self,
        x: Tensor,
        start: int,
        stop: int,
        ropes: Sequence[Rope],
        view: Pass,
        mixer_input: Tensor | None,
        taps: Sequence[int],
        token_embeddings: Tensor | None,
        adapters: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `LayerStack.run`. Indices of layers count the layers of the whole model."""
        x, mixer_input = x.to(self.device), None if mixer_input is None else mixer_input.to(self.device)
        ropes = [rope and (rope[0].to(self.device), rope[1].to(self.device)) for rope in ropes]
        if self.native and isinstance(view, SlabPass):
            plans, inner = view.plans[self._slabs], [tap - self.first for tap in taps]
            own = None if token_embeddings is None else token_embeddings[:, :, self.first : self.end].to(self.device)
            span = start - self.first, stop - self.first
            stateful = view if isinstance(view, StatePass) else None
            x, found = self.native.run(x, *span, ropes, plans, mixer_input, inner, own, adapters, stateful)
            return x, {self.first + tap: state for tap, state in found.items()}
        states = {}
        with adapted_pass(adapters):
            for index in range(start, stop):
                if index in taps:
                    states[index] = x
                own = None if token_embeddings is None else token_embeddings[:, :, index].to(self.device)
                x = self.layers[index - self.first](x, index, ropes[self._rope_of[index]], view, mixer_input, own)
                mixer_input = None
        return x, states


def _attention_of(layer: Layer) -> _AnyAttention | None:
    """Return a layer's attention, or None if it has none."""
    mixer = layer.mixer.attention if isinstance(layer.mixer, Parallel) else layer.mixer
    return mixer if isinstance(mixer, _AnyAttention) else None
