"""What is asked: prompts with a category, picked evenly and always the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import InvalidData, InvalidOption
from paceline.text.prompt_rows import parse_object, parse_row
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    """`id`: its row's, or the row's number."""

    id: str | int
    category: str
    text: str


def read_questions(path: Path) -> list[Question]:
    """Rows {"id"?, "category"?, "prompt"} or, as in Spec-Bench, {"turns": [...]}, of which the first turn is asked.

    Raises `InvalidData` naming file and line, `OSError`.
    """
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(_question(line, number))
                except ValueError as error:
                    fix = 'Write {"category": ..., "prompt": ...}'
                    raise InvalidData(f"{path}, line {number}: {error}", fix) from None
    if not found:
        raise InvalidData(f"{path} holds no prompts", "Give a file with one JSON object per line")
    return found


def _question(line: bytes, number: int) -> Question:
    row, category = parse_row(line, number), parse_object(line).get("category", "all")
    if not isinstance(row.prompt, str) or row.id is None:
        raise ValueError("a question is one text, not chat messages")
    if not isinstance(category, str):
        raise ValueError(f"the category is {category!r}; it must be a string")
    return Question(row.id, category, row.prompt)


def pick(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` of them, as evenly over the categories as their sizes allow, and over each category's length.

    They come in turns, one of each category, so that a run cut short is even too.
    """
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    quotas = _quotas({name: len(group) for name, group in groups.items()}, count)
    chosen = {name: [groups[name][i * len(groups[name]) // n] for i in range(n)] for name, n in quotas.items() if n}
    turns = max((len(group) for group in chosen.values()), default=0)
    return [group[turn] for turn in range(turns) for group in chosen.values() if turn < len(group)]


def _quotas(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of each category: one each in turn, until `count` are given out or none is left."""
    quotas = dict.fromkeys(sizes, 0)
    left = min(count, sum(sizes.values()))
    while left:
        for name, size in sizes.items():
            if left and quotas[name] < size:
                quotas[name] += 1
                left -= 1
    return quotas


def lengthen(question: Question, others: Sequence[Question], tokens: int, tokenizer: Tokenizer) -> Question:
    """The question after as much of the others' text as makes the two about `tokens` tokens long.

    One that is so long already stays as it is. Raises `InvalidOption` if the others are not enough.
    """
    missing = tokens - len(tokenizer.encode(question.text, special=False))
    if missing <= 0:
        return question
    before = tokenizer.encode("\n\n".join(q.text for q in others if q.id != question.id), special=False)
    if len(before) < missing:
        raise InvalidOption(
            f"the other prompts have {len(before)} tokens together, and {missing} are to stand before one",
            "Give a file with more text, or a shorter context",
        )
    return replace(question, text=f"{tokenizer.decode(before[:missing])}\n\n{question.text}")
