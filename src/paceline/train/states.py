"""The target's hidden states for documents, read from disk or computed by a prefill pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset

from paceline.errors import is_out_of_memory
from paceline.protocols import Target
from paceline.recording.states import StateFiles
from paceline.train.documents import Document
from paceline.types import Rows, Tap, Want

SHARD = 64
"""Documents that are computed and read together."""

_TOGETHER = 8
"""Number of documents after which `prepare` reports progress."""

_PASS = 4096
"""Maximum number of tokens per target pass. Larger passes are not faster. It is halved when memory runs out."""


@dataclass(frozen=True, slots=True)
class DocumentStates:
    """A document with the target's hidden states.

    Attributes:
        tokens: int64 [T].
        states: Tap -> [T, H].
        prompt: Number of tokens before the answer.
    """

    tokens: Tensor
    states: Mapping[Tap, Tensor]
    prompt: int


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """B documents, padded on the right.

    Attributes:
        tokens: int64 [B, T].
        states: Tap -> [B, T, H].
        prompts: Number of tokens before each answer, int64 [B].
        lengths: Number of tokens of each document, int64 [B].
    """

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

    States that are missing on disk (after a kill, or on a full disk) are computed again. A document's last token is
    dropped, because no pass sees it while the target writes the text.
    """

    def __init__(
        self, target: Target, documents: Subset[Document], taps: Sequence[Tap], files: StateFiles | None = None
    ) -> None:
        """Prepare to read states.

        Args:
            target: Model that computes the states.
            documents: The documents.
            taps: Taps to read, in addition to "final".
            files: Storage for the next epochs. It may already hold states that were kept while the target wrote its
                answers. None stores nothing.
        """
        self._target, self._documents = target, documents
        self._taps: tuple[Tap, ...] = tuple(dict.fromkeys([*taps, "final"]))
        self._files = files
        self._pass_tokens = _PASS

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

    def prepare(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Compute and store missing states, as far as there is room on disk.

        Args:
            report: Called with the number of finished documents and the number of all documents.
        """
        for start in range(0, len(self) if self._files else 0, _TOGETHER):
            end = min(start + _TOGETHER, len(self))
            texts = {i: _fed(self._documents[i]) for i in range(start, end)}
            missing = {i: text for i, text in texts.items() if text.fed not in self._files}  # type: ignore[operator]
            self._compute(missing)
            if any(text.fed not in self._files for text in missing.values()):  # type: ignore[operator]
                return
            report(end, len(self))

    def shard(self, number: int) -> list[DocumentStates]:
        """Return the documents of shard `number` in order: at most `SHARD`, starting with document `number * SHARD`."""
        start = number * SHARD
        texts = [_fed(self._documents[i]) for i in range(start, start + self.size(number))]
        found = {i: states for i, text in enumerate(texts) if self._files and (states := self._files.read(text.fed))}
        found |= self._compute({i: text for i, text in enumerate(texts) if i not in found})
        return [text.with_states(found[i]) for i, text in enumerate(texts)]

    def batches(self, number: int, size: int, seed: str) -> Iterator[DocumentBatch]:
        """Yield the shard in batches of `size` documents of similar length, in an order that depends on `seed`."""
        documents = self.shard(number)
        ordered = sorted(range(len(documents)), key=lambda i: len(documents[i].tokens))
        groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        random.Random(f"{seed}/{number}").shuffle(groups)
        for group in groups:
            yield DocumentBatch.of([documents[i] for i in group], self._target.device)

    def _compute(self, texts: Mapping[int, _FedText]) -> dict[int, dict[Tap, Tensor]]:
        """Compute and store the states of texts. Return them under the same keys."""
        order = sorted(texts, key=lambda i: -len(texts[i].fed))
        computed: dict[int, dict[Tap, Tensor]] = {}
        while order:
            count = max(1, self._pass_tokens // len(texts[order[0]].fed))
            group, rest = order[:count], order[count:]
            try:
                found = self._pass([texts[i].fed for i in group])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or len(group) == 1:
                    raise
                self._pass_tokens //= 2
                continue
            for i, states in zip(group, found, strict=True):
                computed[i] = states
                if self._files:
                    self._files.write(texts[i].fed, states)
            order = rest
        return computed

    def _pass(self, texts: Sequence[Sequence[int]]) -> list[dict[Tap, Tensor]]:
        """Run the target over texts of similar length in one pass."""
        longest, device = max(map(len, texts)), self._target.device
        tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        cache = self._target.new_cache()
        rows = Rows(
            tokens=tokens.to(device),
            positions=torch.arange(longest, device=device).expand(len(texts), -1).contiguous(),
            slots=tuple(cache.acquire(longest) for _ in texts),
            lengths=(0,) * len(texts),
            parents=(tuple(range(-1, longest - 1)),) * len(texts),
            starts=(0,) * len(texts),
            prefill=True,
        )
        taps = self._target.forward(rows, cache, Want("none", taps=self._taps)).taps
        return [{tap: taps[tap][i, : len(text)].cpu() for tap in self._taps} for i, text in enumerate(texts)]


@dataclass(frozen=True, slots=True)
class _FedText:
    """The tokens of a document that are used.

    Attributes:
        tokens: Token ids.
        prompt: Number of tokens before the answer.
    """

    tokens: tuple[int, ...]
    prompt: int

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens that have states."""
        return self.tokens[: max(1, len(self.tokens) - 1)]

    def with_states(self, states: Mapping[Tap, Tensor]) -> DocumentStates:
        """Return the document with its states. A token without states gets zeros."""
        missing = len(self.tokens) - len(self.fed)
        padded = {tap: F.pad(x, (0, 0, 0, missing)) for tap, x in states.items()}
        return DocumentStates(torch.tensor(self.tokens), padded, self.prompt)


def _fed(document: Document) -> _FedText:
    whole = (*document.prompt, *document.answer)
    return _FedText(whole[: max(2, len(whole) - 1)], len(document.prompt))
