"""A whole training run: prompts, answers, documents, vocabulary, training, and writing the drafter to disk."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import version

import torch
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_fit import fingerprint, fit_to_target
from paceline.checkpoints.head_write import check_folder, write_head
from paceline.drafters.vocabulary import choose, count, coverage
from paceline.errors import InvalidData, InvalidOption
from paceline.files.folder_lock import lock_folder
from paceline.llm import LLM
from paceline.models.heads import HeadFile, taps_of
from paceline.recording.file import Recording
from paceline.recording.states import StateFiles, StateKeeper
from paceline.train import loop
from paceline.train.documents import Documents
from paceline.train.kinds import KINDS, TrainJob, check_taps, config_for, native_decoder, recipe_for
from paceline.train.prompts import HELD_OUT, Prompts
from paceline.train.recorded import HELD_OUT as HELD_OUT_RECORDED
from paceline.train.recorded import RecordedDocuments
from paceline.train.self_prompts import write_prompts
from paceline.train.states import States
from paceline.train.writing import Progress, write_answers
from paceline.types import DraftBudget, Want
from paceline.verify.tree import pack_prefix

COUNTED = 20_000
"""Maximum number of documents that are counted to choose the draft vocabulary."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks that follow a run.

    Attributes:
        stage: Called with the name of each stage when it begins.
        writing: Called while the target writes prompts or answers.
        states: Called with the number of documents that have stored hidden states, and the number of all documents.
        training: Called after each training step.
    """

    stage: Callable[[str], object] = lambda name: None
    writing: Callable[[Progress], object] = lambda progress: None
    states: Callable[[int, int], object] = lambda done, total: None
    training: Callable[[loop.Report], object] = lambda report: None


def train(llm: LLM, job: TrainJob, listener: Listener | None = None) -> loop.Report:
    """Train a drafter and write it to `job.out`, with a model card.

    After an interruption (Ctrl-C, a kill, a full disk), the same call continues from the finished answers, the stored
    hidden states and the last checkpoint.

    Args:
        llm: The target.
        job: Settings.
        listener: Callbacks that follow the run.

    Returns:
        The final state of the training loop.

    Raises:
        PacelineError: If an option or a file is not valid, or training fails.
    """
    check(job)
    choose(torch.zeros(llm.model.target.vocab_size), job.vocabulary or llm.model.target.vocab_size, llm.model.eos)
    check_taps(job.taps or (), native_decoder(llm).config.layers)
    start = None if job.start is None else fit_to_target(open_head(job.start), llm.model)
    job.work.mkdir(parents=True, exist_ok=True)
    with lock_folder(job.work):
        return _train(llm, job, start, listener or Listener())


def _train(llm: LLM, job: TrainJob, start: HeadFile | None, listener: Listener) -> loop.Report:
    torch.manual_seed(job.plan.seed)
    name = _target_digest(llm)
    files = StateFiles(job.work / f"states-{name}", taps_of(config_for(llm, job, 1)), int(job.cache * GIB))
    documents = _documents(llm, job, files, listener)
    vocabulary, covered = _vocabulary(llm, job, documents, listener)
    recipe = recipe_for(llm, job, vocabulary)
    if start is not None:
        recipe.begin_from(start)
    states = States(llm.model.target, documents.train, recipe.taps, files)
    held = States(llm.model.target, documents.held, recipe.taps, files)
    listener.stage("hidden states")
    states.prepare(listener.states)
    listener.stage(f"training {job.kind}")
    weights = [float(parameter.detach().double().abs().sum()) for parameter in recipe.module.parameters()]
    begun = "" if start is None else f" from {_digest(weights)}"
    identity = f"{job.kind} {documents.digest[:12]}-{name} {_stated(recipe.config)} {len(states)}{begun}"
    report = loop.Trainer(recipe, states, held, job.plan, job.work, identity, listener.training).run()
    extra = {
        "fingerprint": fingerprint(llm.model),
        "coverage": round(covered, 4),
        "held_out": {"tokens_per_round": report.acceptance, "accuracy": report.held},
    }
    head = HeadFile(job.out, "", recipe.config, recipe.tensors(), job.target, native_decoder(llm).layers, extra)
    write_head(job.out, head, job.bits)
    (job.out / "README.md").write_text(model_card(job, report, len(states), len(held), covered), encoding="utf-8")
    for kept in job.work.glob("states-*"):
        shutil.rmtree(kept, ignore_errors=True)
    return report


def _target_digest(llm: LLM) -> str:
    """Identify the target by its predictions after a fixed row of tokens.

    Stored hidden states belong to one model. Even a fine-tuned copy of it would predict different tokens.
    """
    target = llm.model.target
    cache, tokens = target.new_cache(), list(range(min(32, target.vocab_size)))
    rows = pack_prefix(tokens, cache.acquire(len(tokens)), 0, target.device)
    return _digest(target.forward(rows, cache, Want("all")).logits[0].topk(8).indices.tolist())


def _stated(value: object) -> str:
    """Return a config as text without default values, so that checkpoints stay valid when an update adds a field."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_stated, value))})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    own = {f: getattr(value, f.name) for f in fields(value)}
    usual = {f: f.default if f.default_factory is MISSING else f.default_factory() for f in own}
    shown = (f"{f.name}={_stated(x)}" for f, x in own.items() if x != usual[f])
    return f"{type(value).__name__}({', '.join(shown)})"


def _digest(numbers: list[int] | list[float]) -> str:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=4).hexdigest()


def check(job: TrainJob) -> None:
    """Raise `InvalidOption` for mistakes in a job that can be found before the target is loaded."""
    if job.kind not in KINDS:
        raise InvalidOption(f"no drafter of kind {job.kind!r} can be trained", f"Choose {', '.join(KINDS)}")
    if not job.out.name:
        raise InvalidOption(f"--out must name a new folder, got {job.out}", "Give a path that ends in a name")
    check_folder(job.out)
    if job.answers is not None and job.prompts is None:
        raise InvalidOption("--answers needs --prompts", "Also give the file of prompts that the answers belong to")
    if not (0 < job.plan.epochs < 1e6 and 0 < job.plan.rate < 1):
        raise InvalidOption(
            f"epochs must be > 0 and the rate between 0 and 1, got {job.plan.epochs:g} and {job.plan.rate:g}",
            "Correct --epochs or --rate",
        )
    if job.bits not in (4, 16):
        raise InvalidOption(f"--bits must be 4 or 16, got {job.bits}", "Choose one of them")


def _documents(llm: LLM, job: TrainJob, files: StateFiles, listener: Listener) -> Documents | RecordedDocuments:
    if job.recording is not None:
        return RecordedDocuments(Recording(job.recording), min(job.max_length, llm.model.target.context_length))
    prompts_file = job.prompts or job.work / "prompts.jsonl"
    if job.prompts is None:
        listener.stage("the target writes prompts")
        write_prompts(llm, prompts_file, job.own_prompts, seed=job.plan.seed, on_progress=listener.writing)
    prompts = Prompts(prompts_file)
    answers = job.answers or job.work / "answers.jsonl"
    if job.answers is None:
        listener.stage("the target answers")
        keeper = LLM(llm.model, StateKeeper(files), DraftBudget.chain(0))
        write_answers(keeper, prompts, answers, job.mix, listener.writing)
    documents = Documents(
        llm,
        prompts,
        answers,
        answer_tokens=job.mix.answer_tokens,
        max_length=min(job.max_length, llm.model.target.context_length),
        seed=job.plan.seed,
        limit=job.documents,
    )
    if not len(documents.train):
        raise InvalidData(
            f"all answers in {answers} belong to held-out prompts, so there is nothing to train on", "Give more prompts"
        )
    return documents


def _vocabulary(
    llm: LLM, job: TrainJob, documents: Documents | RecordedDocuments, listener: Listener
) -> tuple[Tensor, float]:
    """Return the tokens to draft from (all tokens unless the job limits them) and their share of the answers'
    tokens."""
    listener.stage("counting tokens")
    size = llm.model.target.vocab_size
    counted = range(min(COUNTED, len(documents.train)))
    counts = count((documents.train[i].answer for i in counted), size)
    chosen = choose(counts, job.vocabulary or size, llm.model.eos)
    return chosen, coverage(counts, chosen)


def _source(job: TrainJob) -> str:
    """Return the source of the prompts, for the model card."""
    if job.recording is not None:
        return "recorded prompts"
    return job.prompts.name if job.prompts else "prompts that it wrote itself"


def _held_share(job: TrainJob) -> int:
    """Return N if one prompt in N was held out."""
    return HELD_OUT if job.recording is None else HELD_OUT_RECORDED


def model_card(job: TrainJob, report: loop.Report, trained: int, held: int, covered: float) -> str:
    """Return a model card in Markdown, with the training settings and the measured acceptance.

    Args:
        job: Settings.
        report: Final state of the training loop.
        trained: Number of documents trained on.
        held: Number of held-out documents.
        covered: Share of the answers' tokens that the draft vocabulary contains.
    """
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    if report.acceptance is None:
        measured = "Acceptance was not measured, since there were too few prompts to hold one out."
    else:
        steps = ", ".join(f"{share:.3f}" for share in report.held)
        measured = f"""\
On {min(job.plan.held, held)} held-out answers, greedy chains of {len(report.held)} tokens give \
{report.acceptance:.2f} tokens per round,
  including the bonus token. Accuracy of each step, whether or not the previous steps were right: {steps}."""
    return f"""\
# {job.kind} drafter for {job.target}

Made by Paceline {version("paceline")} with torch {torch.__version__}:

    {job.command}

- Data: {trained} of the target's own answers to {_source(job)},
  {job.plan.epochs:g} epochs, {report.tokens:,} drafts. {held} answers were held out (one prompt in {_held_share(job)}).
- Seed {job.plan.seed}; {report.seconds / 60:.0f} minutes of training on {hardware}.
- Draft vocabulary: {job.vocabulary or "all"} tokens, which cover {100 * covered:.1f} % of the tokens in the answers.
- {measured}

This drafter works only with this target. A drafter never changes the text.
"""
