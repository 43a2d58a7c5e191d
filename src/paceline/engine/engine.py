"""The step that everything else serves: draft, verify, commit, stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from threading import RLock
from typing import Any, TypeVar

from torch import Tensor

from paceline.engine.detokenizer import Chunk, Origin, TextStream
from paceline.engine.draft_policy import DraftPolicies, DraftPolicy, PolicyGroup, Speculation, learn
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.prompt_logprobs import PromptLogprobs
from paceline.engine.self_check import guarantee, seamless
from paceline.engine.stats import Clock, Guarantee, Stats
from paceline.errors import OutOfMemory, memory_named
from paceline.protocols import Ask, Drafter, KVCache, Target
from paceline.sampling.sampler import Sampler
from paceline.types import Draft, DraftBudget, FinishReason, Forward, Rows, Tap, Verdict, Want
from paceline.verify.rules import RULES
from paceline.verify.tree import PREFILL_ROWS, pack, pack_prefix

_FORCED = 32
"""Tokens at most of a draft that cannot be wrong."""


@dataclass(slots=True)
class Request:
    """A reply in the making."""

    sampler: Sampler
    stream: TextStream
    stats: Stats
    slot: int
    policy: DraftPolicy | None = None
    """What drafts for it."""
    most: DraftBudget | None = None
    """At most so much per round; None: as much as suits the drafter."""
    scores: PromptLogprobs | None = None
    """Takes the prompt's own log-probabilities; a prompt that is scored is fed whole, whatever is known of it."""
    num_seen_tokens: int = 0
    """How much of the text the drafter had been told when it last made a draft."""
    finish: FinishReason | None = None
    error: Exception | None = None
    active: bool = True
    """Whether it holds its slot."""
    spoilt: bool = False
    """A round broke off after it was judged: what it has shown and what the cache holds may differ."""

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
    """Runs requests over one target, one cache and its drafters. Knows rounds, not prompts or words.

    Threads may share one: their rounds take turns.
    """

    def __init__(
        self, target: Target, drafter: Drafter | Mapping[str, Drafter] | None = None, draft: DraftBudget | None = None
    ) -> None:
        """`drafter`: one, or several by name, of which the first is the default. `draft`: how much to draft per round;
        None leaves it to a controller, up to what the drafter likes."""
        self.target = target
        self.policies = DraftPolicies(drafter, draft)
        self.cache: KVCache = target.new_cache()
        self.prefixes: PrefixCache | None = None
        """Beginnings of texts that may come again; set by `remember`."""
        self._lock, self._deep = RLock(), 0
        self._late: list[Request] = []

    @cached_property
    def guarantee(self) -> Guarantee:
        """Whether speculation keeps the text bit for bit on this machine, or up to rounding."""
        return guarantee(self.target)

    @cached_property
    def seamless(self) -> bool:
        """Whether prompts may be cut anywhere and texts go on from each other, bit for bit (`self_check.seamless`)."""
        return seamless(self.target, self.guarantee)

    def remember(self, limit: int) -> None:
        """From now on prompts that begin like an earlier text are fed from there. `limit`: bytes of what is kept."""
        self.prefixes = PrefixCache(limit, self.seamless)

    @_alone
    def start(
        self,
        sampler: Sampler,
        stream: TextStream,
        stats: Stats,
        like: Request | None = None,
        speculation: Speculation | None = None,
    ) -> Request:
        """Take a slot for the sampler's text, a prompt of at least one token. `finish` must follow, whatever happens
        between. `like`: a request with the same prompt that has been prefilled, so that this one need not be.
        """
        how = speculation or self.policies.default
        policy = self.policies[how.drafter]
        begun = like is not None and len(like.text) > like.sampler.prompt
        # A drafter that was fed hidden states has by now those of the reply as well.
        if like and policy and policy.drafter.taps and (begun or like.policy is not policy):
            like = None
        slot = self.cache.fork(like.slot) if like else self.cache.acquire(len(sampler.text))
        request = Request(sampler, stream, stats, slot, policy, how.most)
        with self._unless_it_fails(request):
            if like:
                self.cache.truncate(slot, request.position)
            if policy and like and like.policy is policy and not begun:
                policy.drafter.fork(slot, like.slot, request.text)
            elif policy:
                policy.drafter.admit(slot, request.text)
        return request

    @_alone
    def suspend(self, request: Request) -> None:
        """Give the slot to others for a while. The text so far stays, and `resume` goes on with it."""
        self._leave(request)

    @_alone
    def resume(self, request: Request) -> None:
        """Take a slot again; a prefill of all that the text has by now must follow."""
        request.slot, request.active, request.num_seen_tokens = self.cache.acquire(request.sampler.prompt), True, 0
        with self._unless_it_fails(request):
            if request.policy:
                request.policy.drafter.admit(request.slot, request.text)

    def prefill(self, request: Request) -> None:
        """All of the prompt but its last token. That one is row 0 of the first round."""
        while self.feed(request):
            pass

    @_alone
    def feed(self, request: Request, most: int = PREFILL_ROWS) -> int:
        """The next chunk of the prompt. Returns its tokens; 0 where nothing is left.

        `most`: no more than so many at once, where it makes no difference how a prompt is cut.
        """
        clock = Clock()
        scores = request.scores
        done = self.cache.lengths[request.slot] or (0 if scores else self._recall(request))
        most = PREFILL_ROWS if most < PREFILL_ROWS and not self.seamless else most
        chunk = request.text[done : min(done + most, request.position)]
        if chunk:
            rows = pack_prefix(chunk, request.slot, done, self.target.device)
            out = self._forward(rows, Want("all" if scores else "none", taps=self.policies.taps([request])))
            self.cache.commit(rows, [range(1, len(chunk))])
            if request.policy:
                taps = {tap: states[0, : len(chunk)] for tap, states in out.taps.items()}
                request.policy.drafter.feed(request.slot, chunk, taps)
            if scores:
                scores.push(done, request.text[done + 1 : done + 1 + len(chunk)], out.logits[0, : len(chunk)])
            if done + len(chunk) == request.position:
                self._keep(request)
        clock.lap("prefill")
        _charge([request], clock)
        return len(chunk)

    def _recall(self, request: Request) -> int:
        """Begin with what is known of the prompt. Returns how many of its tokens that is."""
        if self.prefixes is None:
            return 0
        policy = request.policy
        hit = self.prefixes.find(request.text, policy.name if policy and policy.drafter.needs_past else None)
        if hit is None:
            return 0
        known = self.cache.load(request.slot, hit.target, hit.length)
        # A cache may deny what was found, for a text that goes on under its first prompt's rotary factors (`resume`).
        if policy and known and (saved := hit.drafters.get(policy.name)):
            policy.drafter.load(request.slot, saved, hit.length)
        if not request.stats.rounds:  # else it goes on with a text of its own, which is no hit
            request.stats.cached = known
        return known

    def _keep(self, request: Request) -> None:
        """What was computed of a text is kept for others, as long as there is memory. What failed is not."""
        if self.prefixes is None or request.error or request.spoilt:
            return
        policy = request.policy
        with suppress(OutOfMemory), memory_named("no memory to keep a text", "Keep fewer"):
            saved = {policy.name: policy.drafter.save(request.slot)} if policy else {}
            self.prefixes.store(request.text, request.sampler.prompt, self.cache.save(request.slot), saved)

    @_alone
    def step(self, requests: Sequence[Request]) -> list[list[Chunk]]:
        """One round for every request; returns what each has to show."""
        clock = Clock()
        # What a grammar forces needs no drafter, and says nothing of one.
        drafts = [self._forced(request) for request in requests]
        groups = self.policies.group(requests, drafts, self.cache)
        self._propose(requests, groups, drafts)
        clock.lap("draft")
        rows, out = self._verify(requests, drafts)
        with _spoiling(requests):
            verdicts = [r.judge(made, logits) for r, made, logits in zip(requests, drafts, out.logits, strict=True)]
            clock.lap("verify")
            self._commit(requests, verdicts, rows, out)
            clock.lap("commit")
            _charge(requests, clock)
            learn(groups, drafts, verdicts, clock.laps["draft"], clock.laps["verify"] + clock.laps["commit"])
            return [self._emit(*one) for one in zip(requests, drafts, verdicts, out.logits, strict=True)]

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
        request.finish = request.finish or "cancelled"
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if not request.active:
            return
        request.active = False
        # Whatever fails on the way, the slot is free again.
        try:
            if self.cache.lengths[request.slot] >= request.position:
                self._keep(request)
        finally:
            try:
                if request.policy:
                    request.policy.drafter.release(request.slot)
            finally:
                self.cache.release(request.slot)

    @contextmanager
    def _unless_it_fails(self, request: Request) -> Iterator[None]:
        """A request that cannot begin holds no slot."""
        try:
            yield
        except BaseException:
            self._leave(request)
            raise

    def _forced(self, request: Request) -> Draft:
        """What can only come next, whatever the target says: it is right, and costs no more than its rows."""
        draft = DraftBudget.chain(_FORCED) if request.most is None else request.most
        room = self.cache.fit(request.slot, draft.within(request.stream.left - 1))
        return Draft.chain(request.sampler.forced(room.depth))

    def _propose(self, requests: Sequence[Request], groups: Sequence[PolicyGroup], drafts: list[Draft]) -> None:
        """Fills in the drafts of each group."""
        for group in groups:
            if not any(budget.nodes for budget in group.budgets):
                continue
            asks = []
            for i, budget in zip(group.at, group.budgets, strict=True):
                request = requests[i]
                request.num_seen_tokens = len(request.text)
                asks.append(Ask(request.slot, budget, request.sampler, self.cache, group.price))
            for i, draft in zip(group.at, group.policy.propose(asks, self.target.vocab_size), strict=True):
                drafts[i] = draft

    def _verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> tuple[Rows, Forward]:
        rows = pack(
            [r.text[-1] for r in requests],
            drafts,
            [r.slot for r in requests],
            [r.position for r in requests],
            self.target.device,
        )
        return rows, self._forward(rows, Want("all", taps=self.policies.taps(requests)))

    def _commit(self, requests: Sequence[Request], verdicts: Sequence[Verdict], rows: Rows, out: Forward) -> None:
        self.cache.commit(rows, [verdict.path for verdict in verdicts])
        for i, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
            request.text.extend(verdict.tokens)
            request.finish = verdict.finish
            if request.policy and not verdict.finish:
                self._tell(request, verdict, {tap: states[i] for tap, states in out.taps.items()})

    @staticmethod
    def _tell(request: Request, verdict: Verdict, taps: dict[Tap, Tensor]) -> None:
        """A drafter that fails here ends its own request, which shows what it has; the others go on."""
        assert request.policy is not None
        try:
            request.policy.drafter.observe(request.slot, verdict, taps)
        except Exception as error:
            request.error, request.finish = error, "error"

    @staticmethod
    def _emit(request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> list[Chunk]:
        request.stats.count(draft, verdict)
        return request.stream.emit(verdict, logits, _origin(draft, verdict))

    def _forward(self, rows: Rows, want: Want) -> Forward:
        cause = f"no memory on {self.target.device} for a pass of {rows.tokens.numel()} rows"
        try:
            with memory_named(cause, "Use a shorter prompt, a smaller draft or a smaller dtype"):
                return self.target.forward(rows, self.cache, want)
        except OutOfMemory:
            if not (self.prefixes and self.prefixes.nbytes):
                raise
        # What may come again gives way to what is being written.
        self.prefixes.clear()
        return self._forward(rows, want)


@contextmanager
def _spoiling(requests: Sequence[Request]) -> Iterator[None]:
    """What breaks off between judging and showing cannot be tried again."""
    try:
        yield
    except BaseException:
        for request in requests:
            request.spoilt = True
        raise


def _origin(draft: Draft, verdict: Verdict) -> Origin:
    """Where the token comes from that the target adds itself."""
    if not draft.tokens:
        return "plain"
    last = verdict.path[-1] if verdict.path else 0
    return "correction" if last in draft.parents else "bonus"


def _charge(requests: Sequence[Request], clock: Clock) -> None:
    """Requests that share a pass share its time: each waited for all of it."""
    for request in requests:
        for phase, seconds in clock.laps.items():
            request.stats.seconds[phase] += seconds
