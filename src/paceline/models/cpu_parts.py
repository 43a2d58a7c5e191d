"""What the CPU kernels can run: the parts of a decoder layer, in the form that `layer.h` needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from torch import Tensor

from paceline.kernels.cpu.matrix import NativeGated, NativeLinear
from paceline.kernels.linear import Linear, Ungated
from paceline.kernels.low_rank import without_adapters
from paceline.models.cpu_states import native_gates
from paceline.models.layers import Attention, Dense, Layer, Mixer, Mixture, MixtureWithDense, SharedMixture
from paceline.models.mamba import Mamba2, Parallel, SplitLinear
from paceline.models.norms import HeadNorm, LayerNorm, WideNorm
from paceline.models.recurrent import DeltaNet, ShortConv

NativeRecurrent = DeltaNet | ShortConv | Mamba2


class NativeNetwork(NamedTuple):
    """A feed-forward network, or an expert.

    Attributes:
        gate_up: The linear layer of the gate and up projections, or of the up projection only.
        down: The down projection.
        width: Number of outputs of each projection of `gate_up`.
        activation: Name of the activation.
        gated: False if there is no gate projection.
    """

    gate_up: NativeLinear
    down: NativeLinear
    width: int
    activation: str
    gated: bool

    @property
    def form(self) -> tuple[object, ...]:
        """The types and shapes of the matrices."""
        matrices = self.gate_up.matrix, self.down.matrix
        return tuple((one.c.kind, one.shape) for one in matrices)


class MixerParts(NamedTuple):
    """The parts of a layer's mixer. A layer may have attention, a recurrence, both in parallel, or neither.

    Attributes:
        attention: The attention, or None.
        recurrent: The recurrent mixer, or None.
        qkv: First projection of attention, or of the recurrent mixer if there is no attention.
        out: Output projection of the mixer that `qkv` belongs to.
        state_in: First projection of a recurrent mixer in parallel with attention.
        state_out: Output projection of a recurrent mixer in parallel with attention.
    """

    attention: Attention | None = None
    recurrent: NativeRecurrent | None = None
    qkv: NativeLinear | None = None
    out: NativeLinear | None = None
    state_in: NativeLinear | None = None
    state_out: NativeLinear | None = None


class NativeParts(NamedTuple):
    """The parts of a decoder layer that the kernels run. LoRA adapters are stripped from all linear layers.

    Attributes:
        mixer: The token mixer.
        networks: The feed-forward network, or all experts. See `_networks`. Empty without a feed-forward block.
        dense: The network in parallel with the experts, or None.
        moe: The mixture of experts. None in a dense layer.
        router: The router of `moe`.
        shared_gate: Computes the weight of the shared expert. None if the weight is 1.
        token_gate: Gate projection of the per-layer token embeddings. None if the layer adds none.
        token_out: Output projection of the per-layer token embeddings.
    """

    mixer: MixerParts
    networks: list[NativeNetwork]
    dense: NativeNetwork | None
    moe: Mixture | None
    router: NativeLinear | None
    shared_gate: NativeLinear | None
    token_gate: NativeLinear | None
    token_out: NativeLinear | None


def native_parts(layer: Layer) -> NativeParts | None:
    """Return the parts of a layer, or None if the kernels cannot run the layer."""
    mixer, mlp, token = _mixer_parts(layer), layer.mlp, layer.token_input
    if type(layer) is not Layer or isinstance(layer.mixer_norm or layer.mlp_norm, LayerNorm):
        return None
    if token and not mlp:
        return None
    experts = mlp.experts if isinstance(mlp, SharedMixture | MixtureWithDense) else mlp
    moe = experts if isinstance(experts, Mixture) else None
    if moe and (moe.weighs_inputs or not (moe.sigmoid or (moe.bias is None and moe.groups is None))):
        return None
    tokens = _native(*((token.gate, token.out) if token else ()))
    gate = mlp.shared_gate if isinstance(mlp, SharedMixture) else None
    routers = _native(*([moe.router] if moe else []), *([gate] if gate else []))
    if mixer is None or tokens is None or routers is None or len({one.matrix.kinds for one in routers}) > 1:
        return None
    if (networks := _networks(mlp)) is None:
        return None
    each, beside = networks
    if len({(one.activation, one.gated) for one in (*each, *([beside] if beside else []))}) > 1:
        return None
    token_gate, token_out = tokens or (None, None)
    router, shared_gate = [*routers, None, None][:2]
    return NativeParts(mixer, each, beside, moe, router, shared_gate, token_gate, token_out)


def _mixer_parts(layer: Layer) -> MixerParts | None:
    """Return the parts of a layer's mixer, or None if the kernels cannot run it."""
    mixer, out = layer.mixer, layer.out
    if mixer is None:
        return MixerParts()
    if isinstance(mixer, Parallel) and isinstance(out, SplitLinear):
        attention, state, (attention_out, state_out) = mixer.attention, mixer.other, out.parts
        if not (_supports(attention) and isinstance(state, Mamba2)):
            return None
        linears = _native(attention.qkv, attention_out, state.in_projection, state_out)
        return MixerParts(attention, state, *linears) if linears else None
    if not _supports(mixer) or (linears := _native(_first_projection(mixer), out)) is None:
        return None
    return MixerParts(mixer, None, *linears) if isinstance(mixer, Attention) else MixerParts(None, mixer, *linears)


def _supports(mixer: Mixer) -> TypeGuard[Attention | NativeRecurrent]:
    if isinstance(mixer, Attention):
        return not (mixer.rope_scales_queries or mixer.qk_norm_after_rope or isinstance(mixer.norm, WideNorm))
    return isinstance(mixer, NativeRecurrent) and (not isinstance(mixer, DeltaNet) or native_gates(mixer) is not None)


def _networks(mlp: object) -> tuple[list[NativeNetwork], NativeNetwork | None] | None:
    """Return the dense network or the experts of a feed-forward block, and the network in parallel with the experts.

    If a shared expert has the same shape and weight types as the other experts, it is the last of the experts.
    Otherwise, it is the network in parallel with them. Return None if the kernels cannot run the networks.
    """
    if mlp is None:
        return [], None
    if isinstance(mlp, Dense | Mixture):
        each = _native_networks([mlp], False) if isinstance(mlp, Dense) else _native_networks(mlp.experts, True)
        return (each, None) if each else None
    if not isinstance(mlp, SharedMixture | MixtureWithDense):
        return None
    other = mlp.shared if isinstance(mlp, SharedMixture) else mlp.dense
    each, beside = _native_networks(mlp.experts.experts, True), _native_networks([other], True)
    if not (each and beside):
        return None
    if isinstance(mlp, SharedMixture) and each[0].form == beside[0].form:
        return [*each, *beside], None
    return each, beside[0]


def _native_networks(dense: Sequence[Dense], are_experts: bool) -> list[NativeNetwork] | None:
    """Return the networks of a layer, or None if the kernels cannot run them.

    The kernels require that all experts have the same type and shape, and do not apply adapters to experts.
    """
    networks = []
    for one in dense:
        first = one.gate_up
        if not isinstance(first, NativeGated | Ungated) or not (pair := _native(first.linear, one.down)):
            return None
        if are_experts and not (first.linear is pair[0] and one.down is pair[1]):
            return None
        gated = isinstance(first, NativeGated)
        width = first.out if isinstance(first, NativeGated) else pair[0].matrix.shape[0]
        networks.append(NativeNetwork(pair[0], pair[1], width, first.activation, gated))
    return networks if len({one.form for one in networks}) == 1 else None


def _first_projection(mixer: Attention | NativeRecurrent) -> Linear:
    return mixer.qkv if isinstance(mixer, Attention) else mixer.in_projection


def adaptable(layer: Layer, parts: NativeParts) -> list[object]:
    """Return the linear layers that may have adapters, in the order of layer.h. The last two belong to a recurrence in
    parallel with attention. None stands for a linear layer that the decoder layer does not have."""
    mlp, token, none = layer.mlp, layer.token_input, (None, None)
    first = mlp.gate_up if isinstance(mlp, Dense) else None
    dense = (first.linear, mlp.down) if isinstance(mlp, Dense) and isinstance(first, NativeGated | Ungated) else none
    embeddings = (token.gate, token.out) if token else none
    mixer, recurrent = parts.mixer.attention or parts.mixer.recurrent, parts.mixer.recurrent
    out, state_out = layer.out.parts if isinstance(layer.out, SplitLinear) else (layer.out, None)
    state = (_first_projection(recurrent), state_out) if state_out and recurrent else none
    return [_first_projection(mixer) if mixer else None, out, *dense, *embeddings, *state]


def _native(*linears: object) -> list[NativeLinear] | None:
    """Return these linear layers without adapters, or None if one of them does not run on the CPU kernels."""
    found = [base for one in linears if isinstance(base := without_adapters(one), NativeLinear)]
    return found if len(found) == len(linears) else None


def layer_norms(layer: Layer, attention: Attention | None) -> list[Tensor | None]:
    """Return the weights of a layer's norms, in the order of layer.h."""
    post, token = layer.post_norms or (None, None), layer.token_input
    mlp_norm = layer.mlp.before[0] if isinstance(layer.mlp, MixtureWithDense) else layer.mlp_norm
    norms = [layer.mixer_norm, post[0], mlp_norm, post[1], token.norm if token else None]
    heads: list[Tensor | None] = [None, None, None]
    if attention:
        norm, values = attention.norm, attention.value_norm
        qk = [norm.weight[0], norm.weight[-1]] if isinstance(norm, HeadNorm) else [None, None]
        heads = [*qk, values.weight if values else None]
    return [*(norm.weight if norm else None for norm in norms), *heads]


def expert_norms(layer: Layer, parts: NativeParts) -> list[Tensor | None]:
    """Return the weights of `expert_norm`, `router_norm`, `dense_post_norm` and `expert_post_norm` (see layer.h).

    If `parts.dense` is a shared expert, the shared expert, the other experts and the router have the same input norm,
    and no output is normed. Without `parts.dense`, all weights are None.
    """
    if isinstance(layer.mlp, MixtureWithDense):
        return [norm.weight for norm in (*layer.mlp.before[1:], *layer.mlp.after)]
    inputs = layer.mlp_norm.weight if parts.dense and layer.mlp_norm else None
    return [inputs, inputs, None, None]
