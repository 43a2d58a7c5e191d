"""Training prompts from a JSONL file of any size."""

from __future__ import annotations

import hashlib
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
from paceline.text.prompt_rows import parse_row
from paceline.train.jsonl import JsonlFile

HELD_OUT = 50
"""One prompt in this many is held out of training."""

Text = str | Sequence[Mapping[str, Any]]
"""Text, or chat messages of which the last is the user's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its id, which is unique in its file."""

    id: str | int
    prompt: Text


class Prompts:
    """Rows {"prompt": text}, {"turns": [text, ...]} or {"messages": [...]}, read from disk at each access.

    The id is the row's "id", else its line number. The prompt is the first turn, or the messages up to the user's last.
    `held`: bool per row, whether it is held out (`is_held`). `digest`: hash of the file's content. Every row is checked
    once, when the file is opened; 25 bytes per row stay in memory.
    """

    def __init__(self, path: Path) -> None:
        """Raises `InvalidData` naming file and line, `OSError`."""
        keys, held = array("Q"), bytearray()

        def visit(line: bytes, number: int) -> None:
            row = parse_prompt(line, number)
            keys.append(_key(row.id))
            held.append(is_held(row.prompt))

        self._jsonl = JsonlFile(path, visit)
        self.digest = self._jsonl.digest
        self.held: NDArray[np.bool_] = np.frombuffer(held, dtype=np.bool_)
        known = np.frombuffer(keys, dtype=np.uint64)
        self._by_key = known.argsort(kind="stable")
        self._keys = known[self._by_key]
        self._check(path)

    def __len__(self) -> int:
        return len(self._jsonl)

    def __getitem__(self, index: int) -> Prompt:
        """Return a row by its number, in the file's order."""
        index = range(len(self))[index]
        return parse_prompt(self._jsonl[index], self._jsonl.number(index))

    def order(self, seed: int) -> NDArray[np.int64]:
        """Return all row numbers, shuffled."""
        shuffled: NDArray[np.int64] = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).numpy()
        return shuffled

    def find(self, name: str | int) -> int | None:
        """Return the number of the row with this id, or None."""
        key = np.uint64(_key(name))
        at = int(self._keys.searchsorted(key))
        return int(self._by_key[at]) if at < len(self) and self._keys[at] == key else None

    def _check(self, path: Path) -> None:
        if not len(self):
            raise InvalidData(f"{path} holds no prompts", 'Write one JSON object per line, such as {"prompt": "Hi"}')
        if len(same := np.flatnonzero(self._keys[1:] == self._keys[:-1])):
            first, again = (int(self._by_key[same[0] + i]) for i in (0, 1))
            raise InvalidData(
                f"{path}, line {self._jsonl.number(again)}: the id {self[again].id!r} was used on line "
                f"{self._jsonl.number(first)} already",
                "Give each prompt its own id, or leave all ids out",
            )


def is_held(prompt: Text) -> bool:
    """Whether a prompt is held out. Only its text decides, so that all answers to it, and the same prompt under another
    id, lie on the same side."""
    text = prompt if isinstance(prompt, str) else json.dumps(list(prompt), ensure_ascii=False)
    return zlib.crc32(text.encode()) % HELD_OUT == 0


def parse_prompt(line: bytes, number: int) -> Prompt:
    """Parse the prompt on a line of its file, `number` counted from 1. Raises `ValueError`."""
    row = parse_row(line, number)
    assert row.id is not None
    return Prompt(row.id, row.prompt if isinstance(row.prompt, str) else _up_to_user(row.prompt))


def _up_to_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop what follows the user's last message: in a recorded chat, that is another model's answer."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("all messages are the assistant's")
    return messages


def _key(name: str | int) -> int:
    """Return a 64-bit hash of an id: among ten million ids, two collide in 3 of a million files."""
    return int.from_bytes(hashlib.blake2b(json.dumps(name).encode(), digest_size=8).digest(), "little")
