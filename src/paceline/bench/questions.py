"""Benchmark questions: reading, picking evenly over categories, lengthening, and grouping into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import InvalidData, InvalidOption
from paceline.text.image_part import with_images
from paceline.text.prompt_rows import parse_object, parse_row
from paceline.text.tokenizer import Tokenizer
from paceline.types import Prompt
from paceline.vision.picture import Picture


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to measure.

    Attributes:
        id: The row's id, or its line number.
        category: Category, such as "coding".
        text: The prompt.
        more: Other prompts to answer in the same batch.
        images: Pictures that come before each prompt.
    """

    id: str | int
    category: str
    text: str
    more: tuple[str, ...] = ()
    images: tuple[Picture, ...] = ()

    @property
    def texts(self) -> list[str]:
        """All prompts of the question. There is one, unless the question is a batch."""
        return [self.text, *self.more]

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts as `LLM.generate` takes them."""
        if not self.images:
            return [*self.texts]
        return [[{"role": "user", "content": with_images(text, self.images)}] for text in self.texts]


def read_questions(path: Path) -> list[Question]:
    """Read rows {"id"?, "category"?, "prompt"} or, as in Spec-Bench, {"turns": [...]}. Only the first turn is used.

    Raises:
        InvalidData: If a row is not valid. The message names file and line.
        OSError: If the file cannot be read.
    """
    questions = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    questions.append(_question(line, number))
                except ValueError as error:
                    fix = 'Write {"category": ..., "prompt": ...}'
                    raise InvalidData(f"{path}, line {number}: {error}", fix) from None
    if not questions:
        raise InvalidData(f"{path} contains no prompts", "Use a file with one JSON object per line")
    return questions


def _question(line: bytes, number: int) -> Question:
    row, category = parse_row(line, number), parse_object(line).get("category", "all")
    if not isinstance(row.prompt, str) or row.id is None:
        raise ValueError("a question must be one text, not chat messages")
    if not isinstance(category, str):
        raise ValueError(f"the category must be a string, got {category!r}")
    return Question(row.id, category, row.prompt)


def _by_category(questions: Sequence[Question]) -> dict[str, list[Question]]:
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    return groups


def pick(questions: Sequence[Question], count: int) -> list[Question]:
    """Pick `count` questions as evenly over the categories as possible, spread over each category.

    The questions alternate between categories, so that an interrupted run is even too.
    """
    groups = _by_category(questions)
    quotas = dict.fromkeys(groups, 0)
    for _ in range(min(count, len(questions))):
        quotas[min((name for name in groups if quotas[name] < len(groups[name])), key=quotas.__getitem__)] += 1
    chosen = {name: [groups[name][i * len(groups[name]) // n] for i in range(n)] for name, n in quotas.items() if n}
    turns = max((len(group) for group in chosen.values()), default=0)
    return [group[turn] for turn in range(turns) for group in chosen.values() if turn < len(group)]


def batches(questions: Sequence[Question], size: int) -> list[Question]:
    """Join questions, ordered by category, into batches of `size` prompts. Each batch is one question to measure."""
    ordered = [question for group in _by_category(questions).values() for question in group]
    joined = []
    for start in range(0, len(ordered), size):
        first, *others = batch = ordered[start : start + size]
        category = first.category if len({question.category for question in batch}) == 1 else "mixed"
        joined.append(replace(first, category=category, more=tuple(question.text for question in others)))
    return joined


def lengthen(question: Question, others: Sequence[Question], tokens: int, tokenizer: Tokenizer) -> Question:
    """Lengthen a question to about `tokens` tokens with text of the other questions before it.

    A question that is long enough is returned unchanged.

    Raises:
        InvalidOption: If the other questions are too short.
    """
    missing = tokens - len(tokenizer.encode(question.text, special=False))
    if missing <= 0:
        return question
    before = tokenizer.encode("\n\n".join(q.text for q in others if q.id != question.id), special=False)
    if len(before) < missing:
        raise InvalidOption(
            f"the other prompts have {len(before)} tokens in total, but question {question.id} needs {missing}",
            "Use a file with more text, or a shorter context",
        )
    return replace(question, text=f"{tokenizer.decode(before[:missing])}\n\n{question.text}")
