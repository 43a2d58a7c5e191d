"""The drafting half of a round: requests grouped by drafter, each with its draft budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.draft_length import Controller
from paceline.engine.draft_policy import DraftPolicy
from paceline.engine.request import Request
from paceline.protocols import KVCache
from paceline.types import Draft, DraftBudget, Tap, Verdict


@dataclass(slots=True)
class PolicyGroup:
    """Requests of one round that share a drafter. `indices`: their places in the round. `controller`: None where drafts
    must not depend on measurements. `price`, `pace`: see `Ask`."""

    policy: DraftPolicy
    indices: list[int]
    controller: Controller | None
    budgets: list[DraftBudget]
    price: float
    pace: float


def taps(requests: Sequence[Request]) -> tuple[Tap, ...]:
    """Return the hidden states that the drafters of these requests need."""
    return tuple(dict.fromkeys(tap for r in requests if r.policy for tap in r.policy.drafter.taps))


def group(requests: Sequence[Request], drafts: Sequence[Draft], cache: KVCache) -> list[PolicyGroup]:
    """Group requests by drafter and choose their budgets; those with a draft already, or without a drafter, are left
    out."""
    by_policy: dict[DraftPolicy, list[int]] = {}
    for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        if request.policy and not draft.tokens:
            by_policy.setdefault(request.policy, []).append(i)
    return [_group(policy, indices, requests, cache) for policy, indices in by_policy.items()]


def _group(policy: DraftPolicy, indices: list[int], requests: Sequence[Request], cache: KVCache) -> PolicyGroup:
    members = [requests[i] for i in indices]
    # Under the other rules than match a text depends on what is drafted, and must depend on nothing that was measured:
    # a round with such a request keeps to the drafter's own size.
    free = all(r.sampler.rule == "match" for r in members)
    controller = policy.controller if free else None
    draft, price, pace = policy.draft, 0.0, 0.0
    if controller:
        behind = sum(len(r.token_ids) - r.num_seen_tokens for r in members)
        written = [len(r.token_ids) - r.num_prompt_tokens for r in members]
        left = max(r.stream.left for r in members)
        draft = controller.choose(len(requests), behind, left, max(written), written.count(0))
        if not draft.nodes:
            return PolicyGroup(policy, indices, controller, [draft] * len(members), price, pace)
        price, pace = controller.price(len(requests)), controller.pace
    return PolicyGroup(policy, indices, controller, [_budget(draft, r, cache) for r in members], price, pace)


def _budget(draft: DraftBudget, request: Request, cache: KVCache) -> DraftBudget:
    """Cut a budget to the request's own, and to one token less than may follow: the target adds one itself."""
    if limit := request.max_draft:
        nodes, depth = min(draft.nodes, limit.nodes), min(draft.depth, limit.depth)
        draft = DraftBudget(nodes, depth, min(draft.branch, limit.branch))
    return cache.fit(request.slot, draft.within(request.stream.left - 1))


def learn(
    groups: Sequence[PolicyGroup],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict],
    drafting: float,
    verifying: float,
) -> None:
    """Report a round's outcome to the controllers. `drafting`, `verifying`: seconds."""
    rows = sum(1 + len(draft.tokens) for draft in drafts)
    for group in groups:
        if group.controller:
            made, kept = [drafts[i] for i in group.indices], [verdicts[i] for i in group.indices]
            group.controller.learn(group.budgets, made, kept, drafting, verifying, len(drafts), rows)
