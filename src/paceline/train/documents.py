"""Training documents: prompts as the target reads them, each with one of the target's own answers."""

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
"""An answer that does not say whether it ended counts as ended if it is more than this many tokens shorter than the
limit: text that is tokenized again can have a few tokens less than were generated."""

SHORTEST = 16
"""Lower bound of `max_length`, in tokens."""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of the prompt, as from `LLM.prompt_ids`, and of the answer, EOS included if it ended."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class Documents(Dataset[Document]):
    """All answers of a file, each with its prompt and tokenized at each access, split and shuffled.

    `train`, `held`: answers to prompts that are trained on and to those that are held out (`prompts.is_held`), each
    shuffled by `seed`. `digest`: the same for the same documents in the same order, to name caches by. Keeps a few
    numbers per answer in memory, and what `Prompts` keeps.
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
        """`answer_tokens`: length limit of the answers, for those that do not say whether they ended. `max_length`:
        tokens of a document at most (see `cut`). `limit`: documents to train on at most, the first in their order.

        Raises `InvalidData` naming file and line, `InvalidOption`, `OSError`. Every line is checked once, here; a
        prompt that the chat template refuses raises `InvalidPrompt` when its document is accessed.
        """
        if max_length < SHORTEST:
            raise InvalidOption(f"max_length must be >= {SHORTEST}, got {max_length}", "Allow longer documents")
        self._llm, self._prompts = llm, prompts
        self._answer_tokens, self._max_length = answer_tokens, max_length
        self._prompt_rows = array("q")
        """Row of each answer's prompt."""
        self._answers = JsonlFile(answers, self._visit)
        if not self._prompt_rows:
            raise InvalidData(
                f"{answers} holds no answers", "Give another file, or leave out --answers to let the target write them"
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
        """Return the answer's tokens as generated, else those of its text."""
        if answer.token_ids is not None:
            return answer.token_ids
        ids = self._llm.tokenizer.encode(answer.answer, special=False)
        ended = len(ids) < self._answer_tokens - MARGIN if answer.ended is None else answer.ended
        return (*ids, *(self._eos if ended else ()))

    @property
    def _eos(self) -> tuple[int, ...]:
        """The token that ends an answer: of several, the tokenizer's own."""
        preferred, all_eos = self._llm.tokenizer.eos_token_id, self._llm.model.eos
        return (preferred,) if preferred in all_eos else all_eos[:1]


def _shuffled(part: Tensor, seed: int) -> list[int]:
    """Return the rows where `part` is true, shuffled."""
    rows = part.nonzero()[:, 0]
    order: list[int] = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))].tolist()
    return order


def cut(document: Document, length: int) -> Document:
    """Return the document cut to at most `length` tokens.

    The answer loses its end first: what remains is exactly what the target generated. A prompt is cut only if it takes
    more than three quarters of `length`, and then in its middle: models attend strongly to its first tokens (BOS,
    system message), so that without them all later hidden states would be atypical, and its last ones are what is
    answered.
    """
    prompt, answer = document.prompt, document.answer
    answer = answer[: max(length - len(prompt), length // 4)]
    if (room := length - len(answer)) < len(prompt):
        first = room // 4
        prompt = prompt[:first] + prompt[first - room :]
    return Document(prompt, answer)
