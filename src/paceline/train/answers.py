"""The target's answers as JSONL rows, and the plan of the answers to write."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import InvalidOption
from paceline.sampling.parameters import Sampling
from paceline.text.prompt_rows import parse_id, parse_object


@dataclass(frozen=True, slots=True)
class Answer:
    """The target's answer to a prompt: a row of an answers file.

    Attributes:
        id: Id of the prompt.
        temperature: Sampling temperature.
        answer: Text of the answer.
        ended: True if the answer ended with EOS, None if this is unknown.
        token_ids: The generated tokens, including EOS. None if only the text is known; it is then tokenized again.
    """

    id: str | int
    temperature: float
    answer: str
    ended: bool | None = None
    token_ids: tuple[int, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary, without unknown fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Plan of the answers to write: one for each prompt and temperature.

    Attributes:
        temperatures: Sampling temperatures, all different.
        answer_tokens: Maximum length of an answer in tokens, including EOS.
        seed: The seeds of all answers are derived from it.
        width: Batch size. It does not change the answers.
    """

    temperatures: tuple[float, ...] = (0.0, 0.8)
    answer_tokens: int = 192
    seed: int = 0
    width: int = 24

    def __post_init__(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise InvalidOption(
                f"temperatures must be one or more different numbers, got {list(self.temperatures)}",
                "Give at least one, and each only once",
            )
        if self.answer_tokens < 1:
            raise InvalidOption(f"answer_tokens must be >= 1, got {self.answer_tokens}", "Use 192, for example")
        for temperature in self.temperatures:
            self.sampling(0, temperature)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the answers depend on."""
        return {"temperatures": self.temperatures, "answer tokens": self.answer_tokens, "seed": self.seed}

    def sampling(self, prompt_id: str | int, temperature: float) -> Sampling:
        """Return the sampling parameters of an answer. They do not depend on any other answer."""
        seed = derive_seed(self.seed, prompt_id)
        return Sampling(max_new_tokens=self.answer_tokens, temperature=temperature, seed=seed)


def derive_seed(seed: int, name: str | int) -> int:
    """Derive a seed for the item `name`, 0 <= seed < 2**63."""
    digest = hashlib.blake2b(json.dumps([seed, name]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def parse_answer(line: bytes) -> Answer:
    """Parse a row {"id", "temperature", "answer", "ended"?, "token_ids"?}.

    Raises:
        ValueError: If the line is not such a row.
    """
    row = parse_object(line)
    for name, (kind, what) in _FIELDS.items():
        value = row.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            raise ValueError(f"{name!r} must be {what}, got {'nothing' if value is None else f'{value!r:.40}'}")
    ids = row.get("token_ids")
    if ids is not None and any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError("'token_ids' must contain only integers >= 0")
    return Answer(
        parse_id(row["id"], 0),
        float(row["temperature"]),
        row["answer"],
        row.get("ended"),
        None if ids is None else tuple(ids),
    )


_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "id": ((str, int), "the id of a prompt"),
    "temperature": ((int, float), "a number"),
    "answer": ((str,), "text"),
    "ended": ((bool, type(None)), "true or false, or left out"),
    "token_ids": ((list, type(None)), "a list of token ids, or left out"),
}
