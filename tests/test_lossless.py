"""Losslessness is one property: `with speculation == without`, token for token. And proof that the test can fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache import SlabCache
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import Stack
from paceline.drafters.suffix import Suffix
from paceline.engine import Engine
from paceline.models.decoder import Decoder
from paceline.noise import Noise
from paceline.protocols import Drafter
from paceline.sampler import Sampler
from paceline.sampling import Sampling
from paceline.testing import Oracle, run, tiny_target
from paceline.types import Tree
from tests.test_tree import drafts

TOY = tiny_target()
SMALL = tiny_target(dtype=torch.float32)
OTHER = tiny_target(seed=9)
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]

Make = Callable[[list[int]], Drafter]
DRAFTERS: dict[str, Make] = {
    "ngram": lambda text: NGram(),
    "suffix": lambda text: Suffix(),
    "suffix that remembers": lambda text: Suffix(remember=True),
    "the model itself": lambda text: DraftModel(SMALL, 37),
    "another model": lambda text: DraftModel(OTHER, 37),
    "stack": lambda text: Stack([NGram(), DraftModel(OTHER, 37)]),
    "oracle at 70 %": lambda text: Oracle(text, 0.7, 37),
    "always right": lambda text: Oracle(text, 1.0, 37),
    "hostile": lambda text: Oracle(text, 0.0, 37),
}
SHAPES = {"chain": Tree.chain(5), "long chain": Tree.chain(11), "tree": Tree(14, 4, 3)}
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=48),
    "warm": Sampling(max_new_tokens=48, temperature=0.7, seed=1),
    "top-k": Sampling(max_new_tokens=48, temperature=1.3, top_k=5, seed=2),
    "top-p": Sampling(max_new_tokens=48, temperature=1.0, top_p=0.8, seed=3),
    "min-p": Sampling(max_new_tokens=48, temperature=1.0, min_p=0.1, seed=4),
    "hot": Sampling(max_new_tokens=48, temperature=3.0, seed=5),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_the_targets_own(drafter: str, shape: Tree, sampling: Sampling) -> None:
    plain, finish, _ = run(TOY, PROMPT, sampling)
    tokens, ended, stats = run(TOY, PROMPT, sampling, DRAFTERS[drafter](PROMPT + plain), shape)
    assert tokens == plain
    assert ended == finish
    assert stats.tokens == len(plain) == stats.rounds + stats.accepted
    assert sum(stats.accepted_at) == stats.accepted <= stats.drafted


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_stop_condition_ends_at_the_same_token(drafter: str, shape: Tree) -> None:
    """Each reply is stopped at each of its tokens in turn, by each means; warm text, so that it varies."""
    warm = Sampling(max_new_tokens=24, temperature=1.0, seed=8)
    text = run(TOY, PROMPT, warm)[0]
    make = DRAFTERS[drafter]
    for at in range(0, len(text), 3):
        for stop in (
            {"stop_token_ids": [text[at]]},
            {"stop": chr(text[at])},
            {"stop": "".join(map(chr, text[at : at + 3]))},
            {"max_new_tokens": at + 1},
        ):
            sampling = Sampling(**({"max_new_tokens": 24, "temperature": 1.0, "seed": 8} | stop))  # type: ignore[arg-type]
            plain = run(TOY, PROMPT, sampling)
            drafted = run(TOY, PROMPT, sampling, make(PROMPT + text), shape)
            assert drafted[:2] == plain[:2]
        plain = run(TOY, PROMPT, warm, eos=[text[at]])
        assert run(TOY, PROMPT, warm, make(PROMPT + text), shape, eos=[text[at]])[:2] == plain[:2]
        assert plain[1] == "eos"


def test_drafts_reach_the_end_of_the_context() -> None:
    short = tiny_target(context_length=40)
    plain, finish, _ = run(short, PROMPT, Sampling(max_new_tokens=500))
    assert finish == "length"
    assert len(plain) == 30
    for shape in SHAPES.values():
        for drafter in (Oracle(PROMPT + plain, 0.8, 37), DraftModel(tiny_target(context_length=40), 37), Suffix()):
            assert run(short, PROMPT, Sampling(max_new_tokens=500), drafter, shape)[0] == plain


@settings(max_examples=25)
@given(st.lists(st.integers(0, 36), min_size=1, max_size=30), st.integers(0, 99), st.data())
def test_any_tree_at_any_moment(prompt: list[int], seed: int, data: st.DataObject) -> None:
    """Arbitrary trees, some of whose paths are true, at arbitrary rounds."""
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=seed)
    plain = run(TOY, prompt, sampling)[0]

    class Anything(Oracle):
        def propose(self, asks):  # type: ignore[no-untyped-def]
            draft = data.draw(drafts(most=asks[0].budget.nodes, vocab=37))
            true = [*self._text, 0][min(asks[0].position + 1, len(self._text))]
            if draft.tokens and data.draw(st.booleans()) and true not in draft.tokens:
                draft = type(draft)((true, *draft.tokens[1:]), draft.parents)
            return [draft for _ in asks]

    assert run(TOY, prompt, sampling, Anything(prompt + plain, 1.0, 37), Tree(8, 8, 3))[0] == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_is_always_right(temperature: float) -> None:
    """Any slip in the draft's cache or positions (an off-by-one, a stale row) shows as a rejection."""
    sampling = Sampling(max_new_tokens=60, temperature=temperature, seed=4)
    for length in range(1, 6):
        for prompt in (PROMPT, PROMPT[:1], PROMPT[:2], PROMPT[:3]):
            _, _, stats = run(TOY, prompt, sampling, DraftModel(TOY, 37), Tree.chain(length))
            assert stats.tokens_per_round == 1 + length, "a row of padding was taken for the last token"
    _, _, tree = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), Tree(12, 4, 3))
    assert tree.tokens_per_round > 3


# Negative controls: each breaks one thing on purpose, and the property above must notice.


def test_a_commit_that_forgets_to_move_a_trees_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(TOY, PROMPT, SAMPLINGS["warm"])[0]
    oracle = lambda: Oracle(PROMPT + plain, 0.9, 37)  # noqa: E731
    assert run(TOY, PROMPT, SAMPLINGS["warm"], oracle(), SHAPES["tree"])[0] == plain
    honest = SlabCache.commit
    monkeypatch.setattr(SlabCache, "commit", lambda self, slot, path: honest(self, slot, range(1, len(path) + 1)))
    assert run(TOY, PROMPT, SAMPLINGS["warm"], oracle(), SHAPES["tree"])[0] != plain


def test_an_off_by_one_in_the_drafts_cache_is_noticed() -> None:
    class Late(DraftModel):
        """One token behind from the first round on."""

        def observe(self, slot, verdict, out):  # type: ignore[no-untyped-def]
            text = self._slots[slot].text
            super().observe(slot, verdict, out)
            if len(text) == len(PROMPT) + len(verdict.tokens):
                del text[-1]

    sampling = SAMPLINGS["greedy"]
    plain, _, right = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), Tree.chain(5))
    tokens, _, wrong = run(TOY, PROMPT, sampling, Late(TOY, 37), Tree.chain(5))
    assert tokens == plain, "a bad drafter costs speed, never text"
    assert wrong.rounds > 2 * right.rounds


def test_noise_of_the_wrong_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting with another noise than the target's costs acceptance at once: the coupling is real."""
    sampling = SAMPLINGS["hot"]
    right = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), Tree.chain(5))[2]
    rank = Sampler.rank
    monkeypatch.setattr(Sampler, "rank", lambda self, logits, paths, n: rank(self, logits, [[*p, 0] for p in paths], n))
    wrong = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), Tree.chain(5))[2]
    assert wrong.accepted < right.accepted / 2


def test_noise_that_moves_with_the_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh noise per draw, as ordinary samplers have it, makes the text depend on the draft."""
    plain = run(TOY, PROMPT, SAMPLINGS["warm"])[0]
    honest, draws = Noise.best, itertools.count()
    monkeypatch.setattr(Noise, "best", lambda self, position, *row: honest(self, next(draws) // 2, *row))
    assert run(TOY, PROMPT, SAMPLINGS["warm"], Oracle(PROMPT + plain, 0.7, 37), SHAPES["chain"])[0] != plain


# Several requests in one pass.


@pytest.mark.parametrize("sampling", ["greedy", "warm"])
def test_a_ragged_batch_writes_what_each_would_alone(sampling: str, toy: Decoder) -> None:
    from paceline.stats import Stats
    from paceline.stream import TextStream

    how = SAMPLINGS[sampling]
    prompts = [PROMPT, [3], [7, 7, 7, 7, 8], list(range(30))]
    alone = [run(toy, prompt, how)[0] for prompt in prompts]
    engine = Engine(toy, Stack([Suffix(), DraftModel(OTHER, 37)]), Tree(6, 3, 2))
    requests = []
    for prompt in prompts:
        text = TextStream(how, (), lambda ids: "", 200)
        requests.append(engine.start(how.sampler(prompt), text, Stats(0, "rounding")))
        engine.prefill(requests[-1])
    live = list(requests)
    while live:
        engine.step(live)
        for request in [r for r in live if r.finish]:
            engine.finish(request)
        live = [r for r in live if not r.finish]
    assert [r.text[len(p) :] for r, p in zip(requests, prompts, strict=True)] == alone
