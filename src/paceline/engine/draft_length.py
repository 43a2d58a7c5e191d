"""Draft length control: choose the draft size with the highest throughput, from the measured costs and acceptance.

The model. A round of B requests with drafts of size s takes T(s) seconds and yields E(s) tokens per request:

    E(s) = sum of P(d) over depths d from 0 to depth(s),    P(d) = a(1) * ... * a(d)
    T(s) = V(rows) + D(depth(s)),                           T(nothing) = V(B)

- a(d) is the probability that a round which reached depth d - 1 also reaches depth d (`_Depths`). It is estimated as
  (k + F u) / (n + F), where n recent rounds reached depth d - 1 and k of them also reached depth d. Recent rounds fade
  by M per round, and completely when a new text begins. u is the drafter's usual share: the mean of its latest H
  rounds and of another W rounds with the value u(d - 1).
- V is the time of a pass as a function of its rows. D is the time of drafting as a function of its depth and the number
  of drafts. Both are interpolated between measurements and never decrease with the size (`Curve`). The additional cost
  of a pass with drafts is measured separately, as a ratio to a pass without drafts, since a machine's speed drifts.
- A chain may end before its limit. The probability L(d) that it reaches length d is measured like P. V and D of a limit
  are means over L. In a batch, D follows the longest chain, which reaches length d with probability 1 - (1 - L(d))^B.

The best size has the lowest T(s) / E(s). If the drafter has a backlog of q tokens for a request, it drafts only if that
pays: (T(nothing) - T(best) / E(best)) * r > B C q. C is the measured time per token of backlog. r is the expected
number of remaining tokens: the rest of a reply of usual length or the tokens written so far, whichever is greater, up
to the length limit.

Trying another size has an expected loss of T(s) - E(s) * T(best) / E(best) seconds. A share S of all time is saved up
for this, and another size is tried when the savings cover the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from paceline.engine.cost_model import Curve, Fading
from paceline.types import Draft, DraftBudget, Verdict

_MEMORY, _PAUSED = 0.97, 0.99
"""M: Decay of a round's acceptance per later round with a draft, since texts change, and per later round without."""
_HISTORY = 500.0
"""H: Number of rounds over which a drafter's usual acceptance is averaged."""
_PRIOR = 0.6
"""Prior acceptance of a drafted token. The prior probability that a token is drafted, if the budget allows it, is 1."""
_PRIOR_WEIGHT = 5.0
"""W: Weight of the prior in the usual acceptance, in rounds."""
_FAITH = 1.5
"""F: Weight of the usual acceptance in a text's acceptance, in rounds. It is small, since texts differ a lot."""
_OTHER_SIZE = 0.2
"""Weight of a round for trees of other sizes, since their acceptance differs."""
_SHARE = 0.005
"""S: Share of the time that may be lost by trying sizes other than the best."""
_EARLY, _EARLY_SHARE = 1000, 0.01
"""Number of first rounds with a higher S, and this S, so that a first text with low acceptance does not decide the size
for long."""
_GAP, _LONG_GAP = 4, 8
"""`_GAP` is the minimum number of rounds between two tries. A decision to draft nothing holds for `_GAP` rounds at
first, and for `_LONG_GAP` rounds if it is repeated."""
_FIRST = 2
"""Number of drafts of the smallest size before larger sizes, since the cost is unknown and the first draft warms up."""
_SOON = 16
"""Number of rounds before a smaller size is tried again. Larger sizes already imply most of its result."""
_AHEAD = 64
"""Expected length of a reply, in tokens, until replies have ended."""
_SHORT = 24
"""Length of a short reply, in tokens. Until a drafter has been measured, a reply that may be short does not wait for it
to read the prompt, if this takes longer than a plain round."""
_ROW, _LEVEL, _TOKEN = 0.03, 2.0, 0.04
"""Relative costs until they are measured: of each row of a pass, of each level of drafting, and of each token of
backlog as a share of a plain pass."""
_LATE = 32
"""Backlog size, in tokens, at which catching up dominates drafting time."""


class _Depths:
    """Acceptance by depth: the share of rounds that reach depth d + 1 among the rounds that reach depth d.

    The estimate uses recent rounds first, then all rounds of this drafter, and, for a depth that was hardly ever
    reached, the depth above it.
    """

    def __init__(self, depth: int, prior: float) -> None:
        self._reached, self._kept, self._rounds, self._usual = ([0.0] * depth for _ in range(4))
        self._prior = prior
        # Instead of scaling down all older rounds, increase the weight of new rounds.
        self._unit, self._round = 1.0, 0
        self._chances: list[float] = []
        self._fade = 1.0

    def chances(self, round: int, new: float = 0.0) -> list[float]:
        """Return the probabilities that a round reaches depth 0, 1, ... `new`: See `forget`, but only for this call."""
        fade = (1.0 - new) * _PAUSED ** max(0, round - self._round - 1)
        if not self._chances or fade != self._fade:
            self._chances, self._fade = self._expect(max(1e-9, fade)), fade
        return self._chances

    def add(self, came: int, depth: int, weight: float, round: int) -> None:
        """Count a round that reached depth `came`, with `depth` as its maximum."""
        self._age(_MEMORY**weight * _PAUSED ** max(0, round - self._round - 1))
        self._round = round
        for d in range(min(depth, came + 1, len(self._kept))):
            hit = float(d < came)
            self._reached[d] += weight * self._unit
            self._kept[d] += weight * self._unit * hit
            self._rounds[d] = min(self._rounds[d] + weight, _HISTORY)
            self._usual[d] += weight * (hit - self._usual[d]) / self._rounds[d]
        self._chances = []

    def forget(self, share: float) -> None:
        """Reduce the weight of recent rounds. `share`: The share of texts that have just begun."""
        self._age(1.0 - share)
        self._chances = []

    def _age(self, fade: float) -> None:
        self._unit /= max(fade, 1e-9)
        if self._unit > 1e9:
            self._reached, self._kept = ([x / self._unit for x in line] for line in (self._reached, self._kept))
            self._unit = 1.0

    def _expect(self, fade: float) -> list[float]:
        chance, share, faith = 1.0, self._prior, _FAITH * self._unit / fade
        found = [chance]
        for reached, kept, rounds, usual in zip(self._reached, self._kept, self._rounds, self._usual, strict=True):
            share = (rounds * usual + _PRIOR_WEIGHT * share) / (rounds + _PRIOR_WEIGHT)
            chance *= (kept + faith * share) / (reached + faith)
            found.append(chance)
        return found


class _BatchCosts:
    """Costs of drafting for a certain number of requests.

    `drafting` holds the seconds by depth. For chains, this is the depth of the longest chain in the batch, which is 0
    if there was nothing to draft. `relative` holds the cost of a pass relative to a pass without drafts, by the mean
    length of chains or by the number of the tree's size.
    """

    def __init__(self, asked: int, sizes: Sequence[DraftBudget]) -> None:
        self.drafting = Curve(slope=_LEVEL)
        chains = sizes[-1].branch == 1
        nodes = range(sizes[-1].nodes + 1) if chains else [size.nodes for size in sizes]
        self.relative = [Fading(1.0 + _ROW * asked * n) for n in nodes]
        """Cost of a pass relative to a pass without drafts. It has been measured if `seen` is True."""
        self.seen = [False] * len(nodes)
        self.tried, self.tries = [0] * len(sizes), [0] * len(sizes)
        """By size: the last round that used it, and the number of rounds that did."""


class Standing(NamedTuple):
    """The state of a request before a round, as far as a controller needs it.

    Attributes:
        unread: Number of tokens of its text that the drafter has not read.
        left: Maximum number of tokens that may follow.
        written: Number of tokens of the reply so far.
        fresh: True until the controller has learned from a round of this request.
    """

    unread: int = 0
    left: int = 1 << 30
    written: int = 0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A controller's decision for one round. It has no effect until `Controller.learn` receives it.

    Attributes:
        budgets: One budget for each request.
        price: See `Ask`.
        pace: See `Ask`.
        asked: Number of requests that are expected to get a draft.
        at: Number of the chosen size.
        best: Number of the size that seems best.
        tried: True if the size is a try, whose expected loss has been taken from the savings.
        saved: Seconds that remain saved for other tries.
        plain: Expected seconds of a round without drafts.
        new: Share of the round's requests whose text has just begun.
        resting: True in a pause without drafts.
    """

    budgets: Sequence[DraftBudget]
    price: float = 0.0
    pace: float = 0.0
    asked: int = 1
    at: int = 0
    best: int = 0
    tried: bool = False
    saved: float = 0.0
    plain: float = 0.0
    new: float = 0.0
    resting: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one round for one controller.

    `requests`, `budgets`, `drafts` and `verdicts` have one entry for each request that the plan was carried out for.

    Attributes:
        plan: The controller's plan.
        requests: State of each request before the round.
        budgets: The part of the planned budget that each request could use.
        drafts: The draft of each request.
        verdicts: The verdict of each request.
        drafting: Seconds of drafting.
        verifying: Seconds of the rest of the round.
        together: Number of requests in the whole round.
        rows: Number of rows in the whole round.
        resumed: True if the pass began at the layer where drafting stopped (early exit).
        others: Number of tokens committed for requests that got their draft from another part of a cascade.
        ended: Lengths of the replies that ended, in tokens.
    """

    plan: DraftPlan
    requests: Sequence[Standing]
    budgets: Sequence[DraftBudget]
    drafts: Sequence[Draft]
    verdicts: Sequence[Verdict]
    drafting: float
    verifying: float
    together: int
    rows: int
    resumed: bool = False
    others: int = 0
    ended: Sequence[int] = ()


class Controller:
    """Chooses a draft size for every round, from nothing to the drafter's maximum.

    `plan` decides without side effects, and `learn` receives the outcome. The controller measures target passes by
    rows, drafting by size and acceptance by depth, and chooses the size with the highest throughput. A small share of
    the time (`_SHARE`) is spent on trying other sizes. The expected loss of a try is saved up first, which bounds the
    total loss and lets promising sizes be tried often. Measurements are kept across requests. The controller affects
    the speed of a text, never its content.
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
            maximum = DraftBudget.chain(min(maximum.nodes, maximum.depth))
        self.sizes: list[DraftBudget] = _sizes(maximum)
        """The sizes from nothing to `maximum`."""
        self._depths = [size.depth for size in self.sizes]
        # Chains of different lengths begin with the same tokens, so they share their acceptance. Smaller trees have
        # lower acceptance.
        self._chains = maximum.branch == 1
        rates = _Depths(maximum.depth, _PRIOR)
        self._rates = [rates if self._chains else _Depths(size.depth, _PRIOR) for size in self.sizes]
        # Chains end early if the text is hard to predict, so their length depends on the text, like their acceptance.
        self._drafted = _Depths(maximum.depth, 1.0)
        # A pass that resumes at the layer where drafting stopped (early exit) takes less time for the same rows.
        self._passes = {False: Curve(slope=_ROW), True: Curve(slope=_ROW)}
        self._resumed = False
        self._catch_up = Fading(0.0)
        self._length = Fading(_AHEAD)
        # Mean number of tokens per round, of the requests that this controller chose a size for, and of all requests.
        self._own, self._all = Fading(1.0), Fading(1.0)
        self._batch_costs: dict[int, _BatchCosts] = {}
        self._round = self._last_try = self._rest = 0
        """Number of the latest round, of the last try, and of the last round of the current pause without drafts."""
        self._pause = _GAP
        """Length of the next pause, in rounds."""
        self._saved = 0.0
        """Seconds saved up for tries."""
        self._plain = 0.0
        """Expected seconds of a round without drafts."""

    # Plan

    def plan(self, requests: Sequence[Standing], together: int) -> DraftPlan:
        """Return budgets for these requests in a round of `together` requests.

        If the drafter has a backlog for a request, it gets a budget only if drafting pays within its remaining tokens.
        During a pause, the plan is to rest, and nothing is computed.
        """
        new = sum(request.fresh for request in requests) / together
        if not requests or (not new and self.resting):
            return DraftPlan([self.sizes[0]] * len(requests), resting=True)
        # Other parts of a cascade are expected to draft for some of the requests, as often as in recent rounds.
        asked = max(1, round(len(requests) * self._share))
        costs, known = self._costs_of(asked), self._passes[False].known
        seconds, tokens = self._seconds(costs, together, asked, new), self._tokens(new)
        paces = [s / t for s, t in zip(seconds, tokens, strict=True)]
        best = paces.index(min(paces))
        # All requests of the round wait while the drafter catches up with one of them.
        wait = together * self._catch_up.value
        paying = [
            (paces[0] - paces[best]) * self._ahead(r) > wait * r.unread
            and (costs.drafting.known or r.written >= _SHORT or wait * r.unread <= seconds[0])
            for r in requests
        ]
        best = best if any(paying) else 0
        # The loss of a try includes the time to catch up.
        debt = wait * sum(request.unread for request in requests) / len(requests)
        losses = [s - t * paces[best] + debt for s, t in zip(seconds, tokens, strict=True)]
        losses[0] -= debt
        at, saved = self._try(best, losses, costs) if known else (0, self._saved)
        tried = known and at != best
        if at > 1 and not costs.drafting.known and costs.tries[1] < _FIRST:
            at = 1
        budgets = [self.sizes[at if pays or tried else 0] for pays in paying]
        pace = together / paces[best] if known else 0.0
        return DraftPlan(budgets, self._price(together), pace, asked, at, best, tried, saved, seconds[0], new)

    @property
    def _share(self) -> float:
        """Share of all tokens that belong to requests for which this controller chose a size."""
        return min(1.0, self._own.value / self._all.value)

    def _ahead(self, request: Standing) -> float:
        """Return the expected number of remaining tokens that drafts can speed up. A long reply is expected to double
        its length."""
        likely = max(self._length.value - request.written, request.written)
        return min(request.left, likely) * self._share

    def _price(self, together: int) -> float:
        """Return the cost of an additional row in a round of `together` requests, in tokens of plain decoding.

        A node whose probability of acceptance is lower does not pay. The price is 0 until a pass has been measured.
        """
        passes = self._passes[False]
        if not passes.known:
            return 0.0
        plain = passes.at(together)
        return min(1.0, max(0.0, passes.at(2 * together) / plain - 1.0))

    def _try(self, best: int, losses: Sequence[float], costs: _BatchCosts) -> tuple[int, float]:
        """Return the best size, or another size if a try is due, and the remaining savings."""
        now = self._round + 1
        due = [at for at in range(best) if now - costs.tried[at] >= _SOON]
        found = min((*due, *range(best + 1, len(losses))), key=losses.__getitem__, default=best)
        # Cap the savings at the cost of the next try, so that they never pay for a series of tries.
        loss = max(losses[found], 0.0)
        saved = min(self._saved, loss)
        if found == best or saved < loss or now - self._last_try < _GAP:
            return best, saved
        return found, 0.0

    # Learn

    def learn(self, outcome: Outcome) -> None:
        """Learn from the outcome of a plan, and count the round."""
        if outcome.plan.new:
            self._begin(outcome.plan.new)
        own = sum(len(verdict.tokens) for verdict in outcome.verdicts)
        if outcome.plan.resting and outcome.drafts:
            self.rest(own, outcome.ended, outcome.others)
            return
        self._count_tokens(own, outcome.ended, outcome.others)
        if not outcome.drafts:
            return
        self._round += 1
        self._count(outcome)
        self._learn_pass(outcome)
        if outcome.plan.at:
            self._learn_drafts(outcome)

    @property
    def resting(self) -> bool:
        """True in a pause without drafts. A new text ends it."""
        return self._round < self._rest

    def rest(self, own: int, ended: Sequence[int], others: int = 0) -> None:
        """Count a round of a pause. `own`: Number of tokens of this controller's requests. For the others see
        `Outcome`."""
        self._count_tokens(own, ended, others)
        self._round += 1
        self._save(self._plain)

    def _count_tokens(self, own: int, ended: Sequence[int], others: int) -> None:
        for length in ended:
            self._length.add(length, self._round)
        # If there are no tokens, all requests failed, and the round says nothing about later ones.
        if own + others:
            self._own.add(own, self._round)
            self._all.add(own + others, self._round)

    def _count(self, outcome: Outcome) -> None:
        """Apply a plan that was carried out: its try, its savings, and the pause after a decision to draft nothing."""
        plan, costs = outcome.plan, self._costs_of(outcome.plan.asked)
        self._rest, self._plain, self._saved = self._round, plan.plain, plan.saved
        if plan.tried:
            self._last_try = self._round
            # The loss of the try included reading the whole backlog.
            left = sum(draft.unread for draft in outcome.drafts) / len(outcome.drafts)
            self._saved += outcome.together * self._catch_up.value * left
        if plan.best:
            self._pause = _GAP
        elif self._passes[False].known:
            self._rest += self._pause - 1
            self._pause = _LONG_GAP
        costs.tried[plan.at] = self._round
        costs.tries[plan.at] += 1

    def _begin(self, share: float) -> None:
        """Expect the usual acceptance from texts that have just begun. `share`: Their share of all texts."""
        self._rest, self._pause = self._round, _GAP
        for depths in {*self._rates, self._drafted}:
            depths.forget(share)

    def _learn_pass(self, outcome: Outcome) -> None:
        self._save(outcome.drafting + outcome.verifying)
        self._passes[outcome.resumed].add(outcome.rows, outcome.verifying, self._round)
        if not self._catch_up.value and self._passes[False].known and self.reads_prompt:
            self._catch_up = Fading(_TOKEN * self._passes[False].at(1))

    def _learn_drafts(self, outcome: Outcome) -> None:
        budgets, drafts = outcome.budgets, outcome.drafts
        if all(budget == self.sizes[outcome.plan.at] for budget in budgets):
            # Skip drafts that were cut short by the end of a text or of a cache block.
            self._learn_costs(outcome)
        for budget, draft, verdict in zip(budgets, drafts, outcome.verdicts, strict=True):
            if verdict.path:
                self._rest, self._pause = self._round, _GAP
            if verdict.finish is None and not draft.unread:
                self._learn_acceptance(min(len(verdict.path), draft.own), budget.depth, outcome.plan.at)
                if self._chains:
                    self._drafted.add(min(draft.own, budget.depth), budget.depth, 1.0, self._round)

    def _save(self, seconds: float) -> None:
        """Save a share of a round's time for tries."""
        self._saved += (_SHARE if self._round > _EARLY else _EARLY_SHARE) * seconds

    def _learn_costs(self, outcome: Outcome) -> None:
        """Learn the costs of drafting and of the pass. If the drafter read much, its time only tells the cost of
        reading."""
        drafts, resumed, at = outcome.drafts, outcome.resumed, outcome.plan.at
        reading = sum(draft.unread for draft in drafts)
        costs, depth = self._costs_of(outcome.plan.asked), self._depths[at]
        mean = sum(len(draft.tokens) for draft in drafts) / len(drafts)
        place = round(mean) if self._chains else at
        if not reading and (not self._chains or place <= depth):
            whole = self._passes[resumed].at(outcome.together * (1.0 + mean))
            costs.relative[place].add(whole / self._passes[False].at(outcome.together), self._round)
            costs.seen[place] = True
        if mean:
            self._resumed = resumed
        if self._chains:
            depth = min(max(draft.own for draft in drafts), depth)
        level, read = costs.drafting, sum(request.unread for request in outcome.requests) - reading
        if not reading and read < _LATE * len(drafts):
            level.add(depth, outcome.drafting, self._round)
        else:
            known = level.at(depth) if level.known else 0.0
            self._catch_up.add(max(0.0, outcome.drafting - known) / max(read, 1), self._round)

    def _learn_acceptance(self, accepted: int, depth: int, at: int) -> None:
        if self._chains:
            self._rates[0].add(accepted, depth, 1.0, self._round)
            return
        for other, rates in enumerate(self._rates[1:], 1):
            rates.add(accepted, depth, 1.0 if other == at else _OTHER_SIZE, self._round)

    # Estimates

    def _costs_of(self, asked: int) -> _BatchCosts:
        # Batch sizes vary under load, so sizes up to the next power of two share their measurements.
        asked = 1 << (asked - 1).bit_length()
        if asked not in self._batch_costs:
            self._batch_costs[asked] = _BatchCosts(asked, self.sizes)
        return self._batch_costs[asked]

    def _seconds(self, costs: _BatchCosts, together: int, asked: int, new: float) -> list[float]:
        """Return the expected seconds of a round, by size. `new`: The share of texts that have just begun."""
        passes, first = self._passes[self._resumed], self._passes[False].at(together)
        nodes, depths = [size.nodes for size in self.sizes], self._depths
        if self._chains:
            nodes = depths = [*range(depths[-1] + 1)]
        measured = zip(costs.relative[1:], costs.seen[1:], nodes[1:], strict=True)
        verifying = [
            first,
            *(first * cost.value if seen else passes.at(together * (1 + count)) for cost, seen, count in measured),
        ]
        # If only some of the requests get drafts, scale the cost up as if all of them did.
        known, share = costs.drafting.known, together / asked
        drafting = [share * costs.drafting.at(depth) if known else 0.0 for depth in depths]
        if self._chains:
            # A chain may end early. Each level is drafted for all requests at once, so the longest chain decides the
            # cost of drafting.
            chances = self._drafted.chances(self._round + 1, new)
            verifying = self._of_chains(verifying, chances)
            drafting = self._of_chains(drafting, [1.0 - (1.0 - chance) ** asked for chance in chances])
        return [first, *(pass_ + draft for pass_, draft in zip(verifying[1:], drafting[1:], strict=True))]

    def _of_chains(self, costs: Sequence[float], chances: Sequence[float]) -> list[float]:
        """Return the expected cost by size.

        Args:
            costs: Cost of chains, by length.
            chances: Probability that a chain reaches a length, by length.
        """
        ended = [0.0, *accumulate((a - b) * cost for a, b, cost in zip(chances, chances[1:], costs, strict=False))]
        return [ended[depth] + chances[depth] * costs[depth] for depth in self._depths]

    def _tokens(self, new: float) -> list[float]:
        """Return the expected tokens of a round, by size. `new`: See `_seconds`."""
        if self._chains:
            tokens = [*accumulate(self._rates[0].chances(self._round + 1, new))]
            return [tokens[depth] for depth in self._depths]
        # A larger tree accepts at least as many tokens as a smaller one, even if measurements differ by chance.
        return [*accumulate((sum(rates.chances(self._round + 1, new)) for rates in self._rates), max)]


def _sizes(maximum: DraftBudget) -> list[DraftBudget]:
    """Return the sizes from nothing to `maximum`. Each chain has two thirds of the length of the next one. Each tree
    has half of the nodes of the next one."""
    sizes = [maximum]
    while sizes[0].nodes > 1:
        nodes = sizes[0].nodes * 2 // 3 if maximum.branch == 1 else sizes[0].nodes // 2
        sizes.insert(0, maximum.within(min(maximum.depth, nodes), nodes))
    return sizes if not maximum.nodes else [DraftBudget.chain(0), *sizes]
