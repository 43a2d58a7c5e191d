"""Unmerged adapters: rows with several adapters in one pass equal single adapters and merged adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.engine.self_check import chunk_invariant, guarantee
from paceline.errors import AdapterMismatch, UnsupportedModel
from paceline.kernels.cpu.build import library
from paceline.kernels.low_rank import Factors
from paceline.kernels.quantize import Mode
from paceline.models.config import LayerConfig, ModelConfig, ShortConvConfig
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.testing import TINY, random_tensors
from paceline.types import Draft, Want
from paceline.verify.tree import pack, pack_prefix
from tests.support.hybrids import HYBRID, MAMBA_HYBRID, hybrid_tensors, mamba_tensors
from tests.support.native_models import BASE, DELTA_NET, FALCON, GEMMA4, MODELS, NEMOTRON, QWEN_MOE, tensors_of
from tests.support.random_adapters import adapters
from tests.support.row_groups import watched

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
of_every_set = pytest.mark.usefixtures("kernels")
LFM2 = replace(
    TINY,
    context_length=1200,
    special=(LayerConfig(None, recurrent=ShortConvConfig(TINY.hidden, 3), attends=False), LayerConfig(TINY.rope)),
)
TEXT = [(i * 17 + 5) % 37 for i in range(400)]


def merged(tensors: dict[str, Tensor], adapter: Factors | None) -> dict[str, Tensor]:
    made = dict(tensors)
    for module, (a, b) in adapter.factors.items() if adapter else ():
        made[module + ".weight"] = tensors[module + ".weight"].double() + b.double() @ a.double()
    return made


def logits(model: Decoder, numbers: Sequence[int], rows: int = 5, before: int = 9) -> list[Tensor]:
    """Return the logits of `rows` rows for each adapter, all in one pass, after a separate pass for each prompt."""
    cache, slots = model.new_cache(), []
    for number in numbers:
        slot = cache.acquire(before, number)
        prompt = pack_prefix(TEXT[:before], slot, 0, CPU)
        model.forward(prompt, cache, Want("none"))
        cache.commit(prompt, [range(1, before)])
        slots.append(slot)
    # Drafts of several lengths.
    drafts = [Draft.chain(tuple(TEXT[before + 1 : before + rows + number])) for number in numbers]
    passed = pack([TEXT[before]] * len(slots), drafts, slots, [before] * len(slots), CPU)
    out = model.forward(passed, cache, Want()).logits
    return [out[i, :rows] for i in range(len(slots))]


def lfm2_tensors() -> dict[str, Tensor]:
    tensors, draw = random_tensors(LFM2, scale=0.3), torch.Generator().manual_seed(1)
    tensors = {name: x for name, x in tensors.items() if not name.startswith("model.layers.0.self_attn")}
    shapes = {"in_proj": (3 * LFM2.hidden, LFM2.hidden), "out_proj": (LFM2.hidden,) * 2, "conv": (LFM2.hidden, 1, 3)}
    made = {name: torch.randn(shape, generator=draw) * 0.4 for name, shape in shapes.items()}
    return tensors | {f"model.layers.0.conv.{name}.weight": x for name, x in made.items()}


def tensors_for(name: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    if name == "a hybrid":
        return HYBRID, hybrid_tensors()
    if name == "mamba-2":
        return MAMBA_HYBRID, mamba_tensors()
    if name == "lfm2":
        return LFM2, lfm2_tensors()
    config = replace(BASE, **MODELS["gemma3" if name == AFTER_A_TORCH_MIXER else name])
    if name == AFTER_A_TORCH_MIXER:
        config = replace(config, norms=replace(config.norms, qk_norm_after_rope=True))
    return config, tensors_of(config)


NATIVE = [
    *("llama", "qwen2: biases", "gemma3", GEMMA4, DELTA_NET, QWEN_MOE, NEMOTRON, FALCON),
    *("a mixture", "no size in whole lanes"),
]
AFTER_A_TORCH_MIXER = "feed-forward blocks on the kernels, attention on torch"
FAMILIES = [*NATIVE, "a hybrid", "mamba-2", "lfm2", AFTER_A_TORCH_MIXER]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_of_all_adapters_is_each_merged(name: str) -> None:
    config, tensors = tensors_for(name)
    held = adapters(tensors)
    model = Decoder(config, tensors, torch.float64, CPU, adapters=held)
    together = logits(model, range(len(held) + 1))
    plain = logits(Decoder(config, tensors, torch.float64, CPU), [0])[0]
    torch.testing.assert_close(together[0], plain, rtol=1e-9, atol=1e-9)
    for own, adapter in zip(together[1:], held, strict=True):
        expected = logits(Decoder(config, merged(tensors, adapter), torch.float64, CPU), [0])[0]
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)
        assert float((own - plain).abs().max()) > 1e-3  # so that this can fail


@needs_kernels
@of_every_set
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, id=f"{name}-{mode}", marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, name in enumerate(FAMILIES)
        for j, mode in enumerate((None, "int8", "int4"))
    ],
)
def test_no_row_depends_on_the_adapters_of_other_rows(name: str, mode: Mode | None) -> None:
    config, tensors = tensors_for(name)
    held, weights = adapters(tensors), Quantised(tensors, mode) if mode else tensors
    model = Decoder(config, weights, torch.bfloat16, CPU, adapters=held)
    numbers = range(len(held) + 1)
    together = logits(model, numbers)
    for number in numbers:
        assert torch.equal(together[number], logits(model, [number])[0])
    assert torch.equal(together[0], logits(Decoder(config, weights, torch.bfloat16, CPU), [0])[0])
    assert not any(torch.equal(together[0], other) for other in together[1:])
    assert guarantee(model) == "bits"


@needs_kernels
@of_every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3",
        GEMMA4,
        DELTA_NET,
        NEMOTRON,
        FALCON,
        "no size in whole lanes",
        "heads of 80",
        "lfm2",
        "mamba-2",
        AFTER_A_TORCH_MIXER,
    ],
)
def test_kernels_compute_what_merging_gives(name: str, dtype: torch.dtype) -> None:
    config, tensors = tensors_for(name)
    held = adapters(tensors)
    model = Decoder(config, tensors, dtype, CPU, adapters=held)
    assert model._stack.native or all(layer.native_mlp for layer in model._stack._parts[0].layers)
    for own, adapter in zip(logits(model, range(1, len(held) + 1)), held, strict=True):
        expected = logits(Decoder(config, merged(tensors, adapter), torch.float64, CPU), [0])[0]
        apart = float((own - expected).norm() / expected.norm())
        assert apart < (1e-5 if dtype == torch.float32 else 2e-2)


@needs_kernels
@of_every_set
def test_rows_that_threads_share_by_groups_keep_their_adapters() -> None:
    config, tensors = tensors_for("llama")
    model = Decoder(config, tensors, torch.bfloat16, CPU, adapters=adapters(tensors))
    alone = [logits(model, [number], rows=70)[0] for number in range(4)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with watched(model) as groups:
            together = logits(model, range(4), rows=70)
    finally:
        torch.set_num_threads(threads)
    assert groups[-1] > 2
    assert all(map(torch.equal, together, alone))


@needs_kernels
def test_the_self_check_sees_rows_that_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check finds a row that gets the adapter of another row."""
    config, tensors = tensors_for("llama")
    model = Decoder(config, tensors, torch.bfloat16, CPU, adapters=adapters(tensors))
    assert (guarantee(model), chunk_invariant(model, "bits")) == ("bits", True)
    run = model._stack.run

    def mixed_up(*args: Any, adapters: Sequence[int] = (), **more: Any) -> Any:
        return run(*args, adapters=[max(adapters)] * len(adapters), **more)

    monkeypatch.setattr(model._stack, "run", mixed_up)
    assert guarantee(model) == "rounding"


def test_adapters_that_cannot_differ_from_row_to_row_are_refused() -> None:
    config, tensors = tensors_for("a mixture")
    expert = "model.layers.1.mlp.experts.0.up_proj"
    held = Factors("experts", {expert: (torch.ones(2, 64), torch.ones(32, 2))})
    with pytest.raises(UnsupportedModel, match="must be the same for all rows"):
        Decoder(config, tensors, torch.float32, CPU, adapters=[held])
    head = Factors("head", {"model.embed_tokens": (torch.ones(2, 67), torch.ones(64, 2))})
    with pytest.raises(UnsupportedModel, match="must be the same for all rows"):
        Decoder(config, tensors, torch.float32, CPU, adapters=[head])


@pytest.mark.parametrize(
    ("module", "shapes", "said"),
    [
        ("model.layers.0.self_attn.q_proj", ((2, 32), (64, 2)), "maps 32 to 64 elements.*maps 64 to 64"),
        ("model.layers.7.self_attn.q_proj", ((2, 64), (64, 2)), "which this model does not have"),
    ],
)
def test_adapters_of_other_models_are_refused(module: str, shapes: Any, said: str) -> None:
    a, b = shapes
    config, tensors = tensors_for("llama")
    with pytest.raises(AdapterMismatch, match=said):
        Decoder(config, tensors, torch.float32, CPU, adapters=[Factors("x", {module: (torch.ones(a), torch.ones(b))})])
