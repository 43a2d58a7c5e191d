"""The base class of all drafters, and the requests for drafts (asks) that they receive.

A *cascade* (`stack.DrafterStack`) asks several drafters in order. Drafters that look drafts up and drafters that run a
model have unrelated costs. They are therefore separate *parts* of a cascade, each with its own draft length. Any other
drafter has a single part.
"""

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
    """The limits of one part of a cascade. `Ask` describes the fields."""

    budget: DraftBudget
    price: float
    pace: float


@dataclass(frozen=True, slots=True)
class Ask:
    """The engine's request to a drafter: propose one draft, for one user request (`Request`) in one round.

    Attributes:
        slot: The slot of the request.
        prefix: The text so far.
        budget: Maximum size of the draft.
        sampler: Ranks or draws candidates in the same way as the target chooses tokens.
        price: Cost of verifying one additional node, in tokens. A node is worth drafting only if its probability of
            acceptance is higher.
        pace: Measured total throughput of this round's requests, in tokens per second. Drafting for another second pays
            only if it yields more tokens than this. 0 if the throughput is unknown or must be ignored.
        sure: Minimum probability of a draft's first token. It is above 0 if another drafter can draft instead.
        parts: For a cascade (`Drafter.parts`), the allowance of each part, within `budget`. Empty for other drafters,
            and if every part may use the whole budget.
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
        """Token ids of the prompt and the reply so far, ending with the pending token. This is not a copy, so do not
        modify it."""
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
    """A part of a drafter that has its own draft length. `Drafter` describes the fields."""

    draft: DraftBudget
    free: bool
    reads_prompt: bool


class Drafter(ABC):
    """Proposes tokens. A drafter may propose anything, or nothing, because verification accepts only tokens that the
    target allows.

    The calls for a slot are `admit`, `feed` for each prefill chunk, `propose` and `observe` for each round, and
    `release`. The drafter learns the prompt from `admit`, and the tokens of each round from `observe`. A request may
    end after any of these calls, and the drafter must remain usable.
    """

    taps: tuple[Tap, ...] = ()
    """Hidden states that `feed` and `observe` must receive."""

    free: bool = False
    """True if drafting costs next to nothing because the drafter looks drafts up in the text. It must then respect
    `Ask.sure`."""

    reads_prompt: bool = True
    """True if drafting takes time for every token that the drafter has not read yet. Ignored if `free` is True.

    If it is True, the first token of a reply does not wait for a draft, and reading the prompt counts as a cost of
    drafting.
    """

    draft: DraftBudget = DraftBudget.chain(5)
    """Maximum draft if the user sets no size (`draft="auto"`). The draft length is then chosen up to this maximum."""

    replayable: bool = True
    """True if drafts depend only on text, noise and taps. They can then be reproduced from a recording, without the
    target."""

    def bind(self, cache: KVCache) -> None:  # noqa: B027
        """Receive the engine's cache of the target, for drafters that run the target's own layers.

        This is called once, before the first `admit`, because a drafter belongs to one engine. Between rounds, the
        cache holds the text of each slot except its pending token.
        """

    @abstractmethod
    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Start a request.

        Args:
            slot: The request's slot.
            prompt: Token ids of the whole prompt, including the pending token.
        """

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        """Start a request with the same prompt as slot `source`, which has been fed its prompt, but has no drafts yet.

        The prompt is not fed again, so a drafter with taps must copy the states that it received for `source`.
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

        Only a cascade has several parts. It asks them in order. Each part drafts for the requests that still have no
        draft, and `Draft.part` records the last part that was asked.
        """
        return (DrafterPart(self.draft, self.free, self.reads_prompt),)

    @property
    def needs_past(self) -> bool:
        """True if drafting needs the hidden states of all preceding text. The default is True if the drafter has taps.

        If it is True, a prompt can start from a cached prefix only if `load` restores these states.
        """
        return bool(self.taps)

    def unread(self, slot: int) -> int | None:
        """Return the number of tokens of a slot's text that the next draft must read first.

        If this returns None, the engine counts the tokens since the last draft. Override it in a drafter that also
        reads tokens at other times, in `feed` or `load`.
        """
        return None

    def save(self, slot: int) -> Saved | None:
        """Return a copy of the drafter's state after the slot's text, for the prefix cache, or None if it has no
        state."""
        return None

    def load(self, slot: int, saved: Any, length: int) -> None:  # noqa: B027
        """Restore the drafter's state after the first `length` tokens of the prompt, as if they had been fed.

        This is called after `admit`. The restored tokens are not fed, but at least one later token of the prompt is.

        Args:
            slot: The request's slot.
            saved: A result of `save`. `saved.holds` returned True for `length`.
            length: Number of tokens to restore. The token after them is the same in the prompt as in the saved text.
        """

    def restored(self, saved: Any) -> Saved:
        """Return a result of `save` that was read from a file, with this drafter's functions put back
        (`protocols.Restorer`)."""
        kept: Saved = saved
        return kept

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Return one draft per ask, in order. Return an empty `Draft()` for a request if there is nothing to propose.

        All requests of the round wait for this call. So read a long text in parts, over several calls, and return
        `Draft(unread=...)` until the text has been read.
        """

    def extend(self, ask: Ask, draft: Draft) -> Draft:
        """Return a chain, lengthened if this drafter can continue it at no cost. `draft`: The deepest path of a learned
        drafter's draft, as a chain."""
        return draft

    @abstractmethod
    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        """Receive the result of a round. Only store it here, and do the work in the next `propose`.

        Args:
            slot: The request's slot.
            verdict: The committed tokens and their rows.
            out: The hidden states named by `taps`, for all rows of the request in this round, each [T, H].
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """End a request that has finished, was cancelled or failed. Do nothing if the slot is unknown."""
