"""The parts of a decoder layer, as plain callables on tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.kernels.activations import Activation, Gate
from paceline.kernels.linear import Linear
from paceline.models.config import Groups
from paceline.models.norms import HeadNorms, Norm
from paceline.models.ranks import Summed
from paceline.models.rope import Rope, rotate
from paceline.protocols import Pass, SharedPass
from paceline.verify.tree import MIN_ROWS


def sigmoid(x: Tensor) -> Tensor:
    """Compute the logistic function in float64, and round the result.

    In float32, torch uses another function for the last elements of a tensor, if they do not fill a SIMD vector. A
    row's bits would then depend on the number of rows.
    """
    return x.double().sigmoid().to(x.dtype)


class Addend(Protocol):
    """A part of a layer whose output is added to the stream: an MLP, or the output projection after a mixer."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self(x)."""
        ...


class Mixer(Protocol):
    """A token mixer, which is the part of a layer that mixes rows: attention, or a recurrence."""

    @abstractmethod
    def mix(self, x: Tensor, layer: int, rope: Rope, view: Any) -> Tensor:
        """Map normed rows x [B, T, H] to the input of the output projection, [B, T, *]."""
        ...


class Attention(Mixer):
    """Grouped-query attention with one linear layer for queries, keys and values.

    If it is gated (Qwen3-Next), the linear layer returns each query head followed by the gate for that head's output.
    """

    def __init__(
        self,
        qkv: Linear,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norm: HeadNorms | None = None,
        sinks: Tensor | None = None,
        gated: bool = False,
        value_norm: Norm | None = None,
        rope_scales_queries: bool = False,
        qk_norm_after_rope: bool = False,
    ) -> None:
        """Build attention.

        Args:
            qkv: Linear layer that computes queries, keys and values. It omits the values if they equal the keys before
                norm and rotation.
            heads: Number of query heads.
            kv_heads: Number of key heads.
            head_dim: Number of elements of a head.
            norm: QK-norm, or None.
            sinks: Attention sinks [heads] (see `cache.attention.LayerAttention`), or None.
            gated: True if the output is gated.
            value_norm: Norm of the values, or None.
            rope_scales_queries: True if the rotary factors only scale the queries (Llama 4).
            qk_norm_after_rope: True if QK-norm is applied after the rotary embedding (Hunyuan).
        """
        self.qkv, self.norm, self.sinks, self.gated, self.value_norm = qkv, norm, sinks, gated, value_norm
        self.qk_heads, self.kv_heads = heads + kv_heads, kv_heads
        self.heads, self.head_dim, self.rope_scales_queries = heads, head_dim, rope_scales_queries
        self.qk_norm_after_rope = qk_norm_after_rope

    def mix(self, x: Tensor, layer: int, rope: Rope, view: Pass) -> Tensor:
        """Attend. Return the output [B, T, heads * D] before the output projection.

        `rope` is None if the layer encodes no positions (SmolLM3).
        """
        b, t, _ = x.shape
        qkv, gate = self.qkv(x).view(b, t, -1, self.head_dim), None
        if self.gated:
            queries, rest = qkv.split([2 * self.heads, 2 * self.kv_heads], 2)
            qkv, gate = torch.cat([queries[:, :, ::2], rest], 2), queries[:, :, 1::2].flatten(2)
        qk, v = qkv[:, :, : self.qk_heads], qkv[:, :, -self.kv_heads :]
        if self.value_norm is not None:
            v = self.value_norm(v)
        if self.norm is not None and not self.qk_norm_after_rope:
            qk = self.norm(qk)
        if rope is not None and self.rope_scales_queries:
            qk = torch.cat([rotate(qk[:, :, : self.heads], *rope), qk[:, :, self.heads :]], 2)
        elif rope is not None:
            qk = rotate(qk, *rope)
        if self.norm is not None and self.qk_norm_after_rope:
            qk = self.norm(qk)
        out = view.attend(layer, qk[:, :, : self.heads], qk[:, :, self.heads :], v)
        return out if gate is None else out * sigmoid(gate)


class SharedAttention(Attention):
    """Attention without key heads, which reads the keys and values of an earlier layer (Gemma 4)."""

    # Only models with such layers use this class, and their caches return a `SharedPass`.
    def mix(self, x: Tensor, layer: int, rope: Rope, view: SharedPass) -> Tensor:  # type: ignore[override]
        """See `Attention.mix`."""
        q = self.qkv(x).unflatten(-1, (self.heads, self.head_dim))
        if self.norm is not None:
            q = self.norm(q)
        return view.look(layer, q if rope is None else rotate(q, *rope))


class Dense:
    """A feed-forward network, usually with a gate (Shazeer 2020)."""

    def __init__(self, gate_up: Activation, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self(x)."""
        return self.down.onto(self.gate_up(x), residual)


class Mixture:
    """A mixture of experts: a router sends each row through its top-k feed-forward networks.

    Scores are softmax (Shazeer et al. 2017; Mixtral, Qwen3) or sigmoid (DeepSeek-V3, LFM2). The choice may be limited
    to the best groups of experts (DeepSeek-V2 and V3).

    A row's bits do not depend on the other rows. A tie goes to the expert with the lowest index, and an expert
    runs on at least `MIN_ROWS` rows. The results of a row's experts are added in the order of their indices, as in
    transformers, but in float32 (float64 for a float64 model). The router's scores are compared in the precision of its
    linear layer.
    """

    def __init__(
        self,
        router: Linear,
        experts: Sequence[Dense],
        used: int,
        normalised: bool,
        scales: Tensor | None = None,
        sigmoid: bool = False,
        bias: Tensor | None = None,
        groups: Groups | None = None,
        weighs_inputs: bool = False,
    ) -> None:
        """Build the mixture.

        Args:
            router: Linear layer that computes the experts' logits.
            experts: The experts.
            used: Number of experts per row.
            normalised: True to scale the weights of a row's experts so that they sum to 1.
            scales: Factors for the experts' results, [experts], or None.
            sigmoid: True to compute scores by sigmoid instead of softmax.
            bias: Added to the scores to choose experts, but not to the weights, [experts]. None for no bias.
            groups: Limits the groups of experts among which a row may choose, or None.
            weighs_inputs: True to weigh the experts' inputs instead of their results (Llama 4).
        """
        self.router, self.experts, self.scales, self.groups = router, experts, scales, groups
        self.used, self.normalised, self.sigmoid, self.bias = used, normalised, sigmoid, bias
        self.weighs_inputs = weighs_inputs

    def __call__(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Run the experts on x [..., H]. `router_input`: The router's input [..., H], if it is not x."""
        rows = x.flatten(0, -2)
        weights, chosen = self._route(rows if router_input is None else router_input.flatten(0, -2))
        total = torch.zeros_like(rows, dtype=weights.dtype)
        for number in chosen.unique().tolist():
            here, rank = (chosen == number).nonzero(as_tuple=True)
            padded = torch.cat([here, here[:1].expand(max(0, MIN_ROWS - len(here)))])
            weight, inputs = weights[here, rank, None], rows[padded]
            if self.weighs_inputs:
                inputs[: len(here)] = (inputs[: len(here)] * weight).to(x.dtype)
            out = self.experts[number](inputs)[: len(here)].to(total.dtype)
            total.index_add_(0, here, out if self.weighs_inputs else out * weight)
        return total.to(x.dtype).view_as(x)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self(x)."""
        return residual + self(x)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each row's experts, both [N, used]."""
        logits = self.router.precise(rows)
        scores = sigmoid(logits) if self.sigmoid else logits.softmax(-1)
        # Llama 4 compares logits, because many of their sigmoids round to 1.
        compared = logits if self.weighs_inputs else scores
        compared = compared if self.bias is None else compared + self.bias
        if self.groups:
            compared = _limited(compared, self.groups)
        chosen = compared.sort(dim=-1, descending=True, stable=True)[1][:, : self.used]
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalised else weights
        return weights if self.scales is None else weights * self.scales[chosen], chosen


def _limited(scores: Tensor, groups: Groups) -> Tensor:
    """Set the scores [N, experts] outside of each row's best groups to -inf. In a tie, the first group wins."""
    each = scores.unflatten(-1, (groups.count, -1))
    together = each.sort(-1, descending=True)[0][..., : groups.best].sum(-1)
    others = together.sort(dim=-1, descending=True, stable=True)[1][:, groups.used :, None]
    limited: Tensor = each.scatter(1, others.expand(-1, -1, each.shape[-1]), -torch.inf).flatten(1)
    return limited


class SharedMixture:
    """A mixture of experts and a shared expert, which every row uses (Granite 4).

    `shared_gate` computes the weight of the shared expert for each row (Qwen3-Next). None if the weight is 1.
    """

    def __init__(self, experts: Mixture, shared: Dense, shared_gate: Linear | None) -> None:
        self.experts, self.shared, self.shared_gate = experts, shared, shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        if self.shared_gate is None:
            return self.shared.onto(x, self.experts(x))
        return self.experts(x) + (sigmoid(self.shared_gate.precise(x)) * self.shared(x)).to(x.dtype)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self(x)."""
        return residual + self(x)


class MixtureWithDense:
    """A mixture of experts in parallel with a dense network, each with its own norms (Gemma 4). The input is the stream
    without a norm."""

    def __init__(
        self,
        dense: Dense,
        experts: Mixture,
        before: tuple[Norm, Norm, Norm],
        after: tuple[Norm, Norm],
    ) -> None:
        """`before`: Input norms of the dense network, the experts and the router. `after`: Output norms of the dense
        network and the experts."""
        self.dense, self.experts, self.before, self.after = dense, experts, before, after

    def __call__(self, x: Tensor) -> Tensor:
        dense, experts, router = (norm(x) for norm in self.before)
        first, second = self.after
        return first(self.dense(dense)) + second(self.experts(experts, router))

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self(x)."""
        return residual + self(x)


FeedForward = Dense | Mixture | SharedMixture | MixtureWithDense


class TokenInput:
    """Adds per-layer token embeddings to the stream (Gemma 4)."""

    def __init__(self, gate: Linear, activation: Gate, out: Linear, norm: Norm) -> None:
        self.gate, self._activation, self.out, self.norm = gate, activation, out, norm

    def __call__(self, x: Tensor, token_embeddings: Tensor) -> Tensor:
        """Return x [B, T, H] plus the contribution of the layer's token embeddings [B, T, P]."""
        return x + self.norm(self.out(self._activation(self.gate(x), token_embeddings)))


class Layer:
    """A pre-norm decoder layer. The mixer (attention or a recurrence), followed by `out`, adds its result to the
    stream. Then `mlp` adds its result.

    With `post_norms`, both results are normed before they are added (Gemma 2 and 3). Either half may be missing
    (Mamba-2, Nemotron-H). Without `mixer_norm`, the input of the mixer is the stream itself, unless `mixer_input` is
    given.
    """

    def __init__(
        self,
        mixer_norm: Norm | None,
        mixer: Mixer | None,
        out: Addend | None,
        mlp_norm: Norm | None,
        mlp: FeedForward | None,
        post_norms: tuple[Norm, Norm] | None = None,
        residual_scale: float = 1.0,
        token_input: TokenInput | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """`mlp_norm`: None if `mlp` norms its own input. `scale`: Factor for the layer's output, [1]."""
        self.mixer_norm, self.mixer, self.mlp_norm = mixer_norm, mixer, mlp_norm
        self.out: Addend | None = out
        self.mlp: FeedForward | Summed | None = mlp
        self.post_norms, self.residual_scale = post_norms, residual_scale
        self.token_input, self.scale = token_input, scale
        self.native_mlp: Callable[[Tensor], Tensor] | None = None
        """Runs everything after the mixer on the CPU kernels, if only the mixer needs torch (`LayerStack` sets it)."""

    def __call__(
        self,
        x: Tensor,
        layer: int,
        rope: Rope,
        view: Pass,
        mixer_input: Tensor | None = None,
        token_embeddings: Tensor | None = None,
    ) -> Tensor:
        """Run the layer on the stream x [B, T, H].

        Args:
            x: The stream.
            layer: Index of the layer.
            rope: Rotary factors. None if the layer encodes no positions.
            view: The pass's view of the cache.
            mixer_input: Input of the mixer, if it is not the normed stream.
            token_embeddings: The layer's token embeddings (see `TokenInput`), or None.
        """
        first, second = self.post_norms or (None, None)
        if self.mixer and self.out:
            if mixer_input is None:
                mixer_input = x if self.mixer_norm is None else self.mixer_norm(x)
            x = self._plus(x, self.out, self.mixer.mix(mixer_input, layer, rope, view), first)
        if self.native_mlp:
            return self.native_mlp(x)
        if self.mlp:
            x = self._plus(x, self.mlp, x if self.mlp_norm is None else self.mlp_norm(x), second)
        if self.token_input is not None and token_embeddings is not None:
            x = self.token_input(x, token_embeddings)
        return x if self.scale is None else x * self.scale

    def _parts(self) -> tuple[Norm, Mixer, Addend, FeedForward | Summed]:
        """Return the input norm, the mixer, its output projection and the MLP. The layer must have all four."""
        assert self.mixer_norm
        assert self.mixer
        assert self.out
        assert self.mlp
        return self.mixer_norm, self.mixer, self.out, self.mlp

    def _plus(self, x: Tensor, part: Addend, y: Tensor, norm: Norm | None) -> Tensor:
        """Add a part's output for input y to the stream x."""
        if norm is None and self.residual_scale == 1.0:
            return part.onto(y, x)
        y = part(y) if norm is None else norm(part(y))
        return x + (y if self.residual_scale == 1.0 else y * self.residual_scale)


class ParallelLayer(Layer):
    """A decoder layer whose attention and MLP both read the stream that enters it (GPT-J, Wang and Komatsuzaki 2021).
    Both share one norm, unless there is an `mlp_norm`."""

    def __call__(
        self,
        x: Tensor,
        layer: int,
        rope: Rope,
        view: Pass,
        mixer_input: Tensor | None = None,
        token_embeddings: Tensor | None = None,
    ) -> Tensor:
        """See `Layer`. These layers have neither `post_norms` nor per-layer embeddings."""
        norm, mixer, out, mlp = self._parts()
        normed = norm(x)
        mixed = mixer.mix(normed, layer, rope, view)
        return mlp.onto(normed if self.mlp_norm is None else self.mlp_norm(x), out.onto(mixed, x))
