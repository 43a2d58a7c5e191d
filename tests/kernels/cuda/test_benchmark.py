"""`benchmarks/gpu.py` without a GPU: every step with toys, and the equality of the peers' work. No timings."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.testing import run

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
gpu, models = import_module("gpu"), import_module("gpu_models")
CPU = torch.device("cpu")
PROMPT = [5, 9, 3, 7]


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kernels.linear", "kernels.cpu.attention", "models.norms"):  # as on a CUDA device
        monkeypatch.setattr(f"paceline.{module}.library", lambda: None)
    small = ["--context", "12", "--tokens", "24", "--repeats", "1", "--rows", "1", "8", "--taus", "1", "3"]
    assert gpu.main(["--tiny", "--models", "qwen2.5-7b", "--no-peers", "--out", str(tmp_path), *small]) == 0
    (path,) = tmp_path.glob("*-gpu-tiny.json")
    result = json.loads(path.read_text())
    assert result["failed"] == []
    assert result["provenance"]["settings"]["device"] == "no GPU"
    parts = result["parts"]["qwen2.5-7b"]
    assert parts["graphs: texts"]["1.0"]["tokens_per_round"] == 1.0
    assert parts["graphs: texts"]["3.0"]["tokens_per_round"] > 1.5
    assert parts["graphs: passes"]["graph_ms"]["8"] > 0
    assert parts["eager: passes"]["graph_ms"]["8"] is None
    assert "| qwen2.5-7b, graphs, tau 3.0 |" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_failing_part_is_named_and_the_others_continue(tmp_path: Path) -> None:
    part = gpu.Run(gpu.options(["--tiny", "--out", str(tmp_path)]), CPU, torch.float32)
    part.part("a", "wrong", lambda: 1 / 0)
    part.part("a", "right", lambda: 7)
    part.args.minutes = -1
    part.part("a", "late", lambda: 8)
    assert part.parts == {"a": {"right": 7}}
    assert part.failed == ["a, wrong: ZeroDivisionError: ['division by zero']", "a, late: no time left"]


@pytest.mark.parametrize("tau", [1.0, 2.0, 3.5])
def test_a_drafter_has_the_requested_acceptance(tau: float) -> None:
    weights = models.RandomWeights(models.tiny(models.LLAMA_8B), torch.float32, CPU)
    target = Decoder(weights.config, weights, torch.float32, CPU)
    text = torch.randint(97, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    steered = models.Steered(target, text)
    oracle = gpu.Oracle(text, models.accuracy_for(tau, gpu.CHAIN), 97)
    tokens, _, stats = run(steered, text[:4], Sampling(max_new_tokens=300), oracle, gpu.DraftBudget.chain(gpu.CHAIN))
    assert tokens == text[4:304], "the text that was asked for, whatever is drafted"
    assert stats.tokens_per_round == pytest.approx(tau, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama-8b", "qwen2.5-7b"])
def test_peers_decode_the_same_model(shape: str) -> None:
    pytest.importorskip("transformers")
    peers = import_module("gpu_peers")
    raw = models.tiny(models.SHAPES[shape])
    weights = models.RandomWeights(raw, torch.float32, CPU)
    ours = run(Decoder(weights.config, weights, torch.float32, CPU), PROMPT, Sampling(max_new_tokens=16))[0]
    assert peers.BareLoop(weights, 24, compiled=False)(PROMPT, 16) == ours
    assert peers.transformers_static(raw, weights)(PROMPT, 16) == ours


def test_the_shapes_equal_the_published_models() -> None:
    """Parameters: 8,030,261,248 and 7,615,616,512."""
    for shape, count in (("llama-8b", 8_030_261_248), ("qwen2.5-7b", 7_615_616_512)):
        weights = models.RandomWeights(models.SHAPES[shape], torch.bfloat16, torch.device("meta"))
        assert sum(torch.Size(size).numel() for size in weights.shapes.values()) == count
    embedding = 152064 * 3584
    per_token = 2 * 28 * 4 * 128
    assert weights.read_bytes(100) == 2 * (count - embedding + 100 * per_token)
