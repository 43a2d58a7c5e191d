"""The prompts that a drafter is trained on, from a JSONL file of any size."""

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
from paceline.train.jsonl import JsonLines

HELD_OUT = 50
"""One prompt in so many is never trained on."""

Text = str | Sequence[Mapping[str, Any]]
"""A prompt: text, or chat messages of which the user's is the last."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target is asked, under an id of its own in its file."""

    id: str | int
    prompt: Text


class Prompts:
    """Rows {"prompt": text} or {"turns": [text, ...]} or {"messages": [...]}, with an "id" or known by their line's
    number; read from disk at each access. Of turns the first is the prompt; of messages all up to the user's last.

    `held`: bool per row, whether it is held out (`is_held`). `digest`: names the file's content. Every row is checked
    once, when the file is opened; 25 bytes are kept of each.
    """

    def __init__(self, path: Path) -> None:
        """Raises `InvalidData` naming file and line, `OSError`."""
        keys, held = array("Q"), bytearray()

        def visit(line: bytes, number: int) -> None:
            row = parse_prompt(line, number)
            keys.append(_key(row.id))
            held.append(is_held(row.prompt))

        self._lines = JsonLines(path, visit)
        self.digest = self._lines.digest
        self.held: NDArray[np.bool_] = np.frombuffer(held, dtype=np.bool_)
        known = np.frombuffer(keys, dtype=np.uint64)
        self._by_key = known.argsort(kind="stable")
        self._keys = known[self._by_key]
        self._check(path)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Prompt:
        """The row of this number, in the file's order."""
        index = range(len(self))[index]
        return parse_prompt(self._lines[index], self._lines.number(index))

    def order(self, seed: int) -> NDArray[np.int64]:
        """All row numbers, shuffled."""
        shuffled: NDArray[np.int64] = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).numpy()
        return shuffled

    def find(self, name: str | int) -> int | None:
        """The number of the row with this id."""
        key = np.uint64(_key(name))
        at = int(self._keys.searchsorted(key))
        return int(self._by_key[at]) if at < len(self) and self._keys[at] == key else None

    def _check(self, path: Path) -> None:
        if not len(self):
            raise InvalidData(f"{path} holds no prompts", 'Write one JSON object per line, such as {"prompt": "Hi"}')
        if len(same := np.flatnonzero(self._keys[1:] == self._keys[:-1])):
            first, again = (int(self._by_key[same[0] + i]) for i in (0, 1))
            raise InvalidData(
                f"{path}, line {self._lines.number(again)}: the id {self[again].id!r} was used on line "
                f"{self._lines.number(first)} already",
                "Give each prompt an id of its own, or leave all ids out",
            )


def is_held(prompt: Text) -> bool:
    """Whether a prompt is held out. Its text alone decides, so that all answers to it, and the same prompt under
    another id, lie on one side."""
    text = prompt if isinstance(prompt, str) else json.dumps(list(prompt), ensure_ascii=False)
    return zlib.crc32(text.encode()) % HELD_OUT == 0


def parse_prompt(line: bytes, number: int) -> Prompt:
    """The prompt on this line of its file, `number` counted from 1. Raises `ValueError`."""
    row = parse_row(line, number)
    assert row.id is not None
    return Prompt(row.id, row.prompt if isinstance(row.prompt, str) else _asked(row.prompt))


def _asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to the user's last message: in a recorded chat, what follows is somebody's answer."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("all messages are the assistant's")
    return messages


def _key(name: str | int) -> int:
    """64 bits that stand for an id: among ten million, two agree by chance in 3 of a million files."""
    return int.from_bytes(hashlib.blake2b(json.dumps(name).encode(), digest_size=8).digest(), "little")
