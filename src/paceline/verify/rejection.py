"""Speculative sampling: accepts drafted tokens so that the text keeps the target's distribution.

p is the distribution of the target, q that which the drafter drew a token from. The walks are pure: draws come from
`Chance`, so that a test can enumerate every outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import InvalidOption
from paceline.sampling.noise import ACCEPT, Noise
from paceline.types import Draft, Verdict

_UNNORMALISED = 1e-4
"""How far from 1 a distribution's sum may be: float32 sums of 262,144 columns are well within."""

Shaped = Callable[[int, Sequence[int]], Tensor | None]
"""(row, drafted tokens that lead to it) -> p [V], the target's distribution after processors, temperature and cuts.
None: the row failed (`rules.deferred`), and the walk ends above it."""


class Chance(Protocol):
    """The random draws of one round."""

    def accept(self, probability: float) -> bool:
        """Return True with this probability: never at 0, always at 1."""

    def token(self, p: Tensor) -> int:
        """Return a draw from p [V]: once a round, for the token that the target adds."""


@dataclass(slots=True)
class RoundChance:
    """The draws of the round whose first drafted token stands at `start`, from streams that no draft uses."""

    noise: Noise
    start: int
    asked: int = 0

    def accept(self, probability: float) -> bool:
        self.asked += 1
        return self.noise.stream(ACCEPT, self.start).uniform(self.asked) < probability

    def token(self, p: Tensor) -> int:
        tokens = p.nonzero()[:, 0]
        return int(tokens[(p[tokens].log() + self.noise.gumbel(self.start, tokens)).argmax()])


def acceptance_step(p: Tensor, q: Tensor, token: int | Tensor, u: float | Tensor) -> Tensor:
    """Decide with u whether to accept a token drawn from q where p is the target: with probability min(1, p / q).

    p, q [..., V]: distributions. token [...]: ids. u [...]: uniform in [0, 1), drawn for this step alone. Returns
    bool [...]: u < p(token) / q(token), so never if p(token) is 0, always if the ratio is 1 or more. A token with
    q(token) = 0 cannot have been drawn from q and is rejected. After a rejection draw from `residual(p, q)`. Raises
    `InvalidOption` for an invalid distribution (NaN, negative, not normalised), token or u.
    Source: Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """
    _check_pair(p, q)
    # Compared in float64 on the CPU (MPS has none): in float32 a u just below 1 would round to 1.
    token, u = torch.as_tensor(token, device=p.device), torch.as_tensor(u, dtype=torch.float64, device="cpu")
    if bool(((token < 0) | (token >= p.shape[-1])).any()):
        raise InvalidOption(f"token {token.tolist()} is none of {p.shape[-1]}", "Give ids that index p and q")
    if not bool(((u >= 0) & (u < 1)).all()):
        raise InvalidOption(f"u={u.tolist()} is out of range", "Give uniform numbers, 0 <= u < 1")
    return (u < _acceptance(p, q, token).cpu().double()).to(p.device)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution to draw from after a rejection: max(p - q, 0), normalised.

    p, q [..., V]: distributions; returns one like p. If only rounding is left (p equals q: nothing is rejected), p
    itself. Raises `InvalidOption` for an invalid distribution.
    Source: Leviathan, Kalman, Matias, arXiv 2211.17192.
    """
    _check_pair(p, q)
    return _normalised(_excess(p, q), p)


def rejection_walk(draft: Draft, shaped: Shaped, chance: Chance) -> Verdict:
    """Try a row's children in their order; if all are rejected, draw the target's token from the residual.

    After each rejection p becomes the residual, and q loses the child's token: recursive rejection sampling (SpecInfer,
    arXiv 2305.09781; without replacement: Jeon et al., arXiv 2402.14160, and Sequoia, arXiv 2402.12374). Raises
    `InvalidOption` for an invalid q.
    """
    walk = _Walk(draft, shaped, chance)
    while walk.step():
        pass
    return walk.verdict()


def block_walk(draft: Draft, shaped: Shaped, chance: Chance) -> Verdict:
    """Accept the longest prefix of a chain, judged as a whole.

    It keeps at least as many tokens on average as rejection, and no rule that keeps the distribution does better for
    chains (Sun et al., arXiv 2403.10444). A tree is walked by rejection down to its first chain. Every row of the chain
    is shaped. Raises `InvalidOption` for an invalid q.
    """
    walk = _Walk(draft, shaped, chance)
    while (chain := walk.chain()) is None and walk.step():
        pass
    if chain:
        walk.block(chain)
    return walk.verdict()


class _Walk:
    """A walk from the root down: the row reached, and `left`, the residual after rejected children."""

    def __init__(self, draft: Draft, shaped: Shaped, chance: Chance) -> None:
        self._draft, self._shaped, self._chance = draft, shaped, chance
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
        """Descend to the first accepted child, if there is one."""
        p = self._shaped(self._row, self._tokens)
        if p is None:
            return False
        q = self._q(self._row, p)
        for child in self._children[self._row]:
            token = self._draft.tokens[child - 1]
            source = _source(q, token, p)
            if self._chance.accept(float(_acceptance(p, source, token))):
                self._descend([child])
                return True
            p = _normalised(_excess(p, source), p)
            q = None if q is None else _without(q, token)
        self._left = p
        return False

    def chain(self) -> list[int] | None:
        """Return the rows below this one, or None if they are not a chain."""
        rows: list[int] = []
        below = self._children[self._row]
        while len(below) == 1:
            rows += below
            below = self._children[below[0]]
        return None if below else rows

    def block(self, chain: Sequence[int]) -> None:
        """Keep the longest accepted prefix of the chain below this row.

        `weight`, p_i in the paper, is the probability of keeping a prefix, given its tokens.
        """
        steps, weight = [], 1.0
        tokens = list(self._tokens)
        for parent, child in zip([self._row, *chain], chain, strict=False):
            p, token = self._shaped(parent, tokens), self._draft.tokens[child - 1]
            if p is None:  # the chain ends here, as far as this round can tell
                break
            q = _source(self._q(parent, p), token, p)
            steps.append((p, q, weight))
            tokens.append(token)
            weight = float(_acceptance(p, q, token, weight))
            if weight == 0.0:
                break
        if self._chance.accept(weight):
            return self._descend(chain[: len(steps)])
        for kept in range(len(steps) - 1, -1, -1):
            p, q, weight = steps[kept]
            excess = _excess(p, q, weight)
            if kept == 0 or self._chance.accept(_prefix_acceptance(float(excess.sum()), weight)):
                self._descend(chain[:kept])
                self._left = _normalised(excess, p)
                return None
        raise AssertionError("unreachable: the empty prefix always stands")

    def verdict(self) -> Verdict:
        """End the round with the target's own token, or above a row that failed."""
        left = self._shaped(self._row, self._tokens) if self._left is None else self._left
        if left is None:
            return Verdict(tuple(self._path[:-1]), tuple(self._tokens))
        own = self._chance.token(left)
        return Verdict(tuple(self._path), (*self._tokens, own))

    def _descend(self, rows: Sequence[int]) -> None:
        self._path += rows
        self._tokens += [self._draft.tokens[row - 1] for row in rows]

    def _q(self, row: int, p: Tensor) -> Tensor | None:
        """Return the distribution that the row's children were drawn from, or None if they were chosen."""
        q = self._draft.q.get(row)
        if q is None:
            return None
        if q.shape != p.shape:
            raise InvalidOption(
                f"q of row {row} has shape {tuple(q.shape)}, p {tuple(p.shape)}", "Give one [V] per row"
            )
        q = q.to(p)
        _check("q", q)
        return q / q.sum()


def _source(q: Tensor | None, token: int, p: Tensor) -> Tensor:
    """Return the distribution that a child came from. Without q, or where q rules the token out, the child was chosen,
    not drawn: all mass lies on it. That keeps p however it was chosen, unless by this round's draws."""
    if q is not None and float(q[token]) > 0.0:
        return q
    point = torch.zeros_like(p)
    point[token] = 1.0
    return point


def _acceptance(p: Tensor, q: Tensor, token: int | Tensor, weight: float = 1.0) -> Tensor:
    """Return min(1, weight * p / q) of the token, 0 where q is 0."""
    index = torch.as_tensor(token, device=p.device)[..., None]
    wanted, offered = (x.gather(-1, index)[..., 0] for x in (p, q))
    return torch.where(offered > 0, (weight * wanted / offered).clamp(max=1.0), 0.0)


def _prefix_acceptance(excess: float, weight: float) -> float:
    """Return h_i of the paper. A prefix of weight 1 whose continuations have all mass is always accepted."""
    return 1.0 if weight >= 1.0 else excess / (excess + 1.0 - weight)


def _excess(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    return (weight * p - q).clamp(min=0.0)


def _normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Return `mass` [..., V] with sum 1; `otherwise` where only rounding is left."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > torch.finfo(mass.dtype).eps, mass / total, otherwise)


def _without(q: Tensor, token: int) -> Tensor:
    """Return q without a token that was drawn from it; all zero if it was the last one."""
    rest = q.clone()
    rest[token] = 0.0
    return _normalised(rest, torch.zeros_like(rest))


def _check_pair(p: Tensor, q: Tensor) -> None:
    if p.shape != q.shape:
        raise InvalidOption(f"p has shape {tuple(p.shape)} and q {tuple(q.shape)}", "Give both over one vocabulary")
    _check("p", p)
    _check("q", q)


def _check(name: str, p: Tensor) -> None:
    # A NaN fails every comparison.
    sums = (p.sum(-1) - 1.0).abs() <= _UNNORMALISED
    if not p.is_floating_point() or not bool(sums.all()) or not bool((p >= 0).all()):
        raise InvalidOption(f"{name} is not a distribution", "Give probabilities [..., V] that sum to 1")
