"""Several drafters in order of preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.errors import InvalidOption
from paceline.protocols import Ask, Drafter
from paceline.types import Draft, Tap, Tree, Verdict


class Stack(Drafter):
    """Per request the first drafter with something to say wins; a later one is asked only where the earlier are silent.

    All are told about every token, so each can take over at any round. The budget that counts is the stack's own: its
    `draft` is that of the first drafter. Give each drafter to one stack only. Raises `InvalidOption` for an empty stack.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise InvalidOption("a stack of no drafters", "Give at least one drafter, or drafter=None")
        self._drafters = tuple(drafters)
        self.taps: tuple[Tap, ...] = tuple(dict.fromkeys(tap for d in drafters for tap in d.taps))
        self.draft: Tree = drafters[0].draft

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.admit(slot, prompt)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        for drafter in self._drafters:
            drafter.feed(slot, tokens, taps)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [Draft()] * len(asks)
        silent = list(range(len(asks)))
        for drafter in self._drafters:
            if not silent:
                break
            for i, draft in zip(silent, drafter.propose([asks[i] for i in silent]), strict=True):
                drafts[i] = draft
            silent = [i for i in silent if not drafts[i].tokens]
        return drafts

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        for drafter in self._drafters:
            drafter.observe(slot, verdict, out)

    def release(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.release(slot)
