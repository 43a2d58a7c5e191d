"""Training prompts from a JSONL file of any size."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InvalidData
from paceline.files.jsonl import JsonlFile
from paceline.text.prompt_rows import parse_row

HELD_OUT = 50
"""One prompt in this many is held out of training."""

Text = str | Sequence[Mapping[str, Any]]
"""Text, or chat messages ending with one of the user."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its id. Ids are unique in a file."""

    id: str | int
    prompt: Text


class Prompts:
    """Prompts of a JSONL file with rows {"prompt": text}, {"turns": [text, ...]} or {"messages": [...]}.

    A prompt's id is the row's "id", or else its line number. The prompt is the first turn, or all messages up to the
    user's last one. Rows are read from disk at each access; ids and file positions stay in memory.

    Attributes:
        held: For each row, True if it is held out (`is_held`).
        digest: Hash of the file's content.
    """

    def __init__(self, path: Path) -> None:
        """Open a file and check every row.

        Raises:
            InvalidData: If a row is not valid. The message names file and line.
            OSError: If the file cannot be read.
        """
        held = bytearray()
        self._rows: dict[str | int, int] = {}
        """Id -> row number."""
        self._numbers = array("q")
        """Line number of each row."""

        def visit(line: bytes, number: int) -> None:
            row = parse_prompt(line, number)
            if (first := self._rows.setdefault(row.id, len(self._rows))) < len(held):
                raise InvalidData(
                    f"{path}, line {number}: the id {row.id!r} is already used on line {self._numbers[first]}",
                    "Give each prompt its own id, or leave all ids out",
                )
            held.append(is_held(row.prompt))
            self._numbers.append(number)

        self._jsonl = JsonlFile(path, visit)
        if not len(self):
            raise InvalidData(f"{path} contains no prompts", 'Write one JSON object per line, such as {"prompt": "Hi"}')
        self.digest = self._jsonl.digest
        self.held: NDArray[np.bool_] = np.frombuffer(held, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._jsonl)

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt with this row number, in the order of the file."""
        index = range(len(self))[index]
        return parse_prompt(self._jsonl[index], self._numbers[index])

    def order(self, seed: int) -> NDArray[np.int64]:
        """Return all row numbers, shuffled."""
        shuffled: NDArray[np.int64] = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).numpy()
        return shuffled

    def find(self, name: str | int) -> int | None:
        """Return the number of the row with this id, or None."""
        return self._rows.get(name)


def is_held(prompt: Text) -> bool:
    """Return True if a prompt is held out of training.

    Only the text decides. So all answers to a prompt, and the same prompt under another id, are on the same side.
    """
    text = prompt if isinstance(prompt, str) else json.dumps(list(prompt), ensure_ascii=False)
    return zlib.crc32(text.encode()) % HELD_OUT == 0


def parse_prompt(line: bytes, number: int) -> Prompt:
    """Parse the prompt on line `number`, counted from 1.

    Raises:
        ValueError: If the line is not a prompt.
    """
    row = parse_row(line, number)
    assert row.id is not None
    return Prompt(row.id, row.prompt if isinstance(row.prompt, str) else _up_to_user(row.prompt))


def _up_to_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop everything after the user's last message. In a recorded chat, it is another model's answer."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("all messages are the assistant's")
    return messages
