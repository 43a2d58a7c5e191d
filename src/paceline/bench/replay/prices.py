"""Prices of the parts that a replay does not run: the target's passes and the choice of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Protocol

import torch
from torch import Tensor

from paceline.bench.costs import Costs
from paceline.checkpoints.loader import Loaded
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.recording.rows import RecordedReply
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.types import Want
from paceline.verify.tree import PREFILL_ROWS, pack_prefix

_CHOICES = 9
"""Number of choices to time for a price."""
_MAX_TIMED_PARAMETERS = 16
"""Maximum number of different sampling parameters to time. All others get the mean price of these."""
_MAX_ROWS = 64
"""Maximum number of a reply's tokens for which logits are computed."""


class Prices(Protocol):
    """Times that a replay charges, in seconds.

    Attributes:
        position_bytes: Memory of a position in the target's cache, for prefix caches.
    """

    position_bytes: int

    def round(self, rows: int, before: Sequence[int]) -> float:
        """Return the price of a round without drafting.

        Args:
            rows: Rows of the pass.
            before: Context length of each slot.
        """

    def prefill(self, tokens: int, before: int) -> float:
        """Return the price of a prefill chunk of `tokens` tokens after `before` tokens."""

    def choice(self, sampling: Sampling) -> float:
        """Return the price of choosing a token from logits."""


class FreePrices:
    """All prices are 0. With fixed draft sizes, the counts of a replay do not depend on prices."""

    position_bytes = 1

    def round(self, rows: int, before: Sequence[int]) -> float:
        return 0.0

    def prefill(self, tokens: int, before: int) -> float:
        return 0.0

    def choice(self, sampling: Sampling) -> float:
        return 0.0


@dataclass(slots=True)
class MeasuredPrices:
    """Prices from the measured costs of a model's rounds and from the logits of a recorded reply."""

    model: Loaded
    costs: Costs
    reply_logits: ReplyLogits
    position_bytes: int = field(init=False)
    _choices: dict[Sampling, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = self.model.target
        self.position_bytes = 1
        if isinstance(target, Decoder):
            self.position_bytes = target.cache_bytes(1)

    def round(self, rows: int, before: Sequence[int]) -> float:
        return self.costs.verify(rows, sum(before)) + self.costs.host * len(before)

    def prefill(self, tokens: int, before: int) -> float:
        return self.costs.feed(tokens, before)

    def choice(self, sampling: Sampling) -> float:
        kind = replace(sampling, seed=0, max_new_tokens=2**31, min_new_tokens=0, stop=(), stop_token_ids=())
        if kind not in self._choices:
            if len(self._choices) >= _MAX_TIMED_PARAMETERS:
                return fmean(self._choices.values())
            self._choices[kind] = self.reply_logits.choice_seconds(self.model, kind)
        return self._choices[kind]


@dataclass(frozen=True, slots=True)
class ReplyLogits:
    """A recorded reply with the target's logits [n, V] for its first n tokens."""

    reply: RecordedReply
    logits: Tensor

    @staticmethod
    def of(model: Loaded, reply: RecordedReply, count: int = _MAX_ROWS) -> ReplyLogits:
        """Run the recorded text through the target to compute the logits of its first `count` reply tokens."""
        count = min(count, len(reply.reply))
        start, target = len(reply.prompt) - 1, model.target
        tokens = reply.token_ids[: start + count]
        cache = target.new_cache()
        slot = cache.acquire(len(reply.prompt))
        with torch.inference_mode():
            for at in range(0, start, PREFILL_ROWS):
                chunk = list(tokens[at : min(at + PREFILL_ROWS, start)])
                rows = pack_prefix(chunk, slot, at, target.device)
                target.forward(rows, cache, Want("none"))
                cache.commit(rows, [range(1, len(chunk))])
            rows = pack_prefix(list(tokens[start:]), slot, start, target.device)
            logits = target.forward(rows, cache, Want("all")).logits[0, :count].clone()
        return ReplyLogits(reply, logits)

    def reproduced_share(self, model: Loaded) -> float:
        """Return the share of these reply tokens that the model chooses again, with the recorded sampling parameters.

        If it is not close to 1, another model was recorded.
        """
        sampler = self.reply.sampling.sampler(self.reply.sample, LLM(model).vocabulary)
        chosen = [sampler.choose(self._prefix(i), row) for i, row in enumerate(self.logits)]
        return fmean(float(a == b) for a, b in zip(chosen, self.reply.reply, strict=False))

    def choice_seconds(self, model: Loaded, sampling: Sampling) -> float:
        """Return the time of choosing a token with these parameters, in seconds."""
        sampler = sampling.sampler(0, LLM(model).vocabulary)
        seconds = []
        for n in range(_CHOICES + 1):
            at = n % len(self.logits)
            began = time.perf_counter()
            sampler.choose(self._prefix(at), self.logits[at])
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])

    def _prefix(self, index: int) -> Prefix:
        start = len(self.reply.prompt)
        return Prefix(self.reply.token_ids[: start + index], (), start)
