"""From an order to a trained drafter on disk: prompts, answers, documents, vocabulary, training, writing."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_fit import fingerprint, fits
from paceline.checkpoints.head_write import LAYOUTS, check_folder, write_head
from paceline.errors import InvalidData, InvalidOption
from paceline.llm import LLM
from paceline.models.heads import HeadFile
from paceline.train import answers as writing
from paceline.train import loop
from paceline.train.card import card
from paceline.train.documents import Documents
from paceline.train.kinds import KINDS, Wish, check_taps, native
from paceline.train.medusa import shares, with_heads
from paceline.train.progress import Progress
from paceline.train.prompts import Prompts
from paceline.train.recipe import Recipe
from paceline.train.self_prompts import write_prompts
from paceline.train.states import States
from paceline.train.vocabulary import choose, count, coverage
from paceline.train.writing import write_answers
from paceline.types import Tap, Want
from paceline.verify.tree import pack_prefix

COUNTED = 20_000
"""Documents that the draft vocabulary is chosen from, at most."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What to train. `target`: what the user called it. `prompts`: None lets the target make `own_prompts` of its own.
    `answers`: the target's to these prompts; None lets it write them. `documents`: use so many at most. `cache`: GiB
    of hidden states that may lie on disk between epochs. `start`: begin with the weights of this trained drafter, of
    the same kind and shape, as for a fine-tune of its target or for more data. `layout`: see `head_write.LAYOUTS`;
    None is the kind's own. `command`: for the model card.
    """

    target: str
    kind: str
    out: Path
    prompts: Path | None = None
    answers: Path | None = None
    own_prompts: int = 5000
    documents: int | None = None
    max_length: int = 2048
    vocabulary: int | None = None
    ffn: int | None = None
    taps: tuple[Tap, ...] | None = None
    layers: int | None = None
    rank: int = 256
    steps: int = 5
    cache: float = 8.0
    start: Path | None = None
    layout: str | None = None
    command: str = "paceline.train.run.train(llm, order)"
    mix: writing.AnswerPlan = field(default_factory=writing.AnswerPlan)
    plan: loop.TrainPlan = field(default_factory=loop.TrainPlan)

    @property
    def work(self) -> Path:
        """Where answers, hidden states and checkpoints lie, beside what is ordered."""
        return self.out.with_name(self.out.name + ".work")


@dataclass(frozen=True, slots=True)
class Listener:
    """Whom a run tells how far it is. `stage`: a new part begins, by its name."""

    stage: Callable[[str], object] = lambda name: None
    writing: Callable[[Progress], object] = lambda progress: None
    training: Callable[[loop.Report], object] = lambda report: None


def train(llm: LLM, order: TrainJob, listener: Listener | None = None) -> loop.Report:
    """Train what is ordered and write it to `order.out`, with a model card. Whatever interrupts it (Ctrl-C, a kill, a
    full disk), the same call goes on from finished answers, kept hidden states and the last checkpoint.

    Raises `PacelineError`.
    """
    check(order)
    choose(torch.zeros(llm.model.target.vocab_size), order.vocabulary or llm.model.target.vocab_size, llm.model.eos)
    check_taps(order.taps or (), native(llm).config.layers)
    start = None if order.start is None else fits(open_head(order.start), llm.model)
    listener = listener or Listener()
    order.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(order.plan.seed)
    documents = _documents(llm, order, listener)
    vocabulary, covered = _vocabulary(llm, order, documents, listener)
    recipe = KINDS[order.kind](llm, Wish(vocabulary, order.steps, order.taps, order.ffn, order.layers, order.rank))
    if start is not None:
        recipe.begin_from(start)
    listener.stage(f"training {order.kind}")
    limit, name = int(order.cache * GIB), f"{documents.digest[:12]}-{_voice(llm)}"
    states = States(llm.model.target, documents.train, recipe.taps, order.work / f"states-{name}", limit)
    held = States(llm.model.target, documents.held, recipe.taps, order.work / f"held-{name}", limit)
    begun = "" if start is None else f" from {_weights(recipe)}"
    identity = f"{order.kind} {name} {recipe.config} {len(states)}{begun}"
    trainer = loop.Trainer(recipe, states, held, order.plan, order.work, identity, listener.training)
    report = trainer.run()
    extra = {
        "fingerprint": fingerprint(llm.model),
        "coverage": round(covered, 4),
        "held_out": {"tokens_per_round": report.acceptance, "accuracy": report.held},
    }
    head = HeadFile(order.out, "", recipe.config, recipe.tensors(), order.target, native(llm).layers, extra)
    if shares(head) and order.layout not in (None, "paceline"):
        head = with_heads(head, native(llm))
    write_head(order.out, head, order.layout or ("paceline" if shares(head) else None))
    (order.out / "README.md").write_text(card(order, report, len(states), len(held), covered), encoding="utf-8")
    for kept in (*order.work.glob("states-*"), *order.work.glob("held-*")):
        shutil.rmtree(kept, ignore_errors=True)
    return report


def _voice(llm: LLM) -> str:
    """Names the target by what it says after a fixed row of tokens, which another model, be it a fine-tune, would not
    say: hidden states that are kept belong to one model."""
    target = llm.model.target
    cache, tokens = target.new_cache(), list(range(min(32, target.vocab_size)))
    rows = pack_prefix(tokens, cache.acquire(len(tokens)), 0, target.device)
    said = target.forward(rows, cache, Want("all")).logits[0].topk(8).indices
    return _digest(said.tolist())


def _weights(recipe: Recipe) -> str:
    """Names the weights that training begins with."""
    return _digest([float(parameter.detach().double().abs().sum()) for parameter in recipe.module.parameters()])


def _digest(numbers: list[int] | list[float]) -> str:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=4).hexdigest()


def check(order: TrainJob) -> None:
    """Raises `InvalidOption` for what can be seen to be wrong before anything is loaded."""
    if order.kind not in KINDS:
        raise InvalidOption(f"no drafter of kind {order.kind!r} can be trained", f"There are {', '.join(KINDS)}")
    if not order.out.name:
        raise InvalidOption(f"--out {order.out} is no name for a new folder", "Give a path that ends in one")
    check_folder(order.out)
    layouts = LAYOUTS[{"early-exit": "exit"}.get(order.kind, order.kind)]
    if order.layout is not None and order.layout not in layouts:
        raise InvalidOption(f"{order.kind} has no layout {order.layout!r}", f"There are {', '.join(layouts)}")
    if order.answers is not None and order.prompts is None:
        raise InvalidOption("--answers without --prompts are answers to nothing", "Name the prompts' file too")
    if not (0 < order.plan.epochs < 1e6 and 0 < order.plan.rate < 1):
        raise InvalidOption(
            f"{order.plan.epochs:g} epochs at a rate of {order.plan.rate:g} are not possible",
            "Give epochs above 0 and a rate between 0 and 1",
        )


def _documents(llm: LLM, order: TrainJob, listener: Listener) -> Documents:
    path = order.prompts or order.work / "prompts.jsonl"
    if order.prompts is None:
        listener.stage("prompts of the target's own")
        write_prompts(llm, path, order.own_prompts, seed=order.plan.seed, on_progress=listener.writing)
    prompts = Prompts(path)
    said = order.answers or order.work / "answers.jsonl"
    if order.answers is None:
        listener.stage("the target answers")
        write_answers(llm, prompts, said, order.mix, listener.writing)
    documents = Documents(
        llm,
        prompts,
        said,
        answer_tokens=order.mix.answer_tokens,
        max_length=min(order.max_length, llm.model.target.context_length),
        seed=order.plan.seed,
        limit=order.documents,
    )
    if not len(documents.train):
        raise InvalidData(f"{said} answers held-out prompts only: nothing is left to train on", "Give more prompts")
    return documents


def _vocabulary(llm: LLM, order: TrainJob, documents: Documents, listener: Listener) -> tuple[Tensor, float]:
    """The tokens to draft from, and the share of the answers' tokens that they cover; all, unless a size is wished."""
    listener.stage("counting tokens")
    size = llm.model.target.vocab_size
    learnt = documents.train.first(COUNTED)
    counts = count((learnt[i].answer for i in range(len(learnt))), size)
    chosen = choose(counts, order.vocabulary or size, llm.model.eos)
    return chosen, coverage(counts, chosen)
