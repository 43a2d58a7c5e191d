"""The configuration of learned drafters. `checkpoints/head_files.py` reads it, `drafters/` runs the heads, and `train/`
trains them.

In memory, the tensors always have the names of the `speculators` layout:

    eagle3   fc.weight [H, taps * target H], layers.0.{hidden_norm,input_layernorm,post_attention_layernorm}.weight,
             layers.0.self_attn.{q,k,v,o}_proj.weight (q, k, v take 2H: normed embedding, then normed hidden),
             layers.0.mlp.{gate,up,down}_proj.weight, layers.{1, ...}.* as in Llama, norm.weight,
             lm_head.weight [draft_vocab, H], d2t [draft_vocab], t2d [vocab]: row r stands for token r + d2t[r], in
             ascending order, and t2d marks the same tokens; neither is needed if draft_vocab is the whole
             vocabulary; without lm_head.weight, the target's rows of these tokens are used;
             optional embed_tokens.weight, fc_norm.{i}.weight, input_norm.weight
    peagle   as eagle3, with mask_hidden [1, 1, taps * target H]
    eagle    (EAGLE-1 and 2) fc.weight [H, 2H] (embedding, then hidden) and optional fc.bias, layers.0.* as in Llama;
             optional embed_tokens.weight, layers.0.input_layernorm.weight; the head is the target's
    mtp      (the target's own layer, see `checkpoints/mtp.py`) as eagle, with pre_fc_norm_{embedding,hidden}.weight
             [H], norm.weight, and layers.0.* as in its target; optional lm_head.weight
    medusa   blocks.{head}.layers.{layer}.{weight,bias}; lm_heads.{head}.weight unless the target's head is shared;
             optional token_map [draft_vocab]
    block    (DFlash) fc.weight [H, taps * target H], hidden_norm.weight, layers.{i}.* as in Qwen3, norm.weight;
             the embedding and the head are the target's, unless there is an lm_head.weight [draft_vocab, H] with
             d2t (and t2d), as in eagle3; DSpark adds markov_head.markov_w1.weight [vocab, R],
             markov_head.markov_w2.weight [draft_vocab or vocab, R] and optional confidence_head.proj.{weight,bias};
             DFlash 2 adds layers.{i}.{attention,mlp}_conv.base_kernel [2, taps, H] and .kernel_projection.weight
             [2 * taps * H / group, H], candidate_selector.{predecessor,successor}_codebook [vocab, R] and
             candidate_selector.hidden_projection.weight [R, H]
    assistant (Gemma 4) model.* as in its target, but no keys and values; pre_projection.weight [H, 2 target H]
             (embedding, then hidden), post_projection.weight [target H, H]; the head is the embedding
    exit     (early exit) norm.weight [H] and optional proj.{down,up}.weight: a projection from layer E to the head

Any projection may also have a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.types import Tap


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE-3 or EAGLE-1/2 head (arXiv 2503.01840, 2401.15077, 2406.16858), or the target's own MTP layer
    (DeepSeek-V3, arXiv 2412.19437; Qwen3-Next, Qwen3.5).

    Attributes:
        layer: The decoder layers, with the target's vocabulary. Only the first layer reads the embedding. Its
            `context_length` comes from the file (2048 in many published heads), but is no limit: the target's context
            length applies.
        taps: Input taps, in order. Empty if the file leaves them to the target, until `head_fit.fit_to_target` fills
            them in.
        target_hidden: The target's hidden size.
        draft_vocab: Number of tokens that the head can draft.
        version: 3, or 1 for EAGLE-1, EAGLE-2 and MTP layers.
        norm_before_residual: True if the residual stream of the first layer is the normed hidden state.
        norm_before_fc: True if the concatenated taps are normed before `fc`.
        fc_norm: True if each tap has its own norm before `fc`.
        norm_output: True if the next step takes the normed output instead of the raw output.
        built_in: True if the head is the target's MTP layer (with `version` 1).
        hidden_first: True if `fc` takes the hidden state first and the embedding second (MiMo).
        mask_token: For P-EAGLE, which drafts all tokens of a chain in one pass, the placeholder for unknown tokens.
            None for other heads.
        head_tokens: The token ids that an output head for the whole vocabulary keeps, in ascending order. This is set
            on loading, and is not part of the file.
    """

    layer: ModelConfig
    taps: tuple[Tap, ...]
    target_hidden: int
    draft_vocab: int
    version: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    built_in: bool = False
    hidden_first: bool = False
    mask_token: int | None = None
    head_tokens: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Medusa heads (arXiv 2401.10774). Head i reads the "final" state of a token and predicts the token i + 2 positions
    after it.

    Attributes:
        hidden: The target's hidden size.
        vocab_size: The target's vocabulary size.
        heads: Number of heads.
        layers: Number of residual SiLU blocks per head.
        shared: True if the heads use the target's output head.
        draft_vocab: Number of tokens that the heads can draft, which `token_map` lists. 0 for the whole vocabulary.
        paths: The static tree, as a path for each node: the rank of the candidate at each level. Empty for the
            drafter's default tree.
    """

    hidden: int
    vocab_size: int
    heads: int
    layers: int = 1
    shared: bool = False
    draft_vocab: int = 0
    paths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_vocab", self.draft_vocab or self.vocab_size)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter: DFlash 1 (arXiv 2602.06036), DFlash 2 or DSpark.

    One pass over the pending token and `size` - 1 mask tokens drafts a block. Only DFlash 2 has `conv`, `conv_group`,
    `selector` and `candidates`. It never has a reduced vocabulary.

    Attributes:
        layer: The layers, with the target's hidden size and vocabulary, and windows and rotary embedding by layer
            (`plan`).
        taps: Input taps, in order.
        size: Number of entries in a block.
        mask_token: Token id of the mask.
        causal: For each layer, True if an entry attends only to earlier entries of its block. Empty if no layer is
            causal. Layers with a window are causal in training, unless the config says otherwise (speculators'
            `sliding_window_non_causal`, vLLM's `dflash_config.causal` and `is_causal`).
        from_anchor: True if each entry predicts the token after its own position, starting with the pending token's
            entry (speculators' `sample_from_anchor`).
        draft_vocab: Number of tokens that the drafter's own `lm_head` scores. 0 if it uses the target's head.
        markov: Rank of DSpark's Markov head, which corrects logits depending on the preceding token. 0 if there is
            none.
        confidence: Number of inputs of DSpark's confidence head. The inputs are the state of an entry and, if the
            number exceeds the hidden size, also W1's row for the preceding token. 0 if there is no confidence head.
        conv: Number of entries that a convolution covers, newest first.
        conv_group: Number of channels that share the input-dependent part of a kernel.
        selector: Rank of the path selector.
        candidates: Number of best tokens of an entry among which the path selector chooses.
    """

    layer: ModelConfig
    taps: tuple[Tap, ...]
    size: int
    mask_token: int
    causal: tuple[bool, ...] = ()
    from_anchor: bool = False
    draft_vocab: int = 0
    markov: int = 0
    confidence: int = 0
    conv: int = 0
    conv_group: int = 0
    selector: int = 0
    candidates: int = 0

    @property
    def depth(self) -> int:
        """Number of tokens that one pass drafts."""
        return self.size if self.from_anchor else self.size - 1


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """Early exit after the first `layers` layers of the target, with a residual projection of rank `rank` before the
    output head (0 for no projection)."""

    hidden: int
    layers: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """Gemma 4's assistant, whose layers compute only queries, and read the target's keys and values. `layer` describes
    these layers, with the target's vocabulary."""

    layer: ModelConfig
    target_hidden: int
    taps: tuple[Tap, ...] = ("final",)


TrainableConfig = EagleConfig | MedusaConfig | BlockConfig | ExitConfig
"""The kinds of heads that Paceline can train and write."""
HeadConfig = TrainableConfig | AssistantConfig


def kind_of(config: HeadConfig) -> str:
    """Return the method: "eagle3", "peagle", "eagle" (1 and 2), "mtp", "medusa", "block", "exit" or "assistant"."""
    if isinstance(config, EagleConfig):
        if config.mask_token is not None:
            return "peagle"
        return "mtp" if config.built_in else "eagle3" if config.version == 3 else "eagle"
    return {MedusaConfig: "medusa", BlockConfig: "block", ExitConfig: "exit", AssistantConfig: "assistant"}[
        type(config)
    ]


def taps_of(config: HeadConfig) -> tuple[Tap, ...]:
    """Return the head's input taps. They are empty if an EAGLE-3 head leaves them to the target."""
    if isinstance(config, (EagleConfig, BlockConfig, AssistantConfig)):
        return config.taps
    return ("final",) if isinstance(config, MedusaConfig) else (config.layers,)


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A learned drafter on disk.

    Attributes:
        path: The file or folder.
        layout: "speculators", "reference", "sglang", "vllm", "paceline" or "built in".
        config: The head's architecture.
        tensors: Weights, under the names listed above.
        target: Name of the model that the head was trained for. None if the head's config does not contain it.
        target_layers: Number of layers of that model. None if it is not known.
        extra: Other data under "paceline" in the config, such as the measured acceptance by category and the target's
            `head_fit.fingerprint`.
    """

    path: Path
    layout: str
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    target: str | None = None
    target_layers: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
