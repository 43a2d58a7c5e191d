"""The sequences of a transformers batch, as logits processors and stopping criteria see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import InvalidOption
from paceline.sampling.sampler import Prefix, Sampler

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, StoppingCriteriaList


_SHAPING = ("Temperature", "TopK", "TopP", "TopH", "MinP", "Typical", "Epsilon", "Eta")
_BANS = ("NoBadWords", "NoRepeatNGram", "MinLength", "MinNewTokensLength", "SuppressTokens", "SuppressTokensAtBegin")
_BY_ROW = {f"{name}LogitsWarper" for name in _SHAPING} | {f"{name}LogitsProcessor" for name in _BANS}
"""Processors of transformers that treat all sequences of a batch in the same way."""


class BatchSequence:
    """A sequence of a batch.

    Some processors and criteria hold state for each sequence, such as a padding length. They receive a whole batch that
    repeats this sequence, and only the row of this sequence is used.

    Attributes:
        index: Index in the batch.
        prompt: Prompt tokens without padding.
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
        """Prepare a sequence.

        Args:
            index: Index in the batch.
            count: Number of sequences in the batch.
            input_ids: Prompt with padding, [T].
            padding: Number of padding tokens at the beginning.
            processors: Logits processors of the call.
            criteria: Stopping criteria of the call.
        """
        self.index, self._count, self._padding = index, count, padding
        self._processors, self._criteria = processors, criteria
        alike = all(
            type(one).__module__ == "transformers.generation.logits_process" and type(one).__name__ in _BY_ROW
            for one in processors
        )
        self._place, self._shown = (0, 1) if alike else (index, count)
        self.prompt: list[int] = input_ids[padding:].tolist()
        self._ids, self._known = input_ids.clone(), len(self.prompt)

    @property
    def left(self) -> int:
        """Number of reply tokens that the length limit allows."""
        limit = self._criteria.max_length
        return 2**31 if limit is None else int(limit) - self._padding - len(self.prompt)

    def process(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """Apply all processors of transformers in order, in float32 as in `generate`. This is a `LogitsProcessor`."""
        scores = logits.to(self._ids.device, torch.float32)
        # Do not copy tokens again that were already committed at the last call.
        ids = self._extended([*prefix.token_ids[self._known :], *prefix.path])
        self._known = len(prefix.token_ids)
        if self._processors:
            scores = self._processors(ids.repeat(self._shown, 1), scores.repeat(self._shown, 1))[self._place]
        return scores.to(logits)

    def ended(self, reply: Sequence[int], text: str) -> bool:
        """Return True if a criterion ends the sequence after these reply tokens. This is a `Sampling.stop_when`."""
        ids = self._extended(reply[self._known - len(self.prompt) :])
        return bool(self._criteria(ids.repeat(self._count, 1), None)[self.index])

    def _extended(self, new: Sequence[int]) -> Tensor:
        """Return the padded sequence [length]: the known tokens, then the new ones."""
        start = self._padding + self._known
        if start + len(new) > len(self._ids):
            self._ids = torch.cat([self._ids, self._ids.new_zeros(max(256, start + len(new)))])
        self._ids[start : start + len(new)] = self._ids.new_tensor(new)
        return self._ids[: start + len(new)]


@dataclass(slots=True)
class Recorder(Sampler):
    """A sampler that keeps the rows of its choices.

    Attributes:
        logits: Position -> logits before processors, [V].
        scores: Position -> logits after processors, [V].
    """

    logits: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, prefix: Prefix, logits: Tensor) -> int:
        self.logits[len(prefix)] = logits.float()
        self.scores[len(prefix)] = self.process(prefix, logits).float()
        return Sampler.choose(self, prefix, logits)


def rows_of(
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
) -> list[BatchSequence]:
    """Return the sequences of a batch [B, T].

    Raises:
        InvalidOption: If the attention mask or the positions describe more than padding on the left, or a prompt is
            empty.
    """
    count, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    keep = torch.ones_like(input_ids) if mask is None else mask.to(input_ids)
    padding = width - keep.sum(-1)
    if keep.shape != input_ids.shape or not torch.equal(
        keep, (torch.arange(width).to(keep) >= padding[:, None]).long()
    ):
        raise InvalidOption(
            "the attention mask must describe only padding on the left", 'Use a tokenizer with padding_side="left"'
        )
    if int(padding.max()) == width:
        raise InvalidOption("a prompt is empty", "Give at least one token")
    positions = model_kwargs.get("position_ids")
    usual = torch.arange(width).to(keep) - padding[:, None]
    if positions is not None and not bool(((positions.to(usual) == usual) | (keep == 0)).all()):
        raise InvalidOption("position_ids must count the tokens of each text from 0", "Leave out position_ids")
    return [
        BatchSequence(i, count, ids, pad, processors, criteria)
        for i, (ids, pad) in enumerate(zip(input_ids, padding.tolist(), strict=True))
    ]
