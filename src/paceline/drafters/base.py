"""The base class of every drafter, and the requests that it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from paceline.protocols import KVCache, Saved
from paceline.sampling.sampler import Prefix, Ranked, Sampler, Subset
from paceline.types import Draft, DraftBudget, Tap, Verdict


class Allowance(NamedTuple):
    """The share of one part of a cascade in an ask. `budget`, `price`, `pace`: as in `Ask`."""

    budget: DraftBudget
    price: float
    pace: float


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one draft after the text `prefix`.

    `budget`: limits of the draft. `price`: the cost of verifying one more node, in tokens: a node that is less likely
    to be accepted is not worth drafting. `pace`: tokens per second that the requests of this round get together, as
    measured: what drafting for a second longer must bring. 0 where that is unknown, or must not matter. `sure`: the
    least probability of a first token that is worth a draft, since another drafter stands by. `parts`: for a cascade
    (`Drafter.parts`), the allowance of each part, within `budget`; () for any drafter, and where all have the whole
    budget.
    """

    slot: int
    prefix: Prefix
    budget: DraftBudget
    sampler: Sampler
    price: float = 0.0
    pace: float = 0.0
    sure: float = 0.0
    parts: tuple[Allowance, ...] = ()

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and reply so far, the pending token last; the request's own list, not a copy."""
        return self.prefix.token_ids

    @property
    def draws(self) -> bool:
        """True if the acceptance rule (rejection, block) needs candidates drawn from the drafter's distribution, in a
        shape that does not depend on the draws; `rank` then draws."""
        return self.sampler.draws

    def rank(
        self, logits: Tensor, paths: Sequence[Sequence[int]], count: int, subset: Subset | None = None
    ) -> list[Ranked]:
        """Rank up to `count` candidates as the target will choose, with the same noise, best first, for each row of
        logits [R, V] after its path (see `Sampler.rank`)."""
        return self.sampler.rank(self.prefix, logits, paths, count, subset)

    @property
    def last(self) -> int:
        """The pending token, row 0 of the draft."""
        return self.token_ids[-1]

    @property
    def position(self) -> int:
        """Position of the pending token; the first drafted one is at `position + 1`."""
        return len(self.token_ids) - 1


class Part(NamedTuple):
    """A part of a drafter with a draft length of its own. `draft`, `free`, `reads_prompt`: as in `Drafter`."""

    draft: DraftBudget
    free: bool
    reads_prompt: bool


class Drafter(ABC):
    """Proposes tokens; never decides. It may draft anything, or nothing: the text depends on the target alone.

    A slot's life: `admit`, `feed` per prefill chunk, then `propose` / `observe` per round, `release`. After
    `admit(slot, prompt)` the drafter knows the prompt; `observe` tells it the tokens of each round. Every method
    must leave the drafter usable if the request ends there.
    """

    taps: tuple[Tap, ...] = ()
    """Hidden states that `feed` and `observe` should receive."""

    free: bool = False
    """Whether it looks drafts up in the text, at no cost worth mentioning; such a one heeds `Ask.sure`."""

    reads_prompt: bool = True
    """Whether a draft takes time for every token that the drafter has not seen, unless it is free: the first token of a
    reply does not wait for it, and drafting must pay for the prompt, too."""

    draft: DraftBudget = DraftBudget.chain(5)
    """Maximum draft if the user gives no size (`draft="auto"`): the draft length is chosen up to it."""

    replayable: bool = True
    """Whether drafts follow from text, noise and taps alone, so that they can be repeated without the target."""

    def bind(self, cache: KVCache) -> None:  # noqa: B027
        """Receive the engine's cache of the target, once, before the first `admit`: between rounds it holds all of a
        slot's text but the pending token. For drafters that run the target's own layers; a drafter has one engine."""

    @abstractmethod
    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Start a request. `prompt`: its whole prompt, the pending token included."""

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        """Start a request with the same prompt as slot `source`, which has been fed and has drafted nothing yet.

        A drafter with taps must copy what `feed` gave it for `source`: the prompt is not fed again.
        """
        self.admit(slot, prompt)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:  # noqa: B027
        """Receive a prefill chunk that the target has processed: its tokens, and the declared taps [len(tokens), H]."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts with draft lengths of their own. A cascade has several: it asks them one after the other, each for
        the requests that have no draft yet, and notes in `Draft.part` which it asked last."""
        return (Part(self.draft, self.free, self.reads_prompt),)

    @property
    def needs_past(self) -> bool:
        """True if a draft needs the hidden states of all preceding text; by default, if there are taps.

        If so, a prompt can start from a cached prefix only if `load` restores those states.
        """
        return bool(self.taps)

    def save(self, slot: int) -> Saved | None:
        """Return a copy of the drafter's state for the slot's text so far, for the prefix cache; None if there is
        none."""
        return None

    def load(self, slot: int, saved: Any, length: int) -> None:  # noqa: B027
        """Restore the state after the first `length` tokens of the prompt, which will not be fed. Called after `admit`.

        `saved` comes from `save`, and `saved.holds` was true. Token `length` is the same as in the saved text, and at
        least one row of the prompt is fed after this. The slot must then be as if it had been fed those tokens.
        """

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Return one draft per ask, in order; `Draft()` where the drafter proposes nothing."""

    def extend(self, ask: Ask, draft: Draft) -> Draft:
        """Return another drafter's chain for this ask, continued where this drafter knows how it goes on at no cost."""
        return draft

    @abstractmethod
    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        """Receive what a round committed: `verdict.tokens` continue the text. `out`: taps [T, H] of the round's rows.

        Only store them; catching up belongs in the next `propose`.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """End a request (finished, cancelled or failed). Releasing an unknown slot does nothing."""
