"""The rules that keep the distribution, by exact enumeration in float64, with negative controls."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline import acceptance_step, residual
from paceline.errors import InvalidOption
from paceline.sampling.noise import ACCEPT_STREAM, Noise
from paceline.types import Draft, Verdict
from paceline.verify import rejection
from paceline.verify.rejection import RoundDraws, TargetProbabilities, block_walk, rejection_walk
from tests.support.cover import cover, some
from tests.support.enumerate import Script, outcomes

Walk = Callable[[Draft, TargetProbabilities, Script], Verdict]
WALKS: dict[str, Walk] = {"rejection": rejection_walk, "block": block_walk}
VOCAB = 3

Shape = Mapping[tuple[int, ...], int]
SHAPES: dict[str, Shape] = {
    "nothing": {},
    "chain of 1": {(): 1},
    "chain of 2": {(): 1, (0,): 1},
    "chain of 3": {(): 1, (0,): 1, (0, 0): 1},
    "two siblings": {(): 2},
    "three siblings": {(): 3},
    "siblings at the root, then chains": {(): 2, (0,): 1, (1,): 1, (0, 0): 1},
    "siblings below": {(): 1, (0,): 2, (0, 1): 1},
    "siblings everywhere": {(): 2, (0,): 2, (1,): 2},
}


@cache
def toy(name: str, path: tuple[int, ...]) -> Tensor:
    """Return a distribution that depends on the whole prefix. Every other distribution excludes a token."""
    seed = sum((token + 1) * 7**i for i, token in enumerate(path)) * 2 + (name == "target")
    p = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(1.5).softmax(-1)
    if seed // 2 % 2:
        p[seed % VOCAB] = 0.0
    return p / p.sum()


def target(row: int, path: Sequence[int]) -> Tensor:
    return toy("target", tuple(path))


class Drafter:
    """Draws siblings without replacement, or chooses them, from distributions that depend on the prefix."""

    def __init__(self, shape: Shape, made: str, same: bool = False, least: float = 0.0) -> None:
        """Create a drafter that ends paths with a probability below `least`."""
        self._shape, self._made, self._name, self._least = shape, made, "target" if same else "drafter", least

    def __call__(self, chance: Script) -> Draft:
        nodes: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(): (0, ())}
        tokens: list[int] = []
        parents: list[int] = []
        q: dict[int, Tensor] = {}
        for node in sorted(self._shape, key=lambda n: (len(n), n)):
            if node not in nodes:
                continue
            row, path = nodes[node]
            if prod(float(toy(self._name, path[:i])[token]) for i, token in enumerate(path)) < self._least:
                continue
            drawn, q_of_row = self._siblings(path, self._shape[node], chance)
            if q_of_row is not None:
                q[row] = q_of_row
            for rank, token in enumerate(drawn):
                tokens.append(token)
                parents.append(row)
                nodes[(*node, rank)] = (len(tokens), (*path, token))
        return Draft(tuple(tokens), tuple(parents), q)

    def _siblings(self, path: tuple[int, ...], count: int, chance: Script) -> tuple[list[int], Tensor | None]:
        q = toy(self._name, path)
        if self._made == "chosen" or (self._made == "drawn, then chosen below" and path):
            return q.argsort(descending=True)[:count].tolist(), None
        drawn: list[int] = []
        if self._made == "what q rules out chosen, then drawn":
            drawn += (q == 0).nonzero()[:, 0].tolist()
        left = q.clone()
        while len(drawn) < count and left.sum() > 0:
            drawn.append(chance.token(left / left.sum()))
            left[drawn[-1]] = 0.0
        return drawn, q


def by_levels(shape: Shape) -> Callable[[Script], Draft]:
    """Draw once for all parents of a depth, like heads. q depends on the first draw of the previous depth."""

    def draft(chance: Script) -> Draft:
        widths: dict[int, int] = defaultdict(int)
        for node, count in shape.items():
            widths[len(node)] = max(widths[len(node)], count)
        levels: list[tuple[list[int], Tensor]] = []
        for depth in sorted(widths):
            first = tuple(drawn[0] for drawn, _ in levels)
            q = left = toy("drafter", first)
            drawn: list[int] = []
            while len(drawn) < widths[depth] and left.sum() > 0:
                drawn.append(chance.token(left / left.sum()))
                left = left.index_fill(0, torch.tensor(drawn[-1]), 0.0)
            levels.append((drawn, q))
        return placed(shape, levels)

    return draft


def placed(shape: Shape, levels: Sequence[tuple[Sequence[int], Tensor]]) -> Draft:
    """Return the tree of the levels' candidates."""
    rows: dict[tuple[int, ...], int] = {(): 0}
    tokens: list[int] = []
    parents: list[int] = []
    q: dict[int, Tensor] = {}
    for node in sorted(shape, key=lambda n: (len(n), n)):
        if node not in rows:
            continue
        drawn, q[rows[node]] = levels[len(node)]
        for rank, token in enumerate(drawn[: shape[node]]):
            tokens.append(token)
            parents.append(rows[node])
            rows[(*node, rank)] = len(tokens)
    return Draft(tuple(tokens), tuple(parents), q)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("walk", WALKS)
def test_one_draw_may_serve_all_parents_of_a_depth(walk: str, shape: str) -> None:
    length = 1 + max((len(node) + 1 for node in SHAPES[shape]), default=0)
    assert distance(WALKS[walk], by_levels(SHAPES[shape]), length) < 1e-12


MADE = ["drawn", "chosen", "drawn, then chosen below", "what q rules out chosen, then drawn"]


def texts(walk: Walk, drafter: Callable[[Script], Draft], length: int) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of the text's first `length` tokens, for one round and then plain decoding."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    rounds = outcomes(lambda chance: walk(drafter(chance), target, chance))
    for verdict, probability in rounds.items():
        for rest in itertools.product(range(VOCAB), repeat=max(0, length - len(verdict.tokens))):
            text = (*verdict.tokens, *rest)[:length]
            tail = [float(target(0, text[:i])[text[i]]) for i in range(len(verdict.tokens), length)]
            found[text] += probability * float(torch.tensor(tail, dtype=torch.float64).prod())
    return found


def distance(walk: Walk, drafter: Callable[[Script], Draft], length: int) -> float:
    """Return the total variation distance between the rule's texts and the target's texts."""
    found = texts(walk, drafter, length)
    own = {
        text: float(torch.stack([target(0, text[:i])[text[i]] for i in range(length)]).prod())
        for text in itertools.product(range(VOCAB), repeat=length)
    }
    assert found.keys() <= own.keys()
    return sum(abs(found.get(text, 0.0) - own[text]) for text in own) / 2


def kept(walk: Walk, drafter: Callable[[Script], Draft], shaped: TargetProbabilities = target) -> float:
    """Return the mean number of accepted tokens."""
    rounds = outcomes(lambda chance: len(walk(drafter(chance), shaped, chance).path))
    return sum(count * probability for count, probability in rounds.items())


@cover(walk=[*WALKS], shape=[*SHAPES], made=MADE)
def test_the_text_has_the_targets_distribution(walk: str, shape: str, made: str) -> None:
    length = 1 + max((len(node) + 1 for node in SHAPES[shape]), default=0)
    assert distance(WALKS[walk], Drafter(SHAPES[shape], made), length) < 1e-12


@pytest.mark.parametrize("shape", ["chain of 2", "chain of 3", "siblings below", "siblings everywhere"])
@pytest.mark.parametrize("walk", WALKS)
def test_a_node_may_have_children_depending_on_its_path(walk: str, shape: str) -> None:
    drafter = Drafter(SHAPES[shape], "drawn", least=0.35)
    assert distance(WALKS[walk], drafter, 4) < 1e-12
    assert len({len(draft.tokens) for draft in outcomes(drafter)}) > 1, "some paths end, some do not"


@pytest.mark.parametrize("walk", WALKS)
def test_a_node_that_is_left_out_for_what_was_drawn_for_it_is_noticed(walk: str) -> None:
    def drafter(chance: Script) -> Draft:
        draft = Drafter(SHAPES["chain of 2"], "drawn")(chance)
        return draft if draft.tokens[1] else Draft(draft.tokens[:1], (0,), {0: draft.q[0]})

    assert distance(WALKS[walk], drafter, 3) > 0.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("walk", WALKS)
def test_a_drafter_that_is_the_target_is_never_refused(walk: str, shape: str) -> None:
    verdicts = outcomes(lambda chance: WALKS[walk](Drafter(SHAPES[shape], "drawn", same=True)(chance), target, chance))
    depth = max((len(node) + 1 for node in SHAPES[shape] if not any(node)), default=0)
    assert {len(verdict.path) for verdict, probability in verdicts.items() if probability > 1e-12} == {depth}


def test_a_verdict_is_a_path_of_the_draft() -> None:
    for walk, shape in itertools.product(WALKS.values(), SHAPES.values()):

        def step(chance: Script, walk: Walk = walk, shape: Shape = shape) -> tuple[Draft, Verdict]:
            draft = Drafter(shape, "drawn")(chance)
            return draft, walk(draft, target, chance)

        for draft, verdict in outcomes(step):
            assert [draft.parents[row - 1] for row in verdict.path] == [0, *verdict.path][: len(verdict.path)]
            assert tuple(draft.tokens[row - 1] for row in verdict.path) == verdict.tokens[:-1]


# Acceptance of each rule.


def test_the_example_of_the_block_verification_paper() -> None:
    """A chain of two, with p = (1/3, 2/3) and q = (2/3, 1/3) for any prefix, as in arXiv 2403.10444, section 2."""
    p, q = torch.tensor([1.0, 2.0]).double() / 3, torch.tensor([2.0, 1.0]).double() / 3

    def drafter(chance: Script) -> Draft:
        return Draft((chance.token(q), chance.token(q)), (0, 1), {0: q, 1: q})

    assert kept(rejection_walk, drafter, lambda row, path: p) == pytest.approx(10 / 9)
    assert kept(block_walk, drafter, lambda row, path: p) == pytest.approx(11 / 9)


def test_one_drawn_token_stands_as_often_as_p_and_q_overlap() -> None:
    overlap = float(torch.minimum(toy("target", ()), toy("drafter", ())).sum())
    for walk in WALKS.values():
        assert kept(walk, Drafter(SHAPES["chain of 1"], "drawn")) == pytest.approx(overlap)


def test_chosen_tokens_stand_as_often_as_the_target_takes_one_of_them() -> None:
    for shape, count in (("chain of 1", 1), ("two siblings", 2), ("three siblings", 3)):
        likeliest = toy("drafter", ()).argsort(descending=True)[:count]
        wanted = float(toy("target", ())[likeliest].sum())
        assert kept(rejection_walk, Drafter(SHAPES[shape], "chosen")) == pytest.approx(wanted)


@some("seeds", {"2 seeds": range(4, 6), "6 seeds": range(6)}, fast=["2 seeds"])
def test_block_keeps_at_least_what_rejection_keeps_and_more_siblings_more(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = []
    for seed in seeds:
        fresh = lambda name, path, seed=seed: toy(name, (seed, *path))  # noqa: E731
        monkeypatch.setitem(globals(), "target", lambda row, path, fresh=fresh: fresh("target", tuple(path)))
        monkeypatch.setattr(Drafter, "_siblings", _drawn_by(fresh))
        for shape in ("chain of 2", "chain of 3", "siblings at the root, then chains"):
            drafter = Drafter(SHAPES[shape], "drawn")
            gains.append(kept(block_walk, drafter, target) - kept(rejection_walk, drafter, target))
        one, two, three = (
            kept(rejection_walk, Drafter(SHAPES[shape], "drawn"), target)
            for shape in ("chain of 1", "two siblings", "three siblings")
        )
        assert one <= two + 1e-12
        assert two <= three + 1e-12
    assert min(gains) > -1e-12
    assert max(gains) > 0.02


def _drawn_by(q_of: Callable[[str, tuple[int, ...]], Tensor]):  # type: ignore[no-untyped-def]
    def siblings(self, path, count, chance):  # type: ignore[no-untyped-def]
        q, drawn = q_of("drafter", path), []
        left = q.clone()
        while len(drawn) < count and left.sum() > 0:
            drawn.append(chance.token(left / left.sum()))
            left[drawn[-1]] = 0.0
        return drawn, q

    return siblings


# Negative controls: each breaks one thing, and the enumeration must notice.


def broken(walk: str, shape: str, drafter: Callable[[Script], Draft] | None = None) -> float:
    length = 1 + max(len(node) + 1 for node in SHAPES[shape])
    return distance(WALKS[walk], drafter or Drafter(SHAPES[shape], "drawn"), length)


@pytest.mark.parametrize("walk", WALKS)
def test_no_residual_is_noticed(walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_normalised", lambda mass, otherwise: otherwise)
    assert broken(walk, "chain of 2") > 0.01


def test_a_residual_that_forgets_the_blocks_weight_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rejection._excess
    monkeypatch.setattr(rejection, "_excess", lambda p, q, weight=1.0: honest(p, q))
    assert broken("block", "chain of 2") > 0.01


def test_siblings_drawn_with_one_q_and_judged_with_another_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_without", lambda q, token: q)
    assert broken("rejection", "two siblings") > 0.01


@pytest.mark.parametrize("walk", WALKS)
def test_the_q_of_another_parent_is_noticed(walk: str) -> None:
    def drafter(chance: Script) -> Draft:
        draft = Drafter(SHAPES["chain of 2"], "drawn")(chance)
        return Draft(draft.tokens, draft.parents, {0: toy("drafter", (0,)), 1: toy("drafter", ())})

    assert broken(walk, "chain of 2", drafter) > 0.01


def test_one_draw_for_parents_of_two_depths_is_noticed() -> None:
    def drafter(chance: Script) -> Draft:
        q = toy("drafter", ())
        first = chance.token(q)
        rest = q.index_fill(0, torch.tensor(first), 0.0)
        drawn = [first, chance.token(rest / rest.sum())]
        return placed(SHAPES["siblings everywhere"], [(drawn, q), (drawn, q)])

    assert broken("rejection", "siblings everywhere", drafter) > 0.01


def test_a_chosen_token_declared_as_drawn_is_noticed() -> None:
    """The draft is the most likely token with q, but it was not drawn from q."""

    def drafter(chance: Script) -> Draft:
        q = toy("drafter", ())
        return Draft((int(q.argmax()),), (0,), {0: q})

    assert broken("rejection", "chain of 1", drafter) > 0.01


def test_a_shape_that_depends_on_what_was_drawn_is_noticed() -> None:
    """Two tokens are drawn, and the better one is drafted. Therefore, a tree's shape is fixed before the draws."""

    def drafter(chance: Script) -> Draft:
        q = toy("drafter", ())
        drawn = [chance.token(q), chance.token(q)]
        return Draft((max(drawn, key=lambda token: float(q[token])),), (0,), {0: q})

    assert broken("rejection", "chain of 1", drafter) > 0.01


def test_reusing_draws_of_a_rejected_round_is_noticed() -> None:
    """Block verification rejected the first token partly because of the second, which is then no longer random."""
    p, q = torch.tensor([5.0, 3.0, 2.0]).double() / 10, torch.tensor([2.0, 3.0, 5.0]).double() / 10

    def two_rounds(chance: Script, again: bool) -> tuple[int, ...]:
        first, second = chance.token(q), chance.token(q)
        text = block_walk(Draft((first, second), (0, 1), {0: q, 1: q}), lambda row, path: p, chance).tokens
        if len(text) == 1:
            redrawn = second if again else chance.token(q)
            text += block_walk(Draft((redrawn,), (0,), {0: q}), lambda row, path: p, chance).tokens
        return text[:2]

    def far(again: bool) -> float:
        found = outcomes(lambda chance: two_rounds(chance, again))
        return sum(abs(found[a, b] - float(p[a] * p[b])) for a, b in itertools.product(range(VOCAB), repeat=2)) / 2

    assert far(again=False) < 1e-12
    assert far(again=True) > 0.01


# The public pieces.

P, Q = torch.tensor([0.5, 0.3, 0.2, 0.0]).double(), torch.tensor([0.25, 0.6, 0.0, 0.15]).double()
LAST_U = 1 - 2**-53


def test_a_step_accepts_below_the_ratio() -> None:
    assert [bool(acceptance_step(P, Q, 0, u)) for u in (0.0, LAST_U)] == [True, True], "p > q always stands"
    assert [bool(acceptance_step(P, Q, 1, u)) for u in (0.0, 0.4999, 0.5, 0.6)] == [True, True, False, False]
    assert not acceptance_step(P, Q, 3, 0.0), "p = 0 never stands"
    assert not acceptance_step(P, Q, 2, 0.0), "q = 0 was not drawn from q"
    assert acceptance_step(P.float(), P.float(), 1, LAST_U), "a float32 u would have been 1"


def test_steps_and_residuals_take_leading_dimensions() -> None:
    tokens, u = torch.tensor([0, 1, 3]), torch.tensor([0.9, 0.6, 0.0])
    together = acceptance_step(P.expand(3, 4), Q.expand(3, 4), tokens, u)
    assert together.tolist() == [bool(acceptance_step(P, Q, int(t), float(x))) for t, x in zip(tokens, u, strict=True)]
    left = residual(torch.stack([P, P]), torch.stack([Q, P]))
    assert torch.equal(left, torch.stack([residual(P, Q), P]))


def test_the_residual_is_what_q_did_not_cover() -> None:
    torch.testing.assert_close(residual(P, Q), torch.tensor([0.25, 0.0, 0.2, 0.0]).double() / 0.45)
    assert torch.equal(residual(P, P), P), "nothing left: p itself"
    close = P + torch.tensor([1e-17, -1e-17, 0.0, 0.0]).double()
    assert torch.equal(residual(close, P), close)


NAN = torch.tensor([0.5, torch.nan, 0.25, 0.25]).double()
WRONG = {
    "NaN": NAN,
    "not normalised": P * 1.01,
    "zero": P * 0,
    "negative": torch.tensor([1.2, -0.2, 0.0, 0.0]).double(),
    "infinite": torch.tensor([torch.inf, 0.0, 0.0, 0.0]).double(),
    "another vocabulary": torch.tensor([0.5, 0.5]).double(),
    "whole numbers": torch.tensor([1, 0, 0, 0]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_an_invalid_distribution_is_an_error(wrong: Tensor) -> None:
    for p, q in ((wrong, Q), (P, wrong)):
        with pytest.raises(InvalidOption):
            residual(p, q)
        with pytest.raises(InvalidOption):
            acceptance_step(p, q, 0, 0.5)
    if wrong.is_floating_point():
        for walk in WALKS.values():
            with pytest.raises(InvalidOption, match=r"q"):
                walk(Draft((0,), (0,), {0: wrong}), lambda row, path: P, Script(()))


@pytest.mark.parametrize(("token", "u"), [(4, 0.5), (-1, 0.5), (0, 1.0), (0, -0.1), (0, float("nan"))])
def test_invalid_tokens_and_invalid_u_are_errors(token: int, u: float) -> None:
    with pytest.raises(InvalidOption):
        acceptance_step(P, Q, token, u)


@given(st.integers(0, 2**32), st.floats(0.0, 1.0))
def test_the_step_and_the_walks_agree_on_the_boundary(seed: int, share: float) -> None:
    """`RoundDraws.accept` is the same comparison as the public step's, with the same kind of u."""
    chance = RoundDraws(Noise(seed), 5)
    u = chance.noise.stream(ACCEPT_STREAM, 5).uniform(1)
    p = torch.tensor([share, 1 - share]).double()
    assert chance.accept(share) == bool(acceptance_step(p, torch.tensor([1.0, 0.0]).double(), 0, u))
    assert RoundDraws(Noise(seed), 5).accept(1.0)
    assert not RoundDraws(Noise(seed), 5).accept(0.0)
