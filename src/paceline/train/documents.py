"""What a drafter is trained on: prompts as the target reads them, each with an answer of the target's own."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import InvalidData, InvalidOption
from paceline.llm import LLM
from paceline.train.answers import Answer, parse_answer
from paceline.train.jsonl import JsonLines
from paceline.train.prompts import Prompts

MARGIN = 8
"""Where nobody wrote down whether an answer ended by itself: it did if it has so many tokens less than it might. Text
encoded again can have a few less than were written."""

SHORTEST = 16
"""The smallest maximum length, in tokens."""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids: the prompt's, as `LLM.prompt_ids` gives them, and the answer's, EOS included if it ended."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class Selection:
    """Some of the documents, in an order of their own; each is made when it is asked for."""

    def __init__(self, rows: Tensor, make: Callable[[int], Document]) -> None:
        """`rows`: their numbers, int64 [n]."""
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def first(self, count: int | None) -> Selection:
        return Selection(self._rows[:count], self._make)

    def __getitem__(self, index: int) -> Document:
        return self._make(int(self._rows[range(len(self))[index]]))


class Documents:
    """All answers of a file, each with its prompt, split and shuffled.

    `train`, `held`: the answers to prompts that are trained on and to those that are held out (`prompts.is_held`), each
    shuffled by `seed`. `digest`: the same for the same documents in the same order, to name caches by. 16 bytes are
    kept per answer, and what `Prompts` keeps.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Prompts,
        answers: Path,
        *,
        answer_tokens: int = 192,
        max_length: int = 2048,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        """`answer_tokens`: how long the answers could become, for those that do not say whether they ended.
        `max_length`: what a longer document is cut to (`cut`), in tokens. `limit`: train on so many at most, the first
        of their order.

        Raises `InvalidData` naming file and line, `InvalidOption`, `OSError`. Every line is checked once, here; a
        prompt that the chat template refuses shows when it is asked for, as `InvalidPrompt`.
        """
        if max_length < SHORTEST:
            raise InvalidOption(f"documents of {max_length} tokens are too short", f"Give {SHORTEST} or more")
        self._llm, self._prompts = llm, prompts
        self._answer_tokens, self._max_length = answer_tokens, max_length
        self._asked = array("q")
        """The row of each answer's prompt."""
        self._answers = JsonLines(answers, self._visit)
        if not self._asked:
            raise InvalidData(f"{answers} holds no answers", "Give another file, or none to let the target write them")
        asked = torch.frombuffer(self._asked, dtype=torch.int64)
        held = torch.from_numpy(prompts.held.copy())[asked]
        self.train, self.held = (self._select(part, seed) for part in (~held, held))
        self.train = self.train.first(limit)
        options = [answer_tokens, max_length, seed, *llm.model.eos]
        parts = [prompts.digest, self._answers.digest, llm.tokenizer.digest, options]
        self.digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def _visit(self, line: bytes, number: int) -> None:
        answer = parse_answer(line)
        row = self._prompts.find(answer.id)
        if row is None:
            raise ValueError(f"no prompt has the id {answer.id!r}")
        size = self._llm.model.target.vocab_size
        if answer.token_ids and max(answer.token_ids) >= size:
            raise ValueError(f"'token_ids' holds {max(answer.token_ids)}, and the model has {size} tokens")
        self._asked.append(row)

    def _select(self, part: Tensor, seed: int) -> Selection:
        rows = part.nonzero()[:, 0]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        return Selection(rows[order], self._document)

    def _document(self, row: int) -> Document:
        prompt = self._llm.encode(self._prompts[self._asked[row]].prompt)
        return cut(Document(tuple(prompt), self._ids(parse_answer(self._answers[row]))), self._max_length)

    def _ids(self, answer: Answer) -> tuple[int, ...]:
        """The answer's tokens: those that were written, else those that its text has now."""
        if answer.token_ids is not None:
            return answer.token_ids
        ids = self._llm.tokenizer.encode(answer.answer, special=False)
        ended = len(ids) < self._answer_tokens - MARGIN if answer.ended is None else answer.ended
        return (*ids, *(self._eos if ended else ()))

    @property
    def _eos(self) -> tuple[int, ...]:
        """What ends an answer: of several, the tokenizer's own."""
        own, ends = self._llm.tokenizer.eos_token_id, self._llm.model.eos
        return (own,) if own in ends else ends[:1]


def cut(document: Document, length: int) -> Document:
    """The document in `length` tokens at most.

    First the answer loses its end: whatever is left, the target has seen and said exactly so. Only a prompt that takes
    more than three quarters of the room loses tokens itself, and then between its first quarter and its end: without
    its first tokens (BOS, the system's words), on which models rest much of their attention, all hidden states after
    them would be strange, and its last ones are those that are answered.
    """
    prompt, answer = document.prompt, document.answer
    answer = answer[: max(length - len(prompt), length // 4)]
    if (room := length - len(answer)) < len(prompt):
        first = room // 4
        prompt = prompt[:first] + prompt[first - room :]
    return Document(prompt, answer)
