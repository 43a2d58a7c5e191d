"""State that a drafter saved for another text equals the state it would compute for this text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.block import Block
from paceline.drafters.cached import MAX_PENDING
from paceline.drafters.cross import SharedTokenDrafter, TextDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack, DrafterWrapper
from paceline.drafters.suffix import Suffix
from paceline.drafters.vocab_map import VocabMap
from paceline.engine.drafting import unread
from paceline.engine.prefix_cache import PrefixCache
from paceline.models.decoder import Decoder
from paceline.models.heads import HeadConfig
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, DraftBudget, Forward, Rows, Want
from paceline.verify.tree import PREFILL_ROWS
from tests.support import random_heads as heads
from tests.support.cached_engine import CachedEngine, begun
from tests.support.cover import cover
from tests.support.toys import toy_foreigner, toy_model, toy_target

TARGET = toy_target(layers=8, vocab_size=64, context_length=1024)
FOREIGN = VocabMap(toy_model(context_length=1024), toy_foreigner(seed=9, context_length=1024))
PROMPT = [(i * i + 3 * i) % 37 for i in range(2 * PREFILL_ROWS + 90)]
TREE = DraftBudget(8, 3, 2)
BEGINNINGS = [
    (PREFILL_ROWS + 1, "match"),
    (PREFILL_ROWS + 1, "block"),
    (2, "block"),
    (31, "match"),
    (2 * PREFILL_ROWS + 60, "block"),
]
"""Number of tokens that an earlier text shares with the prompt, and the acceptance rule."""


def head(kind: type[Drafter], config: HeadConfig) -> Callable[[], Drafter]:
    return lambda: kind(config, heads.head_of(config).tensors, TARGET)  # type: ignore[call-arg]


EAGLE = head(Eagle, heads.EAGLE3)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "eagle-3": EAGLE,
    "eagle-1": head(Eagle, heads.EAGLE),
    "medusa": head(Medusa, heads.MEDUSA),
    "medusa, shared": head(Medusa, heads.COMPACT),
    "block": head(Block, heads.BLOCK),
    "block with a window": head(Block, heads.WINDOWED),
    "block with a window, mutual": head(Block, heads.MUTUAL),
    "block, few tokens": head(Block, heads.REDUCED),
    "early exit": lambda: EarlyExit(heads.EXIT, heads.head_of(heads.EXIT).tensors, TARGET, threshold=0.0),
    "model": lambda: DraftModel(toy_target(seed=9, vocab_size=64, context_length=1024), 64),
    "stack": lambda: DrafterStack([Suffix(floor=0.9), EAGLE(), NGram()]),
    "stack that needs nothing": lambda: DrafterStack([DraftModel(toy_target(seed=9, vocab_size=64), 64), NGram()]),
    "around": lambda: DrafterWrapper(EAGLE()),
    "ngram": NGram,
    "suffix": Suffix,
}
FOREIGNERS: dict[str, Callable[[], Drafter]] = {
    "shared tokens": lambda: SharedTokenDrafter(FOREIGN),
    "retold": lambda: TextDrafter(FOREIGN),
}


def draft_of(drafter: Drafter, ask: Ask) -> Draft:
    """Return the draft after the rounds that the drafter needs to read the text."""
    while (draft := drafter.propose([ask])[0]).unread:
        pass
    return draft


def rounds(engine: CachedEngine, prompt: Sequence[int], rule: str, tree: DraftBudget) -> tuple[list[Draft], list[int]]:
    """Return the drafts of the first rounds of a reply, and its text."""
    sampling = Sampling(temperature=0.9, seed=3, rule=rule, max_new_tokens=12, ignore_eos=True)  # type: ignore[arg-type]
    request = begun(engine, prompt, sampling)
    assert engine.drafter is not None
    drafts = []
    for _ in range(3):
        drafts.append(draft_of(engine.drafter, Ask(request.slot, request.prefix, tree, request.sampler)))
        engine.step([request])
    text = list(request.token_ids)
    engine.finish(request)
    return drafts, text


def same(ours: Sequence[Draft], theirs: Sequence[Draft], exact: bool) -> None:
    assert list(ours) == list(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.q.keys() == other.q.keys()
        for row, q in one.q.items():
            torch.testing.assert_close(q, other.q[row], rtol=0, atol=0 if exact else 1e-9)


def target_of(name: str) -> Decoder:
    target = FOREIGN.target.target if name in FOREIGNERS else TARGET
    assert isinstance(target, Decoder)
    return target


@cache
def uncached(name: str, rule: str) -> tuple[list[Draft], list[int]]:
    """Return drafts and text after feeding the whole prompt."""
    engine = CachedEngine(target_of(name), (DRAFTERS | FOREIGNERS)[name](), TREE, PrefixCache(0))
    return rounds(engine, PROMPT, rule, TREE)


@cover(
    name=[*DRAFTERS, *FOREIGNERS],
    how={f"{common} tokens, {rule}": (common, rule) for common, rule in BEGINNINGS},
    drafted={"a text that ended": True, "a prompt that nobody has drafted for": False},
    together=[("name",), ("how", "drafted")],
)
def test_drafts_after_load_equal_drafts_after_the_whole_prompt(name: str, how: tuple[int, str], drafted: bool) -> None:
    """Check this for every number of read tokens of the saved text."""
    (common, rule), target, make = how, target_of(name), (DRAFTERS | FOREIGNERS)[name]
    plain, text = uncached(name, rule)
    assert any(draft.tokens for draft in plain) or name in ("ngram", "suffix")
    other = [*PROMPT[:common], *((t + 1) % 37 for t in PROMPT[common:]), 5, 6, 7]
    engine = CachedEngine(target, make(), TREE, PrefixCache(1 << 30, chunk_invariant=True))
    if drafted:
        rounds(engine, other, rule, TREE)
    else:
        request = begun(engine, other, Sampling())
        engine.finish(request)
    drafts, ours = rounds(engine, PROMPT, rule, TREE)
    assert engine.cached == [0, common - 1]
    # With the same chunks, passes have the same bits. A draft model with another tokenizer has other chunks.
    same(drafts, plain, exact=common == PREFILL_ROWS + 1 and name in DRAFTERS)
    assert ours == text


def rows_read(drafter: DraftModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the rows of each pass of a draft model."""
    read: list[int] = []
    honest = drafter._model.forward

    def forward(rows: Rows, cache: KVCache, want: Want) -> Forward:
        read.append(sum(rows.counts))
        return honest(rows, cache, want)

    monkeypatch.setattr(drafter._model, "forward", forward)
    return read


@pytest.mark.parametrize("name", ["model", *FOREIGNERS])
def test_a_draft_model_does_not_read_again_what_it_has_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = (DRAFTERS | FOREIGNERS)[name]()
    assert isinstance(drafter, DraftModel)
    target = FOREIGN.target.target if name in FOREIGNERS else TARGET
    read = rows_read(drafter, monkeypatch)
    engine = CachedEngine(target, drafter, TREE, PrefixCache(1 << 30, chunk_invariant=True))
    rounds(engine, PROMPT, "match", TREE)
    first, read[:] = sum(read), []
    rounds(engine, [*PROMPT, 1, 2, 3], "match", TREE)
    assert first > len(PROMPT) > 10 * sum(read)


@pytest.mark.parametrize("name", ["model", "eagle-3", "block", "stack", "around", *FOREIGNERS])
def test_the_controller_knows_what_a_drafter_has_read_of_a_cached_prefix(name: str) -> None:
    engine = CachedEngine(
        target_of(name), (DRAFTERS | FOREIGNERS)[name](), TREE, PrefixCache(1 << 30, chunk_invariant=True)
    )
    rounds(engine, PROMPT, "match", TREE)
    first, second = (begun(engine, prompt, Sampling()) for prompt in (PROMPT[::-1], [*PROMPT, 1, 2, 3]))
    assert unread(first) >= len(PROMPT) // 2  # a foreigner counts its own tokens
    assert unread(second) < 10


def test_the_controller_knows_what_a_head_has_read_during_prefill() -> None:
    target = toy_target(layers=8, vocab_size=64, context_length=4096)
    config = heads.EAGLE3
    drafter = Eagle(config, heads.head_of(config).tensors, target)
    engine = CachedEngine(target, drafter, TREE, PrefixCache(0))
    prompt = [i * i % 37 for i in range(MAX_PENDING + 3 * PREFILL_ROWS)]
    assert unread(begun(engine, prompt, Sampling())) <= MAX_PENDING + 1


@pytest.mark.parametrize("name", ["model", *FOREIGNERS])
def test_one_sample_of_a_prompt_reads_it_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = (DRAFTERS | FOREIGNERS)[name]()
    assert isinstance(drafter, DraftModel)
    engine = CachedEngine(target_of(name), drafter, TREE, PrefixCache(0))
    requests = [begun(engine, prompt, Sampling()) for prompt in (PROMPT, PROMPT, [*PROMPT[1:], 5])]
    alone = draft_of(drafter, Ask(requests[0].slot, requests[0].prefix, TREE, requests[0].sampler))
    read = rows_read(drafter, monkeypatch)
    second, other = (Ask(r.slot, r.prefix, TREE, r.sampler) for r in requests[1:])
    assert draft_of(drafter, second) == alone
    assert sum(read) < 50
    draft_of(drafter, other)
    assert sum(read) > 300, "another prompt must be read"


@pytest.mark.parametrize("more", [0, 1])
def test_one_token_too_many_is_noticed(more: int) -> None:
    """EAGLE has read the token after each state. If that token differs, the row differs too."""
    prompt, other = [*PROMPT[:40], 5, 6, 7], [*PROMPT[:40], 9, 9, 9]
    engine = CachedEngine(TARGET, EAGLE(), TREE, PrefixCache(0))
    sampling = Sampling(temperature=0.9, seed=3, rule="block")
    first = begun(engine, other, sampling)
    plain = begun(engine, prompt, sampling)
    request = engine.start(prompt, sampling.sampler(), plain.stream, plain.stats)
    assert engine.drafter is not None
    engine.drafter.propose([Ask(first.slot, first.prefix, TREE, first.sampler)])
    # The target's own 40 tokens are the same; the head's row 39 was made with token 40.
    engine.cache.load(request.slot, engine.cache.save(first.slot), 39 + more)
    engine.drafter.load(request.slot, engine.drafter.save(first.slot), 39 + more)
    engine.prefill(request)
    asks = [Ask(one.slot, one.prefix, TREE, one.sampler) for one in (plain, request)]
    ours, theirs = (engine.drafter.propose([ask])[0] for ask in asks)
    assert torch.allclose(ours.q[0], theirs.q[0], rtol=0, atol=1e-9) == (more == 0)


def test_text_before_a_heads_window_is_no_hit() -> None:
    target = toy_target(layers=8, vocab_size=64, context_length=2048)
    drafter = Block(heads.WINDOWED, heads.head_of(heads.WINDOWED).tensors, target)
    engine = CachedEngine(target, drafter, DraftBudget.chain(3), PrefixCache(1 << 30, chunk_invariant=True))
    prompt = [i * i % 37 for i in range(1500)]
    request = begun(engine, prompt, Sampling())
    drafter.propose([Ask(request.slot, request.prefix, DraftBudget.chain(3), request.sampler)])
    saved = drafter.save(request.slot)
    assert saved is not None
    assert saved.length == 1499
    assert [saved.holds(length, 40) for length in (5, 400, 1490)] == [False, False, True]
    engine.finish(request)
    for prefix in (400, 1490):
        engine.finish(begun(engine, [*prompt[:prefix], 3, 4, 5], Sampling()))
    assert engine.cached == [0, 0, 1489]
    assert engine.prefixes is not None
    plain = CachedEngine(target, None, None, engine.prefixes)
    plain.finish(begun(plain, [*prompt[:400], 5, 4, 3], Sampling()))
    assert plain.cached == [399], "another drafter may use it, and what the short prompt left"


def test_nothing_is_saved_of_a_text_that_was_not_heard() -> None:
    for drafter in (EAGLE(), DrafterStack([NGram(), EAGLE()])):
        drafter.admit(0, [1, 2, 3])
        assert drafter.needs_past
        assert drafter.save(0) is None
    for drafter in (NGram(), DRAFTERS["medusa"]()):
        drafter.admit(0, [1, 2, 3])
        assert not drafter.needs_past
        assert drafter.save(0) is None


def test_saved_state_is_a_copy() -> None:
    drafter = DRAFTERS["stack"]()
    engine = CachedEngine(TARGET, drafter, TREE, PrefixCache(0))
    request = begun(engine, PROMPT[:50], Sampling())
    for _ in range(2):
        saved = drafter.save(request.slot)
        assert saved is not None
        before = [x.clone() for x in saved.tensors]
        assert saved.nbytes == sum(x.nbytes for x in before) > 0
        engine.step([request])
        begun(engine, PROMPT[50:90], Sampling())
        assert all(map(torch.equal, saved.tensors, before))
