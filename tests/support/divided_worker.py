"""A process of test_divided.py: it divides tiny models of every kind. Rank 0 prints the results as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.drafters.model import DraftModel
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.errors import OutOfMemory, PacelineError
from paceline.kernels.low_rank import Factors
from paceline.models.config import AttentionConfig, Groups, LayerConfig, MixtureConfig, ModelConfig, NormConfig
from paceline.models.decoder import Decoder
from paceline.models.divided import DividedCache, DividedDecoder
from paceline.models.lazy import Quantised
from paceline.models.mirror import Mirror, repeated
from paceline.models.ranks import Ranks
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors, run_together
from paceline.types import DraftBudget, Want
from paceline.verify.tree import pack_prefix
from tests.support.random_adapters import factors

CPU = torch.device("cpu")
WIDE = replace(TINY, hidden=96, heads=4, head_dim=32, ffn=200, vocab_size=101)
Case = tuple[ModelConfig, dict[str, Tensor], torch.dtype, Any]
WITH_ADAPTERS = "float64", "bfloat16", "int8", "joined projections"


NAMES = (
    *("torch.float64", "torch.float32", "torch.bfloat16", "int8", "int4", "biases and sinks", "joined projections"),
    *("experts", "parallel attention and MLP", "experts with a shared expert, in float64"),
)


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the name, config, tensors, dtype and quantisation of each model."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        yield str(dtype), (TINY, random_tensors(TINY), dtype, None)
    untied = replace(WIDE, tied=False, residual_scale=0.5, final_softcap=20.0, context_length=1200)
    for mode in ("int8", "int4"):
        yield mode, (untied, random_tensors(untied, scale=0.2), torch.bfloat16, mode)
    yield "biases and sinks", (replace(TINY, attention=AttentionConfig(sinks=True)), with_biases(), torch.float32, None)
    yield "joined projections", (TINY, joined(), torch.float64, None)
    experts = MixtureConfig(4, 2, 40, normalised=True)
    mixed = replace(TINY, mixture=experts, special=(LayerConfig(TINY.rope, sparse=True),) * 2)
    yield "experts", (mixed, with_experts(experts), torch.float32, None)
    parallel = replace(
        TINY, heads=2, tied=False, norms=NormConfig(kind="layer"), parallel=True, gated_mlp=False, activation="gelu"
    )
    yield "parallel attention and MLP", (parallel, parallel_tensors(parallel), torch.float64, None)
    groups = Groups(2, 1, 2)
    scored = replace(experts, shared=24, shared_block="mlp.shared_experts", sigmoid=True, scale=1.7, groups=groups)
    shared = replace(mixed, mixture=scored)
    yield "experts with a shared expert, in float64", (shared, with_experts(scored), torch.float64, None)


def adapters_of(name: str, tensors: dict[str, Tensor]) -> list[Factors]:
    """Return adapters for some models: for attention inputs only, for all products, and for gates only."""
    if not name.endswith(WITH_ADAPTERS):
        return []
    sets = {"in": ("q_proj", "v_proj", "qkv_proj"), "all": ("_proj",), "gates": ("up_proj", "down_proj")}
    return [factors(tensors, name, rank, ends) for rank, (name, ends) in enumerate(sets.items(), 3)]


def with_biases() -> dict[str, Tensor]:
    tensors = random_tensors(replace(TINY, attention=AttentionConfig(sinks=True)))
    projections = [name for name in tensors if name.endswith("_proj.weight")]
    rows = {name: len(tensors[name]) for name in projections}
    noise = torch.Generator().manual_seed(1)
    return tensors | {
        name.replace("weight", "bias"): torch.randn(count, generator=noise) for name, count in rows.items()
    }


def joined() -> dict[str, Tensor]:
    """Phi-3's names."""
    tensors = random_tensors(TINY)
    for i in range(TINY.layers):
        for block, names, whole in (("self_attn", "qkv", "qkv_proj"), ("mlp", ("gate", "up"), "gate_up_proj")):
            parts = [tensors.pop(f"model.layers.{i}.{block}.{name}_proj.weight") for name in names]
            tensors[f"model.layers.{i}.{block}.{whole}.weight"] = torch.cat(parts)
    return tensors


def parallel_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors with fused, biased queries, keys and values as in GPT-NeoX, and a head bias as in Phi."""
    tensors, noise = random_tensors(config), torch.Generator().manual_seed(1)
    for i in range(config.layers):
        layer = f"model.layers.{i}."
        for name in (*(f"self_attn.{x}_proj" for x in "qkv"), "mlp.gate_proj"):
            del tensors[f"{layer}{name}.weight"]
        rows = 3 * config.heads * config.head_dim
        tensors[layer + "self_attn.query_key_value.weight"] = torch.randn(rows, config.hidden, generator=noise) * 0.4
    biases = {name.replace("weight", "bias"): torch.randn(len(x), generator=noise) for name, x in tensors.items()}
    del biases["model.embed_tokens.bias"]
    return tensors | biases


def _shapes(ffn: int) -> list[tuple[int, int]]:
    return [(ffn, TINY.hidden), (ffn, TINY.hidden), (TINY.hidden, ffn)]


def with_experts(experts: MixtureConfig) -> dict[str, Tensor]:
    tensors, noise = random_tensors(TINY), torch.Generator().manual_seed(1)
    for i in range(TINY.layers):
        mlp = f"model.layers.{i}.mlp."
        tensors = {name: x for name, x in tensors.items() if not name.startswith(mlp)}
        tensors[mlp + "gate.weight"] = torch.randn(experts.count, TINY.hidden, generator=noise)
        for number in range(experts.count):
            for name, shape in zip(experts.names, _shapes(experts.ffn), strict=True):
                tensors[f"{mlp}experts.{number}.{name}.weight"] = torch.randn(shape, generator=noise) * 0.4
        for name, shape in zip(experts.names, _shapes(experts.shared), strict=True) if experts.shared else ():
            tensors[f"model.layers.{i}.{experts.shared_block}.{name}.weight"] = (
                torch.randn(shape, generator=noise) * 0.4
            )
        if experts.sigmoid:
            tensors[mlp + "expert_bias"] = torch.randn(experts.count, generator=noise) * 0.4
    return tensors


def texts(
    target: Decoder, drafter: Drafter | None = None, draft: DraftBudget | None = None
) -> tuple[list[list[int]], int]:
    """Return greedy and sampled replies in batches, from an engine with a prefix cache, and the accepted tokens."""
    engine = Engine(target, drafter, draft)
    engine.remember(1 << 20)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5], [1, 2, 3, 1, 2, 3, 4, 4, 4, 4], [1, 2, 3, 1, 2, 3, 1, 2]]
    ways = [Sampling(max_new_tokens=length, temperature=t, seed=3) for t, length in ((0.0, 6), (0.4, 8))]
    numbers = [number % (len(target.adapters) + 1) for number in (1, 0, 2, 3)]
    replies = [reply for how in ways for reply in run_together(engine, prompts, [how] * 4, adapters=numbers)]
    return [tokens for tokens, _, _ in replies], sum(stats.accepted for _, _, stats in replies)


def held(target: Decoder, adapter: int = 0) -> KVCache:
    cache = target.new_cache()
    cache.acquire(0, adapter)
    return cache


def logits(target: Decoder) -> Tensor:
    """Return the logits of a text without an adapter and with each adapter, [A, T, V]."""
    rows, numbers = pack_prefix([1, 2, 3], 0, 0, CPU), range(len(target.adapters) + 1)
    return torch.cat([target.forward(rows, held(target, number), Want()).logits for number in numbers])


def compare(whole: Decoder, divided: DividedDecoder) -> dict[str, Any]:
    """Compare a divided model with the whole model."""
    plain, _ = texts(divided)
    sizes = DraftBudget.chain(4), DraftBudget(nodes=8, depth=4, branch=2)
    chains, trees = (texts(divided, DraftModel(whole, whole.vocab_size), size) for size in sizes)
    found, expected = logits(divided), logits(whole)
    x = torch.randn(3, whole.config.hidden, generator=torch.Generator().manual_seed(0)).to(whole.dtype)
    tokens = torch.tensor([[0, whole.vocab_size - 1, 5]])
    ours, theirs = divided.logits(x), whole.logits(x)
    some = [model.shaped(theirs[:, tokens[0]], tokens[0]) for model in (divided, whole)]
    return {
        "guarantee": guarantee(divided),
        "same": chains[0] == plain and trees[0] == plain,
        "accepted": [chains[1], trees[1]],
        "error": float((found - expected).abs().max() / expected.std()),
        "adapters": [float((one - expected[0]).abs().max() / expected.std()) for one in expected[1:]],
        "embedding": torch.equal(divided.embed(tokens), whole.embed(tokens)),
        "head": torch.equal(divided.head(), whole.head()) and torch.equal(*some),
        "logits": float((ours - theirs).abs().max()),
        "shared": divided.ranks.shared_memory is not None,
        "native": divided._stack.native is not None,
        "kv_heads": divided.config.kv_heads,
    }


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def failure(target: Decoder) -> str:
    try:
        target.forward(pack_prefix([1, 2, 3], 0, 0, CPU), held(target), Want())
    except (PacelineError, MemoryError) as error:
        return said(error)
    raise AssertionError("a failure was to be simulated")


def run_out(mirror: Mirror, where: str, rank: int, ended: Path) -> None:
    """Simulate an out-of-memory error at one rank. Rank 0 prints its error, and waits for the other rank's end."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OutOfMemory("no memory, by way of trial", "End the test")

    def break_off(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory, by way of trial")

    mine, raised = mirror.ranks.rank == rank, list[str]()
    progress = fail if mine and where == "load" else lambda done, total: None
    try:
        divided = DividedDecoder(TINY, random_tensors(TINY), torch.bfloat16, CPU, progress, mirror)
        places = {"pass": (divided._stack, "run", fail), "acquire": (DividedCache, "acquire", repeated(break_off))}
        if mine:
            setattr(*places[where])
        mirror.follow()
        raised += [failure(divided) for _ in range(2)]
    except OutOfMemory as error:
        if mirror.ranks.rank:
            raise
        raised.append(said(error))
    finally:
        if mirror.ranks.rank:
            ended.touch()
    until = time.monotonic() + 60
    while not ended.exists() and time.monotonic() < until:
        time.sleep(0.05)
    print(json.dumps({"raised": raised, "ended": ended.exists()}))


def main(task: str, *arguments: str) -> None:
    """Run as one of the ranks. `task` is "compare" (models with the given names), "fail" or "run out"."""
    torch.set_num_threads(1)
    mirror = Mirror(Ranks())
    if task == "run out":
        run_out(mirror, arguments[0], int(arguments[1]), Path(arguments[2]))
        return
    made: dict[str, tuple[Decoder, DividedDecoder]] = {}
    for name, (config, tensors, dtype, mode) in cases():
        if name in arguments:
            held = Quantised(tensors, mode) if mode else tensors
            adapters = adapters_of(name, tensors)
            stored = torch.int8 if mode == "int4" else dtype  # of keys and values
            divided = DividedDecoder(config, held, dtype, CPU, lambda done, total: None, mirror, adapters, stored)
            made[name] = Decoder(config, held, dtype, CPU, adapters=adapters, kv_dtype=stored), divided
    mirror.follow()
    if task == "fail":
        mirror.ranks.send(b"no pickle")
        for _, divided in made.values():
            texts(divided)
    print(json.dumps({name: compare(*pair) for name, pair in made.items()}))
