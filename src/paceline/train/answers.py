"""What the target said to a prompt, as a line of a file; and which answers a drafter is to learn from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidOption
from paceline.sampling.parameters import Sampling
from paceline.text.prompt_rows import parse_id, parse_object


@dataclass(frozen=True, slots=True)
class Answer:
    """A row of an answers file: what the target said to prompt `id`.

    `ended`: whether it ended by itself; None where nobody wrote that down. `token_ids`: exactly what it wrote, EOS
    included; None where only the text is known, which is then encoded again.
    """

    id: str | int
    temperature: float
    answer: str
    ended: bool | None = None
    token_ids: tuple[int, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        known = {"ended": self.ended, "token_ids": self.token_ids}
        return {"id": self.id, "temperature": self.temperature, "answer": self.answer} | {
            name: value for name, value in known.items() if value is not None
        }


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Which answers to write: one per prompt and temperature, of at most `answer_tokens` tokens, EOS included.
    `width`: how many at once, which changes no answer."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    answer_tokens: int = 192
    seed: int = 0
    width: int = 24

    def __post_init__(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise InvalidOption(f"temperatures {list(self.temperatures)} are no mix", "Give each of them once")
        for temperature in self.temperatures:
            self.sampling(0, temperature)

    def settings(self) -> dict[str, Any]:
        """What the answers depend on."""
        return {"temperatures": self.temperatures, "answer tokens": self.answer_tokens, "seed": self.seed}

    def sampling(self, name: str | int, temperature: float) -> Sampling:
        """How the answer to the prompt of this id is made, whatever else is in the file."""
        seed = seed_of(self.seed, name)
        return Sampling(max_new_tokens=self.answer_tokens, temperature=temperature, seed=seed)


def seed_of(seed: int, name: str | int) -> int:
    """A seed of its own for what is called `name`, 0 <= seed < 2**63."""
    digest = hashlib.blake2b(json.dumps([seed, name]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def parse_answer(line: bytes) -> Answer:
    """A row {"id", "temperature", "answer", "ended"?, "token_ids"?}. Raises `ValueError`."""
    row = parse_object(line)
    for name, (kind, what) in _FIELDS.items():
        value = row.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            raise ValueError(f"{name!r} is {'missing' if value is None else f'{value!r:.40}'}; it must be {what}")
    ids = row.get("token_ids")
    if ids is not None and any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError("'token_ids' holds something that is no token id")
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
