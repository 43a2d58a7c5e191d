"""Prices on this machine of what a replay leaves out: the target's passes, and its choices of tokens."""

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
"""Choices that are timed for a price."""
_KINDS = 16
"""Kinds of sampling parameters whose choices are timed: the first ones. Others cost what these cost in the mean."""
_REREAD = 64
"""Tokens of a reply that the target reads again."""


class Prices(Protocol):
    """Seconds that a replay charges. `position_bytes`: memory of a position in the target's cache, for prefix
    caches."""

    position_bytes: int

    def round(self, rows: int, before: Sequence[int]) -> float:
        """Return the price of a verifying pass of so many rows and of the host's work, after `before` tokens by
        slot."""

    def prefill(self, tokens: int, before: int) -> float:
        """Return the price of a prefill chunk."""

    def choice(self, sampling: Sampling) -> float:
        """Return the price of choosing a token from its logits."""


class Free:
    """Nothing costs anything: for counts alone, which depend on no price where draft sizes are fixed."""

    position_bytes = 1

    def round(self, rows: int, before: Sequence[int]) -> float:
        return 0.0

    def prefill(self, tokens: int, before: int) -> float:
        return 0.0

    def choice(self, sampling: Sampling) -> float:
        return 0.0


@dataclass(slots=True)
class MeasuredPrices:
    """Prices from measured `costs` of a model's rounds, and from logits of a recorded reply."""

    model: Loaded
    costs: Costs
    reread: Reread
    position_bytes: int = field(init=False)
    _choices: dict[Sampling, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = self.model.target
        self.position_bytes = 1
        if isinstance(target, Decoder):
            self.position_bytes = target.config.cache_bytes(1, target.dtype.itemsize)

    def round(self, rows: int, before: Sequence[int]) -> float:
        return self.costs.verify(rows, sum(before)) + self.costs.host * len(before)

    def prefill(self, tokens: int, before: int) -> float:
        return self.costs.feed(tokens, before)

    def choice(self, sampling: Sampling) -> float:
        kind = replace(sampling, seed=0, max_new_tokens=2**31, min_new_tokens=0, stop=(), stop_token_ids=())
        if kind not in self._choices:
            if len(self._choices) >= _KINDS:
                return fmean(self._choices.values())
            self._choices[kind] = self.reread.choosing(self.model, kind)
        return self._choices[kind]


@dataclass(frozen=True, slots=True)
class Reread:
    """Logits [n, V] before the first n tokens of a recorded reply, as the target computes them now."""

    reply: RecordedReply
    logits: Tensor

    @staticmethod
    def of(model: Loaded, reply: RecordedReply, count: int = _REREAD) -> Reread:
        """Feed a recorded text to the target."""
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
        return Reread(reply, logits)

    def agreement(self, model: Loaded) -> float:
        """Return the share of these tokens that the target chooses now. Where it is not nearly 1, the recording is
        another model's."""
        sampler = self.reply.sampling.sampler(self.reply.sample, LLM(model).vocabulary)
        chosen = [sampler.choose(self._prefix(i), row) for i, row in enumerate(self.logits)]
        return fmean(float(a == b) for a, b in zip(chosen, self.reply.reply, strict=False))

    def choosing(self, model: Loaded, sampling: Sampling) -> float:
        """Return the seconds that a choice with these parameters takes."""
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
