"""Configuration of a decoder: `checkpoints/families` reads it from a checkpoint, `decoder.py` builds the model."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import torch

from paceline.cache.kv_types import stored_size
from paceline.cache.slab import ring


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, and its scaling rule (see `rope.KINDS`) with parameters named as by Hugging Face.

    Attributes:
        theta: Base of the frequencies.
        kind: Scaling rule, a key of `rope.KINDS`.
        scaling: Parameters of the rule, as (name, value) pairs.
        factors: Divisor of each frequency, if the checkpoint has them (GGUF's rope_freqs, longrope's short factors).
        long_factors: longrope's factors for prompts that exceed the original context length.
        share: Fraction of each head that is rotated.
        interleaved: In the files, the two elements of each rotary pair are adjacent.
        axes: M-RoPE: the axis (0 time, 1 height, 2 width) of each rotated plane, [R / 2]. () for other embeddings.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MatrixConfig:
    """A recurrent state of `heads` matrices [key_dim, value_dim], updated after a causal convolution.

    Attributes:
        key_heads: Number of key heads and of query heads.
        heads: Number of value heads.
        key_dim: Elements of a key head.
        value_dim: Elements of a value head.
        width: Tokens that the convolution covers.
        tiled: Head i uses key head i modulo `key_heads` (Qwen3.5 in llama.cpp's files). Otherwise neighbouring heads
            share a key head.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Number of elements in the state of one layer."""
        return self.heads * self.key_dim * self.value_dim + (self.width - 1) * self.channels


@dataclass(frozen=True, slots=True)
class DeltaNetConfig(MatrixConfig):
    """Gated DeltaNet."""


@dataclass(frozen=True, slots=True)
class Mamba2Config(MatrixConfig):
    """Mamba-2. B and C of a group are the key and the query of the heads in that group.

    Attributes:
        norm_first: The output norm, if there is one, is applied before the output gate.
    """

    norm_first: bool = False


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A depthwise convolution of `channels` channels over `width` tokens, between two gates (LFM2)."""

    channels: int
    width: int

    @property
    def state_size(self) -> int:
        """Number of elements in the state of one layer."""
        return (self.width - 1) * self.channels


RecurrentConfig = DeltaNetConfig | Mamba2Config | ShortConvConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Properties that may differ from layer to layer.

    Attributes:
        rope: Rotary embedding; None if the layer encodes no positions.
        window: Number of positions that a row sees, including its own; None for all.
        sparse: The feed-forward part is a mixture of experts.
        recurrent: The layer's recurrent state, if it has one.
        attends: The layer has attention, possibly in parallel with a state.
        feeds: The layer has a feed-forward part.
        kv_heads: Number of key heads, if not the model's; 0 for the model's.
        head_dim: Elements of a head, if not the model's; 0 for the model's.
        ffn: Width of the feed-forward part, if not the model's; 0 for the model's.
        source: Index of the layer whose keys and values this layer reads, if it has none of its own.
        keys_as_values: The values are the keys before norm and rotation.
        chunked: The window starts at a multiple of its width: a row sees only its own chunk of the text.
        temperature: Factors by position that scale the queries of a layer that encodes no positions.
        unit_heads: QK-norm without weights.
    """

    rope: RopeConfig | None
    window: int | None = None
    sparse: bool = False
    recurrent: RecurrentConfig | None = None
    attends: bool = True
    feeds: bool = True
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    source: int | None = None
    keys_as_values: bool = False
    chunked: bool = False
    temperature: RopeConfig | None = None
    unit_heads: bool = False


@dataclass(frozen=True, slots=True)
class Groups:
    """Limit of each row to the experts of `used` out of `count` equal groups. A group's score is the sum of its `best`
    highest expert scores."""

    count: int
    used: int
    best: int


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """A mixture of `count` experts of width `ffn`, with `used` experts per row.

    Attributes:
        count: Number of experts.
        used: Experts per row.
        ffn: Width of an expert.
        normalised: The weights of a row's experts are scaled to sum to 1.
        block: Name of the block in the checkpoint.
        names: Names of an expert's gate, up and down projections.
        router: Name of the router's projection.
        shared: Width of the shared expert, which every row uses; 0 for none.
        shared_block: Name of the shared expert.
        sigmoid: Scores are sigmoids of the router's logits; otherwise their softmax.
        scale: Factor of the weights.
        with_dense: A dense network runs in parallel, and both branches have norms of their own (Gemma 4).
        groups: Limit of the experts that a row may choose, by group.
        weighs_inputs: The weight multiplies an expert's input instead of its output.
    """

    count: int
    used: int
    ffn: int
    _: KW_ONLY
    normalised: bool
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared: int = 0
    shared_block: str = "mlp.shared_expert"
    sigmoid: bool = False
    scale: float = 1.0
    with_dense: bool = False
    groups: Groups | None = None
    weighs_inputs: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    The keys and values of all heads are computed from one latent vector per token. Each key also has a rotary part,
    which is the same for all heads.

    Attributes:
        rank: Elements of the latent vector.
        query_rank: Elements of the latent vector of the queries; 0 if queries are computed from the stream.
        plain: Elements of a query or key head without position.
        rotary: Elements of a query or key head with rotary position.
        value: Elements of a value head.
    """

    rank: int
    query_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Properties of attention, except for its sizes, positions and norms.

    Attributes:
        scale: Factor of the scores; None for head_dim ** -0.5.
        softcap: Bound of the scores, applied with tanh.
        sinks: Each query head has an attention sink: a learned score that takes part in the softmax.
        gated: The output is multiplied by a gate, which is stored with the queries.
        latent: Multi-head latent attention. The cache stores the latent vector as one key head of `head_dim` elements.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False
    latent: LatentConfig | None = None


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Norms of the stream and of the attention heads.

    Attributes:
        eps: Added to the variance.
        kind: "rms", or "layer" for LayerNorm, which also subtracts the mean and may have biases.
        offset: Added to every weight.
        before: The inputs of attention and of the feed-forward part are normed.
        after: The outputs of attention and of the feed-forward part are normed.
        shared: Attention and the feed-forward part share one input norm.
        heads: QK-norm: with one weight for all heads ("shared"), with a weight for each head ("own"), or across all
            heads ("joint"); None for no QK-norm.
        rotated_first: QK-norm is applied after the rotation.
        values: Value heads are normed, without a weight.
    """

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    before: bool = True
    after: bool = False
    shared: bool = False
    heads: Literal["shared", "own", "joint"] | None = None
    rotated_first: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder-only model. Sizes are in elements, `context_length` is in tokens.

    Attributes:
        ffn: Width of dense feed-forward networks.
        gated_mlp: Feed-forward networks have a gate.
        tied: The embedding is also the output head.
        parallel: Attention and the feed-forward part both read the stream that enters the layer.
        special: Configuration of each layer; empty if all layers are full attention and dense, with `rope`.
        mixture: The experts of sparse layers.
        embed_scale: Factor of the embedding.
        residual_scale: Factor of what attention and the feed-forward part add to the stream.
        logits_divisor: Divisor of the logits.
        final_softcap: Bound of the logits, applied with tanh.
        layer_scale: The output of each layer is multiplied by a learned factor.
        token_inputs: Size of the per-layer embeddings (Gemma 4); 0 for none.
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context_length: int
    activation: str = "silu"
    gated_mlp: bool = True
    tied: bool = False
    parallel: bool = False
    attention: AttentionConfig = AttentionConfig()
    rope: RopeConfig = RopeConfig()
    norms: NormConfig = NormConfig()
    mixture: MixtureConfig | None = None
    special: tuple[LayerConfig, ...] = ()
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    final_softcap: float | None = None
    layer_scale: bool = False
    token_inputs: int = 0

    @property
    def mixed(self) -> int:
        """Width of attention's output, before the output projection."""
        latent = self.attention.latent
        return self.heads * (latent.value if latent else self.head_dim)

    @property
    def plan(self) -> tuple[LayerConfig, ...]:
        """The configuration of each layer."""
        return self.special or (LayerConfig(self.rope),) * self.layers

    def cache_bytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Return the size of the keys and values of a text of `tokens` tokens, in bytes, without recurrent states.

        A layer with a window stores no more than its ring buffer. The cache grows in steps, so it may allocate up to a
        quarter more than this (a `SharedSlabCache` up to twice as much).

        Args:
            tokens: Length of the text.
            dtype: Dtype of keys and values in the cache.
        """
        own = [layer for layer in self.plan if layer.attends and layer.source is None]
        held = [min(tokens, ring(layer.window)) if layer.window else tokens for layer in own]
        heads = [layer.kv_heads or self.kv_heads for layer in own]
        sizes = [stored_size(layer.head_dim or self.head_dim, dtype) * dtype.itemsize for layer in own]
        one = sum(n * count * size for n, count, size in zip(held, heads, sizes, strict=True))
        return one if self.attention.latent else 2 * one

    def of(self, layer: LayerConfig) -> ModelConfig:
        """Return this configuration with the sizes of the given layer."""
        return replace(
            self,
            kv_heads=layer.kv_heads or self.kv_heads,
            head_dim=layer.head_dim or self.head_dim,
            ffn=layer.ffn or self.ffn,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the float32 recurrent states of one text, whatever its length; 0 without recurrent layers."""
        return 4 * sum(layer.recurrent.state_size for layer in self.plan if layer.recurrent)
