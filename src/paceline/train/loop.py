"""Training loop for any recipe: batches in order, one optimizer, held-out acceptance, checkpoints, resumption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidOption, TrainingFailed, is_out_of_memory, memory_named
from paceline.files.jsonl import replace_with
from paceline.train.muon import Muon
from paceline.train.recipe import Guesses, Recipe, simulate_rounds
from paceline.train.states import DocumentBatch, States

CHECKPOINT = "checkpoint.pt"

_ENDS = ("lm_head.weight", "embed_tokens.weight", "markov_w1.weight", "markov_w2.weight")


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Settings of the training loop.

    Attributes:
        epochs: Passes over the documents. May be fractional.
        batch: Documents per step.
        rate: Learning rate (see `Optimizer`).
        warmup: Share of the run before the full rate is reached.
        cooldown: Share of the run, at its end, while the rate falls to 0.
        clip: Maximum norm of the gradient.
        seed: Seed of the order and of all random draws.
        held: Number of held-out documents to evaluate on.
        every: Seconds between checkpoints.
        evaluate: Seconds between evaluations.
    """

    epochs: float = 1.0
    batch: int = 4
    rate: float = 2e-3
    warmup: float = 0.01
    cooldown: float = 0.6
    clip: float = 1.0
    seed: int = 0
    held: int = 128
    every: float = 120.0
    evaluate: float = 600.0


@dataclass(slots=True)
class Report:
    """Progress of a run. Checkpoints store it together with the weights.

    Attributes:
        documents: Documents trained on so far.
        total: Documents of the whole run, counted once per epoch.
        tokens: Number of drafts trained, one for each pending token.
        seconds: Seconds spent in training steps.
        loss: Running mean of the loss per answer token.
        accuracy: Running mean of the accuracy of each step.
        acceptance: Tokens per round of greedy chains on held-out documents, including the bonus token. None if it was
            not measured yet, or if there are no held-out documents.
        held: Accuracy of each step on held-out documents.
        history: One entry for each evaluation.
    """

    documents: int = 0
    total: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    accuracy: list[float] = field(default_factory=list)
    acceptance: float | None = None
    held: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    def count(self, loss: float, counts: Tensor, documents: int) -> None:
        """Add one training step over this many documents. For `counts` see `Guesses.counts`."""
        accuracy = _shares(counts)
        keep = 0.98 if self.documents else 0.0
        self.loss = keep * self.loss + (1 - keep) * loss
        self.accuracy = [keep * a + (1 - keep) * b for a, b in zip(self.accuracy or accuracy, accuracy, strict=True)]
        self.tokens += int(counts[1, 0])
        self.documents += documents


class Optimizer:
    """Muon for matrices and AdamW for everything else, under one learning rate.

    After 600 answers, heads gained 0.47 tokens per round with Muon, and 0.37 with only AdamW
    (docs/notes/training.md#optimisers). Muon does not suit vectors, and tables whose rows learn independently
    (embeddings, output heads, the tables of a Markov head).
    """

    def __init__(self, module: nn.Module, rate: float) -> None:
        """Group the parameters of `module`.

        Matrices learn at `rate`, the embedding and the output head at half this rate, vectors at 1.5 times this rate.
        """
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        ends = [p for name, p in trained.items() if name.endswith(_ENDS)]
        vectors = [p for p in trained.values() if p.ndim < 2]
        matrices = [p for name, p in trained.items() if p.ndim == 2 and not name.endswith(_ENDS)]
        rest = [{"params": ends, "lr": 0.5 * rate}, {"params": vectors, "lr": 1.5 * rate}]
        self._parts: list[torch.optim.Optimizer] = [
            Muon(matrices, rate),
            torch.optim.AdamW([group for group in rest if group["params"]], betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [[group["lr"] for group in part.param_groups] for part in self._parts]

    def step(self, share: float) -> None:
        """Update the parameters with this share of the full learning rates."""
        for part, rates in zip(self._parts, self._rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * share
            part.step()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for part in self._parts:
            part.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state for a checkpoint."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, kept: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        for part, state in zip(self._parts, kept, strict=True):
            part.load_state_dict(state)


class Trainer:
    """Trains a recipe and evaluates it. A checkpoint lets an interrupted run continue."""

    def __init__(
        self,
        recipe: Recipe,
        states: States,
        held: States,
        plan: TrainPlan,
        folder: Path,
        identity: str,
        report: Callable[[Report], object] = lambda report: None,
    ) -> None:
        """Prepare a run, or continue one from its checkpoint.

        Args:
            recipe: The drafter to train.
            states: Documents to train on.
            held: Held-out documents to evaluate on.
            plan: Settings of the loop. The number of epochs may differ from the checkpoint's: then the run becomes
                longer or shorter, and its learning rate follows the new plan.
            folder: Folder of the checkpoint.
            identity: Name of the data and the recipe.
            report: Called after every step.

        Raises:
            InvalidOption: If the checkpoint has another identity or plan.
            TrainingFailed: If the checkpoint cannot be read.
        """
        self._recipe, self._states, self._held, self._plan = recipe, states, held, plan
        self._path = folder / CHECKPOINT
        self._identity = f"{identity} {replace(plan, epochs=0, every=0, evaluate=0, held=0)}"
        self._report = report
        self._micro = plan.batch
        self._device = states.device
        recipe.module.to(self._device)
        self._optimizer = Optimizer(recipe.module, plan.rate)
        self._progress = Report()
        self._resume()
        self._progress.total = max(1, int(plan.epochs * len(states)))

    def run(self) -> Report:
        """Train to the end of the plan. After an error or Ctrl-C, a new run continues from the last checkpoint.

        Raises:
            TrainingFailed: If the loss is not finite.
            OutOfMemory: If there is not enough memory for one document.
        """
        with memory_named(
            f"{self._device} does not have enough memory for a training step over one document",
            "Train a smaller drafter (--vocabulary, --ffn, --steps) or use another --device; finished work is kept",
        ):
            self._train()
        return self.report()

    def _train(self) -> None:
        saved = evaluated = monotonic()
        for batch in self._remaining():
            began = monotonic()
            self._step(batch)
            self._progress.seconds += monotonic() - began
            if monotonic() - evaluated > self._plan.evaluate:
                self._evaluate()
                evaluated = monotonic()
            if monotonic() - saved > self._plan.every:
                self._save()
                saved = monotonic()
            self._report(self.report())
        self._evaluate()
        self._save()

    def report(self) -> Report:
        """Return the run's progress."""
        return replace(self._progress)

    def _remaining(self) -> Iterator[DocumentBatch]:
        """Yield the remaining batches in the order of the plan."""
        seen, epoch = 0, 0
        while seen < self._progress.total:
            for shard in range(self._states.shards):
                size = self._states.size(shard)
                if seen + size <= self._progress.documents:  # already trained on: do not compute its states
                    seen += size
                    continue
                for batch in self._states.batches(shard, self._plan.batch, f"{self._plan.seed}/{epoch}"):
                    if seen >= self._progress.total:
                        return
                    seen += len(batch)
                    if seen > self._progress.documents:
                        yield batch
            epoch += 1

    def _step(self, batch: DocumentBatch) -> None:
        self._recipe.module.train()
        loss, counts = self._accumulate(batch)
        norm = torch.nn.utils.clip_grad_norm_(self._recipe.module.parameters(), self._plan.clip)
        if not torch.isfinite(norm) or not loss == loss:
            raise TrainingFailed(
                f"the loss became {loss} and its gradient {norm.item()} after {self._progress.documents} documents",
                f"Use a lower --rate, and continue from the last checkpoint in {self._path.parent}",
            )
        self._optimizer.step(self._schedule())
        self._progress.count(loss, counts, len(batch))

    def _accumulate(self, batch: DocumentBatch) -> tuple[float, Tensor]:
        """Accumulate the gradients of a batch's mean loss, in parts if memory requires it.

        Returns:
            Loss and counts (see `Guesses.counts`).
        """
        while True:
            self._optimizer.zero_grad()
            try:
                return self._in_parts(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self._micro == 1:
                    raise
                self._micro = max(1, self._micro // 2)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _in_parts(self, batch: DocumentBatch) -> tuple[float, Tensor]:
        answers = max(1, int((batch.lengths - batch.prompts).sum()))
        total, counts = 0.0, torch.zeros(2, self._recipe.steps)
        for part in batch.split(self._micro):
            # Random draws must depend on the progress of the run, but not on where it was resumed or how a batch was
            # split.
            torch.manual_seed(self._plan.seed + self._progress.documents)
            guesses = self._guess(part)
            loss = guesses.loss / answers
            loss.backward()
            total += loss.item()
            counts += guesses.counts
        return total, counts

    def _guess(self, batch: DocumentBatch) -> Guesses:
        with torch.autocast(self._device.type, torch.bfloat16):
            return self._recipe.guess(batch)

    def _schedule(self) -> float:
        """Return the current share of the full rate: it rises, stays constant, then falls to 0."""
        done = self._progress.documents / self._progress.total
        up = (done + 1e-3) / self._plan.warmup if self._plan.warmup else 1.0
        down = (1 - done) / self._plan.cooldown if self._plan.cooldown else 1.0
        return min(1.0, up, down)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Measure tokens per round of greedy chains on held-out documents."""
        if not len(self._held):
            return
        self._recipe.module.eval()
        guesses = [self._guess(part) for batch in self._held_batches() for part in batch.split(self._micro)]
        self._recipe.evaluated(guesses)
        tokens, rounds = (sum(part) for part in zip((0, 0), *map(simulate_rounds, guesses), strict=True))
        counts = sum((part.counts for part in guesses), torch.zeros(2, self._recipe.steps))
        p = self._progress
        p.acceptance, p.held = tokens / max(rounds, 1), _shares(counts)
        p.history.append({"documents": p.documents, "tokens_per_round": p.acceptance, "accuracy": p.held})

    def _held_batches(self) -> Iterator[DocumentBatch]:
        left = self._plan.held
        for shard in range(self._held.shards):
            for batch in self._held.batches(shard, self._plan.batch, "held"):
                if left <= 0:
                    return
                left -= len(batch)
                yield batch

    def _save(self) -> None:
        state = {
            "identity": self._identity,
            "progress": asdict(self._progress),
            "module": self._recipe.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        try:
            replace_with(self._path, lambda new: torch.save(state, new))
        except (OSError, RuntimeError) as error:
            raise TrainingFailed(
                f"the checkpoint {self._path} could not be written ({error})",
                "Free disk space and run the same command again: it continues from the previous checkpoint",
            ) from error

    def _resume(self) -> None:
        if not self._path.exists():
            return
        try:
            kept = torch.load(self._path, map_location=self._device, weights_only=True)
            identity, progress = kept["identity"], Report(**kept["progress"])
        except Exception as error:  # for a damaged file, torch's unpickler raises errors of any type
            reason = (str(error).splitlines() or [""])[0]
            raise TrainingFailed(
                f"the checkpoint {self._path} cannot be read ({type(error).__name__}: {reason:.60})",
                "Delete it to start over; answers and hidden states are kept",
            ) from error
        if identity != self._identity or len(progress.accuracy) not in (0, self._recipe.steps):
            raise InvalidOption(
                f"{self._path} was made with other options or other data",
                "Repeat the command that made it, or choose another --out",
            )
        self._progress = progress
        self._recipe.module.load_state_dict(kept["module"])
        self._optimizer.load_state_dict(kept["optimizer"])


def _shares(counts: Tensor) -> list[float]:
    shares: list[float] = (counts[0] / counts[1].clamp(min=1)).tolist()
    return shares
