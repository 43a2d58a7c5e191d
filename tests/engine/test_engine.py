from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from paceline.drafters.base import Ask
from paceline.drafters.independent import draft_independently
from paceline.drafters.model import DraftModel
from paceline.drafters.stack import DrafterWrapper
from paceline.engine.detokenizer import TextStream
from paceline.engine.draft_length import Controller
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.engine.stats import Stats
from paceline.errors import InvalidOption, NonFiniteLogits, OutOfMemory
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget, Forward, Rows, Want
from paceline.verify.tree import MIN_ROWS, PREFILL_ROWS, pack
from tests.support.controlled import fixed_plan
from tests.support.toys import toy_target


class Watched(Decoder):
    """Records the shape of every pass."""

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        self.passes = [*getattr(self, "passes", []), (tuple(rows.tokens.shape), want.logits)]
        return super().forward(rows, cache, want)


def watched(**changes: int) -> Watched:
    target = toy_target(context_length=2048, **changes)
    target.__class__ = Watched
    return target  # type: ignore[return-value]


def test_one_pass_per_round_and_none_below_two_rows() -> None:
    target = watched()
    plain, _, stats = run(target, [1, 2, 3], Sampling(max_new_tokens=20))
    assert [want for _, want in target.passes] == ["none"] + ["all"] * 20
    assert {shape for shape, _ in target.passes} == {(1, MIN_ROWS)}
    target.passes = []
    _, _, stats = run(
        target, [1, 2, 3], Sampling(max_new_tokens=20), Oracle([1, 2, 3, *plain], 0.5, 37), DraftBudget.chain(4)
    )
    assert len(target.passes) == 1 + stats.rounds
    assert all(shape[1] >= MIN_ROWS >= 2 for shape, _ in target.passes)


def test_a_long_prompt_is_fed_in_chunks_and_its_last_token_in_the_first_round() -> None:
    target = watched()
    run(target, [i % 37 for i in range(2 * PREFILL_ROWS + 2)], Sampling(max_new_tokens=1))
    assert target.passes == [
        ((1, PREFILL_ROWS), "none"),
        ((1, PREFILL_ROWS), "none"),
        ((1, MIN_ROWS), "none"),
        ((1, MIN_ROWS), "all"),
    ]


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    target = watched()
    tokens, _, stats = run(target, [4], Sampling(max_new_tokens=3))
    assert len(tokens) == 3
    assert [want for _, want in target.passes] == ["all"] * 3
    assert stats.seconds["prefill"] < 1e-3


def test_cost_follows_the_text_and_not_the_limit() -> None:
    """The same text with another `max_new_tokens` needs the same passes and the same memory."""
    shapes, sizes = [], []
    for limit in (16, 1500):
        target = watched()
        engine = Engine(target)
        how = Sampling(max_new_tokens=limit)
        request = engine.start([1, 2, 3], how.sampler(), TextStream(how, (), str, 1500), Stats(0, "rounding"))
        engine.prefill(request)
        engine.step([request])
        shapes.append(target.passes)
        sizes.append(engine.cache.capacity)  # type: ignore[attr-defined]
    assert shapes[0] == shapes[1]
    assert sizes[0] == sizes[1] == 256


def test_the_parts_of_the_time_sum_to_the_whole() -> None:
    stats = run(toy_target(layers=1), [1, 2, 3], Sampling(max_new_tokens=8), Oracle([], 0.5, 37), DraftBudget.chain(3))[
        2
    ]
    assert set(stats.seconds) == {"prefill", "draft", "verify", "commit", "other"}
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    before = sum(stats.seconds.values())
    stats.close()
    assert sum(stats.seconds.values()) > before, "closing later means more wall time, all of it in `other`"


def test_an_error_in_the_middle_leaves_the_engine_ready() -> None:
    target = toy_target(layers=1)
    engine = Engine(target, Oracle([], 0.0, 37), DraftBudget.chain(3))
    sampling = Sampling(max_new_tokens=12)
    plain = run(target, [1, 2, 3], sampling, engine=engine)[0]
    honest, calls = target.forward, 0

    def broken(rows: Rows, cache: KVCache, want: Want) -> Forward:
        nonlocal calls
        calls += 1
        out = honest(rows, cache, want)
        return Forward(out.logits * torch.nan) if calls == 5 else out

    target.forward = broken  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogits):
        run(target, [1, 2, 3], sampling, engine=engine)
    assert run(target, [1, 2, 3], sampling, engine=engine)[0] == plain
    assert len(engine.cache.lengths) == 1, "no slot was leaked"


def test_an_allocation_that_fails_is_a_typed_error() -> None:
    target = toy_target(layers=1)

    def full(rows: Rows, cache: KVCache, want: Want) -> Forward:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    target.forward = full  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory, match="rows"):
        run(target, [1, 2, 3], Sampling())


def test_the_self_check_tells_targets_whose_rows_depend_on_each_other() -> None:
    class Leaky(Decoder):
        """Shifts each row slightly with the largest value in the pass, like per-tensor activation scales."""

        def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
            out = super().forward(rows, cache, want)
            return Forward(out.logits * (1 + 1e-12 * rows.tokens.max()), out.taps)

    class Rounded(Decoder):
        """Returns float64 rows that have the same bits in passes of any shape."""

        def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
            return Forward(super().forward(rows, cache, want).logits.mul(1e6).round())

    target = tiny_target(layers=1)
    target.__class__ = Rounded
    assert guarantee(target) == "bits"
    target = tiny_target(layers=1)
    target.__class__ = Leaky
    assert guarantee(target) == "rounding"


def test_the_self_check_ends_at_the_first_row_that_differs() -> None:
    passes: list[int] = []

    class ByLength(Decoder):
        """Returns rows that depend on the size of the pass."""

        def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
            passes.append(rows.tokens.shape[1])
            out = super().forward(rows, cache, want)
            return Forward(out.logits * (1 + 1e-6 * rows.tokens.shape[1]), out.taps)

    target = toy_target(layers=1)
    target.__class__ = ByLength
    assert guarantee(target) == "rounding"
    assert len(passes) == 3, "a prefix, the longest pass, and one token"


def test_an_excerpt_is_a_part_of_the_target() -> None:
    target = toy_target(layers=1)
    part, cache = target.excerpt(), target.new_cache()
    slot = cache.acquire()
    rows = pack([3], [Draft.chain([5, 7])], [slot], [0], target.device)
    shown = part.forward(rows, cache, Want()).logits
    whole = target.forward(rows, cache, Want(layers=part.config.layers)).logits
    assert torch.equal(shown, whole[..., : shown.shape[-1]])


def test_stats_for_json() -> None:
    stats = Stats(5, "bits")
    assert list(stats.as_dict()) == [
        "rounds",
        "drafted",
        "accepted",
        "tokens_per_round",
        "accepted_at",
        "cached",
        "seed",
        "guarantee",
        "drafter",
        "seconds",
    ]
    assert " _" not in repr(stats), "no private field"


@pytest.mark.parametrize(
    "draft", [Draft((99,), (0,)), Draft((1, 2), (0,)), Draft((1,), (1,)), Draft.chain([1] * 9), Draft((1, 1), (0, 0))]
)
def test_a_draft_that_is_none_names_the_drafter_and_leaves_the_engine_ready(draft: Draft) -> None:
    class Odd(Oracle):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            return [draft for _ in asks]

    target = toy_target(layers=1)
    engine = Engine(target, Odd([], 1.0, 37), DraftBudget.chain(3))
    with pytest.raises(InvalidOption):
        run(target, [1, 2, 3], Sampling(), engine=engine)
    assert len(engine.cache.lengths) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_breaks_costs_speed_and_not_the_reply(temperature: float) -> None:
    broken, target = toy_target(seed=3), toy_target(layers=1)
    honest = broken.forward
    broken.forward = lambda *args: Forward(honest(*args).logits * torch.nan)  # type: ignore[method-assign]
    how = Sampling(max_new_tokens=12, temperature=temperature, seed=1)
    plain = run(target, [1, 2, 3], how)[0]
    for shape in (DraftBudget.chain(3), DraftBudget(8, 3, 3)):
        assert run(target, [1, 2, 3], how, DraftModel(broken, 37), shape)[0] == plain


class Sized(DrafterWrapper):
    """Records its budgets, and prefers trees."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(Oracle(text, 0.7, 37))
        self.draft = DraftBudget(10, 4, 3)
        self.budgets: list[DraftBudget] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.budgets += [ask.budget for ask in asks]
        return super().propose(asks)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_whatever_is_chosen_from_round_to_round_the_text_is_plain_decoding_s(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rolls = toy_target(layers=1), random.Random(1)
    sampling = Sampling(max_new_tokens=60, temperature=temperature, seed=5)
    plain = run(target, [1, 2, 3], sampling)[0]
    monkeypatch.setattr(
        Controller, "plan", lambda self, each, together: fixed_plan(self, each, rolls.choice(self.sizes))
    )
    sized = Sized([1, 2, 3, *plain])
    tokens, _, stats = run(target, [1, 2, 3], sampling, sized)
    assert tokens == plain
    assert len(set(sized.budgets)) > 2
    assert stats.accepted > 10
    assert stats.rounds > len(sized.budgets), "rounds that draft nothing do not ask"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_draft_lengths_ignore_measurements_if_the_text_depends_on_the_draft(rule: str) -> None:
    target, sized = toy_target(layers=1), Sized([])
    engine = Engine(target, sized)
    sampling = Sampling(max_new_tokens=60, temperature=0.9, seed=5, rule=rule)  # type: ignore[arg-type]
    first = run(target, [1, 2, 3], sampling, engine=engine)[0]
    assert set(sized.budgets) - {DraftBudget(10, depth, 3) for depth in (1, 2, 3)} == {DraftBudget(10, 4, 3)}
    run(target, [1, 2, 3], Sampling(max_new_tokens=60), engine=engine)
    assert DraftBudget(3, 1, 3) in sized.budgets, (
        "a rule that does not leaves it to the controller, who learns it is no good"
    )
    (policy,) = engine.policies
    policy.drafter = again = Sized([])
    assert run(target, [1, 2, 3], sampling, engine=engine)[0] == first
    assert set(again.budgets) - {DraftBudget(10, depth, 3) for depth in (1, 2, 3)} == {DraftBudget(10, 4, 3)}


def test_the_end_of_a_request_releases_only_its_own_slot() -> None:
    released = list[int]()

    class Noting(DrafterWrapper):
        def release(self, slot: int) -> None:
            released.append(slot)
            super().release(slot)

    drafter = Noting(Oracle([], 0.0, 37))
    lengths = (2, 9, 4)
    run_together(Engine(toy_target(layers=1), drafter), [[1, 2, 3]] * 3, [Sampling(max_new_tokens=n) for n in lengths])
    assert released == [0, 2, 1]


class NotFinite(Oracle):
    """Ranks rows of NaN, like a broken draft model."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [draft_independently(one, one.budget, torch.full((2, 37), torch.nan)) for one in asks]


def test_a_drafter_that_fails_is_counted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    target, sampling = toy_target(layers=1), Sampling(max_new_tokens=5)
    plain, _, stats = run(target, [1, 2, 3], sampling)
    assert stats.draft_failures == 0
    assert "draft_failures" not in stats.as_dict()
    engine = Engine(target, NotFinite([], 0.0, 37), DraftBudget.chain(2))
    with caplog.at_level("WARNING", "paceline"):
        for _ in range(2):
            tokens, _, stats = run(target, [1, 2, 3], sampling, engine=engine)
            assert tokens == plain
            assert stats.drafted == 0
            assert stats.as_dict()["draft_failures"] == stats.draft_failures > 0
    assert [record.message.split(" and ")[0] for record in caplog.records] == ["Drafter NotFinite failed on a token"]
