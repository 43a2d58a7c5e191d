"""The decoder of all native families. Its config decides the architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.slab import SlabCache
from paceline.kernels.activations import ACTIVATIONS
from paceline.kernels.cpu.matrix import NativeLinear, read_rows, softcap_
from paceline.kernels.linear import Linear, Ungated, linear
from paceline.kernels.low_rank import Factors, adapted_pass
from paceline.kernels.stored import Stored
from paceline.models.config import LayerConfig, MixtureConfig, ModelConfig, RopeConfig
from paceline.models.latent import make_latent
from paceline.models.layers import (
    Addend,
    Attention,
    Dense,
    FeedForward,
    Layer,
    Mixer,
    Mixture,
    MixtureWithDense,
    ParallelLayer,
    SharedAttention,
    SharedMixture,
    TokenInput,
)
from paceline.models.mamba import Parallel, SplitLinear, make_state
from paceline.models.norms import HeadNorm, Norm, RMSNorm, make_head_norms, make_norm
from paceline.models.ranks import Ranks
from paceline.models.stack import LayerStack
from paceline.models.weights import Weights
from paceline.protocols import KVCache, Pass
from paceline.types import Forward, Rows, Tap, Want

_HEAD_ROWS = 256
"""Number of outputs in the head of an excerpt."""

_PADDING = 0
"""The padding token of all models with per-layer embeddings (Gemma 4)."""

Progress = Callable[[int, int], None]
"""Called with the number of layers loaded so far and the total number of layers."""


class Decoder:
    """A decoder-only transformer as a `Target`."""

    _cache_type: type[SlabCache] = SlabCache
    ranks: Ranks | None = None
    """The ranks that hold the other parts of the model. None without tensor parallelism."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda done, total: None,
        head_tokens: Tensor | None = None,
        adapters: Sequence[Factors] = (),
        devices: Sequence[torch.device] = (),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Build the model.

        Args:
            config: The architecture.
            tensors: Weights by Hugging Face name, in any float dtype.
            dtype: Dtype of the computation.
            device: Device of the embedding, the final norm and the output head. It is also the default device of the
                layers.
            progress: Called before each layer is loaded, and at the end.
            head_tokens: Token ids of the logits' columns [..., C], for draft models on the CPU that have a reduced
                vocabulary. None for all tokens.
            adapters: LoRA adapters. Each request may use one of them (`KVCache.acquire`).
            devices: Device of each layer. Empty if all layers are on `device`.
            kv_dtype: Dtype of keys and values in the cache (`kv_types.py`). None for `dtype`.

        Raises:
            CorruptModel: If a tensor is missing, unknown or has the wrong shape.
            AdapterMismatch: If an adapter changes a module that the model does not have.
            UnsupportedModel: If an adapter changes a module that can only be merged.
        """
        self.config, self.dtype, self.device = config, dtype, device
        self.kv_dtype = kv_dtype or dtype
        self.vocab_size, self.context_length, self.layers = config.vocab_size, config.context_length, config.layers
        weights = Weights(tensors, dtype, device, adapters)
        self.adapters = tuple(adapter.name for adapter in adapters)
        table = (config.vocab_size, config.hidden)
        self._bias = bias = weights.get("lm_head.bias", table[:1]) if "lm_head.bias" in weights else None
        is_head = config.tied and head_tokens is None and bias is None and not weights.requantises
        self._embed = weights.embedding("model.embed_tokens.weight", table, is_head)
        # Round the scale to the model's dtype first, as the published models do.
        self._embed_scale = torch.tensor(config.embed_scale).to(dtype).item()
        layers = []
        for index, layer in enumerate(config.plan):
            progress(index, config.layers)
            name = f"model.layers.{index}."
            layers.append(make_layer(config, layer, weights.at(devices[index]) if devices else weights, name))
        self._stack = LayerStack(config, layers, self, ranks=self.ranks, devices=devices)
        self._token_inputs = TokenInputs(config, weights) if config.token_inputs else None
        self.norm = make_norm(config, weights, "model.norm", config.hidden)
        if config.tied:
            weights.skip("lm_head.weight")
        if isinstance(self._embed, NativeLinear):
            self._head: Linear = self._embed
        else:
            head = weights.head("model.embed_tokens.weight" if config.tied else "lm_head.weight", table)
            every = slice(None) if head_tokens is None else head_tokens
            self._head = linear(head[every], None if bias is None else bias[every])
        weights.finish()
        progress(config.layers, config.layers)

    @property
    def tables(self) -> list[Tensor | NativeLinear | Stored]:
        """The embedding matrices that are not also an output head. A pass reads only the rows of its tokens from
        them."""
        inputs = [self._token_inputs.table] if self._token_inputs else []
        return [table for table in (self._embed, *inputs) if table is not self._head]

    def excerpt(self) -> Decoder:
        """See `protocols.Divisible`.

        The excerpt has one layer of each kind, and one more layer after them, because a layer's effect on the cache
        shows only in a later layer.
        """
        if self.device.type != "cpu" or len(self._stack.devices) > 1:
            return self
        plan, part = self.config.plan, copy(self)
        layers = min(len(plan), 2 + max(map(plan.index, plan)))
        part.config = replace(self.config, layers=layers, special=plan[:layers])
        if isinstance(self._head, NativeLinear):
            part._head = self._head.first(_HEAD_ROWS)
        return part

    @property
    def runs_natively(self) -> bool:
        """True if the CPU kernels run all layers."""
        return self._stack.native is not None

    def position_bytes(self) -> dict[torch.device, int]:
        """Return, for each device, the number of bytes that the keys and values of one position take."""
        found = dict.fromkeys(self._stack.devices, 0)
        for device, layer in zip(self._stack.device_of, self.config.plan, strict=True):
            found[device] += replace(self.config, special=(layer,)).cache_bytes(1, self.kv_dtype)
        return found

    def cache_bytes(self, tokens: int) -> int:
        """Return the size, in bytes, of the keys and values of a text of `tokens` tokens (see
        `ModelConfig.cache_bytes`)."""
        return self.config.cache_bytes(tokens, self.kv_dtype)

    def new_cache(self) -> SlabCache:
        return self._stack.new_cache(self._cache_type, self.kv_dtype)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """See `protocols.Target.forward`."""
        if rows.resume and any(tap != "final" and tap < rows.resume.layer for tap in want.taps):
            rows = replace(rows, resume=None)
        rows = self._placed(rows, cache)
        if want.logits == "all" and not want.taps and not rows.resume and self.rows_are_independent:
            rows = rows.cut()
        first, x = self._enter(rows, cache)
        prompts = [cache.prompts[slot] for slot in rows.slots]
        adapters = [cache.adapters[slot] for slot in rows.slots] if self.adapters else ()
        view = cache.begin(rows)
        return self._run(rows, first, x, view, prompts, want, adapters)

    @property
    def rows_are_independent(self) -> bool:
        """See `protocols.Divisible`. If it is True, padding rows are not needed.

        The CPU kernels have this property. torch's matrix multiplications do not have it. The adapters of models that
        run layer by layer use them. Models with adapters are always padded.
        """
        on_cpu = all(device.type == "cpu" for device in self._stack.devices)
        native = isinstance(self._head, NativeLinear) and self._stack.multiplies_on_kernels
        return on_cpu and native and not self.adapters

    def _run(
        self,
        rows: Rows,
        first: int,
        x: Tensor,
        view: Pass,
        prompts: Sequence[int],
        want: Want,
        adapters: Sequence[int] = (),
    ) -> Forward:
        """Run layer `first` and all later layers, the final norm, and the head for the requested rows. x [B, T, H] is
        the input of layer `first`."""
        end = self.config.layers if want.layers is None else want.layers
        inner = sorted(tap for tap in want.taps if tap != "final" and first <= tap <= end)
        ropes = self._stack.ropes(rows.positions, rows.end, prompts)
        with adapted_pass(adapters):
            embeddings = self._token_embeddings(rows) if self._token_inputs else None
        taps: dict[Tap, Tensor] = {}
        for deep in (rows.given.deep if rows.given else ())[: end - first]:
            own = [tap for tap in inner if tap == first]
            x, found = self._stack.run(x, first, first + 1, ropes, view, None, own, embeddings, adapters)
            assert rows.given
            x, first, taps = rows.given.place(x, deep, add=True), first + 1, taps | found
        inner = [tap for tap in inner if tap >= first]
        x, found = self._stack.run(
            x, first, end, ropes, view, taps=inner, token_embeddings=embeddings, adapters=adapters
        )
        taps |= found
        if want.logits == "none" and "final" not in want.taps:
            return Forward(x.new_empty(x.shape[0], 0, self.vocab_size), taps)
        x = self.norm(x)
        if "final" in want.taps:
            taps["final"] = x
        if want.logits == "all" and isinstance(self._head, NativeLinear):
            return Forward(self._logits(self._head, x, rows), taps)
        x = {"all": x, "last": x[:, max(rows.counts) - 1, None], "none": x[:, :0]}[want.logits]
        return Forward(self.logits(x), taps)

    def _token_embeddings(self, rows: Rows) -> Tensor:
        """Return the per-layer token embeddings of the rows. Image rows have the embeddings of the padding token."""
        assert self._token_inputs
        tokens, x = rows.tokens, self.embed(rows.tokens)
        if rows.given:
            x = rows.given.place(x, rows.given.embeddings)
            tokens = tokens.index_fill(1, rows.given.rows.to(tokens.device), _PADDING)
        return self._token_inputs(tokens, x)

    def _logits(self, head: NativeLinear, x: Tensor, rows: Rows) -> Tensor:
        """Compute the logits of the real rows only.

        Only with the CPU kernels may padding rows be skipped. With torch's matrix multiplications, a row's bits would
        depend on the number of rows.
        """
        logits = head.precise(x, torch.tensor(rows.lines))[:, : max(rows.counts)]
        for slot, count in zip(logits, rows.counts, strict=True):
            self._shaped(slot[:count])
        return logits

    def _placed(self, rows: Rows, cache: KVCache) -> Rows:
        """Return the rows with their rotary positions, which differ from their positions in the slot after images
        (M-RoPE)."""
        if rows.given and rows.given.positions is not None:
            axes = rows.given.positions.to(self.device)
            missing = rows.tokens.shape[1] - axes.shape[1]  # padding rows, which are never read
            return replace(rows, positions=torch.cat([axes, axes[:, -1:].expand(-1, missing)], 1)[:, None])
        lags = [cache.lags[slot] for slot in rows.slots]
        if not any(lags):
            return rows
        return replace(rows, positions=rows.positions - torch.tensor(lags, device=self.device)[:, None])

    def _enter(self, rows: Rows, cache: KVCache) -> tuple[int, Tensor]:
        """Return the index of the first layer to run, and its input [B, T, H]."""
        x = self.embed(rows.tokens)
        if rows.given:
            x = rows.given.place(x, rows.given.embeddings)
        resume = rows.resume
        if resume is None:
            return 0, x
        for slot, streams in zip(x, resume.streams, strict=True):
            slot[: len(streams)] = streams
        if resume.rest:
            late = self.forward(resume.rest, cache, Want("none", (resume.layer,), resume.layer)).taps[resume.layer]
            for number, start, streams in zip(resume.rest.slots, resume.rest.starts, late, strict=True):
                rest = x[rows.slots.index(number), start:]
                rest[: len(streams)] = streams[: len(rest)]
        return resume.layer, x

    def embed(self, tokens: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        x = _rows(self._embed, tokens, self.dtype)
        return x if self._embed_scale == 1.0 else x * self._embed_scale

    def logits(self, x: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        return self._shaped(self._head.precise(x))

    def _shaped(self, logits: Tensor) -> Tensor:
        """Apply the config's divisor and softcap to the logits, in place."""
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        cap = self.config.final_softcap
        if cap is None:
            return logits
        return softcap_(logits, cap) if isinstance(self._head, NativeLinear) else logits.div_(cap).tanh_().mul_(cap)

    def head(self) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        return self._head.weight().to(self.dtype)

    def shaped(self, products: Tensor, tokens: Tensor) -> Tensor:
        """See `protocols.EmbeddingAndHead`."""
        return self._shaped(products if self._bias is None else products.add_(self._bias[tokens]))


def _rows(table: Tensor | NativeLinear | Stored, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of an embedding for these tokens, [..., width]."""
    if isinstance(table, Tensor):
        return F.embedding(tokens, table)
    rows = table.matrix.rows(tokens) if isinstance(table, NativeLinear) else read_rows(table[tokens.flatten()])
    return rows.view(*tokens.shape, -1).to(dtype)


class TokenInputs:
    """Gemma 4's per-layer embeddings (see `layers.TokenInput`): rows of a table, plus a projection of the token
    embedding."""

    def __init__(self, c: ModelConfig, weights: Weights) -> None:
        self._shape, self._dtype = (c.layers, c.token_inputs), weights.dtype
        size, name = c.layers * c.token_inputs, "model.per_layer_model_projection"
        self.table = weights.embedding("model.embed_tokens_per_layer.weight", (c.vocab_size, size), False)
        self._projection = weights.linear({name: size}, c.hidden)
        self._norm = make_norm(c, weights, "model.per_layer_projection_norm", c.token_inputs)
        self._scales = c.token_inputs**0.5, c.hidden**-0.5

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the inputs [B, T, layers, P] for tokens [B, T] with embeddings x [B, T, H]."""
        table_scale, projection_scale = self._scales
        looked_up: Tensor = (_rows(self.table, tokens, self._dtype) * table_scale).unflatten(-1, self._shape)
        projected = self._norm((self._projection(x) * projection_scale).unflatten(-1, self._shape))
        return (projected + looked_up) * math.sqrt(0.5)


def make_layer(
    c: ModelConfig, layer: LayerConfig, weights: Weights, prefix: str, mixer_width: int | None = None
) -> Layer:
    """Build a decoder layer from tensors with Llama's names.

    Models with a norm after each block (Gemma) have two more norms. In these models, `post_attention` is the norm after
    attention.

    Args:
        c: The architecture.
        layer: The layer's own configuration.
        weights: The checkpoint's tensors.
        prefix: Prefix of the layer's tensor names.
        mixer_width: Width of the mixer's input, if it is not the normed stream. None if it is.
    """
    c = c.of(layer)

    def norm(name: str) -> Norm:
        return make_norm(c, weights, f"{prefix}{name}_layernorm", c.hidden)

    mixer, out = _make_mixer(c, layer, weights, prefix, mixer_width or c.hidden)
    mlp: FeedForward | None = None
    if layer.feeds:
        sparse = layer.sparse and c.mixture
        mlp = _mixture(c, c.mixture, weights, prefix) if sparse and c.mixture else make_mlp(c, weights, prefix + "mlp.")
    second = "pre_feedforward" if c.norms.after else "post_attention"
    normed = c.norms.before and not c.norms.shared and not isinstance(mlp, MixtureWithDense)
    return (ParallelLayer if c.parallel else Layer)(
        norm("input") if mixer and mixer_width is None and c.norms.before else None,
        mixer,
        out,
        norm(second if mixer else "input") if mlp and normed else None,
        mlp,
        post_norms=(norm("post_attention"), norm("post_feedforward")) if c.norms.after else None,
        residual_scale=c.residual_scale,
        token_input=_token_input(c, weights, prefix) if c.token_inputs else None,
        scale=weights.get(prefix + "layer_scalar", (1,)) if c.layer_scale else None,
    )


def _token_input(c: ModelConfig, weights: Weights, prefix: str) -> TokenInput:
    return TokenInput(
        weights.linear({prefix + "per_layer_input_gate": c.token_inputs}, c.hidden),
        ACTIVATIONS[c.activation],
        weights.linear({prefix + "per_layer_projection": c.hidden}, c.token_inputs),
        make_norm(c, weights, prefix + "post_per_layer_input_norm", c.hidden),
    )


def _make_mixer(
    c: ModelConfig, spec: LayerConfig, weights: Weights, prefix: str, width: int
) -> tuple[Mixer | None, Addend | None]:
    """Return the mixer of a layer and its output projection, or None for both if the layer has no mixer."""
    attention, state, projections = None, None, list[Linear]()
    if spec.attends:
        make = make_latent if c.attention.latent else make_attention
        attention = make(c, spec, weights, prefix + "self_attn.", width)
        projections.append(weights.linear({prefix + "self_attn.o_proj": c.hidden}, c.attention_width))
    if spec.recurrent:
        state, name, wide = make_state(c, spec.recurrent, weights, prefix)
        projections.append(weights.linear({prefix + name: c.hidden}, wide))
    if isinstance(attention, Attention) and state:
        return Parallel(attention, state), SplitLinear(projections[0], projections[1], c.heads * c.head_dim)
    return attention or state, projections[0] if projections else None


def make_attention(c: ModelConfig, layer: LayerConfig, weights: Weights, prefix: str, width: int) -> Attention:
    """Build attention over inputs of `width` elements."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    if layer.source is not None:
        for name in ("k_proj", "v_proj", "k_norm"):  # unused, but some checkpoints contain them
            weights.skip(f"{prefix}{name}.weight")
        q_proj = weights.linear({prefix + "q_proj": q}, width)
        norm = make_head_norms(replace(c, kv_heads=0), weights, prefix, names=("q_norm", "q_norm"))
        return SharedAttention(q_proj, c.heads, 0, c.head_dim, norm)
    parts = {prefix + "q_proj": 2 * q if c.attention.gated else q, prefix + "k_proj": kv, prefix + "v_proj": kv}
    if layer.keys_as_values:
        del parts[prefix + "v_proj"]
    if prefix + "qkv_proj.weight" in weights:  # Phi-3
        parts = {prefix + "qkv_proj": q + 2 * kv}
    within = _deinterleaved(c, layer.rope) if layer.rope and layer.rope.interleaved else None
    order = None if within is None else _each_head(c, within)
    if prefix + "query_key_value.weight" in weights:  # GPT-NeoX groups queries, keys and values by key head
        parts = {prefix + "query_key_value": q + 2 * kv}
        rows = torch.arange(q + 2 * kv).view(c.kv_heads, -1, c.head_dim)
        order = torch.cat([part.flatten() for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])
    qkv = weights.linear(parts, width, order)  # checks the number of heads before norms allocate memory for them
    norm = make_head_norms(c, weights, prefix, within)
    if layer.unit_heads:
        norm = HeadNorm(weights.ones(c.head_dim), weights.ones(c.head_dim), c.heads, c.kv_heads, c.norms.eps)
    sinks = weights.get(prefix + "sinks.weight", (c.heads,), weights.precise_dtype) if c.attention.sinks else None
    value_norm = RMSNorm(weights.ones(c.head_dim), c.norms.eps) if c.norms.values else None
    return Attention(
        qkv,
        c.heads,
        c.kv_heads,
        c.head_dim,
        norm=norm,
        sinks=sinks,
        gated=c.attention.gated,
        value_norm=value_norm,
        rope_scales_queries=layer.temperature is not None,
        qk_norm_after_rope=c.norms.qk_norm_after_rope,
    )


def _deinterleaved(c: ModelConfig, rope: RopeConfig) -> Tensor:
    """Return the order that puts a head's first elements of all rotary pairs before all second elements."""
    rotated, order = int(c.head_dim * rope.share), torch.arange(c.head_dim)
    order[:rotated] = order[:rotated].view(-1, 2).T.flatten()
    return order


def _each_head(c: ModelConfig, within: Tensor) -> Tensor:
    """Return an order of query, key and value rows that applies the order `within` to each query and key head."""
    rows = torch.arange((c.heads + 2 * c.kv_heads) * c.head_dim).view(-1, c.head_dim)
    rows[: -c.kv_heads] = rows[: -c.kv_heads, within]
    return rows.flatten()


def make_mlp(c: ModelConfig, weights: Weights, prefix: str) -> Dense:
    """Build a feed-forward network."""
    return _dense(c, weights, [prefix + "gate_proj", prefix + "up_proj"], prefix + "down_proj", c.ffn)


def _dense(c: ModelConfig, weights: Weights, parts: Sequence[str], down: str, ffn: int) -> Dense:
    """Build a feed-forward network. `parts`: Names of the gate and up projections. In the checkpoint, they may be a
    single tensor (Phi-3). A network without a gate has only the up projection."""
    fused = parts[1].removesuffix("up_proj") + "gate_up_proj"
    out = weights.linear({down: c.hidden}, ffn)
    if not c.gated_mlp:
        return Dense(Ungated(weights.linear({parts[1]: ffn}, c.hidden), c.activation), out)
    parts = [fused] if fused + ".weight" in weights else parts
    return Dense(weights.gated(parts, (ffn, c.hidden), c.activation), out)


def _mixture(c: ModelConfig, e: MixtureConfig, weights: Weights, prefix: str) -> FeedForward:
    if e.with_dense:
        return _mixture_with_dense(c, e, weights, prefix)
    block = f"{prefix}{e.block}."
    names = [[f"{block}experts.{number}.{name}" for name in e.names] for number in range(e.count)]
    experts = [_dense(c, weights, (gate, up), down, e.ffn) for gate, up, down in names]
    bias = block + "expert_bias"
    mixture = Mixture(
        weights.router(block + e.router, (e.count, c.hidden)),
        experts,
        e.used,
        e.normalised,
        scales=torch.full((e.count,), e.scale, dtype=weights.precise_dtype, device=weights.device)
        if e.scale != 1.0
        else None,
        sigmoid=e.sigmoid,
        bias=weights.get(bias, (e.count,), weights.precise_dtype) if bias in weights else None,
        groups=e.groups,
        weighs_inputs=e.weighs_inputs,
    )
    if not e.shared:
        return mixture
    shared, gate = f"{prefix}{e.shared_block}.", block + "shared_expert_gate"
    return SharedMixture(
        mixture,
        _dense(c, weights, (shared + "gate_proj", shared + "up_proj"), shared + "down_proj", e.shared),
        weights.router(gate, (1, c.hidden)) if gate + ".weight" in weights else None,
    )


def _mixture_with_dense(c: ModelConfig, e: MixtureConfig, weights: Weights, prefix: str) -> MixtureWithDense:
    experts = [make_mlp(replace(c, ffn=e.ffn), weights, f"{prefix}experts.{number}.") for number in range(e.count)]
    router = weights.router(prefix + "router.proj", (e.count, c.hidden))
    scales = weights.get(prefix + "router.per_expert_scale", (e.count,), weights.precise_dtype)
    router_norm = weights.get(prefix + "router.scale", (c.hidden,)) * c.hidden**-0.5

    def norm(name: str) -> Norm:
        return make_norm(c, weights, f"{prefix}{name}", c.hidden)

    return MixtureWithDense(
        make_mlp(c, weights, prefix + "mlp."),
        Mixture(router, experts, e.used, e.normalised, scales),
        (norm("pre_feedforward_layernorm"), norm("pre_feedforward_layernorm_2"), RMSNorm(router_norm, c.norms.eps)),
        (norm("post_feedforward_layernorm_1"), norm("post_feedforward_layernorm_2")),
    )
