"""The controller's draft lengths, in simulations with known costs and acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.engine.cost_model import Curve, FadingMean
from paceline.engine.draft_length import RequestState
from paceline.types import Draft, DraftBudget, Verdict
from paceline.verify.tree import MIN_ROWS
from tests.support.controlled import Driven
from tests.support.cover import cover

Accept = Callable[[int], float]


def full_draft(size: DraftBudget) -> Draft:
    """Return a draft that uses a whole budget: a path, and the other nodes as siblings of its first token."""
    siblings = size.nodes - size.depth
    return Draft((0,) * size.depth + (*range(1, siblings + 1),), (*range(size.depth), *[0] * siblings))


class World:
    """Simulated rounds. A pass takes `base` plus `per_row` for every row, and drafting takes `per_level`.

    A draft that is accepted to depth d is accepted to depth d + 1 with probability `right`. Times have jitter, and
    sometimes another program uses the machine.
    """

    def __init__(self, most: DraftBudget, per_row: float, per_level: float, right: float, together: int = 1) -> None:
        self.controller = Driven(most)
        self.per_row, self.per_level, self.right, self.together = per_row, per_level, right, together
        self.others = 0
        self._random = random.Random(0)
        self.sizes: list[int] = []

    def seconds(self, size: DraftBudget) -> tuple[float, float]:
        return self.per_level * size.depth, 1.0 + self.per_row * max(MIN_ROWS, self.together * (size.nodes + 1))

    def round(self) -> tuple[float, float]:
        """Return (tokens of a request, seconds)."""
        size = self.controller.choose(self.together)
        self.sizes.append(size.nodes)
        drafting, verifying = self.seconds(size)
        noise = [1 + 0.1 * self._random.random() + (3.0 if self._random.random() < 0.03 else 0.0) for _ in range(2)]
        drafts, verdicts = [], []
        for _ in range(self.together):
            kept = 0
            while kept < size.depth and self._random.random() < self.right:
                kept += 1
            drafts.append(full_draft(size))
            verdicts.append(Verdict(tuple(range(1, kept + 1)), (0,) * (kept + 1)))
        self.controller.take(
            [size] * self.together,
            drafts,
            verdicts,
            drafting * noise[0],
            verifying * noise[1],
            self.together,
            self.together * (1 + size.nodes),
            self.others,
        )
        return sum(len(v.tokens) for v in verdicts) / self.together, drafting + verifying

    def speed(self, rounds: int) -> float:
        """Return tokens per second relative to plain decoding."""
        tokens, seconds = (sum(part) for part in zip(*(self.round() for _ in range(rounds)), strict=True))
        return tokens / seconds * self.seconds(DraftBudget.chain(0))[1]

    def best(self) -> float:
        """Return the speed of the best fixed draft size."""
        found = []
        for size in self.controller.sizes:
            tokens = sum(self.right**depth for depth in range(size.depth + 1))
            found.append(tokens / sum(self.seconds(size)))
        return max(found) * self.seconds(DraftBudget.chain(0))[1]


@cover(
    most=[DraftBudget.chain(5), DraftBudget.chain(12), DraftBudget(7, 4, 2), DraftBudget(24, 6, 4)],
    per_row=[0.0, 0.03, 0.2],
    per_level=[0.01, 0.1, 0.5],
    right=[0.0, 0.3, 0.6, 0.9],
)
def test_it_comes_close_to_the_best_fixed_size_and_never_much_below_none(
    most: DraftBudget, per_row: float, per_level: float, right: float
) -> None:
    world = World(most, per_row, per_level, right)
    speed = world.speed(600)
    assert speed > 0.84 * world.best()
    assert speed > 0.95, "what it learns once is paid for once"
    assert world.speed(600) > 0.97


class Mixture(World):
    """Passes of a mixture of experts, which spend most of their time reading the experts of their rows.

    Each row costs less than the row before it, and the first rows cost nearly as much as a pass.
    """

    count, used, share = 128, 8, 0.8

    def seconds(self, size: DraftBudget) -> tuple[float, float]:
        rows, one = self.together * (size.nodes + 1), self.used / self.count
        return self.per_level * size.depth, 1 - self.share + self.share * (1 - (1 - one) ** rows) / one


@pytest.mark.parametrize("most", [DraftBudget.chain(5), DraftBudget.chain(12), DraftBudget(24, 6, 4)])
@pytest.mark.parametrize("right", [0.0, 0.6, 0.9])
def test_more_rows_are_known_to_read_more_experts(most: DraftBudget, right: float) -> None:
    world = Mixture(most, 0.0, 0.01, right)
    assert world.speed(100) > 0.85
    assert world.speed(600) > 0.96
    assert world.speed(600) > 0.95 * world.best()


def test_a_drafter_that_is_off_rests_for_most_rounds() -> None:
    world = World(DraftBudget.chain(5), per_row=0.1, per_level=0.5, right=0.0)
    world.speed(300)
    resting = sum(world.round() is not None and world.controller.last.resting for _ in range(400))
    assert resting > 0.8 * 400
    while not world.controller.last.resting:
        world.round()
    assert not world.controller.plan([RequestState(is_new=True)], 1).resting, "another text may be easier to guess"


def test_it_gives_up_and_comes_back() -> None:
    world = World(DraftBudget.chain(5), per_row=0.02, per_level=0.3, right=0.9)
    world.speed(50)
    assert sum(world.sizes[-10:]) >= 20
    world.right = 0.0
    world.speed(200)
    assert world.speed(200) > 0.97
    world.right = 0.9
    world.speed(400)
    assert sum(world.sizes[-10:]) >= 20


@pytest.mark.parametrize("per_level", [0.3, 3.0])
def test_trying_costs_little_of_the_time_whatever_a_draft_costs(per_level: float) -> None:
    world = World(DraftBudget.chain(5), per_row=0.0, per_level=per_level, right=0.0)
    world.speed(100)
    assert 0.99 < world.speed(3000) < 0.9995, "it never stops trying"


def test_a_size_that_was_measured_in_a_bad_moment_is_measured_again() -> None:
    world = World(DraftBudget.chain(12), per_row=0.2, per_level=0.5, right=0.9)
    world.speed(200)
    for rows in (4, 5, 7):
        for _ in range(9):
            world.controller._passes[False].add(rows, 6.0, world.controller._round)
    world.speed(200)
    assert world.speed(200) > 0.9 * world.best()


def test_large_batches_get_shorter_drafts() -> None:
    """If every row costs time, sixteen requests draft less than one. Each batch size is estimated separately."""
    world = World(DraftBudget.chain(5), per_row=0.05, per_level=0.01, right=0.5)
    world.speed(100)
    alone = world.sizes[-20:]
    world.together = 16
    world.speed(100)
    assert sum(world.sizes[-20:]) < sum(alone)
    world.together = 1
    world.speed(20)
    assert sum(world.sizes[-20:]) > 0.7 * sum(alone)


def test_sizes_go_from_nothing_to_all() -> None:
    assert Driven(DraftBudget(24, 6, 4)).sizes == [
        DraftBudget.chain(0),
        DraftBudget(4, 1, 4),
        DraftBudget(8, 2, 4),
        DraftBudget(16, 4, 4),
        DraftBudget(24, 6, 4),
    ]
    assert Driven(DraftBudget(7, 7, 3)).sizes[1:] == [DraftBudget(n, d, 3) for n, d in ((3, 1), (4, 2), (6, 4), (7, 7))]
    assert Driven(DraftBudget.chain(5)).sizes == [DraftBudget.chain(n) for n in (0, 1, 2, 3, 5)]
    assert Driven(DraftBudget.chain(0)).sizes == [DraftBudget.chain(0)]
    assert Driven(DraftBudget(7, 0, 3)).sizes == [DraftBudget.chain(0)]
    assert {Driven(DraftBudget.chain(0)).choose() for _ in range(9)} == {DraftBudget.chain(0)}


def test_a_new_text_ends_a_pause_in_drafting() -> None:
    """A decision not to draft holds for some rounds of the same texts."""
    world = World(DraftBudget.chain(4), 0.0, 0.01, 0.9)
    world.speed(100)
    world.right = 0.0
    for _ in range(300):
        world.speed(1)
        if world.controller._round < world.controller._rest:
            break
    assert world.controller.choose(fresh=1).nodes > 0


def test_the_end_of_a_text_does_not_count_as_a_rejection() -> None:
    """A draft that EOS or the length limit truncated was not wrong."""
    controller = Driven(DraftBudget.chain(4))
    for _ in range(30):
        size = controller.choose()
        rows = 1 + size.nodes
        controller.take([size], [Draft.chain((0,) * size.nodes)], [Verdict((), (0,), "eos")], 0.1, 1.0, 1, rows)
    assert controller.choose() == DraftBudget.chain(4)


def test_tokens_that_a_budget_left_out_do_not_count_as_wrong() -> None:
    """A chain of 4 that is cut to 1 at the end of a block gives no information about the second token."""
    controller = Driven(DraftBudget.chain(4))
    for _ in range(60):
        controller.choose()
        controller.take([DraftBudget.chain(1)], [Draft.chain((0,))], [Verdict((1,), (0, 0))], 0.1, 1.0, 1, 2)
    assert controller.choose() == DraftBudget.chain(4)


def late(ahead: int) -> DraftBudget:
    """Return the choices for a reply to a prompt of 1,000 tokens that the drafter reads at 10 ms per token."""
    controller = Driven(DraftBudget.chain(4))
    for turn in range(60):
        # At first few tokens, to estimate the cost of many.
        behind = 40 if turn < 10 else 1000 if turn % 10 == 0 else 3
        size = controller.choose(unread=behind, written=100)
        kept = tuple(range(1, size.nodes))
        seconds = (0.05 * size.nodes + 0.01 * behind) if size.nodes else 0.0
        draft, verdict = Draft.chain((0,) * size.nodes), Verdict(kept, (0, *kept))
        controller.take([size], [draft], [verdict], seconds, 1.0, 1, 1 + size.nodes)
    return controller.choose(unread=1000, left=ahead, written=100)


def test_catching_up_with_a_prompt_must_pay_within_what_is_left_to_write() -> None:
    assert late(ahead=8).nodes == 0
    assert late(ahead=64).nodes >= 3


def test_the_first_measurement_warms_up_and_odd_ones_hardly_count() -> None:
    seen = FadingMean()
    seen.add(50.0, 1)
    assert not seen.known
    for round, seconds in enumerate((4.0, 1.0, 1.1, 40.0, 0.9, 1.0, 1.1, 1.0), 2):
        seen.add(seconds, round)
    assert 0.9 < seen.value < 1.15


def test_after_a_pause_the_new_measurement_counts_most() -> None:
    seen = FadingMean()
    for round in range(20):
        seen.add(2.0, round)
    seen.add(1.0, 20)
    assert seen.value > 1.8
    seen.add(1.0, 400)
    assert seen.value < 1.1


def test_an_outlier_after_the_first_measurement_is_ignored() -> None:
    curve = Curve(slope=0.1)
    for seconds in (2.5, 9.0):
        curve.add(8, seconds, 1)
    assert curve.at(8) == 2.5


def test_a_small_pass_never_costs_more_than_a_larger_pass() -> None:
    curve = Curve(slope=0.1)
    for size, seconds in ((4, 9.0), (8, 2.0), (16, 4.0)):
        curve.add(size, 10.0, 1)
        curve.add(size, seconds, 2)
    assert [curve.at(size) for size in (4, 6, 8, 12, 16)] == [2.0, 2.0, 2.0, 3.0, 4.0]
    assert curve.at(2) == pytest.approx(2.0 * 1.2 / 1.4)
    assert curve.at(20) == pytest.approx(4.0 * 3.0 / 2.6)


def test_a_target_that_verifies_only_chains_teaches_costs_too() -> None:
    """The cache limits the trees of such a target to chains."""
    controller = Driven(DraftBudget(7, 7, 3))
    for _ in range(20):
        size = DraftBudget.chain(controller.choose().depth)
        draft, verdict = Draft.chain((0,) * size.nodes), Verdict((), (0,))
        controller.take([size], [draft], [verdict], 0.2 * size.depth, 1.0, 1, 1 + size.nodes)
    assert controller._costs_of(1).drafting.known


def accepted_chain(controller: Driven, rows: int, seconds: float) -> None:
    """Run a round whose chain is accepted, with a pass of `rows` rows that takes this time."""
    controller.choose()
    verdict = Verdict(tuple(range(1, rows)), (0,) * rows)
    controller.take([DraftBudget.chain(rows - 1)], [Draft.chain((0,) * (rows - 1))], [verdict], 0.1, seconds, 1, rows)


def test_a_pass_that_was_not_measured_lately_is_expected_to_take_longer_if_other_passes_do() -> None:
    controller = Driven(DraftBudget.chain(4))
    for count, rows, slowness in ((20, 1, 1.0), (20, 5, 1.0), (40, 5, 2.0)):
        for _ in range(count):
            accepted_chain(controller, rows, slowness * (0.95 + 0.05 * rows))
    plain, drafted = (controller._passes[False].at(rows) * controller._slowness for rows in (1, 5))
    assert drafted == pytest.approx(2.4, rel=0.1)
    assert plain > 1.3, "1.0 was measured, but the machine is slower now"
    assert plain < drafted


def test_noise_does_not_change_what_an_unmeasured_pass_is_expected_to_take() -> None:
    """Passes of one row are measured only at the beginning, and 300 noisy rounds of other passes follow."""
    controller, dice = Driven(DraftBudget.chain(4)), random.Random(0)
    for turn in range(320):
        rows = 1 if turn < 20 else dice.choice((3, 4, 5))
        accepted_chain(controller, rows, (0.9 + 0.1 * rows) * (0.85 + 0.3 * dice.random()))
    plain, drafted = (controller._passes[False].at(rows) for rows in (1, 4))
    assert plain / drafted == pytest.approx(1 / 1.3, rel=0.1)


def test_requests_without_drafts_do_not_prevent_learning() -> None:
    """Two requests share rounds, and one of them has no drafts. The other's drafts are still right or wrong."""
    for right, expected in ((True, 6), (False, 0)):
        controller = Driven(DraftBudget.chain(6))
        sizes = []
        for _ in range(400):
            size = controller.choose(2)
            sizes.append(size.nodes)
            kept = size.nodes if right else 0
            drafts, verdicts = [Draft.chain((0,) * size.nodes)], [Verdict(tuple(range(1, kept + 1)), (0,) * (kept + 1))]
            rows = 2 + size.nodes
            controller.take([size], drafts, verdicts, 0.01 * size.nodes, 1.0 + 0.05 * rows, 2, rows)
        assert sizes[-100:].count(expected) > 80, sizes[-100:]


def test_a_round_that_yields_no_token_does_not_stop_later_rounds() -> None:
    """One of two parts that share rounds draws, and the reply fails, either in the first round or after many."""
    for rounds in (0, 50):
        world = World(DraftBudget.chain(6), 0.02, 0.1, 0.8)
        world.others = 1
        for _ in range(rounds):
            world.round()
        for others in (0, 0, 3, 0):
            world.controller.choose(1)
            world.controller.take([], [], [], 0.0, 1.0, 1, 4, others)
        assert world.speed(300) > 1.1


def test_a_stopped_clock_does_not_stop_the_controller() -> None:
    controller = Driven(DraftBudget.chain(4))
    for _ in range(40):
        size = controller.choose()
        verdict = Verdict((), (0,))
        controller.take([size], [Draft.chain((0,) * size.nodes)], [verdict], 0.0, 0.0, 1, 1 + size.nodes)
        assert controller.last.price <= 1.0


@pytest.mark.parametrize("most", [DraftBudget(8, 4), DraftBudget(4, 8)])
def test_a_chain_has_one_node_for_each_level(most: DraftBudget) -> None:
    assert Driven(most).sizes[-1] == DraftBudget.chain(4)
    assert World(most, 0.02, 0.1, 0.8).speed(200) > 1.1


class Uneven(World):
    """Drafters that stop early: a chain begins with probability `begins` and continues with probability `goes_on`.

    The levels of a batch are drafted together. Lookups lengthen chains by `more`.
    """

    begins, goes_on, more = 1.0, 1.0, 0

    def round(self) -> tuple[float, float]:
        size, dice = self.controller.choose(self.together), self._random.random
        own, kept = [], []
        for _ in range(self.together):
            length = int(size.depth > 0 and dice() < self.begins)
            while 0 < length < size.depth and dice() < self.goes_on:
                length += 1
            own.append(length)
        drafts = [Draft.chain((0,) * (n + (self.more if n else 0))) for n in own]
        drafts = [replace(draft, lengthened=len(draft.tokens) - n) for draft, n in zip(drafts, own, strict=True)]
        for draft in drafts:
            right = 0
            while right < len(draft.tokens) and (self.more or dice() < self.right):
                right += 1
            kept.append(right)
        verdicts = [Verdict(tuple(range(1, n + 1)), (0,) * (n + 1)) for n in kept]
        rows = self.together + sum(len(draft.tokens) for draft in drafts)
        drafting = self.per_level * max(1, *own) if size.depth else 0.0
        verifying = 1.0 + self.per_row * (rows - self.together) / self.together
        seconds = drafting * (1 + 0.05 * dice()), verifying * (1 + 0.05 * dice())
        self.controller.take([size] * self.together, drafts, verdicts, *seconds, self.together, rows)
        return 1 + sum(kept) / self.together, drafting + verifying


def test_tokens_that_lookups_add_are_not_credited_to_the_drafter() -> None:
    """Chains of two levels that lookups extend to twelve tokens do not reduce the estimated cost of a level."""
    world = Uneven(DraftBudget.chain(8), 0.03, 0.15, 0.42)
    world.goes_on, world.more = 0.0, 10
    world.speed(200)
    world.goes_on, world.more = 1.0, 0
    world.speed(20)
    assert world.speed(300) > 1.05


@pytest.mark.parametrize("per_level", [0.3, 0.6])
def test_drafting_nothing_takes_time_too(per_level: float) -> None:
    """The drafter usually has no draft, but runs a pass to find out."""
    world = Uneven(DraftBudget.chain(4), 0.03, per_level, 0.9)
    world.begins = 0.3
    world.speed(100)
    assert world.speed(500) > 0.97


@pytest.mark.parametrize(("per_level", "goes_on", "right", "least"), [(0.3, 0.6, 0.75, 1.27), (0.15, 0.5, 0.6, 1.33)])
def test_a_batch_drafts_as_long_as_its_longest_chain(
    per_level: float, goes_on: float, right: float, least: float
) -> None:
    world = Uneven(DraftBudget.chain(8), 0.03, per_level, right, together=8)
    world.goes_on = goes_on
    world.speed(100)
    assert world.speed(500) > least


def caught_up(asked: int, together: int) -> float:
    """Return the estimated cost of a token of catching up. It takes 0.1 ms, and a level takes 1 ms."""
    controller = Driven(DraftBudget.chain(8))
    for turn in range(200):
        late = turn > 40 and turn % 4 == 0
        count = asked if late else together
        behind = count * (1000 if late else 2)
        size = controller.choose(together, behind, written=5000, asked=count)
        kept = tuple(range(1, size.nodes + 1))
        drafts, verdicts = [Draft.chain((0,) * size.nodes)] * count, [Verdict(kept, (0, *kept))] * count
        seconds = 0.001 * size.nodes + (0.0001 * behind if size.nodes else 0.0)
        controller.take([size] * count, drafts, verdicts, seconds, 0.01, together, together + count * size.nodes)
    return controller._catch_up.value


@pytest.mark.parametrize(("asked", "together"), [(8, 8), (4, 8), (1, 8), (1, 16)])
def test_the_cost_of_catching_up_does_not_depend_on_the_batch(asked: int, together: int) -> None:
    """Some requests of the batch are new and do not wait for drafts yet."""
    assert caught_up(asked, together) == pytest.approx(0.0001, rel=0.3)


def test_rounds_that_only_read_a_part_teach_what_reading_costs_and_nothing_else() -> None:
    controller, whole = Driven(DraftBudget.chain(8)), 0
    for turn in range(200):
        whole = 1000 if turn in (40, 80, 120) else max(0, whole - 100)
        size = controller.choose(unread=2 + whole, written=5000)
        read, kept = min(whole, 100), tuple(range(1, size.nodes + 1))
        left = whole - read if size.nodes else 0
        draft = Draft(unread=left) if left else Draft.chain((0,) * size.nodes)
        verdict = Verdict((), (0,)) if left else Verdict(kept, (0, *kept))
        seconds = 0.0001 * read + (0.001 * size.nodes if not left else 0.0)
        controller.take([size], [draft], [verdict], seconds, 0.01, 1, 1 + len(draft.tokens))
    assert controller._catch_up.value == pytest.approx(0.0001, rel=0.3)
    assert controller._accepted.probabilities(controller._round)[8] > 0.8


def test_a_try_that_read_a_part_of_the_backlog_is_charged_for_that_part() -> None:
    saved = []
    for left in (0, 900):
        controller = Driven(DraftBudget.chain(1))
        controller._catch_up = FadingMean(0.001)
        controller.choose(unread=1000)
        controller.last = replace(controller.last, size_index=1, best_index=0, is_try=True, savings=0.0)
        controller.take([DraftBudget.chain(1)], [Draft(unread=left)], [Verdict((), (0,))], 0.1, 0.01, 1, 1)
        saved.append(controller._saved)
    assert saved[1] - saved[0] == pytest.approx(900 * 0.001)


@pytest.mark.parametrize("together", [1, 4])
def test_the_pace_counts_all_requests_at_the_best_size(together: int) -> None:
    world = World(DraftBudget.chain(4), 0.02, 0.1, 0.9, together)
    assert world.controller.last.pace == 0.0
    world.speed(100)
    tokens, seconds = (sum(part) for part in zip(*(world.round() for _ in range(100)), strict=True))
    assert world.controller.last.pace == pytest.approx(together * tokens / seconds, rel=0.25)
