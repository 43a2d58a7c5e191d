"""Every drafter keeps the contract, and the contract's check notices those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import Stack
from paceline.drafters.suffix import Suffix
from paceline.engine import Engine
from paceline.protocols import Ask, Drafter
from paceline.sampling import Sampling
from paceline.testing import check_drafter, run, tiny_target
from paceline.types import Draft, Tap, Tree, Verdict

OTHER = tiny_target(seed=9)

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "suffix that remembers": lambda: Suffix(remember=True),
    "model": lambda: DraftModel(OTHER, 37),
    "stack": lambda: Stack([Suffix(), NGram(), DraftModel(OTHER, 37)]),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters_keep_the_contract(drafter: str) -> None:
    check_drafter(DRAFTERS[drafter])


class Endless(NGram):
    """Ignores its budget."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft.chain([1] * 9) for _ in asks]


class Forgetful(NGram):
    """Drafts something else when asked again."""

    calls = 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls += 1
        return [Draft.chain([self.calls % 37][: ask.budget.nodes]) for ask in asks]


class Short(NGram):
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return []


@pytest.mark.parametrize(
    ("broken", "said"), [(Endless, "budget"), (Forgetful, "changes a draft"), (Short, "one draft per ask")]
)
def test_the_check_notices_drafters_that_do_not(broken: type[Drafter], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_drafter(broken)


def test_a_drafter_hears_the_whole_text_and_its_hidden_states() -> None:
    class Listener(Drafter):
        taps: tuple[Tap, ...] = (1, "final")
        draft = Tree.chain(2)

        def __init__(self) -> None:
            self.heard: list[int] = []
            self.states: list[torch.Tensor] = []
            self.log: list[str] = []

        def admit(self, slot: int, prompt: Sequence[int]) -> None:
            self.log.append("admit")
            self.text = list(prompt)

        def feed(self, slot, tokens, taps) -> None:  # type: ignore[no-untyped-def]
            self.log.append("feed")
            self.heard += tokens
            self.states.append(taps["final"])
            assert taps[1].shape == taps["final"].shape == (len(tokens), 32)

        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            assert [(a.last, a.position) for a in asks] == [(self.text[-1], len(self.text) - 1)]
            return [Draft.chain([3, 4][: a.budget.nodes]) for a in asks]

        def observe(self, slot: int, verdict: Verdict, out) -> None:  # type: ignore[no-untyped-def]
            kept = [0, *verdict.path]
            self.heard += [self.text[-1], *verdict.tokens[:-1]]
            self.states.append(out["final"][kept])
            self.text += verdict.tokens

        def release(self, slot: int) -> None:
            self.log.append("release")

    target, drafter = tiny_target(context_length=2048), Listener()
    prompt = [i % 37 for i in range(300)]
    tokens, _, _ = run(target, prompt, Sampling(max_new_tokens=20), engine=Engine(target, drafter))
    assert drafter.log == ["admit", "feed", "feed", "release"]
    assert drafter.heard == (prompt + tokens)[: len(drafter.heard)]
    assert len(drafter.heard) >= len(prompt) + len(tokens) - 4
    again = Listener()
    run(target, drafter.heard, Sampling(max_new_tokens=1), engine=Engine(target, again))
    states = torch.cat(again.states)
    torch.testing.assert_close(torch.cat(drafter.states)[: len(states)], states, rtol=0, atol=1e-9)
