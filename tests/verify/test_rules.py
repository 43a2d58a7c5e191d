"""Statistics of the rules with sampler, drafter, engine and noise. For the walks, see test_rejection.py."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline import Sampling
from paceline.drafters import growth
from paceline.drafters.base import Ask
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.errors import InvalidOption, NonFiniteLogits
from paceline.models.heads import MedusaConfig
from paceline.sampling.noise import Noise
from paceline.sampling.sampler import Prefix, Ranked, Sampler
from paceline.testing import run
from paceline.types import Draft, DraftBudget
from paceline.verify import rejection
from paceline.verify.rules import RULES, text_guarantee, typical
from paceline.verify.tree import shape
from tests.support.bigram import Bigram
from tests.support.cover import cover, some
from tests.support.text_distribution import CHAIN, TARGET, TREE, VOCAB, Q, chi_square
from tests.support.toys import ask_for, toy_llm, toy_target


@some(
    "case",
    {"rejection, tree": ("rejection", TREE), "block, chain": ("block", CHAIN), "block, tree": ("block", TREE)},
    fast=["block, tree"],
)
def test_texts_have_the_targets_distribution(case: tuple[str, DraftBudget]) -> None:
    assert chi_square(*case) < 1


def heads(other: Bigram, vocab: int) -> Medusa:
    """Return two heads. The first guesses the draft model's token two positions ahead, and the second another token."""
    tensors = {f"lm_heads.{head}.weight": other.table.roll(head, 0).T for head in range(2)}
    config = MedusaConfig(vocab, vocab, heads=2, layers=0)
    return Medusa(config, tensors, TARGET)


@some(
    "case",
    {
        "rejection, tree": ("rejection", DraftBudget(6, 2, 2)),
        "block, chain": ("block", CHAIN),
        "block, tree": ("block", DraftBudget(5, 2, 2)),
    },
    fast=["rejection, tree"],
)
def test_heads_that_draw_once_for_all_parents_leave_the_targets_distribution(case: tuple[str, DraftBudget]) -> None:
    assert chi_square(*case, heads, prompt=(2, 1)) < 1


# Negative controls.


@pytest.mark.slow
def test_heads_that_draw_with_the_noise_of_the_head_above_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Noise.stream
    monkeypatch.setattr(Noise, "stream", lambda self, *key: honest(self, *key[:2]))
    assert chi_square("rejection", DraftBudget(6, 2, 2), heads, prompt=(2, 1)) > 1


def test_typical_is_lossy_and_the_statistics_see_it() -> None:
    assert chi_square("typical", CHAIN, seeds=100) > 1


@pytest.mark.slow
def test_no_residual_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_normalised", lambda mass, otherwise: otherwise)
    assert chi_square("rejection", CHAIN) > 1


@pytest.mark.slow
def test_the_q_of_another_parent_is_noticed() -> None:
    class Mistaken(DraftModel):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            drafts = super().propose(asks)
            return [replace(d, q={row: d.q[(row + 1) % len(d.q)] for row in d.q}) for d in drafts]

    assert chi_square("block", CHAIN, Mistaken) > 1


@pytest.mark.slow
def test_noise_shared_with_the_target_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter draws with the target's own noise, as with the rule `match`."""

    def shared(self: Sampler, prefix: Prefix, logits: Tensor, count: int, subset: None) -> Ranked:
        return Ranked([self.choose(prefix, logits)], [0.0], self.distribution(prefix, logits))

    monkeypatch.setattr(Sampler, "_rank", shared)
    assert chi_square("rejection", DraftBudget.chain(1), seeds=2000, length=2) > 1


# Properties of every text.

TOY, TWIN = toy_target(layers=1), toy_target(seed=9, layers=1)
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
SHAPES = {"chain": DraftBudget.chain(4), "tree": DraftBudget(9, 4, 3)}


@cover(rule=["rejection", "block", "typical"], draft=SHAPES, together=[("rule",), ("draft",)])
def test_without_temperature_every_rule_is_match(rule: str, draft: DraftBudget) -> None:
    plain = run(TOY, PROMPT, Sampling(max_new_tokens=24))[0]
    for drafter in (DraftModel(TWIN, 37), DraftModel(TOY, 37), NGram()):
        sampling = Sampling(max_new_tokens=24, rule=rule)  # type: ignore[arg-type]
        assert run(TOY, PROMPT, sampling, drafter, draft)[0] == plain


@cover(rule=["rejection", "block", "typical"], draft=SHAPES, together=[("rule",), ("draft",)])
def test_the_same_seed_and_drafter_give_the_same_text(rule: str, draft: DraftBudget) -> None:
    texts = set()
    for seed in (1, 1, 2):
        sampling = Sampling(max_new_tokens=24, temperature=1.0, top_p=0.95, seed=seed, rule=rule)  # type: ignore[arg-type]
        texts.add(tuple(run(TOY, PROMPT, sampling, DraftModel(TWIN, 37), draft)[0]))
    assert len(texts) == (1 if rule == "typical" else 2)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_without_a_drafter_the_text_is_matchs(rule: str) -> None:
    sampling = Sampling(max_new_tokens=24, temperature=1.0, min_p=0.05, seed=3)
    plain = run(TOY, PROMPT, sampling)[0]
    assert run(TOY, PROMPT, replace(sampling, rule=rule))[0] == plain  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_model_that_drafts_for_itself_is_always_accepted(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error in q, p, the truncation or the draft's cache would cause a rejection."""
    monkeypatch.setattr(growth, "_MIN_DRAWN_PROBABILITY", 0.0)
    for cuts in ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}):
        sampling = Sampling(max_new_tokens=40, temperature=0.8, seed=4, rule=rule, **cuts)  # type: ignore[arg-type]
        stats = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), DraftBudget.chain(4))[2]
        assert stats.tokens_per_round == 5


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_cut_tokens_are_never_written(rule: str) -> None:
    """top_k = 1 leaves one text, whatever the drafter and the noise."""
    greedy = run(TOY, PROMPT, Sampling(max_new_tokens=24))[0]
    sampling = Sampling(max_new_tokens=24, temperature=1.0, top_k=1, seed=1, rule=rule)  # type: ignore[arg-type]
    for drafter in (DraftModel(TWIN, 37), NGram()):
        assert run(TOY, PROMPT, sampling, drafter, SHAPES["tree"])[0] == greedy


# A drafter's draws.


def drawn(rule: str = "rejection", budget: DraftBudget = SHAPES["tree"], seed: int = 1, warm: float = 1.0) -> Draft:
    sampling = Sampling(temperature=warm, top_k=20, seed=seed, rule=rule)  # type: ignore[arg-type]
    drafter = DraftModel(TWIN, 37)
    drafter.admit(0, PROMPT)
    return drafter.propose([ask_for(0, budget, sampling, PROMPT)])[0]


def test_a_drawn_tree_has_the_fixed_shape_and_a_q_for_every_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_MIN_DRAWN_PROBABILITY", 0.0)
    for seed in range(5):
        draft = drawn(seed=seed)
        ranks: list[tuple[int, ...]] = [()]
        for parent in draft.parents:
            ranks.append((*ranks[parent], sum(r[:-1] == ranks[parent] for r in ranks[1:])))
        assert Counter(rank[:-1] for rank in ranks[1:]) == shape(SHAPES["tree"])
        assert draft.q.keys() == set(draft.parents)
        assert all(
            q.shape == (37,) and abs(float(q.sum()) - 1) < 1e-6 and int((q > 0).sum()) == 20 for q in draft.q.values()
        )
        assert all(float(draft.q[p][t]) > 0 for p, t in zip(draft.parents, draft.tokens, strict=True))


def test_nothing_is_drawn_below_a_path_that_is_unlikely() -> None:
    lengths = set()
    for seed in range(20):
        draft = drawn(budget=DraftBudget.chain(4), seed=seed, warm=0.15)
        odds = [*itertools.accumulate((float(draft.q[i][token]) for i, token in enumerate(draft.tokens)), operator.mul)]
        assert all(path >= 0.3 for path in odds[:-1])
        assert len(odds) == 4 or odds[-1] < 0.3
        lengths.add(len(odds))
    assert len(lengths) > 1


@pytest.mark.parametrize("rule", ["match", "typical"])
def test_other_rules_are_given_chosen_candidates(rule: str) -> None:
    assert drawn(rule).q == {}


def test_q_covers_the_targets_vocabulary() -> None:
    small = DraftModel(toy_target(vocab_size=30), 37)
    small.admit(0, PROMPT)
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=1, rule="block")
    (draft,) = small.propose([ask_for(0, DraftBudget.chain(3), sampling, PROMPT)])
    assert {q.shape for q in draft.q.values()} == {(37,)}
    assert all(float(q[30:].sum()) == 0 for q in draft.q.values())
    assert len(run(TOY, PROMPT, sampling, small, DraftBudget.chain(3))[0]) == 12


def test_candidates_are_drawn_without_replacement() -> None:
    """Compare ordered pairs of draws with their exact probabilities by chi-square."""
    logits, draws = Q[0].log(), 3000
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        sampler = Sampler(1.0, noise=Noise(seed), rule="rejection")
        counts[tuple(sampler.rank(Prefix(), logits[None], [[]], 2)[0].tokens)] += 1
    total = 0.0
    for a, b in itertools.permutations(range(VOCAB), 2):
        expected = draws * float(Q[0, a] * Q[0, b] / (1 - Q[0, a]))
        total += (counts[a, b] - expected) ** 2 / expected
    assert total < 20.5, "5 degrees of freedom, 0.1 %"


def test_a_position_that_is_drafted_again_gets_new_draws() -> None:
    """The same prefix and position is drafted in the middle of a round, and at the start of the next round."""
    logits = torch.zeros(1, 1000)
    middle = Sampler(1.0, rule="block").rank(Prefix([1, 2]), logits, [[3]], 20)[0].tokens
    start = Sampler(1.0, rule="block").rank(Prefix([1, 2, 3]), logits, [[]], 20)[0].tokens
    sibling = Sampler(1.0, rule="block").rank(Prefix([1, 2]), logits, [[4]], 20)[0].tokens
    own = Sampler(1.0).rank(Prefix([1, 2, 3]), logits, [[]], 20)[0].tokens
    for one, other in itertools.combinations((middle, start, sibling, own), 2):
        assert len({*one} & {*other}) < 5


# Typical acceptance.


def logits_of(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows).double().log()


def test_typical_keeps_the_longest_plausible_path() -> None:
    sure, unsure = [0.94, 0.03, 0.02, 0.01], [0.3, 0.3, 0.2, 0.2]
    sampler = Sampler(1.0, rule="typical")
    # Entropy of `sure` 0.29: the bar is 0.09. Of `unsure` 1.37: 0.3 * exp(-1.37) = 0.076.
    assert typical(Draft((1,), (0,)), logits_of(sure, unsure), sampler, Prefix()).tokens == (0,), "implausible: 0.03"
    assert typical(Draft((3,), (0,)), logits_of(unsure, sure), sampler, Prefix()).tokens == (3, 0)
    tree = Draft((0, 1, 2), (0, 0, 2))
    rows = logits_of(unsure, sure, unsure, sure)
    assert typical(tree, rows, sampler, Prefix()).path == (2, 3), "the longest"
    level = Draft((2, 0), (0, 0))
    assert typical(level, logits_of(unsure, sure, sure), sampler, Prefix()).path == (2,), "of two as long the likelier"
    even = logits_of([0.02] * 50, [0.02] * 50)
    assert typical(Draft((7,), (0,)), even, sampler, Prefix()).path, "0.02 is much where exp(-entropy) is 0.02"
    assert not typical(Draft((7,), (0,)), even, sampler, Prefix(), delta=1.01).path


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_logits_that_are_not_finite_are_an_error(rule: str) -> None:
    with pytest.raises(NonFiniteLogits):
        RULES[rule](Draft((1,), (0,)), torch.full((2, 4), torch.nan), Sampler(1.0, rule=rule), Prefix())  # type: ignore[index, arg-type]


# Labels.


def test_statistics_say_what_the_text_is() -> None:
    for rule, warm, label in (
        ("match", 1.0, "rounding"),
        ("rejection", 1.0, "distribution"),
        ("block", 1.0, "distribution"),
        ("typical", 1.0, "lossy"),
        ("rejection", 0.0, "rounding"),
        ("typical", 0.0, "rounding"),
    ):
        sampler = Sampling(temperature=warm, rule=rule).sampler()  # type: ignore[arg-type]
        assert text_guarantee(sampler, "rounding") == label
    llm = toy_llm(DraftModel(TWIN, 37))
    for rule, label in (("match", llm.guarantee), ("block", "distribution"), ("typical", "lossy")):
        done = llm.generate("hello", Sampling(max_new_tokens=5, temperature=1.0, seed=1, rule=rule), raw=True)  # type: ignore[arg-type]
        assert done.stats.guarantee == done.as_dict()["stats"]["guarantee"] == label


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(InvalidOption, match="rule='best'"):
        Sampling(rule="best")  # type: ignore[arg-type]
