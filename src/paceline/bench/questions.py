"""Benchmark questions: read, picked evenly over their categories, lengthened, grouped into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import InvalidData, InvalidOption
from paceline.text.prompt_rows import parse_object, parse_row
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to measure. `id`: its row's, or the row's number. `more`: prompts to answer in one batch with it."""

    id: str | int
    category: str
    text: str
    more: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """All prompts, one unless the question is a batch."""
        return [self.text, *self.more]


def read_questions(path: Path) -> list[Question]:
    """Read rows {"id"?, "category"?, "prompt"} or, as in Spec-Bench, {"turns": [...]}, of which the first turn counts.

    Raises `InvalidData` naming file and line, `OSError`.
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
        raise InvalidData(f"{path} holds no prompts", "Give a file with one JSON object per line")
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
    """Pick `count` questions as evenly over the categories as their sizes allow, spread over each category.

    They alternate between categories, so that a run that is cut short is even too.
    """
    groups = _by_category(questions)
    quotas = dict.fromkeys(groups, 0)
    for _ in range(min(count, len(questions))):
        quotas[min((name for name in groups if quotas[name] < len(groups[name])), key=quotas.__getitem__)] += 1
    chosen = {name: [groups[name][i * len(groups[name]) // n] for i in range(n)] for name, n in quotas.items() if n}
    turns = max((len(group) for group in chosen.values()), default=0)
    return [group[turn] for turn in range(turns) for group in chosen.values() if turn < len(group)]


def batches(questions: Sequence[Question], size: int) -> list[Question]:
    """Join the questions, ordered by category, into batches of `size` prompts, each one question to measure."""
    ordered = [question for group in _by_category(questions).values() for question in group]
    joined = []
    for start in range(0, len(ordered), size):
        first, *others = batch = ordered[start : start + size]
        category = first.category if len({question.category for question in batch}) == 1 else "mixed"
        joined.append(replace(first, category=category, more=tuple(question.text for question in others)))
    return joined


def lengthen(question: Question, others: Sequence[Question], tokens: int, tokenizer: Tokenizer) -> Question:
    """Put as much of the other questions' text before a question as makes it about `tokens` tokens long.

    A question of that length or more stays as it is. Raises `InvalidOption` if the others are too short.
    """
    missing = tokens - len(tokenizer.encode(question.text, special=False))
    if missing <= 0:
        return question
    before = tokenizer.encode("\n\n".join(q.text for q in others if q.id != question.id), special=False)
    if len(before) < missing:
        raise InvalidOption(
            f"the other prompts have {len(before)} tokens in all, but {missing} must precede question {question.id}",
            "Give a file with more text, or a shorter context",
        )
    return replace(question, text=f"{tokenizer.decode(before[:missing])}\n\n{question.text}")
