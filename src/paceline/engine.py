"""The step that everything else serves: draft, verify, commit, stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.accept import match
from paceline.errors import InvalidOption, OutOfMemory, is_out_of_memory
from paceline.protocols import Ask, Drafter, KVCache, Target
from paceline.sampling import Sampler
from paceline.stats import Clock, Stats
from paceline.stream import Chunk, TextStream
from paceline.tree import CHUNK, check, pack, pack_prefix
from paceline.types import Draft, FinishReason, Forward, Rows, Tree, Verdict, Want


@dataclass(slots=True)
class Request:
    """A reply in the making. `text` is the prompt and the reply so far; its last token is the pending one, chosen
    but not yet in the cache."""

    text: list[int]
    sampler: Sampler
    stream: TextStream
    stats: Stats
    slot: int
    finish: FinishReason | None = None
    closed: bool = False

    @property
    def position(self) -> int:
        """Where the pending token stands; also how much of the text the cache holds."""
        return len(self.text) - 1


class Engine:
    """Runs requests over one target, one cache and one drafter. Knows rounds, not prompts or words."""

    def __init__(self, target: Target, drafter: Drafter | None = None, draft: Tree | None = None) -> None:
        """`draft`: how much to draft per round; None leaves it to the drafter."""
        self.target = target
        self.drafter = drafter
        self.draft = draft or (drafter.draft if drafter else Tree.chain(0))
        self.cache: KVCache = target.new_cache()
        self._taps = drafter.taps if drafter else ()

    def start(self, prompt: Sequence[int], sampler: Sampler, stream: TextStream, stats: Stats) -> Request:
        """Take a slot for a prompt of at least one token. `finish` must follow, whatever happens between."""
        slot = self.cache.acquire(self.target.span(len(prompt)))
        request = Request(list(prompt), sampler, stream, stats, slot)
        try:
            if self.drafter:
                self.drafter.admit(request.slot, prompt)
        except BaseException:
            self.finish(request)
            raise
        return request

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

    def step(self, requests: Sequence[Request]) -> list[list[Chunk]]:
        """One round for every request; returns what each has to show."""
        clock = Clock()
        drafts = self._propose(requests)
        clock.lap("draft")
        out = self._verify(requests, drafts)
        verdicts = [
            match(draft, out.logits[i], r.position, r.sampler)
            for i, (r, draft) in enumerate(zip(requests, drafts, strict=True))
        ]
        clock.lap("verify")
        verdicts = [r.stream.trim(verdict) for r, verdict in zip(requests, verdicts, strict=True)]
        self._commit(requests, verdicts, out)
        clock.lap("commit")
        _charge(requests, clock)
        for r, draft, verdict in zip(requests, drafts, verdicts, strict=True):
            r.stats.count(draft, verdict)
        return [r.stream.emit(verdict) for r, verdict in zip(requests, verdicts, strict=True)]

    def finish(self, request: Request) -> None:
        """Give the slot back: after the last round, or in the middle of one that failed."""
        if request.closed:
            return
        request.finish = request.finish or "cancelled"
        if self.drafter:
            self.drafter.release(request.slot)
        self.cache.release(request.slot)
        request.closed = True

    def _propose(self, requests: Sequence[Request]) -> list[Draft]:
        if self.drafter is None or self.draft.nodes == 0:
            return [Draft()] * len(requests)
        budgets = [self._budget(r) for r in requests]
        asks = [Ask(r.slot, r.text[-1], r.position, b, r.sampler) for r, b in zip(requests, budgets, strict=True)]
        drafts = self.drafter.propose(asks)
        for draft, ask in zip(drafts, asks, strict=True):
            self._check(draft, ask.budget)
        return drafts

    def _check(self, draft: Draft, budget: Tree) -> None:
        """A drafter of somebody's own may err; the error should name it, not the tensor that broke on it."""
        check(draft)
        if len(draft.tokens) > budget.nodes or any(not 0 <= t < self.target.vocab_size for t in draft.tokens):
            raise InvalidOption(
                f"{type(self.drafter).__name__} drafted {len(draft.tokens)} tokens {draft.tokens}",
                f"At most {budget.nodes} were asked for, with ids below {self.target.vocab_size}",
            )

    def _budget(self, request: Request) -> Tree:
        """The target adds one token itself, so a draft deeper than what is left but one cannot be used."""
        return self.cache.fit(request.slot, self.draft.within(request.stream.left - 1))

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
            request.text += verdict.tokens
            request.finish = verdict.finish
            if self.drafter and not verdict.finish:
                self.drafter.observe(request.slot, verdict, {tap: states[i] for tap, states in out.taps.items()})

    def _forward(self, rows: Rows, want: Want) -> Forward:
        try:
            return self.target.forward(rows, self.cache, want)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"no memory on {self.target.device} for a pass of {rows.tokens.numel()} rows",
                "Use a shorter prompt, a smaller draft or a smaller dtype",
            ) from error


def _charge(requests: Sequence[Request], clock: Clock) -> None:
    """Requests that share a pass share its time: each waited for all of it."""
    for request in requests:
        for phase, seconds in clock.laps.items():
            request.stats.seconds[phase] += seconds
