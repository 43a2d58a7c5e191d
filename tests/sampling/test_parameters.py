from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidOption, NonFiniteLogits
from paceline.sampling.noise import MAX_NOISE, Noise
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix, Sampler, Subset


def support(logits: torch.Tensor, **cuts: float) -> list[int]:
    return Sampler(temperature=0.8, **cuts).distribution(Prefix(), logits).nonzero()[:, 0].tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-6},
        {"top_k": -1},
        {"top_p": 1.01},
        {"min_p": -0.5},
        {"seed": -(2**63) - 1},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": [-2]},
        {"stop_token_ids": 3},
        {"stop_when": [5]},
        {"processors": ["x"]},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": -1.0},
        {"frequency_penalty": 2.5},
        {"presence_penalty": float("nan")},
        {"typical_p": 0.0},
        {"typical_p": 1.5},
        {"no_repeat_ngram_size": -1},
        {"min_new_tokens": -1},
        {"min_new_tokens": 600},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": [1]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [[]]},
        {"bad_words": [[-1]]},
        {"bad_words": [7]},
        {"logprobs": -1},
    ],
)
def test_out_of_range_values_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_a_missing_seed_is_drawn_anew() -> None:
    seeds = {Sampling(temperature=1.0).sampler().noise.seed for _ in range(8)}
    assert len(seeds) == 8
    assert Sampling(seed=5).sampler().noise.seed == 5


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert Sampler().choose(Prefix(), torch.tensor([1.0, 3.0, 3.0, 2.0])) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(NonFiniteLogits):
        Sampler(temperature).choose(Prefix(), torch.tensor([1.0, bad, 2.0]))


def test_draws_follow_the_shaped_distribution() -> None:
    """Test only the noise: chi-square of 6,000 draws compared with softmax(logits / T)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    draws = 6_000
    sampler = Sampler(temperature=0.7, noise=Noise(5))
    counts = torch.bincount(torch.tensor([sampler.choose(Prefix(range(p)), logits) for p in range(draws)]), minlength=6)
    expected = (logits / 0.7).softmax(-1) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 15.1, "5 degrees of freedom, 1 %"


@given(st.integers(0, 10_000), st.sampled_from([5, 40, 3000]), st.data())
def test_truncation_agrees_with_transformers(seed: int, width: int, data: st.DataObject) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    top_k = data.draw(st.sampled_from([0, 1, 3, 50]))
    top_p = data.draw(st.sampled_from([1.0, 0.95, 0.5, 0.01]))
    min_p = data.draw(st.sampled_from([0.0, 0.02, 0.5]))
    typical_p = data.draw(st.sampled_from([1.0, 0.9, 0.3]))
    logits = torch.randn(width, generator=torch.Generator().manual_seed(seed)).double() * 3
    scores = (logits / 0.8)[None]
    if top_k:
        scores = warpers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = warpers.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = warpers.MinPLogitsWarper(min_p)(None, scores)
    if typical_p < 1:
        scores = warpers.TypicalLogitsWarper(typical_p)(None, scores)
    expected = torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
    assert support(logits, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p) == expected


def test_equal_tokens_are_kept_or_dropped_together() -> None:
    """transformers breaks ties of top_p by sort order, and keeps ties of typical_p. We always keep ties."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert support(logits, top_p=0.6) == [0, 1, 2, 3]
    assert support(logits, top_k=2) == [0, 1, 2, 3]
    assert support(logits, typical_p=0.1) == [1, 2, 3]
    assert support(torch.zeros(700), typical_p=0.2) == list(range(700))


def full(
    noise: Noise, position: int, scores: torch.Tensor, tokens: torch.Tensor, count: int
) -> list[tuple[int, float]]:
    """Compute `Noise.best` from the noise of every column."""
    sums = scores + noise.gumbel(position, tokens)
    order = sums.sort(descending=True, stable=True).indices[:count]
    return [(int(tokens[i]), float(sums[i])) for i in order if sums[i] > -torch.inf]


SHAPES = {
    "flat": lambda n, r: torch.zeros(n),
    "few": lambda n, r: torch.zeros(n).index_fill_(0, torch.randint(n, (n // 9 + 1,), generator=r), -torch.inf),
    "normal": lambda n, r: torch.randn(n, generator=r) * 3,
    "narrow": lambda n, r: torch.randn(n, generator=r) * 0.01 - 90.0,
    "wide": lambda n, r: torch.randn(n, generator=r) * 1e4,
    "one above": lambda n, r: torch.zeros(n).index_fill_(0, torch.randint(n, (1,), generator=r), 14.0),
    "slope": lambda n, r: torch.linspace(0, -40, n),
    "cliff": lambda n, r: torch.where(torch.arange(n) < 5, 0.0, -22.0),
    "banned": lambda n, r: torch.where(torch.arange(n) % 97 == 3, 0.5, -torch.inf),
}


@given(st.sampled_from(list(SHAPES)), st.sampled_from([4, 500, 513, 3000, 20_000]), st.integers(0, 10**6), st.data())
def test_the_best_is_what_the_noise_of_all_columns_gives(shape: str, n: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = SHAPES[shape](n, generator).to(data.draw(st.sampled_from([torch.float32, torch.float64])))
    scores[min(n - 1, 3)] = 0.5
    count = data.draw(st.sampled_from([1, 2, 4, 600]))
    noise, position = Noise(seed, 1), data.draw(st.integers(0, 5000))
    tokens = torch.arange(n)
    ids, sums = noise.best(position, scores.numpy(), None, count)
    assert list(zip(ids.tolist(), sums.tolist(), strict=True)) == full(noise, position, scores, tokens, count)
    some = torch.arange(0, n, 3)
    ids, sums = noise.best(position, scores[some].numpy(), some.numpy(), count)
    assert list(zip(ids.tolist(), sums.tolist(), strict=True)) == full(noise, position, scores[some], some, count)


def test_a_low_column_can_win_by_its_noise() -> None:
    """Of 200,000 columns, the one with the highest noise has the lowest logit, just within or outside its reach."""
    noise, n = Noise(11), 200_000
    lift = noise.gumbel(0, torch.arange(n))
    top = int(lift.argmax())
    other = (top + 1) % n
    gap = float(lift[top] - lift[other])
    for below, winner in ((gap - 1e-4, top), (gap + 1e-4, other)):
        scores = torch.full((n,), -100.0)
        scores[other], scores[top] = 0.0, -below
        assert int(noise.best(0, scores.numpy())[0][0]) == winner
    assert float(lift.max()) <= MAX_NOISE
    assert gap > 8, "far enough to mean something"


def test_hardly_any_noise_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.sampling.noise

    honest, made = paceline.sampling.noise._gumbel, []
    monkeypatch.setattr(
        paceline.sampling.noise, "_gumbel", lambda hashed: (made.append(len(hashed)), honest(hashed))[1]
    )
    for shape in ("flat", "normal", "slope", "cliff", "wide"):
        made.clear()
        Noise(3).best(7, SHAPES[shape](50_000, torch.Generator().manual_seed(1)).numpy())
        assert sum(made) < 1200, shape


def test_the_narrow_sort_of_top_p_falls_back_to_the_full_one() -> None:
    flat = torch.zeros(5000)
    flat[:10] = torch.arange(10.0, 0.0, -1) * 1e-3
    assert len(support(flat, top_p=0.9)) == 5000, "ties live together"
    slope = torch.arange(5000, 0, -1) * 1e-4
    kept = len(support(slope, top_p=0.5))
    mass = (slope / 0.8).softmax(-1).cumsum(-1)
    assert kept == int((mass < 0.5).sum()) + 1


def test_rank_is_what_choose_would_take_one_after_the_other() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0))
    for temperature, top_k in itertools.product((0.0, 0.9), (0, 12)):
        sampler = Sampler(temperature, top_k=top_k, noise=Noise(3))
        (best,) = sampler.rank(Prefix([0] * 4), logits[None], [[]], 5)
        ranked = best.tokens
        assert best.scores == sorted(best.scores, reverse=True)
        assert ranked[0] == sampler.choose(Prefix([0] * 4), logits)
        rest = logits.clone()
        rest[ranked[0]] = -torch.inf
        if not top_k:
            assert ranked[1] == sampler.choose(Prefix([0] * 4), rest)
    assert len(Sampler(1.0, top_k=3).rank(Prefix(), logits[None], [[]], 5)[0].tokens) == 3


SUBSET = Subset(torch.tensor([1, 2, 5, 7, 11, 12, 13, 20, 30, 35]), 37)


def less_likely_and_one_more(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
    """Changes two of the target's tokens, one inside and one outside the subset."""
    logits[5] -= 3.0
    logits[6] = 2.0
    return logits


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(0.0),
        Sampler(1.3),
        Sampler(0.8, top_k=4),
        Sampler(1.0, top_p=0.8, min_p=0.01),
        Sampler(1.0, typical_p=0.7),
        Sampler(1.0, rule="typical"),
        Sampler(1.0, rule="block", top_p=0.9),
        Sampler(1.0, processors=(less_likely_and_one_more,)),
        Sampler(1.0, rule="rejection", processors=(less_likely_and_one_more,)),
    ],
    ids=["greedy", "t", "top_k", "top_p", "typical_p", "typical", "block", "processor", "rejection"],
)
def test_a_subset_is_ranked_as_rows_that_are_minus_infinity_elsewhere(sampler: Sampler) -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64).round(decimals=1)
    wide = torch.stack([SUBSET.widen(row) for row in logits])
    paths = [[], [1], [1, 2], [4]]
    few = sampler.rank(Prefix(), logits, paths, 6, SUBSET)
    for ours, theirs in zip(few, sampler.rank(Prefix(), wide, paths, 6), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.scores == pytest.approx(theirs.scores)
        assert (ours.q is None) == (theirs.q is None) == (not sampler.draws)
        if ours.q is not None and theirs.q is not None:
            torch.testing.assert_close(ours.q, theirs.q)
            assert ours.q.shape == (37,)


@pytest.mark.parametrize(
    "how", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"typical_p": 0.6}, {"top_k": 40, "top_p": 0.9}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_only_banned_tokens_are_dropped(
    how: dict[str, float], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with few remaining tokens gives the same result as a search over all tokens."""
    draw = torch.Generator().manual_seed(3)
    for left in (1, 3, 30, 200):
        open_ = torch.randperm(2000, generator=draw)[:left]

        def few(prefix: Prefix, row: torch.Tensor, open_: torch.Tensor = open_) -> torch.Tensor:
            return torch.full_like(row, -torch.inf).index_copy_(0, open_, row[open_])

        rows = torch.randn(20, 2000, generator=draw, dtype=torch.float64) * 3
        sampling = Sampling(temperature=temperature, seed=5, processors=[few], **how)  # type: ignore[arg-type]
        sampler, prefix = sampling.sampler(), Prefix([1, 2, 3])
        found = [sampler.choose(prefix.after([i]), row) for i, row in enumerate(rows)]
        ranked = sampler.rank(prefix, rows, [[i] for i in range(20)], 4)
        with monkeypatch.context() as patch:
            patch.setattr("paceline.sampling.sampler._SPARSE_FACTOR", 10**9)
            assert [sampler.choose(prefix.after([i]), row) for i, row in enumerate(rows)] == found
            dense = sampler.rank(prefix, rows, [[i] for i in range(20)], 4)
        for ours, theirs in zip(ranked, dense, strict=True):
            finite = [s for s in theirs.scores if s > -torch.inf]
            assert ours.tokens[: len(finite)] == theirs.tokens[: len(finite)]
            assert ours.scores[: len(finite)] == pytest.approx(finite)


def test_a_value_of_another_type_is_told_from_one_out_of_range() -> None:
    with pytest.raises(InvalidOption, match="max_new_tokens must be a whole number, got '5'"):
        Sampling(max_new_tokens="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"temperature must be a number, got None\. Use a number from 0 to 1000"):
        Sampling(temperature=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"grammar": 5}, "grammar"),
    ],
    ids=str,
)
def test_an_error_names_its_parameter(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Sampling(**wrong)
    assert caught.value.param == param
