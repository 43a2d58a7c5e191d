"""Files with random weights, and the table of their measurements."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import gguf
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
random_gguf, sizes = import_module("random_gguf"), import_module("sizes")


@pytest.mark.parametrize("kind", [random_gguf.Q4_K, random_gguf.Q6_K, random_gguf.Q8_0, random_gguf.MXFP4])
def test_random_blocks_have_mean_zero_and_the_wanted_spread(kind: gguf.GGMLQuantizationType) -> None:
    blocks = random_gguf._blocks(kind, 2000, np.random.default_rng(0))
    values = gguf.dequantize(blocks, kind)
    assert abs(values.mean()) < 0.001
    assert values.std() == pytest.approx(random_gguf.SPREAD, rel=0.2)  # MXFP4 has powers of two as scales


def test_the_made_up_tokenizer_merges_tokens_that_exist_into_tokens_that_are_new() -> None:
    made = random_gguf._tokenizer(70_000)
    tokens = made["tokens"]
    assert len({*tokens}) == len(tokens) == len(made["token_type"]) == 70_000
    assert [merge.replace(" ", "") for merge in made["merges"]] == tokens[256:-2]


def test_the_table_shows_medians_with_ranges_and_names_a_program_that_fails() -> None:
    one = {"finite": True, "load": 1.0, "ready": 2.0, "prompt": 50.0, "passes": {"1": [9.0, 11.0]}, "peak_mb": 900.0}
    runs = {"paceline": [one | {"own_mb": 800.0}], "llama.cpp": [{"error": "ValueError: unknown"}]}
    (grid,), lines = sizes.tables("a file", runs, [1])
    assert grid.rows[0][3] == "10.0 (9.0 to 11.0)"
    assert [row[0] for row in grid.rows] == ["paceline"]
    assert lines == ["llama.cpp cannot run this file: ValueError: unknown"]
