"""Suffix lookup: draft chains and trees from repetitions of this text or of earlier replies."""

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

# These values were tuned by replaying 438 recorded answers (docs/notes/drafters.md#lookup-drafters-tuned-offline).
# Small changes to any of these values hardly change the estimated speed.
_HALF_EVIDENCE = 2.0
"""The evidence (match length times mean count) at which a context is trusted to 50%."""
_RECENCY_BONUS = 0.5
"""Bonus for the latest continuation, in occurrences."""
_MAX_CONTEXTS = 4
"""Maximum number of contexts to evaluate per node, longest first."""
_MAX_TRUST = 0.9
"""Once the evaluated contexts have received more than this share of the probability, shorter contexts are not
evaluated."""
_MAX_FOLLOWERS = 16
"""Maximum number of continuations to evaluate per context, most recent first."""
_MIN_EXTENSION_PROBABILITY = 0.4
"""Minimum probability of a token that extends another drafter's chain. It is high, because the chain itself may be
wrong."""
_REMATCH = 64
"""Number of tokens to look up again after the memory has started over."""
_SEPARATOR = -1
"""The separator after each remembered text. No token has this id, so no match crosses the separator."""

Context = tuple[SuffixAutomaton, int, int]
"""An automaton, a state of it, and the length, in tokens, of the match that led to this state."""


class Suffix(Drafter):
    """Finds the longest suffix of the text that has occurred before, and drafts its most probable continuations.

    It combines the online automaton of SAM decoding (arXiv 2411.10666) with a tree as in SuffixDecoding (arXiv
    2411.04975). The most probable node of the whole tree is always added next, until the budget is full or the
    probability is below `floor`. So reliable matches get longer drafts. If a continuation reaches the end of the text,
    it goes on from the longest repeated suffix, so repetitive text fills the budget.

    Args:
        remember: True to draft from the replies to earlier requests as well, including requests of other users.
        limit: Maximum number of tokens per text (about 0.6 kB each), at least 2. When it is exceeded, the older half is
            dropped.
        floor: Minimum probability of a node, 0 to 1. With 0, every budget is filled. The default suits targets whose
            passes take about 4% longer for each additional row.
        memory: Maximum number of remembered tokens, at least 2, if `remember` is True. None for the same number as
            `limit`.

    Raises:
        InvalidOption: If `limit`, `floor` or `memory` is out of range, or if `memory` is given without `remember`.
    """

    free = True
    draft = DraftBudget(nodes=15, depth=15, branch=3)

    def __init__(
        self, remember: bool = False, limit: int = 1 << 15, floor: float = 0.2, memory: int | None = None
    ) -> None:
        if memory is not None and remember is not True:
            raise InvalidOption(
                f"memory={memory} limits what is remembered, but remember={remember!r}",
                "Pass remember=True, or leave out memory",
            )
        memory = limit if memory is None else memory
        if min(limit, memory) < 2 or not 0.0 <= floor <= 1.0:
            raise InvalidOption(
                "limit and memory must be >= 2 and floor must be 0 to 1, "
                f"got limit={limit}, memory={memory} and floor={floor}",
                "Change them, or omit them to use the defaults",
            )
        self._limit, self._floor = limit, floor
        self._memory = SuffixAutomaton(memory) if remember else None
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

    def learn(self, reply: Sequence[int]) -> None:
        """Add a reply from an earlier process to the memory. Call this before the first request."""
        if self._memory:
            self._finished.append(deque(reply, maxlen=self._limit))
            self._remember(self._memory)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if self._memory:
            self._remember(self._memory)
        return [self._draft(ask, len(asks)) for ask in asks]

    def _remember(self, memory: SuffixAutomaton) -> None:
        """Add finished replies to the memory. All requests share the memory, so it is cleared if an error or an
        interrupt leaves it incomplete."""
        try:
            while self._finished:
                memory.extend(self._finished.pop(0))
                memory.push(_SEPARATOR)
        except BaseException:
            memory.clear()
            raise

    def extend(self, ask: Ask, draft: Draft) -> Draft:
        contexts = self._slots[ask.slot].contexts(self._memory)
        for token in draft.tokens:
            contexts = [(source, *source.step(state, length, token)) for source, state, length in contexts]
        count = len(draft.tokens)
        room = DraftBudget.chain(max(0, min(ask.budget.nodes, ask.budget.depth) - count))
        more = grow(contexts, room, max(_MIN_EXTENSION_PROBABILITY, ask.price), 0)
        return replace(draft, tokens=draft.tokens + more.tokens, parents=tuple(range(count + len(more.tokens))))

    def _draft(self, ask: Ask, together: int) -> Draft:
        contexts = self._slots[ask.slot].contexts(self._memory)
        if ask.sure and not any(share >= ask.sure for _, share in likeliest(contexts, 1)):
            return Draft()
        # For acceptance rules that draw, the text depends on the drafts, so the drafts must not depend on the batch
        # size.
        free = 0 if ask.sure else -(-MIN_ROWS // (1 if ask.draws else together)) - 1
        return grow(contexts, ask.budget, max(self._floor, ask.price), free, ask.price)


@dataclass(slots=True)
class _SuffixSlot:
    """One request.

    Attributes:
        automaton: The automaton of the text.
        unread: The tokens that have not been added to `automaton` yet.
        reply: The reply so far and the token before it. None if replies are not remembered.
        state: The state of the text in the memory's automaton.
        length: Length of the match that led to this state, in tokens.
        generation: The memory's generation to which `state` belongs.
    """

    automaton: SuffixAutomaton
    unread: list[int]
    reply: deque[int] | None
    state: int = 0
    length: int = 0
    generation: int = 0

    def contexts(self, memory: SuffixAutomaton | None) -> list[Context]:
        """Read new tokens, and return the text's context in each automaton. This takes amortised O(1) time per
        token."""
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


def grow(
    contexts: list[Context], budget: DraftBudget, floor: float, free: int = MIN_ROWS - 1, price: float = 0.0
) -> Draft:
    """Return a draft that continues these contexts. The most probable nodes come first.

    Args:
        contexts: The contexts of the text.
        budget: Maximum size of the draft.
        floor: Minimum acceptance probability of a node.
        free: Number of nodes, from the first, that need a probability of only `price` instead of `floor`. On the torch
            path they cost nothing, because a pass is padded to `MIN_ROWS` rows.
        price: See `Ask.price`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int, list[Context]]] = []
    probability, row, depth, serial = 1.0, 0, 0, 0
    while len(tokens) < budget.nodes:
        if depth < budget.depth:
            for token, conditional in likeliest(contexts, budget.branch):
                # The serial number decides ties in favour of the older node, so that contexts are never compared.
                serial += 1
                heappush(heap, (-conditional * probability, serial, token, row, depth + 1, contexts))
        if not heap:
            break
        negative, _, token, parent, depth, contexts = heappop(heap)
        probability = -negative
        if probability < (price if len(tokens) < free else floor):
            break
        contexts = [(source, *source.step(state, length, token)) for source, state, length in contexts]
        tokens.append(token)
        parents.append(parent)
        row = len(tokens)
    return Draft(tuple(tokens), tuple(parents))


def likeliest(contexts: Sequence[Context], most: int) -> list[tuple[int, float]]:
    """Return up to `most` next tokens and their estimated probabilities, the most probable token first.

    The longest context is evaluated first. The probability that it leaves unassigned, because it is not fully trusted,
    goes to the next shorter context, as in prediction by partial matching (Cleary and Witten 1984). In contrast to that
    method, trust also grows with the length of the match.
    """
    found: dict[int, float] = {}
    rest = 1.0
    remaining = list(contexts)
    for _ in range(_MAX_CONTEXTS):
        at = _longest(remaining)
        source, state, length = remaining[at]
        if not length:
            break
        rest *= 1.0 - _weigh(found, source.followers(state, _MAX_FOLLOWERS), length, rest)
        if rest < 1.0 - _MAX_TRUST:
            break
        remaining[at] = (source, *source.shorter(state))
    found.pop(_SEPARATOR, None)
    if len(found) < 2:
        return list(found.items())
    return sorted(found.items(), key=lambda item: item[1], reverse=True)[:most]


def _longest(contexts: Sequence[Context]) -> int:
    """Return the index of the longest match. In a tie, return the first index."""
    if len(contexts) == 1 or contexts[0][2] >= contexts[1][2]:
        return 0
    return 1


def _weigh(found: dict[int, float], followers: Sequence[tuple[int, int]], length: int, rest: float) -> float:
    """Distribute a share of the remaining probability among the followers of a context.

    Args:
        found: Token -> its probability so far. It is changed in place.
        followers: The followers of the context as (token, count), most recent first.
        length: Length of the match in tokens.
        rest: The probability that remains to be distributed.

    Returns:
        The trust in the context, 0 to 1, which is the share of `rest` that was distributed.
    """
    if not followers:
        return 0.0
    seen = sum([count for _, count in followers])
    evidence = length * seen / len(followers)
    trust = evidence / (evidence + _HALF_EVIDENCE)
    weight = rest * trust / (seen + _RECENCY_BONUS)
    bonus = _RECENCY_BONUS
    for token, count in followers:
        found[token] = found.get(token, 0.0) + weight * (count + bonus)
        bonus = 0.0
    return trust
