import pytest
import torch
from torch import nn

from paceline.train.muon import BLOCK, Muon, orthogonalise


def test_rows_become_about_orthonormal() -> None:
    x = orthogonalise(torch.randn(24, 100, generator=torch.Generator().manual_seed(0))).float()
    values = torch.linalg.svdvals(x)
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("shape", [(BLOCK + 40, 60), (40, 90), (90, 40)])
def test_every_block_of_rows_gets_a_step_of_adamws_size(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(shape))
    matrix.grad = torch.randn(shape)
    Muon([matrix], 0.1).step()
    for part, grad in zip(matrix.split(BLOCK), matrix.grad.split(BLOCK), strict=True):
        assert part.square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.2)
        u, _, v = torch.linalg.svd(grad, full_matrices=False)
        direction = -(u @ v) / (u @ v).norm() * part.norm()
        assert (part - direction).norm() < 0.3 * part.norm()


def test_the_state_goes_on_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(6, 9) for _ in range(4)]
    ends = []
    for stop in (None, 2):
        matrix = nn.Parameter(torch.ones(6, 9))
        optimizer = Muon([matrix], 0.1)
        for i, grad in enumerate(grads):
            if i == stop:
                state = optimizer.state_dict()
                optimizer = Muon([matrix], 0.1)
                optimizer.load_state_dict(state)
            matrix.grad = grad.clone()
            optimizer.step()
        ends.append(matrix.detach().clone())
    assert torch.equal(*ends)


def test_the_momentum_is_a_mean_of_gradients_that_favours_recent_gradients() -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.ones(6, 9))
    optimizer = Muon([matrix], 0.1, momentum=0.75)
    first, second = torch.randn(6, 9), torch.randn(6, 9)
    for grad in (first, second):
        matrix.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[matrix]["momentum"], 0.75 * 0.25 * first + 0.25 * second)
