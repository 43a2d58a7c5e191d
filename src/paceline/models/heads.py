"""Configuration of learned drafters: read from any layout by `head_files.py`, run by `drafters/`, made by `train/`.

Tensors travel under one set of names, those of the `speculators` layout:

    eagle3   fc.weight [H, taps * target H], layers.0.{hidden_norm,input_layernorm,post_attention_layernorm}.weight,
             layers.0.self_attn.{q,k,v,o}_proj.weight (q, k, v take 2H: normed embedding, then normed hidden),
             layers.0.mlp.{gate,up,down}_proj.weight, layers.{1, ...}.* as in Llama, norm.weight,
             lm_head.weight [draft_vocab, H], d2t [draft_vocab], t2d [vocab] (token = row + d2t[row], rising; t2d
             marks the same tokens; neither is needed where
             draft_vocab is the whole vocabulary); a missing lm_head is the
             target's rows of these tokens; optional embed_tokens.weight, fc_norm.{i}.weight, input_norm.weight
    peagle   as eagle3, with mask_hidden [1, 1, taps * target H]
    eagle    (EAGLE-1 and 2) fc.weight [H, 2H] (embedding, then hidden) and optional fc.bias, layers.0.* as in Llama;
             optional embed_tokens.weight, layers.0.input_layernorm.weight; the head is the target's
    mtp      (the target's own, see `checkpoints/mtp.py`) as eagle, with pre_fc_norm_{embedding,hidden}.weight [H],
             norm.weight, and the layer of its target; optional lm_head.weight
    medusa   blocks.{head}.layers.{layer}.{weight,bias}; lm_heads.{head}.weight unless the target's head is shared;
             optional token_map [draft_vocab]
    block    (DFlash) fc.weight [H, taps * target H], hidden_norm.weight, layers.{i}.* as in Qwen3, norm.weight;
             the embedding is the target's, and the head too unless there is an lm_head.weight [draft_vocab, H] with
             its d2t (and t2d), as in eagle3; DSpark adds markov_head.markov_w1.weight [vocab, R],
             markov_head.markov_w2.weight [draft_vocab or vocab, R] and optional confidence_head.proj.{weight,bias};
             DFlash 2 adds layers.{i}.{attention,mlp}_conv.base_kernel [2, taps, H] and .kernel_projection.weight
             [2 * taps * H / group, H], candidate_selector.{predecessor,successor}_codebook [vocab, R] and
             candidate_selector.hidden_projection.weight [R, H]
    assistant (Gemma 4) model.* as in its target, without keys and values; pre_projection.weight [H, 2 target H]
             (embedding, then hidden), post_projection.weight [target H, H]; the head is the embedding
    exit     (early exit) norm.weight [H] and optional proj.{down,up}.weight: a projection from layer E to the head

Any projection may have a bias beside its weight.
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
    """EAGLE-3, or EAGLE-1/2 where `version` is 1 (arXiv 2503.01840, 2401.15077, 2406.16858). If it is `built_in`, also
    of version 1, it is the target's multi-token-prediction layer (DeepSeek-V3, arXiv 2412.19437; Qwen3-Next, Qwen3.5).

    `layer`: the decoder layer or layers, with the target's vocabulary; only the first sees the embedding. Its
    `context_length` is that of the file (2048 in many published ones) and not a limit: the target's counts. `taps`: its
    input taps, in order; () in a file that leaves them to the target, and `head_fit.fits` then fills them in.
    `norm_before_residual`: the residual stream of the first layer is the normed hidden state. `fc_norm`: each tap is
    normed by itself before `fc`. `norm_before_fc`: their concatenation is. `norm_output`: the normed output is fed back
    to the next step, not the raw one. `hidden_first`: `fc` takes the hidden state before the embedding (MiMo).
    `head_tokens`: cut the output head over the whole vocabulary to these tokens, ascending; not in the file.
    `mask_token`: of P-EAGLE, which drafts all tokens of a chain in one pass: what stands for those that are not known
    yet.
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
    """Medusa (arXiv 2401.10774): head i predicts the token i + 2 positions after the one whose "final" state it sees.

    `layers`: residual SiLU blocks per head. `shared`: the heads use the target's own output head. `draft_vocab`: number
    of tokens they choose from (`token_map` lists them, if not the whole vocabulary); 0 means all.
    """

    hidden: int
    vocab_size: int
    heads: int
    layers: int = 1
    shared: bool = False
    draft_vocab: int = 0
    paths: tuple[tuple[int, ...], ...] = ()
    """The static tree, each node by the ranks on its path; () for the drafter's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_vocab", self.draft_vocab or self.vocab_size)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """DFlash 1 (arXiv 2602.06036) or 2, or DSpark: one pass over the pending token and `size` - 1 mask tokens drafts a
    block.

    `layer`: its layers, with the target's hidden size and vocabulary; windows and rotary embedding by layer (`plan`).
    `causal`: for each layer whether a block's entry sees only earlier entries of the block; () for none. Layers with a
    window are trained causal, unless the config says otherwise (speculators' `sliding_window_non_causal`, vLLM's
    `dflash_config.causal` and `is_causal`). `from_anchor`: entry j predicts the token after its own position, the
    pending token's entry included (speculators' `sample_from_anchor`). `draft_vocab`: number of tokens it chooses from,
    with an `lm_head` of its own; 0 means all, by the target's head. `markov`: rank of DSpark's correction of the logits
    by the token before (0: none). `confidence`: inputs of DSpark's confidence head: the state of an entry and, unless
    it is as wide as that alone, W1's row of the token before (0: no such head).

    DFlash 2 has these and no reduced vocabulary, each 0 in others. `conv`: entries that the kernels of its convolutions
    span, the newest first. `conv_group`: channels that share what a row adds to its kernels. `selector`: rank of its
    path selector, which chooses among the best `candidates` tokens of each entry.
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
    """Early exit after `layers` of the target's layers. `rank`: of the residual projection before the head; 0: none."""

    hidden: int
    layers: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """Gemma 4's assistant: layers of queries alone, which see the target's keys and values. `layer`: its layers, with
    the target's vocabulary."""

    layer: ModelConfig
    target_hidden: int
    taps: tuple[Tap, ...] = ("final",)


TrainableConfig = EagleConfig | MedusaConfig | BlockConfig | ExitConfig
"""Heads that Paceline trains, and writes, too."""
HeadConfig = TrainableConfig | AssistantConfig


def kind_of(config: HeadConfig) -> str:
    """Name of the method: "eagle3", "peagle", "eagle" (1 and 2), "mtp", "medusa", "block", "exit" or "assistant"."""
    if isinstance(config, EagleConfig):
        if config.mask_token is not None:
            return "peagle"
        return "mtp" if config.built_in else "eagle3" if config.version == 3 else "eagle"
    return {MedusaConfig: "medusa", BlockConfig: "block", ExitConfig: "exit", AssistantConfig: "assistant"}[
        type(config)
    ]


def taps_of(config: HeadConfig) -> tuple[Tap, ...]:
    """The head's input taps; () if EAGLE-3's default was left to the target."""
    if isinstance(config, (EagleConfig, BlockConfig, AssistantConfig)):
        return config.taps
    return ("final",) if isinstance(config, MedusaConfig) else (config.layers,)


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A learned drafter on disk. `layout`: "speculators", "reference", "sglang", "vllm", "paceline" or "built in".

    `target`: the model it was trained for, as its config names it, or None. `target_layers`: its number of layers, if
    the file says so. `extra`: other data in the config (under "paceline"), such as the measured acceptance by category
    and the target's `head_fit.fingerprint`.
    """

    path: Path
    layout: str
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    target: str | None = None
    target_layers: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
