"""Gated DeltaNet and Mamba-2 on the CPU kernels: torch's values, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.cache.state import Tensors, Tree
from paceline.kernels.cpu.build import library
from paceline.models import recurrent
from paceline.models.config import DeltaNetConfig, Mamba2Config
from paceline.models.mamba import Selective
from paceline.models.recurrent import Convolution, DeltaRule, MatrixState

pytestmark = [pytest.mark.skipif(library() is None, reason="no CPU kernels here"), pytest.mark.usefixtures("kernels")]
CHAIN, TREE = tuple(range(-1, 10)), (-1, 0, 0, 1, 1, 2, 3, 4, 5, 8, 9)


KINDS = {
    "delta": DeltaNetConfig(2, 6, 19, 21, 4),
    "delta, tiled": DeltaNetConfig(2, 6, 19, 21, 4, tiled=True),
    "mamba-2": Mamba2Config(2, 6, 19, 21, 4),
}


def rule(kind: str, seed: int = 0) -> tuple[MatrixState, Tensors, Tensors]:
    """Return a rule, a state in the middle of a text, and 11 rows of inputs. No size is a multiple of a vector."""
    draw, c = torch.Generator().manual_seed(seed), KINDS[kind]
    state = torch.randn(3, c.channels, generator=draw), torch.randn(6, 19, 21, generator=draw)
    entries, gates = torch.randn(11, c.channels, generator=draw), torch.rand(11, 6, generator=draw)
    bias = None if kind == "delta" else torch.randn(c.channels, generator=draw)
    convolution = Convolution(torch.randn(4, c.channels, generator=draw), bias, activated=kind != "delta, tiled")
    if isinstance(c, Mamba2Config):
        return Selective(c, convolution, torch.randn(6, generator=draw)), state, (entries, -2 * gates, gates)
    return DeltaRule(c, convolution), state, (entries, -2 * gates, gates)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_values_equal_torch(kind: str, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one, state, inputs = rule(kind)
    out, updates, end = one.scan(state, None, Tree(parents), inputs, False)
    after = one.apply(state, updates, [0, 1, 3])
    monkeypatch.setattr(recurrent, "scans_natively", lambda matrix: False)
    slow, changes, last = one.scan(state, None, Tree(parents), inputs, False)
    torch.testing.assert_close(out, slow)
    torch.testing.assert_close(updates, changes)
    torch.testing.assert_close(after, one.apply(state, changes, [0, 1, 3]))
    assert (end is None) is (last is None) is (parents == TREE)
    if end and last:
        torch.testing.assert_close(end, last)


@pytest.mark.parametrize("kind", ["delta", "mamba-2"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_keeps_its_bits_in_any_pass(kind: str, threads: int) -> None:
    one, state, inputs = rule(kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone, here = list[Tensor](), state
        path = [0, 1, 3, 6]
        for row in path:
            out, updates, _ = one.scan(here, None, Tree((-1,)), tuple(x[row : row + 1] for x in inputs), False)
            here = one.apply(here, updates, [0])
            alone.append(out)
        tree, updates, _ = one.scan(state, None, Tree(TREE), inputs, False)
        assert torch.equal(tree[path], torch.cat(alone))
        for ours, theirs in zip(one.apply(state, updates, path), here, strict=True):
            assert torch.equal(ours, theirs)
        first, known, _ = one.scan(state, None, Tree(TREE[:5]), tuple(x[:5] for x in inputs), False)
        rest, _, _ = one.scan(state, known, Tree(TREE, 5), tuple(x[5:] for x in inputs), False)
        assert torch.equal(torch.cat([first, rest]), tree), "a tree that grows"
        chain, updates, end = one.scan(state, None, Tree(CHAIN), inputs, False)
        prompt, _, last = one.scan(state, None, Tree(CHAIN), inputs, True)
        assert torch.equal(chain, prompt)
        assert end
        assert last
        for kinds in zip(end, last, one.apply(state, updates, range(11)), strict=True):
            assert torch.equal(kinds[0], kinds[1])
            assert torch.equal(kinds[0], kinds[2])
    finally:
        torch.set_num_threads(before)
