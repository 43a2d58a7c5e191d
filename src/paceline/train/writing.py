"""Writing the target's answers to all prompts into a file. The run may be interrupted at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from paceline.engine.detokenizer import Chunk
from paceline.engine.results import Batch, Completion
from paceline.errors import InvalidData, InvalidPrompt, PacelineError
from paceline.files.jsonl import Journal, JsonlFile, check_settings, replace_with
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.train.answers import Answer, AnswerPlan, parse_answer
from paceline.train.prompts import Prompt, Prompts

GROUP = 32
"""Answers per batch object, in multiples of its width. Fewer need less memory; more keep the batch full for longer."""


@dataclass(slots=True)
class Progress:
    """Counters of a run.

    Attributes:
        total: Number of texts to write.
        kept: Texts from earlier runs.
        written: Texts of this run.
        skipped: Attempts without a usable text.
        tokens: Tokens that this run generated, including tokens of unfinished texts.
    """

    total: int
    kept: int = 0
    written: int = 0
    skipped: int = 0
    tokens: int = 0
    _began: float = field(default_factory=time.perf_counter)

    @property
    def done(self) -> int:
        """Number of texts that exist."""
        return self.kept + self.written

    @property
    def seconds(self) -> float:
        """Seconds since this run began."""
        return time.perf_counter() - self._began

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


OnProgress = Callable[[Progress], object]
"""Called after every token."""


def write_answers(
    llm: LLM,
    prompts: Prompts,
    path: Path,
    plan: AnswerPlan | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Progress:
    """Let the target answer every prompt at every temperature of the plan.

    Each finished answer is appended to the file, so after a kill or Ctrl-C the same call continues where it stopped.
    The complete file is sorted into the plan's order, so it does not depend on interruptions or on the width. A prompt
    that cannot be answered, for example because it exceeds the context length, is skipped and counted.

    Args:
        llm: The target.
        prompts: Prompts to answer.
        path: JSONL file to write or continue (see `Answer`).
        plan: Settings. None uses the defaults.
        on_progress: Called after every token.

    Returns:
        The final progress.

    Raises:
        InvalidData: If the file was made with other options, or no prompt could be answered.
        PacelineError: If generation fails.
        OSError: If the file cannot be written.
    """
    plan = plan or AnswerPlan()
    model = {"model": llm.model.path.name, "tokenizer": llm.tokenizer.digest, "prompts": prompts.digest}
    check_settings(path, model | plan.settings())
    with Journal(path) as journal:
        slots = AnswerSlots(prompts, plan, path)
        progress = Progress(len(slots), kept=slots.filled)
        writer = _AnswerWriter(llm, plan, slots, journal, progress, on_progress)
        missing = iter(slots.missing())
        while group := list(islice(missing, GROUP * plan.width)):
            writer.answer(group)
    if not slots.filled:
        raise InvalidData(
            f"none of the {len(prompts)} prompts could be answered ({writer.last_error})", "Give other prompts"
        )
    if progress.done + progress.skipped == progress.total:
        slots.sort()
    return progress


class AnswerSlots:
    """The answers of a plan in order: shuffled prompts, each at every temperature. The file contains some of them."""

    def __init__(self, prompts: Prompts, plan: AnswerPlan, path: Path) -> None:
        """Read which answers the file contains.

        Raises:
            InvalidData: If a line of the file is damaged or is not an answer of the plan.
        """
        self._prompts, self._temperatures, self._path = prompts, plan.temperatures, path
        self._order = prompts.order(plan.seed)
        self._rank = self._order.argsort()
        self._lines: dict[int, int] = {}
        """Slot -> index of its line, in the order of the file."""
        JsonlFile(path, lambda line, number: self.fill(self._slot(parse_answer(line))))

    def __len__(self) -> int:
        return len(self._prompts) * len(self._temperatures)

    def __getitem__(self, slot: int) -> tuple[Prompt, float]:
        """Return the prompt and the temperature of a slot."""
        place, at = divmod(slot, len(self._temperatures))
        return self._prompts[int(self._order[place])], self._temperatures[at]

    def _slot(self, answer: Answer) -> int:
        row = self._prompts.find(answer.id)
        if row is None or answer.temperature not in self._temperatures:
            raise ValueError(f"the plan has no prompt {answer.id!r} at temperature {answer.temperature:g}")
        slot = int(self._rank[row]) * len(self._temperatures) + self._temperatures.index(answer.temperature)
        if slot in self._lines:
            raise ValueError(f"this is a second answer to {answer.id!r} at temperature {answer.temperature:g}")
        return slot

    def fill(self, slot: int) -> None:
        """Record that the file's last line is the answer of this slot."""
        self._lines[slot] = len(self._lines)

    @property
    def filled(self) -> int:
        """Number of answers in the file."""
        return len(self._lines)

    def missing(self) -> list[int]:
        """Return the slots without an answer, in order."""
        return [slot for slot in range(len(self)) if slot not in self._lines]

    def sort(self) -> None:
        """Sort the lines of the file by slot."""
        ordered = dict(sorted(self._lines.items()))
        if list(ordered) == list(self._lines):
            return
        lines = JsonlFile(self._path, lambda line, number: None)

        def write(new: Path) -> None:
            with new.open("wb") as file:
                file.writelines(lines[i] for i in ordered.values())

        replace_with(self._path, write)


@dataclass(slots=True)
class _AnswerWriter:
    """Generates answers in batches.

    Attributes:
        last_error: The error that caused the last skipped answer.
    """

    llm: LLM
    plan: AnswerPlan
    slots: AnswerSlots
    journal: Journal
    progress: Progress
    on_progress: OnProgress
    last_error: Exception | None = None

    def answer(self, group: Sequence[int]) -> None:
        """Generate the answers of these slots as one batch."""
        prompts: dict[int, list[int]] = {}
        sampling: list[Sampling] = []
        for slot in group:
            prompt, temperature = self.slots[slot]
            try:
                prompts[slot] = self.llm.prompt_ids(prompt.prompt)
            except InvalidPrompt as error:
                self._skip(error)
            else:
                sampling.append(self.plan.sampling(prompt.id, temperature))
        with self.llm.batch(list(prompts.values()), sampling, width=self.plan.width) as batch:
            for index, chunk in chunks_of(batch):
                self.progress.tokens += 1
                if chunk.finish_reason:
                    self._keep(list(prompts)[index], batch.completion(index))
                self.on_progress(self.progress)
        for failed in batch.errors.values():
            self._skip(failed)

    def _keep(self, slot: int, completion: Completion) -> None:
        prompt, temperature = self.slots[slot]
        ended = completion.finish_reason == "eos"
        answer = Answer(prompt.id, temperature, completion.text, ended, tuple(completion.token_ids))
        self.journal.append(answer.as_dict())
        self.slots.fill(slot)
        self.progress.written += 1

    def _skip(self, error: Exception) -> None:
        self.last_error = error
        self.progress.skipped += 1
        self.on_progress(self.progress)


def chunks_of(batch: Batch) -> Iterator[tuple[int, Chunk]]:
    """Yield all chunks of a batch, even if replies fail. `batch.errors` holds the failures."""
    try:
        yield from batch
    except PacelineError as error:
        if not any(error is failed for failed in batch.errors.values()):
            raise
