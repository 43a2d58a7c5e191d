"""Draft length control: the size with the most tokens per second, by the measured cost and acceptance of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from paceline.engine.cost_model import Curve, Fading
from paceline.types import Draft, DraftBudget, Verdict

_MEMORY, _PAUSED = 0.97, 0.99
"""Decay of a round's acceptance per later round with a draft, since texts change, and per later round without."""
_STEP = 16
"""Rounds after which a pause is taken into account."""
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
"""Weight of a round for trees of other sizes."""
_SHARE = 0.005
"""Share of the time that may be lost to trying sizes other than the best."""
_EARLY, _EARLY_SHARE = 1000, 0.01
"""`_SHARE` of the first rounds, so that a first text with low acceptance does not settle the size."""
_GAP, _LONG_GAP = 4, 8
"""Least rounds between two such tries, and rounds for which a decision to draft nothing stands; then when it is
repeated."""
_FIRST = 2
"""Drafts of the smallest size before larger ones: the price of a draft is unknown, and the first one warms up."""
_SOON, _OFTEN = 16, 4
"""Rounds until a smaller size is tried again, and how often that doubles: larger sizes tell most of it."""
_AHEAD, _LEAST_AHEAD = 64, 16
"""Tokens of a reply that are expected at first, and at any time: catching up must pay within them."""
_ROW, _LEVEL, _TOKEN = 0.03, 2.0, 0.04
"""Relative cost of one more row in a pass, of one more level in drafting and, to a plain pass, of one token of catching
up, until enough is measured."""
_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes for which costs are kept apart."""
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
        self._paused = 0

    def chances(self, round: int) -> list[float]:
        """Return the chance that a round comes to depth 0, 1, ..."""
        paused = (round - self._round) // _STEP
        if not self._chances or paused != self._paused:
            self._chances, self._paused = self._expect(max(1e-9, _PAUSED ** (_STEP * paused))), paused
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


class Controller:
    """Chooses a draft size for every round, from nothing to the drafter's maximum.

    It measures target passes by rows, drafting by size and acceptance by depth, and takes the size with the most tokens
    per second. A small share of the time (`_SHARE`) goes into trying other sizes: the expected loss of a try is saved
    up first, so that the worst case is bounded and a promising size is tried often. Measurements outlive requests. It
    affects the speed of a text, never its content.
    """

    def __init__(self, maximum: DraftBudget, free: bool = False, reads_prompt: bool = True) -> None:
        """`maximum`, `free`, `reads_prompt`: see `Stage`."""
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
        self._length, self._written = Fading(_AHEAD), 0
        # Tokens of a round: of the requests that it chose for, and of all.
        self._own, self._all = Fading(1.0), Fading(1.0)
        self._batch_costs: dict[int, _BatchCosts] = {}
        self._round = self._last_try = self._rest = 0
        """This round; that of the last try; the last one of a pause, in which nothing is drafted."""
        self._pause, self._resting = _GAP, False
        """Rounds that the next pause takes, and whether this round is in one."""
        self._saved = 0.0
        """Seconds saved up for tries."""
        self._plain = 0.0
        """Seconds that a round without drafts is expected to take."""
        self.pace = 0.0
        """Tokens per second of all requests of a round, at the size that seems best; 0 until something is measured."""
        self._at, self._behind = len(self.sizes) - 1, 0
        """Number of the size chosen last, and the tokens that the drafter had not seen then."""

    def choose(
        self,
        together: int = 1,
        behind: int = 0,
        ahead: int = 1 << 30,
        written: int = 0,
        fresh: int = 0,
        asked: int | None = None,
    ) -> DraftBudget:
        """Return the size for a round of `together` requests, of which it is for `asked` (all).

        `behind`: tokens the drafter has not seen of them, summed. `ahead`: the most tokens that one of them may still
        get. `written`: tokens of the longest reply so far. `fresh`: requests that it chooses for the first time.
        """
        if self.rest(fresh > 0, written):
            return self.sizes[0]
        asked = asked or together
        self._round += 1
        self._behind = behind
        if fresh:
            self._begin(fresh / together)
        self._written = written
        self._rest, self._resting = self._round, False
        batch_costs = self._costs_of(asked)
        # Drafts for some of the requests are judged as if all had them, at as much more.
        share = together / asked
        seconds, tokens = self._seconds(batch_costs, together, asked), self._tokens()
        # Drafting must also pay for catching up: within the tokens that are left, or at once in a try. A reply that has
        # gone on for long is expected to go on for as long again.
        debt, likely = share * self._catch_up.value * behind, max(self._length.value - written, written, _LEAST_AHEAD)
        tokens_left = min(ahead, likely) * min(1.0, self._own.value / self._all.value)
        times = [tokens_left * s / t + debt for s, t in zip(seconds, tokens, strict=True)]
        times[0] -= debt
        best = times.index(min(times))
        self._plain = seconds[0]
        pace = seconds[best] / tokens[best]
        self.pace = together / pace if self._passes[False].known else 0.0
        losses = [s - t * pace + debt for s, t in zip(seconds, tokens, strict=True)]
        losses[0] -= debt
        self._at = self._try(best, losses, batch_costs) if self._passes[False].known else 0
        if self._at > 1 and not batch_costs.drafting.known and batch_costs.tries[1] < _FIRST:
            self._at = 1
        if best:
            self._pause = _GAP
        elif self._passes[False].known:
            self._rest += self._pause - 1
            self._pause = _LONG_GAP
        batch_costs.tried[self._at] = self._round
        batch_costs.tries[self._at] += 1
        return self.sizes[self._at]

    def _begin(self, share: float) -> None:
        """Expect of texts that begin, a share of all, what is usual."""
        self._pause = _GAP
        for depths in {*self._rates, self._drafted}:
            depths.forget(share)
        if self._written:
            self._length.add(self._written, self._round)

    def price(self, together: int) -> float:
        """Return the cost of one more row in a round of `together` requests, in tokens of plain decoding: a node less
        likely to be accepted does not pay. 0 until something is measured."""
        passes = self._passes[False]
        if not passes.known:
            return 0.0
        plain = passes.at(together)
        return min(1.0, max(0.0, passes.at(2 * together) / plain - 1.0))

    def _try(self, best: int, losses: Sequence[float], batch_costs: _BatchCosts) -> int:
        """Return the best size, or another one when a try is due."""
        due = [
            at
            for at in range(best)
            if self._round - batch_costs.tried[at] >= _SOON << min(batch_costs.tries[at], _OFTEN)
        ]
        found = min((*due, *range(best + 1, len(losses))), key=losses.__getitem__, default=best)
        # Savings are capped at the next try's cost, so that they never pay for many tries at once.
        self._saved = min(self._saved, max(losses[found], 0.0))
        left = self._saved - max(losses[found], 0.0)
        if found == best or left < 0.0 or self._round - self._last_try < _GAP:
            return best
        self._saved = left
        self._last_try = self._round
        return found

    def rest(self, fresh: bool = False, written: int = 0) -> bool:
        """Return whether a decision to draft nothing still stands, and count the round if so. It then needs neither
        `choose` nor `learn`, so that a drafter that is off costs next to nothing.

        `fresh`: whether there is a request that it has not chosen for yet. `written`: as in `choose`.
        """
        if fresh or self._round >= self._rest:
            return False
        self._round += 1
        self._at, self._written, self._resting = 0, written, True
        self._save(self._plain)
        return True

    @property
    def drafting(self) -> bool:
        """True if anything was to be drafted in the last round."""
        return self._at > 0

    def share(self, own: int, others: int) -> None:
        """Note a round's tokens: `own` of requests that this stage drafted for, `others` of other stages' requests.

        A round without any tokens is ignored. Its requests failed, which says nothing about later ones.
        """
        if own + others:
            self._own.add(own, self._round)
            self._all.add(own + others, self._round)

    def learn(
        self,
        budgets: Sequence[DraftBudget],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        drafting: float,
        verifying: float,
        together: int,
        rows: int,
        resumed: bool = False,
    ) -> None:
        """Learn from the outcome of the size chosen last, for the requests that it applied to.

        `budgets`: the part of the size that each could use. `drafting`, `verifying`: seconds of drafting and of the
        rest. `together`, `rows`: requests and rows of the whole round. `resumed`: whether the pass began where
        drafting had stopped.
        """
        if self._resting:
            return
        self._save(drafting + verifying)
        self._passes[resumed].add(rows, verifying, self._round)
        if not self._catch_up.value and self._passes[False].known and self.reads_prompt:
            self._catch_up = Fading(_TOKEN * self._passes[False].at(1))
        if not self._at:
            return
        if drafts and all(budget == self.sizes[self._at] for budget in budgets):
            # Not from drafts cut short by the end of a text or of a cache block.
            self._learn_costs(drafts, drafting, together, resumed)
        for budget, draft, verdict in zip(budgets, drafts, verdicts, strict=True):
            if verdict.path:
                self._rest, self._pause = self._round, _GAP
            if verdict.finish is None:
                self._learn_acceptance(min(len(verdict.path), draft.own), budget.depth)
                if self._chains:
                    self._drafted.add(min(draft.own, budget.depth), budget.depth, 1.0, self._round)

    def _save(self, seconds: float) -> None:
        """Save up for tries, of a round's time."""
        self._saved += (_SHARE if self._round > _EARLY else _EARLY_SHARE) * seconds

    def _learn_costs(self, drafts: Sequence[Draft], seconds: float, together: int, resumed: bool) -> None:
        """Learn what drafting and the pass took. Drafting that had to catch up counts for the cost of that alone."""
        batch_costs, passes, depth = self._costs_of(len(drafts)), self._passes[resumed], self._depths[self._at]
        mean = sum(len(draft.tokens) for draft in drafts) / len(drafts)
        place = round(mean) if self._chains else self._at
        if not self._chains or place <= depth:
            relative = passes.at(together * (1.0 + mean)) / self._passes[False].at(together)
            batch_costs.relative[place].add(relative, self._round)
            batch_costs.seen[place] = True
        if mean:
            self._resumed = resumed
        if self._chains:
            depth = min(max(draft.own for draft in drafts), depth)
        level = batch_costs.drafting
        if self._behind < _LATE * len(drafts):
            level.add(depth, seconds, self._round)
        else:
            known = level.at(depth) if level.known else 0.0
            self._catch_up.add(max(0.0, seconds - known) / self._behind, self._round)

    def _learn_acceptance(self, accepted: int, depth: int) -> None:
        if self._chains:
            self._rates[0].add(accepted, depth, 1.0, self._round)
            return
        for other, rates in enumerate(self._rates[1:], 1):
            rates.add(accepted, depth, 1.0 if other == self._at else _OTHER_SIZE, self._round)

    def _costs_of(self, asked: int) -> _BatchCosts:
        # Batch sizes vary under load: nearby ones share their measurements.
        asked = next((size for size in _BATCH_SIZES if size >= asked), asked)
        if asked not in self._batch_costs:
            self._batch_costs[asked] = _BatchCosts(asked, self.sizes)
        return self._batch_costs[asked]

    def _seconds(self, batch_costs: _BatchCosts, together: int, asked: int) -> list[float]:
        """Return the expected seconds of a round, by size."""
        passes, first = self._passes[self._resumed], self._passes[False].at(together)
        nodes, depths = [size.nodes for size in self.sizes], self._depths
        if self._chains:
            nodes = depths = [*range(depths[-1] + 1)]
        measured = zip(batch_costs.relative[1:], batch_costs.seen[1:], nodes[1:], strict=True)
        verifying = [
            first,
            *(first * cost.value if seen else passes.at(together * (1 + count)) for cost, seen, count in measured),
        ]
        known, share = batch_costs.drafting.known, together / asked
        drafting = [share * batch_costs.drafting.at(depth) if known else 0.0 for depth in depths]
        if self._chains:
            # A chain ends where it does not pay to go on. Levels are drafted for all requests at once, and end with
            # the longest chain.
            chances = self._drafted.chances(self._round)
            verifying = self._of_chains(verifying, chances)
            drafting = self._of_chains(drafting, [1.0 - (1.0 - chance) ** asked for chance in chances])
        return [first, *(pass_ + draft for pass_, draft in zip(verifying[1:], drafting[1:], strict=True))]

    def _of_chains(self, costs: Sequence[float], chances: Sequence[float]) -> list[float]:
        """Return the expected cost by size. `costs`: by length. `chances`: that a chain becomes that long."""
        ended = [0.0, *accumulate((a - b) * cost for a, b, cost in zip(chances, chances[1:], costs, strict=False))]
        return [ended[depth] + chances[depth] * costs[depth] for depth in self._depths]

    def _tokens(self) -> list[float]:
        """Return the expected tokens of a round, by size."""
        if self._chains:
            tokens = [*accumulate(self._rates[0].chances(self._round))]
            return [tokens[depth] for depth in self._depths]
        # A larger tree is accepted no less often than a smaller one, whatever chance has shown.
        return [*accumulate((sum(rates.chances(self._round)) for rates in self._rates), max)]


def _sizes(maximum: DraftBudget) -> list[DraftBudget]:
    """Return sizes from nothing to `maximum`: each chain two thirds of the next longer one, each tree half of the next
    larger one."""
    sizes = [maximum]
    while sizes[0].nodes > 1:
        nodes = sizes[0].nodes * 2 // 3 if maximum.branch == 1 else sizes[0].nodes // 2
        sizes.insert(0, maximum.within(min(maximum.depth, nodes), nodes))
    return sizes if not maximum.nodes else [DraftBudget.chain(0), *sizes]
