"""One sequence of a batch of transformers, as its logits processors and stopping criteria see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.engine.detokenizer import Chunk, Origin, TextStream
from paceline.errors import InvalidOption
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import Verdict

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, StoppingCriteriaList


_SHAPING = ("Temperature", "TopK", "TopP", "TopH", "MinP", "Typical", "Epsilon", "Eta")
_BANS = ("NoBadWords", "NoRepeatNGram", "MinLength", "MinNewTokensLength", "SuppressTokens", "SuppressTokensAtBegin")
_BY_ROW = {f"{name}LogitsWarper" for name in _SHAPING} | {f"{name}LogitsProcessor" for name in _BANS}
"""Processors of transformers that treat every sequence of a batch alike."""


class BatchSequence:
    """Sequence `index` of a batch of `count`. `prompt`: its tokens without the padding.

    Processors and criteria may hold something per sequence (a padding length, a function that asks for the batch
    index). Those are shown a whole batch, in which every sequence is this one, and only its own row is read.
    """

    def __init__(
        self,
        index: int,
        count: int,
        input_ids: Tensor,
        padding: int,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
    ) -> None:
        """`input_ids`: this sequence [T], of which the first `padding` are not text."""
        self.index, self._count, self._padding = index, count, padding
        self._processors, self._criteria = processors, criteria
        alike = all(_treats_rows_alike(processor) for processor in processors)
        self._place, self._shown = (0, 1) if alike else (index, count)
        self.prompt: list[int] = input_ids[padding:].tolist()
        self._ids, self._known = input_ids.clone(), len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens that the length limit leaves for the reply."""
        limit = self._criteria.max_length
        return 2**31 if limit is None else int(limit) - self._padding - len(self.prompt)

    def process(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """A `LogitsProcessor`: all of transformers' in their order, over float32 as in `generate`."""
        scores = logits.to(self._ids.device, torch.float32)
        if self._processors:
            ids = self._ids_after(prefix.token_ids, prefix.path).repeat(self._shown, 1)
            scores = self._processors(ids, scores.repeat(self._shown, 1))[self._place]
        return scores.to(logits)

    def ended(self, text: Sequence[int], path: Sequence[int]) -> bool:
        """Whether a criterion ends the sequence after `text` and `path`."""
        return bool(self._criteria(self._ids_after(text, path).repeat(self._count, 1), None)[self.index])

    def _ids_after(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """The padded sequence [length]. What `text` was at the last call is not copied again."""
        end = self._padding + len(text) + len(path)
        if end > len(self._ids):
            self._ids = torch.cat([self._ids, self._ids.new_zeros(max(256, end))])
        new = [*text[self._known :], *path]
        self._ids[end - len(new) : end] = self._ids.new_tensor(new)
        self._known = len(text)
        return self._ids[:end]


def _treats_rows_alike(processor: object) -> bool:
    kind = type(processor)
    return kind.__module__ == "transformers.generation.logits_process" and kind.__name__ in _BY_ROW


class Stops(TextStream):
    """Ends a reply where transformers' criteria do, inside a draft too, and shows nothing: tokens are all it is for."""

    def __init__(self, row: BatchSequence, left: int, criteria: bool) -> None:
        """`criteria`: False to stop at `left` only."""
        self.left = left
        self._row, self._asked = row, criteria

    def trim(self, verdict: Verdict, prefix: Prefix) -> Verdict:
        for count in range(1, len(verdict.tokens) + 1):
            self.left -= 1
            if self._asked and self._row.ended(prefix.token_ids, verdict.tokens[:count]):
                return verdict.cut(count, "stop")
            if self.left == 0:
                return verdict.cut(count, "length")
        return verdict

    def emit(self, verdict: Verdict, logits: Tensor, own: Origin = "plain") -> list[Chunk]:
        return []


@dataclass(slots=True)
class Recorder(Sampler):
    """A sampler that keeps what it chose from. `logits`, `scores`: one [V] per token, before and after processors."""

    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def choose(self, prefix: Prefix, logits: Tensor) -> int:
        self.logits.append(logits.float())
        self.scores.append(self.process(prefix, logits).float())
        return Sampler.choose(self, prefix, logits)

    def cut(self, count: int) -> None:
        """Forget what was chosen beyond the reply's `count` tokens: the reply ended inside a draft."""
        del self.logits[count:], self.scores[count:]


def rows_of(
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
) -> list[BatchSequence]:
    """The sequences of a batch [B, T]. Raises `InvalidOption` for masks and positions that are more than padding on the
    left."""
    count, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    keep = torch.ones_like(input_ids) if mask is None else mask.to(input_ids)
    padding = width - keep.sum(-1)
    if keep.shape != input_ids.shape or not torch.equal(
        keep, (torch.arange(width).to(keep) >= padding[:, None]).long()
    ):
        raise InvalidOption("the attention mask is more than padding on the left", 'Use padding_side="left"')
    if int(padding.max()) == width:
        raise InvalidOption("a prompt is empty", "Give at least one token")
    positions = model_kwargs.get("position_ids")
    usual = torch.arange(width).to(keep) - padding[:, None]
    if positions is not None and not bool(((positions.to(usual) == usual) | (keep == 0)).all()):
        raise InvalidOption("position_ids are not those of the text", "Leave position_ids out")
    return [
        BatchSequence(i, count, ids, pad, processors, criteria)
        for i, (ids, pad) in enumerate(zip(input_ids, padding.tolist(), strict=True))
    ]
