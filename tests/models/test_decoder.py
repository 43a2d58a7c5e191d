"""Logits equal transformers' logits on tiny random models of every family, in one pass, in chunks and in trees."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.checkpoints.model_config import read_config
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.models.config import RopeConfig
from paceline.models.decoder import Decoder, make_attention
from paceline.models.weights import Weights
from paceline.testing import TINY, random_tensors, tiny_target
from paceline.types import Want
from paceline.verify.tree import pack_prefix
from tests.support.lazy import transformers

CPU = torch.device("cpu")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama untied, many heads": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "own head size": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
}


def reference(family: str) -> tuple[Any, Decoder]:
    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**(SIZES | changes))
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    for parameter in model.parameters():  # transformers starts biases at zero and norms at one
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model, Decoder(read_config(config.to_dict()), model.state_dict(), torch.float32, CPU)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_and_hidden_states_equal_transformers(family: str) -> None:
    model, ours = reference(family)
    tokens = torch.randint(0, 101, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = model(torch.tensor([tokens]), output_hidden_states=True)
    cache = ours.new_cache()
    slot = cache.acquire()
    logits, taps = [], []
    for start, end in ((0, 50), (50, 51), (51, 90)):
        rows = pack_prefix(tokens[start:end], slot, start, CPU)
        out = ours.forward(rows, cache, Want(taps=(0, 2, "final")))
        cache.commit(rows, [range(1, end - start)])
        logits.append(out.logits[0, : end - start])
        taps.append({tap: states[0, : end - start] for tap, states in out.taps.items()})
    assert relative(torch.cat(logits), theirs.logits[0]) < 1e-4
    for tap, index in ((0, 0), (2, 2), ("final", 3)):
        assert relative(torch.cat([t[tap] for t in taps]), theirs.hidden_states[index][0]) < 1e-4  # type: ignore[index]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_want_returns_just_what_was_asked_for() -> None:
    target = tiny_target()
    shapes = {}
    for want in ("all", "last", "none"):
        cache = target.new_cache()
        rows = pack_prefix([1, 2, 3, 4], cache.acquire(), 0, CPU)
        shapes[want] = target.forward(rows, cache, Want(want)).logits  # type: ignore[arg-type]
    assert [tuple(x.shape) for x in shapes.values()] == [(1, 4, 37), (1, 1, 37), (1, 0, 37)]
    torch.testing.assert_close(shapes["last"][0, 0], shapes["all"][0, -1])


def raw(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rope_theta": 10000.0, **SIZES, **changes}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (raw(model_type="olmo"), "olmo"),
        (raw(vision_config={}), "multimodal"),
        (raw(model_type="mamba"), "recurrent"),
        (raw(is_encoder_decoder=True), "encoder-decoder"),
        (raw(rope_scaling={"type": "made-up", "factor": 2.0}), "made-up"),
    ],
)
def test_unsupported_features_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read_config(config)


def test_a_config_that_lacks_a_key_names_it() -> None:
    broken = raw()
    del broken["hidden_size"]
    with pytest.raises(CorruptModel, match="hidden_size"):
        read_config(broken)
    with pytest.raises(CorruptModel, match="low_freq_factor"):
        read_config(raw(rope_scaling={"rope_type": "llama3", "factor": 8.0}))


def test_older_and_newer_spellings_of_rope_mean_the_same() -> None:
    old = raw(rope_theta=5e5, rope_scaling=LLAMA3)
    new = raw(rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    assert read_config(old) == read_config(new)


def test_missing_extra_and_misshapen_tensors_are_named() -> None:
    tensors = random_tensors(TINY)
    build = lambda t: Decoder(TINY, t, torch.float32, CPU)  # noqa: E731
    with pytest.raises(CorruptModel, match="q_proj"):
        build({k: v for k, v in tensors.items() if k != "model.layers.1.self_attn.q_proj.weight"})
    with pytest.raises(CorruptModel, match="lora_A"):
        build(tensors | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)})
    with pytest.raises(CorruptModel, match=r"\(32, 31\)"):
        build(tensors | {"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 31)})
    build(tensors | {"model.rotary_emb.inv_freq": torch.ones(4)})


def test_the_order_of_a_million_rotary_rows_is_no_list() -> None:
    wide = replace(TINY, heads=1024, kv_heads=1024, head_dim=1024, rope=RopeConfig(interleaved=True))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptModel, match="lacks x"):
            make_attention(wide, wide.plan[0], Weights({}, torch.float32, torch.device("cpu")), "x.", wide.hidden)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
