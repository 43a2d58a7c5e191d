"""Training jobs, and the config and recipe of each kind of drafter that can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from paceline.errors import InvalidOption, UnsupportedModel
from paceline.llm import LLM
from paceline.models.config import ModelConfig, NormConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, MedusaConfig, TrainableConfig
from paceline.train.answers import AnswerPlan
from paceline.train.block import BlockRecipe
from paceline.train.block import default_taps as spread_taps
from paceline.train.eagle3 import Eagle3Recipe, default_taps
from paceline.train.loop import TrainPlan
from paceline.train.pointwise import EarlyExitRecipe, MedusaRecipe
from paceline.train.recipe import Recipe
from paceline.types import Tap


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Settings of a training run. None means the default of the drafter's kind unless stated otherwise.

    Attributes:
        target: Name of the target as the user gave it.
        kind: Kind of drafter, one of `KINDS`.
        out: Folder to write the drafter to.
        prompts: JSONL file of prompts. None lets the target write prompts.
        answers: JSONL file of the target's answers to `prompts`. None lets the target write answers.
        recording: Recording of the target's replies to train on, instead of prompts and answers.
        own_prompts: Number of prompts that the target writes.
        documents: Maximum number of documents to train on. None uses all.
        max_length: Maximum length of a document in tokens.
        vocabulary: Number of tokens that the drafter knows. None means the whole vocabulary.
        ffn: Width of the feed-forward network (EAGLE-3, block).
        taps: Layers of the target that the drafter reads (EAGLE-3, block).
        layers: Layers before an early exit, of a block drafter, or of each Medusa head.
        rank: Rank of the projection at an early exit, or of a block drafter's Markov head. By default, an early exit
            has rank 256, and a block drafter has no Markov head.
        steps: Draft length that the drafter is trained for.
        cache: Hidden states to keep on disk between epochs, in GiB.
        start: Trained drafter of the same kind and shape to begin with. None begins with new weights.
        bits: Bits of the matrices that are written, 16 or 4.
        command: Command for the model card.
        mix: Plan of the answers that the target writes.
        plan: Settings of the training loop.
    """

    target: str
    kind: str
    out: Path
    prompts: Path | None = None
    answers: Path | None = None
    recording: Path | None = None
    own_prompts: int = 5000
    documents: int | None = None
    max_length: int = 2048
    vocabulary: int | None = None
    ffn: int | None = None
    taps: tuple[Tap, ...] | None = None
    layers: int | None = None
    rank: int | None = None
    steps: int = 5
    cache: float = 8.0
    start: Path | None = None
    bits: int = 16
    command: str = "paceline.train.run.train(llm, job)"
    mix: AnswerPlan = field(default_factory=AnswerPlan)
    plan: TrainPlan = field(default_factory=TrainPlan)

    @property
    def work(self) -> Path:
        """Folder for answers, hidden states and checkpoints, next to `out`."""
        return self.out.with_name(self.out.name + ".work")


def _early_exit(c: ModelConfig, job: TrainJob) -> ExitConfig:
    layers = job.layers or max(1, c.layers // 4)
    if not 0 < layers < c.layers:
        raise InvalidOption(
            f"the layers before an early exit must be 1 to {c.layers - 1}, got {layers}", "Correct --layers"
        )
    return ExitConfig(c.hidden, layers, min(job.rank or 256, c.hidden))


def _block(c: ModelConfig, job: TrainJob, mask: int) -> BlockConfig:
    known = job.vocabulary if job.vocabulary and job.vocabulary < c.vocab_size else 0
    if job.rank and job.steps < 2:
        raise InvalidOption("a block with a Markov head must have at least 2 tokens, got --steps 1", "Raise --steps")
    if job.rank and not known and (c.logits_divisor != 1.0 or c.final_softcap):
        raise InvalidOption(
            "this target scales or caps its logits, so a Markov head cannot be trained for its whole vocabulary",
            "Give a --vocabulary, or leave out --rank",
        )
    norms = NormConfig(c.norms.eps, heads="shared")
    layer = replace(one_layer(c, job.ffn or c.ffn, job.layers or 2), family="qwen3", norms=norms)
    taps = job.taps or spread_taps(c.layers)
    if not job.rank:
        return BlockConfig(layer, taps, job.steps + 1, mask, draft_vocab=known)
    return BlockConfig(layer, taps, job.steps, mask, from_anchor=True, draft_vocab=known, markov=job.rank)


def config_for(llm: LLM, job: TrainJob, size: int) -> TrainableConfig:
    """Return the drafter's config for this target. `size` is the size of the draft vocabulary."""
    c = native_decoder(llm).config
    if job.kind == "eagle3":
        layer, taps = one_layer(c, job.ffn or c.ffn), job.taps or default_taps(c.layers)
        return EagleConfig(layer, taps, c.hidden, size, fc_norm=True)
    if job.kind == "medusa":
        return MedusaConfig(c.hidden, c.vocab_size, job.steps, job.layers or 1, shared=True)
    # The mask may be any token that never occurs inside a block, such as EOS.
    return _early_exit(c, job) if job.kind == "early-exit" else _block(c, job, llm.model.eos[0])


def recipe_for(llm: LLM, job: TrainJob, vocabulary: Tensor) -> Recipe:
    """Return the recipe for this target. `vocabulary` holds the token ids to draft from, ascending."""
    target, config = native_decoder(llm), config_for(llm, job, len(vocabulary))
    if isinstance(config, EagleConfig):
        return Eagle3Recipe(config, target, vocabulary, job.steps)
    if isinstance(config, MedusaConfig):
        return MedusaRecipe(config, target, vocabulary)
    if isinstance(config, BlockConfig):
        return BlockRecipe(config, target, vocabulary)
    return EarlyExitRecipe(config, target, vocabulary, job.steps, target.config.norms.eps)


def check_taps(taps: Sequence[Tap], layers: int) -> None:
    """Raise `InvalidOption` if the target lacks one of these layers."""
    for tap in taps:
        if tap == "final" or not 0 <= tap < layers:  # drafter files have no number for the final state
            raise InvalidOption(
                f"taps must be layers from 0 to {layers - 1} of this target, got {tap}", "Correct --taps"
            )


def one_layer(c: ModelConfig, ffn: int, layers: int = 1) -> ModelConfig:
    """Return the config of plain Llama layers with the target's sizes."""
    latent = c.attention.latent
    return ModelConfig(
        family="llama",
        vocab_size=c.vocab_size,
        hidden=c.hidden,
        layers=layers,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=latent.plain + latent.rotary if latent else c.head_dim,
        ffn=ffn,
        context_length=c.context_length,
        norms=NormConfig(c.norms.eps),
        rope=RopeConfig((c.plan[-1].rope or c.rope).theta),
    )


def native_decoder(llm: LLM) -> Decoder:
    """Return the target's decoder.

    Raises:
        UnsupportedModel: If the target does not run natively.
    """
    if not isinstance(llm.model.target, Decoder):
        raise UnsupportedModel(
            f"{llm.model.path} runs through transformers, where Paceline cannot read hidden states",
            "Choose a model of a native family (see paceline info MODEL)",
        )
    return llm.model.target


KINDS = ("eagle3", "medusa", "early-exit", "block")
"""Values of --kind."""
