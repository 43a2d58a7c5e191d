"""Gumbel noise from a counter-based hash: (seed, sample, position, token) always gives the same number.

A token is sampled as `argmax(logits / T + gumbel)`. The noise depends on the *place in the text*, not on when it is
drawn. So the text depends only on the seed, the prompt and the sampling parameters. A drafter that ranks its candidates
with the same noise proposes tokens that the target is likely to draw. Source of the coupling: Daliri, Musco, Suresh,
"Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978.

Acceptance rules that keep only the distribution need independent draws instead. They use `Noise.stream`.
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
from paceline.sampling.truncation import Floats, Ids, finite_columns, highest_columns

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1

MAX_NOISE = float(np.float32(-math.log(-math.log1p(-(2.0**-33)))))
"""The highest possible noise (22.87). There is a maximum because the hash has 32 bits."""

_MAX_DENSE = 512
"""Up to this number of columns, the noise of all columns is computed. If there are more, the noise of this many high
columns gives a bound for the others."""


DRAFT_STREAM, ACCEPT_STREAM, XTC_STREAM = 0, 1, 2
"""The streams for the drafter's draws, for decisions about acceptance, and for XTC's decisions (one per position). The
token that the target adds is drawn with the noise of the position at which the round starts. So without drafts, the
text is the same as with `match`."""


def _mix64(x: int) -> int:
    """Apply the splitmix64 finaliser (Steele, Lea, Flood 2014), a bijection of 64-bit integers that looks random."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32_(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Apply three xor-shift-multiply rounds ("triple32", Wellons 2018), in place."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(14)
    return x


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one reply.

    It is computed on the host with NumPy. For a few tokens, this takes a tenth of the time of small tensor operations,
    and gives the same numbers for every device.

    Attributes:
        seed: The user's seed.
        sample: Index of the reply among several replies to the same prompt.
    """

    seed: int
    sample: int = 0

    def gumbel(self, position: int, tokens: Tensor) -> Tensor:
        """Return standard Gumbel noise for candidates of the token at `position`.

        Args:
            position: Position in the text.
            tokens: Token ids, int64, any shape.

        Returns:
            float32, with the shape of `tokens`.
        """
        return torch.from_numpy(_gumbel(self._hash(position, tokens.cpu().numpy()))).to(tokens.device)

    def best(self, position: int, scores: Floats, tokens: Ids | None = None, count: int = 1) -> tuple[Ids, Floats]:
        """Return the tokens for which score + noise is highest. The result is exact, although only a small part of the
        noise is computed.

        Args:
            position: Position in the text.
            scores: [n], without +inf and NaN. At least one score must be finite. A score of -inf never wins.
            tokens: Token ids of the scores, in ascending order, [n]. None means 0 to n - 1.
            count: Number of tokens to return.

        Returns:
            Token ids and sums, highest first. A tie goes to the lowest id.
        """
        dense = len(scores) <= _MAX_DENSE
        columns = finite_columns(scores) if dense else self._candidates(position, scores, tokens, count)
        ids = columns if tokens is None else tokens[columns]
        sums = scores[columns] + _gumbel(self._hash(position, ids))
        order = np.argsort(-sums, kind="stable")[:count]
        return ids[order], sums[order]

    def _candidates(self, position: int, scores: Floats, tokens: Ids | None, count: int) -> Ids:
        """Return a few columns, in ascending order, that include the `count` best columns.

        The bound is the `count`-th best sum among some columns near the top. Only columns with enough noise can exceed
        it. The noise g = -log(-log u) raises a score s to the bound only if 1 - u <= -log u = exp(-g) <= exp(s -
        bound). So for each column, an integer hash and an exponential are enough to decide.
        """
        some = highest_columns(scores, count)
        if len(some) < count:
            return some
        some = some[: max(_MAX_DENSE, count)]
        ids = some if tokens is None else tokens[some]
        sums = scores[some] + _gumbel(self._hash(position, ids))
        bound = float(np.partition(sums, len(sums) - count)[len(sums) - count])
        # Lower the bound by more than the possible rounding error of float32.
        bound -= 1e-4 + abs(bound) * 2.0**-20
        if (found := _native_candidates(scores, tokens, self._key(position), bound)) is not None:
            return found
        possible = np.flatnonzero(scores >= scores.dtype.type(bound - MAX_NOISE))
        hashed = self._hash(position, possible if tokens is None else tokens[possible])
        # 1 - u, minus the possible rounding error of float32.
        missing = np.float32(1.0 - 2.0**-22) - hashed.astype(np.float32) * np.float32(2.0**-32)
        return possible[missing <= np.exp(np.minimum(scores[possible] - scores.dtype.type(bound), 0.0))]

    def _hash(self, position: int, tokens: Ids) -> npt.NDArray[np.uint32]:
        """Return 32 random bits per token."""
        key = self._key(position)
        mixed = _mix32_(_mix32_(tokens.astype(np.uint32) ^ np.uint32(key & _MASK32)) ^ np.uint32(key >> 32))
        # Flip the sign bit, so that a seed gives the same text as in older versions, where the hash was a signed
        # number.
        return mixed ^ np.uint32(1 << 31)

    def uniform(self, position: int) -> float:
        """Return a random number from the uniform distribution over [0, 1), with 53 bits."""
        return (self._key(position) >> 11) * 2.0**-53

    def stream(self, *key: int) -> Noise:
        """Return independent noise for a key of integers >= 0.

        A rule's decision may depend on tokens that are then rejected (block verification looks at the whole chain), and
        the next round drafts the same positions again. Once the outcome of a decision is known, the numbers behind it
        are no longer random, so they must not be used again. Therefore, the keys of drafts and of acceptance begin with
        the position at which the round starts. This position is different in every round of a reply.
        """
        seed = self._key(len(key))
        for part in key:
            seed = _mix64(seed ^ part)
        return Noise(seed)

    def _key(self, position: int) -> int:
        return _mix64(_mix64(_mix64(self.seed) ^ self.sample) ^ position)


def _gumbel(hashed: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Compute -log(-log u) in float64, and round once. So machines agree, although their logarithms may differ in the
    last bit."""
    uniform = (hashed + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise.astype(np.float32)


def _native_candidates(scores: Floats, tokens: Ids | None, key: int, bound: float) -> Ids | None:
    """Find candidates with the CPU kernels. Return None if they are not available or the scores are not float32."""
    run = _native()
    if run is None or scores.dtype != np.float32:
        return None
    scores = np.ascontiguousarray(scores)
    ids = None if tokens is None else np.ascontiguousarray(tokens, dtype=np.int64)
    found = np.empty(len(scores), dtype=np.int64)
    at = None if ids is None else ids.ctypes.data
    count = run(scores.ctypes.data, at, len(scores), key, bound, MAX_NOISE, found.ctypes.data)
    return found[:count]


@cache
def _native() -> Any:
    lib = library()
    if lib is None:
        return None
    lib.paceline_candidates.argtypes = (c_void_p, c_void_p, c_int32, c_uint64, c_float, c_float, c_void_p)
    return lib.paceline_candidates
