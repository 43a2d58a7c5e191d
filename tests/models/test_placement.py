"""Layers on several devices. "cpu" and "cpu:0" are two devices to the plan and one to torch, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.checkpoints.loader import load_model
from paceline.cli.cache_room import cache_positions
from paceline.drafters.model import DraftModel
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.errors import InvalidOption, OutOfMemory
from paceline.kernels.cpu.build import library
from paceline.kernels.low_rank import Factors
from paceline.models import placement
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.models.placement import free_memory, parse_map, place, plan, sizes
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors, run, run_together
from paceline.types import DraftBudget, Want
from paceline.verify.tree import pack_prefix
from tests.support.random_adapters import adapters

CPU = torch.device("cpu")
FOUR = replace(TINY, layers=4, context_length=1200)
TEXT = [*range(30)] * 2


def decoder(
    dtype: torch.dtype, names: Sequence[str] = (), config: Any = FOUR, mode: Any = None, held: Sequence[Factors] = ()
) -> Decoder:
    tensors = random_tensors(config)
    weights = Quantised(tensors, mode) if mode else tensors
    return Decoder(config, weights, dtype, CPU, adapters=held, devices=tuple(map(torch.device, names)))


def parts(target: Decoder) -> list[tuple[int, int, bool]]:
    return [(part.first, part.end, part.native is not None) for part in target._stack._parts]


@pytest.mark.parametrize("mode", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_placed_layers_compute_the_same(dtype: torch.dtype, mode: str | None) -> None:
    if mode and dtype == torch.float64:
        pytest.skip("codes do not run in float64")
    whole, placed = decoder(dtype, mode=mode), decoder(dtype, ("cpu", "cpu:0", "cpu:0", "cpu"), mode=mode)
    native = dtype != torch.float64 and library() is not None
    assert parts(placed) == [(0, 1, native), (1, 3, native), (3, 4, native)]
    want = Want(taps=(0, 1, 2, 3, 4, "final"))
    outs = []
    for target in (whole, placed):
        cache = target.new_cache()
        outs.append(target.forward(pack_prefix(TEXT, cache.acquire(), 0, CPU), cache, want))
    assert torch.equal(outs[0].logits, outs[1].logits)
    for tap in want.taps:
        assert torch.equal(outs[0].taps[tap], outs[1].taps[tap]), tap
    early = [
        target.forward(pack_prefix(TEXT, 0, 0, CPU), cache_of(target), Want(layers=2)) for target in (whole, placed)
    ]
    assert torch.equal(early[0].logits, early[1].logits)


@pytest.mark.parametrize("mode", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_placed_layers_have_their_adapters(dtype: torch.dtype, mode: str | None) -> None:
    if mode and dtype == torch.float64:
        pytest.skip("codes do not run in float64")
    held = adapters(random_tensors(FOUR))
    whole, placed = (decoder(dtype, names, mode=mode, held=held) for names in ((), ("cpu", "cpu:0", "cpu:0", "cpu")))
    rows, found = pack_prefix(TEXT, 0, 0, CPU), []
    for number in range(len(held) + 1):
        outs = [target.forward(rows, cache_of(target, number), Want()).logits for target in (whole, placed)]
        assert torch.equal(*outs)
        found.append(outs[0])
    assert all(not torch.equal(found[0], other) for other in found[1:])
    prompts, how = [TEXT[:20], TEXT[:20], TEXT[:9]], [Sampling(max_new_tokens=20)] * 3
    texts = [
        [reply for reply, _, _ in run_together(Engine(target), prompts, how, adapters=[0, 1, 2])]
        for target in (whole, placed)
    ]
    assert texts[0] == texts[1]


def cache_of(target: Decoder, adapter: int = 0) -> Any:
    cache = target.new_cache()
    cache.acquire(0, adapter)
    return cache


def test_trees_and_a_drafter_on_another_device_do_not_change_texts() -> None:
    whole, placed = decoder(torch.float32), decoder(torch.float32, ("cpu", "cpu:0", "cpu:0", "cpu"))
    if library() is not None:
        assert guarantee(placed) == "bits"
    assert placed.excerpt() is placed  # the self-check must see all devices
    drafter = decoder(torch.float32, ("cpu:0", "cpu:0", "cpu:0", "cpu"))
    for temperature in (0.0, 0.8):
        how = Sampling(max_new_tokens=30, temperature=temperature, seed=1)
        plain = run(whole, TEXT, how)[0]
        for draft in (DraftBudget.chain(4), DraftBudget(nodes=8, depth=4, branch=2)):
            text, _, stats = run(placed, TEXT, how, DraftModel(drafter, FOUR.vocab_size), draft)
            assert text == plain
            assert stats.accepted > 0


def test_the_servers_cache_fits_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = decoder(torch.float32, ("cpu", "cpu:0", "cpu:0", "cpu:0"))
    llm: Any = SimpleNamespace(model=SimpleNamespace(target=placed))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**9))
    each = FOUR.cache_bytes(1, torch.float32) // 4
    assert placed.position_bytes() == {CPU: each, torch.device("cpu:0"): 3 * each}
    assert cache_positions(llm, None) == 10**9 // 4 // (3 * each)
    assert cache_positions(llm, 1.0) == 2**30 // (4 * each)


def test_sliding_windows_keep_a_slab_for_each_part() -> None:
    window = replace(FOUR.plan[0], window=20)
    config = replace(FOUR, special=(FOUR.plan[0], window, FOUR.plan[0], window))
    whole, placed = (decoder(torch.float32, names, config) for names in ((), ("cpu", "cpu", "cpu:0", "cpu:0")))
    cache = placed.new_cache()
    cache.acquire()
    assert len(cache.slabs) == 4
    how = Sampling(max_new_tokens=40)
    assert run(placed, TEXT, how)[0] == run(whole, TEXT, how)[0]


def test_maps_name_each_device_and_its_layers() -> None:
    assert parse_map("auto") == {}
    assert parse_map("cuda:0=20, cpu") == {"cuda:0": 20, "cpu": None}
    assert parse_map({"cpu": 3}) == {"cpu": 3}
    assert place({"cuda:0": 2, "cpu": None}, 5) == (*[torch.device("cuda:0")] * 2, *[CPU] * 3)
    assert place({"cpu": None}, 2) == (CPU, CPU)


@pytest.mark.parametrize(
    "wrong",
    [
        "cpu=0",
        "cpu=x",
        "cpu,cuda:0=2",
        "cpu=2,cpu=3",
        {},
        {"cpu": 1.5},
        "cpu=9999999",
        "auto=3,cpu",
        {"cuda": 1, "cuda:0": 2},
    ],
)
def test_wrong_maps_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOption):
        parse_map(wrong)


@pytest.mark.parametrize("given", [{"cpu": 3}, {"cpu": 9}, {"cuda:0": 5, "cpu": None}])
def test_maps_must_place_each_layer_once(given: dict[str, int | None]) -> None:
    with pytest.raises(InvalidOption, match="the model has 5"):
        place(given, 5)


def test_the_plan_fills_the_gpus_first() -> None:
    memory = {"cuda:0": 1000, "cuda:1": 400, "cpu": 10000}
    names = [str(device) for device in plan([100] * 14, 250, memory)]
    assert names == ["cuda:0"] * 5 + ["cuda:1"] * 3 + ["cpu"] * 6
    assert [str(device) for device in plan([100] * 2, 900, memory)] == ["cpu", "cpu"]
    with pytest.raises(OutOfMemory, match="int4"):
        plan([5000] * 3, 0, memory)


def test_sizes_equal_the_sizes_of_the_tensors() -> None:
    tensors = random_tensors(TINY)
    layers, others = sizes(tensors, TINY.layers, 2, 2)
    assert sum(layers) + others == 2 * sum(x.numel() for x in tensors.values())
    assert layers[0] == layers[1]


def test_impossible_placements_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOption, match="only one"):
        load_model("nowhere", device="cpu", device_map="auto")
    with pytest.raises(InvalidOption, match="not available here"):
        load_model("nowhere", device_map="cpu=1,cuda:7")
    assert free_memory()["cpu"] > 0
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match="needs accelerate"):
        free_memory()
