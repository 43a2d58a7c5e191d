"""Who drafts for which requests, and how much: an engine's drafters, each with what decides its draft length."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.drafters.base import Ask, Drafter
from paceline.engine.draft_length import Controller, RoundOutcome
from paceline.errors import InvalidOption
from paceline.protocols import KVCache
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import check

if TYPE_CHECKING:
    from paceline.engine.engine import Request


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request is drafted for. `drafter`: the name of one that the engine has; None: not at all. `most`: at most
    so much per round; None: as much as suits the drafter."""

    drafter: str | None
    most: DraftBudget | None = None


OFF = Speculation(None, DraftBudget.chain(0))
"""Plain decoding: not even what a grammar forces is drafted."""


class DraftPolicy:
    """A drafter, and how much it drafts: `draft`, or what a controller finds best up to what the drafter likes."""

    def __init__(self, name: str, drafter: Drafter, draft: DraftBudget | None) -> None:
        self.name, self.drafter = name, drafter
        self.draft = draft or drafter.draft
        self.controller = Controller(self.draft) if draft is None else None

    def propose(self, asks: Sequence[Ask], vocab_size: int) -> list[Draft]:
        """A draft for each ask. Raises `InvalidOption` for what is no draft: the error should name the drafter, which
        may be somebody's own, and not the tensor that broke on it."""
        drafts = self.drafter.propose(asks)
        if len(drafts) != len(asks):
            raise InvalidOption(
                f"{type(self.drafter).__name__} made {len(drafts)} drafts for {len(asks)} requests",
                "propose returns one Draft per ask, an empty Draft() where there is nothing to say",
            )
        for draft, ask in zip(drafts, asks, strict=True):
            check(draft)
            if len(draft.tokens) > ask.budget.nodes or any(not 0 <= t < vocab_size for t in draft.tokens):
                raise InvalidOption(
                    f"{type(self.drafter).__name__} drafted {len(draft.tokens)} tokens {draft.tokens}",
                    f"At most {ask.budget.nodes} were asked for, with ids below {vocab_size}",
                )
        return drafts


@dataclass(slots=True)
class PolicyGroup:
    """Requests of one round that share a pilot. `at`: their places in the round. `controller`: None where what is
    drafted must not depend on anything measured. `price`: see `Ask.price`."""

    policy: DraftPolicy
    at: list[int]
    controller: Controller | None
    budgets: list[DraftBudget]
    price: float


def shown_name(name: str) -> str:
    """A drafter's name without folders of this machine: `model:draft` of `model:/home/me/draft`."""
    return re.sub(r"(?<=[:@])[^:@]+", lambda found: _base(found[0]), name)


def _base(reference: str) -> str:
    path = Path(reference)
    local = path.is_absolute() or reference.startswith((".", "~")) or path.exists()
    return path.name or path.resolve().name if local else reference


class DraftPolicies:
    """An engine's drafters by name; the first is the default. A single one is named after its class. Each has a name
    that may be shown to anyone, and is found under the one it was given too."""

    def __init__(self, drafters: Drafter | Mapping[str, Drafter] | None, draft: DraftBudget | None) -> None:
        named = {type(drafters).__name__: drafters} if isinstance(drafters, Drafter) else drafters or {}
        self._named: dict[str, DraftPolicy] = {}
        for name, drafter in named.items():
            policy = DraftPolicy(self._unused(shown_name(name)), drafter, draft)
            self._named |= {policy.name: policy, name: policy}
        self.default = Speculation(next(iter(self._named), None))

    def _unused(self, name: str) -> str:
        """Two drafters may come from folders of one name."""
        return next(free for n in count(1) if (free := name if n == 1 else f"{name}-{n}") not in self._named)

    def __getitem__(self, name: str | None) -> DraftPolicy | None:
        """Raises `InvalidOption` for a name that there is not."""
        if name is None:
            return None
        if name not in self._named:
            names = ", ".join(policy.name for policy in self)
            raise InvalidOption(f"no drafter {name!r} is loaded", f"There are {names or 'none'}")
        return self._named[name]

    def __iter__(self) -> Iterator[DraftPolicy]:
        return iter(dict.fromkeys(self._named.values()))

    @staticmethod
    def taps(requests: Sequence[Request]) -> tuple[Tap, ...]:
        """What the drafters of these requests listen to."""
        return tuple(dict.fromkeys(tap for r in requests if r.policy for tap in r.policy.drafter.taps))

    @staticmethod
    def group(requests: Sequence[Request], drafts: Sequence[Draft], cache: KVCache) -> list[PolicyGroup]:
        """How much each request may draft this round; who has a draft already, or no drafter, is in no group."""
        by_policy: dict[DraftPolicy, list[int]] = {}
        for at, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            if request.policy and not draft.tokens:
                by_policy.setdefault(request.policy, []).append(at)
        return [_group(policy, at, requests, cache) for policy, at in by_policy.items()]


def _group(policy: DraftPolicy, at: list[int], requests: Sequence[Request], cache: KVCache) -> PolicyGroup:
    mine = [requests[i] for i in at]
    # Under the other rules than match a text depends on what is drafted, and must depend on nothing that was measured:
    # whoever shares a round with such a request keeps to the drafter's own size.
    free = all(r.sampler.rule == "match" or r.sampler.greedy for r in mine)
    controller = policy.controller if free else None
    draft = policy.draft
    if controller:
        behind = sum(len(r.token_ids) - r.num_seen_tokens for r in mine)
        draft = controller.choose(len(requests), behind, max(r.stream.left for r in mine))
    price = controller.price(len(requests)) if controller else 0.0
    return PolicyGroup(policy, at, controller, [_budget(draft, r, cache) for r in mine], price)


def _budget(draft: DraftBudget, request: Request, cache: KVCache) -> DraftBudget:
    """No deeper than what is left but one, since the target adds one token itself."""
    if request.most:
        most = request.most
        draft = DraftBudget(min(draft.nodes, most.nodes), min(draft.depth, most.depth), min(draft.branch, most.branch))
    return cache.fit(request.slot, draft.within(request.stream.left - 1))


def learn(
    groups: Sequence[PolicyGroup],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict],
    drafting: float,
    verifying: float,
) -> None:
    """What a round's drafts gave, told to those who decide how much is drafted."""
    rows = sum(1 + len(draft.tokens) for draft in drafts)
    for group in groups:
        if group.controller:
            made, kept = [drafts[i] for i in group.at], [verdicts[i] for i in group.at]
            group.controller.learn(RoundOutcome(group.budgets, made, kept, drafting, verifying, len(drafts), rows))
