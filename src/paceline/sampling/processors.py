"""Logits processors: penalties, biases, bans.

Each processor belongs to one reply. It counts the tokens of the committed text, which only grows, and adds the drafted
path of each row to these counts. So the cost of a row does not depend on the length of the text. The target and the
draft model share the processors, so rows may differ in device and dtype, and the rows of a draft model may be narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from paceline.sampling.sampler import Prefix


class _Counts:
    """The number of occurrences of each token in the text, for each device."""

    def __init__(self) -> None:
        self._known: dict[torch.device, tuple[int, Tensor]] = {}

    def at(self, prefix: Prefix, row: Tensor, first: int = 0) -> Tensor:
        """Return the counts [V] of the prefix's tokens at position `first` and later, in the row's dtype. Do not modify
        them."""
        done, counts = self._known.get(row.device, (first, row.new_zeros(0)))
        if done < len(prefix.token_ids) or len(counts) < len(row):
            counts = _add(counts, prefix.token_ids[done:], len(row))
            self._known[row.device] = len(prefix.token_ids), counts
        if prefix.path:
            counts = _add(counts.clone(), prefix.path, len(row))
        return counts[: len(row)].to(row.dtype)


@torch.inference_mode()  # the counts may have been created in inference mode, by a drafter
def _add(counts: Tensor, tokens: Sequence[int], width: int) -> Tensor:
    """Return counts with tokens added. The result has at least `width` columns."""
    width = max(width, len(counts), 1 + max(tokens, default=0))
    if width > len(counts):
        counts = torch.cat([counts, counts.new_zeros(width - len(counts))])
    ids = torch.tensor(tokens, dtype=torch.long, device=counts.device)
    return counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))


class _SeenTokens:
    """The distinct tokens of the text, for each device."""

    def __init__(self) -> None:
        self._read = self._highest = 0
        self._order: dict[int, None] = {}
        self._known: dict[torch.device, Tensor] = {}

    def at(self, prefix: Prefix, row: Tensor) -> Tensor:
        """Return the distinct token ids of the prefix that are below V, the length of the row. Ids of the drafted path
        may appear twice."""
        for token in prefix.token_ids[self._read :]:
            self._order[token] = None
            self._highest = max(self._highest, token)
        self._read = len(prefix.token_ids)
        known = self._known.get(row.device, torch.empty(0, dtype=torch.long, device=row.device))
        if len(known) < len(self._order):
            known = torch.cat([known, known.new_tensor(list(islice(self._order, len(known), None)))])
            self._known[row.device] = known
        ids = torch.cat([known, known.new_tensor(prefix.path)]) if prefix.path else known
        return ids if max([self._highest, *prefix.path]) < len(row) else ids[ids < len(row)]


class RepetitionPenalty:
    """For tokens in the prompt or the reply, divides positive logits by a penalty, and multiplies negative logits by
    it.

    This is the penalty of CTRL (arXiv 1909.05858), as in transformers.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty
        self._seen = _SeenTokens()

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        ids = self._seen.at(prefix, logits)
        scores = logits[ids]
        logits[ids] = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return logits


class CountPenalty:
    """Subtracts `frequency` for each occurrence of a token in the reply, and `presence` once if the token occurs, as in
    OpenAI's API."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence
        self._counts = _Counts()

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        if len(prefix) == prefix.num_prompt_tokens:
            return logits
        counts = self._counts.at(prefix, logits, prefix.num_prompt_tokens)
        return logits.sub_(self._frequency * counts + self._presence * (counts > 0))


class LogitBias:
    """Adds a constant to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = sorted(bias.items())
        self._ready: dict[tuple[torch.device, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        key = logits.device, logits.dtype, len(logits)
        if key not in self._ready:
            fitting = [(token, by) for token, by in self._bias if token < len(logits)]
            ids = torch.tensor([token for token, _ in fitting], dtype=torch.long, device=logits.device)
            values = torch.tensor([by for _, by in fitting], dtype=logits.dtype, device=logits.device)
            self._ready[key] = ids, values
        return logits.index_add_(0, *self._ready[key])


class BadWords:
    """Bans the last token of each banned sequence if the text ends with the tokens before it."""

    def __init__(self, words: Collection[Sequence[int]]) -> None:
        self._always = sorted({word[0] for word in words if len(word) == 1})
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *before, last in words:
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))
        self._reach = max(map(len, words), default=0) - 1

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        tail = prefix.tail(self._reach)
        begun = self._after.get(tail[-1], ()) if tail else ()
        ends = [last for before, last in begun if tail[-len(before) :] == before]
        return ban(logits, [*self._always, *ends])


class NoRepeatNGram:
    """Bans every token that would repeat an n-gram of the prompt or the reply."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._read = 0

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        before = self._size - 1
        for end in range(max(self._read, before), len(prefix.token_ids)):
            self._next.setdefault(tuple(prefix.token_ids[end - before : end]), set()).add(prefix.token_ids[end])
        self._read = len(prefix.token_ids)
        if len(prefix) < before:
            return logits
        tail = prefix.tail(before + len(prefix.path))
        now = tail[len(tail) - before :]
        drafted = (tail[end - before : end + 1] for end in range(before, len(tail)))
        return ban(logits, [*self._next.get(now, ()), *(gram[-1] for gram in drafted if gram[:-1] == now)])


class MinNewTokens:
    """Bans the tokens that end a reply, as long as the reply is shorter than `count` tokens."""

    def __init__(self, count: int, ends: Collection[int]) -> None:
        self._count, self._ends = count, sorted(ends)

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        return ban(logits, self._ends) if len(prefix) - prefix.num_prompt_tokens < self._count else logits


def ban(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Set these tokens of a row [V] to -inf, in place."""
    if fitting := [token for token in tokens if token < len(logits)]:
        logits[fitting] = -torch.inf
    return logits


def spellings(text: str, encode: Callable[[str], list[int]]) -> set[tuple[int, ...]]:
    """Return the token sequences that stand for `text` at the start of a reply, within a reply, and after a space.

    Models rarely write other segmentations of the same characters, so these are omitted.
    """
    found = {tuple(encode(text))}
    for lead in ("",) if text[:1].isspace() else ("", " "):
        # The line break keeps the tokenizer from treating the word as the start of a text. Its tokens are removed
        # again.
        line, whole = encode("\n"), encode("\n" + lead + text)
        found.add(tuple(whole[len(line) :] if whole[: len(line)] == line else encode(lead + text)))
    return found - {()}
