"""The drafting half of a round: make a plan, ask the drafters, and let the controllers learn from the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.drafters.base import Allowance, Ask
from paceline.engine.draft_length import Controller, DraftPlan, Outcome, RequestState
from paceline.engine.draft_policy import DraftPolicy
from paceline.engine.request import Request
from paceline.engine.stats import Timer
from paceline.protocols import KVCache
from paceline.types import Draft, DraftBudget, Tap, Verdict

_NOTHING, _NO_DRAFT = DraftBudget.chain(0), Draft()
_MAX_FORCED = 32
"""Maximum number of grammar-forced tokens in a draft."""

Members = Mapping[int, Request]
"""The requests of a round that may use the same drafter: a request's index in the round -> the request."""


@dataclass(frozen=True, slots=True)
class PartPlan:
    """A controller's plan for one part of a drafter.

    Attributes:
        controller: The controller.
        plan: Its plan.
        states: A request's index in the round -> its state, for the requests for which this part may draft.
        budgets: A request's index in the round -> its budget, for the requests that get one.
    """

    controller: Controller
    plan: DraftPlan
    states: Mapping[int, RequestState]
    budgets: Mapping[int, DraftBudget]


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """The plan for one drafter.

    Attributes:
        policy: The drafter.
        members: The requests that the drafter may draft for.
        asks: A request's index in the round -> its ask, for the requests that get a budget.
        parts: The controllers' plans. Empty if the size is fixed, if drafts must not depend on measurements, or if the
            controllers rest.
        resting: True if all controllers are in a pause without drafts (`Controller.resting`).
    """

    policy: DraftPolicy
    members: Members
    asks: Mapping[int, Ask]
    parts: Sequence[PartPlan] = ()
    resting: bool = False


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan for a round.

    Attributes:
        known: For each request, the tokens that can be drafted without a drafter (forced by a grammar, or predicted by
            the caller). They may be empty.
        policies: The plan for each drafter.
    """

    known: Sequence[Draft]
    policies: Sequence[PolicyPlan]


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a round.

    Attributes:
        drafts: One draft for each request.
        seconds: Seconds that each drafter of the plan took.
    """

    drafts: Sequence[Draft]
    seconds: Sequence[float]


def taps(requests: Sequence[Request]) -> tuple[Tap, ...]:
    """Return the hidden states that the drafters of these requests need."""
    return tuple(dict.fromkeys(tap for r in requests if r.policy for tap in r.policy.drafter.taps))


# Plan


def plan_round(requests: Sequence[Request], cache: KVCache) -> RoundPlan:
    """Return the plan for a round of these requests. This has no side effects."""
    known = [_known(request, cache) for request in requests]
    plans = []
    for policy, members in _by_policy(requests, known).items():
        # For rules other than `match`, the text depends on the drafts, so drafts must not depend on measurements. If a
        # drafter has such a request in this round, it uses its own size for all requests.
        if not policy.controllers or any(r.sampler.rule != "match" for r in members.values()):
            plans.append(PolicyPlan(policy, members, _fixed_asks(policy, members, cache)))
        # If drafting does not pay off for a text, most of its rounds take this branch, so it must cost next to nothing.
        elif all(c.resting and all(c in r.learned_by for r in members.values()) for c in policy.controllers):
            plans.append(PolicyPlan(policy, members, {}, resting=True))
        else:
            parts = []
            for controller in policy.controllers:
                states = {i: _state_of(r, controller) for i, r in members.items() if _waits(controller, r)}
                plan = controller.plan([*states.values()], len(requests))
                parts.append(PartPlan(controller, plan, states, _budgets(plan, states, members, cache)))
            plans.append(PolicyPlan(policy, members, _asks(policy, members, parts, cache), parts))
    return RoundPlan(known, plans)


def _known(request: Request, cache: KVCache) -> Draft:
    """Return a draft that needs no drafter: the tokens that a grammar forces, or predicted tokens."""
    if not request.sampler.processors and not request.prediction:
        return _NO_DRAFT
    room = _fit(DraftBudget.chain(_MAX_FORCED) if request.max_draft is None else request.max_draft, request, cache)
    forced = request.sampler.forced(request.prefix, room.depth)
    if forced or not request.prediction:
        return Draft.chain(forced)
    return request.prediction.propose(room.depth)


def _by_policy(requests: Sequence[Request], known: Sequence[Draft]) -> dict[DraftPolicy, dict[int, Request]]:
    """Return the requests that may ask each drafter: the requests that have this drafter and no draft yet."""
    found: dict[DraftPolicy, dict[int, Request]] = {}
    for place, (request, draft) in enumerate(zip(requests, known, strict=True)):
        if request.policy and not draft.tokens:
            found.setdefault(request.policy, {})[place] = request
    return found


def _fixed_asks(policy: DraftPolicy, members: Members, cache: KVCache) -> dict[int, Ask]:
    """Return asks with the drafter's own size as the budget."""
    budgets = {place: _limited(policy.draft, r, cache) for place, r in members.items()}
    return {i: Ask(r.slot, r.prefix, budgets[i], r.sampler) for i, r in members.items() if budgets[i].nodes}


def _waits(controller: Controller, request: Request) -> bool:
    """Return True if this part may draft for a request. A part that reads the prompt does not draft for the first round
    of a reply, because reading would delay the reply's first token."""
    return not controller.reads_prompt or request.stats.rounds > 0


def _state_of(request: Request, controller: Controller) -> RequestState:
    length = len(request.token_ids)
    behind = unread(request) if controller.reads_prompt else 0
    return RequestState(
        behind, request.stream.left, length - request.num_prompt_tokens, controller not in request.learned_by
    )


def unread(request: Request) -> int:
    """Return the number of tokens that the request's drafter must read before it can draft."""
    known = request.policy.drafter.unread(request.slot) if request.policy else None
    return len(request.token_ids) - request.num_seen_tokens if known is None else known


def _budgets(
    plan: DraftPlan, states: Mapping[int, RequestState], members: Members, cache: KVCache
) -> dict[int, DraftBudget]:
    """Return the plan's budgets, limited by `_limited`. Empty budgets are omitted."""
    given = zip(states, plan.budgets, strict=True) if plan.size_index else ()
    cut = ((i, _limited(budget, members[i], cache)) for i, budget in given if budget.nodes)
    return {i: budget for i, budget in cut if budget.nodes}


def _asks(policy: DraftPolicy, members: Members, parts: Sequence[PartPlan], cache: KVCache) -> dict[int, Ask]:
    """Return asks for the requests that get a budget from at least one part."""
    asks = {}
    for i, r in members.items():
        if not any(i in part.budgets for part in parts):
            continue
        allowed = [Allowance(part.budgets.get(i, _NOTHING), part.plan.price, part.plan.pace) for part in parts]
        if len(parts) == 1:
            asks[i] = Ask(r.slot, r.prefix, allowed[0].budget, r.sampler, *allowed[0][1:])
        else:
            asks[i] = Ask(r.slot, r.prefix, _limited(policy.draft, r, cache), r.sampler, parts=tuple(allowed))
    return asks


def _limited(draft: DraftBudget, request: Request, cache: KVCache) -> DraftBudget:
    """Limit a budget to the request's own maximum, and then by `_fit`."""
    return _fit(draft.limited(request.max_draft) if request.max_draft else draft, request, cache)


def _fit(draft: DraftBudget, request: Request, cache: KVCache) -> DraftBudget:
    """Limit a budget to the size that the cache can verify, and to one token less than the reply may still have,
    because the target adds a token."""
    return cache.fit(request.slot, draft.within(request.stream.left - 1))


# Draft


def propose(plan: RoundPlan, vocab_size: int, timer: Timer) -> Drafted:
    """Return the drafts of a round. Each drafter is called at most once.

    Args:
        plan: The plan of the round.
        vocab_size: Size of the target's vocabulary.
        timer: Measures the time of each drafter.

    Raises:
        InvalidOption: If a draft is invalid (see `DraftPolicy.check_drafts`).
    """
    drafts, seconds = [*plan.known], list[float]()
    for policy_plan in plan.policies:
        began = timer()
        if policy_plan.asks:
            made = policy_plan.policy.drafter.propose([*policy_plan.asks.values()])
            policy_plan.policy.check_drafts([*policy_plan.asks.values()], made, vocab_size)
            for place, draft in zip(policy_plan.asks, made, strict=True):
                drafts[place] = draft
        seconds.append(timer() - began)
    return Drafted(drafts, seconds)


# Learn


def learn(
    plan: RoundPlan, requests: Sequence[Request], drafted: Drafted, verdicts: Sequence[Verdict], seconds: float
) -> None:
    """Give the controllers the outcome of a committed round. `seconds`: Duration of the round, without drafting."""
    drafts, rows = drafted.drafts, sum(1 + len(draft.tokens) for draft in drafted.drafts)
    resumed = any(draft.carried for draft in drafts)
    for policy_plan, draft_seconds in zip(plan.policies, drafted.seconds, strict=True):
        for i in policy_plan.asks:
            if not policy_plan.parts or policy_plan.parts[drafts[i].part].controller.reads_prompt:
                requests[i].num_seen_tokens = len(requests[i].token_ids) - len(verdicts[i].tokens)
        finished = [r for i, r in policy_plan.members.items() if verdicts[i].finish not in (None, "error")]
        reply_lengths = [len(r.token_ids) - r.num_prompt_tokens for r in finished]
        if policy_plan.resting:
            tokens = sum(len(verdicts[i].tokens) for i in policy_plan.members)
            for controller in policy_plan.policy.controllers:
                controller.rest(tokens, reply_lengths)
            continue
        payer = _payer(policy_plan, drafts)
        for number, part in enumerate(policy_plan.parts):
            for i in part.states:
                requests[i].learned_by.add(part.controller)
            own = [i for i in part.states if _is_own(number, drafts[i])]
            # A plan to draft nothing (size 0) applies to all requests. Other plans apply only to the requests with a
            # budget.
            followed = [i for i in own if i in part.budgets] if part.plan.size_index else own
            outcome = Outcome(
                part.plan,
                [part.states[i] for i in followed],
                [part.budgets.get(i, _NOTHING) for i in followed],
                [drafts[i] for i in followed],
                [verdicts[i] for i in followed],
                drafting=draft_seconds if number == payer else 0.0,
                verifying=seconds,
                together=len(requests),
                rows=rows,
                resumed=resumed,
                other_tokens=sum(len(verdicts[i].tokens) for i in policy_plan.members if _is_others(number, drafts[i])),
                ended_lengths=reply_lengths,
            )
            part.controller.learn(outcome)


def _payer(plan: PolicyPlan, drafts: Sequence[Draft]) -> int:
    """Return the index of the part that is charged for the time of drafting. It is a part that was asked. If several
    were asked, it is one that is not free, because free parts (lookups) take almost no time."""
    asked = {drafts[i].part for i in plan.asks} or {0}
    return max(asked, key=lambda number: not plan.parts[number].controller.free if plan.parts else 0)


def _is_own(number: int, draft: Draft) -> bool:
    """Return True if part `number` is responsible for a draft: it was the last part that was asked, or it was not asked
    although no earlier part had drafted anything."""
    return draft.part == number or (draft.part < number and not draft.tokens)


def _is_others(number: int, draft: Draft) -> bool:
    """Return True if another part is responsible for a draft: a later part was asked, or an earlier part drafted
    tokens."""
    return draft.part > number or (draft.part < number and bool(draft.tokens))
