"""Training documents: a prompt as the target reads it, with one of the target's own answers."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from paceline.errors import InvalidData, InvalidOption
from paceline.files.jsonl import JsonlFile
from paceline.llm import LLM
from paceline.train.answers import Answer, parse_answer
from paceline.train.prompts import Prompts

MARGIN = 8
"""Tolerance in tokens. An answer without the field "ended" counts as ended if it is shorter than the limit by more than
this. Text that is tokenized again can have a few tokens less than were generated."""

SHORTEST = 16
"""Smallest allowed `max_length`, in tokens."""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of a prompt, as from `LLM.prompt_ids`, and of its answer, including EOS if the answer ended."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class Documents(Dataset[Document]):
    """All answers of a file with their prompts, split and shuffled.

    Documents are read and tokenized at each access. Only a few numbers for each answer stay in memory.

    Attributes:
        train: Documents to train on, shuffled by `seed`.
        held: Documents of held-out prompts (`prompts.is_held`), shuffled by `seed`.
        digest: Name for caches. It is the same for the same documents in the same order.
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
        """Open an answers file and check every line.

        A prompt that the chat template refuses raises `InvalidPrompt` later, when its document is accessed.

        Args:
            llm: The target.
            prompts: The prompts that the answers belong to.
            answers: JSONL file of answers.
            answer_tokens: Length limit of the answers when they were generated. It decides whether an answer without
                the field "ended" has ended.
            max_length: Maximum length of a document in tokens (see `cut`).
            seed: Seed of the order.
            limit: Maximum number of documents to train on.

        Raises:
            InvalidData: If a line is not a valid answer. The message names file and line.
            InvalidOption: If `max_length` is too small.
            OSError: If the file cannot be read.
        """
        if max_length < SHORTEST:
            raise InvalidOption(f"max_length must be >= {SHORTEST}, got {max_length}", "Increase it")
        self._llm, self._prompts = llm, prompts
        self._answer_tokens, self._max_length = answer_tokens, max_length
        self._prompt_rows = array("q")
        """Row of each answer's prompt."""
        self._answers = JsonlFile(answers, self._visit)
        if not self._prompt_rows:
            raise InvalidData(
                f"{answers} contains no answers",
                "Give another file, or leave out --answers to let the target write the answers",
            )
        prompt_rows = torch.frombuffer(self._prompt_rows, dtype=torch.int64)
        held = torch.from_numpy(prompts.held.copy())[prompt_rows]
        self.train: Subset[Document] = Subset(self, _shuffled(~held, seed)[:limit])
        self.held: Subset[Document] = Subset(self, _shuffled(held, seed))
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
            raise ValueError(f"'token_ids' must be below the vocabulary size {size}, got {max(answer.token_ids)}")
        self._prompt_rows.append(row)

    def __getitem__(self, row: int) -> Document:
        """Return the document of an answer, by its row in the file."""
        prompt = self._llm.encode(self._prompts[self._prompt_rows[row]].prompt)
        return cut(Document(tuple(prompt), self._ids(parse_answer(self._answers[row]))), self._max_length)

    def _ids(self, answer: Answer) -> tuple[int, ...]:
        """Return the answer's tokens as generated, or tokenize its text if they are unknown."""
        if answer.token_ids is not None:
            return answer.token_ids
        ids = self._llm.tokenizer.encode(answer.answer, special=False)
        ended = len(ids) < self._answer_tokens - MARGIN if answer.ended is None else answer.ended
        return (*ids, *(self._eos if ended else ()))

    @property
    def _eos(self) -> tuple[int, ...]:
        """The token that ends an answer. If the model has several, prefer the tokenizer's own."""
        preferred, all_eos = self._llm.tokenizer.eos_token_id, self._llm.model.eos
        return (preferred,) if preferred in all_eos else all_eos[:1]


def _shuffled(part: Tensor, seed: int) -> list[int]:
    """Return the rows where `part` is true, shuffled."""
    rows = part.nonzero()[:, 0]
    order: list[int] = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))].tolist()
    return order


def cut(document: Document, length: int) -> Document:
    """Cut a document to at most `length` tokens.

    The answer is cut first, at its end, so the target has generated exactly the tokens that remain. A prompt is cut
    only if it takes more than three quarters of `length`, and then in its middle. Its first tokens (BOS, system
    message) stay because models attend strongly to them: without them, all later hidden states would be atypical. Its
    last tokens stay because the answer refers to them.
    """
    prompt, answer = document.prompt, document.answer
    answer = answer[: max(length - len(prompt), length // 4)]
    if (room := length - len(answer)) < len(prompt):
        first = room // 4
        prompt = prompt[:first] + prompt[first - room :]
    return Document(prompt, answer)
