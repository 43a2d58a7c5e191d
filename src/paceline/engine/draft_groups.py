"""The drafting half of a round: requests grouped by drafter, each with its draft budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.drafters.stack import SURE
from paceline.engine.draft_length import Controller
from paceline.engine.draft_policy import DraftPolicy
from paceline.engine.request import Request
from paceline.protocols import KVCache
from paceline.types import Draft, DraftBudget, Tap, Verdict


@dataclass(slots=True)
class PolicyGroup:
    """Requests of one round that share a stage of a drafter. `indices`: their places in the round. `controller`: None
    where drafts must not depend on measurements. `stage`, `price`, `pace`: see `Ask`. `seconds`: of drafting. `left`:
    requests that another stage has drafted for. `rooms`, `sures`: see `Ask.room`, `Ask.sure`.
    """

    policy: DraftPolicy
    indices: list[int]
    budgets: list[DraftBudget]
    controller: Controller | None = None
    stage: int | None = None
    price: float = 0.0
    pace: float = 0.0
    seconds: float = 0.0
    left: list[int] = field(default_factory=list)
    rooms: list[DraftBudget] = field(default_factory=list)
    sures: list[float] = field(default_factory=list)

    @property
    def drafts(self) -> bool:
        """Whether anything is to be drafted."""
        return any(budget.nodes for budget in self.budgets)

    def leave(self, indices: Sequence[int]) -> None:
        """Leave these requests to a later stage."""
        self.left += [i for i in self.indices if i in indices]
        kept = [(i, budget) for i, budget in zip(self.indices, self.budgets, strict=True) if i not in indices]
        self.indices, self.budgets, self.rooms = [i for i, _ in kept], [budget for _, budget in kept], []


def taps(requests: Sequence[Request]) -> tuple[Tap, ...]:
    """Return the hidden states that the drafters of these requests need."""
    return tuple(dict.fromkeys(tap for r in requests if r.policy for tap in r.policy.drafter.taps))


def stages(requests: Sequence[Request], drafts: Sequence[Draft], cache: KVCache) -> Iterator[PolicyGroup]:
    """Yield a group for each drafter and stage, with budgets. `drafts`: those known already; the caller fills in each
    group's before it takes the next. Requests with a draft, or without a drafter, are left out."""
    by_policy: dict[DraftPolicy, list[int]] = {}
    for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        if request.policy and not draft.tokens:
            by_policy.setdefault(request.policy, []).append(i)
    for policy, indices in by_policy.items():
        # Under the other rules than match a text depends on what is drafted, and must depend on nothing that was
        # measured: a round with such a request keeps to the drafter's own size.
        if not policy.controllers or any(requests[i].sampler.rule != "match" for i in indices):
            yield PolicyGroup(policy, indices, [_budget(policy.draft, requests[i], cache) for i in indices])
        else:
            yield from _stages(policy, indices, requests, drafts, cache)


def _stages(
    policy: DraftPolicy, indices: list[int], requests: Sequence[Request], drafts: Sequence[Draft], cache: KVCache
) -> Iterator[PolicyGroup]:
    """Yield a group for each stage of a drafter, of the requests that no earlier one has drafted for, if any. A stage
    that rests has a group only beside others, to learn which tokens were theirs."""
    earlier: list[PolicyGroup] = []
    for stage, controller in enumerate(policy.controllers):
        own = [i for i in indices if not drafts[i].tokens and _waits(controller, requests[i])]
        members = [requests[i] for i in own]
        fresh = any(controller not in request.judged for request in members)
        resting = bool(members) and controller.rest(fresh, _written(members))
        if resting and len(policy.controllers) == 1:
            continue
        draft = _chosen(controller, members, len(requests)) if members and not resting else DraftBudget.chain(0)
        group = PolicyGroup(policy, own, [_budget(draft, r, cache) for r in members], controller, stage)
        group.left = [i for i in indices if drafts[i].tokens]
        if len(policy.controllers) > 1 and not controller.free:  # lookups lengthen chains of the others alone
            group.rooms = [_budget(policy.draft, r, cache) for r in members]
        group.price, group.pace = controller.price(len(requests)), controller.pace
        later = [other for other in policy.controllers[stage + 1 :] if other.drafting]
        group.sures = [SURE if any(_waits(other, r) for other in later) else 0.0 for r in members]
        if group.drafts:
            for other in earlier:
                other.leave(group.indices)
        earlier.append(group)
        yield group


def _waits(controller: Controller, request: Request) -> bool:
    """Return whether a request waits for this stage's draft: its first token does for none that reads the prompt."""
    return not controller.reads_prompt or request.stats.rounds > 0


def _chosen(controller: Controller, members: Sequence[Request], together: int) -> DraftBudget:
    behind = sum(len(r.token_ids) - r.num_seen_tokens for r in members) if controller.reads_prompt else 0
    left = max(r.stream.left for r in members)
    fresh = [r for r in members if controller not in r.judged]
    for request in fresh:
        request.judged.add(controller)
    return controller.choose(together, behind, left, _written(members), len(fresh), len(members))


def _written(members: Sequence[Request]) -> int:
    """Return the tokens of the longest reply."""
    return max(len(r.token_ids) - r.num_prompt_tokens for r in members)


def _budget(draft: DraftBudget, request: Request, cache: KVCache) -> DraftBudget:
    """Cut a budget to the request's own, and to one token less than may follow: the target adds one itself."""
    if request.max_draft:
        draft = draft.limited(request.max_draft)
    return cache.fit(request.slot, draft.within(request.stream.left - 1))


def learn(
    groups: Sequence[PolicyGroup], drafts: Sequence[Draft], verdicts: Sequence[Verdict], verifying: float
) -> None:
    """Report a round's outcome to the controllers. `verifying`: seconds."""
    if not groups:
        return
    rows, resumed = sum(1 + len(draft.tokens) for draft in drafts), any(draft.carried for draft in drafts)
    for group in groups:
        if group.controller:
            made, kept = [drafts[i] for i in group.indices], [verdicts[i] for i in group.indices]
            others = sum(len(verdicts[i].tokens) for i in group.left)
            group.controller.share(sum(len(verdict.tokens) for verdict in kept), others)
            if not group.indices:
                continue
            told = group.seconds, verifying, len(drafts), rows, resumed
            group.controller.learn(group.budgets, made, kept, *told)
