"""Draft length control: choose the draft size with the highest throughput, given the measured costs and acceptance.

The cost model. A round of B requests with drafts of size s takes T(s) seconds and yields E(s) tokens per request:

    E(s) = sum of P(d) over depths d from 0 to depth(s),    P(d) = a(1) * ... * a(d)
    T(s) = V(rows) + D(depth(s)),                           T(nothing) = V(B)

- a(d) is the probability that a round which reached depth d - 1 also reaches depth d (`_AcceptanceByDepth`). It is
  estimated as (k + F u) / (n + F), where n recent rounds reached depth d - 1 and k of them also reached depth d. The
  weight of recent rounds shrinks by the factor M per round, and to 0 when a new text begins. u(d) is the drafter's
  long-term share: the mean over its latest H rounds and W imaginary rounds with the value u(d - 1).
- V is the time of a pass as a function of its rows. D is the time of drafting as a function of its depth and the number
  of drafts. Both are interpolated between measurements, and never decrease as the size grows (`Curve`).
- A machine's speed drifts. Measured times are divided by the machine's current slowness before they are stored, so that
  times from different moments can be compared. The slowness follows the ratio of measured to expected times of passes.
- A draft may end before its limit. The probability L(d) that it reaches depth d is measured like P. V and D for a limit
  are means over L. In a batch, D follows the deepest draft, which reaches depth d with probability 1 - (1 - L(d))^B.

The best size has the lowest T(s) / E(s). If the drafter must first read q tokens of a request's text (its backlog), it
drafts only if that pays: (T(nothing) - T(best) / E(best)) * r > R B C q. C is the measured time per token of backlog,
for which all B requests wait. r is the expected number of remaining tokens: either the rest of a reply of usual length
or the number of tokens written so far, whichever is greater, but at most the length limit.

Trying another size loses an expected T(s) - E(s) * T(best) / E(best) seconds. A share S of all time is saved up for
such tries. Another size is tried when these savings cover its expected loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from paceline.engine.cost_model import Curve, FadingMean
from paceline.types import Draft, DraftBudget, Verdict
from paceline.verify.tree import depths, own_depth

_DECAY, _PAUSE_DECAY = 0.97, 0.99
"""M: Factor by which the weight of a round's acceptance shrinks for each later round with a draft, and for each later
round without one. Old rounds count less, because texts change."""
_USUAL_ROUNDS = 500.0
"""H: Number of rounds over which a drafter's usual acceptance is averaged."""
_PRIOR = 0.6
"""Prior probability that a drafted token is accepted. The prior probability that a token is drafted, if the budget
allows it, is 1."""
_PRIOR_WEIGHT = 5.0
"""W: Weight of the prior in the usual acceptance, in rounds."""
_USUAL_WEIGHT = 1.5
"""F: Weight of the usual acceptance in the estimate for a text, in rounds. It is small, because texts differ a lot."""
_TRY_SHARE = 0.005
"""S: Share of the time that may be lost by trying sizes other than the best one."""
_EARLY_ROUNDS, _EARLY_TRY_SHARE = 1000, 0.01
"""Number of early rounds that have a higher S, and that S. It keeps a first text with low acceptance from deciding the
size for long."""
_MIN_TRY_GAP, _LONG_GAP = 4, 8
"""Minimum number of rounds between two tries. A decision to draft nothing holds for `_MIN_TRY_GAP` rounds at first, and
for `_LONG_GAP` rounds if it is repeated."""
_MIN_FIRST_DRAFTS = 2
"""Number of drafts of the smallest size before larger sizes are tried, because the cost is unknown and the first draft
includes warm-up."""
_MIN_RETRY_GAP = 16
"""Minimum number of rounds before a smaller size is tried again. The results of larger sizes already imply most of its
result."""
_PRIOR_REPLY_LENGTH = 64
"""Expected length of a reply, in tokens, as long as no reply has ended."""
_SHORT_REPLY = 24
"""Length of a short reply, in tokens. As long as a drafter has not been measured, a reply that may be short does not
wait for the drafter to read the prompt if that takes longer than a plain round."""
_PRIOR_ROW_COST, _PRIOR_LEVEL_COST, _PRIOR_BACKLOG_COST = 0.03, 2.0, 0.04
"""Assumed relative costs, used until they have been measured: of each row of a pass, of each level of drafting, and of
each token of backlog (as a share of a pass with one row)."""
_PRICED_ROWS = 7
"""Number of drafted rows over which the cost of a row is averaged. The first rows cost less than later ones."""
_READING_MARGIN = 1.3
"""R: Minimum ratio of the expected saving to the time of catching up. It is above 1, because many replies end early."""
_SPEED_SHARE = 0.15
"""After a pass, the slowness changes by this share of the relative difference between measured and expected time."""
_MAX_SPEED_RATIO = 1.5
"""Maximum ratio of measured to expected time. Its inverse is the minimum."""
_SPEED_DECAY = 0.99
"""Exponent that pulls the slowness back towards 1 after each such pass. Otherwise noise would accumulate."""
_LARGE_BACKLOG = 32
"""Backlog size, in tokens, at which catching up dominates drafting time."""


class _AcceptanceByDepth:
    """Acceptance by depth: the share of rounds that reach depth d + 1 among the rounds that reach depth d.

    The estimate relies on recent rounds first, and then on all rounds of this drafter. For a depth that was hardly ever
    reached, it relies on the depth before it.
    """

    def __init__(self, depth: int, prior: float) -> None:
        # For each depth: weighted number of recent rounds that reached it, and of those that went one level deeper,
        # number of rounds in the long-term mean (at most `_USUAL_ROUNDS`), and the long-term mean.
        self._reached, self._kept, self._rounds, self._usual = ([0.0] * depth for _ in range(4))
        self._prior = prior
        # Increase the weight of new rounds instead of reducing the weights of all older rounds.
        self._unit, self._round = 1.0, 0
        self._probabilities: list[float] = []
        self._fade = 1.0

    def probabilities(self, round: int, new: float = 0.0) -> list[float]:
        """Return the probabilities that a round reaches depth 0, 1, ... `new`: Like the `share` of `forget`, but only
        for this call."""
        fade = (1.0 - new) * _PAUSE_DECAY ** max(0, round - self._round - 1)
        if not self._probabilities or fade != self._fade:
            self._probabilities, self._fade = self._expect(max(1e-9, fade)), fade
        return self._probabilities

    def add(self, came: int, depth: int, weight: float, round: int) -> None:
        """Count a round that reached depth `came`, where `depth` was the maximum."""
        self._age(_DECAY**weight * _PAUSE_DECAY ** max(0, round - self._round - 1))
        self._round = round
        for d in range(min(depth, came + 1, len(self._kept))):
            hit = float(d < came)
            self._reached[d] += weight * self._unit
            self._kept[d] += weight * self._unit * hit
            self._rounds[d] = min(self._rounds[d] + weight, _USUAL_ROUNDS)
            self._usual[d] += weight * (hit - self._usual[d]) / self._rounds[d]
        self._probabilities = []

    def forget(self, share: float) -> None:
        """Reduce the weight of recent rounds. `share`: Share of the texts that have just begun."""
        self._age(1.0 - share)
        self._probabilities = []

    def _age(self, fade: float) -> None:
        self._unit /= max(fade, 1e-9)
        if self._unit > 1e9:
            self._reached, self._kept = ([x / self._unit for x in line] for line in (self._reached, self._kept))
            self._unit = 1.0

    def _expect(self, fade: float) -> list[float]:
        probability, share, usual_weight = 1.0, self._prior, _USUAL_WEIGHT * self._unit / fade
        found = [probability]
        for reached, kept, rounds, usual in zip(self._reached, self._kept, self._rounds, self._usual, strict=True):
            share = (rounds * usual + _PRIOR_WEIGHT * share) / (rounds + _PRIOR_WEIGHT)
            probability *= (kept + usual_weight * share) / (reached + usual_weight)
            found.append(probability)
        return found


class _BatchCosts:
    """The costs of drafting for a certain number of requests.

    `drafting` holds the seconds of drafting by the depth of the deepest draft in the batch, which is 0 if there was
    nothing to draft. `relative` holds the cost of a pass with drafts, relative to a pass without drafts, by the mean
    depth of the drafts.
    """

    def __init__(self, asked: int, sizes: Sequence[DraftBudget]) -> None:
        self.drafting = Curve(slope=_PRIOR_LEVEL_COST)
        self.nodes = [next(s.nodes for s in sizes if s.depth >= depth) for depth in range(sizes[-1].depth + 1)]
        """Maximum number of nodes of a draft, by its depth."""
        self.relative = [FadingMean(1.0 + _PRIOR_ROW_COST * asked * nodes) for nodes in self.nodes]
        """Cost of a pass with drafts, relative to a pass without drafts. It is measured if `seen` is True, and
        otherwise a guess."""
        self.seen = [False] * len(self.nodes)
        self.tried, self.tries = [0] * len(sizes), [0] * len(sizes)
        """For each size, the latest round that used it, and the number of rounds that used it."""


class RequestState(NamedTuple):
    """The data about a request, before a round, that a controller needs.

    Attributes:
        unread: Number of tokens of the request's text that the drafter has not read.
        remaining: Maximum number of tokens that may follow.
        written: Number of tokens of the reply so far.
        is_new: True if the controller has not learned from any round of this request yet.
    """

    unread: int = 0
    remaining: int = 1 << 30
    written: int = 0
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A controller's decision for one round. It has no effect until `Controller.learn` receives it.

    Attributes:
        budgets: One budget for each request.
        price: See `Ask`.
        pace: See `Ask`.
        asked: Expected number of requests that get a draft.
        size_index: Index of the chosen size.
        best_index: Index of the size that seems best.
        is_try: True if the chosen size is a try. Its expected loss has been taken from the savings.
        savings: Seconds of savings that remain for other tries.
        plain: Expected seconds of a round without drafts.
        new_share: Share of the round's requests that have just begun.
        resting: True if the controller rests: during a pause, it drafts nothing and computes no estimates.
    """

    budgets: Sequence[DraftBudget]
    price: float = 0.0
    pace: float = 0.0
    asked: int = 1
    size_index: int = 0
    best_index: int = 0
    is_try: bool = False
    savings: float = 0.0
    plain: float = 0.0
    new_share: float = 0.0
    resting: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one round for one controller.

    `requests`, `budgets`, `drafts` and `verdicts` have one entry for each request for which the plan was carried out.

    Attributes:
        plan: The controller's plan.
        requests: State of each request before the round.
        budgets: The planned budget of each request, reduced to what the request could use.
        drafts: The draft of each request.
        verdicts: The verdict of each request.
        drafting: Seconds that drafting took.
        verifying: Seconds that the rest of the round took.
        together: Number of requests in the whole round.
        rows: Number of rows in the whole round.
        resumed: True if the pass began at the layer where drafting stopped (early exit).
        other_tokens: Number of tokens that were committed for requests whose draft came from another part of a cascade.
        ended_lengths: Lengths of the replies that ended, in tokens.
    """

    plan: DraftPlan
    requests: Sequence[RequestState]
    budgets: Sequence[DraftBudget]
    drafts: Sequence[Draft]
    verdicts: Sequence[Verdict]
    drafting: float
    verifying: float
    together: int
    rows: int
    resumed: bool = False
    other_tokens: int = 0
    ended_lengths: Sequence[int] = ()


class Controller:
    """Chooses a draft size for every round, from nothing to the drafter's maximum.

    `plan` decides without side effects, and `learn` receives the outcome. The controller measures the target's passes
    by number of rows, drafting by size, and acceptance by depth. It then chooses the size with the highest throughput.
    A small share of the time (`_TRY_SHARE`) is spent on trying other sizes. Before a try, its expected loss is saved
    up. This bounds the total loss, and sizes with a small expected loss are tried often. Measurements are kept across
    requests. The controller affects the speed of a text, never its content.
    """

    def __init__(self, maximum: DraftBudget, free: bool = False, reads_prompt: bool = True) -> None:
        """Make a controller.

        Args:
            maximum: See `DrafterPart.draft`.
            free: See `DrafterPart`.
            reads_prompt: See `DrafterPart`.
        """
        self.free, self.reads_prompt = free, reads_prompt and not free
        if maximum.branch == 1:
            maximum = maximum.as_chain()
        self.sizes: list[DraftBudget] = _sizes(maximum)
        """The draft sizes to choose from, from no draft to `maximum`."""
        self._depths = [size.depth for size in self.sizes]
        # The likeliest tokens at a depth are the same in drafts of any size, so all sizes share their acceptance.
        self._accepted = _AcceptanceByDepth(maximum.depth, _PRIOR)
        # A draft ends early if the text is hard to predict. Like its acceptance, its depth therefore depends on the
        # text.
        self._drafted = _AcceptanceByDepth(maximum.depth, 1.0)
        # A pass that resumes at the layer where drafting stopped (early exit) takes less time for the same rows.
        self._passes = {False: Curve(slope=_PRIOR_ROW_COST), True: Curve(slope=_PRIOR_ROW_COST)}
        self._resumed = False
        # Seconds per token of backlog, and mean length of a reply in tokens.
        self._catch_up = FadingMean(0.0)
        self._length = FadingMean(_PRIOR_REPLY_LENGTH)
        # Mean number of tokens per round: of the requests for which this controller chose a size, and of all requests.
        self._own, self._all = FadingMean(1.0), FadingMean(1.0)
        self._batch_costs: dict[int, _BatchCosts] = {}
        self._round = self._last_try = self._rest = 0
        """Three rounds, counted from 1: the latest round, the latest try, and the last round of the current pause."""
        self._pause = _MIN_TRY_GAP
        """Length of the next pause, in rounds."""
        self._slowness = 1.0
        """Current time of a pass relative to its usual time. Measured times are divided by it before they are
        stored."""
        self._saved = 0.0
        """Seconds that have been saved up for tries."""
        self._plain = 0.0
        """Expected seconds of a round without drafts."""

    # Plan

    def plan(self, requests: Sequence[RequestState], together: int) -> DraftPlan:
        """Return a plan with budgets for these requests, in a round of `together` requests.

        If the drafter has a backlog for a request, the request gets a budget only if drafting pays off within its
        remaining tokens. During a pause, the plan is to rest, and no estimates are computed.
        """
        new = sum(request.is_new for request in requests) / together
        if not requests or (not new and self.resting):
            return DraftPlan([self.sizes[0]] * len(requests), resting=True)
        # Expect other parts of a cascade to draft for some of the requests, as often as they did in recent rounds.
        asked = max(1, round(len(requests) * self._share))
        costs, known = self._costs_of(asked), self._passes[False].known
        seconds, tokens = self._seconds(costs, together, asked, new), self._tokens(new)
        paces = [s / t for s, t in zip(seconds, tokens, strict=True)]
        best = paces.index(min(paces))
        # While the drafter catches up with one request, all requests of the round wait.
        wait = together * self._catch_up.value
        paying = [
            (paces[0] - paces[best]) * self._ahead(r) > _READING_MARGIN * wait * r.unread
            and (costs.drafting.known or r.written >= _SHORT_REPLY or wait * r.unread <= seconds[0])
            for r in requests
        ]
        best = best if any(paying) else 0
        # The loss of a try includes the time that the drafter takes to catch up.
        debt = wait * sum(request.unread for request in requests) / len(requests)
        losses = [s - t * paces[best] + debt for s, t in zip(seconds, tokens, strict=True)]
        losses[0] -= debt
        at, saved = self._try(best, losses, costs) if known else (0, self._saved)
        tried = known and at != best
        if at > 1 and not costs.drafting.known and costs.tries[1] < _MIN_FIRST_DRAFTS:
            at = 1
        budgets = [self.sizes[at if pays or tried else 0] for pays in paying]
        pace = together / (paces[best] * self._slowness) if known else 0.0
        price = self._price(together) * paces[0] / paces[best]
        return DraftPlan(budgets, price, pace, asked, at, best, tried, saved, seconds[0], new)

    @property
    def _share(self) -> float:
        """Share of all tokens that was generated for requests for which this controller chose a size."""
        return min(1.0, self._own.value / self._all.value)

    def _ahead(self, request: RequestState) -> float:
        """Return the expected number of remaining tokens that drafts can speed up. A reply that is already long is
        expected to double its length."""
        likely = max(self._length.value - request.written, request.written)
        return min(request.remaining, likely) * self._share

    def _price(self, together: int) -> float:
        """Return the mean cost of adding a row to every request (`together` rows in all), relative to a pass without
        drafts. It is 0 until a pass has been measured."""
        passes = self._passes[False]
        if not passes.known:
            return 0.0
        drafted = passes.at((1 + _PRICED_ROWS) * together)
        return min(1.0, max(0.0, drafted / passes.at(together) - 1.0) / _PRICED_ROWS)

    def _try(self, best: int, losses: Sequence[float], costs: _BatchCosts) -> tuple[int, float]:
        """Return the index of the size to use, and the remaining savings. It is the best size, or another size if a try
        is due."""
        now = self._round + 1
        due = [at for at in range(best) if now - costs.tried[at] >= _MIN_RETRY_GAP]
        found = min((*due, *range(best + 1, len(losses))), key=losses.__getitem__, default=best)
        # Cap the savings at the loss of the next try, so that they never pay for a series of tries.
        loss = max(losses[found], 0.0)
        saved = min(self._saved, loss)
        if found == best or saved < loss or now - self._last_try < _MIN_TRY_GAP:
            return best, saved
        return found, 0.0

    # Learn

    def learn(self, outcome: Outcome) -> None:
        """Learn from the outcome of a plan, and count the round."""
        if outcome.plan.new_share:
            self._begin(outcome.plan.new_share)
        own = sum(len(verdict.tokens) for verdict in outcome.verdicts)
        if outcome.plan.resting and outcome.drafts:
            self.rest(own, outcome.ended_lengths, outcome.other_tokens)
            return
        self._count_tokens(own, outcome.ended_lengths, outcome.other_tokens)
        if not outcome.drafts:
            return
        self._round += 1
        outcome = self._at_usual_speed(outcome)
        self._count(outcome)
        self._learn_pass(outcome)
        if outcome.plan.size_index:
            self._learn_drafts(outcome)

    @property
    def resting(self) -> bool:
        """True during a pause without drafts. A new text ends the pause."""
        return self._round < self._rest

    def rest(self, own: int, ended: Sequence[int], others: int = 0) -> None:
        """Count a round of a pause. `own`: Number of tokens of this controller's requests. `Outcome` describes the
        other arguments."""
        self._count_tokens(own, ended, others)
        self._round += 1
        self._save(self._plain)

    def _count_tokens(self, own: int, ended: Sequence[int], others: int) -> None:
        for length in ended:
            self._length.add(length, self._round)
        # If there are no tokens, all requests failed, and the round says nothing about later rounds.
        if own + others:
            self._own.add(own, self._round)
            self._all.add(own + others, self._round)

    def _at_usual_speed(self, outcome: Outcome) -> Outcome:
        """Update the machine's slowness, and return the outcome with the times that it would have at the usual
        speed."""
        passes = self._passes[outcome.resumed]
        if passes.measured(outcome.rows):
            ratio = outcome.verifying / (self._slowness * passes.at(outcome.rows))
            ratio = min(max(ratio, 1.0 / _MAX_SPEED_RATIO), _MAX_SPEED_RATIO)
            self._slowness = (self._slowness * (1.0 + _SPEED_SHARE * (ratio - 1.0))) ** _SPEED_DECAY
        drafting, verifying = outcome.drafting / self._slowness, outcome.verifying / self._slowness
        return replace(outcome, drafting=drafting, verifying=verifying)

    def _count(self, outcome: Outcome) -> None:
        """Apply a plan that was carried out: its try, its savings, and the pause after a decision to draft nothing."""
        plan, costs = outcome.plan, self._costs_of(outcome.plan.asked)
        self._rest, self._plain, self._saved = self._round, plan.plain, plan.savings
        if plan.is_try:
            self._last_try = self._round
            # The loss of the try included reading the whole backlog. Give back the part that was not read.
            left = sum(draft.unread for draft in outcome.drafts) / len(outcome.drafts)
            self._saved += outcome.together * self._catch_up.value * left
        if plan.best_index:
            self._pause = _MIN_TRY_GAP
        elif self._passes[False].known:
            self._rest += self._pause - 1
            self._pause = _LONG_GAP
        costs.tried[plan.size_index] = self._round
        costs.tries[plan.size_index] += 1

    def _begin(self, share: float) -> None:
        """Expect the drafter's usual acceptance from texts that have just begun. `share`: Their share of all texts."""
        self._rest, self._pause = self._round, _MIN_TRY_GAP
        self._accepted.forget(share)
        self._drafted.forget(share)

    def _learn_pass(self, outcome: Outcome) -> None:
        self._save(outcome.drafting + outcome.verifying)
        self._passes[outcome.resumed].add(outcome.rows, outcome.verifying, self._round)
        if not self._catch_up.value and self._passes[False].known and self.reads_prompt:
            self._catch_up = FadingMean(_PRIOR_BACKLOG_COST * self._passes[False].at(1))

    def _learn_drafts(self, outcome: Outcome) -> None:
        budgets, drafts = outcome.budgets, outcome.drafts
        if all(budget.depth == self._depths[outcome.plan.size_index] for budget in budgets):
            # Do not learn costs from rounds with drafts that had to be shallower at the end of a text or cache block.
            self._learn_costs(outcome)
        for budget, draft, verdict in zip(budgets, drafts, outcome.verdicts, strict=True):
            if verdict.path:
                self._rest, self._pause = self._round, _MIN_TRY_GAP
            if verdict.finish is None and not draft.unread:
                depth = min(own_depth(draft), budget.depth)
                self._accepted.add(min(len(verdict.path), depth), budget.depth, 1.0, self._round)
                self._drafted.add(depth, budget.depth, 1.0, self._round)

    def _save(self, seconds: float) -> None:
        """Set a share of a round's time aside for tries."""
        self._saved += (_TRY_SHARE if self._round > _EARLY_ROUNDS else _EARLY_TRY_SHARE) * seconds

    def _learn_costs(self, outcome: Outcome) -> None:
        """Learn the costs of drafting and of the pass. If the drafter also read a large backlog, its time is used only
        to learn the cost of reading."""
        drafts, resumed, limit = outcome.drafts, outcome.resumed, self._depths[outcome.plan.size_index]
        reading = sum(draft.unread for draft in drafts)
        costs = self._costs_of(outcome.plan.asked)
        nodes = sum(len(draft.tokens) for draft in drafts) / len(drafts)
        depth = round(sum(max(depths(draft.parents)) for draft in drafts) / len(drafts))
        if not reading and depth <= limit:
            whole = self._passes[resumed].at(outcome.together * (1.0 + nodes))
            costs.relative[depth].add(whole / self._passes[False].at(outcome.together), self._round)
            costs.seen[depth] = True
        if nodes:
            self._resumed = resumed
        depth = min(max(map(own_depth, drafts)), limit)
        level, read = costs.drafting, sum(request.unread for request in outcome.requests) - reading
        if not reading and read < _LARGE_BACKLOG * len(drafts):
            level.add(depth, outcome.drafting, self._round)
        else:
            known = level.at(depth) if level.known else 0.0
            self._catch_up.add(max(0.0, outcome.drafting - known) / max(read, 1), self._round)

    # Estimates

    def _costs_of(self, asked: int) -> _BatchCosts:
        # Under load, the number of requests varies. Numbers that round up to the same power of two share measurements.
        asked = 1 << (asked - 1).bit_length()
        if asked not in self._batch_costs:
            self._batch_costs[asked] = _BatchCosts(asked, self.sizes)
        return self._batch_costs[asked]

    def _seconds(self, costs: _BatchCosts, together: int, asked: int, new: float) -> list[float]:
        """Return the expected seconds of a round for each size. `new`: Share of the texts that have just begun."""
        passes, first = self._passes[self._resumed], self._passes[False].at(together)
        measured = zip(costs.relative[1:], costs.seen[1:], costs.nodes[1:], strict=True)
        verifying = [
            first,
            *(first * cost.value if seen else passes.at(together * (1 + nodes)) for cost, seen, nodes in measured),
        ]
        # If only some of the requests get drafts, scale the cost up as if all requests did.
        known, share = costs.drafting.known, together / asked
        drafting = [share * costs.drafting.at(depth) if known else 0.0 for depth in range(len(verifying))]
        # A draft may end early. Each level is drafted for all requests together, so the deepest draft decides the cost
        # of drafting.
        probabilities = self._drafted.probabilities(self._round + 1, new)
        verifying = self._by_size(verifying, probabilities)
        drafting = self._by_size(drafting, [1.0 - (1.0 - probability) ** asked for probability in probabilities])
        return [first, *(pass_ + draft for pass_, draft in zip(verifying[1:], drafting[1:], strict=True))]

    def _by_size(self, costs: Sequence[float], probabilities: Sequence[float]) -> list[float]:
        """Return the expected cost for each size.

        Args:
            costs: Cost of a draft, by depth.
            probabilities: Probability that a draft reaches each depth.
        """
        ended = [
            0.0,
            *accumulate((a - b) * cost for a, b, cost in zip(probabilities, probabilities[1:], costs, strict=False)),
        ]
        return [ended[depth] + probabilities[depth] * costs[depth] for depth in self._depths]

    def _tokens(self, new: float) -> list[float]:
        """Return the expected number of tokens per round for each size. `new`: See `_seconds`."""
        tokens = [*accumulate(self._accepted.probabilities(self._round + 1, new))]
        return [tokens[depth] for depth in self._depths]


def _sizes(maximum: DraftBudget) -> list[DraftBudget]:
    """Return the draft sizes from no draft to `maximum`. Each has two thirds of the depth of the next one. Its nodes
    are reduced in proportion, but leave room for a path with two siblings."""
    if not min(maximum.nodes, maximum.depth):
        return [DraftBudget.chain(0)]
    limits = [maximum.depth]
    while limits[0] > 1:
        limits.insert(0, limits[0] * 2 // 3)
    sizes = [
        maximum.within(depth, max(depth + min(maximum.branch - 1, 2), -(-maximum.nodes * depth // maximum.depth)))
        for depth in limits
    ]
    return [DraftBudget.chain(0), *sizes]
