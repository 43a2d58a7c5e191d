"""Replays: running the engine over recorded texts, with real drafters and a target that only charges its price."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from torch import Tensor

from paceline.bench.costs import PassTimer
from paceline.bench.replay.prices import FreePrices, Prices
from paceline.bench.replay.text_target import CannotReplay, TargetStates, TextSampler, TextTarget, VirtualClock
from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.stack import DrafterWrapper
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.request import Request
from paceline.engine.results import Batch
from paceline.engine.scheduler import Task
from paceline.engine.stats import Stats, Timer
from paceline.llm import LLM
from paceline.recording.rows import RecordedReply
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, DraftBudget, Tap, Verdict

_TIMED_TOKENS = 64
"""Number of tokens of a reply over which drafting is timed, with and without passes between the drafts."""
_MAX_SLOWDOWN = 4.0
"""Maximum slowdown of passes and drafts by each other. Larger measurements are noise."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The slowdown of drafts and passes by each other.

    After a pass, the processor's caches hold the target's weights, and the drafter's threads have to wake up. After a
    draft it is the reverse.

    Attributes:
        draft: Time of a draft after a pass relative to a draft after another draft.
        verify: Time of a pass after a draft relative to a pass after another pass.
    """

    draft: float = 1.0
    verify: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay.

    Attributes:
        stats: Statistics of each reply. Their times are predictions.
        rows: Total rows of all verifying passes.
        seconds: Predicted time of all replies.
        draft_seconds: Measured time of each draft.
        replay_seconds: Duration of the replay itself.
    """

    stats: list[Stats]
    rows: int
    seconds: float
    draft_seconds: list[float]
    replay_seconds: float

    @property
    def tokens(self) -> int:
        """Total tokens of all replies."""
        return sum(s.tokens for s in self.stats)

    @property
    def rounds(self) -> int:
        """Total rounds of all replies."""
        return sum(s.rounds for s in self.stats)

    @property
    def reply_seconds(self) -> list[float]:
        """Predicted time of each reply. In a batch, the total time is divided among the replies."""
        work = [sum(seconds for phase, seconds in s.seconds.items() if phase != "other") for s in self.stats]
        return [self.seconds * x / max(sum(work), 1e-12) for x in work]


class ChargedDrafter(DrafterWrapper):
    """Charges the time of the inner drafter to a virtual clock, multiplied by `slowdown`.

    Attributes:
        seconds: Measured time of each `propose`.
    """

    def __init__(self, inner: Drafter, clock: VirtualClock, slowdown: float, timer: Timer) -> None:
        super().__init__(inner)
        self._clock, self._slowdown, self._timer = clock, slowdown, timer
        self.seconds: list[float] = []

    def _charged(self, began: float) -> float:
        seconds = self._timer() - began
        self._clock.charge(self._slowdown * seconds)
        return seconds

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        began = self._timer()
        try:
            return super().propose(asks)
        finally:
            self.seconds.append(self._charged(began))

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        began = self._timer()
        super().feed(slot, tokens, taps)
        self._charged(began)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        began = self._timer()
        super().observe(slot, verdict, out)
        self._charged(began)


class Replayer:
    """Replays recorded replies of a model in order.

    With a fixed draft budget, all counts (rounds, drafted tokens, accepted tokens by depth) are the same as for real
    replies with the same drafter. If a controller chooses the budgets, they depend on prices, so the counts are
    predictions too.
    """

    def __init__(
        self,
        model: Loaded,
        prices: Prices | None = None,
        width: int = 1,
        prefix_bytes: int = 0,
        timer: Timer = time.perf_counter,
        states: Path | None = None,
    ) -> None:
        """Prepare replays.

        Args:
            model: The model that was recorded.
            prices: Prices of the target's work. By default, everything is free.
            width: Number of replies that share passes.
            prefix_bytes: Size of the prefix cache. 0 means none.
            timer: Clock that measures drafting.
            states: Folder of hidden states that were stored with the recording.
        """
        self._model, self._prices, self._width = model, prices or FreePrices(), width
        self._prefix_bytes, self._timer = prefix_bytes, timer
        self._vocabulary = LLM(model).vocabulary
        self._states = TargetStates(model.target, states)

    def run(
        self,
        replies: Sequence[RecordedReply],
        drafter: Drafter | None = None,
        budget: DraftBudget | None = None,
        slowdown: Slowdown = Slowdown(),
        on_verify: Callable[[int], object] = lambda rows: None,
        on_reply: Callable[[], object] = lambda: None,
    ) -> ReplayResult:
        """Replay replies.

        Args:
            replies: Recorded replies.
            drafter: A new drafter, or None for plain decoding.
            budget: Draft budget per round. A controller chooses it if it is None.
            slowdown: Slowdown of drafts and passes.
            on_verify: Called with the number of rows in every verifying pass.
            on_reply: Called after each reply.

        Raises:
            CannotReplay: If the drafter runs the target's own layers.
            PacelineError: The first error of a drafter.
        """
        if drafter and not drafter.replayable:
            raise CannotReplay
        began, clock = self._timer(), VirtualClock()
        target = TextTarget(self._model.target, self._states, self._prices, clock, slowdown.verify)
        target.on_verify = on_verify
        charged = ChargedDrafter(drafter, clock, slowdown.draft, self._timer) if drafter else None
        engine = Engine(target, charged, budget, clock)
        if self._prefix_bytes:
            engine.prefixes = PrefixCache(self._prefix_bytes, LLM(self._model).engine.chunk_invariant)
        tasks = [Task(partial(self._start, engine, target, clock, reply)) for reply in replies]
        for _, chunk in Batch(engine, tasks, self._width):
            if chunk.finish_reason:
                on_reply()
        stats = [task.request.stats for task in tasks if task.request]
        return ReplayResult(stats, target.rows, clock.now, charged.seconds if charged else [], self._timer() - began)

    def _start(
        self, engine: Engine, target: TextTarget, clock: VirtualClock, reply: RecordedReply, source: Request | None
    ) -> Request:
        text, sampling = reply.token_ids, reply.sampling
        sampler = TextSampler.of(
            sampling.sampler(reply.sample, self._vocabulary), text, self._prices.choice(sampling), clock
        )
        stats = Stats(sampler.noise.seed, "bits", engine.policies.default.drafter, timer=clock)
        stream = TextStream(_stop_at_recorded_end(reply), (), lambda ids: "", target.context_length - len(reply.prompt))
        request = engine.start(reply.prompt, sampler, stream, stats)
        target.set_text(request.slot, text)
        return request

    def slowdown(
        self, reply: RecordedReply, make: Callable[[], Drafter | None], budget: DraftBudget | None, probe: PassTimer
    ) -> Slowdown:
        """Measure how much drafts and passes slow each other down.

        A reply is replayed twice, with and without passes of the target between the drafts.

        Args:
            reply: A recorded reply.
            make: Creates a new drafter.
            budget: Draft budget per round. None for the drafter's maximum.
            probe: Timed passes of the target.

        Returns:
            The slowdown. It is 1 if the drafter cannot be replayed.
        """
        drafter, short, passes = make(), [replace(reply, reply=reply.reply[:_TIMED_TOKENS])], list[float]()
        if drafter is None:
            return Slowdown()

        def on_verify(rows: int) -> None:
            passes.append(probe.verify(rows) / max(probe.verify(rows), 1e-9))

        try:
            cold = self.run(short, drafter, budget or drafter.draft, on_verify=on_verify).draft_seconds
            hot = self.run(short, make(), budget or drafter.draft).draft_seconds
        except CannotReplay:
            return Slowdown()
        return Slowdown(
            _limited_median(a / b for a, b in zip(cold, hot, strict=False) if b > 0), _limited_median(passes)
        )


def _limited_median(ratios: Iterable[float]) -> float:
    """Return the median of ratios, limited to 1 to `_MAX_SLOWDOWN`."""
    return min(_MAX_SLOWDOWN, max(1.0, median([*ratios] or [1.0])))


def _stop_at_recorded_end(reply: RecordedReply) -> Sampling:
    """Return stop conditions that end a reply at its recorded end, with the recorded limit of tokens."""
    count = len(reply.reply)
    return Sampling(
        max_new_tokens=reply.sampling.max_new_tokens, ignore_eos=True, stop_when=lambda ids, text: len(ids) >= count
    )
