"""Tensor parallelism: two processes that share a model write the same text as one, with any draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ctypes import addressof, c_int32, c_int64, c_uint8, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoints.loader import check_divisible
from paceline.errors import AdapterMismatch, InvalidOption, UnsupportedModel
from paceline.kernels.cpu.build import kernel, library
from paceline.kernels.cpu.matrix import Matrix, block_elements
from paceline.kernels.low_rank import Factors
from paceline.kernels.quantize import quantize
from paceline.models.config import AttentionConfig, DeltaNetConfig, LatentConfig, LayerConfig, NormConfig
from paceline.models.ranks import Exchange, Ranks
from paceline.models.shards import RankTensors, divide, spans
from paceline.testing import TINY, random_tensors
from tests.support.cover import some
from tests.support.divided_ranks import run_ranks
from tests.support.divided_worker import NAMES, WITH_ADAPTERS, cases
from tests.support.gguf_blocks import number, stored
from tests.support.random_adapters import factors

SHARED = some("shared_memory", {"shared memory": True, "sockets": False}, fast=["shared memory"])


def fast(name: str, shared_memory: bool) -> bool:
    """The fast tier divides every kind of layer once, and tests each way to exchange sums."""
    socket = ("joined projections",)
    memory = (
        "torch.bfloat16",
        "int4",
        "biases and sinks",
        "parallel attention and MLP",
        "experts with a shared expert, in float64",
    )
    return name in (memory if shared_memory else socket)


@pytest.mark.parametrize(
    ("name", "shared_memory"),
    [
        pytest.param(name, shared_memory, marks=() if fast(name, shared_memory) else pytest.mark.slow)
        for name in NAMES
        for shared_memory in (True, False)
    ],
)
def test_two_processes_write_what_one_writes(name: str, shared_memory: bool) -> None:
    first, second = run_ranks("compare", name, shared_memory=shared_memory)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    model = json.loads(first.stdout)[name]
    assert model["shared"] == (shared_memory and library() is not None and sys.platform == "linux")
    exact = "float64" in name or name in ("joined projections", "parallel attention and MLP")
    assert model["same"]
    assert min(model["accepted"]) > 0, "nothing was accepted, so nothing was shown"
    assert (model["embedding"], model["head"], model["kv_heads"]) == (True, True, 1)
    assert model["logits"] < 1e-5
    assert len(model["adapters"]) == 3 * name.endswith(WITH_ADAPTERS)
    assert all(change > 0.1 for change in model["adapters"])
    assert model["error"] < (1e-12 if exact else 0.05 if "bfloat16" in name or "int" in name else 1e-4)
    if library() is not None and not exact:
        assert (model["native"], model["guarantee"]) == (True, "bits")


def test_the_names_match_the_cases() -> None:
    assert [name for name, _ in cases()] == [*NAMES]


@SHARED
def test_an_error_in_one_process_ends_both(shared_memory: bool) -> None:
    first, second = run_ranks("fail", "torch.float32", shared_memory=shared_memory)
    assert min(first.returncode, second.returncode) > 0
    assert "RankLost: another process of this model has ended" in first.stderr
    assert "UnpicklingError" in second.stderr


@SHARED
@pytest.mark.parametrize("rank", [0, 1])
def test_no_process_waits_for_a_process_without_memory(rank: int, shared_memory: bool, tmp_path: Path) -> None:
    """Test this with and without the other process continuing to run, as a server does."""
    first, second = run_ranks("run out", "pass", str(rank), str(tmp_path / "ended"), shared_memory=shared_memory)
    found = json.loads(first.stdout)
    assert found["ended"], "the other process waits for rank 0, which has left"
    assert second.returncode > 0
    assert ("OutOfMemory: no memory" if rank else "RankLost: another process of this model has") in second.stderr
    assert found["raised"][0].startswith("RankLost: another" if rank else "OutOfMemory: no memory")
    assert found["raised"][1].startswith("RankLost: the processes of this model have ended: ")


def test_a_call_that_breaks_off_at_rank_0_ends_the_process_that_waits_for_the_next(tmp_path: Path) -> None:
    first, second = run_ranks("run out", "acquire", "0", str(tmp_path / "ended"))
    found = json.loads(first.stdout)
    assert found == {"raised": ["MemoryError: no memory, by way of trial"] * 2, "ended": True}
    assert "RankLost: another process of this model has" in second.stderr


def test_a_process_that_cannot_load_its_part_ends_the_other(tmp_path: Path) -> None:
    first, second = run_ranks("run out", "load", "0", str(tmp_path / "ended"))
    (raised,) = (found := json.loads(first.stdout))["raised"]
    assert raised.startswith("OutOfMemory: no memory, by way of trial")
    assert found["ended"], "the other process waits for rank 0, which has left"
    assert "RankLost: another process of this model has" in second.stderr


def test_spans_are_whole_units_but_for_the_last() -> None:
    assert spans(10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert spans(8960, 2, 256) == [(0, 4352), (4352, 8960)]
    assert spans(100, 2, 32) == [(0, 32), (32, 100)]


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do() -> None:
    config = replace(TINY, heads=12, kv_heads=6)
    with pytest.raises(UnsupportedModel, match=r"6 key heads cannot be divided by 4 .* Start 1 or 2 or 3 or 6"):
        divide(config, {}, 4)


@pytest.mark.skipif(library() is None or sys.platform != "linux", reason="needs the CPU kernels on Linux")
def test_a_rank_that_ends_before_its_first_sum_is_noticed() -> None:
    memory = bytearray(kernel("paceline_exchange_bytes", c_int32)(2))
    ranks = [Exchange(addressof(c_uint8.from_buffer(memory)), rank, 2) for rank in range(2)]
    for rank in ranks:
        kernel("paceline_join", c_void_p)(addressof(rank))
    process = slice(64 + 8, 64 + 16)  # of rank 1
    assert int.from_bytes(memory[process], "little") == os.getpid()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    memory[process] = ended.pid.to_bytes(8, "little")
    x = torch.ones(4)
    assert kernel("paceline_sum", c_void_p, c_void_p, c_int64)(addressof(ranks[0]), x.data_ptr(), 4) == 1


def test_adapters_are_cut_like_their_weights() -> None:
    tensors = random_tensors(TINY)
    held = factors(tensors, "all", 3, ("_proj",))
    own = [RankTensors(tensors, divide(TINY, tensors, 2), rank) for rank in range(2)]
    parts = [rank.factors(held).factors for rank in own]
    for module, (a, b) in held.factors.items():
        cut = [rank[module + ".weight"] for rank in own]
        for rank, (own_a, own_b) in enumerate(part[module] for part in parts):
            assert (own_b.shape[0], own_a.shape[1]) == cut[rank].shape
        changes = [part[module][1] @ part[module][0] for part in parts]
        whole = torch.cat(changes, 1 if module.endswith(("o_proj", "down_proj")) else 0)
        torch.testing.assert_close(whole, b @ a)
    module = "model.layers.0.self_attn.q_proj"
    a, b = held.factors[module]
    with pytest.raises(AdapterMismatch, match=r"x maps 32 to 16 elements in .*q_proj, but this model maps 32 to 32"):
        own[0].factors(Factors("x", {module: (a, b[:16])}))  # which would fit a part


def test_indivisible_models_are_refused() -> None:
    recurrent = LayerConfig(None, recurrent=DeltaNetConfig(2, 4, 8, 4, 4))
    with pytest.raises(UnsupportedModel, match="recurrent"):
        check_divisible("x", replace(TINY, special=(recurrent,) * 2), exact=False, ranks=True, placed=False)
    with pytest.raises(UnsupportedModel, match="transformers"):
        check_divisible("x", None, exact=False, ranks=True, placed=False)
    with pytest.raises(UnsupportedModel, match="exact"):
        check_divisible("x", TINY, exact=True, ranks=True, placed=False)
    wide = replace(TINY, norms=NormConfig(heads="joint"))
    with pytest.raises(UnsupportedModel, match="applies QK-norm across heads"):
        check_divisible("x", wide, exact=False, ranks=True, placed=False)
    check_divisible("x", wide, exact=False, ranks=False, placed=True)
    latent = replace(TINY, attention=AttentionConfig(latent=LatentConfig(16, 0, 8, 4, 8)))
    with pytest.raises(UnsupportedModel, match="uses MLA, whose latent vector cannot be split"):
        check_divisible("x", latent, exact=False, ranks=True, placed=False)
    with pytest.raises(InvalidOption, match="cannot be combined"):
        check_divisible("x", TINY, exact=False, ranks=True, placed=True)


def test_without_torchrun_there_is_nobody_to_share_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidOption, match="torchrun --nproc-per-node 2"):
        Ranks()


def test_the_parts_make_the_whole() -> None:
    config, tensors = replace(TINY, tied=False), random_tensors(replace(TINY, tied=False))
    division = divide(config, tensors, 2)
    parts = [RankTensors(tensors, division, rank) for rank in range(2)]
    for name, tensor in tensors.items():
        cut = 1 if "o_proj" in name or "down_proj" in name else 0
        pieces = [part[name] for part in parts]
        assert [part.shape(name) for part in parts] == [tuple(piece.shape) for piece in pieces]
        assert torch.equal(pieces[0] if tensor.ndim == 1 else torch.cat(pieces, cut), tensor), name
    assert sum(part[name].numel() for part in parts for name in tensors if "norm" not in name) == sum(
        x.numel() for name, x in tensors.items() if "norm" not in name
    )


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "IQ4_NL", "Q4_K", "Q6_K", "IQ4_XS"])
def test_codes_are_cut_at_the_borders_of_their_blocks(kind: str) -> None:
    block = block_elements(int(number(kind)))
    assert block == (256 if kind.endswith(("K", "XS")) else 32)
    whole, weight = stored(kind, 20, 3 * 256)
    cut = whole.columns(block, 2 * 256)
    assert torch.equal(Matrix(cut, None).weight(), Matrix(whole, None).weight()[:, block : 2 * 256])
    assert torch.allclose(Matrix(cut, None).weight(), weight[:, block : 2 * 256], atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_without_kernels_are_cut_by_groups(bits: int) -> None:
    codes = quantize(torch.randn(5, 100, generator=torch.Generator().manual_seed(0)), bits)
    assert torch.equal(codes.columns(32, 100).dequantised(), codes.dequantised()[:, 32:100])


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_heads_that_end_within_a_block_are_refused() -> None:
    config = replace(TINY, heads=6, kv_heads=2, head_dim=128)
    tensors = {"model.layers.0.self_attn.o_proj.weight": torch.ones(2, 768)}

    class Coded(RankTensors):
        def __init__(self) -> None:
            self._names, self._tensors = dict.fromkeys(tensors, ""), tensors

        def stored(self, name: str) -> Any:
            return stored("Q4_K", 2, 768)[0]

    with pytest.raises(UnsupportedModel, match=r"384 columns .* no whole blocks of 256"):
        divide(config, Coded(), 2)
