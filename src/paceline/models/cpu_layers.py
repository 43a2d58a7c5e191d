"""Decoder layers that run in one call of `layers.cpp`: the C structures for weights and passes, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPlan
from paceline.cache.state import StatePass
from paceline.errors import OutOfMemory
from paceline.kernels.cpu.attention import CHeads, CView, KernelView, whole
from paceline.kernels.cpu.build import kernel, library
from paceline.kernels.cpu.matrix import FLOAT_KINDS, GATES, LANES, SMALLER, CMatrix, NativeGated, NativeLinear, fields
from paceline.kernels.linear import Linear
from paceline.kernels.low_rank import Adapted, NativeChanges, base_of
from paceline.models.cpu_states import CDeltaNet, CStretch, KernelStates, delta_net, gates_of
from paceline.models.layers import Attention, Dense, Layer, Mixture, SharedMixture
from paceline.models.norms import HeadNorm, LayerNorm, WideNorm
from paceline.models.ranks import Ranks, lost
from paceline.models.recurrent import DeltaNet
from paceline.models.rope import Rope


class _Expert(Structure):
    _fields_ = fields((CMatrix, "gate_up down"))


class _Routing(Structure):
    _fields_ = fields(
        (c_int32, "routed used normalised sigmoid groups groups_used group_best shared"), (c_void_p, "bias scales")
    )


class _CLayer(Structure):
    _fields_ = fields(
        (CMatrix, "qkv out router token_gate token_out"),
        (POINTER(_Expert), "experts"),
        (_Routing, "routing"),
        (c_void_p, "before_mix after_mix before_mlp after_mlp after_token query_norm key_norm value_norm"),
        (c_float, "eps residual_scale scale"),
        (c_int32, "hidden ffn activation head_dim token_first keys values view index rotation"),
        (CHeads, "heads"),
        (c_void_p, "on_qkv on_out on_gate_up on_down on_token_gate on_token_out"),
        (c_int32, "gated"),
        (POINTER(CDeltaNet), "delta"),
        (CMatrix, "shared_weight"),
    )


class _Rotation(Structure):
    _fields_ = fields((c_void_p, "cosines signed_sines"), (c_int32, "rotated"))


class _CPass(Structure):
    _fields_ = fields(
        (c_int32, "slots rows room threads"),
        (c_void_p, "indices"),
        (POINTER(CView), "views"),
        (POINTER(_Rotation), "rotations"),
        (c_void_p, "adapters"),
        (c_int32, "rank token_width"),
        (c_void_p, "tokens reduce ranks stretches"),
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
            attentions: Attention of each layer. None for a recurrent layer.
            places: See `slab_indices`. Slabs are numbered from the first slab in the `plans` of `run`.
            rope_of: Index of each layer's rotary factors.
            ranks: See `stack.LayerStack`.
            offset: Index, in the model, of the first of these layers.
        """
        mixers = [layer.attention for layer in layers]
        self._recurrent = {i: mixer.config for i, mixer in enumerate(mixers) if isinstance(mixer, DeltaNet)}
        self._offset, self._nets = offset, list[CDeltaNet]()
        self._held: list[Tensor] = []
        """The tensors that the structures point to. They are kept alive here."""
        self._changes: list[NativeChanges] = []
        self._layers = layers
        self._sums = None if ranks is None else _Sums(ranks)
        each = zip(layers, attentions, places, rope_of, strict=True)
        table = [self._structure(number, *own) for number, own in enumerate(each)]
        self._table = (_CLayer * len(table))(*table)
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
        entry: Tensor | None,
        taps: Sequence[int],
        given: Tensor | None = None,
        adapters: Sequence[int] = (),
        view: StatePass | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `stack.LayerStack.run`. `plans` are the plans of a `SlabPass`. If there are recurrent layers, this pass
        is `view`. No tap may be after the last layer."""
        entering, x = x, x.clone(memory_format=torch.contiguous_format)
        inner = [tap for tap in taps if first < tap < end]
        states = x.new_empty(len(inner), *x.shape)
        if first < end:
            rank = max((changes.rank for changes in self._changes), default=0)
            passed = _KernelPass(plans, ropes, adapters if rank else (), rank)
            if given is not None:
                given = given.to(x.dtype).contiguous()
                passed.c.tokens, passed.c.token_width = given.data_ptr(), given.shape[2:].numel()
            if self._sums:
                passed.c.reduce, passed.c.ranks = self._sums.function()
            if view and self._recurrent:
                configs = {self._offset + i: c for i, c in self._recurrent.items() if first <= i < end}
                passed.take(KernelStates(view, configs), self._recurrent_before(first))
            entry = None if entry is None else entry.contiguous()
            failed = self._run(
                *(ctypes.addressof(self._table) + first * ctypes.sizeof(_CLayer), end - first),
                *(byref(passed.c), FLOAT_KINDS[x.dtype], x.data_ptr()),
                *((None, 0) if entry is None else (entry.data_ptr(), entry.shape[-1])),
                *((c_int32 * len(inner))(*(tap - first for tap in inner)), len(inner), states.data_ptr()),
            )
            if failed == 2 and self._sums:
                raise self._sums.error or lost("within a pass")
            if failed:
                raise OutOfMemory(f"not enough memory for a pass of {passed.c.rows} rows", SMALLER)
        return x, dict(zip(inner, states, strict=True)) | ({first: entering} if first in taps else {})

    def _recurrent_before(self, number: int) -> int:
        """Return the number of recurrent layers before a layer."""
        return sum(i < number for i in self._recurrent)

    def _structure(
        self, number: int, layer: Layer, spec: LayerAttention | None, place: tuple[int, int], rope: int
    ) -> _CLayer:
        """Return the structure of a layer. `place`: See `slab_indices`."""
        parts = _parts(layer)
        assert parts
        mix, gated, last = parts.mix, parts.experts[0][0], layer.mlp_norm or (layer.post and layer.post[1])
        assert last
        given, (size, keys, values, heads) = layer.token_input, self._heads(parts, spec)
        if spec is None:
            place = 0, self._recurrent_before(number)
        experts = [_Expert(both.matrix.c, down.matrix.c) for _, both, down in parts.experts]
        of_given = [product.matrix.c for product in parts.given] or [CMatrix(), CMatrix()]
        products = [_first(mix), layer.out]
        products += [gated.both, layer.mlp.down] if isinstance(layer.mlp, Dense) else [None, None]
        products += [given.gate, given.out] if given else [None, None]
        return _CLayer(
            *(parts.qkv.matrix.c, parts.out.matrix.c, parts.router.matrix.c if parts.router else CMatrix()),
            *(*of_given, (_Expert * len(experts))(*experts), self._routing(parts)),
            *map(self._pointer, _norms(layer, mix)),
            *(last.eps, layer.residual_scale, 1.0 if layer.scale is None else layer.scale.item()),
            *(parts.out.matrix.shape[0], gated.out, GATES[gated.activation], size),
            *(number * of_given[0].out, keys, values, *place, rope),
            *(heads, *map(self._changed, products), isinstance(mix, Attention) and mix.gated),
            *(self._net(mix), parts.share.matrix.c if parts.share else CMatrix()),
        )

    def _heads(self, parts: _Parts, spec: LayerAttention | None) -> tuple[int, int, int, CHeads]:
        """Return the size of a head, the numbers of key heads and value heads in the product, and the structure of the
        heads."""
        mix = parts.mix
        if isinstance(mix, DeltaNet):
            size = mix.config.value_dim
            return size, 0, 0, CHeads(mix.config.heads, 0, whole(size))
        assert spec
        size, keys = mix.head_dim, mix.split[1]
        values = parts.qkv.matrix.shape[0] // size - mix.split[0] - mix.gated * mix.heads
        kv = spec.heads[0] if spec.heads else keys
        sinks = self._pointer(spec.sinks)
        return size, keys, values, CHeads(mix.heads, kv, whole(size), spec.scale, spec.softcap or 0.0, sinks)

    def _net(self, mix: Attention | DeltaNet) -> ctypes._Pointer[CDeltaNet] | None:
        if isinstance(mix, Attention):
            return None
        self._nets.append(delta_net(mix, self._pointer))
        return ctypes.pointer(self._nets[-1])

    def _routing(self, parts: _Parts) -> _Routing:
        mixture, groups = parts.mixture, parts.mixture and parts.mixture.groups
        if mixture is None:
            return _Routing(1, 1)
        routed = len(mixture.experts)
        return _Routing(
            *(routed, mixture.used, mixture.normalised, mixture.sigmoid),
            *((groups.count, groups.used, groups.best) if groups else (0, 0, 0)),
            *(len(parts.experts) - routed, self._pointer(mixture.bias), self._pointer(mixture.scales)),
        )

    def _changed(self, product: object) -> int | None:
        if not isinstance(product, Adapted):
            return None
        self._changes.append(NativeChanges(product))
        return ctypes.addressof(self._changes[-1].c)

    def _pointer(self, vector: Tensor | None) -> int | None:
        if vector is None:
            return None
        self._held.append(F.pad(vector.float(), (0, -len(vector) % LANES)).contiguous())
        return self._held[-1].data_ptr()


class _Sums:
    """The all-reduce within a pass, as a function that the kernels call. If a sum that ran in Python fails, `error` is
    its exception."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._reduce = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64)(self._add)
        self.error: Exception | None = None

    def function(self) -> tuple[int | None, int | None]:
        """Return the addresses of the function and of its first argument."""
        if (exchange := self._ranks.exchange) is None:
            return ctypes.cast(self._reduce, c_void_p).value, None
        add = kernel("paceline_sum", c_void_p, c_void_p, c_int64)
        return ctypes.cast(add, c_void_p).value, ctypes.addressof(exchange)

    def _add(self, ranks: int, address: int, count: int) -> int:
        try:
            part = torch.frombuffer((c_float * count).from_address(address), dtype=torch.float32)
            part.copy_(self._ranks.sum(part))
            return 0
        except Exception as error:
            self.error = error
            return 1


def runs_natively(layers: Sequence[Layer], dtype: torch.dtype) -> bool:
    """Return True if `NativeLayers` can run these layers. All of their products must be native, and at least one layer
    must have attention, because the plans for attention contain the rows of a pass."""
    attends = any(isinstance(layer.attention, Attention) for layer in layers)
    return dtype in FLOAT_KINDS and attends and all(map(_parts, layers)) and library() is not None


class _Parts(NamedTuple):
    """The products of a layer, without adapters.

    `experts` contains, for each feed-forward network, the gate and up projections, their product, and the down
    projection. A dense layer has a single network. A shared expert comes last. `given` contains the products for the
    token embeddings: gate and output. `router` belongs to `mixture`, and `share` computes the weight of its shared
    expert.
    """

    mix: Attention | DeltaNet
    qkv: NativeLinear
    out: NativeLinear
    experts: list[tuple[NativeGated, NativeLinear, NativeLinear]]
    given: list[NativeLinear]
    router: NativeLinear | None
    mixture: Mixture | None
    share: NativeLinear | None


def _parts(layer: Layer) -> _Parts | None:
    """Return the products of a layer, or None if the kernels cannot run the layer."""
    mix, mlp, found = layer.attention, layer.mlp, _networks(layer.mlp)
    if isinstance(mix, Attention):
        if mix.tempered or mix.rotated_first or isinstance(mix.norm, WideNorm):
            return None
    elif not isinstance(mix, DeltaNet) or gates_of(mix) is None:
        return None
    if type(layer) is not Layer or isinstance(layer.attn_norm, LayerNorm):
        return None
    if found is None:
        return None
    (mixture, dense), token = found, layer.token_input
    products = _native(_first(mix), layer.out, *((token.gate, token.out) if token else ()))
    share = mlp.share if isinstance(mlp, SharedMixture) else None
    scores = _native(*([mixture.router] if mixture else []), *([share] if share else []))
    if products is None or scores is None or len({score.matrix.kinds for score in scores}) > 1:
        return None
    router, weight = [*scores, None, None][:2]
    experts = []
    for one in dense:
        if not isinstance(one.gate_up, NativeGated) or not (pair := _native(one.gate_up.both, one.down)):
            return None
        experts.append((one.gate_up, pair[0], pair[1]))
    # The kernels require that all experts have the same type and shape, and do not apply adapters within a mixture.
    shapes = {(x.matrix.c.kind, y.matrix.c.kind, x.matrix.shape, y.matrix.shape) for _, x, y in experts}
    each = zip(dense, experts, strict=True)
    changed = mixture and any(gated.both is not both or one.down is not down for one, (gated, both, down) in each)
    if len(shapes) > 1 or changed:
        return None
    qkv, out, *given = products
    return _Parts(mix, qkv, out, experts, given, router, mixture, weight)


def _first(mix: Attention | DeltaNet) -> Linear:
    """Return the first projection of a mixer."""
    return mix.qkv if isinstance(mix, Attention) else mix.mixed


def _native(*products: object) -> list[NativeLinear] | None:
    """Return the products without adapters, or None if torch computes one of them."""
    found = [base for product in products if isinstance(base := base_of(product), NativeLinear)]
    return found if len(found) == len(products) else None


def _norms(layer: Layer, mix: Attention | DeltaNet) -> list[Tensor | None]:
    """Return the weights of a layer's norms, in the order of layer.h."""
    post, token = layer.post or (None, None), layer.token_input
    norms = [layer.attn_norm, post[0], layer.mlp_norm, post[1], token.norm if token else None]
    heads: list[Tensor | None] = [None, None, None]
    if isinstance(mix, Attention):
        both = [mix.norm.weight[0], mix.norm.weight[-1]] if isinstance(mix.norm, HeadNorm) else [None, None]
        heads = [*both, mix.value_norm.weight if mix.value_norm else None]
    return [*(norm.weight if norm else None for norm in norms), *heads]


def _networks(mlp: object) -> tuple[Mixture | None, Sequence[Dense]] | None:
    """Return the mixture in a feed-forward block (None if there is none), and all networks of the block. Return None if
    the kernels cannot run the block."""
    if isinstance(mlp, Dense):
        return None, [mlp]
    shared = [mlp.shared] if isinstance(mlp, SharedMixture) else []
    mixture = mlp.experts if isinstance(mlp, SharedMixture) and shared else mlp
    if not isinstance(mixture, Mixture) or mixture.weighs_inputs:
        return None
    plain = mixture.bias is None and mixture.scales is None and mixture.groups is None
    return (mixture, [*mixture.experts, *shared]) if plain or mixture.sigmoid else None


class _KernelPass:
    """A pass in the data structures of the kernels."""

    def __init__(
        self, plans: Sequence[Sequence[SlabPlan]], ropes: Sequence[Rope], adapters: Sequence[int] = (), rank: int = 0
    ) -> None:
        views = [KernelView(own) for own in plans]
        self._held: list[object] = [*views]
        rows = plans[0][0].rows
        self.c = _CPass(
            *(len(rows.slots), sum(rows.counts), rows.tokens.numel(), torch.get_num_threads()),
            ctypes.addressof(views[0].lines),
            (CView * len(plans))(*(view.c for view in views)),
            (_Rotation * len(ropes))(*(self._rotation(rope) for rope in ropes)),
            *(self._of_rows(adapters, rows.counts), rank),
        )

    def take(self, states: KernelStates, skipped: int) -> None:
        """Add the states of the recurrent layers. The first `skipped` recurrent layers do not run."""
        self._held.append(states)
        size = skipped * states.count * ctypes.sizeof(CStretch)
        self.c.stretches, self.c.stretch_count = ctypes.addressof(states.table) - size, states.count

    def _of_rows(self, adapters: Sequence[int], counts: Sequence[int]) -> int | None:
        """Return the address of an array with the adapter of each row, or None if no row has an adapter."""
        if not any(adapters):
            return None
        each = [number for number, count in zip(adapters, counts, strict=True) for _ in range(count)]
        self._held.append(array := (c_int32 * len(each))(*each))
        return ctypes.addressof(array)

    def _rotation(self, rope: Rope) -> _Rotation:
        if rope is None:
            return _Rotation(None, None, 0)
        cos, sin = (x.contiguous() for x in rope)
        self._held += [cos, sin]
        return _Rotation(cos.data_ptr(), sin.data_ptr(), cos.shape[-1])
