"""The certificate: the results of all parts, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.certify.compare import Difference
from paceline.certify.features import FeatureResult
from paceline.certify.greedy import GreedyResult
from paceline.certify.load import LoadResult
from paceline.certify.sampled import SampledResult
from paceline.certify.scored import ScoredResult
from paceline.certify.sizes import WorkSizes
from paceline.certify.work import QualityResult, SpeedResult

BITWISE = "lossless (bitwise)"
NEAR_TIES = "lossless up to near-ties"
DISTRIBUTION = "same distribution"
LOSSY = "not lossless"
INCONCLUSIVE = "inconclusive"
EXIT_CODES = {BITWISE: 0, NEAR_TIES: 0, DISTRIBUTION: 0, LOSSY: 3, INCONCLUSIVE: 4}
"""Verdict -> exit code of the command. 1 and 2 are errors and wrong options."""

_MIN_CASES = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the certificate: a name, "pass", "fail", "skip" or "note", and an explanation."""

    part: str
    name: str
    state: str
    detail: str


@dataclass
class Certificate:
    """The results of a test, and the facts about it. Contains no API key.

    Attributes:
        facts: Addresses, programs, versions, date, command and seed, by name.
        sizes: Planned amounts of work.
        greedy: Greedy texts.
        sampled: Distributions, by setting.
        scored: Long sampled texts.
        features: Features, by probe.
        load: Replies under load.
        quality: Correct answers.
        speed: Tokens per second. None if the endpoint counts no tokens.
        smallest: The smallest example of a real divergence, if there is one.
        drafted: Number of tokens drafted on the speculative side and on the plain side, where it should be 0. None if
            the endpoint does not report it.
    """

    facts: dict[str, Any]
    sizes: WorkSizes
    greedy: GreedyResult
    sampled: Sequence[SampledResult] = ()
    scored: ScoredResult | None = None
    features: Sequence[FeatureResult] = ()
    load: Sequence[LoadResult] = ()
    quality: QualityResult | None = None
    speed: SpeedResult | None = None
    smallest: Difference | None = None
    drafted: tuple[int | None, int | None] = (None, None)
    usage: dict[str, float] = field(default_factory=dict)

    def checks(self) -> list[Check]:
        """Return all results as lines."""
        return [*self._draft_checks(), *self._greedy_checks(), *self._other_checks()]

    def _draft_checks(self) -> Iterator[Check]:
        own, plain = self.drafted
        if own is not None:
            seen = f"{own} with speculation, {plain or 0} on the plain side"
            yield Check("drafts", "drafted tokens", "pass" if own and not plain else "note", seen)

    def _greedy_checks(self) -> Iterator[Check]:
        g = self.greedy
        for name, repeated in (("with speculation", g.repeated), ("plain", g.plain_repeated)):
            state = "pass" if repeated == g.prompts else "note"
            yield Check(
                "greedy", f"repeatable, {name}", state, f"{repeated} of {g.prompts} prompts give the same text twice"
            )
        parted = f"{g.real} real divergences, {g.near_ties} near-ties, {g.unknown} without log-probabilities"
        parted += f"; {g.refused} prompts were refused" if g.refused else ""
        state = "pass" if not g.differs else "fail" if g.real or not g.unknown else "note"
        yield Check(
            "greedy", "texts", state, f"{g.identical} of {g.prompts} are identical; {parted}; p = {g.p_value:.2g}"
        )

    def _other_checks(self) -> Iterator[Check]:
        for s in self.sampled:
            seen = f"{s.contexts} contexts, {s.samples} samples each: p = {s.p_value:.2g}"
            seen += f"; fresh samples: p = {s.repeated_p_value:.2g}" if s.repeated_p_value is not None else ""
            found = f"a shift of {s.detectable:.1%} would have been found with probability 0.95"
            seen += f"; {found}" if s.detectable < 1 else "; too few to find a shift"
            seen += f"; equal seeds give equal replies in {s.equal_seeds:.0%} of cases"
            state = "fail" if s.differs else "pass" if s.detectable < 1 else "note"
            yield Check("sampled", s.setting, state, seen)
        if t := self.scored:
            yield Check(
                "sampled", "long texts", "fail" if t.differs else "pass" if t.texts else "skip", _scores_seen(t)
            )
        states = {"same": "pass", "differs": "fail", "rounding": "note", "not offered": "skip", "not run": "skip"}
        for f in self.features:
            yield Check("features", f.feature, states[f.state], f.detail or f.state)
        for x in self.load:
            seen = f"{x.changed} of {x.requests} replies change, {x.plain_changed} without speculation"
            seen += f"; {x.swapped} are another request's reply" if x.swapped else ""
            yield Check("load", f"{x.width} at a time", "fail" if x.differs else "pass", seen)
        if q := self.quality:
            seen = f"{q.right} of {q.questions} correct, {q.plain_right} without speculation (p = {q.p_value:.2g})"
            says_little = q.plain_right < _MIN_CASES
            seen += "; too few to show a loss" if says_little else ""
            yield Check("quality", "questions", "fail" if q.differs else "note" if says_little else "pass", seen)
        if v := self.speed:
            seen = f"{v.ratio:.2f}x plain ({v.low:.2f} to {v.high:.2f}): {v.rate:.1f} and {v.plain_rate:.1f} tokens/s"
            yield Check("speed", "tokens per second", "note", seen)

    def verdict(self) -> tuple[str, str]:
        """Return the verdict and its reason."""
        failed = [f"{check.part}, {check.name}: {check.detail}" for check in self.checks() if check.state == "fail"]
        g = self.greedy
        if failed:
            return LOSSY, " | ".join(failed)
        own, plain = self.drafted
        if own == 0:
            return INCONCLUSIVE, "the endpoint reports no drafted tokens, so there was no speculation to test"
        if plain:
            return INCONCLUSIVE, (
                f"the plain side drafted {plain} tokens, so the sides are the same. Start a second server without "
                "speculation, and give --plain URL"
            )
        if g.differs:
            return INCONCLUSIVE, (
                f"{g.unknown} of {g.prompts} greedy texts differ. Rounding may be the reason: the endpoints give no "
                "log-probabilities that would rule it out"
            )
        if g.is_repeatable and g.real:
            return (
                INCONCLUSIVE,
                f"{g.real} real divergences, but no time to repeat them: allow more time with --seconds",
            )
        if g.prompts < _MIN_CASES:
            return INCONCLUSIVE, f"there was time for only {g.prompts} prompts: allow more time with --seconds"
        power = max((s.detectable for s in self.sampled), default=1.0)
        sampling = f"sampling: a shift of {power:.1%} total variation would have been found with probability 0.95"
        if power == 1:
            sampling = "sampling: too few samples to find a shift"
        if late := [f.feature for f in self.features if f.state == "not run"]:
            return (
                INCONCLUSIVE,
                f"nothing failed, but there was no time for {', '.join(late)}: allow more time with --seconds",
            )
        if g.is_bitwise:
            return BITWISE, f"all {g.prompts} greedy texts are identical, and no check failed; {sampling}"
        if g.is_repeatable and g.near_ties and not g.real and not g.unknown:
            return NEAR_TIES, f"{g.near_ties} of {g.prompts} greedy texts diverge, all of them at near-ties; {sampling}"
        if power < 1:
            repeats = f"{g.repeated} and {g.plain_repeated} of {g.prompts} greedy texts are repeatable on the two sides"
            return DISTRIBUTION, f"{repeats}; {sampling}"
        return INCONCLUSIVE, "greedy texts are not repeatable, and too few samples were drawn to compare distributions"

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 if the speculation is lossless, 3 if not, 4 if the test is inconclusive."""
        return EXIT_CODES[self.verdict()[0]]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        verdict, reason = self.verdict()
        parts = asdict(self)
        parts["greedy"].pop("texts")
        return {"verdict": verdict, "reason": reason, **parts, "checks": [asdict(check) for check in self.checks()]}


def _scores_seen(t: ScoredResult) -> str:
    if not t.texts:
        return "the endpoints give no log-probabilities, or only for some tokens"
    scorer = "the plain endpoint's" if t.by_plain else "each side's own"
    seen = f"{t.texts} texts on each side, scored by {scorer} log-probabilities: the most likely token is sampled "
    seen += f"{t.excess:+.1%} more often; p = {t.p_value:.2g}"
    seen += f"; fresh samples: p = {t.repeated_p_value:.2g}" if t.repeated_p_value is not None else ""
    return f"{seen}; {t.detectable:.1%} would have been found with probability 0.95"
