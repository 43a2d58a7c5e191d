"""The configuration of a decoder. `checkpoints/families` reads it from a checkpoint, and `decoder.py` builds the
model."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import torch

from paceline.cache.kv_types import stored_size
from paceline.cache.slab import ring


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding: its base, and its scaling rule (see `rope.KINDS`), whose parameters have Hugging Face's
    names.

    Attributes:
        theta: Base of the frequencies.
        kind: Scaling rule, a key of `rope.KINDS`.
        scaling: Parameters of the rule, as (name, value) pairs.
        factors: Divisor of each frequency, if the checkpoint contains them (GGUF's rope_freqs, longrope's short
            factors).
        long_factors: longrope's factors for prompts that exceed the original context length.
        share: Fraction of each head that is rotated.
        interleaved: True if the two elements of each rotary pair are adjacent in the files.
        axes: For M-RoPE, the axis (0 time, 1 height, 2 width) of each rotated plane, [R / 2]. Empty for other
            embeddings.
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
        key_heads: Number of key heads, which is also the number of query heads.
        heads: Number of value heads.
        key_dim: Elements of a key head.
        value_dim: Elements of a value head.
        width: Number of tokens that the convolution covers.
        tiled: True if head i uses key head i modulo `key_heads` (Qwen3.5 in llama.cpp's files). Otherwise, neighbouring
            heads share a key head.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
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
        norm_first: True if the output norm, if there is one, is applied before the output gate.
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
        rope: Rotary embedding. None if the layer encodes no positions.
        window: Number of positions that a row attends to, including its own. None for all positions.
        sparse: True if the feed-forward block is a mixture of experts.
        recurrent: The layer's recurrent state. None if it has none.
        attends: True if the layer has attention, possibly in parallel with a state.
        feeds: True if the layer has a feed-forward block.
        kv_heads: Number of key heads. 0 for the value in `ModelConfig`.
        head_dim: Number of elements of a head. 0 for the value in `ModelConfig`.
        ffn: Width of the feed-forward block. 0 for the value in `ModelConfig`.
        source: Index of the layer whose keys and values this layer reads, if it has none of its own.
        keys_as_values: True if the values are the keys before norm and rotation.
        chunked: True if windows start at multiples of their width, so that a row attends only to its own chunk of the
            text.
        temperature: Scaling of queries by a factor that depends on the position, for a layer that encodes no positions.
        unit_heads: True if the layer has QK-norm without weights.
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
    """Limits each row to the experts in `used` out of `count` equal groups. The score of a group is the sum of its
    `best` highest expert scores."""

    count: int
    used: int
    best: int


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """A mixture of `count` experts of width `ffn`, with `used` experts per row.

    Attributes:
        count: Number of experts.
        used: Number of experts per row.
        ffn: Width of an expert.
        normalised: True if the weights of a row's experts are scaled to sum to 1.
        block: Name of the block in the checkpoint.
        names: Names of an expert's gate, up and down projections.
        router: Name of the router's projection.
        shared: Width of the shared expert, which every row uses. 0 if there is none.
        shared_block: Name of the shared expert.
        sigmoid: True if the scores are the sigmoids of the router's logits. Otherwise, they are their softmax.
        scale: Factor that multiplies the weights of a row's experts.
        with_dense: True if a dense network runs in parallel. Both branches then have their own norms (Gemma 4).
        groups: Limits the groups of experts among which a row may choose. None if there is no limit.
        weighs_inputs: True if the weight multiplies an expert's input instead of its output.
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
        rank: Number of elements of the latent vector.
        query_rank: Number of elements of the queries' latent vector. 0 if queries are computed from the stream.
        plain: Number of elements of a query or key head to which no rotary embedding is applied.
        rotary: Number of elements of a query or key head to which the rotary embedding is applied.
        value: Number of elements of a value head.
    """

    rank: int
    query_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Properties of attention other than its sizes, positions and norms.

    Attributes:
        scale: Factor of the scores. None for head_dim ** -0.5.
        softcap: Bound on the scores, applied with tanh. None for no bound.
        sinks: True if each query head has an attention sink: a learned score that takes part in the softmax.
        gated: True if the output is multiplied by a gate. The gate's weights are stored with the queries' weights.
        latent: Multi-head latent attention, or None. The cache stores the latent vector as a single key head of
            `head_dim` elements.
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
        before: True if the inputs of attention and of the feed-forward block are normed.
        after: True if the outputs of attention and of the feed-forward block are normed.
        shared: True if attention and the feed-forward block share one input norm.
        heads: Form of QK-norm: "shared" has one weight for all heads, "own" has a weight for each head, and "joint"
            norms across all heads. None for no QK-norm.
        qk_norm_after_rope: True if QK-norm is applied after the rotary embedding.
        values: True if value heads are normed, without a weight.
    """

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    before: bool = True
    after: bool = False
    shared: bool = False
    heads: Literal["shared", "own", "joint"] | None = None
    qk_norm_after_rope: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a decoder-only model. Sizes are in elements, and `context_length` is in tokens.

    Attributes:
        ffn: Width of dense feed-forward networks.
        gated_mlp: True if feed-forward networks have a gate.
        tied: True if the embedding is also the output head.
        parallel: True if attention and the feed-forward block both read the stream that enters the layer.
        special: Configuration of each layer. Empty if all layers have full attention with `rope`, and are dense.
        mixture: The experts of sparse layers.
        embed_scale: Factor of the embedding.
        residual_scale: Factor of the outputs of attention and of the feed-forward block, applied before they are added
            to the stream.
        logits_divisor: Divisor of the logits.
        final_softcap: Bound on the logits, applied with tanh. None for no bound.
        layer_scale: True if the output of each layer is multiplied by a learned factor.
        token_inputs: Size of the per-layer embeddings (Gemma 4). 0 if there are none.
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
    def attention_width(self) -> int:
        """Width of the output of attention, before the output projection."""
        latent = self.attention.latent
        return self.heads * (latent.value if latent else self.head_dim)

    @property
    def plan(self) -> tuple[LayerConfig, ...]:
        """The configuration of each layer."""
        return self.special or (LayerConfig(self.rope),) * self.layers

    def cache_bytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Return the size, in bytes, of the keys and values of a text. Recurrent states are not included.

        A layer with a window stores at most its ring buffer. The cache grows in steps, so it may allocate up to a
        quarter more than this (a `SharedSlabCache` may allocate up to twice as much).

        Args:
            tokens: Length of the text, in tokens.
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
        """Size of the float32 recurrent states of a text of any length, in bytes. 0 if there are no recurrent
        layers."""
        return 4 * sum(layer.recurrent.state_size for layer in self.plan if layer.recurrent)
