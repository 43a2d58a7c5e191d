"""Gumbel noise from a counter-based hash: the same number for the same (seed, sample, position, token), always.

Sampling as `argmax(logits / T + gumbel)` with noise that belongs to the *place in the text*, not to the moment of
the draw, makes a sampled text a function of seed, prompt and sampling parameters. A drafter that ranks its own
candidates with the same noise proposes what the target is about to draw. Source of the coupling: Daliri, Musco,
Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978.

Rules that keep only the distribution need the opposite: draws that know nothing of each other. They take streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


DRAFT, ACCEPT = 0, 1
"""Streams: what a drafter draws its candidates with, and what decides whether they stand. What the target itself adds
is drawn with its own noise, that of the position where the round starts: without drafts the text is that of `match`."""


def _mix64(x: int) -> int:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers that looks random."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32_(x: Tensor) -> Tensor:
    """In place, over int32 read as unsigned: three xor-shift-multiply rounds ("triple32", Wellons 2018)."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x ^= (x >> shift) & (_MASK32 >> shift)
        x *= _signed(factor)
    x ^= (x >> 14) & (_MASK32 >> 14)
    return x


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one reply: `seed` is the user's, `sample` tells several replies to one prompt apart."""

    seed: int
    sample: int = 0

    def gumbel(self, position: int, tokens: Tensor) -> Tensor:
        """Standard Gumbel noise, float32 with the shape of `tokens` (int64 token ids), for the token at `position`.

        Integer hashing throughout; the two logarithms are taken in float64 and rounded once, so that devices
        whose logarithms differ in the last bit still agree.
        """
        key = self._key(position)
        # MPS has no float64.
        here = tokens.cpu() if tokens.device.type == "mps" else tokens
        x = _mix32_(here.to(torch.int32) ^ _signed(key & _MASK32))
        x = _mix32_(x ^ _signed(key >> 32))
        uniform = (x.double() + (2.0**31 + 0.5)) / 2.0**32
        return uniform.log_().neg_().log_().neg_().float().to(tokens.device)

    def uniform(self, position: int) -> float:
        """A number of 53 bits in [0, 1)."""
        return (self._key(position) >> 11) * 2.0**-53

    def stream(self, *key: int) -> Noise:
        """Noise of its own for every key (whole numbers from 0), unrelated to this one's and to any other key's.

        What a rule decides about one draft may depend on tokens that are then thrown away (block verification looks
        at the whole chain), and their positions are drafted again in the next round. A number that had a say in such
        a decision is no longer random given its outcome, so it must never be drawn again: the keys of drafts and of
        acceptance begin with the position where the round starts, which no other round of the reply shares.
        """
        seed = self._key(len(key))
        for part in key:
            seed = _mix64(seed ^ part)
        return Noise(seed)

    def _key(self, position: int) -> int:
        return _mix64(_mix64(_mix64(self.seed) ^ self.sample) ^ position)
