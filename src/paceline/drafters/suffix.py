"""Drafting from repeats of this text or of earlier replies: chains and trees from suffix automata."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from torch import Tensor

from paceline.drafters.automaton import SuffixAutomaton
from paceline.drafters.base import Ask, Drafter
from paceline.errors import InvalidOption
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import MIN_ROWS

# Tuned by replaying 438 recorded answers (docs/notes/drafters.md#lookup-drafters-tuned-offline). The estimated speed is
# flat around all of them.
_DOUBT = 2.0
"""Evidence (match length times mean count) at which a context is right half of the time."""
_RECENT = 0.5
"""Bonus of the latest continuation, in occurrences."""
_LEVELS = 4
"""Contexts evaluated per node: the longest, then shorter ones."""
_CERTAIN = 0.9
"""Trust above which shorter contexts are not evaluated."""
_FOLLOWERS = 16
"""Continuations evaluated per context, the most recent ones."""
_CONTINUED = 0.4
"""Least probability of a token that continues another drafter's chain, which may end in a wrong one."""
_REMATCH = 64
"""Tokens looked up again when the memory has started over."""
_END = -1
"""Ends a remembered text. No token has this id, so no match reaches across."""

Context = tuple[SuffixAutomaton, int, int]
"""A place in an automaton: the state, and the length in tokens of the match that led there."""


class Suffix(Drafter):
    """Finds the longest end of the text that occurred before, and drafts what followed, by estimated probability.

    SAM decoding's online automaton (arXiv 2411.10666) with a tree like SuffixDecoding's (arXiv 2411.04975): the
    likeliest node anywhere comes next, until the budget is full or a node is less likely than `floor`. So a draft is
    as long as its match is reliable. A continuation that reaches the end of the text goes on from its longest repeated
    suffix, so that a repeating text fills the budget.

    `remember`: draft from the replies of earlier requests too, whoever made them. `limit`: tokens held per text, and in
    memory (about 0.6 kB each); the oldest are forgotten in halves. `floor`: 0 fills every budget; the default suits a
    target whose pass grows by some 4 % per row. Raises `InvalidOption` for a limit below 2 or a floor outside 0 to 1.
    """

    free = True
    draft = DraftBudget(nodes=15, depth=15, branch=3)

    def __init__(self, remember: bool = False, limit: int = 1 << 15, floor: float = 0.2) -> None:
        if limit < 2 or not 0.0 <= floor <= 1.0:
            raise InvalidOption(f"limit={limit}, floor={floor} is not possible", "Give limit >= 2 and 0 <= floor <= 1")
        self._limit, self._floor = limit, floor
        self._memory = SuffixAutomaton(limit) if remember else None
        self._finished: list[deque[int]] = []
        self._slots: dict[int, _SuffixSlot] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        reply = deque(prompt[-1:], maxlen=self._limit) if self._memory else None
        self._slots[slot] = _SuffixSlot(SuffixAutomaton(self._limit), list(prompt), reply)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        state = self._slots[slot]
        state.unread += verdict.tokens
        if state.reply is not None:
            state.reply += verdict.tokens

    def release(self, slot: int) -> None:
        state = self._slots.pop(slot, None)
        if state and state.reply and len(state.reply) > 1:
            self._finished.append(state.reply)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if self._memory:
            self._remember(self._memory)
        return [self._draft(ask, len(asks)) for ask in asks]

    def _remember(self, memory: SuffixAutomaton) -> None:
        """Add the replies that have ended. All requests share the memory: it starts over if anything interrupts."""
        try:
            while self._finished:
                memory.extend(self._finished.pop(0))
                memory.push(_END)
        except BaseException:
            memory.clear()
            raise

    def extend(self, ask: Ask, draft: Draft) -> Draft:
        contexts = self._slots[ask.slot].contexts(self._memory)
        for token in draft.tokens:
            contexts = [(source, *source.step(state, length, token)) for source, state, length in contexts]
        count = len(draft.tokens)
        room = DraftBudget.chain(max(0, min(ask.budget.nodes, ask.budget.depth) - count))
        more = grow(contexts, room, max(_CONTINUED, ask.price), 0)
        return replace(draft, tokens=draft.tokens + more.tokens, parents=tuple(range(count + len(more.tokens))))

    def _draft(self, ask: Ask, together: int) -> Draft:
        contexts = self._slots[ask.slot].contexts(self._memory)
        if ask.sure and not any(share >= ask.sure for _, share in likeliest(contexts, 1)):
            return Draft()
        # Under the rules that draw, a text follows its drafts: then these must be the same in every batch.
        free = 0 if ask.sure else -(-MIN_ROWS // (1 if ask.draws else together)) - 1
        return grow(contexts, ask.budget, max(self._floor, ask.price), free)


@dataclass(slots=True)
class _SuffixSlot:
    """`unread`: tokens not yet in `automaton`. `reply`: the reply so far and the token before it, to be remembered.

    `state`, `length`: where the text stands in the memory, as of its `generation`.
    """

    automaton: SuffixAutomaton
    unread: list[int]
    reply: deque[int] | None
    state: int = 0
    length: int = 0
    generation: int = 0

    def contexts(self, memory: SuffixAutomaton | None) -> list[Context]:
        """Read new tokens, then return the text's state in each automaton. O(1) amortised per token."""
        tokens, self.unread = self.unread, []
        self.automaton.extend(tokens)
        here = (self.automaton, *self.automaton.context())
        if memory is None:
            return [here]
        if self.generation != memory.generation:
            self.generation, self.state, self.length = memory.generation, 0, 0
            tokens = self.automaton.text[-_REMATCH:]
        self.state, self.length = memory.settle(self.state, self.length)
        for token in tokens:
            self.state, self.length = memory.step(self.state, self.length, token)
        return [here, (memory, self.state, self.length)]


def grow(contexts: list[Context], budget: DraftBudget, floor: float, free: int = MIN_ROWS - 1) -> Draft:
    """Return the draft after these contexts: best first, while a node's acceptance probability is at least `floor`.

    `free`: nodes drafted however unlikely they are, since no pass has fewer rows than `MIN_ROWS`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int, list[Context]]] = []
    chance, row, depth, serial = 1.0, 0, 0, 0
    while len(tokens) < budget.nodes:
        if depth < budget.depth:
            for token, share in likeliest(contexts, budget.branch):
                # The serial number breaks ties in favour of the older node, and keeps contexts from being compared.
                serial += 1
                heappush(heap, (-share * chance, serial, token, row, depth + 1, contexts))
        if not heap:
            break
        negative, _, token, parent, depth, contexts = heappop(heap)
        chance = -negative
        if chance < floor and len(tokens) >= free:
            break
        contexts = [(source, *source.step(state, length, token)) for source, state, length in contexts]
        tokens.append(token)
        parents.append(parent)
        row = len(tokens)
    return Draft(tuple(tokens), tuple(parents))


def likeliest(contexts: Sequence[Context], most: int) -> list[tuple[int, float]]:
    """Return the `most` likeliest next tokens and their estimated probability, best first.

    The longest context comes first; the probability that it is not trusted with goes to the next shorter one,
    as in prediction by partial matching (Cleary and Witten 1984), but trust grows with the length of the match, too.
    """
    found: dict[int, float] = {}
    rest = 1.0
    open_ = list(contexts)
    for _ in range(_LEVELS):
        at = _longest(open_)
        source, state, length = open_[at]
        if not length:
            break
        rest *= 1.0 - _weigh(found, source.followers(state, _FOLLOWERS), length, rest)
        if rest < 1.0 - _CERTAIN:
            break
        open_[at] = (source, *source.shorter(state))
    found.pop(_END, None)
    if len(found) < 2:
        return list(found.items())
    return sorted(found.items(), key=lambda item: item[1], reverse=True)[:most]


def _longest(contexts: Sequence[Context]) -> int:
    """Return the index of the longest match; ties go to the first."""
    if len(contexts) == 1 or contexts[0][2] >= contexts[1][2]:
        return 0
    return 1


def _weigh(found: dict[int, float], followers: Sequence[tuple[int, int]], length: int, rest: float) -> float:
    """Share `rest` among the followers of a context, as far as it can be trusted. Returns that trust, 0 to 1."""
    if not followers:
        return 0.0
    seen = sum([count for _, count in followers])
    evidence = length * seen / len(followers)
    trust = evidence / (evidence + _DOUBT)
    weight = rest * trust / (seen + _RECENT)
    bonus = _RECENT
    for token, count in followers:
        found[token] = found.get(token, 0.0) + weight * (count + bonus)
        bonus = 0.0
    return trust
