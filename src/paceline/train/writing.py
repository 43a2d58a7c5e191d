"""Letting the target answer the prompts, in a file that survives being interrupted at any moment."""

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
from paceline.train.jsonl import Journal, JsonLines, made_with, replace_with
from paceline.train.progress import OnProgress, Progress, ignore
from paceline.train.prompts import Prompts

GROUP = 32
"""Answers handed to one batch, in widths of it: few, so that memory is bounded; many, since its end runs half empty."""


def write_answers(
    llm: LLM, prompts: Prompts, path: Path, plan: AnswerPlan | None = None, on_progress: OnProgress = ignore
) -> Progress:
    """Let the target answer every prompt at every temperature of the plan; returns what was done.

    Each answer is a line of `path` (`Answer`) as soon as it is finished, so that what a kill or Ctrl-C leaves can be
    used, and the same call goes on where it stopped. When all are there, they are put in the plan's order: the file is
    then the same however often it was interrupted, and whatever the width. A prompt that cannot be answered, being too
    long for the context for instance, is skipped and counted. Raises `InvalidData` where the file was made with other
    options or no prompt could be answered, `PacelineError`, `OSError`.
    """
    plan = plan or AnswerPlan()
    model = {"model": llm.model.path.name, "tokenizer": llm.tokenizer.digest, "prompts": prompts.digest}
    made_with(path, model | plan.settings())
    with Journal(path) as journal:
        slots = Slots(prompts, plan, path)
        progress = Progress(len(slots), kept=slots.filled)
        writer = _AnswerWriter(llm, prompts, plan, slots, journal, progress, on_progress)
        missing = slots.missing()
        while group := list(islice(missing, GROUP * plan.width)):
            writer.answer(group)
    if not slots.filled:
        raise InvalidData(f"none of the {len(prompts)} prompts could be answered ({writer.why})", "Give other prompts")
    if progress.done + progress.skipped == progress.total:
        slots.sort()
    return progress


class Slots:
    """The answers of a plan, numbered: prompts shuffled, each at every temperature in turn. The file has some."""

    def __init__(self, prompts: Prompts, plan: AnswerPlan, path: Path) -> None:
        """Raises `InvalidData` for a line of the file that is damaged or answers nothing in the plan."""
        self._prompts, self._plan, self._path = prompts, plan, path
        self._order = prompts.order(plan.seed)
        self._rank = np.empty_like(self._order)
        self._rank[self._order] = np.arange(len(prompts))
        self._there: NDArray[np.bool_] = np.zeros(len(prompts) * len(plan.temperatures), dtype=np.bool_)
        self._lines = array("q")
        """The slot of each line of the file."""
        JsonLines(path, lambda line, number: self.fill(self._slot(parse_answer(line))))

    def __len__(self) -> int:
        return len(self._there)

    def __getitem__(self, slot: int) -> tuple[int, float]:
        """(Row of the prompt, temperature)."""
        place, at = divmod(slot, len(self._plan.temperatures))
        return int(self._order[place]), self._plan.temperatures[at]

    def _slot(self, answer: Answer) -> int:
        row = self._prompts.find(answer.id)
        if row is None or answer.temperature not in self._plan.temperatures:
            raise ValueError(f"nothing asks for an answer to {answer.id!r} at temperature {answer.temperature:g}")
        at = self._plan.temperatures.index(answer.temperature)
        slot = int(self._rank[row]) * len(self._plan.temperatures) + at
        if self._there[slot]:
            raise ValueError(f"this is a second answer to {answer.id!r} at temperature {answer.temperature:g}")
        return slot

    def fill(self, slot: int) -> None:
        """The answer is now the file's last line."""
        self._there[slot] = True
        self._lines.append(slot)

    @property
    def filled(self) -> int:
        return len(self._lines)

    def missing(self) -> Iterator[int]:
        """The slots without an answer as of now, in order."""
        return map(int, np.flatnonzero(~self._there))

    def sort(self) -> None:
        """Put the lines of the file in the order of their slots."""
        order = np.argsort(np.asarray(self._lines))
        if (order[1:] > order[:-1]).all():
            return
        lines = JsonLines(self._path, lambda line, number: None)

        def write(new: Path) -> None:
            with new.open("wb") as file:
                file.writelines(lines[int(i)] for i in order)

        replace_with(self._path, write)
        self._lines = array("q", sorted(self._lines))


@dataclass(slots=True)
class _AnswerWriter:
    """Lets the target answer. `why`: the last reason for which an answer was skipped."""

    llm: LLM
    prompts: Prompts
    plan: AnswerPlan
    slots: Slots
    journal: Journal
    progress: Progress
    tell: OnProgress
    why: Exception | None = None

    def answer(self, group: Sequence[int]) -> None:
        """These slots, in shared passes."""
        able = {slot: ids for slot in group if (ids := self._ids(slot))}
        sampling = [self.plan.sampling(*self._name(slot)) for slot in able]
        with self.llm.batch(list(able.values()), sampling, width=self.plan.width) as batch:
            for index, chunk in survivors(batch):
                self.progress.tokens += 1
                if chunk.finish_reason:
                    self._keep(list(able)[index], batch.completion(index))
                self.tell(self.progress)
        for error in batch.errors.values():
            self._skip(error)

    def _name(self, slot: int) -> tuple[str | int, float]:
        row, temperature = self.slots[slot]
        return self.prompts[row].id, temperature

    def _ids(self, slot: int) -> list[int] | None:
        """The prompt's token ids, or None where the model cannot take it."""
        try:
            return self.llm.prompt_ids(self.prompts[self.slots[slot][0]].prompt)
        except InvalidPrompt as error:
            self._skip(error)
            return None

    def _keep(self, slot: int, completion: Completion) -> None:
        ended = completion.finish_reason == "eos"
        answer = Answer(*self._name(slot), completion.text, ended, tuple(completion.token_ids))
        self.journal.append(answer.as_dict())
        self.slots.fill(slot)
        self.progress.written += 1

    def _skip(self, why: Exception) -> None:
        self.why = why
        self.progress.skipped += 1
        self.tell(self.progress)


def survivors(batch: Batch) -> Iterator[tuple[int, Chunk]]:
    """All chunks of a batch, whichever of its replies fail; `batch.errors` has those."""
    try:
        yield from batch
    except PacelineError as error:
        if not any(error is failed for failed in batch.errors.values()):
            raise
