"""What the user may ask of a reply."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from paceline.errors import InvalidOption
from paceline.noise import Noise
from paceline.sampler import LogitsProcessor, RuleName, Sampler


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one reply. The default is greedy.

    max_new_tokens: the reply's length at most, EOS included (>= 1).
    temperature: 0 is greedy; > 0 samples from softmax(logits / temperature).
    top_k: keep the k likeliest tokens (0: all). top_p: keep the likeliest tokens until their mass reaches p
    (1: all). min_p: keep tokens at least min_p times as likely as the likeliest (0: all). Applied in this order.
    processors: your own, each a function of (prefix, logits [V]) that returns the logits to use (`sampler.Prefix`).
    rule: how drafted tokens are accepted: "match" (the default: the text is the same with any drafter or none),
    "rejection" and "block" (only the distribution is), "typical" (lossy: not even that). See `accept.py`.
    seed: 0 <= seed < 2**63; None draws one, and the statistics report it.
    stop: strings that end the reply; the text stops before them. stop_token_ids: tokens that do.
    ignore_eos: go on after the model's own end-of-sequence tokens.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: Sequence[LogitsProcessor] = ()
    rule: RuleName = "match"
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 1, 2**31)
        _real("temperature", self.temperature, 0.0, 1000.0)
        if 0.0 < self.temperature < 1e-3:
            raise InvalidOption(f"temperature={self.temperature} is too small to divide by", "Give 0 for greedy text")
        _whole("top_k", self.top_k, 0, 2**31)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidOption("top_p is 0", "Give 0 < top_p <= 1, or temperature=0 for greedy text")
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.rule not in get_args(RuleName):
            raise InvalidOption(f"rule={self.rule!r} is unknown", f"Give one of {', '.join(get_args(RuleName))}")
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.stop, Sequence) or not isinstance(self.stop_token_ids, Sequence):
            raise InvalidOption("stop and stop_token_ids must be lists", "Give strings in the one, ids in the other")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(s, str) or not s for s in stop):
            raise InvalidOption(f"stop={self.stop!r} holds something that is not a non-empty string")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def sampler(self, prompt: Sequence[int] = (), sample: int = 0) -> Sampler:
        """The sampler of one reply to a prompt; draws the seed if there is none. `sample` tells several replies to one
        prompt apart."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return Sampler(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            noise=Noise(seed, sample),
            processors=tuple(self.processors),
            rule=self.rule,
            text=list(prompt),
            prompt=len(prompt),
        )


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidOption(f"{name}={value!r} is out of range", f"Give a whole number from {low} to {high}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidOption(f"{name}={value!r} is out of range", f"Give a number from {low:g} to {high:g}")
