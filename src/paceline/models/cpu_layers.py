"""Decoder layers that run in one call of `layers.cpp`: the C structures for weights and passes, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPlan
from paceline.cache.state import StatePass
from paceline.errors import OutOfMemory
from paceline.kernels.cpu.attention import CHeads, CView, KernelView, padded_size
from paceline.kernels.cpu.build import kernel, library
from paceline.kernels.cpu.matrix import (
    ACTIVATION_KINDS,
    FLOAT_KINDS,
    LANES,
    SMALLER,
    CMatrix,
    NativeLinear,
    fields,
)
from paceline.kernels.low_rank import Adapted, NativeAdapters, adapters_of_pass
from paceline.models.config import DeltaNetConfig, MatrixConfig
from paceline.models.cpu_parts import (
    MixerParts,
    NativeNetwork,
    NativeParts,
    adaptable,
    expert_norms,
    layer_norms,
    native_parts,
)
from paceline.models.cpu_states import (
    CDeltaNet,
    CGatedConvolution,
    CMamba,
    CStretch,
    KernelStates,
    delta_net,
    gated_convolution,
    mamba,
)
from paceline.models.layers import Layer
from paceline.models.mamba import Mamba2
from paceline.models.ranks import Ranks, lost
from paceline.models.recurrent import DeltaNet, ShortConv
from paceline.models.rope import Rope

CStructure = TypeVar("CStructure", bound=Structure)


class _Expert(Structure):
    """The structure `Expert` in layer.h."""

    _fields_ = fields((CMatrix, "gate_up down"))


class _Routing(Structure):
    """The structure `Routing` in experts.h."""

    _fields_ = fields(
        (c_int32, "routed top_k normalised sigmoid groups groups_used group_best shared"), (c_void_p, "bias scales")
    )


class _CLayer(Structure):
    """The structure `Layer` in layer.h."""

    _fields_ = fields(
        (CMatrix, "qkv out router token_gate token_out"),
        (POINTER(_Expert), "experts"),
        (_Routing, "routing"),
        (c_void_p, "mixer_norm mixer_post_norm mlp_norm mlp_post_norm token_post_norm query_norm key_norm value_norm"),
        (c_float, "eps residual_scale scale"),
        (c_int32, "hidden ffn activation head_dim token_offset key_heads value_heads view index state rotation"),
        (CHeads, "heads"),
        (c_void_p, "qkv_adapters out_adapters gate_up_adapters down_adapters token_gate_adapters token_out_adapters"),
        (c_int32, "gated_attention"),
        (POINTER(CDeltaNet), "delta"),
        (CMatrix, "shared_gate"),
        (_Expert, "dense"),
        (c_int32, "dense_ffn"),
        (c_void_p, "expert_norm router_norm dense_post_norm expert_post_norm"),
        (POINTER(CGatedConvolution), "convolution"),
        (POINTER(CMamba), "mamba"),
        (CMatrix, "state_in state_out"),
        (c_void_p, "state_in_adapters state_out_adapters"),
        (c_int32, "gated_ffn"),
    )


class _Rotation(Structure):
    """The structure `Rotation` in attention.h."""

    _fields_ = fields((c_void_p, "cosines signed_sines"), (c_int32, "rotated"))


class _CPass(Structure):
    """The structure `Pass` in layer.h."""

    _fields_ = fields(
        (c_int32, "slots rows tensor_rows threads"),
        (c_void_p, "indices"),
        (POINTER(CView), "views"),
        (POINTER(_Rotation), "rotations"),
        (c_void_p, "adapters"),
        (c_int32, "max_rank token_width"),
        (c_void_p, "tokens reduce reduce_context stretches"),
        (c_int32, "stretch_count"),
    )


class NativeLayers:
    """Layers in the data structures of the kernels, and the call that runs them (see `stack.LayerStack`)."""

    def __init__(
        self,
        layers: Sequence[Layer],
        attentions: Sequence[LayerAttention | None],
        places: Sequence[tuple[int, int]],
        rope_of: Sequence[int],
        ranks: Ranks | None = None,
        offset: int = 0,
    ) -> None:
        """See `stack.LayerStack`.

        Args:
            layers: See `stack.LayerStack`.
            attentions: Attention of each layer. None for a layer without attention.
            places: See `slab_indices`. Slabs are numbered from the first slab in the `plans` of `run`.
            rope_of: Index of each layer's rotary factors.
            ranks: See `stack.LayerStack`.
            offset: Index, in the model, of the first of these layers.
        """
        parts = [*map(native_parts, layers)]
        states = [one.mixer.recurrent if one else None for one in parts]
        self._recurrent = {i: state.config for i, state in enumerate(states) if state}
        """Index of each recurrent layer -> its sizes."""
        self._offset = offset
        # Keep these objects alive, because the structures of the layers point to them.
        self._mixers = list[Structure]()
        self._tensors: list[Tensor] = []
        self._adapters: list[NativeAdapters] = []
        self._layers = layers
        self._all_reduce = None if ranks is None else _AllReduce(ranks)
        each = zip(layers, parts, attentions, places, rope_of, strict=True)
        structures = [self._structure(number, *arguments) for number, arguments in enumerate(each)]
        self._structures = (_CLayer * len(structures))(*structures)
        self._run = kernel(
            *("paceline_layers", c_void_p, c_int32, POINTER(_CPass), c_int32, c_void_p, c_void_p, c_int32),
            *(c_void_p, c_int32, c_void_p),
        )

    def run(
        self,
        x: Tensor,
        first: int,
        end: int,
        ropes: Sequence[Rope],
        plans: Sequence[Sequence[SlabPlan]],
        mixer_input: Tensor | None,
        taps: Sequence[int],
        token_embeddings: Tensor | None = None,
        adapters: Sequence[int] = (),
        view: StatePass | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `stack.LayerStack.run`. `plans` are the plans of a `SlabPass`, or empty if no layer has attention. `view`
        is that pass. It is required if there are recurrent layers. No tap may be after the last layer."""
        entering, x = x, x.clone(memory_format=torch.contiguous_format)
        inner = [tap for tap in taps if first < tap < end]
        states = x.new_empty(len(inner), *x.shape)
        if first < end:
            rank = max((own.rank for own in self._adapters), default=0)
            kernel_pass = _KernelPass(plans, ropes, x.shape[:2], adapters if rank else (), rank, view)
            c = kernel_pass.c
            if token_embeddings is not None:
                token_embeddings = token_embeddings.to(x.dtype).contiguous()
                c.tokens, c.token_width = token_embeddings.data_ptr(), token_embeddings.shape[2:].numel()
            if self._all_reduce:
                c.reduce, c.reduce_context = self._all_reduce.c_function()
            if view and self._recurrent:
                configs = {self._offset + i: sizes for i, sizes in self._recurrent.items() if first <= i < end}
                kernel_pass.add_states(KernelStates(view, configs), self._recurrent_before(first))
            mixer_input = None if mixer_input is None else mixer_input.contiguous()
            failed = self._run(
                *(ctypes.addressof(self._structures) + first * ctypes.sizeof(_CLayer), end - first),
                *(byref(c), FLOAT_KINDS[x.dtype], x.data_ptr()),
                *((None, 0) if mixer_input is None else (mixer_input.data_ptr(), mixer_input.shape[-1])),
                *((c_int32 * len(inner))(*(tap - first for tap in inner)), len(inner), states.data_ptr()),
            )
            if failed == 2 and self._all_reduce:
                raise self._all_reduce.error or lost("within a pass")
            if failed:
                raise OutOfMemory(f"not enough memory for a pass of {c.rows} rows", SMALLER)
        return x, dict(zip(inner, states, strict=True)) | ({first: entering} if first in taps else {})

    def _recurrent_before(self, number: int) -> int:
        """Return the number of recurrent layers before a layer."""
        return sum(i < number for i in self._recurrent)

    def _structure(
        self,
        number: int,
        layer: Layer,
        parts: NativeParts | None,
        spec: LayerAttention | None,
        place: tuple[int, int],
        rope: int,
    ) -> _CLayer:
        """Return the structure of a layer. `place`: See `slab_indices`."""
        assert parts
        mixer, network = parts.mixer, parts.networks[0] if parts.networks else None
        attention, recurrent = mixer.attention, mixer.recurrent
        norm = layer.mlp_norm or layer.mixer_norm or (layer.post_norms and layer.post_norms[1])
        last = network.down if network else mixer.out
        assert norm
        assert last
        head_dim, keys, values, heads = self._heads(mixer, spec)
        experts = [_Expert(one.gate_up.matrix.c, one.down.matrix.c) for one in parts.networks]
        token_gate, adapters = _matrix(parts.token_gate), [*map(self._adapters_of, adaptable(layer, parts))]
        return _CLayer(
            *map(_matrix, (mixer.qkv, mixer.out, parts.router)),
            *(token_gate, _matrix(parts.token_out)),
            *((_Expert * len(experts))(*experts) if experts else None, self._routing(parts)),
            *map(self._pointer, layer_norms(layer, attention)),
            *(norm.eps, layer.residual_scale, 1.0 if layer.scale is None else layer.scale.item()),
            *(last.matrix.shape[0], network.width if network else 0),
            *(ACTIVATION_KINDS[network.activation] if network else 0, head_dim),
            *(number * token_gate.out, keys, values, *place, self._recurrent_before(number), rope),
            *(heads, *adapters[:6], bool(attention and attention.gated)),
            self._kept(delta_net(recurrent, self._pointer) if isinstance(recurrent, DeltaNet) else None),
            _matrix(parts.shared_gate),
            *(*_dense_beside_experts(parts.dense), *map(self._pointer, expert_norms(layer, parts))),
            self._kept(gated_convolution(recurrent) if isinstance(recurrent, ShortConv) else None),
            self._kept(mamba(recurrent, self._pointer) if isinstance(recurrent, Mamba2) else None),
            *(*map(_matrix, (mixer.state_in, mixer.state_out)), *adapters[6:]),
            bool(network and network.gated),
        )

    def _heads(self, mixer: MixerParts, spec: LayerAttention | None) -> tuple[int, int, int, CHeads]:
        """Return the size of a head, the numbers of key heads and value heads that `qkv` outputs, and the structure of
        the heads. All are 0 without a mixer."""
        attention = mixer.attention
        if attention is None:
            if mixer.recurrent is None:
                return 0, 0, 0, CHeads()
            c = mixer.recurrent.config
            outputs = c.heads * c.value_dim if isinstance(c, MatrixConfig) else c.channels
            count, size = (c.heads, c.value_dim) if isinstance(c, DeltaNetConfig) else (1, outputs)
            return size, 0, 0, CHeads(count, 0, padded_size(size))
        assert spec
        assert mixer.qkv
        size, keys = attention.head_dim, attention.kv_heads
        values = mixer.qkv.matrix.shape[0] // size - attention.qk_heads - attention.gated * attention.heads
        kv_heads = spec.heads[0] if spec.heads else keys
        scale, softcap, sinks = spec.scale, spec.softcap or 0.0, self._pointer(spec.sinks)
        return size, keys, values, CHeads(attention.heads, kv_heads, padded_size(size), scale, softcap, sinks)

    def _kept(self, mixer: CStructure | None) -> ctypes._Pointer[CStructure] | None:
        """Keep the structure of a mixer alive, and return a pointer to it, or None for None."""
        if mixer is None:
            return None
        self._mixers.append(mixer)
        return ctypes.pointer(mixer)

    def _routing(self, parts: NativeParts) -> _Routing:
        moe = parts.moe
        if moe is None:
            return _Routing(1, 1)
        routed, groups = len(moe.experts), moe.groups
        return _Routing(
            *(routed, moe.used, moe.normalised, moe.sigmoid),
            *((groups.count, groups.used, groups.best) if groups else (0, 0, 0)),
            *(len(parts.networks) - routed, self._pointer(moe.bias), self._pointer(moe.scales)),
        )

    def _adapters_of(self, layer: object) -> int | None:
        """Return the address of a linear layer's LoRA factors, or None if no adapter changes it."""
        if not isinstance(layer, Adapted):
            return None
        self._adapters.append(NativeAdapters(layer))
        return ctypes.addressof(self._adapters[-1].c)

    def _pointer(self, vector: Tensor | None) -> int | None:
        """Return the address of a copy of a vector, in float32 and padded to whole lanes, or None for None."""
        if vector is None:
            return None
        self._tensors.append(F.pad(vector.float(), (0, -len(vector) % LANES)).contiguous())
        return self._tensors[-1].data_ptr()


class _AllReduce:
    """The all-reduce of tensor parallelism, as a C function that the kernels call within a pass.

    With shared memory, it is a function of the kernels. Otherwise, it is a callback into Python. `error` is the
    exception that the callback caught, or None.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._callback = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64)(self._sum)
        self.error: Exception | None = None

    def c_function(self) -> tuple[int | None, int | None]:
        """Return the addresses of the C function and of its context, which the kernels pass as the first argument
        (`Pass::reduce` and `Pass::reduce_context` in layer.h)."""
        if (memory := self._ranks.shared_memory) is None:
            return ctypes.cast(self._callback, c_void_p).value, None
        function = kernel("paceline_sum", c_void_p, c_void_p, c_int64)
        return ctypes.cast(function, c_void_p).value, ctypes.addressof(memory)

    def _sum(self, _context: int | None, address: int, count: int) -> int:
        """Sum `count` floats at `address` over all ranks, in place. Return 1 if this fails."""
        try:
            numbers = torch.frombuffer((c_float * count).from_address(address), dtype=torch.float32)
            numbers.copy_(self._ranks.sum(numbers))
            return 0
        except Exception as error:
            self.error = error
            return 1


def runs_natively(layers: Sequence[Layer], dtype: torch.dtype) -> bool:
    """Return True if the CPU kernels support every part of these layers."""
    return dtype in FLOAT_KINDS and all(map(native_parts, layers)) and library() is not None


def native_mlp(layer: Layer, dtype: torch.dtype) -> NativeMLP | None:
    """Return the feed-forward half of a layer for the CPU kernels, or None if they cannot run it."""
    if type(layer) is not Layer or not layer.mlp or layer.token_input or dtype not in FLOAT_KINDS or library() is None:
        return None
    half = copy(layer)
    half.mixer = half.mixer_norm = half.out = None
    return NativeMLP(half) if native_parts(half) else None


class NativeMLP:
    """The feed-forward half of a layer, for layers with a mixer that the kernels cannot run."""

    def __init__(self, half: Layer) -> None:
        """`half`: A layer without a mixer."""
        self._layers = NativeLayers([half], [None], [(0, 0)], [0])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output of the layer. x [B, T, H] is the stream after the mixer."""
        return self._layers.run(x, 0, 1, (), (), None, (), adapters=adapters_of_pass())[0]


def _matrix(linear: NativeLinear | None) -> CMatrix:
    """Return the structure of a linear layer's weight, or an empty structure."""
    return linear.matrix.c if linear else CMatrix()


def _dense_beside_experts(dense: NativeNetwork | None) -> tuple[_Expert, int]:
    """Return the structure and the width of the network in parallel with the experts, or an empty structure."""
    return (_Expert(dense.gate_up.matrix.c, dense.down.matrix.c), dense.width) if dense else (_Expert(), 0)


class _KernelPass:
    """A pass in the data structures of the kernels."""

    def __init__(
        self,
        plans: Sequence[Sequence[SlabPlan]],
        ropes: Sequence[Rope],
        shape: Sequence[int],
        adapters: Sequence[int] = (),
        rank: int = 0,
        states: StatePass | None = None,
    ) -> None:
        """`shape` is [B, T]. Without `plans` and `states`, all rows of the stream are rows of the pass."""
        views, (slots, length) = [KernelView(own) for own in plans], shape
        tensor_rows = slots * length
        rows = plans[0][0].rows if plans else states.rows if states else None
        counts = rows.counts if rows else (length,) * slots
        if views:
            indices = views[0].row_indices
        else:
            indices = (c_int64 * sum(counts))(*(rows.lines if rows else range(tensor_rows)))
        self._kept_alive: list[object] = [*views, indices]
        """The objects that the structure `c` points to."""
        self.c = _CPass(
            *(len(counts), len(indices), tensor_rows, torch.get_num_threads()),
            ctypes.addressof(indices),
            (CView * len(plans))(*(view.c for view in views)),
            (_Rotation * len(ropes))(*(self._rotation(rope) for rope in ropes)),
            *(self._row_adapters(adapters, counts), rank),
        )

    def add_states(self, states: KernelStates, skipped: int) -> None:
        """Add the states of the recurrent layers that run.

        `skipped`: Number of recurrent layers before the first layer of the pass. They have no stretches in the table,
        but the kernels count them when they index it. Therefore, the address of the table is moved back.
        """
        self._kept_alive.append(states)
        size = skipped * states.count * ctypes.sizeof(CStretch)
        self.c.stretches, self.c.stretch_count = ctypes.addressof(states.table) - size, states.count

    def _row_adapters(self, adapters: Sequence[int], counts: Sequence[int]) -> int | None:
        """Return the address of an array with the adapter of each row, or None if no row has an adapter."""
        if not any(adapters):
            return None
        each = [number for number, count in zip(adapters, counts, strict=True) for _ in range(count)]
        self._kept_alive.append(array := (c_int32 * len(each))(*each))
        return ctypes.addressof(array)

    def _rotation(self, rope: Rope) -> _Rotation:
        if rope is None:
            return _Rotation(None, None, 0)
        cos, sin = (x.contiguous() for x in rope)
        self._kept_alive += [cos, sin]
        return _Rotation(cos.data_ptr(), sin.data_ptr(), cos.shape[-1])
