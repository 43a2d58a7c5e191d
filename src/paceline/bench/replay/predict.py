"""Predicting the speed of a drafter on this machine from recorded replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from paceline.bench.costs import Costs, PassTimer, measure_costs
from paceline.bench.figures import ratio_of_sums, rounds
from paceline.bench.replay.prices import MeasuredPrices, ReplyLogits
from paceline.bench.replay.run import Replayer, ReplayResult, Slowdown
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_fit import same_target
from paceline.checkpoints.loader import Loaded, load_model
from paceline.drafters.base import Drafter
from paceline.drafters.factory import open_drafter
from paceline.drafters.trimmed import DraftVocab
from paceline.errors import InvalidData
from paceline.kernels.quantize import Precision
from paceline.recording.file import header_of
from paceline.recording.rows import RecordedReply, RecordingHeader
from paceline.types import DraftBudget

MIN_REPRODUCED_SHARE = 0.9
"""Minimum share of a recorded reply's tokens that the loaded model must choose again. If the share is lower, the
recording belongs to another model, and `measure_prices` raises an error."""


def format_budget(budget: DraftBudget | None) -> str:
    """Format a draft budget as the option --draft takes it: "auto" for None, "4" for a chain, "24x6x4" for a tree."""
    if budget is None:
        return "auto"
    return str(budget.nodes) if budget.branch == 1 else f"{budget.nodes}x{budget.depth}x{budget.branch}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter and its draft budget per round. A controller chooses the budget if it is None."""

    drafter: str
    budget: DraftBudget | None = None

    @property
    def name(self) -> str:
        """The candidate as `paceline bench --drafters` takes it, such as "eagle3@24x6x4"."""
        return self.drafter if self.budget is None else f"{self.drafter}@{format_budget(self.budget)}"

    @property
    def options(self) -> str:
        """The candidate as command-line options, such as "--drafter eagle3 --draft 24x6x4"."""
        return f"--drafter {self.drafter}" + ("" if self.budget is None else f" --draft {format_budget(self.budget)}")


@dataclass(frozen=True)
class CandidatePrediction:
    """The predicted speed of a candidate, compared with plain decoding.

    Attributes:
        candidate: The candidate.
        replay: Result of replaying the replies with the candidate.
        plain: Result of replaying the same replies with plain decoding.
    """

    candidate: Candidate
    replay: ReplayResult
    plain: ReplayResult

    @cached_property
    def speedup(self) -> dict[str, float]:
        """Speed relative to plain decoding over all replies with its 95% interval, {"value", "low", "high"}."""
        return ratio_of_sums(self.plain.reply_seconds, self.replay.reply_seconds)

    @property
    def decode_speedup(self) -> float:
        """Decoding speed relative to plain decoding. Both speeds exclude prefill. In a batch, they are the speeds of a
        single reply."""
        plain, drafted = (
            sum(s.seconds[phase] for s in replay.stats for phase in ("draft", "verify", "commit"))
            for replay in (self.plain, self.replay)
        )
        return plain / drafted if drafted else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        inside = rounds(self.replay.stats) or {}
        return {
            "drafter": self.candidate.drafter,
            "draft": format_budget(self.candidate.budget),
            "exact": self.candidate.budget is not None,
            **{name: inside[name] for name in ("tokens_per_round", "drafted_per_round", "acceptance", "accepted_at")},
            "milliseconds": {name: x for name, x in inside["milliseconds"].items() if name != "other"},
            "tokens_per_second": self.replay.tokens / max(self.replay.seconds, 1e-12),
            "plain_tokens_per_second": self.plain.tokens / max(self.plain.seconds, 1e-12),
            "ratio": self.speedup,
            "decode_ratio": self.decode_speedup,
            "predicted_seconds": self.replay.seconds,
            "replay_seconds": self.replay.replay_seconds,
        }


def check_model(header: RecordingHeader, model: Loaded) -> None:
    """Raise `InvalidData` if a recording belongs to another model."""
    if not same_target(header.fingerprint, header_of(model).fingerprint):
        raise InvalidData(f"the recording belongs to another model, {header.model}", "Pass that model with --model")


def measure_prices(model: Loaded, reply: RecordedReply, width: int) -> MeasuredPrices:
    """Measure the times that a replay charges on this machine.

    Args:
        model: The model.
        reply: A recorded reply, whose logits are computed to measure the time of choosing tokens.
        width: Number of replies that share passes.

    Raises:
        InvalidData: If the model does not reproduce the recorded reply (see `MIN_REPRODUCED_SHARE`).
    """
    logits = ReplyLogits.of(model, reply)
    share = logits.reproduced_share(model)
    if share < MIN_REPRODUCED_SHARE:
        raise InvalidData(
            f"{model.path} chooses only {share:.0%} of the tokens of a recorded reply, so another model was recorded",
            "Use the model that was recorded, with the same --quantize and --adapter",
        )
    return MeasuredPrices(model, measure_costs(model, most=16 * width), logits)


@dataclass
class Predictor:
    """Predicts the speed of drafters over recorded replies of a model.

    Attributes:
        model: The model.
        prices: Measured prices.
        draft_quantize: See `open_drafter`.
        draft_vocab: See `open_drafter`.
        width: Number of replies that share passes.
        prefix_bytes: See `Replayer`.
        states: See `Replayer`.
    """

    model: Loaded
    prices: MeasuredPrices
    draft_quantize: Precision = "auto"
    draft_vocab: DraftVocab = "auto"
    width: int = 1
    prefix_bytes: int = 0
    states: Path | None = None
    _slow: dict[str, Slowdown] = field(default_factory=dict)
    _plain: dict[tuple[int, ...], ReplayResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._replayer = Replayer(self.model, self.prices, self.width, self.prefix_bytes, states=self.states)
        self._probe = PassTimer(self.model.target)
        # Read weights once, even if several candidates use them.
        device: Any = self.model.target.device.type
        read = cache(partial(load_model, device=device))
        self._open = partial(
            open_drafter,
            target=self.model,
            quantize=self.draft_quantize,
            read=read,
            head=cache(open_head),
            draft_vocab=self.draft_vocab,
        )
        self._opened = cache(self._open)

    @property
    def costs(self) -> Costs:
        """Costs of rounds on this machine."""
        return self.prices.costs

    def make(self, drafter: str) -> Drafter | None:
        """Return a drafter by name. A drafter that remembers earlier requests is always a new one."""
        return (self._open if "remember" in drafter else self._opened)(drafter)

    def predict(
        self, candidate: Candidate, replies: Sequence[RecordedReply], on_reply: Callable[[], object] = lambda: None
    ) -> CandidatePrediction:
        """Replay replies with a candidate.

        Args:
            candidate: The candidate.
            replies: Recorded replies.
            on_reply: Called after each reply.

        Raises:
            PacelineError: The first error of the drafter.
        """
        key = tuple(map(id, replies))
        if key not in self._plain:
            self._plain[key] = self._replayer.run(replies)
        name, budget = candidate.drafter, candidate.budget
        if name not in self._slow:
            self._slow[name] = self._replayer.slowdown(replies[0], partial(self.make, name), budget, self._probe)
        replay = self._replayer.run(replies, self.make(name), budget, self._slow[name], on_reply=on_reply)
        return CandidatePrediction(candidate, replay, self._plain[key])
