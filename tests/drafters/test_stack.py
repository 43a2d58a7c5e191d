from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import RuleName
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import own_depth
from tests.support.toys import ask_for

BUDGET = DraftBudget.chain(3)


class Recorder(Drafter):
    """Drafts `word` in the given slots, and records all calls."""

    def __init__(
        self, word: int, slots: Sequence[int], taps: tuple[Tap, ...] = (), draft: DraftBudget = BUDGET
    ) -> None:
        self.word, self.slots, self.taps, self.draft = word, slots, taps, draft
        self.told: list[tuple[object, ...]] = []

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self.told.append(("admit", slot, tuple(prompt)))

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self.told.append(("feed", slot, tuple(tokens), tuple(taps)))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.told.append(("propose", *(a.slot for a in asks), *(a.budget for a in asks)))
        return [Draft.chain([self.word]) if a.slot in self.slots else Draft() for a in asks]

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self.told.append(("observe", slot, verdict.tokens, tuple(out)))

    def release(self, slot: int) -> None:
        self.told.append(("release", slot))


def ask(slot: int, budget: DraftBudget = BUDGET) -> Ask:
    return ask_for(slot, budget, Sampling(), [0])


def test_per_request_the_first_with_something_to_say_wins() -> None:
    first, second = Recorder(1, [0, 2]), Recorder(2, [0, 1])
    drafts = DrafterStack([first, second]).propose([ask(3), ask(0), ask(1), ask(2)])
    assert [d.tokens for d in drafts] == [(), (1,), (2,), (1,)]
    assert second.told == [("propose", 3, 1, BUDGET, BUDGET)]


def test_a_later_drafter_rests_while_the_first_speaks() -> None:
    second = Recorder(2, [0])
    DrafterStack([Recorder(1, [0]), second]).propose([ask(0)])
    assert second.told == []


def test_all_are_told_everything() -> None:
    parts = [Recorder(1, [0]), Recorder(2, [])]
    stack = DrafterStack(parts)
    stack.admit(0, [1, 2])
    stack.feed(0, [1], {3: torch.zeros(1, 4)})
    stack.observe(0, Verdict((1,), (5, 6)), {"final": torch.zeros(2, 4)})
    stack.release(0)
    told = [("admit", 0, (1, 2)), ("feed", 0, (1,), (3,)), ("observe", 0, (5, 6), ("final",)), ("release", 0)]
    assert [p.told for p in parts] == [told, told]


def test_taps_are_the_union_without_repetition() -> None:
    stack = DrafterStack([Recorder(1, [], taps=(3, "final")), Recorder(2, [], taps=("final", 0)), NGram()])
    assert stack.taps == (3, "final", 0)


def test_none_drafts_more_than_its_own_size() -> None:
    parts = [Recorder(1, [], draft=DraftBudget(15, 9, 3)), Recorder(2, [], draft=DraftBudget.chain(12))]
    stack = DrafterStack(parts)
    assert stack.draft == DraftBudget(15, 12, 3)
    stack.propose([ask(0, stack.draft)])
    stack.propose([ask(0, DraftBudget(4, 4, 2))])
    assert [p.told for p in parts] == [
        [("propose", 0, DraftBudget(15, 9, 3)), ("propose", 0, DraftBudget(4, 4, 2))],
        [("propose", 0, DraftBudget(12, 12, 1)), ("propose", 0, DraftBudget(4, 4, 1))],
    ]


def test_lookups_take_turns_and_stay_up_to_date() -> None:
    stack = DrafterStack([NGram(min_n=3), Suffix()])
    stack.admit(0, [1, 2, 3, 4, 2])
    assert stack.propose([ask(0)])[0].tokens == (3, 4, 2)
    stack.observe(0, Verdict((), (9, 1, 2, 3)), {})
    assert stack.propose([ask(0)])[0].tokens == (4, 2, 9)


def test_a_stack_of_none_is_refused() -> None:
    with pytest.raises(InvalidOption, match="at least one drafter"):
        DrafterStack([])


def test_forks_reach_every_part() -> None:
    class Fed(Recorder):
        def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
            self.told.append(("fork", slot, source, tuple(prompt)))

    parts = [Fed(1, []), Fed(2, [])]
    DrafterStack(parts).fork(3, 0, [1, 2])
    assert [p.told for p in parts] == [[("fork", 3, 0, (1, 2))]] * 2


def text_of(repeated: Sequence[int], times: int = 3) -> list[int]:
    return [*repeated] * times


@pytest.mark.parametrize("lookup", [Suffix, NGram])
def test_an_unsure_lookup_leaves_the_draft_to_the_next_drafter(lookup: type[Drafter]) -> None:
    """Check a token with a different successor every time, and a text that repeats itself."""
    for text, first in (([1, 2, 1, 3, 1, 4, 1, 5, 1], 30), (text_of([11, 12, 13, 14, 15, 16, 17]), 11)):
        stack = DrafterStack([lookup(), Recorder(30, [0])])
        stack.admit(0, text)
        assert stack.propose([ask_for(0, stack.draft, Sampling(), text)])[0].tokens[0] == first
        alone = lookup()
        alone.admit(0, text)
        assert alone.propose([ask_for(0, stack.draft, Sampling(), text)])[0].tokens


@pytest.mark.parametrize("lookup", [Suffix, NGram])
def test_an_unsure_lookup_drafts_where_the_next_cannot(lookup: type[Drafter]) -> None:
    stack, text = DrafterStack([lookup(), Recorder(30, [])]), [1, 2, 1, 3, 1, 4, 1, 5, 1]
    stack.admit(0, text)
    assert stack.propose([ask_for(0, stack.draft, Sampling(), text)])[0].tokens


@pytest.mark.parametrize("lookup", [Suffix, NGram])
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_lookup_continues_a_chain_where_a_match_begins(lookup: type[Drafter], rule: RuleName) -> None:
    text = [11, 12, 13, 14, 15, 16, 17, 18, 9, 8, 7, 11, 12, 13, 14]
    stack = DrafterStack([lookup(), Recorder(15, [0], draft=DraftBudget.chain(3))])
    stack.admit(0, [*text[:-4], 5, 6, 11, 12, 13, 14, 15, 16, 17, 18, 9, 30, 11, 12, 13, 14])
    text = [*text[:-4], 5, 6, 11, 12, 13, 14, 15, 16, 17, 18, 9, 30, 11, 12, 13, 14]
    sampling = Sampling(temperature=1.0, rule=rule, seed=1)
    parts = stack._drafters
    made = stack._extended(ask_for(0, DraftBudget.chain(9), sampling, text), Draft.chain([15]))
    assert made.tokens[:4] == ((15, 16, 17, 18) if rule == "match" else (15,))
    assert made.parents == (*range(len(made.tokens)),)
    assert len(made.tokens) <= 9
    whole = stack._extended(ask_for(0, DraftBudget.chain(1), sampling, text), Draft.chain([15]))
    assert whole.tokens == (15,), "a full budget has room for no more"
    unknown = stack._extended(ask_for(0, DraftBudget.chain(9), sampling, text), Draft.chain([35]))
    assert unknown.tokens == (35,), "after which nothing is known"
    tree = Draft((15, 16), (0, 0))
    longer = stack._extended(ask_for(0, DraftBudget(9, 3, 2), sampling, text), tree)
    assert longer == (Draft((15, 16, 16, 17), (0, 0, 1, 3)) if rule == "match" else tree), "the first deepest path"
    assert own_depth(longer) == 1
    full = stack._extended(ask_for(0, DraftBudget(2, 3, 2), sampling, text), tree)
    assert full == tree, "two nodes use the whole budget"
    assert parts[0].free
    assert not parts[1].free
