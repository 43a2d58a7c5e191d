"""Hidden states on disk, stored while a text is written or when it is fed again."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.files.jsonl import replace_with
from paceline.types import Draft, DraftBudget, Tap, Verdict

_HEADER = 1024
"""Upper bound of the size of a file's header, in bytes."""


def states_folder(recording: Path) -> Path:
    """Return the folder with the hidden states of a recording's texts."""
    return recording.with_name(recording.name + ".states")


class StateFiles:
    """A folder with the target's hidden states for texts, one file for each text.

    Attributes:
        taps: Taps that are stored, including "final".
        count: Number of texts that this object has stored.
        refused: Number of texts that it has not stored for lack of room.
    """

    def __init__(self, folder: Path, taps: Sequence[Tap], limit: int) -> None:
        """Use `folder`, which is created when it is needed, for at most `limit` bytes."""
        self.taps: tuple[Tap, ...] = tuple(dict.fromkeys([*taps, "final"]))
        self.count = self.refused = 0
        self._folder, self._limit = folder, limit

    @cached_property
    def _room(self) -> int:
        """Free bytes. Creates the folder so that only its owner can read it: states reveal their texts."""
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        return self._limit - sum(file.stat().st_size for file in self._folder.iterdir())

    def _path(self, token_ids: Sequence[int]) -> Path:
        digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16)
        return self._folder / f"{digest.hexdigest()}.safetensors"

    def __contains__(self, token_ids: Sequence[int]) -> bool:
        """Return True if there is a file for this text. The file may be damaged."""
        return self._path(token_ids).exists()

    def write(self, token_ids: Sequence[int], states: Mapping[Tap, Tensor]) -> bool:
        """Store the states of a text.

        Args:
            token_ids: The T tokens of the text.
            states: Tap -> [T, H].

        Returns:
            False if there is no room or the disk is full.
        """
        tensors = {str(tap): states[tap].contiguous() for tap in self.taps}
        if stored := self._store(self._path(token_ids), tensors):
            self.count += 1
        else:
            self.refused += 1
        return stored

    def _store(self, path: Path, tensors: dict[str, Tensor]) -> bool:
        room = self._room + (path.stat().st_size if path.exists() else 0)
        if sum(tensor.nbytes for tensor in tensors.values()) + _HEADER > room:
            return False
        try:
            replace_with(path, lambda new: save_file(tensors, new))
        except (OSError, SafetensorError):
            return False
        self._room = room - path.stat().st_size
        return True

    def read(self, token_ids: Sequence[int]) -> dict[Tap, Tensor] | None:
        """Return the states of a text, tap -> [T, H], or None if they are not stored or cannot be read."""
        try:
            tensors = load_file(self._path(token_ids))
        except (OSError, SafetensorError):
            return None
        states = {tap: tensors[str(tap)] for tap in self.taps if str(tap) in tensors}
        whole = len(states) == len(self.taps) and all(len(x) == len(token_ids) for x in states.values())
        return states if whole else None


@dataclass(slots=True)
class _TextStates:
    """The text of a request so far, and the states of all its tokens except the last, in parts."""

    token_ids: list[int]
    parts: list[list[Tensor]] = field(default_factory=list)
    count: int = 0


class StateKeeper(Drafter):
    """A drafter that drafts nothing, but stores the target's hidden states while it writes.

    So no text needs to be fed to the target again. A text is stored without its last token, which no pass has seen.
    """

    draft = DraftBudget.chain(0)

    def __init__(self, files: StateFiles) -> None:
        self.taps = files.taps
        self._files = files
        self._texts: dict[int, _TextStates] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._texts[slot] = _TextStates(list(prompt))

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        like = self._texts[source]
        self._texts[slot] = _TextStates(list(prompt), [*like.parts], like.count)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self._add(self._texts[slot], taps, len(tokens))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft() for _ in asks]

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._add(self._texts[slot], out, 1)
        self._texts[slot].token_ids += verdict.tokens

    def _add(self, text: _TextStates, taps: Mapping[Tap, Tensor], count: int) -> None:
        # Copy the states: a view would keep the states of the whole pass in memory.
        text.parts.append([taps[tap][:count].clone() for tap in self.taps])
        text.count += count

    def release(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text and text.count and text.count == len(text.token_ids) - 1:
            states = {
                tap: torch.cat(parts) for tap, parts in zip(self.taps, zip(*text.parts, strict=True), strict=True)
            }
            self._files.write(text.token_ids[:-1], states)
