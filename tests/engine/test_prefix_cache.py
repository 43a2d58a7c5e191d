"""Common prefixes of prompts are computed once, without any effect on the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.attention import LayerAttention
from paceline.cache.slab import SlabCache
from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.drafters.block import Block
from paceline.drafters.cross import SharedTokenDrafter, TextDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.drafters.vocab_map import VocabMap
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.self_check import chunk_invariant, guarantee
from paceline.engine.stats import Stats
from paceline.errors import NonFiniteLogits, OutOfMemory
from paceline.kernels.cpu.build import library
from paceline.models.config import RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.protocols import KVCache, Saved
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.testing import TINY, random_tensors, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget, Forward, Rows, Want
from paceline.verify.tree import PREFILL_ROWS, pack
from tests.conftest import packaged_model
from tests.support.cached_engine import CachedEngine, begun
from tests.support.cover import some
from tests.support.native_models import BASE, GEMMA4, MODELS, RECURRENT, native
from tests.support.plain import plain_text
from tests.support.tiny_heads import TINY_BLOCK, TINY_MEDUSA, block_tensors, eagle_config, eagle_tensors, medusa_tensors
from tests.support.toys import toy_foreigner, toy_model, toy_target

TOY = toy_target()
LONG = toy_target(context_length=2048)
OTHER = toy_target(seed=9)
FOREIGN = VocabMap(toy_model(), toy_foreigner(seed=9))
PLENTY = 1 << 30


def eagle(version: int = 3) -> Eagle:
    config = eagle_config(version=version)
    return Eagle(config, eagle_tensors(config), TOY)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "suffix": lambda: Suffix(remember=True),
    "model": lambda: DraftModel(OTHER, 37),
    "eagle-3": eagle,
    "eagle-1": lambda: eagle(version=1),
    "medusa": lambda: Medusa(TINY_MEDUSA, medusa_tensors(), TOY),
    "block": lambda: Block(TINY_BLOCK, block_tensors(), TOY),
    "early exit": lambda: EarlyExit(ExitConfig(32, 1), {}, TOY, threshold=0.0),
    "shared tokens": lambda: SharedTokenDrafter(FOREIGN),
    "retold": lambda: TextDrafter(FOREIGN),
    "stack": lambda: DrafterStack([NGram(), eagle()]),
}

KINDS = ["none", "suffix", "eagle-3", "block", "retold", "stack"]
"""Drafters that save nothing, that save states, and that combine both."""

Wish = tuple[int, int, tuple[int, ...], float, str]
"""A request: index of an earlier text, number of its tokens to repeat, tokens that follow, temperature, drafter."""

wishes = st.tuples(
    st.integers(0, 5),
    st.integers(0, 60),
    st.lists(st.integers(0, 36), min_size=1, max_size=5).map(tuple),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([*DRAFTERS]),
)


def plain(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    return plain_text(TOY, prompt, sampling)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.lists(wishes, min_size=2, max_size=8), st.sampled_from([PLENTY, 200_000, 40_000]))
def test_texts_equal_texts_without_a_cache(sequence: list[Wish], limit: int) -> None:
    """This holds for every drafter, any earlier texts including replies and chats, and any cache size."""
    prefixes = PrefixCache(limit, chunk_invariant=True)
    engines = {name: CachedEngine(TOY, DRAFTERS[name](), None, prefixes, name) for *_, name in sequence}
    texts: list[list[int]] = [[1, 5, 9, 5, 9, 5, 2, 1, 5, 9]]
    for before, length, new, temperature, name in sequence:
        prompt = [*texts[before % len(texts)][:length], *new]
        sampling = Sampling(max_new_tokens=10, temperature=temperature, seed=4)
        text = run(TOY, prompt, sampling, engine=engines[name])[0]
        assert text == plain(prompt, sampling)
        assert prefixes.nbytes <= limit
        assert prefixes.nbytes == sum(entry.nbytes for entry in prefixes._entries)
        texts.append(prompt + text)


@some("name", [*DRAFTERS], fast=KINDS)
def test_a_chat_continues_where_it_ended(name: str) -> None:
    prefixes = PrefixCache(PLENTY, chunk_invariant=True)
    engine = CachedEngine(TOY, DRAFTERS[name](), None, prefixes, name)
    sampling = Sampling(max_new_tokens=20, temperature=0.9, seed=4, ignore_eos=True)
    text = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
    for turn in range(4):
        before = len(text)
        text += [turn, 3, 2]
        reply = run(TOY, text, sampling, engine=engine)[0]
        assert reply == plain(text, sampling)
        # Drafters do not observe the last round, and the cache has at most all tokens of a text except the last.
        assert engine.cached[-1] >= (before - 8 if turn else 0)
        text += reply
    assert len(prefixes) == 1, "a text that goes on takes the place of its beginning"
    assert prefixes.hits == sum(engine.cached)
    assert prefixes.queries == 13 + 36 + 59 + 82


@pytest.mark.parametrize("result", [True, False])
def test_a_single_reply_needs_no_check_of_the_target(result: bool) -> None:
    checks: list[bool] = []

    def check() -> bool:
        checks.append(result)
        return result

    engine = CachedEngine(LONG, None, None, PrefixCache(PLENTY, check))
    text = [i * i % 37 for i in range(2 * PREFILL_ROWS)]
    text += run(LONG, text, Sampling(max_new_tokens=8), engine=engine)[0]
    assert not checks
    for _ in range(2):
        run(LONG, [*text, 1, 2], Sampling(max_new_tokens=2), engine=engine)
    assert checks == [result]
    assert engine.cached[1] == (len(text) - 1 if result else PREFILL_ROWS)


def test_an_estimate_runs_no_check() -> None:
    """Any thread may ask for an estimate, also during a pass."""

    def check() -> bool:
        raise AssertionError

    prefixes = PrefixCache(PLENTY, check)
    text = [i * i % 37 for i in range(50)]
    run(LONG, text, Sampling(max_new_tokens=2), engine=CachedEngine(LONG, None, None, prefixes))
    assert prefixes.estimate_hit([*text, 1, 2]) > 40


def test_without_memory_for_the_check_only_whole_chunks_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(LONG)

    def check(*_: object) -> bool:
        raise OutOfMemory("no memory", "Use less")

    monkeypatch.setattr("paceline.engine.engine.chunk_invariant", check)
    engine.remember(PLENTY, lazy=True)
    text = [i * i % 37 for i in range(PREFILL_ROWS + 40)]
    texts = [run(LONG, text, Sampling(max_new_tokens=4), engine=engine)[0] for _ in range(2)]
    assert texts[0] == texts[1]
    assert engine.prefixes
    assert engine.prefixes.hits == PREFILL_ROWS


def test_a_text_that_is_too_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_target(context_length=2048))
    engine.remember(1000)
    monkeypatch.setattr(engine.cache, "save", lambda slot: pytest.fail("the text was copied"))
    run(engine.target, [*range(30)], Sampling(max_new_tokens=4), engine=engine)


def test_cached_texts_give_way_to_a_new_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(TOY)
    engine.remember(PLENTY)
    sampling = Sampling(max_new_tokens=4)
    first = run(TOY, [1, 5, 9, 5], sampling, engine=engine)[0]
    assert engine.prefixes
    assert len(engine.prefixes)
    acquire = engine.cache.acquire

    def scarce(*arguments: Any) -> int:
        if engine.prefixes and len(engine.prefixes):
            raise OutOfMemory("no memory", "Use less")
        return acquire(*arguments)

    monkeypatch.setattr(engine.cache, "acquire", scarce)
    assert run(TOY, [1, 5, 9, 5], sampling, engine=engine)[0] == first


@some("name", [*DRAFTERS], fast=KINDS)
def test_requests_that_run_together_share_their_beginning(name: str) -> None:
    engine = CachedEngine(TOY, DRAFTERS[name](), None, PrefixCache(PLENTY, chunk_invariant=True), name)
    system = [i * i % 37 for i in range(50)]
    prompts = [[*system, *end] for end in ([1, 2], [3], [1, 2, 4, 4], [9, 9, 9], [1, 2])]
    samplings = [Sampling(max_new_tokens=9 + 4 * i, temperature=0.8, seed=i) for i in range(len(prompts))]
    together = [tokens for tokens, _, _ in run_together(engine, prompts, samplings)]
    assert together == [plain(prompt, how) for prompt, how in zip(prompts, samplings, strict=True)]
    assert engine.cached == [0, 49, 51, 49, 50]


def test_a_request_that_failed_leaves_its_prompt_at_most() -> None:
    def fails(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
        return logits * torch.nan

    engine = CachedEngine(TOY, None, None, PrefixCache(PLENTY, chunk_invariant=True))
    with pytest.raises(NonFiniteLogits):
        run(TOY, [1, 2, 3, 4], Sampling(processors=[fails]), engine=engine)
    assert engine.prefixes is not None
    assert [entry.target.length for entry in engine.prefixes._entries] in ([], [3])


def saved(length: int, nbytes: int = 8) -> Saved:
    return Saved(length, (torch.zeros(nbytes, dtype=torch.uint8),))


def test_the_longest_usable_beginning_is_found_whoever_stored_it() -> None:
    prefixes = PrefixCache(PLENTY, chunk_invariant=True)
    prefixes.store([1, 2, 3, 4, 5, 6, 7, 8], 5, saved(7), {"eagle": saved(6), "suffix": None})
    prefixes.store([1, 2, 3, 9, 9], 5, saved(4))
    found = [
        (prefixes.find(tokens, needs) or saved(0)).length
        for tokens, needs in (
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], None),  # all that was computed, but for a row that brings the last state
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], "eagle"),  # and what the drafter had heard
            ([1, 2, 3, 4, 5, 6, 7, 8], None),  # one row of the prompt is fed
            ([1, 2, 3, 4, 5, 9, 9, 9, 9], None),  # and the next token has to agree
            ([1, 2, 3, 4, 5, 9, 9, 9, 9], "block"),
            ([1, 2, 3, 9, 9, 9], None),
            ([1, 2, 3, 9, 9, 9], "eagle"),
            ([7, 2, 3], None),
            ([1], None),
        )
    ]
    assert found == [7, 6, 6, 4, 0, 4, 2, 0, 0]
    assert prefixes.hits == sum(found)
    assert prefixes.queries == 9 + 9 + 8 + 9 + 9 + 6 + 6 + 3 + 1


def test_the_latest_used_text_stays() -> None:
    prefixes = PrefixCache(3 * (100 + 4 * 8), chunk_invariant=True)
    for first in range(3):
        prefixes.store([first, 5, 6, 7], 4, saved(3, 100))
    assert prefixes.find([0, 5, 6, 7, 8])
    prefixes.store([3, 5, 6, 7], 4, saved(3, 100))
    assert [bool(prefixes.find([first, 5, 6, 7, 8])) for first in range(4)] == [True, False, True, True]
    prefixes.store([4, 5, 6, 7], 4, saved(3, 10_000))
    assert (len(prefixes), prefixes.nbytes) == (3, 396), "a text larger than the cache evicts no other text"


def test_drafters_share_an_entry() -> None:
    prefixes = PrefixCache(PLENTY, chunk_invariant=True)
    prefixes.store([1, 2, 3, 4], 4, saved(3), {"eagle": saved(3)})
    prefixes.store([1, 2, 3, 4, 5, 6], 6, saved(5), {"block": saved(5)})
    assert len(prefixes) == 1
    hit = prefixes.find([1, 2, 3, 4, 5, 6, 7], "eagle")
    assert hit is not None
    assert (hit.length, hit.target.length, hit.drafters["block"].length) == (3, 5, 5)
    prefixes.store([1, 2, 3, 4, 5], 5, saved(4), {"eagle": saved(4)})
    assert len(prefixes) == 1
    hit = prefixes.find([1, 2, 3, 4, 5, 6, 7], "eagle")
    assert hit is not None
    assert (hit.length, hit.target.length) == (4, 5)
    assert prefixes.nbytes == 6 * 8 + 3 * 8


def test_only_whole_chunks_of_a_prompt_are_used_if_passes_change_bits() -> None:
    prefixes = PrefixCache(PLENTY)
    text = [i % 37 for i in range(4 * PREFILL_ROWS)]
    prefixes.store(text, 2 * PREFILL_ROWS + 1, saved(4 * PREFILL_ROWS - 1))
    found = [
        (prefixes.find(text[:length]) or saved(0)).length
        for length in (PREFILL_ROWS + 1, PREFILL_ROWS + 2, 3 * PREFILL_ROWS)
    ]
    assert found == [0, PREFILL_ROWS, 2 * PREFILL_ROWS]
    prefixes = PrefixCache(PLENTY)
    prefixes.store(text, 2 * PREFILL_ROWS, saved(4 * PREFILL_ROWS - 1))
    hit = prefixes.find(text)
    assert hit is not None
    assert hit.length == PREFILL_ROWS, "the last token of a prompt is a row of the first round"
    prefixes.store(text[1:], PREFILL_ROWS, saved(4 * PREFILL_ROWS - 2))
    assert len(prefixes) == 1, "what nobody could use takes no room"


def test_whole_chunks_give_the_same_bits_as_no_cache() -> None:
    """Compare the logits of the first round after a hit with torch's own kernels, where rows depend on the pass."""
    target = tiny_target(context_length=2048, dtype=torch.bfloat16)
    engine = CachedEngine(target, None, None, PrefixCache(PLENTY))
    prompt = [i * i % 37 for i in range(3 * PREFILL_ROWS)]
    run(target, [*prompt[: 2 * PREFILL_ROWS + 9], 1, 2, 3], Sampling(max_new_tokens=30), engine=engine)
    fresh = CachedEngine(target, None, None, PrefixCache(0))
    ours, theirs = (begun(e, prompt, Sampling()) for e in (engine, fresh))
    assert engine.cached == [0, 2 * PREFILL_ROWS]
    assert all(map(torch.equal, engine.cache.save(ours.slot).tensors, fresh.cache.save(theirs.slot).tensors))


class Windowed(Decoder):
    """A model in which one layer sees five positions, and the other all positions."""

    def new_cache(self) -> SlabCache:
        layers = [LayerAttention(8**-0.5, window=5), LayerAttention(8**-0.5)]
        return SlabCache(layers, 2, 8, 4096, self.dtype, self.device)


def test_a_ring_that_has_moved_on_serves_its_end_and_an_older_text_its_beginning() -> None:
    target = Windowed(replace(TINY, context_length=4096), random_tensors(TINY), torch.float64, torch.device("cpu"))
    engine = CachedEngine(target, None, None, PrefixCache(PLENTY, chunk_invariant=True))
    text = [(i * i + i // 7) % 36 for i in range(1600)]
    sampling = Sampling(max_new_tokens=6, ignore_eos=True)
    for length, cached in ((300, 0), (1500, 299), (200, 199), (1400, 1399), (700, 699), (450, 299)):
        prompt = [*text[:length], 36]
        ours = run(target, prompt, sampling, engine=engine)[0]
        assert engine.cached[-1] == cached, length
        assert ours == run(target, prompt, sampling)[0]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_turned_for_another_length_are_not_used(kind: str) -> None:
    rope = RopeConfig(
        kind=kind,
        scaling=(("factor", 4.0), ("original_max_position_embeddings", 30.0)),
        factors=(1.0, 1.1, 1.2, 1.3) if kind == "longrope" else (),
        long_factors=(2.0, 3.0, 4.0, 5.0) if kind == "longrope" else (),
    )
    config = replace(TINY, rope=rope)
    target = Decoder(config, random_tensors(config), torch.float64, torch.device("cpu"))
    engine = CachedEngine(target, None, None, PrefixCache(PLENTY, chunk_invariant=True))
    text = [(i * i + i // 7) % 37 for i in range(60)]
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    for length in (20, 25, 40, 40, 45, 28):
        assert run(target, text[:length], sampling, engine=engine)[0] == run(target, text[:length], sampling)[0]
    # A short prompt after a short prompt; a long one after one of the same length, or of any length with equal factors.
    assert engine.cached == [0, 19, 0, 38, 0 if kind == "dynamic" else 39, 24]


def test_one_token_too_many_is_another_text() -> None:
    prefixes = PrefixCache(PLENTY, chunk_invariant=True)
    engine = CachedEngine(TOY, None, None, prefixes)
    engine.finish(begun(engine, [1, 2, 3, 4, 5, 6], Sampling()))
    hit = prefixes.find([1, 2, 3, 7, 8, 9])
    assert hit is not None
    assert hit.length == 2
    sampling = Sampling(max_new_tokens=30, ignore_eos=True)
    prompt, texts = [1, 2, 3, 7, 8, 9], []
    for length in (2, 3, 4):
        fresh = CachedEngine(TOY, None, None, PrefixCache(0))
        stream = TextStream(sampling, (), lambda ids: "", 200)
        request = fresh.start(prompt, sampling.sampler(), stream, Stats(7, "rounding"))
        assert fresh.cache.load(request.slot, hit.target, length) == length
        fresh.prefill(request)
        while not request.finish:
            fresh.step([request])
        texts.append(request.token_ids[len(prompt) :])
    assert [text == plain(prompt, sampling) for text in texts] == [True, True, False]


def test_a_lookup_among_many_long_texts_takes_no_walk_over_their_tokens() -> None:
    prefixes = PrefixCache(PLENTY, chunk_invariant=True)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 37, 3000).tolist()
    for _ in range(300):
        prefixes.store([*shared, *rng.integers(0, 37, 1000).tolist()], 3000, saved(3999))
    hit = prefixes.find([*shared, 50, 50])
    assert hit is not None
    assert hit.length == 2999


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["llama", "qwen3: head norms", "gemma3", GEMMA4, *RECURRENT, "heads of 80"])
def test_native_kernels_leave_the_same_in_any_pass(name: str) -> None:
    assert chunk_invariant(native(replace(BASE, **MODELS[name])), "bits")


def test_a_single_changed_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bit is past the end of a block, in prompts or in rounds, in the last layer."""
    if library() is None:
        pytest.skip("there is no C++ compiler")
    target = native(BASE)
    honest = target.forward

    for prefill, rows_from in ((True, 0), (False, 0), (True, 512), (False, 512)):

        def forward(
            rows: Rows, cache: KVCache, want: Want, prefill: bool = prefill, rows_from: int = rows_from
        ) -> Forward:
            out = honest(rows, cache, want)
            if rows.prefill == prefill and rows.lengths[0] >= rows_from and rows.tokens.shape[1] < 62:
                slabs, place = cache._home(rows.slots[0])  # type: ignore[attr-defined]
                with torch.inference_mode():
                    slabs[0].tensors[0][-1, place, 0, rows.lengths[0], 3] *= 1.01
            return out

        monkeypatch.setattr(target, "forward", forward)
        assert not chunk_invariant(target, "bits")
    monkeypatch.setattr(target, "forward", honest)
    assert chunk_invariant(target, "bits")
    assert not chunk_invariant(target, "rounding")


def test_rows_of_torchs_products_depend_on_their_pass_and_the_check_says_so() -> None:
    target = tiny_target(context_length=2048)
    assert not chunk_invariant(target, "bits")
    assert not chunk_invariant(target, guarantee(target))


@pytest.fixture(scope="module")
def real() -> Iterator[Loaded]:
    with packaged_model("demo") as model:
        yield model


@pytest.mark.slow
@pytest.mark.model
def test_the_real_models_logits_are_the_same_after_a_hit(real: Loaded) -> None:
    """The second turn of a chat begins anywhere in a chunk, after rows from decoding, across the end of a block."""
    target = real.target
    free = chunk_invariant(target, guarantee(target))
    text = real.tokenizer.encode("The lighthouse keeper wrote down the wind, the swell and every passing sail. " * 40)
    engine = CachedEngine(target, None, None, PrefixCache(PLENTY, free))
    first = [*text[:470], 9, 9]
    reply = run(
        target, first, Sampling(max_new_tokens=60, ignore_eos=True), Suffix(), DraftBudget(12, 6, 2), engine=engine
    )[0]
    assert len(reply) == 60
    prompt = [*first, *reply, *text[100:190]]
    fresh = CachedEngine(target, None, None, PrefixCache(0))
    asked = [(e, begun(e, prompt, Sampling())) for e in (engine, fresh)]
    assert engine.cached[-1] >= (len(first) + 55 if free else PREFILL_ROWS)
    states = []
    for e, request in asked:
        draft = Draft.chain(text[:6])
        rows = pack([prompt[-1]], [draft], [request.slot], [len(prompt) - 1], target.device)
        states.append((target.forward(rows, e.cache, Want()).logits, e.cache.save(request.slot).tensors))
    assert torch.equal(states[0][0], states[1][0])
    assert all(map(torch.equal, states[0][1], states[1][1]))
