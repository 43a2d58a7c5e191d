from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import InvalidOption
from paceline.functional import (
    Accepted,
    CandidateTree,
    TreeConfig,
    sample,
    verify_greedy,
    verify_rejection,
    verify_sampling,
)
from paceline.functional.verification import draw
from paceline.sampling.noise import Noise
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import Draft, Verdict
from paceline.verify import rejection
from paceline.verify.rules import match
from tests.support.cover import some
from tests.support.draft_batches import batches, chi_square, padded, tree_of


def random_logits(tree: CandidateTree, vocab: int, seed: int) -> Tensor:
    shape = (len(tree.tokens), tree.tokens.shape[1] + 1, vocab)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def verdicts(accepted: Accepted) -> list[Verdict]:
    """Return the tokens of each request, after checking the padding."""
    out = []
    for tokens, path, count in zip(accepted.tokens, accepted.path, accepted.counts.tolist(), strict=True):
        assert (tokens[count:] == -1).all()
        assert (path[max(count - 1, 0) :] == -1).all()
        out.append(Verdict(tuple(path[: max(count - 1, 0)].tolist()), tuple(tokens[:count].tolist())))
    return out


def place_noise(noises: list[Noise], lengths: list[int], tree: CandidateTree, vocab: int) -> Tensor:
    ids = torch.arange(vocab)
    return torch.stack(
        [
            torch.stack([noise.gumbel(length + 1 + depth, ids) for depth in range(tree.max_depth + 1)])
            for noise, length in zip(noises, lengths, strict=True)
        ]
    )


@given(batches, st.integers(0, 1000))
def test_greedy_gives_what_single_requests_get(batch: list[Draft], seed: int) -> None:
    tree = tree_of(batch)
    logits = random_logits(tree, 4, seed)
    singly = [match(draft, rows, Sampler(), Prefix([0] * 20)) for draft, rows in zip(batch, logits, strict=True)]
    assert verdicts(verify_greedy(tree, logits)) == singly


@given(batches, st.integers(0, 1000))
def test_sampling_with_the_noise_of_the_place_gives_what_single_requests_get(batch: list[Draft], seed: int) -> None:
    tree = tree_of(batch)
    logits = random_logits(tree, 4, seed)
    heat = torch.tensor([0.0, 0.7, 1.0, 0.0][: len(batch)])
    noises = [Noise(seed, b) for b in range(len(batch))]
    lengths = [7, 0, 3, 5][: len(batch)]
    accepted = verify_sampling(tree, logits, temperature=heat, noise=place_noise(noises, lengths, tree, 4))
    singly = [
        match(draft, rows, Sampler(float(t), noise=noise), Prefix([0] * (int(length) + 1)))
        for draft, rows, length, t, noise in zip(batch, logits, lengths, heat, noises, strict=True)
    ]
    assert verdicts(accepted) == singly


@given(batches, st.integers(0, 1000))
def test_at_temperature_zero_every_rule_is_greedy(batch: list[Draft], seed: int) -> None:
    tree = tree_of(batch)
    logits = random_logits(tree, 4, seed)
    greedy = verdicts(verify_greedy(tree, logits))
    assert verdicts(verify_sampling(tree, logits, temperature=0.0)) == greedy
    q = random_logits(tree, 4, seed + 1).softmax(-1)
    assert verdicts(verify_rejection(tree, logits, q, temperature=0.0)) == greedy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_is_verified(dtype: torch.dtype) -> None:
    tree = tree_of([Draft((1, 2, 3), (0, 0, 2)), Draft((3,), (0,))])
    logits = random_logits(tree, 5, 3).to(dtype)
    assert verdicts(verify_greedy(tree, logits)) == verdicts(verify_greedy(tree, logits.double()))
    noise = torch.zeros(2, 3, 5)
    assert verdicts(verify_sampling(tree, logits, noise=noise)) == verdicts(verify_greedy(tree, logits))
    assert (verify_rejection(tree, logits, logits.softmax(-1)).counts >= 1).all()


def test_equal_logits_go_to_the_lowest_token() -> None:
    tree = tree_of([Draft((1, 2), (0, 0))])
    logits = torch.tensor([[[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [9.0, 0.0, 0.0]]])
    assert verdicts(verify_greedy(tree, logits)) == [Verdict((1,), (1, 0))]


# Chains of two, by request: nothing wrong, row 0 wrong, row 1 wrong, row 2 wrong, a row wrong that is not visited.
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", ["greedy", "sampling", "rejection"])
def test_rows_that_are_not_finite_end_their_request_and_no_other(bad: float, rule: str) -> None:
    tree = CandidateTree.of(torch.tensor([[1, 2]]).repeat(5, 1), torch.tensor([[0, 1]]).repeat(5, 1))
    logits = torch.full((5, 3, 4), -torch.inf)
    logits[:, 0, 1] = logits[:, 1, 2] = logits[:, 2, 3] = 0.0
    logits[4, 0] = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
    for request, row in ((1, 0), (2, 1), (3, 2), (4, 1)):
        logits[request, row] = -torch.inf
        logits[request, row, 2] = bad
        if request == 4:
            logits[request, 0, 0], logits[request, 0, 2] = 0.0, -torch.inf
    accepted = {
        "greedy": lambda: verify_greedy(tree, logits),
        "sampling": lambda: verify_sampling(tree, logits),
        "rejection": lambda: verify_rejection(tree, logits, torch.full((5, 3, 4), 0.25)),
    }[rule]()
    assert accepted.broken.tolist() == [False, True, True, True, False]
    assert accepted.tokens.tolist() == [[1, 2, 3], [-1, -1, -1], [1, -1, -1], [1, 2, -1], [0, -1, -1]]
    assert accepted.path.tolist() == [[1, 2], [-1, -1], [-1, -1], [1, -1], [-1, -1]]
    assert accepted.counts.tolist() == [3, 0, 1, 2, 1]


def drawn_orders(q: Tensor, count: int) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return every outcome of drawing `count` tokens without replacement, with its probability."""
    orders = list(permutations(range(len(q)), count))
    chances = []
    for order in orders:
        left, chance = 1.0, 1.0
        for token in order:
            chance *= float(q[token]) / left
            left -= float(q[token])
        chances.append(chance)
    return orders, torch.tensor(chances, dtype=torch.float64)


# For these, every threshold for a uniform is a multiple of 1/12 or 1/4, so a grid of 12 or 4 midpoints gives the
# integral.
EXACT = {
    "four tokens": ((3, 4, 1, 4), (6, 3, 2, 1), 12),
    "four tokens of tenths": ((1, 4, 1, 4), (4, 3, 2, 1), 12),
    "four other tokens": ((5, 2, 4, 1), (4, 4, 2, 2), 12),
    "three tokens": ((4, 3, 2), (2, 6, 1), 4),
}


def outcome(p: Tensor, q: Tensor, siblings: int, steps: int) -> tuple[Tensor, float]:
    """Return the exact distribution of the first token over draws and uniforms, and the accepted share."""
    orders, chances = drawn_orders(q, siblings)
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    uniforms = torch.tensor(list(product(grid.tolist(), repeat=siblings + 1)), dtype=torch.float64)
    tree = CandidateTree.of(
        torch.tensor(orders).repeat_interleave(len(uniforms), 0),
        torch.zeros(len(orders) * len(uniforms), siblings, dtype=torch.int64),
    )
    shape = (len(tree.tokens), siblings + 1, len(q))
    both = uniforms.repeat(len(orders), 1)[:, None].repeat(1, 2, 1)
    accepted = verify_rejection(tree, p.log().expand(shape), q.expand(shape), uniforms=both)
    weight = chances.repeat_interleave(len(uniforms)) / len(uniforms)
    first = torch.zeros(len(p), dtype=torch.float64).index_add_(0, accepted.tokens[:, 0], weight)
    return first, float(weight[accepted.counts == 2].sum())


@pytest.mark.parametrize(
    ("case", "siblings"),
    [("three tokens", 2), *((case, 1) for case in EXACT if case != "three tokens")]
    + [pytest.param(case, 2, marks=pytest.mark.slow) for case in EXACT if case != "three tokens"],
)
def test_rejection_leaves_exactly_the_targets_distribution(case: str, siblings: int) -> None:
    p, q, steps = EXACT[case]
    target, draft = (torch.tensor(x, dtype=torch.float64) / sum(x) for x in (p, q))
    first, accepted = outcome(target, draft, siblings, steps)
    assert first.allclose(target, rtol=0, atol=1e-9)
    if siblings == 1:
        assert accepted == pytest.approx(float(torch.minimum(target, draft).sum()))
    else:
        assert accepted > float(torch.minimum(target, draft).sum())


def test_without_the_residual_the_distribution_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the negative control: after a rejection, it uses the target's own p instead of (p - q)+."""
    monkeypatch.setattr(rejection, "_normalised", lambda weights, otherwise: otherwise)
    p, q, steps = EXACT["four tokens"]
    target, draft = (torch.tensor(x, dtype=torch.float64) / sum(x) for x in (p, q))
    assert not outcome(target, draft, 1, steps)[0].allclose(target, rtol=0, atol=1e-2)
    assert joint_deviation(1_000) > 4


def joint_deviation(batch: int, seed: int = 5) -> float:
    """Return the deviation of the first two tokens' joint distribution over `count` sampled and verified trees."""
    vocab = 5
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(vocab, vocab, generator=generator) * 1.5 for _ in range(2))
    # The second cap cuts the last parent's children short; the confidence depends on what was drawn.
    config = TreeConfig(branch=2, depth=3, max_nodes=7, confidence=0.1)
    tree, shapes = sample(lambda level: q[level.tokens], q[:1].expand(batch, -1), config, generator=generator)
    rows = torch.nn.functional.pad(tree.tokens.clamp(min=0), (1, 0))
    accepted = verify_rejection(tree, p[rows], shapes, generator=generator)
    first = accepted.tokens[:, 0]
    alone = torch.multinomial(p.softmax(-1)[first], 1, generator=generator)[:, 0]
    second = torch.where(accepted.counts > 1, accepted.tokens[:, 1], alone)
    counts = torch.zeros(vocab, vocab).index_put_((first, second), torch.ones(batch), accumulate=True)
    assert len(accepted.counts.unique()) == 4
    return chi_square(counts, p.softmax(-1)[0][:, None] * p.softmax(-1))


@some("trees", [1_000, 4_000], fast=["1000"])
def test_sampled_trees_leave_the_joint_distribution_of_two_tokens(trees: int) -> None:
    assert joint_deviation(trees) < 4


def test_sampling_leaves_the_targets_distribution_whatever_is_drafted() -> None:
    generator = torch.Generator().manual_seed(7)
    p = torch.randn(6, generator=generator)
    tree = CandidateTree.of(torch.tensor([[2, 4]]).expand(10_000, -1), torch.zeros(10_000, 2, dtype=torch.int64))
    accepted = verify_sampling(tree, p.expand(10_000, 3, 6), temperature=0.7, generator=generator)
    assert chi_square(accepted.tokens[:, 0].bincount(minlength=6), (p / 0.7).softmax(-1)) < 4
    assert ((accepted.counts == 2) == (accepted.tokens[:, 0] % 4 % 2 == 0) & (accepted.tokens[:, 0] > 0)).all()


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(9, 9, generator=generator)
    config = TreeConfig(branch=1, depth=4, max_nodes=4)
    tree, q = sample(lambda level: table[level.tokens], table, config, generator=generator)
    logits = torch.cat([table[: len(q), None], table[tree.tokens]], 1)
    assert (verify_rejection(tree, logits, q, generator=generator).counts == 5).all()


@some("batch", [2_000, 10_000], fast=["2000"])
def test_candidates_that_were_not_drawn_from_q_count_as_chosen(batch: int) -> None:
    """With probability 0, or with NaN in a row of q, they are accepted as often as the target chooses them."""
    generator = torch.Generator().manual_seed(2)
    p = torch.tensor([0.5, 0.2, 0.3])
    tree = CandidateTree.of(torch.tensor([[1]]).expand(batch, -1), torch.zeros(batch, 1, dtype=torch.int64))
    for q in (torch.tensor([0.5, 0.0, 0.5]), torch.tensor([0.5, 0.5, torch.nan])):
        accepted = verify_rejection(tree, p.log().expand(batch, 2, 3), q.expand(batch, 2, 3), generator=generator)
        assert ((accepted.counts == 2) == (accepted.tokens[:, 0] == 1)).all()
        assert not accepted.broken.any()
        assert chi_square(accepted.tokens[:, 0].bincount(minlength=3), p) < 4


def test_a_draw_at_either_end_is_a_token_that_can_be() -> None:
    probs = torch.tensor([0.0, 0.5, 0.25, 0.0])
    assert [draw(probs, uniform) for uniform in (0.0, 0.6, 1 - 2.0**-24, 1.0)] == [1, 1, 2, 1]


def test_the_same_generator_state_gives_the_same_text() -> None:
    tree = tree_of([Draft((1, 2, 3), (0, 0, 2)), Draft((3,), (0,))])
    logits = random_logits(tree, 5, 3)

    def runs(seed: int) -> list[list[Verdict]]:
        generator = torch.Generator().manual_seed(seed)
        q = logits.softmax(-1)
        return [
            verdicts(verify_sampling(tree, logits, generator=generator)),
            verdicts(verify_rejection(tree, logits, q, generator=generator)),
        ]

    assert runs(1) == runs(1)
    assert len({str(runs(seed)) for seed in range(5)}) > 1


def test_trees_without_nodes_give_the_targets_own_token() -> None:
    tree = CandidateTree.of(padded([(), ()]), padded([(), ()]))
    logits = torch.tensor([[[0.0, 3.0]], [[1.0, 0.0]]])
    for accepted in (verify_greedy(tree, logits), verify_rejection(tree, logits, logits, temperature=0)):
        assert verdicts(accepted) == [Verdict((), (1,)), Verdict((), (0,))]


TREE = tree_of([Draft((1, 2, 3), (0, 0, 2)), Draft((3,), (0,))])
LOGITS = torch.zeros(2, 4, 5)
GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    "call",
    [
        lambda: verify_greedy(TREE, LOGITS[:, 1:]),
        lambda: verify_greedy(TREE, LOGITS[:1]),
        lambda: verify_greedy(TREE, LOGITS[0]),
        lambda: verify_greedy(TREE, LOGITS.long()),
        lambda: verify_sampling(TREE, LOGITS, temperature=-1.0),
        lambda: verify_sampling(TREE, LOGITS, temperature=1e-6),
        lambda: verify_sampling(TREE, LOGITS, temperature=float("nan")),
        lambda: verify_sampling(TREE, LOGITS, temperature="hot"),  # type: ignore[arg-type]
        lambda: verify_sampling(TREE, LOGITS, temperature=torch.ones(3)),
        lambda: verify_sampling(TREE, LOGITS, temperature=torch.tensor([1.0, -1.0])),
        lambda: verify_sampling(TREE, LOGITS, noise=torch.zeros(2, 2, 5)),
        lambda: verify_sampling(TREE, LOGITS, noise=torch.zeros(2, 3, 5), generator=GENERATOR),
        lambda: verify_rejection(TREE, LOGITS, LOGITS[:, 1:]),
        lambda: verify_rejection(TREE, LOGITS, LOGITS, temperature=True),
        lambda: verify_rejection(TREE, LOGITS, LOGITS, uniforms=torch.zeros(2, 3, 2)),
        lambda: verify_rejection(TREE, LOGITS, LOGITS, uniforms=torch.zeros(2, 3, 3), generator=GENERATOR),
    ],
)
def test_wrong_arguments_are_refused(call: Any) -> None:
    with pytest.raises(InvalidOption):
        call()
