"""Gumbel noise from a counter-based hash: the same number for the same (seed, sample, position, token), always.

Sampling as `argmax(logits / T + gumbel)` with noise that belongs to the *place in the text*, not to the moment of
the draw, makes a sampled text a function of seed, prompt and sampling parameters. A drafter that ranks its own
candidates with the same noise proposes what the target is about to draw. Source of the coupling: Daliri, Musco,
Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978.

Rules that keep only the distribution need the opposite, independent draws: they take streams.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.cpu.build import library
from paceline.sampling.truncation import Floats, Ids, finite, highest

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1

HIGHEST = float(np.float32(-math.log(-math.log1p(-(2.0**-33)))))
"""No noise is higher (22.87): the hash has 32 bits."""

_FEW = 512
"""Number of columns up to which all noise is computed, and of columns sampled to bound the rest."""


DRAFT, ACCEPT, EXCLUDE = 0, 1, 2
"""Streams: a drafter's draws of candidates, the decisions about their acceptance, and XTC's, one for each position. The
target's own token is drawn with the noise of the position where the round starts: without drafts the text is that of
`match`."""


def _mix64(x: int) -> int:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers that looks random."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32_(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """In place: three xor-shift-multiply rounds ("triple32", Wellons 2018)."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(14)
    return x


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one reply: `seed` is the user's, `sample` numbers several replies to one prompt.

    It is computed on the host: a hash of a few tokens costs a tenth of as many small tensor operations, and the numbers
    are the same for every device.
    """

    seed: int
    sample: int = 0

    def gumbel(self, position: int, tokens: Tensor) -> Tensor:
        """Return standard Gumbel noise, float32 with the shape of `tokens` (int64 token ids), for the token at
        `position`."""
        return torch.from_numpy(_gumbel(self._hash(position, tokens.cpu().numpy()))).to(tokens.device)

    def best(self, position: int, scores: Floats, tokens: Ids | None = None, count: int = 1) -> tuple[Ids, Floats]:
        """Return the `count` highest of scores + noise: (token ids, sums), best first, ties to the lowest id.

        `scores` [n]: none of them +inf or NaN, at least one finite; -inf never wins. `tokens` [n]: their ids,
        ascending; None: 0 to n - 1. Exactly what the noise of all columns gives, though hardly any of it is computed.
        """
        columns = finite(scores) if len(scores) <= _FEW else self._candidates(position, scores, tokens, count)
        ids = columns if tokens is None else tokens[columns]
        sums = scores[columns] + _gumbel(self._hash(position, ids))
        order = np.argsort(-sums, kind="stable")[:count]
        return ids[order], sums[order]

    def _candidates(self, position: int, scores: Floats, tokens: Ids | None, count: int) -> Ids:
        """Return a few columns, ascending, that hold the `count` best: those whose hash may lift them over a bound.

        The bound is the `count`-th best of some columns near the top. The noise g = -log(-log u) lifts s to it only if
        1 - u <= -log u = exp(-g) <= exp(s - bound): an integer hash and one exponential decide for all columns at once.
        """
        some = highest(scores, count)
        if len(some) < count:
            return some
        some = some[: max(_FEW, count)]
        ids = some if tokens is None else tokens[some]
        sums = scores[some] + _gumbel(self._hash(position, ids))
        bound = float(np.partition(sums, len(sums) - count)[len(sums) - count])
        # Below by more than float32 can have rounded away.
        bound -= 1e-4 + abs(bound) * 2.0**-20
        if (found := _native_candidates(scores, tokens, self._key(position), bound)) is not None:
            return found
        open_ = np.flatnonzero(scores >= scores.dtype.type(bound - HIGHEST))
        hashed = self._hash(position, open_ if tokens is None else tokens[open_])
        # 1 - u, less what float32 may have rounded up.
        missing = np.float32(1.0 - 2.0**-22) - hashed.astype(np.float32) * np.float32(2.0**-32)
        return open_[missing <= np.exp(np.minimum(scores[open_] - scores.dtype.type(bound), 0.0))]

    def _hash(self, position: int, tokens: Ids) -> npt.NDArray[np.uint32]:
        """Return 32 random bits per token."""
        key = self._key(position)
        mixed = _mix32_(_mix32_(tokens.astype(np.uint32) ^ np.uint32(key & _MASK32)) ^ np.uint32(key >> 32))
        # The sign bit: seeds keep the meaning that they had when the hash was a signed number.
        return mixed ^ np.uint32(1 << 31)

    def uniform(self, position: int) -> float:
        """Return a number of 53 bits in [0, 1)."""
        return (self._key(position) >> 11) * 2.0**-53

    def stream(self, *key: int) -> Noise:
        """Return independent noise for a key (whole numbers from 0).

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


def _gumbel(hashed: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """-log(-log u), in float64 and rounded once, so that machines whose logarithms differ in the last bit agree."""
    uniform = (hashed + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise.astype(np.float32)


def _native_candidates(scores: Floats, tokens: Ids | None, key: int, bound: float) -> Ids | None:
    """The columns of float32 `scores`, ascending, whose score and noise may reach `bound`; None where there is no
    library."""
    run = _native()
    if run is None or scores.dtype != np.float32:
        return None
    scores = np.ascontiguousarray(scores)
    ids = None if tokens is None else np.ascontiguousarray(tokens, dtype=np.int64)
    found = np.empty(len(scores), dtype=np.int64)
    at = None if ids is None else ids.ctypes.data
    count = run(scores.ctypes.data, at, len(scores), key, bound, HIGHEST, found.ctypes.data)
    return found[:count]


@cache
def _native() -> Any:
    lib = library()
    if lib is None:
        return None
    lib.paceline_candidates.argtypes = (c_void_p, c_void_p, c_int32, c_uint64, c_float, c_float, c_void_p)
    return lib.paceline_candidates
