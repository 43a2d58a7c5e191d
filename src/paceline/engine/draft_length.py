"""How much to draft next, or nothing: what writes the most tokens per second, by what rounds have cost and given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.engine.cost_model import Curve, Fading
from paceline.types import Draft, DraftBudget, Verdict

_MEMORY = 0.95
"""What a round's acceptance still weighs when the next one is counted: texts change within some twenty rounds."""
_LEAST = 8.0
"""Rounds that what was seen before a pause weighs after it, however long that was."""
_HISTORY = 500.0
"""Rounds that make up what a drafter usually does."""
_HOPE = 0.6
"""How often a draft is taken for right before any was seen."""
_FAITH = 5.0
"""Rounds that hope weighs in the usual, and the usual among recent rounds."""
_HEARSAY = 0.2
"""What a round weighs for trees of other sizes."""
_SHARE = 0.005
"""Of all time, what may be lost to trying other sizes than the best."""
_CREDIT = 12.0
"""Plain rounds that tries may cost beyond that in the first `_EARLY` rounds: a first text that was hard to draft for
must not be the last."""
_EARLY = 200
_GAP = 4
"""Rounds between two such tries at least."""
_SOON, _OFTEN = 16, 4
"""Rounds after which a smaller size is tried again, and how often that is then doubled: larger ones tell most of it."""
_AHEAD = 64
"""Tokens over which catching up after a pause must pay."""
_ROW, _LEVEL = 0.03, 2.0
"""What a row more costs of a pass, and a level more of drafting, as long as too few were seen to tell."""
_TOGETHER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Requests that share rounds, as what they have shown is kept."""
_LATE = 32
"""Tokens behind from which on drafting takes visibly longer because it must catch up first."""


class _AcceptanceRates:
    """How far drafts of one size were right: of the rounds kept to depth d, the share that was kept to d + 1.

    Recent rounds say it, as far as there are any; then all that this drafter has done; then, of a depth that was hardly
    ever reached, what the depth above gave.
    """

    def __init__(self, depth: int) -> None:
        self._reached, self._kept, self._rounds, self._usual = ([0.0] * depth for _ in range(4))
        # What a round weighs: it grows, instead of all that was before it fading.
        self._unit, self._round = 1.0, 0
        self._expected: list[float] | None = None

    @property
    def tokens(self) -> list[float]:
        """What a round may be expected to give with so many levels (0, 1, ...), the target's own token included."""
        # Asked once in a round, in which every request adds what it has shown.
        self._expected = self._expected or self._expect()
        return self._expected

    def add(self, accepted: int, depth: int, weight: float, round: int) -> None:
        """A draft, `depth` deep, was right for `accepted` tokens."""
        # Rounds that drafted nothing count as well: what was seen before a pause says little about the text after it.
        fade = _MEMORY ** (weight * (round - self._round))
        seen = self._reached[0] / self._unit
        self._age(max(fade, min(1.0, _LEAST / seen)) if seen else fade)
        self._round = round
        for d in range(min(depth, accepted + 1, len(self._kept))):
            right = float(d < accepted)
            self._reached[d] += weight * self._unit
            self._kept[d] += weight * self._unit * right
            self._rounds[d] = min(self._rounds[d] + weight, _HISTORY)
            self._usual[d] += weight * (right - self._usual[d]) / self._rounds[d]
        self._expected = None

    def _age(self, fade: float) -> None:
        self._unit /= max(fade, 1e-9)
        if self._unit > 1e9:
            self._reached, self._kept = ([x / self._unit for x in line] for line in (self._reached, self._kept))
            self._unit = 1.0

    def _expect(self) -> list[float]:
        total, chance, share, faith = 1.0, 1.0, _HOPE, _FAITH * self._unit
        found = [total]
        for reached, kept, rounds, usual in zip(self._reached, self._kept, self._rounds, self._usual, strict=True):
            share = (rounds * usual + _FAITH * share) / (rounds + _FAITH)
            chance *= (kept + faith * share) / (reached + faith)
            total += chance
            found.append(total)
        return found


class _BatchCosts:
    """What rounds of so many requests have shown: seconds of drafting by depth, and by size of draft what a pass costs
    of one without drafts. Its mean rows would not do: a mean of many empty drafts and a few long ones hides what the
    long ones cost."""

    def __init__(self, together: int, sizes: Sequence[DraftBudget]) -> None:
        self.together = together
        self.drafting = Curve(slope=_LEVEL)
        self.dearer = [Fading(1.0 + _ROW * together * size.nodes) for size in sizes]
        self.seen = [False] * len(sizes)
        self.tried = [0] * len(sizes)
        self.tries = [0] * len(sizes)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What came of a choice, for the requests of a round that it was made for.

    `budgets`: what each one could use of the chosen size. `drafting`, `verifying`: seconds of making drafts, and of all
    the rest. `together`, `rows`: all requests of the round and the rows of its pass, where there were others.
    """

    budgets: Sequence[DraftBudget]
    drafts: Sequence[Draft]
    verdicts: Sequence[Verdict]
    drafting: float
    verifying: float
    together: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        if not self.together:
            object.__setattr__(self, "together", len(self.drafts))
            object.__setattr__(self, "rows", sum(1 + len(draft.tokens) for draft in self.drafts))


class Controller:
    """Picks a size of draft for every round, from nothing to all that the drafter likes to make.

    It knows what a target pass takes by its rows, what drafting takes by its size, and how acceptance falls with depth,
    and takes the size that writes the next tokens soonest. A little of the time (`_SHARE`) goes into trying other
    sizes: what a try is expected to lose is saved up first, so that the worst case is bounded whatever a try costs,
    and a promising size is tried often. What it knows outlives requests. It decides how soon a text comes, never which.
    """

    def __init__(self, most: DraftBudget) -> None:
        self.sizes: list[DraftBudget] = _sizes(most)
        """From nothing to `most`."""
        self._depths = [size.depth for size in self.sizes]
        # A chain begins as a longer one does, so that every length tells of all; a smaller tree is right less often.
        self._chains = most.branch == 1
        kept = _AcceptanceRates(most.depth)
        self._kept = [kept if self._chains else _AcceptanceRates(size.depth) for size in self.sizes]
        # A pass that goes on where drafting left off (early exit) costs less than its rows.
        self._passes = {False: Curve(slope=_ROW), True: Curve(slope=_ROW)}
        self._resumed = False
        self._catch_up = Fading()
        self._batch_costs: dict[int, _BatchCosts] = {}
        self._round = self._last_try = 0
        self._saved, self._credit = 0.0, 0.0
        self._granted = False
        self._at, self._behind = len(self.sizes) - 1, 0

    def choose(self, together: int = 1, behind: int = 0, ahead: int = _AHEAD) -> DraftBudget:
        """For a round of so many requests.

        `behind`: tokens that they have got since they were last drafted for, all together, with their prompts where
        they never were. `ahead`: how many tokens more the longest of them may get.
        """
        self._round += 1
        self._behind = behind
        batch_costs = self._costs_of(together)
        seconds, tokens = self._seconds(batch_costs, together), self._tokens()
        # What is drafted must make up for catching up, too: within the next tokens, and within a try at once.
        debt, ahead = self._catch_up.value * behind, min(ahead, _AHEAD)
        times = [ahead * s / t + debt for s, t in zip(seconds, tokens, strict=True)]
        times[0] -= debt
        best = times.index(min(times))
        pace = seconds[best] / tokens[best]
        losses = [s - t * pace + debt for s, t in zip(seconds, tokens, strict=True)]
        losses[0] -= debt
        if ahead < _AHEAD or self._round > _EARLY:
            self._credit = 0.0
        self._at = self._try(best, losses, batch_costs)
        batch_costs.tried[self._at] = self._round
        batch_costs.tries[self._at] += 1
        return self.sizes[self._at]

    def price(self, together: int) -> float:
        """What one more row costs a round of so many requests, in tokens that plain decoding would write meanwhile: a
        token that is less likely to be right than this is not worth drafting. 0 as long as nothing is known."""
        passes = self._passes[False]
        if not passes.known:
            return 0.0
        plain = passes.at(together)
        return min(1.0, max(0.0, passes.at(2 * together) / plain - 1.0))

    def _try(self, best: int, losses: Sequence[float], batch_costs: _BatchCosts) -> int:
        """Another size than the best one, where it is time to try one."""
        due = [
            at
            for at in range(best)
            if self._round - batch_costs.tried[at] >= _SOON << min(batch_costs.tries[at], _OFTEN)
        ]
        found = min((*due, *range(best + 1, len(losses))), key=losses.__getitem__, default=best)
        # No more is saved than the next try takes: a calm hour must not pay for a hundred tries at once.
        self._saved = min(self._saved, max(losses[found], 0.0))
        short = max(losses[found], 0.0) - self._saved
        if found == best or short > self._credit or self._round - self._last_try < _GAP:
            return best
        self._credit -= max(short, 0.0)
        self._saved = max(-short, 0.0)
        self._last_try = self._round
        return found

    def learn(self, round: RoundOutcome) -> None:
        """What the size that was chosen last gave."""
        at, batch_costs = self._at, self._costs_of(round.together)
        self._saved += _SHARE * (round.drafting + round.verifying)
        resumed = any(draft.carried for draft in round.drafts)
        self._passes[resumed].add(round.rows, round.verifying, self._round)
        if not self._granted and self._passes[False].known:
            self._granted, self._credit = True, _CREDIT * self._passes[False].at(batch_costs.together)
        if not at:
            return
        alone = round.together == len(round.drafts)
        if alone and all(budget == self.sizes[at] for budget in round.budgets):
            # The end of a text, or of a block of the cache, cuts drafts short, which says nothing of the size.
            plain = self._passes[False].at(round.together)
            batch_costs.dearer[at].add(self._passes[resumed].at(round.rows) / plain, self._round)
            batch_costs.seen[at] = True
            self._resumed = resumed
            self._learn_drafting(batch_costs, round)
        for budget, verdict in zip(round.budgets, round.verdicts, strict=True):
            if verdict.finish is None:
                self._learn_kept(len(verdict.path), budget.depth)

    def _learn_drafting(self, batch_costs: _BatchCosts, round: RoundOutcome) -> None:
        """Drafting that had to catch up tells what that costs, and nothing else."""
        seen, depth = batch_costs.drafting, self.sizes[self._at].depth
        if self._behind < _LATE * batch_costs.together:
            seen.add(depth, round.drafting, self._round)
        elif seen.known:
            self._catch_up.add(max(0.0, round.drafting - seen.at(depth)) / self._behind, self._round)

    def _learn_kept(self, accepted: int, depth: int) -> None:
        if self._chains:
            self._kept[0].add(accepted, depth, 1.0, self._round)
            return
        for other, kept in enumerate(self._kept[1:], 1):
            kept.add(accepted, depth, 1.0 if other == self._at else _HEARSAY, self._round)

    def _costs_of(self, together: int) -> _BatchCosts:
        # Under load no two rounds have the same company: nearly so many tell of each other.
        together = next((size for size in _TOGETHER if size >= together), together)
        if together not in self._batch_costs:
            self._batch_costs[together] = _BatchCosts(together, self.sizes)
        return self._batch_costs[together]

    def _seconds(self, batch_costs: _BatchCosts, together: int) -> list[float]:
        """Of a round of so many requests, by size of draft."""
        passes, drafting = self._passes[self._resumed], batch_costs.drafting
        levels = [drafting.at(depth) for depth in self._depths[1:]] if drafting.known else [0.0] * len(self.sizes)
        first = self._passes[False].at(together)
        costs = [
            first * dearer.value if seen else passes.at(together * (1 + size.nodes))
            for dearer, seen, size in zip(batch_costs.dearer[1:], batch_costs.seen[1:], self.sizes[1:], strict=True)
        ]
        return [first, *(cost + level for cost, level in zip(costs, levels, strict=False))]

    def _tokens(self) -> list[float]:
        """Of a round, by size of draft."""
        if self._chains:
            tokens = self._kept[0].tokens
            return [tokens[depth] for depth in self._depths]
        # A larger tree is right no less often than a smaller one, whatever chance has shown.
        return [*accumulate((kept.tokens[-1] for kept in self._kept), max)]


def _sizes(most: DraftBudget) -> list[DraftBudget]:
    """From nothing to `most`: each chain two thirds of the next longer one, each tree half of the next larger one."""
    sizes = [most]
    while sizes[0].nodes > 1:
        nodes = sizes[0].nodes * 2 // 3 if most.branch == 1 else sizes[0].nodes // 2
        sizes.insert(0, most.within(min(most.depth, nodes), nodes))
    return sizes if not most.nodes else [DraftBudget.chain(0), *sizes]
