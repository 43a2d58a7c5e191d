"""Rotary tables compared with transformers' frequencies. A slot's factors depend only on its own request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.models.config import RopeConfig
from paceline.models.rope import KINDS, Rotary, inverse_frequencies, read_rope, rotate, span_of
from tests.support.lazy import transformers

CPU = torch.device("cpu")
CONTEXT, HEAD = 128, 16
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
RULES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, untruncated": {"factor": 4.0, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, temperatures": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, its own": {"factor": 4.0, "attention_factor": 0.9},
    "longrope": {**FACTORS, "original_max_position_embeddings": 64},
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional, stretched": {"partial_rotary_factor": 0.7, "factor": 8.0},
    "longrope, its own": {**FACTORS, "original_max_position_embeddings": 64, "attention_factor": 1.3},
}


def rule(name: str) -> tuple[RopeConfig, Any]:
    """Return our rule, and transformers' config."""
    parameters = {"rope_type": name.split(",")[0], "rope_theta": 5000.0, **RULES[name]}
    config = transformers.LlamaConfig(head_dim=HEAD, max_position_embeddings=CONTEXT, rope_parameters=dict(parameters))
    return read_rope(parameters, {"max_position_embeddings": CONTEXT}, 10000.0, HEAD), config


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [50, 129, 300])
def test_frequencies_and_temperature_equal_transformers(name: str, length: int) -> None:
    ours, config = rule(name)
    make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[ours.kind]
    inverse, temperature = make(config, CPU, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(ours, HEAD, span_of(ours, length)), inverse, rtol=1e-6, atol=0)
    assert dict(ours.scaling).get("attention_factor", 1.0) == pytest.approx(temperature)


def test_every_rule_is_tried() -> None:
    assert {name.split(",")[0] for name in RULES} | {"default"} == set(KINDS)


def test_only_length_dependent_rules_have_spans_and_only_beyond_their_limit() -> None:
    spans = {name: [span_of(rule(name)[0], n) for n in (64, 65, 128, 129, 200)] for name in RULES}
    assert spans["dynamic"] == [0, 0, 0, 129, 200]
    assert spans["longrope"] == [0, 65, 65, 65, 65]
    assert all(not any(s) for name, s in spans.items() if not name.startswith(("dynamic", "longrope")))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_slots_with_different_spans_can_share_a_pass(name: str) -> None:
    ours, _ = rule(name)
    spans = [span_of(ours, length) for length in (20, 200, 150)]
    positions = torch.tensor([[3, 4, 5], [198, 199, 200], [0, 1, 700]])
    together = Rotary(ours, HEAD, torch.float32, CPU)(positions, 701, spans)
    for i, span in enumerate(spans):
        alone = Rotary(ours, HEAD, torch.float32, CPU)(positions[i : i + 1], 701, [span])
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[i : i + 1], b)
    assert not torch.equal(*(Rotary(ours, HEAD, torch.float32, CPU)(positions[:1], 9, [s])[0] for s in spans[:2]))


def test_tables_of_many_spans_do_not_pile_up() -> None:
    ours, _ = rule("dynamic")
    rotary = Rotary(ours, HEAD, torch.float32, CPU)
    positions = torch.tensor([[700]])
    first = rotary(positions, 701, [200])
    for span in range(201, 260):
        rotary(positions, 701, [span])
    assert len(rotary._tables) <= 16
    assert torch.equal(torch.stack(first), torch.stack(rotary(positions, 701, [200])))


def test_dimensions_beyond_the_share_stay_as_they_are() -> None:
    half = Rotary(RopeConfig(share=0.5), HEAD, torch.float64, CPU)(torch.tensor([[7]]), 8, [0])
    x = torch.randn(1, 1, 2, HEAD, dtype=torch.float64)
    out = rotate(x, *half)
    assert torch.equal(out[..., HEAD // 2 :], x[..., HEAD // 2 :])
    whole = Rotary(RopeConfig(), HEAD // 2, torch.float64, CPU)(torch.tensor([[7]]), 8, [0])
    assert torch.equal(out[..., : HEAD // 2], rotate(x[..., : HEAD // 2].contiguous(), *whole))


def test_factors_are_rounded_once_so_that_no_library_decides_their_last_bit() -> None:
    c = RopeConfig(theta=10000.0)
    inverse = inverse_frequencies(c, HEAD)
    exact = [1 / float(np.float32(10000.0 ** float(np.float32(i) / np.float32(HEAD)))) for i in range(0, HEAD, 2)]
    assert inverse.tolist() == [float(np.float32(x)) for x in exact]
    cos, sin = Rotary(c, HEAD, torch.float32, CPU).table(0, 2000)[:, :, : HEAD // 2]
    for position in range(0, 2000, 7):
        angles = (torch.tensor(float(position)) * inverse).tolist()
        assert cos[position].tolist() == [float(np.float32(math.cos(x))) for x in angles]
        assert (-sin[position]).tolist() == [float(np.float32(math.sin(x))) for x in angles]
