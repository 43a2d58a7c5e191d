"""Keys and values with a different dtype than the model: stored values, and the values that every cache reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from paceline.cache.kv_types import from_stored, stored_size, to_stored
from paceline.cache.shared import SharedSlabCache
from paceline.cache.slab import SlabCache
from paceline.drafters.ngram import NGram
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.self_check import chunk_invariant, guarantee
from paceline.kernels.cpu.build import library
from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, Oracle, random_tensors, run, run_together
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import pack, pack_prefix
from tests.support.cache_witness import CPU, Witness, random_tree, some_path
from tests.support.cached_engine import CachedEngine
from tests.support.golden import decoder
from tests.support.hybrids import tiny_hybrid
from tests.support.native_models import BASE, GPT_OSS, MODELS, by_torch, native, text, whole

needs_kernels = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def in_bytes(x: Tensor) -> Tensor:
    """Return `x` rounded to 8 bits, in its stored form."""
    return to_stored(x, torch.empty(0, stored_size(x.shape[-1], torch.int8), dtype=torch.int8))


def test_each_block_of_32_is_rounded_to_the_nearest_of_255_levels() -> None:
    """The row has blocks from 1e-30 to 1e30, and its last block has 16 elements."""
    x = torch.randn(50, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-30, 30, 150, dtype=torch.float64).view(50, 3).repeat_interleave(32, 1)[:, :80]
    back = from_stored(in_bytes(x), torch.float64)
    for block in (slice(32), slice(32, 64), slice(64, 80)):
        step = x[:, block].abs().amax(-1, keepdim=True) / 127
        assert ((back - x)[:, block].abs() <= step * 0.5001).all()
        assert (back[:, block].abs().amax(-1, keepdim=True) / step - 127).abs().max() < 1e-4


def test_halves_are_rounded_to_even_and_zeros_stay_zeros() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0]])
    assert in_bytes(x)[:, 4:].tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert from_stored(in_bytes(x), torch.float32).tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_non_finite_value_stays_non_finite(bad: float) -> None:
    x = torch.ones(3, 16)
    x[1, 5] = bad
    back = from_stored(in_bytes(x), torch.float32)
    assert not back[1].isfinite().any()
    assert torch.equal(back[[0, 2]], x[[0, 2]])


@needs_kernels
def test_the_kernels_round_like_torch() -> None:
    """Compare keys and values of the first layer, because its input does not depend on the cache."""
    sizes = replace(BASE, **MODELS["no size in whole lanes"])
    slabs = []
    for stored in (torch.float32, torch.int8):
        target = native(sizes, kv_dtype=stored)
        cache = target.new_cache()
        slot = cache.acquire()
        target.forward(pack_prefix(text(40), slot, 0, CPU), cache, Want("none"))
        slabs.append([x[0, 0, :, :40] for x in cache.slabs[0].tensors])
    for floats, codes in zip(*slabs, strict=True):
        assert torch.equal(to_stored(floats, codes), codes)


@pytest.mark.parametrize(
    ("kind", "stored", "kernel"),
    [
        (SlabCache, torch.int8, False),
        (SharedSlabCache, torch.float16, False),
        pytest.param(SharedSlabCache, torch.int8, False, marks=pytest.mark.slow),
        pytest.param(SlabCache, torch.int8, True, marks=needs_kernels),
        pytest.param(SharedSlabCache, torch.float16, True, marks=[needs_kernels, pytest.mark.slow]),
    ],
)
def test_rows_see_the_stored_values_at_any_text_length(
    kind: type[SlabCache], stored: torch.dtype, kernel: bool
) -> None:
    """Run prefill, trees and commits, up to and past the end of a ring buffer of 1024 columns."""
    rng, dtype = random.Random(1), torch.float32 if kernel else torch.float64
    witness = Witness(1, dtype, kind, stored, kernel)
    slot = witness.acquire()
    length = 0
    for goal in (15, 520, 1020, 1040):
        while length < goal:
            count = min(256, goal - length)
            witness.feed(pack_prefix([0] * count, slot, length, CPU), [list(range(1, count))])
            length += count
        fits = witness.cache.fit(slot, DraftBudget(9, 9, 3))
        draft = random_tree(rng, fits.nodes)
        path = some_path(rng, draft)
        witness.feed(pack([0], [draft], [slot], [length], CPU), [path])
        length += 1 + len(path)
    twin = witness.cache.fork(slot)
    witness.history[twin] = witness.history[slot]
    witness.cache.release(slot)
    witness.feed(pack([0], [Draft()], [twin], [length], CPU), [[]])


@needs_kernels
@pytest.mark.parametrize(("name", "kind"), [("llama", SharedSlabCache), ("gemma2", SlabCache), (GPT_OSS, SlabCache)])
def test_text_with_int8_does_not_depend_on_drafts_batches_or_cached_prefixes(name: str, kind: type[SlabCache]) -> None:
    """The models have full attention, windows with softcaps, and windows with sinks."""
    target = native(replace(BASE, **MODELS[name]), kv_dtype=torch.int8)
    target._cache_type = kind
    assert guarantee(target) == "bits"
    assert chunk_invariant(target, "bits")
    prompts = [text(300), [*text(290), *text(9, 5)], text(40, 6)]
    how = Sampling(max_new_tokens=40, ignore_eos=True)
    alone = [run(target, prompt, how)[0] for prompt in prompts]
    for budget in (DraftBudget.chain(7), DraftBudget(14, 4, 3)):
        drafters = [Oracle([*prompt, *reply], 0.6, 67) for prompt, reply in zip(prompts, alone, strict=True)]
        for prompt, reply, drafter in zip(prompts, alone, drafters, strict=True):
            assert run(target, prompt, how, drafter, budget)[0] == reply
    together = run_together(Engine(target, NGram(), DraftBudget.chain(4)), prompts, [how] * 3)
    assert [reply for reply, _, _ in together] == alone
    engine = CachedEngine(target, NGram(), DraftBudget.chain(4), PrefixCache(2**24, chunk_invariant=True))
    assert [run(target, prompt, how, engine=engine)[0] for prompt in prompts] == alone
    assert engine.cached[1] > 256


@pytest.mark.parametrize("make", [tiny_hybrid, partial(decoder, "deepseek v3")], ids=["recurrent", "latent"])
def test_models_that_torch_runs_store_int8_too(make: Callable[[], Decoder]) -> None:
    """The models have attention with recurrent states, and latent vectors that are both keys and values."""
    target, prompt, how = copy(make()), [1, 5, 9, 5], Sampling(max_new_tokens=20, ignore_eos=True)
    target.kv_dtype = torch.int8
    assert {x.dtype for slab in filled(target).slabs for x in slab.tensors} == {torch.int8}
    reply = run(target, prompt, how)[0]
    drafter = Oracle([*prompt, *reply], 0.7, target.vocab_size)
    assert run(target, prompt, how, drafter, DraftBudget(8, 3, 2))[0] == reply


def test_counted_memory_equals_allocated_memory() -> None:
    for stored, size in ((torch.int8, 8 + 4), (torch.float32, 4 * 8), (None, 8 * 8)):
        target = Decoder(TINY, random_tensors(TINY), torch.float64, CPU, kv_dtype=stored)
        cache = filled(target)
        each = 2 * TINY.layers * TINY.kv_heads * size
        assert cache.capacity == 256
        assert cache.nbytes == target.cache_bytes(256) == 256 * each
        assert target.position_bytes() == {CPU: each}
        assert cache.save(0).nbytes == target.cache_bytes(cache.lengths[0])


def filled(target: Decoder) -> SlabCache:
    cache = target.new_cache()
    rows = pack_prefix([1, 2, 3, 4, 5], cache.acquire(), 0, CPU)
    target.forward(rows, cache, Want("none"))
    cache.commit(rows, [range(1, 5)])
    return cache


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gemma2", "heads of 128"])
def test_int8_is_near_the_exact_logits(name: str) -> None:
    """Rounding to 8 bits moves the logits by less than 3 %, relative to their norm."""
    sizes = replace(BASE, **MODELS[name])
    exact = whole(by_torch(sizes, torch.float64), text(300))[0]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ours = whole(native(sizes, dtype=dtype, kv_dtype=torch.int8), text(300))[0]
        assert (ours - exact).norm() < 0.03 * exact.norm(), dtype
    assert not torch.equal(ours, whole(native(sizes, dtype=torch.float32), text(300))[0])
