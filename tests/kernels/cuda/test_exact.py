"""`load(..., exact=True)`: the exact text, or an error with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.checkpoints import loader
from paceline.errors import InvalidOption
from paceline.kernels.linear import linear, linear_layers_from
from paceline.models.cuda_decoder import DeviceDecoder
from paceline.models.decoder import Decoder
from paceline.testing import TINY, random_tensors
from tests.support.toys import toy_model

CUDA = torch.device("cuda")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collect the loader's arguments. The loader returns a toy."""
    calls: list[bool] = []

    def load_model(*args: Any, exact: bool = False, **options: Any) -> Any:
        calls.append(exact)
        return toy_model()

    monkeypatch.setattr("paceline.checkpoints.targets.load_model", load_model)
    return calls


def test_it_is_asked_of_the_target_and_held_to_the_self_check(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.engine.guarantee", lambda target: "bits")
    assert paceline.load("toy", drafter=None, exact=True).guarantee == "bits"
    monkeypatch.setattr("paceline.engine.engine.guarantee", lambda target: "rounding")
    with pytest.raises(InvalidOption, match=r"in this model on cpu, logits depend on the batch composition.*bfloat16"):
        paceline.load("toy", drafter=None, exact=True)
    assert paceline.load("toy", drafter=None).guarantee == "rounding"
    assert asked == [True, True, False]


def test_only_cuda_uses_different_kernels_for_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader._decoder(True, torch.device("cpu")) is Decoder
    assert loader._decoder(False, CUDA) is Decoder
    monkeypatch.setattr(loader, "has_triton", lambda: True)
    made = loader._decoder(True, CUDA)
    assert (made.func, made.keywords) == (DeviceDecoder, {"exact": True})  # type: ignore[attr-defined]
    monkeypatch.setattr(loader, "has_triton", lambda: False)
    with pytest.raises(InvalidOption, match="pip install triton"):
        loader._decoder(True, CUDA)


class Marked:
    """A product with a recognisable type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight


def test_the_innermost_block_decides_the_product() -> None:
    weight = torch.eye(3)
    with linear_layers_from(Marked):  # type: ignore[arg-type]
        assert isinstance(linear(weight), Marked)
    assert not isinstance(linear(weight), Marked)


def test_an_exact_decoder_has_no_other_product(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def count(weight: Tensor, bias: Tensor | None) -> Marked:
        made.append(tuple(weight.shape))
        return Marked(weight, bias)

    monkeypatch.setattr("paceline.models.cuda_decoder.FixedTile", count)
    monkeypatch.setattr("paceline.kernels.linear._Plain", None)
    monkeypatch.setattr("paceline.kernels.linear._Packed", None)
    DeviceDecoder(TINY, random_tensors(TINY), torch.bfloat16, torch.device("cpu"), exact=True, capture=None)
    assert len(made) == 4 * TINY.layers + 1
