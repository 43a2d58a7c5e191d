"""The base class of all drafters, and the requests for drafts."""

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
    """The limits for one part of a cascade. See `Ask` for the fields."""

    budget: DraftBudget
    price: float
    pace: float


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one draft.

    Attributes:
        slot: The slot of the text.
        prefix: The text so far.
        budget: Maximum size of the draft.
        sampler: Ranks or draws candidates as the target will.
        price: Cost of verifying an additional node, in tokens. A node whose probability of acceptance is lower is not
            worth drafting.
        pace: Measured throughput of all requests of this round together, in tokens per second. Drafting for another
            second pays only if it yields more tokens. 0 if it is unknown or must be ignored.
        sure: Minimum probability of a draft's first token. It is above 0 if another drafter can draft instead.
        parts: For a cascade (`Drafter.parts`), the allowance of each part, within `budget`. () for other drafters, or
            if every part may use the whole budget.
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
        """Token ids of the prompt and the reply so far, ending with the pending token. This is not a copy."""
        return self.prefix.token_ids

    @property
    def draws(self) -> bool:
        """True if the acceptance rule (rejection, block) needs candidates drawn from the drafter's distribution.

        `rank` then draws, and the shape of the draft must not depend on the draws.
        """
        return self.sampler.draws

    def rank(
        self, logits: Tensor, paths: Sequence[Sequence[int]], count: int, subset: Subset | None = None
    ) -> list[Ranked]:
        """Rank candidates with the noise that the target will use (see `Sampler.rank`).

        Args:
            logits: Logits [R, V] of the drafter.
            paths: For each row, the drafted tokens before it.
            count: Maximum number of candidates of each row.
            subset: See `Sampler.rank`.

        Returns:
            The candidates of each row, best first.
        """
        return self.sampler.rank(self.prefix, logits, paths, count, subset)

    @property
    def last(self) -> int:
        """The pending token, which is row 0 of the pass."""
        return self.token_ids[-1]

    @property
    def position(self) -> int:
        """Position of the pending token. The first drafted token is at `position + 1`."""
        return len(self.token_ids) - 1


class DrafterPart(NamedTuple):
    """A part of a drafter with its own draft length. See `Drafter` for the fields."""

    draft: DraftBudget
    free: bool
    reads_prompt: bool


class Drafter(ABC):
    """Proposes tokens. A drafter may propose anything, or nothing, because the text depends only on the target.

    The calls for a slot are `admit`, `feed` for each prefill chunk, `propose` and `observe` for each round, and
    `release`. The drafter learns the prompt from `admit`, and the tokens of each round from `observe`. A request may
    end after any of these calls, and the drafter must remain usable.
    """

    taps: tuple[Tap, ...] = ()
    """Hidden states that `feed` and `observe` must receive."""

    free: bool = False
    """True if the drafter looks drafts up in the text at negligible cost. It must then respect `Ask.sure`."""

    reads_prompt: bool = True
    """True if a draft takes time for every token that the drafter has not read yet. It is ignored if `free` is True.

    The first token of a reply then does not wait for a draft, and reading the prompt counts as a cost of drafting.
    """

    draft: DraftBudget = DraftBudget.chain(5)
    """Maximum draft if the user sets no size (`draft="auto"`). The draft length is chosen within it."""

    replayable: bool = True
    """True if drafts depend only on text, noise and taps. They can then be reproduced without the target."""

    def bind(self, cache: KVCache) -> None:  # noqa: B027
        """Receive the engine's cache of the target. It is for drafters that run the target's own layers.

        It is called once, before the first `admit`. Between rounds the cache holds the text of each slot except the
        pending token. A drafter has only one engine.
        """

    @abstractmethod
    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Start a request.

        Args:
            slot: The request's slot.
            prompt: Token ids of the whole prompt, including the pending token.
        """

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        """Start a request with the same prompt as slot `source`, which has been fed but has not drafted yet.

        The prompt is not fed again. A drafter with taps must copy the states that it received for `source`.
        """
        self.admit(slot, prompt)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:  # noqa: B027
        """Receive a prefill chunk that the target has processed.

        Args:
            slot: The request's slot.
            tokens: Token ids of the chunk.
            taps: The hidden states named by `taps`, each [len(tokens), H].
        """

    @property
    def parts(self) -> tuple[DrafterPart, ...]:
        """The parts that have their own draft length.

        Only a cascade has several. It asks them in order, each for the requests that have no draft yet, and records in
        `Draft.part` which part it asked last.
        """
        return (DrafterPart(self.draft, self.free, self.reads_prompt),)

    @property
    def needs_past(self) -> bool:
        """True if a draft needs the hidden states of all preceding text. By default, this is true if there are taps.

        A prompt can then start from a cached prefix only if `load` restores these states.
        """
        return bool(self.taps)

    def unread(self, slot: int) -> int | None:
        """Return the number of tokens of a slot's text that the next draft must read first.

        None lets the engine count the tokens since the last draft. A drafter overrides it if it also reads tokens at
        other times, in `feed` or `load`.
        """
        return None

    def save(self, slot: int) -> Saved | None:
        """Return a copy of the drafter's state after the slot's text, for the prefix cache. None if it has no state."""
        return None

    def load(self, slot: int, saved: Any, length: int) -> None:  # noqa: B027
        """Restore the state after the first `length` tokens of the prompt, as if they had been fed.

        It is called after `admit`. These tokens are not fed, but at least one later row of the prompt is.

        Args:
            slot: The request's slot.
            saved: Result of `save`. `saved.holds` was true.
            length: Number of tokens to restore. The token at this position is the same as in the saved text.
        """

    def restored(self, saved: Any) -> Saved:
        """Return a result of `save` that was read from a file, with this drafter's functions (`protocols.Restorer`)."""
        kept: Saved = saved
        return kept

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Return one draft per ask, in order. The draft is `Draft()` if the drafter has nothing to propose.

        All requests wait for this call, so read a long text in parts, and return `Draft(unread=...)` until then.
        """

    def extend(self, ask: Ask, draft: Draft) -> Draft:
        """Return another drafter's chain, extended if this drafter can continue it at no cost."""
        return draft

    @abstractmethod
    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        """Receive the result of a round. Only store it, and do the work in the next `propose`.

        Args:
            slot: The request's slot.
            verdict: The committed tokens and their rows.
            out: The hidden states named by `taps` of all rows of the round, each [T, H].
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """End a request that has finished, was cancelled or failed. Do nothing if the slot is unknown."""
