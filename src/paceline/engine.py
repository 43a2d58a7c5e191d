"""The step that everything else serves: draft, verify, commit, stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

from torch import Tensor

from paceline.accept import RULES
from paceline.controller import Controller, Round
from paceline.errors import InvalidOption, memory_named
from paceline.protocols import Ask, Drafter, KVCache, Target
from paceline.sampler import Sampler
from paceline.stats import Clock, Stats
from paceline.stream import Chunk, TextStream
from paceline.tree import CHUNK, check, pack, pack_prefix
from paceline.types import Draft, FinishReason, Forward, Rows, Tree, Verdict, Want

_FORCED = 32
"""Tokens at most of a draft that cannot be wrong."""


@dataclass(slots=True)
class Request:
    """A reply in the making."""

    sampler: Sampler
    stream: TextStream
    stats: Stats
    slot: int
    heard: int = 0
    """How much of the text the drafter had been told when it last made a draft."""
    finish: FinishReason | None = None
    error: Exception | None = None
    closed: bool = False

    @property
    def text(self) -> list[int]:
        """The prompt and the reply so far; its last token is the pending one, chosen but not yet in the cache."""
        return self.sampler.text

    @property
    def position(self) -> int:
        """Where the pending token stands; also how much of the text the cache holds."""
        return len(self.text) - 1

    def judge(self, draft: Draft, logits: Tensor) -> Verdict:
        """What stands of a draft, as far as the reply goes.

        A request that fails here, in a processor or criterion of the user's too, ends alone: the others go on.
        """
        try:
            return self.stream.trim(RULES[self.sampler.rule](draft, logits, self.sampler))
        except Exception as error:
            self.error = error
            return self.stream.trim(Verdict((), (), "error"))


Method = TypeVar("Method", bound=Callable[..., Any])


def _alone(method: Method) -> Method:
    """One thread at a time: a pass and its commit belong together. What asked to finish meanwhile then does."""

    @wraps(method)
    def run(self: Engine, *args: Any, **options: Any) -> Any:
        with self._lock:
            self._deep += 1
            try:
                return method(self, *args, **options)
            finally:
                self._deep -= 1
                while self._late and not self._deep:
                    self._finish(self._late.pop())

    return run  # type: ignore[return-value]


class Engine:
    """Runs requests over one target, one cache and one drafter. Knows rounds, not prompts or words.

    Threads may share one: their rounds take turns.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, draft: Tree | None = None) -> None:
        """`draft`: how much to draft per round; None leaves it to a controller, up to what the drafter likes."""
        self.target = target
        self.drafter = drafter
        self.draft = draft or (drafter.draft if drafter else Tree.chain(0))
        self._controller = Controller(self.draft) if drafter and draft is None else None
        self.cache: KVCache = target.new_cache()
        self._taps = drafter.taps if drafter else ()
        self._lock, self._deep = RLock(), 0
        self._late: list[Request] = []

    @_alone
    def start(self, sampler: Sampler, stream: TextStream, stats: Stats, like: Request | None = None) -> Request:
        """Take a slot for the sampler's text, a prompt of at least one token. `finish` must follow, whatever happens
        between. `like`: a request with the same prompt that has been prefilled, so that this one need not be.
        """
        begun = like is not None and len(like.text) > like.sampler.prompt
        # A drafter that was fed hidden states has by now those of the reply as well.
        like = None if begun and self._taps else like
        slot = self.cache.fork(like.slot) if like else self.cache.acquire(len(sampler.text))
        request = Request(sampler, stream, stats, slot)
        try:
            if like:
                self.cache.truncate(slot, request.position)
            if self.drafter and like and not begun:
                self.drafter.fork(request.slot, like.slot, request.text)
            elif self.drafter:
                self.drafter.admit(request.slot, request.text)
        except BaseException:
            self._finish(request)
            raise
        return request

    @_alone
    def prefill(self, request: Request) -> None:
        """All of the prompt but its last token, in chunks. That one is row 0 of the first round."""
        clock = Clock()
        while (done := self.cache.lengths[request.slot]) < request.position:
            chunk = request.text[done : min(done + CHUNK, request.position)]
            out = self._forward(
                pack_prefix(chunk, request.slot, done, self.target.device), Want("none", taps=self._taps)
            )
            self.cache.commit(request.slot, range(1, len(chunk)))
            if self.drafter:
                taps = {tap: states[0, : len(chunk)] for tap, states in out.taps.items()}
                self.drafter.feed(request.slot, chunk, taps)
        clock.lap("prefill")
        _charge([request], clock)

    @_alone
    def step(self, requests: Sequence[Request]) -> list[list[Chunk]]:
        """One round for every request; returns what each has to show."""
        clock = Clock()
        controller = self._control(requests)
        forced = [self._forced(request) for request in requests]
        # What a grammar forces needs no drafter, and says nothing of one.
        budgets = self._budgets(requests, controller)
        budgets = [Tree.chain(0) if given.tokens else budget for given, budget in zip(forced, budgets, strict=True)]
        proposed = self._propose(requests, budgets)
        drafts = [given if given.tokens else made for given, made in zip(forced, proposed, strict=True)]
        clock.lap("draft")
        out = self._verify(requests, drafts)
        verdicts = [r.judge(made, logits) for r, made, logits in zip(requests, drafts, out.logits, strict=True)]
        clock.lap("verify")
        self._commit(requests, verdicts, out)
        clock.lap("commit")
        _charge(requests, clock)
        if controller:
            draft, verify, commit = (clock.laps[phase] for phase in ("draft", "verify", "commit"))
            controller.learn(Round(budgets, drafts, verdicts, draft, verify + commit))
        for r, made, verdict in zip(requests, drafts, verdicts, strict=True):
            r.stats.count(made, verdict)
        return [r.stream.emit(v, logits) for r, v, logits in zip(requests, verdicts, out.logits, strict=True)]

    def finish(self, request: Request) -> None:
        """Give the slot back: after the last round, or after one that failed.

        A stream may be dropped at any moment, by a callback in the middle of a pass too: its slot stays until then.
        """
        with self._lock:
            if self._deep:
                self._late.append(request)
            else:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        if request.closed:
            return
        request.finish = request.finish or "cancelled"
        if self.drafter:
            self.drafter.release(request.slot)
        self.cache.release(request.slot)
        request.closed = True

    def _control(self, requests: Sequence[Request]) -> Controller | None:
        """What decides how much these draft, None where it is fixed.

        Under the other rules than match a text depends on what is drafted, and must depend on nothing that was
        measured: whoever shares a round with such a request keeps to the drafter's own size.
        """
        free = all(r.sampler.rule == "match" or r.sampler.greedy for r in requests)
        return self._controller if free else None

    def _budgets(self, requests: Sequence[Request], controller: Controller | None) -> list[Tree]:
        """How much each one may draft: no deeper than what is left but one, since the target adds one token itself."""
        draft = self.draft
        if controller:
            behind = sum(len(r.text) - r.heard for r in requests)
            draft = controller.choose(len(requests), behind, max(r.stream.left for r in requests))
        return [self.cache.fit(r.slot, draft.within(r.stream.left - 1)) for r in requests]

    def _forced(self, request: Request) -> Draft:
        """What can only come next, whatever the target says: it is right, and costs no more than its rows."""
        room = self.cache.fit(request.slot, Tree.chain(_FORCED).within(request.stream.left - 1))
        return Draft.chain(request.sampler.forced(room.depth))

    def _propose(self, requests: Sequence[Request], budgets: Sequence[Tree]) -> list[Draft]:
        if self.drafter is None or not any(budget.nodes for budget in budgets):
            return [Draft()] * len(requests)
        for request in requests:
            request.heard = len(request.text)
        asks = [Ask(r.slot, b, r.sampler, self.cache) for r, b in zip(requests, budgets, strict=True)]
        drafts = self.drafter.propose(asks)
        if len(drafts) != len(asks):
            raise InvalidOption(
                f"{type(self.drafter).__name__} made {len(drafts)} drafts for {len(asks)} requests",
                "propose returns one Draft per ask, an empty Draft() where there is nothing to say",
            )
        for made, ask in zip(drafts, asks, strict=True):
            self._check(made, ask.budget)
        return drafts

    def _check(self, draft: Draft, budget: Tree) -> None:
        """A drafter of somebody's own may err; the error should name it, not the tensor that broke on it."""
        check(draft)
        if len(draft.tokens) > budget.nodes or any(not 0 <= t < self.target.vocab_size for t in draft.tokens):
            raise InvalidOption(
                f"{type(self.drafter).__name__} drafted {len(draft.tokens)} tokens {draft.tokens}",
                f"At most {budget.nodes} were asked for, with ids below {self.target.vocab_size}",
            )

    def _verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> Forward:
        rows = pack(
            [r.text[-1] for r in requests],
            drafts,
            [r.slot for r in requests],
            [r.position for r in requests],
            self.target.device,
        )
        return self._forward(rows, Want("all", taps=self._taps))

    def _commit(self, requests: Sequence[Request], verdicts: Sequence[Verdict], out: Forward) -> None:
        for i, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
            self.cache.commit(request.slot, verdict.path)
            request.text.extend(verdict.tokens)
            request.finish = verdict.finish
            if self.drafter and not verdict.finish:
                self.drafter.observe(request.slot, verdict, {tap: states[i] for tap, states in out.taps.items()})

    def _forward(self, rows: Rows, want: Want) -> Forward:
        cause = f"no memory on {self.target.device} for a pass of {rows.tokens.numel()} rows"
        with memory_named(cause, "Use a shorter prompt, a smaller draft or a smaller dtype"):
            return self.target.forward(rows, self.cache, want)


def _charge(requests: Sequence[Request], clock: Clock) -> None:
    """Requests that share a pass share its time: each waited for all of it."""
    for request in requests:
        for phase, seconds in clock.laps.items():
            request.stats.seconds[phase] += seconds
