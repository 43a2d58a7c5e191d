"""Speculative sampling: drafted tokens stand or fall so that the text keeps the target's distribution.

p is what the target would draw a token from, q what the drafter did draw it from. The walks are pure: chance comes in
through `Chance`, so that a test can enumerate every outcome.
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

Shaped = Callable[[int, Sequence[int]], Tensor]
"""(row, drafted tokens that lead to it) -> p [V], the target's distribution after processors, temperature and cuts."""


class Chance(Protocol):
    """What is left to chance in one round."""

    def accept(self, probability: float) -> bool:
        """True with this probability: never at 0, always at 1."""
        ...

    def token(self, p: Tensor) -> int:
        """A draw from p [V]: once a round, for the token that the target adds."""
        ...


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
    """Whether a token drawn from q stands where p is wanted: with probability min(1, p / q), decided by u.

    p, q [..., V]: distributions. token [...]: ids. u [...]: uniform in [0, 1), drawn for this step alone. Returns
    bool [...]. It stands where u < p(token) / q(token): never if p(token) is 0, always if the ratio is 1 or more. A
    token with q(token) = 0 cannot have been drawn from q and never stands. Where it falls, go on with `residual(p, q)`.
    Raises `InvalidOption` for what is no distribution (NaN, negative, not normalised), no token or no such u.
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
    """What to draw from where a token drawn from q fell: max(p - q, 0), normalised.

    p, q [..., V]: distributions; returns one like p. If nothing is left but rounding (p is q: a token falls with
    probability 0), p itself. Raises `InvalidOption` for what is no distribution.
    Source: Leviathan, Kalman, Matias, arXiv 2211.17192.
    """
    _check_pair(p, q)
    return _normalised(_excess(p, q), p)


def rejection_walk(draft: Draft, shaped: Shaped, chance: Chance) -> Verdict:
    """Try a row's children in their order; where all fall, the target draws from what they left of its distribution.

    After a child has fallen, p becomes the residual, and q goes on without the child's token: recursive rejection
    sampling (SpecInfer, arXiv 2305.09781; without replacement: Jeon et al., arXiv 2402.14160, and Sequoia, arXiv
    2402.12374). Raises `InvalidOption` for a q that is no distribution.
    """
    walk = _Walk(draft, shaped, chance)
    while walk.step():
        pass
    return walk.verdict()


def block_walk(draft: Draft, shaped: Shaped, chance: Chance) -> Verdict:
    """A chain stands or falls as a whole: of all its prefixes the longest that is accepted.

    On average it keeps at least as many tokens as rejection does, and no rule that keeps the distribution does better
    for chains (Sun et al., arXiv 2403.10444). A tree is walked by rejection down to where a chain hangs. Every row of
    the chain is shaped. Raises `InvalidOption` for a q that is no distribution.
    """
    walk = _Walk(draft, shaped, chance)
    while (chain := walk.chain()) is None and walk.step():
        pass
    if chain:
        walk.block(chain)
    return walk.verdict()


class _Walk:
    """From the root down: the row reached, and `left`, what is left of its distribution once children have fallen."""

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
        """Go on into the first child that stands, if one does."""
        p = self._shaped(self._row, self._tokens)
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
        """The rows below this one, or None if they are not a chain."""
        rows: list[int] = []
        below = self._children[self._row]
        while len(below) == 1:
            rows += below
            below = self._children[below[0]]
        return None if below else rows

    def block(self, chain: Sequence[int]) -> None:
        """Keep the longest accepted prefix of the chain below this row.

        `weight`, p_i in the paper, is the probability that a prefix is to be kept, given its tokens.
        """
        steps, weight = [], 1.0
        tokens = list(self._tokens)
        for parent, child in zip([self._row, *chain], chain, strict=False):
            p, token = self._shaped(parent, tokens), self._draft.tokens[child - 1]
            q = _source(self._q(parent, p), token, p)
            steps.append((p, q, weight))
            tokens.append(token)
            weight = float(_acceptance(p, q, token, weight))
            if weight == 0.0:
                break
        if self._chance.accept(weight):
            return self._descend(chain)
        for kept in range(len(steps) - 1, -1, -1):
            p, q, weight = steps[kept]
            excess = _excess(p, q, weight)
            if kept == 0 or self._chance.accept(_prefix_acceptance(float(excess.sum()), weight)):
                self._descend(chain[:kept])
                self._left = _normalised(excess, p)
                return None
        raise AssertionError("unreachable: the empty prefix always stands")

    def verdict(self) -> Verdict:
        """The target's own token ends the round."""
        left = self._shaped(self._row, self._tokens) if self._left is None else self._left
        own = self._chance.token(left)
        return Verdict(tuple(self._path), (*self._tokens, own))

    def _descend(self, rows: Sequence[int]) -> None:
        self._path += rows
        self._tokens += [self._draft.tokens[row - 1] for row in rows]

    def _q(self, row: int, p: Tensor) -> Tensor | None:
        """The distribution that the row's children were drawn from, if they were."""
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
    """The distribution that a child came from. Where q is not known, or rules the token out, the child was chosen and
    not drawn: all mass lies on it. That keeps p whatever chose it, as long as it did not see this round's draws."""
    if q is not None and float(q[token]) > 0.0:
        return q
    point = torch.zeros_like(p)
    point[token] = 1.0
    return point


def _acceptance(p: Tensor, q: Tensor, token: int | Tensor, weight: float = 1.0) -> Tensor:
    """min(1, weight * p / q) of the token, 0 where q is 0."""
    index = torch.as_tensor(token, device=p.device)[..., None]
    wanted, offered = (x.gather(-1, index)[..., 0] for x in (p, q))
    return torch.where(offered > 0, (weight * wanted / offered).clamp(max=1.0), 0.0)


def _prefix_acceptance(excess: float, weight: float) -> float:
    """h_i of the paper. A prefix of weight 1 whose continuations have all mass always stands."""
    return 1.0 if weight >= 1.0 else excess / (excess + 1.0 - weight)


def _excess(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    return (weight * p - q).clamp(min=0.0)


def _normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """`mass` [..., V] with sum 1; `otherwise` where there is none but rounding."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > torch.finfo(mass.dtype).eps, mass / total, otherwise)


def _without(q: Tensor, token: int) -> Tensor:
    """q once `token` has been drawn from it and put aside; all zero when that was its last."""
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
