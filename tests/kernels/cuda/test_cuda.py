"""Real graphs and real kernels on a CUDA device. Skipped without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.models.config import ModelConfig
from paceline.models.cuda_decoder import PATIENCE, DeviceDecoder, cuda_graph
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, Oracle, check_target, random_tensors, run
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import pack, pack_prefix, with_siblings

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

CUDA = torch.device("cuda")
MIDDLE = replace(
    TINY, vocab_size=4096, hidden=512, layers=4, heads=8, kv_heads=2, head_dim=64, ffn=1536, context_length=2048
)
PROMPT = [(7 * i + 1) % 4096 for i in range(300)]


def exact_target(graphs: bool = True, config: ModelConfig = MIDDLE) -> DeviceDecoder:
    tensors = random_tensors(config, scale=0.05)
    capture = cuda_graph if graphs else None
    return DeviceDecoder(config, tensors, torch.bfloat16, CUDA, exact=True, capture=capture)


@pytest.mark.parametrize("capture", [None, cuda_graph])
def test_it_is_a_target_like_any_other(capture) -> None:  # type: ignore[no-untyped-def]
    config = replace(TINY, context_length=48)
    tensors = random_tensors(config, scale=0.1)
    check_target(
        lambda: DeviceDecoder(config, tensors, torch.float32, CUDA, capture=capture), tolerance=1e-3, taps=(0, "final")
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_the_exact_mode_passes_the_self_check(graphs: bool) -> None:
    assert guarantee(exact_target(graphs)) == "bits"


def filled(target: DeviceDecoder, length: int) -> tuple[KVCache, int]:
    cache = target.new_cache()
    slot = cache.acquire()
    for done in range(0, length, 256):
        chunk = PROMPT[done : min(done + 256, length)]
        rows = pack_prefix(chunk, slot, done, CUDA)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(chunk))])
    return cache, slot


def logits(target: DeviceDecoder, cache: KVCache, slot: int, last: int, draft: Draft) -> Tensor:
    rows = pack([last], [draft], [slot], [cache.lengths[slot]], CUDA)
    return target.forward(rows, cache, Want()).logits[0]


@pytest.mark.parametrize("length", [1, 61, 250, 300])
def test_logits_equal_plain_decoding_bit_for_bit(length: int) -> None:
    """Check chains of up to 64 rows and trees, with and without graphs, over shares that end within the draft."""
    path = [(11 * i + 5) % 4096 for i in range(64)]
    plain = exact_target(graphs=False)
    cache, slot = filled(plain, length)
    alone = []
    for token in path:
        rows = pack([token], [Draft()], [slot], [cache.lengths[slot]], CUDA)
        alone.append(plain.forward(rows, cache, Want()).logits[0, 0])
        cache.commit(rows, [()])
    expected = torch.stack(alone)
    target = exact_target()
    cache, slot = filled(target, length)
    tree, places = with_siblings(path[1:30], 3000)
    for _ in range(PATIENCE + 2):
        for count in (2, 4, 8, 16, 33, 64):
            found = logits(target, cache, slot, path[0], Draft.chain(path[1:count]))[:count]
            assert torch.equal(found, expected[:count]), f"a chain of {count} rows"
        assert torch.equal(logits(target, cache, slot, path[0], tree)[[0, *places]], expected[:30]), "a tree"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plain_decodings(temperature: float) -> None:
    target = exact_target()
    sampling = Sampling(max_new_tokens=200, temperature=temperature, seed=5)
    plain = run(target, PROMPT, sampling)[0]
    for shape in (DraftBudget.chain(7), DraftBudget(20, 5, 3)):
        engine = Engine(target, Oracle(PROMPT + plain, 0.7, 4096), shape)
        assert run(target, PROMPT, sampling, engine=engine)[0] == plain
        assert engine.cache.graphs  # type: ignore[attr-defined]
