"""Runs of layers in C++: equal to torch up to rounding, and to plain decoding bit for bit in any batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.engine.self_check import guarantee
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import NativeLinear
from paceline.kernels.quantize import Mode
from paceline.models import stack as stacks
from paceline.models.block import BlockNetwork
from paceline.models.config import LayerConfig, NormConfig
from paceline.models.decoder import Decoder, make_layer
from paceline.models.heads import BlockConfig
from paceline.models.layers import Mixture
from paceline.models.stack import LayerStack
from paceline.models.weights import Weights
from paceline.protocols import KVCache
from paceline.types import Carried, Draft, Rows, Tap, Want
from paceline.verify.tree import pack, pack_prefix, with_siblings
from tests.support.native_models import (
    BASE,
    CPU,
    DELTA_NET,
    FULL,
    GEMMA4,
    GEMMA4_MOE,
    GLM,
    GPT_OSS,
    LFM2,
    MAMBA,
    MODELS,
    QWEN_MOE,
    RECURRENT,
    WIDE_SHARED,
    by_torch,
    native,
    plan,
    tensors_of,
    text,
    whole,
)
from tests.support.tiny_heads import block_tensors

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]


def filled(target: Decoder, prefix: Sequence[int], chunk: int = 256) -> tuple[KVCache, int]:
    cache = target.new_cache()
    slot = cache.acquire()
    for start in range(0, len(prefix), chunk):
        part = prefix[start : start + chunk]
        rows = pack_prefix(part, slot, start, CPU)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(part))])
    return cache, slot


def rows_of(cache: KVCache, slot: int, last: int, draft: Draft, start: int = 0) -> Rows:
    return pack([last], [draft], [slot], [cache.lengths[slot]], CPU, [start] if start else None)


def plain(target: Decoder, prefix: Sequence[int], path: Sequence[int], taps: tuple[Tap, ...] = ()) -> list[Any]:
    """Return the outputs of a forward pass for each token of `path`, one by one."""
    cache, slot = filled(target, prefix)
    out = []
    for token in path:
        rows = rows_of(cache, slot, token, Draft())
        out.append(target.forward(rows, cache, Want(taps=taps)))
        cache.commit(rows, [()])
    return out


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_taps_are_torchs_up_to_rounding(name: str) -> None:
    c = replace(BASE, **MODELS[name])
    taps: tuple[Tap, ...] = (*range(c.layers + 1), "final")
    right, streams = whole(by_torch(c, torch.float32), text(40), taps)
    ours, ours_taps = whole(native(c), text(40), taps)
    theirs, _ = whole(by_torch(c, torch.bfloat16), text(40))
    assert relative(ours, right) < max(0.01, 1.2 * relative(theirs, right))
    for tap in taps:
        assert relative(ours_taps[tap], streams[tap]) < 0.03, tap


@pytest.mark.parametrize("mode", ["int4", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "a mixture",
        "no size in whole lanes",
        "gemma3",
        GEMMA4,
        GEMMA4_MOE,
        *RECURRENT,
        QWEN_MOE,
        "qwen2: biases",
        GPT_OSS,
        GLM,
    ],
)
def test_codes_give_torchs_logits_up_to_rounding(name: str, mode: Mode) -> None:
    c = replace(BASE, **MODELS[name])
    target = native(c, mode)
    ours, right = whole(target, text(40))[0], whole(by_torch(c, torch.float32, mode), text(40))[0]
    assert relative(ours, right) < 0.04
    assert guarantee(target) == "bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gemma2", GEMMA4_MOE, "a mixture", GPT_OSS, GLM, WIDE_SHARED, "granite: factors"])
def test_after_a_mixer_of_torch_the_feed_forward_block_is_one_call(name: str, dtype: torch.dtype) -> None:
    c = replace(BASE, **MODELS[name])
    c = replace(c, norms=replace(c.norms, qk_norm_after_rope=True))  # which only torch computes
    target = Decoder(c, tensors_of(c), dtype, CPU)
    assert not target.runs_natively
    assert all(layer.native_mlp for layer in target._stack._parts[0].layers)
    right = whole(by_torch(c, torch.float32), text(40))[0]
    assert relative(whole(target, text(40))[0], right) < (1e-5 if dtype == torch.float32 else 0.02)
    assert guarantee(target) == "bits"


FLOATS = {torch.float16: 2e-3, torch.float32: 1e-5}
"""Other float types, with their tolerance relative to exact results."""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        GEMMA4,
        GEMMA4_MOE,
        *RECURRENT,
        QWEN_MOE,
        "a mixture",
        "no size in whole lanes",
        "heads of 128",
        GPT_OSS,
        GLM,
    ],
)
def test_each_float_type_has_its_own_precision(name: str, dtype: torch.dtype) -> None:
    c = replace(BASE, **MODELS[name])
    taps: tuple[Tap, ...] = (*range(c.layers + 1), "final")
    exact, streams = whole(by_torch(c, torch.float64), text(40), taps)
    ours, ours_taps = whole(native(c, dtype=dtype), text(40), taps)
    for tap in taps:
        assert ours_taps[tap].isfinite().all()
        assert relative(ours_taps[tap], streams[tap]) < FLOATS[dtype], tap
    assert relative(ours, exact) < FLOATS[dtype]


TYPES = [(name, torch.bfloat16, None) for name in MODELS] + [
    *(
        (name, dtype, None)
        for name in (
            "gemma2",
            GEMMA4,
            GEMMA4_MOE,
            *RECURRENT,
            "a mixture",
            "no size in whole lanes",
            GPT_OSS,
            GLM,
        )
        for dtype in FLOATS
    ),
    *(
        (name, torch.bfloat16, torch.int8)
        for name in ("gemma2", GEMMA4, "no size in whole lanes", "heads of 128", GPT_OSS)
    ),
    ("gemma2", torch.float32, torch.int8),
    ("gemma2", torch.float32, torch.bfloat16),
    ("llama", torch.bfloat16, torch.float16),
]
"""Models, their dtype, and the dtype of keys and values if it is different."""


@pytest.mark.parametrize(("name", "dtype", "stored"), TYPES)
def test_however_rows_travel_they_have_the_bits_of_plain_decoding(
    name: str, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    target = native(replace(BASE, **MODELS[name]), dtype=dtype, kv_dtype=stored)
    assert guarantee(target) == "bits"
    for before in (20, 21):
        prefix, path, other = text(before), text(12, 5), text(70, 6)
        alone = torch.cat([out.logits[:, 0] for out in plain(target, prefix, path)])
        # One long chain, with any chunks of its prefix.
        for chunk in (256, 7, 1):
            cache, slot = filled(target, prefix, chunk)
            out = target.forward(rows_of(cache, slot, path[0], Draft.chain(path[1:] + other)), cache, Want())
            assert torch.equal(out.logits[0, :12], alone), chunk
        # A tree, in one pass, in three passes, and together with other slots.
        tree, lines = with_siblings(path[1:], 66)
        out = target.forward(rows_of(cache, slot, path[0], tree), cache, Want())
        assert torch.equal(out.logits[0, [0, *lines]], alone)
        # Use a cache without the tree. Otherwise, a column that no pass writes would already have the right values.
        assert torch.equal(grown(target, *filled(target, prefix), path[0], tree, (5, 12))[[0, *lines]], alone)
        third = cache.acquire()
        rows = pack_prefix(other, third, 0, CPU)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, 70)])
        lengths = [cache.lengths[third], cache.lengths[slot]]
        both = pack([1, path[0]], [Draft.chain(other[:30]), tree], [third, slot], lengths, CPU)
        assert torch.equal(target.forward(both, cache, Want()).logits[1, [0, *lines]], alone)


def grown(target: Decoder, cache: KVCache, slot: int, last: int, tree: Draft, cuts: tuple[int, ...]) -> Tensor:
    """Return the logits of all rows of a tree that is fed in several passes."""
    logits = []
    for start, end in zip((0, *cuts), (*cuts, 1 + len(tree.tokens)), strict=True):
        part = Draft(tree.tokens[: end - 1], tree.parents[: end - 1])
        out = target.forward(rows_of(cache, slot, last, part, start), cache, Want())
        logits.append(out.logits[0, : end - start])
    return torch.cat(logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", *RECURRENT, "heads of 80"])
def test_every_row_of_any_tree_is_its_path_fed_plainly(name: str) -> None:
    target, rng = native(replace(BASE, **MODELS[name])), random.Random(1)
    for before in (33, 34):
        prefix = text(before)
        draft = Draft(tuple(text(14, before)), tuple(rng.randint(max(0, node - 3), node) for node in range(14)))
        cache, slot = filled(target, prefix)
        out = target.forward(rows_of(cache, slot, 5, draft), cache, Want()).logits[0]
        for row in range(15):
            path = [row]
            while path[0]:
                path.insert(0, draft.parents[path[0] - 1])
            tokens = [5, *(draft.tokens[node - 1] for node in path[1:])]
            assert torch.equal(out[row], plain(target, prefix, tokens)[-1].logits[0, 0]), row


LONG = [
    ("llama", torch.bfloat16, None),
    ("gemma2", torch.bfloat16, None),
    (GEMMA4, torch.bfloat16, None),
    (DELTA_NET, torch.bfloat16, None),
    (LFM2, torch.bfloat16, None),
    (MAMBA, torch.bfloat16, None),
    (GPT_OSS, torch.float16, None),
    ("heads of 80", torch.float32, None),
    ("gemma2", torch.bfloat16, torch.int8),
    ("heads of 80", torch.float32, torch.int8),
]


@pytest.mark.parametrize(("name", "dtype", "stored"), LONG)
def test_threads_and_rows_share_a_long_text_without_changing_bits(
    name: str, dtype: torch.dtype, stored: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have 512 columns. The rows are in the third block, or cross the end of the second."""
    c = replace(BASE, **MODELS[name])
    target, tokens = native(c, dtype=dtype, kv_dtype=stored), text(1300)
    for before in (1250, 1013):
        prefix, path = tokens[:before], tokens[before : before + 4]
        alone = torch.cat([out.logits[:, 0] for out in plain(target, prefix, path)])
        right = torch.cat([out.logits[:, 0] for out in plain(by_torch(c, torch.float32), prefix, path)])
        assert relative(alone, right) < (0.05 if stored else 0.02)
        tree, lines = with_siblings(path[1:3], 66)
        for threads in (1, 3, 8):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            cache, slot = filled(target, prefix, 300)
            for draft, rows in (
                (Draft(), [0]),
                (tree, [0, *lines]),
                (Draft.chain([*path[1:], *tokens[:9]]), [0, 1, 2, 3]),
            ):
                out = target.forward(rows_of(cache, slot, path[0], draft), cache, Want()).logits[0]
                assert torch.equal(out[rows], alone[: len(rows)]), (before, threads, rows)


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
def test_windows_whose_rings_have_wrapped(stored: torch.dtype | None) -> None:
    c = replace(BASE, **plan(20, None), heads=2, kv_heads=1)
    tokens, target = text(1100), native(c, kv_dtype=stored)
    for goal in (1020, 1060):
        prefix, path = tokens[:goal], tokens[goal : goal + 8]
        alone = torch.cat([out.logits[:, 0] for out in plain(target, prefix, path)])
        cache, slot = filled(target, prefix)
        tree, lines = with_siblings(path[1:3], 66)
        assert torch.equal(
            target.forward(rows_of(cache, slot, path[0], tree), cache, Want()).logits[0, [0, *lines]], alone[:3]
        )
        right = torch.cat([out.logits[:, 0] for out in plain(by_torch(c, torch.float32), prefix, path)])
        assert relative(alone, right) < (0.05 if stored else 0.02)


def test_a_window_longer_than_any_text_hides_nothing() -> None:
    results = []
    for window in (100_000, 2**31 - 1, 2**31, 2**32 + 3):
        target = native(replace(BASE, **plan(window, None)))
        results.append(torch.cat([out.logits[0, :1] for out in plain(target, text(30), text(4, 5))]))
    for logits in results[1:]:
        assert torch.equal(logits, results[0])


@pytest.mark.parametrize("name", ["llama", GEMMA4, *RECURRENT])
def test_taps_and_layers_may_be_cut_anywhere(name: str) -> None:
    """Check early exit, and a pass that continues where drafting has stopped."""
    target = native(replace(BASE, **{"layers": 4, **MODELS[name]}))
    prefix, path = text(20), text(6, 5)
    out = plain(target, prefix, path, (0, 1, 2, 3, "final"))
    alone = torch.cat([x.logits[:, 0] for x in out])
    cache, slot = filled(target, prefix)
    rows = rows_of(cache, slot, path[0], Draft.chain(path[1:]))
    early = target.forward(rows, cache, Want("none", (1, 2), 2))
    for tap in (1, 2):
        assert torch.equal(early.taps[tap][0], torch.cat([x.taps[tap][:, 0] for x in out]))
    for held in (3, 6):
        draft = replace(Draft.chain(path[1:]), carried=Carried(2, early.taps[2][0, :held]))
        assert torch.equal(target.forward(rows_of(cache, slot, path[0], draft), cache, Want()).logits[0], alone)


@pytest.mark.parametrize("name", ["llama", "gemma2", *RECURRENT])
@pytest.mark.parametrize(("mode", "stored"), [(None, None), ("int8", None), (None, torch.int8)])
def test_a_drafted_row_that_is_not_finite_harms_no_other(
    name: str, mode: Mode | None, stored: torch.dtype | None
) -> None:
    target = native(replace(BASE, **MODELS[name] | {"tied": False}), mode, kv_dtype=stored)
    prefix, path = ([token % 66 for token in text(n, n)] for n in (20, 5))
    alone = torch.cat([out.logits[:, 0] for out in plain(target, prefix, path)])
    target._embed[66] = torch.nan
    tree, lines = with_siblings(path[1:], 66)
    cache, slot = filled(target, prefix)
    out = target.forward(rows_of(cache, slot, path[0], tree), cache, Want()).logits[0]
    assert torch.equal(out[[0, *lines]], alone)
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_torchs_default_dtype_changes_nothing(default: torch.dtype) -> None:
    """Memory that the kernels fill must not have the default dtype."""
    target = native(replace(BASE, **MODELS[DELTA_NET]))
    right, _ = whole(target, text(20))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        ours, _ = whole(target, text(20))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(ours, right)


def test_a_routers_scores_are_not_rounded_before_they_are_compared() -> None:
    """In bfloat16 these two scores are equal."""
    router = NativeLinear(torch.tensor([[1.0, 0.0], [1.0, 1.0]]).bfloat16(), None)
    _, chosen = Mixture(router, [], 1, True)._route(torch.tensor([[1.0, 2**-10]]).bfloat16())
    assert chosen.tolist() == [[1]]


def test_experts_of_equal_scores_are_chosen_by_number() -> None:
    c = replace(BASE, **MODELS["twenty experts, ragged"])
    tensors = tensors_of(c)
    for i in range(c.layers):
        tensors[f"model.layers.{i}.mlp.gate.weight"][2:] = 0
    target, right = (Decoder(c, tensors, dtype, CPU) for dtype in (torch.bfloat16, torch.float32))
    assert relative(whole(target, text(40))[0], whole(right, text(40))[0]) < 0.02


@pytest.mark.parametrize("windows", [(None, None), (7, None), (4, 4)])
@pytest.mark.parametrize("causal", [(), (True, False)])
def test_a_drafted_block_sees_itself_both_ways(windows: tuple[int | None, ...], causal: tuple[bool, ...]) -> None:
    layer = replace(
        BASE, norms=NormConfig(heads="shared"), layers=2, special=tuple(LayerConfig(FULL, window) for window in windows)
    )
    config = BlockConfig(layer, (0, 1), 6, 66, causal=causal)
    host = native(replace(BASE, norms=NormConfig(heads="shared")))
    tensors = {name: tensor.bfloat16() for name, tensor in block_tensors(config).items()}
    features, block = (torch.randn(2, n, 64 * k).bfloat16() for n, k in ((11, 2), (6, 1)))
    states = []
    for runs in (None, False):
        with pytest.MonkeyPatch.context() as patch:
            if runs is not None:
                patch.setattr(stacks, "runs_natively", lambda *_: False)
            network = BlockNetwork(config, tensors, host)
        assert bool(network._stack.native) == (runs is None)
        cache = network.new_cache()
        slots = [cache.acquire(), cache.acquire()]
        network.read(cache, slots, features, [11, 9])
        states.append(network.draft(cache, slots, [11, 9], block).float())
    assert relative(*states) < 0.03


def test_the_first_layer_may_be_made_from_rows_of_another_width() -> None:
    """This is EAGLE's layer, which normalises its wider input itself."""
    c = replace(BASE, tied=False)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(c).items() if "layers" in name}
    for x in "qkv":
        name = f"model.layers.0.self_attn.{x}_proj.weight"
        tensors[name] = torch.cat([tensors[name], tensors[name].flip(1)], 1)
    weights = Weights(tensors, torch.bfloat16, CPU)
    body = [make_layer(c, c.plan[i], weights, f"model.layers.{i}.", (128, None)[i]) for i in range(2)]
    ours, by_torch = (LayerStack(c, body, native(BASE)) for _ in range(2))
    assert ours.native
    by_torch._parts[0].native = None
    x, entry = torch.randn(1, 9, 64).bfloat16(), torch.randn(1, 9, 128).bfloat16()
    out = []
    for one in (ours, by_torch):
        cache = one.new_cache()
        rows = pack([1], [Draft.chain(range(8))], [cache.acquire()], [0], CPU)  # type: ignore[arg-type]
        ropes = one.ropes(rows.positions, rows.end, [0])
        with torch.inference_mode():
            out.append(one.run(x, 0, 2, ropes, cache.begin(rows), entry)[0].float())
    assert relative(*out) < 0.02
