"""The target's hidden states over documents: one prefill pass each, cached on disk up to a limit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Subset

from paceline.errors import is_out_of_memory
from paceline.files.jsonl import replace_with
from paceline.protocols import Target
from paceline.train.documents import Document
from paceline.types import Rows, Tap, Want

SHARD = 64
"""Documents that are computed, stored and read together."""

_HEADER = 4096
"""Upper bound of a shard file's header, in bytes."""

_PASS = 4096
"""Tokens per target pass at most: more are no faster. Halved when memory runs out."""


@dataclass(frozen=True, slots=True)
class DocumentStates:
    """A document's tokens [T] and the target's hidden states at each: tap -> [T, H]. `prompt`: tokens before the
    answer."""

    tokens: Tensor
    states: Mapping[Tap, Tensor]
    prompt: int


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """B documents, padded on the right. tokens int64 [B, T]; states: tap -> [B, T, H]; prompts, lengths int64 [B]."""

    tokens: Tensor
    states: Mapping[Tap, Tensor]
    prompts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, size: int) -> list[DocumentBatch]:
        """Return parts of at most `size` documents."""
        return [self._rows(slice(i, i + size)) for i in range(0, len(self), size)] if size < len(self) else [self]

    def _rows(self, rows: slice) -> DocumentBatch:
        states = {tap: x[rows] for tap, x in self.states.items()}
        return DocumentBatch(self.tokens[rows], states, self.prompts[rows], self.lengths[rows])

    @staticmethod
    def of(documents: Sequence[DocumentStates], device: torch.device) -> DocumentBatch:
        """Pad documents into a batch on `device`."""

        def padded(parts: Sequence[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True).to(device)

        return DocumentBatch(
            padded([d.tokens for d in documents]),
            {tap: padded([d.states[tap] for d in documents]) for tap in documents[0].states},
            torch.tensor([d.prompt for d in documents], device=device),
            torch.tensor([len(d.tokens) for d in documents], device=device),
        )


class States:
    """Documents in shards of `SHARD`, each with the target's hidden states at `taps` and "final".

    `folder`: where shards are stored for the next epoch, up to `limit` bytes; None stores nothing. A shard that cannot
    be read (the run was killed, the disk was full) is computed again.
    """

    def __init__(
        self,
        target: Target,
        documents: Subset[Document],
        taps: Sequence[Tap],
        folder: Path | None = None,
        limit: int = 0,
    ) -> None:
        self._target, self._documents = target, documents
        self._taps: tuple[Tap, ...] = tuple(dict.fromkeys([*taps, "final"]))
        self._folder = folder
        self._room = limit
        self._pass_tokens = _PASS
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._room -= sum(file.stat().st_size for file in folder.iterdir())

    @property
    def device(self) -> torch.device:
        """Device of the target and of the batches."""
        return self._target.device

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._documents)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-len(self) // SHARD)

    def size(self, number: int) -> int:
        """Return the number of documents of a shard."""
        return min(SHARD, len(self) - number * SHARD)

    def shard(self, number: int) -> list[DocumentStates]:
        """Return the documents of shard `number` in their order: from `number * SHARD` on, at most `SHARD`."""
        kept = self._folder / f"{number:06}.safetensors" if self._folder is not None else None
        states = _read(kept, self._taps) if kept is not None else None
        if states is None:
            states = self._compute(number)
            if kept is not None:
                self._room -= _write(kept, states, self._room)
        return states

    def batches(self, number: int, size: int, seed: str) -> Iterator[DocumentBatch]:
        """Yield the shard in batches of `size` documents of similar length, in an order that depends on `seed`."""
        documents = self.shard(number)
        ordered = sorted(range(len(documents)), key=lambda i: len(documents[i].tokens))
        groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        random.Random(f"{seed}/{number}").shuffle(groups)
        for group in groups:
            yield DocumentBatch.of([documents[i] for i in group], self._target.device)

    def _compute(self, number: int) -> list[DocumentStates]:
        start = number * SHARD
        documents = [self._documents[i] for i in range(start, start + self.size(number))]
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        computed: dict[int, DocumentStates] = {}
        while order:
            count = max(1, self._pass_tokens // len(documents[order[0]]))
            group, rest = order[:count], order[count:]
            try:
                found = self._pass([documents[i] for i in group])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or len(group) == 1:
                    raise
                self._pass_tokens //= 2
                continue
            computed |= zip(group, found, strict=True)
            order = rest
        return [computed[i] for i in range(len(documents))]

    def _pass(self, documents: Sequence[Document]) -> list[DocumentStates]:
        """Run the target over documents of similar length, in one pass."""
        longest, device = max(map(len, documents)), self._target.device
        tokens = torch.zeros(len(documents), longest, dtype=torch.int64)
        for row, document in zip(tokens, documents, strict=True):
            row[: len(document)] = torch.tensor([*document.prompt, *document.answer])
        cache = self._target.new_cache()
        rows = Rows(
            tokens=tokens.to(device),
            positions=torch.arange(longest, device=device).expand(len(documents), -1).contiguous(),
            slots=tuple(cache.acquire(longest) for _ in documents),
            lengths=(0,) * len(documents),
            parents=(tuple(range(-1, longest - 1)),) * len(documents),
            starts=(0,) * len(documents),
            prefill=True,
        )
        taps = self._target.forward(rows, cache, Want("none", taps=self._taps)).taps
        return [
            DocumentStates(row[: len(d)], {tap: taps[tap][i, : len(d)].cpu() for tap in self._taps}, len(d.prompt))
            for i, (row, d) in enumerate(zip(tokens, documents, strict=True))
        ]


def _write(path: Path, documents: Sequence[DocumentStates], room: int) -> int:
    """Store a shard if there is room, and return the bytes it takes: 0 where there is none, or the disk is full."""
    tensors = {str(tap): torch.cat([s.states[tap] for s in documents]) for tap in documents[0].states}
    tensors["tokens"] = torch.cat([s.tokens for s in documents]).to(torch.int32)
    tensors["lengths"] = torch.tensor([len(s.tokens) for s in documents])
    tensors["prompts"] = torch.tensor([s.prompt for s in documents])
    if sum(t.nbytes for t in tensors.values()) + _HEADER > room:
        return 0
    try:
        replace_with(path, lambda new: save_file(tensors, new))
    except (OSError, SafetensorError):
        return 0
    return path.stat().st_size


def _read(path: Path, taps: Sequence[Tap]) -> list[DocumentStates] | None:
    """Return a stored shard, or None where it cannot be read."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return None
    lengths = tensors["lengths"].tolist()
    tokens = tensors["tokens"].long().split(lengths)
    states = {tap: tensors[str(tap)].split(lengths) for tap in taps}
    prompts = tensors["prompts"].tolist()
    return [DocumentStates(row, {tap: states[tap][i] for tap in taps}, prompts[i]) for i, row in enumerate(tokens)]
