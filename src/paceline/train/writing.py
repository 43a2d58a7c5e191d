"""The target's answers to all prompts, written to a file that survives interruption at any moment."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.engine.detokenizer import Chunk
from paceline.engine.results import Batch, Completion
from paceline.errors import InvalidData, InvalidPrompt, PacelineError
from paceline.llm import LLM
from paceline.train.answers import Answer, AnswerPlan, parse_answer
from paceline.train.jsonl import Journal, JsonlFile, check_settings, replace_with
from paceline.train.progress import OnProgress, Progress, ignore
from paceline.train.prompts import Prompts

GROUP = 32
"""Answers per batch object, in multiples of its width: few bound the memory, many keep the batch full for longer."""


def write_answers(
    llm: LLM, prompts: Prompts, path: Path, plan: AnswerPlan | None = None, on_progress: OnProgress = ignore
) -> Progress:
    """Let the target answer every prompt at every temperature of the plan; return the final progress.

    Each answer is appended to `path` (see `Answer`) when it is finished, so that after a kill or Ctrl-C the same call
    continues where it stopped. Once complete, the file is sorted into the plan's order: it is then the same however
    often it was interrupted, and for any width. A prompt that cannot be answered, such as one that is too long for the
    context, is skipped and counted. Raises `InvalidData` where the file was made with other options or no prompt could
    be answered, `PacelineError`, `OSError`.
    """
    plan = plan or AnswerPlan()
    model = {"model": llm.model.path.name, "tokenizer": llm.tokenizer.digest, "prompts": prompts.digest}
    check_settings(path, model | plan.settings())
    with Journal(path) as journal:
        slots = AnswerSlots(prompts, plan, path)
        progress = Progress(len(slots), kept=slots.filled)
        writer = _AnswerWriter(llm, prompts, plan, slots, journal, progress, on_progress)
        missing = slots.missing()
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
    """The answers of a plan in order: prompts shuffled, each at every temperature in turn. The file holds some."""

    def __init__(self, prompts: Prompts, plan: AnswerPlan, path: Path) -> None:
        """Raises `InvalidData` for a line of the file that is damaged or not an answer of the plan."""
        self._prompts, self._plan, self._path = prompts, plan, path
        self._order = prompts.order(plan.seed)
        self._rank = np.empty_like(self._order)
        self._rank[self._order] = np.arange(len(prompts))
        self._present: NDArray[np.bool_] = np.zeros(len(prompts) * len(plan.temperatures), dtype=np.bool_)
        self._line_slots = array("q")
        """Slot of each line of the file."""
        JsonlFile(path, lambda line, number: self.fill(self._slot(parse_answer(line))))

    def __len__(self) -> int:
        return len(self._present)

    def __getitem__(self, slot: int) -> tuple[int, float]:
        """Return (row of the prompt, temperature)."""
        place, at = divmod(slot, len(self._plan.temperatures))
        return int(self._order[place]), self._plan.temperatures[at]

    def _slot(self, answer: Answer) -> int:
        row = self._prompts.find(answer.id)
        if row is None or answer.temperature not in self._plan.temperatures:
            raise ValueError(f"no prompt of the plan is {answer.id!r} at temperature {answer.temperature:g}")
        at = self._plan.temperatures.index(answer.temperature)
        slot = int(self._rank[row]) * len(self._plan.temperatures) + at
        if self._present[slot]:
            raise ValueError(f"this is a second answer to {answer.id!r} at temperature {answer.temperature:g}")
        return slot

    def fill(self, slot: int) -> None:
        """Record that the answer is the file's last line."""
        self._present[slot] = True
        self._line_slots.append(slot)

    @property
    def filled(self) -> int:
        """Answers in the file."""
        return len(self._line_slots)

    def missing(self) -> Iterator[int]:
        """Return the slots that have no answer at the time of the call, in order."""
        return map(int, np.flatnonzero(~self._present))

    def sort(self) -> None:
        """Put the lines of the file into the order of their slots."""
        order = np.argsort(np.asarray(self._line_slots))
        if (order[1:] > order[:-1]).all():
            return
        lines = JsonlFile(self._path, lambda line, number: None)

        def write(new: Path) -> None:
            with new.open("wb") as file:
                file.writelines(lines[int(i)] for i in order)

        replace_with(self._path, write)
        self._line_slots = array("q", sorted(self._line_slots))


@dataclass(slots=True)
class _AnswerWriter:
    """Generates answers in batches. `last_error`: why the last skipped answer was skipped."""

    llm: LLM
    prompts: Prompts
    plan: AnswerPlan
    slots: AnswerSlots
    journal: Journal
    progress: Progress
    on_progress: OnProgress
    last_error: Exception | None = None

    def answer(self, group: Sequence[int]) -> None:
        """Generate the answers of these slots as one batch."""
        prompts = {slot: ids for slot in group if (ids := self._prompt_ids(slot))}
        sampling = [self.plan.sampling(*self._key(slot)) for slot in prompts]
        with self.llm.batch(list(prompts.values()), sampling, width=self.plan.width) as batch:
            for index, chunk in chunks_of(batch):
                self.progress.tokens += 1
                if chunk.finish_reason:
                    self._keep(list(prompts)[index], batch.completion(index))
                self.on_progress(self.progress)
        for error in batch.errors.values():
            self._skip(error)

    def _key(self, slot: int) -> tuple[str | int, float]:
        """Return (prompt id, temperature)."""
        row, temperature = self.slots[slot]
        return self.prompts[row].id, temperature

    def _prompt_ids(self, slot: int) -> list[int] | None:
        """Return the prompt's token ids, or None where the model cannot take it."""
        try:
            return self.llm.prompt_ids(self.prompts[self.slots[slot][0]].prompt)
        except InvalidPrompt as error:
            self._skip(error)
            return None

    def _keep(self, slot: int, completion: Completion) -> None:
        ended = completion.finish_reason == "eos"
        answer = Answer(*self._key(slot), completion.text, ended, tuple(completion.token_ids))
        self.journal.append(answer.as_dict())
        self.slots.fill(slot)
        self.progress.written += 1

    def _skip(self, error: Exception) -> None:
        self.last_error = error
        self.progress.skipped += 1
        self.on_progress(self.progress)


def chunks_of(batch: Batch) -> Iterator[tuple[int, Chunk]]:
    """Yield all chunks of a batch even where replies fail; `batch.errors` holds the failures."""
    try:
        yield from batch
    except PacelineError as error:
        if not any(error is failed for failed in batch.errors.values()):
            raise
