"""Speculative sampling: accept drafted tokens such that the text keeps the target's distribution.

p is the target's distribution, and q is the distribution that the drafter draws tokens from. The walks are pure
functions: all random draws come from `RandomDraws`, so a test can enumerate every outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import InvalidOption
from paceline.sampling.noise import ACCEPT_STREAM, Noise
from paceline.types import Draft, Verdict

_UNNORMALISED = 1e-4
"""Tolerance for the sum of a distribution. The error of float32 sums over 262,144 columns is much smaller."""

TargetProbabilities = Callable[[int, Sequence[int]], Tensor | None]
"""(row, drafted tokens that lead to it) -> p [V], the target's distribution after processors, temperature and
truncation. None if the row failed (`rules.errors_as_none`). The walk then ends above the row."""


class RandomDraws(Protocol):
    """The random draws of one round."""

    def accept(self, probability: float) -> bool:
        """Return True with this probability: never if it is 0, always if it is 1."""

    def token(self, p: Tensor) -> int:
        """Draw the token that the target adds, from p [V]. This is called once per round."""


@dataclass(slots=True)
class RoundDraws:
    """The random draws of a round, from streams of noise that no drafter uses.

    Attributes:
        noise: The request's source of noise.
        start: Position of the first drafted token.
        num_accept_calls: Number of `accept` calls so far.
    """

    noise: Noise
    start: int
    num_accept_calls: int = 0

    def accept(self, probability: float) -> bool:
        self.num_accept_calls += 1
        return self.noise.stream(ACCEPT_STREAM, self.start).uniform(self.num_accept_calls) < probability

    def token(self, p: Tensor) -> int:
        tokens = p.nonzero()[:, 0]
        return int(tokens[(p[tokens].log() + self.noise.gumbel(self.start, tokens)).argmax()])


def acceptance_step(p: Tensor, q: Tensor, token: int | Tensor, u: float | Tensor) -> Tensor:
    """Accept a token drawn from q with probability min(1, p / q).

    A token with q(token) = 0 cannot have been drawn from q, so it is rejected. After a rejection, draw from
    `residual(p, q)`. Source: Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318.

    Args:
        p: The target's distribution, [..., V].
        q: The drafter's distribution, [..., V].
        token: Drafted token ids, [...].
        u: Random numbers from the uniform distribution over [0, 1), [...]. Draw new numbers for every step.

    Returns:
        bool [...], True where u < p(token) / q(token).

    Raises:
        InvalidOption: If p or q is not a distribution (NaN, negative, not normalised), or a token or u is out of range.
    """
    _check_pair(p, q)
    # Compare in float64, because a u just below 1 would round to 1 in float32. Compare on the CPU, because MPS lacks
    # float64.
    token, u = torch.as_tensor(token, device=p.device), torch.as_tensor(u, dtype=torch.float64, device="cpu")
    if bool(((token < 0) | (token >= p.shape[-1])).any()):
        raise InvalidOption(
            f"token must be >= 0 and < {p.shape[-1]}, got {token.tolist()}", "Give ids that index p and q"
        )
    if not bool(((u >= 0) & (u < 1)).all()):
        raise InvalidOption(f"u must be >= 0 and < 1, got {u.tolist()}", "Draw it with torch.rand, for example")
    return (u < _acceptance(p, q, token).cpu().double()).to(p.device)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution to draw from after a rejection: max(p - q, 0), normalised.

    Source: Leviathan, Kalman, Matias, arXiv 2211.17192.

    Args:
        p: The target's distribution, [..., V].
        q: The drafter's distribution, [..., V].

    Returns:
        A distribution with the shape of p. If p and q differ only by rounding errors, it is p. In this case, no token
        is rejected.

    Raises:
        InvalidOption: If p or q is not a distribution.
    """
    _check_pair(p, q)
    return _normalised(_excess(p, q), p)


def rejection_walk(draft: Draft, probabilities: TargetProbabilities, draws: RandomDraws) -> Verdict:
    """Try a row's children in order. If all are rejected, draw the target's token from the residual.

    After each rejection, p becomes the residual, and the child's token is removed from q. This is recursive rejection
    sampling (SpecInfer, arXiv 2305.09781; without replacement: Jeon et al., arXiv 2402.14160, and Sequoia, arXiv
    2402.12374).

    Raises:
        InvalidOption: If a q of the draft is not a distribution over the target's vocabulary.
    """
    walk = _Walk(draft, probabilities, draws)
    while walk.step():
        pass
    return walk.verdict()


def block_walk(draft: Draft, probabilities: TargetProbabilities, draws: RandomDraws) -> Verdict:
    """Verify a chain as a whole, and accept the longest prefix that the random draws allow.

    On average, it never accepts fewer tokens than the rule rejection, and among the rules that keep the distribution it
    is optimal for chains (Sun et al., arXiv 2403.10444). In a tree, `rejection_walk` applies until the rows below form
    a chain. The probabilities of every row of the chain are computed.

    Raises:
        InvalidOption: If a q of the draft is not a distribution over the target's vocabulary.
    """
    walk = _Walk(draft, probabilities, draws)
    while (chain := walk.chain()) is None and walk.step():
        pass
    if chain:
        walk.block(chain)
    return walk.verdict()


class _Walk:
    """A walk down a tree. Its state is the path so far, and the residual after the rejected children of the path's last
    row."""

    def __init__(self, draft: Draft, probabilities: TargetProbabilities, draws: RandomDraws) -> None:
        self._draft, self._probabilities, self._draws = draft, probabilities, draws
        self._children: Mapping[int, list[int]] = defaultdict(list)
        for row, parent in enumerate(draft.parents, 1):
            self._children[parent].append(row)
        self._path: list[int] = []
        self._tokens: list[int] = []
        self._left: Tensor | None = None

    @property
    def _row(self) -> int:
        return self._path[-1] if self._path else 0

    def step(self) -> bool:
        """Try the children of the current row, and descend to the first accepted child. Return False if none is
        accepted."""
        p = self._probabilities(self._row, self._tokens)
        if p is None:
            return False
        q = self._q(self._row, p)
        for child in self._children[self._row]:
            token = self._draft.tokens[child - 1]
            source = _source(q, token, p)
            if self._draws.accept(float(_acceptance(p, source, token))):
                self._descend([child])
                return True
            p = _normalised(_excess(p, source), p)
            q = None if q is None else _without(q, token)
        self._left = p
        return False

    def chain(self) -> list[int] | None:
        """Return all rows below the current row if they form a chain. Otherwise, return None."""
        rows: list[int] = []
        below = self._children[self._row]
        while len(below) == 1:
            rows += below
            below = self._children[below[0]]
        return None if below else rows

    def block(self, chain: Sequence[int]) -> None:
        """Keep the longest accepted prefix of the chain below the current row.

        `weight` is the paper's p_i: the probability of keeping a prefix, given its tokens.
        """
        steps, weight = [], 1.0
        tokens = list(self._tokens)
        for parent, child in zip([self._row, *chain], chain, strict=False):
            p, token = self._probabilities(parent, tokens), self._draft.tokens[child - 1]
            if p is None:  # in this round, the chain ends at a row that failed
                break
            q = _source(self._q(parent, p), token, p)
            steps.append((p, q, weight))
            tokens.append(token)
            weight = float(_acceptance(p, q, token, weight))
            if weight == 0.0:
                break
        if self._draws.accept(weight):
            return self._descend(chain[: len(steps)])
        for kept in range(len(steps) - 1, -1, -1):
            p, q, weight = steps[kept]
            excess = _excess(p, q, weight)
            left = float(excess.sum())
            # The paper's h_i. A prefix with weight 1 is always accepted.
            if kept == 0 or self._draws.accept(1.0 if weight >= 1.0 else left / (left + 1.0 - weight)):
                self._descend(chain[:kept])
                self._left = _normalised(excess, p)
                return None
        raise AssertionError("unreachable: the empty prefix is always accepted")

    def verdict(self) -> Verdict:
        """End the round with a token that the target adds, or above a row that failed."""
        left = self._probabilities(self._row, self._tokens) if self._left is None else self._left
        if left is None:
            return Verdict(tuple(self._path[:-1]), tuple(self._tokens))
        own = self._draws.token(left)
        return Verdict(tuple(self._path), (*self._tokens, own))

    def _descend(self, rows: Sequence[int]) -> None:
        self._path += rows
        self._tokens += [self._draft.tokens[row - 1] for row in rows]

    def _q(self, row: int, p: Tensor) -> Tensor | None:
        """Return the distribution that the row's children were drawn from, or None if they were not drawn."""
        q = self._draft.q.get(row)
        if q is None:
            return None
        if q.shape != p.shape:
            raise InvalidOption(
                f"q of row {row} has shape {tuple(q.shape)}, but p has shape {tuple(p.shape)}",
                "Give one distribution [V] for each row, over the target's vocabulary",
            )
        q = q.to(p)
        _check("q", q)
        return q / q.sum()


def _source(q: Tensor | None, token: int, p: Tensor) -> Tensor:
    """Return the distribution that a child was drawn from.

    Without q, or if q of the token is 0, the child was chosen, not drawn. Return a point mass on the token in this
    case. The text then keeps the distribution p, however the child was chosen, as long as the choice does not depend on
    the draws of this round.
    """
    if q is not None and float(q[token]) > 0.0:
        return q
    point = torch.zeros_like(p)
    point[token] = 1.0
    return point


def _acceptance(p: Tensor, q: Tensor, token: int | Tensor, weight: float = 1.0) -> Tensor:
    """Return min(1, weight * p / q) for the token, or 0 where its q is 0."""
    index = torch.as_tensor(token, device=p.device)[..., None]
    wanted, offered = (x.gather(-1, index)[..., 0] for x in (p, q))
    return torch.where(offered > 0, (weight * wanted / offered).clamp(max=1.0), 0.0)


def _excess(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    return (weight * p - q).clamp(min=0.0)


def _normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Normalise `mass` [..., V] so that it sums to 1. Return `otherwise` where `mass` consists only of rounding
    errors."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > torch.finfo(mass.dtype).eps, mass / total, otherwise)


def _without(q: Tensor, token: int) -> Tensor:
    """Return q without a token that was drawn from it, normalised again. If no other token has any mass, return
    zeros."""
    rest = q.clone()
    rest[token] = 0.0
    return _normalised(rest, torch.zeros_like(rest))


def _check_pair(p: Tensor, q: Tensor) -> None:
    if p.shape != q.shape:
        raise InvalidOption(
            f"p has shape {tuple(p.shape)}, but q has shape {tuple(q.shape)}",
            "Give distributions of the same shape, over the same vocabulary",
        )
    _check("p", p)
    _check("q", q)


def _check(name: str, p: Tensor) -> None:
    # NaN fails every comparison, so these checks reject it.
    sums = (p.sum(-1) - 1.0).abs() <= _UNNORMALISED
    if not p.is_floating_point() or not bool(sums.all()) or not bool((p >= 0).all()):
        raise InvalidOption(f"{name} is not a probability distribution", "Give probabilities [..., V] that sum to 1")
