"""Latent attention whose products by head run on the CPU kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.engine.self_check import chunk_invariant, guarantee
from paceline.kernels.cpu.build import library
from paceline.models.config import AttentionConfig, LatentConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.types import Draft, Want
from paceline.verify.tree import pack
from tests.support.latents import latent_tensors
from tests.support.native_models import BASE, CPU, text, whole

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]
LATENT = LatentConfig(rank=32, query_rank=20, plain=12, rotary=8, value=16)
CONFIG = replace(BASE, kv_heads=1, head_dim=40, attention=AttentionConfig(latent=LATENT), rope=RopeConfig())
PRECISION = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}


def tensors() -> dict[str, Tensor]:
    return {name: x.bfloat16().float() for name, x in latent_tensors(CONFIG, 1).items()}


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_logits_are_exact_up_to_rounding_and_bits_do_not_depend_on_the_pass(dtype: torch.dtype) -> None:
    target = Decoder(CONFIG, tensors(), dtype, CPU)
    assert target.rows_are_independent
    exact = whole(Decoder(CONFIG, tensors(), torch.float64, CPU), text(40))[0]
    ours = whole(target, text(40))[0]
    assert float((ours - exact).norm() / exact.norm()) < PRECISION[dtype]
    assert guarantee(target) == "bits"
    assert chunk_invariant(target, "bits")


def test_a_plain_pass_has_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = Decoder(CONFIG, tensors(), torch.bfloat16, CPU), list[int]()
    cache, norm = target.new_cache(), target.norm
    monkeypatch.setattr(target, "norm", lambda x: seen.append(x.shape[1]) or norm(x))
    target.forward(pack([7], [Draft()], [cache.acquire(4)], [0], CPU), cache, Want())
    assert seen == [1]
