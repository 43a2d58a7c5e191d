"""Draft length control: the size with the most tokens per second, by the measured cost and acceptance of rounds.

The model. A round of B requests whose drafts have size s takes T(s) seconds and yields E(s) tokens per request:

    E(s) = sum of P(d) over depths d from 0 to depth(s),    P(d) = a(1) * ... * a(d)
    T(s) = V(rows) + D(depth(s)),                           T(nothing) = V(B)

- a(d), the chance that a round which came to depth d - 1 comes to depth d (`_Depths`): (k + F u) / (n + F), from n
  recent rounds that came so far, of which k went on. Recent rounds fade by M per round, and entirely where a new text
  begins. u is the drafter's usual share: the mean of its latest H rounds, with W more that equal u(d - 1).
- V, seconds of a pass by its rows, and D, seconds of drafting by its depth and the number of drafts (`Curve`):
  interpolated between measurements, which never say that a larger size costs less. What a size costs above a pass
  without drafts is measured by itself, as a ratio, since a machine's speed drifts.
- A chain may end before its limit. L(d), the chance that it becomes d long, is measured like P; V and D of a limit are
  means over L, and in a batch D follows the longest chain, whose chance is 1 - (1 - L(d))^B.

The best size has the least T(s) / E(s). A request with u tokens that the drafter has not read is drafted for only if
that pays: (T(nothing) - T(best) / E(best)) * r > B C u, with C the measured seconds per token of catching up. r is the
number of tokens expected from here on: the rest of a usual reply, or as many as were written if that is more, and no
more than may follow.

Trying another size is expected to lose T(s) - E(s) * T(best) / E(best) seconds. A share S of all time is saved up, and
a try is due when it can be paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from paceline.engine.cost_model import Curve, Fading
from paceline.types import Draft, DraftBudget, Verdict

_MEMORY, _PAUSED = 0.97, 0.99
"""Decay of a round's acceptance per later round with a draft, since texts change, and per later round without."""
_HISTORY = 500.0
"""Rounds over which a drafter's usual acceptance is averaged."""
_PRIOR = 0.6
"""Prior acceptance of a drafted token. That a token is drafted at all, where there is room, is certain before it is
measured."""
_PRIOR_WEIGHT = 5.0
"""Rounds that the prior weighs in the usual acceptance."""
_FAITH = 1.5
"""Rounds that the usual acceptance weighs among those of a text: texts differ more than drafts of one text."""
_OTHER_SIZE = 0.2
"""Weight of a round for trees of other sizes, which accept more or less."""
_SHARE = 0.005
"""Share of the time that may be lost to trying sizes other than the best."""
_EARLY, _EARLY_SHARE = 1000, 0.01
"""`_SHARE` of the first rounds, so that a first text with low acceptance does not settle the size."""
_GAP, _LONG_GAP = 4, 8
"""Least rounds between two such tries, and rounds for which a decision to draft nothing stands; then when it is
repeated."""
_FIRST = 2
"""Drafts of the smallest size before larger ones: the price of a draft is unknown, and the first one warms up."""
_SOON = 16
"""Rounds until a smaller size is tried again: larger sizes already imply most of its result."""
_AHEAD = 64
"""Tokens of a reply that are expected at first."""
_ROW, _LEVEL, _TOKEN = 0.03, 2.0, 0.04
"""Relative cost of one more row in a pass, of one more level in drafting and, to a plain pass, of one token of catching
up, until enough is measured."""
_LATE = 32
"""Tokens of catching up from which on drafting is visibly slower."""


class _Depths:
    """How deep rounds get: of those that came to depth d, the share that came to d + 1.

    Estimated from recent rounds, then from all of this drafter's, then, at a depth that was hardly ever reached, from
    the depth above.
    """

    def __init__(self, depth: int, prior: float) -> None:
        self._reached, self._kept, self._rounds, self._usual = ([0.0] * depth for _ in range(4))
        self._prior = prior
        # The weight of a new round grows, instead of all older ones being scaled down.
        self._unit, self._round = 1.0, 0
        self._chances: list[float] = []
        self._fade = 1.0

    def chances(self, round: int, new: float = 0.0) -> list[float]:
        """Return the chance that a round comes to depth 0, 1, ... `new`: as in `forget`, for this time."""
        fade = (1.0 - new) * _PAUSED ** max(0, round - self._round - 1)
        if not self._chances or fade != self._fade:
            self._chances, self._fade = self._expect(max(1e-9, fade)), fade
        return self._chances

    def add(self, came: int, depth: int, weight: float, round: int) -> None:
        """Count a round that came to depth `came`, of the `depth` that it could come to."""
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
        """Let recent rounds count less by this share, that of texts which have just begun."""
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
    """Costs of drafting for so many requests: seconds by depth, that of the longest chain of a batch (0: there was
    nothing to draft), and the cost of a pass relative to one without drafts, by the mean length of chains or the size
    of trees."""

    def __init__(self, asked: int, sizes: Sequence[DraftBudget]) -> None:
        self.drafting = Curve(slope=_LEVEL)
        chains = sizes[-1].branch == 1
        nodes = range(sizes[-1].nodes + 1) if chains else [size.nodes for size in sizes]
        self.relative = [Fading(1.0 + _ROW * asked * n) for n in nodes]
        """Cost of a pass, that of one without drafts being 1; measured where `seen`."""
        self.seen = [False] * len(nodes)
        self.tried, self.tries = [0] * len(sizes), [0] * len(sizes)
        """By size: the round that took it last, and how many have."""


class Standing(NamedTuple):
    """A request before a round, as a controller sees it.

    `unread`: tokens of its text that the drafter has not read. `left`: the most tokens that may follow. `written`:
    tokens of the reply so far. `fresh`: True until the controller has learned from a round of this request.
    """

    unread: int = 0
    left: int = 1 << 30
    written: int = 0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A controller's decision for one round, which changes nothing until `Controller.learn` receives it.

    `budgets`: one for each request. `price`, `pace`: see `Ask`. `asked`: requests that are expected to be drafted for.
    `at`: number of the size. `best`: number of the size that seems best. `tried`: True if the size is a try, which has
    been paid for. `saved`: seconds that are left for other tries.
    `plain`: seconds that a round without drafts is expected to take. `new`: share of the round's
    requests whose text begins. `resting`: True in a pause, in which nothing is drafted.
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

    `plan`: the controller's own. `requests`, `budgets`, `drafts`, `verdicts`: of the requests that the plan was carried
    out for; a budget is the part of the plan's that the request could use. `drafting`, `verifying`: seconds of drafting
    and of the rest of the round. `together`, `rows`: requests and rows of the whole round. `resumed`: True if the pass
    began where drafting had stopped. `others`: tokens of requests that another part of a cascade drafted for. `ended`:
    lengths of the replies that ended.
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

    It has two doors: `plan` decides and changes nothing, `learn` takes the outcome. It measures target passes by rows,
    drafting by size and acceptance by depth, and takes the size with the most tokens per second. A small share of the
    time (`_SHARE`) goes into trying other sizes: the expected loss of a try is saved up first, so that the worst case
    is bounded and a promising size is tried often. Measurements outlive requests. It affects the speed of a text, never
    its content.
    """

    def __init__(self, maximum: DraftBudget, free: bool = False, reads_prompt: bool = True) -> None:
        """`maximum`, `free`, `reads_prompt`: see `Part`."""
        self.free, self.reads_prompt = free, reads_prompt and not free
        if maximum.branch == 1:
            maximum = DraftBudget.chain(min(maximum.nodes, maximum.depth))
        self.sizes: list[DraftBudget] = _sizes(maximum)
        """From nothing to `maximum`."""
        self._depths = [size.depth for size in self.sizes]
        # Chains of all lengths begin alike and share their acceptance; a smaller tree is accepted less often.
        self._chains = maximum.branch == 1
        rates = _Depths(maximum.depth, _PRIOR)
        self._rates = [rates if self._chains else _Depths(size.depth, _PRIOR) for size in self.sizes]
        # Chains end early where the text is hard to guess: their cost goes with the text, as their acceptance does.
        self._drafted = _Depths(maximum.depth, 1.0)
        # A pass that resumes where drafting stopped (early exit) costs less than its rows.
        self._passes = {False: Curve(slope=_ROW), True: Curve(slope=_ROW)}
        self._resumed = False
        self._catch_up = Fading(0.0)
        self._length = Fading(_AHEAD)
        # Tokens of a round: of the requests that it chose for, and of all.
        self._own, self._all = Fading(1.0), Fading(1.0)
        self._batch_costs: dict[int, _BatchCosts] = {}
        self._round = self._last_try = self._rest = 0
        """The latest round; that of the last try; the last one of a pause, in which nothing is drafted."""
        self._pause = _GAP
        """Rounds that the next pause takes."""
        self._saved = 0.0
        """Seconds saved up for tries."""
        self._plain = 0.0
        """Seconds that a round without drafts is expected to take."""

    # The first door

    def plan(self, requests: Sequence[Standing], together: int) -> DraftPlan:
        """Return budgets for these requests of a round of `together` requests.

        A request that would have to catch up gets a budget only if that pays within the tokens that it has left. While
        a decision to draft nothing stands, the plan is to rest, which takes no time to find out.
        """
        new = sum(request.fresh for request in requests) / together
        if not requests or (not new and self._round < self._rest):
            return DraftPlan([self.sizes[0]] * len(requests), resting=True)
        # Other parts of a cascade draft for some of the requests, about as often as lately.
        asked = max(1, round(len(requests) * self._share))
        costs, known = self._costs_of(asked), self._passes[False].known
        seconds, tokens = self._seconds(costs, together, asked, new), self._tokens(new)
        paces = [s / t for s, t in zip(seconds, tokens, strict=True)]
        best = paces.index(min(paces))
        # All requests of the round wait while one of them catches up.
        wait = together * self._catch_up.value
        paying = [(paces[0] - paces[best]) * self._ahead(r) > wait * r.unread for r in requests]
        best = best if any(paying) else 0
        # A try has to pay for catching up at once.
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
        """The share of the tokens that belong to requests that it chose for."""
        return min(1.0, self._own.value / self._all.value)

    def _ahead(self, request: Standing) -> float:
        """Return the tokens of a reply that drafts are expected to help with. A reply that has gone on for long is
        expected to go on for as long again."""
        likely = max(self._length.value - request.written, request.written)
        return min(request.left, likely) * self._share

    def _price(self, together: int) -> float:
        """Return the cost of one more row in a round of `together` requests, in tokens of plain decoding: a node less
        likely to be accepted does not pay. 0 until something is measured."""
        passes = self._passes[False]
        if not passes.known:
            return 0.0
        plain = passes.at(together)
        return min(1.0, max(0.0, passes.at(2 * together) / plain - 1.0))

    def _try(self, best: int, losses: Sequence[float], costs: _BatchCosts) -> tuple[int, float]:
        """Return the best size, or another one when a try is due; and the savings that are left."""
        now = self._round + 1
        due = [at for at in range(best) if now - costs.tried[at] >= _SOON]
        found = min((*due, *range(best + 1, len(losses))), key=losses.__getitem__, default=best)
        # Savings are capped at the next try's cost, so that they never pay for many tries at once.
        loss = max(losses[found], 0.0)
        saved = min(self._saved, loss)
        if found == best or saved < loss or now - self._last_try < _GAP:
            return best, saved
        return found, 0.0

    # The second door

    def learn(self, outcome: Outcome) -> None:
        """Learn from the outcome of a plan, and count the round."""
        if outcome.plan.new:
            self._begin(outcome.plan.new)
        for length in outcome.ended:
            self._length.add(length, self._round)
        own = sum(len(verdict.tokens) for verdict in outcome.verdicts)
        # A round without any tokens says nothing about later ones: its requests failed.
        if own + outcome.others:
            self._own.add(own, self._round)
            self._all.add(own + outcome.others, self._round)
        if not outcome.drafts:
            return
        self._round += 1
        if outcome.plan.resting:
            self._save(self._plain)
            return
        self._count(outcome)
        self._learn_pass(outcome)
        if outcome.plan.at:
            self._learn_drafts(outcome)

    def _count(self, outcome: Outcome) -> None:
        """Count a plan as carried out: its tries, its savings, and the pause that follows a decision to draft
        nothing."""
        plan, costs = outcome.plan, self._costs_of(outcome.plan.asked)
        self._rest, self._plain, self._saved = self._round, plan.plain, plan.saved
        if plan.tried:
            self._last_try = self._round
        if plan.best:
            self._pause = _GAP
        elif self._passes[False].known:
            self._rest += self._pause - 1
            self._pause = _LONG_GAP
        costs.tried[plan.at] = self._round
        costs.tries[plan.at] += 1

    def _begin(self, share: float) -> None:
        """Expect of texts that begin, a share of all, what is usual."""
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
            # Not from drafts cut short by the end of a text or of a cache block.
            self._learn_costs(outcome)
        for budget, draft, verdict in zip(budgets, drafts, outcome.verdicts, strict=True):
            if verdict.path:
                self._rest, self._pause = self._round, _GAP
            if verdict.finish is None:
                self._learn_acceptance(min(len(verdict.path), draft.own), budget.depth, outcome.plan.at)
                if self._chains:
                    self._drafted.add(min(draft.own, budget.depth), budget.depth, 1.0, self._round)

    def _save(self, seconds: float) -> None:
        """Save up for tries, of a round's time."""
        self._saved += (_SHARE if self._round > _EARLY else _EARLY_SHARE) * seconds

    def _learn_costs(self, outcome: Outcome) -> None:
        """Learn what drafting and the pass took. Drafting that had to catch up counts for the cost of that alone."""
        drafts, resumed, at = outcome.drafts, outcome.resumed, outcome.plan.at
        costs, depth = self._costs_of(outcome.plan.asked), self._depths[at]
        mean = sum(len(draft.tokens) for draft in drafts) / len(drafts)
        place = round(mean) if self._chains else at
        if not self._chains or place <= depth:
            whole = self._passes[resumed].at(outcome.together * (1.0 + mean))
            costs.relative[place].add(whole / self._passes[False].at(outcome.together), self._round)
            costs.seen[place] = True
        if mean:
            self._resumed = resumed
        if self._chains:
            depth = min(max(draft.own for draft in drafts), depth)
        level, unread = costs.drafting, sum(request.unread for request in outcome.requests)
        if unread < _LATE * len(drafts):
            level.add(depth, outcome.drafting, self._round)
        else:
            known = level.at(depth) if level.known else 0.0
            self._catch_up.add(max(0.0, outcome.drafting - known) / unread, self._round)

    def _learn_acceptance(self, accepted: int, depth: int, at: int) -> None:
        if self._chains:
            self._rates[0].add(accepted, depth, 1.0, self._round)
            return
        for other, rates in enumerate(self._rates[1:], 1):
            rates.add(accepted, depth, 1.0 if other == at else _OTHER_SIZE, self._round)

    # Estimates

    def _costs_of(self, asked: int) -> _BatchCosts:
        # Batch sizes vary under load: those up to the next power of two share their measurements.
        asked = 1 << (asked - 1).bit_length()
        if asked not in self._batch_costs:
            self._batch_costs[asked] = _BatchCosts(asked, self.sizes)
        return self._batch_costs[asked]

    def _seconds(self, costs: _BatchCosts, together: int, asked: int, new: float) -> list[float]:
        """Return the expected seconds of a round, by size. `new`: the share of requests whose text begins."""
        passes, first = self._passes[self._resumed], self._passes[False].at(together)
        nodes, depths = [size.nodes for size in self.sizes], self._depths
        if self._chains:
            nodes = depths = [*range(depths[-1] + 1)]
        measured = zip(costs.relative[1:], costs.seen[1:], nodes[1:], strict=True)
        verifying = [
            first,
            *(first * cost.value if seen else passes.at(together * (1 + count)) for cost, seen, count in measured),
        ]
        # Drafts for some of the requests are judged as if all had them, at as much more.
        known, share = costs.drafting.known, together / asked
        drafting = [share * costs.drafting.at(depth) if known else 0.0 for depth in depths]
        if self._chains:
            # A chain ends where it does not pay to go on. Levels are drafted for all requests at once, and end with
            # the longest chain.
            chances = self._drafted.chances(self._round + 1, new)
            verifying = self._of_chains(verifying, chances)
            drafting = self._of_chains(drafting, [1.0 - (1.0 - chance) ** asked for chance in chances])
        return [first, *(pass_ + draft for pass_, draft in zip(verifying[1:], drafting[1:], strict=True))]

    def _of_chains(self, costs: Sequence[float], chances: Sequence[float]) -> list[float]:
        """Return the expected cost by size. `costs`: by length. `chances`: that a chain becomes that long."""
        ended = [0.0, *accumulate((a - b) * cost for a, b, cost in zip(chances, chances[1:], costs, strict=False))]
        return [ended[depth] + chances[depth] * costs[depth] for depth in self._depths]

    def _tokens(self, new: float) -> list[float]:
        """Return the expected tokens of a round, by size. `new`: as in `_seconds`."""
        if self._chains:
            tokens = [*accumulate(self._rates[0].chances(self._round + 1, new))]
            return [tokens[depth] for depth in self._depths]
        # A larger tree is accepted no less often than a smaller one, whatever chance has shown.
        return [*accumulate((sum(rates.chances(self._round + 1, new)) for rates in self._rates), max)]


def _sizes(maximum: DraftBudget) -> list[DraftBudget]:
    """Return sizes from nothing to `maximum`: each chain two thirds of the next longer one, each tree half of the next
    larger one."""
    sizes = [maximum]
    while sizes[0].nodes > 1:
        nodes = sizes[0].nodes * 2 // 3 if maximum.branch == 1 else sizes[0].nodes // 2
        sizes.insert(0, maximum.within(min(maximum.depth, nodes), nodes))
    return sizes if not maximum.nodes else [DraftBudget.chain(0), *sizes]
