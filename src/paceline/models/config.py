"""Configuration of a decoder. `families.py` reads it from a checkpoint's config, `decoder.py` builds the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cache.slab import ring


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, scaling rule (see `rope.KINDS`) with its numbers in Hugging Face's terms.

    `factors`: divisors per frequency, if the checkpoint has them (GGUF's rope_freqs, longrope's short ones);
    `long_factors`: those for prompts beyond the original context. `share`: rotated part of each head.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0


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
    """A row uses experts of `used` of `count` equal groups alone: those whose `best` experts score most together."""

    count: int
    used: int
    best: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of `count` experts of width `ffn`, `used` for each row, their weights summing to 1 if `normalised`.

    `block`, `names`, `router`: names in the checkpoint of the block, of an expert's gate, up and down projections, and
    of what chooses among them. `shared`: width of one more expert that every row uses (0: none), named `shared_block`.
    `sigmoid`: a score is the expert's own, not a share of all; `scale`: factor of the weights. `beside`: they add to
    the result of the dense network (Gemma 4). `groups`: limits what a row chooses among. `weighs_inputs`: what an
    expert sees has its weight, not its result.
    """

    count: int
    used: int
    ffn: int
    normalised: bool
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared: int = 0
    shared_block: str = "mlp.shared_expert"
    sigmoid: bool = False
    scale: float = 1.0
    beside: bool = False
    groups: Groups | None = None
    weighs_inputs: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Keys and values of all heads are products of one vector of `rank` elements by token; beside it, each key has a part
    of `rotary` elements that encodes its position, the same for all heads. Query heads have `plain` elements for the
    former and `rotary` for the latter, value heads `value`. `query_rank`: of the vector that queries are products of
    (0: they are products of the stream).
    """

    rank: int
    query_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder-only model. Sizes in elements, `context_length` in tokens.

    `special`: the layers one by one, unless all are alike (full attention, dense, with `rope`). `qk_norm`: query and
    key heads are normed. `gated`: the output of attention is multiplied by a gate, which is stored with the queries.
    `sandwich`: the outputs of attention and feed-forward are normed too. `norm_shift`: added to the weight of every
    norm. `embed_scale`, `query_scale`: factors of the embedding and of the scores (None: head_dim ** -0.5). `softcap`,
    `final_softcap`: bounds of scores and logits, by tanh. `sinks`: each query head has a score for seeing nothing.
    `residual_scale`: factor of what attention and feed-forward add to the stream. `logits_divisor`: of the logits.
    `prenorm`: attention and feed-forward see normed rows. `wide_norm`: the norms of queries and keys go over all heads.
    `paired`: in the files, the two halves of each rotary pair lie side by side.
    `value_norm`: value heads are normed, without a weight. `layer_scale`: each layer's result has a factor.
    `token_inputs`: size of what each layer gets from a table of its own by the token (0: no such tables).
    `latent`: keys and values are products of one vector, and the cache holds that: one key head of `head_dim` elements.
    `layer_norm`: all norms subtract the mean too, and may have biases. `own_head_norms`: those of queries and keys have
    a weight for each head. `parallel`: attention and feed-forward both see the stream that enters the layer, through
    `one_norm`, or two. `plain_mlp`: feed-forward networks have no gate.
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
    norm_eps: float = 1e-6
    activation: str = "silu"
    tied: bool = False
    rope: RopeConfig = RopeConfig()
    special: tuple[LayerConfig, ...] = ()
    experts: Experts | None = None
    qk_norm: bool = False
    gated: bool = False
    sandwich: bool = False
    norm_shift: float = 0.0
    embed_scale: float = 1.0
    query_scale: float | None = None
    softcap: float | None = None
    final_softcap: float | None = None
    sinks: bool = False
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    prenorm: bool = True
    wide_norm: bool = False
    paired: bool = False
    value_norm: bool = False
    layer_scale: bool = False
    token_inputs: int = 0
    latent: LatentConfig | None = None
    layer_norm: bool = False
    own_head_norms: bool = False
    parallel: bool = False
    one_norm: bool = False
    plain_mlp: bool = False

    @property
    def mixed(self) -> int:
        """Outputs of attention."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

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
        return (1 if self.latent else 2) * sum(n * size for n, size in zip(held, sizes, strict=True)) * itemsize

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
