"""Medusa: correct heads must be accepted, so that a wrong row, depth or position is visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.drafters.medusa import Medusa
from paceline.engine.engine import Engine
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.models.heads import MedusaConfig
from paceline.models.medusa import MedusaHeads
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.testing import ToyTarget, check_drafter, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget, Tap, Verdict
from tests.support.tiny_heads import TINY_MEDUSA, fitted_medusa, medusa_tensors
from tests.support.toys import ask_for

TOY = tiny_target()
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
WARM = Sampling(max_new_tokens=20, temperature=0.9, seed=6)
TEXT = PROMPT + run(TOY, PROMPT, WARM)[0]
RIGHT = fitted_medusa(TOY, [TEXT])
ALL = 1 + TINY_MEDUSA.heads

Out = Mapping[Tap, Tensor]


def rate(drafter: Medusa, draft: DraftBudget, sampling: Sampling = WARM, prompt: Sequence[int] = PROMPT) -> float:
    """Return the tokens per round of a reply, after checking that it equals plain decoding."""
    tokens, _, stats = run(TOY, prompt, sampling, drafter, draft)
    assert tokens == run(TOY, prompt, sampling)[0]
    return stats.tokens_per_round


def with_heads(change: Mapping[str, Tensor], config: MedusaConfig = TINY_MEDUSA) -> Medusa:
    return Medusa(config, {**RIGHT, **change}, TOY)


@pytest.mark.parametrize("cut", [0, 1, 8])
def test_heads_that_know_the_text_are_always_right(cut: int) -> None:
    """Check this after a prefill, after rounds of every depth, and with prompts of at most two tokens."""
    prompt = TEXT[: len(PROMPT) - cut]
    text = prompt + run(TOY, prompt, WARM)[0]
    for depth in (1, 2, 3):
        drafter = Medusa(TINY_MEDUSA, fitted_medusa(TOY, [text]), TOY)
        assert rate(drafter, DraftBudget.chain(depth), prompt=prompt) == pytest.approx(1 + depth, rel=0.1)
    assert rate(drafter, DraftBudget.chain(9), prompt=prompt) == pytest.approx(ALL, rel=0.1), (
        "no deeper than there are heads"
    )


def test_a_prompt_of_one_token_leaves_nothing_to_draft_from_at_first() -> None:
    text = [4, *run(TOY, [4], WARM)[0]]
    drafter = Medusa(TINY_MEDUSA, fitted_medusa(TOY, [text]), TOY)
    drafter.admit(0, [4])
    assert drafter.propose([ask_for(0, DraftBudget.chain(3), WARM, [4])]) == [Draft()]
    drafter.release(0)
    assert rate(drafter, DraftBudget.chain(3), prompt=[4]) > 3


class FirstRow(Medusa):
    """Uses the pending token's row instead of the last accepted row."""

    def observe(self, slot: int, verdict: Verdict, out: Out) -> None:
        super().observe(slot, replace(verdict, path=()), out)


class LastRow(Medusa):
    """Uses the last row of the pass, whether accepted or not."""

    def observe(self, slot: int, verdict: Verdict, out: Out) -> None:
        super().observe(slot, replace(verdict, path=(out["final"].shape[0] - 1,)), out)


class OneEarly(Medusa):
    """Uses the row before the last accepted row."""

    def observe(self, slot: int, verdict: Verdict, out: Out) -> None:
        super().observe(slot, replace(verdict, path=verdict.path[:-1]), out)


class Deaf(Medusa):
    """Always drafts from the state of the first round."""

    def observe(self, slot: int, verdict: Verdict, out: Out) -> None: ...


@pytest.mark.parametrize("wrong", [FirstRow, OneEarly, Deaf])
def test_a_state_of_another_row_is_noticed(wrong: type[Medusa]) -> None:
    """After a rejected round, the first two faults have the correct state again, so they accept every other round."""
    assert rate(wrong(TINY_MEDUSA, RIGHT, TOY), DraftBudget.chain(3)) <= 2.5
    assert rate(Medusa(TINY_MEDUSA, RIGHT, TOY), DraftBudget.chain(3)) > 3.5


def test_a_row_that_was_not_accepted_is_noticed() -> None:
    """Half of the drafted tokens are wrong, so that the last row is rarely the last accepted row."""
    wrong = {"lm_heads.1.weight": RIGHT["lm_heads.1.weight"].roll(1, 0)}
    assert rate(with_heads(wrong), DraftBudget.chain(3)) == pytest.approx(2, rel=0.1)
    assert rate(LastRow(TINY_MEDUSA, {**RIGHT, **wrong}, TOY), DraftBudget.chain(3)) < 1.4


def test_heads_of_another_depth_are_noticed() -> None:
    late = {f"lm_heads.{head}.weight": RIGHT[f"lm_heads.{(head + 1) % 3}.weight"] for head in range(3)}
    assert rate(with_heads(late), DraftBudget.chain(3)) < 1.5


def second_best(weight: Tensor) -> Tensor:
    """Return the same head with a wrong most likely token, the neighbour of the correct one."""
    return weight + 1.5 * weight.roll(1, 0)


def test_the_second_candidates_of_all_heads_are_found_in_a_tree() -> None:
    seconds = {name: second_best(x) for name, x in RIGHT.items() if name.startswith("lm_heads")}
    assert rate(with_heads(seconds), DraftBudget.chain(3)) < 1.5
    assert rate(with_heads(seconds), DraftBudget(14, 3, 2)) == pytest.approx(ALL, rel=0.1)
    path = replace(TINY_MEDUSA, paths=((1,), (1, 1), (1, 1, 1)))
    drafter = with_heads(seconds, path)
    assert drafter.draft == DraftBudget(3, 3, 2)
    assert rate(drafter, drafter.draft) == pytest.approx(ALL, rel=0.1), "one path of second candidates, and no other"


def test_drafts_use_the_noise_of_the_tokens_position() -> None:
    """The temperature is so high that only the noise decides, for the target and for every head."""
    hot = Sampling(max_new_tokens=40, temperature=1000.0, seed=3)
    blank = {f"lm_heads.{head}.weight": torch.zeros(37, 32) for head in range(3)}
    assert rate(with_heads(blank), DraftBudget.chain(3), hot) > 3.7
    assert rate(with_heads(blank), DraftBudget(9, 3, 3), hot) > 3.7


def test_processors_see_the_likeliest_path() -> None:
    """The grammar depends on the last token and has one likely continuation, so drafting needs only the path."""

    def counting(prefix: Prefix, logits: Tensor) -> Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[(prefix.tokens[-1] + 5) % 37] = 0.0
        only[(prefix.tokens[-1] + 7) % 37] = -50.0
        return only

    sampling = Sampling(max_new_tokens=20, temperature=0.8, seed=1, processors=[counting])
    assert rate(Medusa(TINY_MEDUSA, medusa_tensors(), TOY), DraftBudget(9, 3, 3), sampling) == pytest.approx(
        ALL, rel=0.1
    )


def test_requests_in_one_pass_draft_as_single_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, seeds = [PROMPT, PROMPT[4:], [3, 3, 7]], (6, 7, 8)
    samplings = [replace(WARM, max_new_tokens=6, seed=seed) for seed in seeds]
    texts = [p + run(TOY, p, s)[0] for p, s in zip(prompts, samplings, strict=True)]
    drafter = Medusa(TINY_MEDUSA, fitted_medusa(TOY, texts), TOY)
    alone = [run(TOY, p, s, drafter, DraftBudget.chain(3)) for p, s in zip(prompts, samplings, strict=True)]
    passes = []
    honest = MedusaHeads.states
    monkeypatch.setattr(MedusaHeads, "states", lambda self, x, heads: passes.append(len(x)) or honest(self, x, heads))
    together = run_together(Engine(TOY, drafter, DraftBudget.chain(3)), prompts, samplings)
    assert (
        [r[0] for r in together] == [r[0] for r in alone] == [t[len(p) :] for t, p in zip(texts, prompts, strict=True)]
    )
    assert [r[2].accepted for r in together] == [r[2].accepted for r in alone] == [4, 4, 4]
    assert passes == [3, 3], "one pass of the heads per round for all requests that have room for a draft"


def test_the_budget_cuts_the_tree_from_its_end() -> None:
    order = ((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,), (1, 0))
    drafter = Medusa(replace(TINY_MEDUSA, paths=order), medusa_tensors(), TOY)
    assert drafter.draft == DraftBudget(7, 3, 3)
    drafter.admit(0, PROMPT)
    drafter.feed(0, PROMPT[:-1], {"final": torch.randn(9, 32, dtype=torch.float64)})

    def parents(budget: DraftBudget) -> tuple[int, ...]:
        (draft,) = drafter.propose([ask_for(0, budget, WARM, PROMPT)])
        return draft.parents

    assert parents(drafter.draft) == (0, 1, 0, 2, 1, 0, 3)
    assert parents(DraftBudget(4, 3, 3)) == (0, 1, 0, 2)
    assert parents(DraftBudget(7, 2, 3)) == (0, 1, 0, 1, 0, 3)
    assert parents(DraftBudget(7, 3, 2)) == (0, 1, 0, 2, 1, 3)
    assert parents(DraftBudget.chain(7)) == (0, 1, 2)


def drawn(order: tuple[tuple[int, ...], ...], rule: str = "rejection") -> Draft:
    drafter = Medusa(replace(TINY_MEDUSA, paths=order), medusa_tensors(), TOY)
    drafter.admit(0, PROMPT)
    drafter.feed(0, PROMPT[:-1], {"final": torch.ones(9, 32, dtype=torch.float64)})
    sampling = Sampling(temperature=1.0, seed=5, rule=rule)  # type: ignore[arg-type]
    return drafter.propose([ask_for(0, drafter.draft, sampling, PROMPT)])[0]


def test_drawn_siblings_include_every_draw_with_its_q() -> None:
    """The third draw depends on the second draw: its q is the distribution without the first two tokens."""
    every, gaps = drawn(((0,), (1,), (0, 0), (0, 1))), drawn(((0,), (2,), (0, 0), (0, 3)))
    assert (gaps.tokens, gaps.parents) == (every.tokens, every.parents)
    assert gaps.q.keys() == {0, 1}
    assert all(abs(float(q.sum()) - 1) < 1e-9 for q in gaps.q.values())
    assert not torch.equal(gaps.q[0], gaps.q[1]), "each depth has its own head"
    chosen = drawn(((0,), (2,), (0, 0), (0, 3)), "match")
    assert chosen.q == {}
    assert chosen.tokens != drawn(((0,), (1,), (0, 0), (0, 1)), "match").tokens


def test_only_the_heads_that_are_wanted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    honest = MedusaHeads.states
    monkeypatch.setattr(MedusaHeads, "states", lambda self, x, heads: asked.append(heads) or honest(self, x, heads))
    run(TOY, PROMPT, WARM, Medusa(TINY_MEDUSA, RIGHT, TOY), DraftBudget.chain(2))
    assert set(asked) == {1, 2}, "as deep as the draft, and less at the end of the reply"


# Contents of checkpoints.


def logits(config: MedusaConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    heads = MedusaHeads(config, tensors, TOY)
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = heads.logits(heads.states(x, config.heads))
    assert out.shape == (config.heads, 5, 37)
    return out


def test_heads_without_products_of_their_own_end_in_the_targets() -> None:
    shared = replace(TINY_MEDUSA, shared=True, layers=2)
    tensors = medusa_tensors(shared)
    own = {f"lm_heads.{head}.weight": TOY.embed(torch.arange(37)) for head in range(3)}  # type: ignore[attr-defined]
    torch.testing.assert_close(logits(shared, tensors), logits(replace(shared, shared=False), {**tensors, **own}))
    assert torch.equal(logits(shared, tensors | {"token_map": torch.arange(9)}), logits(shared, tensors))


def test_a_map_gives_a_small_vocabulary_its_place_in_the_large_one() -> None:
    tensors, ids = medusa_tensors(), torch.tensor([30, 2, 9, 5, 1])
    every = logits(TINY_MEDUSA, tensors)
    small = {name: x[ids] for name, x in tensors.items() if name.startswith("lm_heads")}
    mapped = logits(TINY_MEDUSA, {**tensors, **small, "token_map": ids})
    torch.testing.assert_close(mapped[..., ids], every[..., ids])
    assert (mapped == -torch.inf).sum() == 3 * 5 * (37 - 5)
    # vLLM's files can have all rows and a map that selects rows.
    assert torch.equal(logits(TINY_MEDUSA, {**tensors, "token_map": ids}), mapped)
    turned = torch.arange(37).flip(0)
    rows = {name: x[turned] for name, x in tensors.items() if name.startswith("lm_heads")}
    torch.testing.assert_close(logits(TINY_MEDUSA, {**tensors, **rows, "token_map": turned}), every)


def test_padded_and_short_vocabularies_become_the_targets() -> None:
    tensors = medusa_tensors()
    every = logits(TINY_MEDUSA, tensors)
    longer = {n: torch.cat([x, x]) for n, x in tensors.items() if n.startswith("lm_heads")}
    assert torch.equal(logits(TINY_MEDUSA, {**tensors, **longer}), every)
    shorter = {n: x[:30] for n, x in tensors.items() if n.startswith("lm_heads")}
    fewer = logits(TINY_MEDUSA, {**tensors, **shorter})
    torch.testing.assert_close(fewer[..., :30], every[..., :30])
    assert (fewer[..., 30:] == -torch.inf).all()


def test_one_product_may_serve_all_heads_and_biases_may_be_missing() -> None:
    tensors = medusa_tensors()
    one = {f"lm_heads.{head}.weight": tensors["lm_heads.0.weight"] for head in range(3)}
    alone = {n: x for n, x in tensors.items() if not n.startswith(("lm_heads.1", "lm_heads.2"))}
    torch.testing.assert_close(logits(TINY_MEDUSA, alone), logits(TINY_MEDUSA, {**tensors, **one}))
    none = {n: x for n, x in tensors.items() if not n.endswith("bias")}
    zero = {n: torch.zeros_like(x) for n, x in tensors.items() if n.endswith("bias")}
    assert torch.equal(logits(TINY_MEDUSA, none), logits(TINY_MEDUSA, {**tensors, **zero}))


def mapped_heads() -> dict[str, Tensor]:
    ids = torch.tensor(sorted(set(TEXT)))
    small = {name: x[ids] for name, x in RIGHT.items() if name.startswith("lm_heads")}
    return {**small, "token_map": ids}


@pytest.mark.slow
def test_a_checkpoint_with_a_map_keeps_the_contract() -> None:
    check_drafter(lambda: with_heads(mapped_heads()))


def test_a_checkpoint_with_a_map_drafts_right() -> None:
    mapped = mapped_heads()
    assert rate(with_heads(mapped), DraftBudget.chain(3)) == pytest.approx(ALL, rel=0.1)
    assert rate(with_heads(mapped), DraftBudget.chain(3), replace(WARM, rule="match", top_k=50)) > 3


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"blocks.0.layers.0.weight": torch.zeros(9, 9)}, "has shape"),
        ({"blocks.7.layers.0.weight": torch.zeros(32, 32)}, "does not know"),
        ({"lm_heads.2.weight": torch.zeros(30, 32)}, "has shape"),
        ({"token_map": torch.arange(5) + 35}, "token_map"),
        ({"token_map": torch.arange(40)}, "token_map"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_named(tensors: dict[str, Tensor], said: str) -> None:
    with pytest.raises(CorruptModel, match=said):
        Medusa(TINY_MEDUSA, {**medusa_tensors(), **tensors}, TOY)


def test_errors_name_a_target_that_does_not_fit() -> None:
    with pytest.raises(CorruptModel, match="hidden states of 32"):
        Medusa(TINY_MEDUSA, medusa_tensors(), tiny_target(hidden=16))
    with pytest.raises(UnsupportedModel, match="ToyTarget"):
        Medusa(TINY_MEDUSA, medusa_tensors(), ToyTarget())


def test_a_state_that_is_not_finite_drafts_nothing() -> None:
    drafter = Medusa(TINY_MEDUSA, medusa_tensors(), TOY)
    drafter.admit(0, PROMPT)
    drafter.feed(0, PROMPT[:-1], {"final": torch.full((9, 32), torch.nan, dtype=torch.float64)})
    assert drafter.propose([ask_for(0, DraftBudget(9, 3, 3), WARM, PROMPT)]) == [Draft()]
