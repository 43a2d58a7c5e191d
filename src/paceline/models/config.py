"""Configuration of a decoder. `families.py` reads it from a checkpoint's config, `decoder.py` builds the model."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from paceline.cache.slab import ring


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, scaling rule (see `rope.KINDS`) with its numbers in Hugging Face's terms.

    `factors`: divisors per frequency, if the checkpoint has them (GGUF's rope_freqs, longrope's short ones);
    `long_factors`: those for prompts beyond the original context. `share`: rotated part of each head. `interleaved`: in
    the files, the two halves of each rotary pair lie side by side.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class MatrixConfig:
    """States that are `heads` matrices [key_dim, value_dim], for `key_heads` keys and queries, after a convolution over
    `width` tokens.

    `tiled`: a head's key is that of its number modulo `key_heads` (Qwen3.5 in files of llama.cpp), not of neighbouring
    heads.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Queries, keys and values, which pass through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers in the state of one layer."""
        return self.heads * self.key_dim * self.value_dim + (self.width - 1) * self.channels


@dataclass(frozen=True, slots=True)
class DeltaNetConfig(MatrixConfig):
    """Gated DeltaNet."""


@dataclass(frozen=True, slots=True)
class Mamba2Config(MatrixConfig):
    """Mamba-2: a group's B and C are its heads' key and query.

    `norm_first`: the norm of the output, if there is one, comes before its gate.
    """

    norm_first: bool = False


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A convolution of each of `channels` over `width` tokens, between two gates (LFM2)."""

    channels: int
    width: int

    @property
    def state_size(self) -> int:
        """Numbers in the state of one layer."""
        return (self.width - 1) * self.channels


RecurrentConfig = DeltaNetConfig | Mamba2Config | ShortConvConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Properties that may differ from layer to layer.

    `rope`: None if positions are not encoded. `window`: number of positions that a row sees, its own included (None:
    all). `sparse`: whether the feed-forward part is a mixture of experts. `recurrent`: the layer has a state.
    `attends`: it has attention, beside its state if both. `feeds`: it has a feed-forward part. `kv_heads`, `head_dim`,
    `ffn`: its own sizes, where they are not the model's (0). `source`: the layer whose keys and values it sees, if it
    has none of its own. `keys_as_values`: values are its keys before norm and rotation. `chunked`: its window begins at
    a multiple of its width, so that rows see their own part of the text alone. `temperature`: factors of its queries by
    position, where these are not encoded. `unit_heads`: query and key heads are normed, without a weight.
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
    """A row uses experts of `used` of `count` equal groups only: those whose `best` experts score most together."""

    count: int
    used: int
    best: int


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """A mixture of `count` experts of width `ffn`, `used` for each row, their weights summing to 1 if `normalised`.

    `block`, `names`, `router`: names in the checkpoint of the block, of an expert's gate, up and down projections, and
    of what chooses among them. `shared`: width of one more expert that every row uses (0: none), named `shared_block`.
    `sigmoid`: a score is the expert's own, not a share of all; `scale`: factor of the weights. `with_dense`: a dense
    network adds to the experts' result, each with norms of its own (Gemma 4). `groups`: limits what a row chooses
    among. `weighs_inputs`: what an expert sees has its weight, not its result.
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

    Keys and values of all heads are products of one vector of `rank` elements by token; each key also has a part of
    `rotary` elements that encodes its position, the same for all heads. Query heads have `plain` elements for the
    former and `rotary` for the latter, value heads `value`. `query_rank`: of the vector that queries are products of
    (0: they are products of the stream).
    """

    rank: int
    query_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attention, but for its sizes, positions and norms.

    Attributes:
        scale: Factor of the scores; None: head_dim ** -0.5.
        softcap: Bound of the scores, by tanh.
        sinks: Each query head has a score for seeing nothing.
        gated: The output is multiplied by a gate, which is stored with the queries.
        latent: Keys and values are products of one vector, and the cache holds that: one key head of `head_dim`
            elements.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False
    latent: LatentConfig | None = None


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Norms of the stream and of heads.

    Attributes:
        eps: Added to the variance.
        kind: "rms", or "layer": they subtract the mean too, and may have biases.
        offset: Added to every weight.
        before: Attention and feed-forward part see normed rows.
        after: The outputs of attention and feed-forward part are normed.
        shared: Attention and feed-forward part see the rows of one norm.
        heads: Norms of query and key heads: with one weight for all heads ("shared"), with a weight for each head
            ("own"), or over all heads together ("joint"). None: there are none.
        rotated_first: Norms of query and key heads come after the rotation.
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
    """Architecture of a decoder-only model. Sizes in elements, `context_length` in tokens.

    Attributes:
        ffn: Width of dense feed-forward networks.
        gated_mlp: Feed-forward networks have a gate.
        tied: The output head is the embedding.
        parallel: Attention and feed-forward part both see the stream that enters the layer.
        special: The layers one by one, unless all are alike (full attention, dense, with `rope`).
        mixture: The experts of sparse layers.
        embed_scale: Factor of the embedding.
        residual_scale: Factor of what attention and feed-forward part add to the stream.
        logits_divisor: Divisor of the logits.
        final_softcap: Bound of the logits, by tanh.
        layer_scale: Each layer's result has a factor.
        token_inputs: Size of what each layer gets from a table of its own by the token; 0: no such tables.
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
        """Outputs of attention."""
        latent = self.attention.latent
        return self.heads * (latent.value if latent else self.head_dim)

    @property
    def plan(self) -> tuple[LayerConfig, ...]:
        """The configuration of every layer."""
        return self.special or (LayerConfig(self.rope),) * self.layers

    def cache_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Bytes of the keys and values of a text of `tokens` tokens, at `itemsize` bytes per element, without states.

        A layer with a window holds no more than its ring. The cache grows in steps, so it may hold a quarter more (a
        `SharedSlabCache` twice as much).
        """
        own = [layer for layer in self.plan if layer.attends and layer.source is None]
        held = [min(tokens, ring(layer.window)) if layer.window else tokens for layer in own]
        sizes = [(layer.kv_heads or self.kv_heads) * (layer.head_dim or self.head_dim) for layer in own]
        return (
            (1 if self.attention.latent else 2) * sum(n * size for n, size in zip(held, sizes, strict=True)) * itemsize
        )

    def of(self, layer: LayerConfig) -> ModelConfig:
        """The same with the sizes that this layer has."""
        return replace(
            self,
            kv_heads=layer.kv_heads or self.kv_heads,
            head_dim=layer.head_dim or self.head_dim,
            ffn=layer.ffn or self.ffn,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a text, whatever its length; 0 without recurrent layers. In float32."""
        return 4 * sum(layer.recurrent.state_size for layer in self.plan if layer.recurrent)
