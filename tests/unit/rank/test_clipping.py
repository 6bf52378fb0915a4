"""Clipping a step's gradient, sparse parts included."""

import pytest
import torch
from torch import nn

from flodl.rank.clipping import clip_gradient


def pair() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))


def sparse_gradient() -> torch.Tensor:
    """Row 1 is named twice: its gradient is (3, 0)."""
    values = torch.tensor([[1.0, 0.0], [0.0, 4.0], [2.0, 0.0]])
    return torch.sparse_coo_tensor(torch.tensor([[1, 3, 1]]), values, (4, 2), check_invariants=True)


@pytest.mark.parametrize("max_norm", [0.5, 13.0, 100.0])
def test_sparse_gradients_are_clipped_as_their_dense_form_is(max_norm: float) -> None:
    (sparse, other), (dense, twin) = pair(), pair()
    sparse.grad, dense.grad = sparse_gradient(), sparse_gradient().to_dense()
    other.grad, twin.grad = torch.full((3,), 6.0), torch.full((3,), 6.0)

    clip_gradient([sparse, other, nn.Parameter(torch.zeros(1))], max_norm)
    nn.utils.clip_grad_norm_([dense, twin], max_norm)

    assert sparse.grad.is_sparse
    torch.testing.assert_close(sparse.grad.to_dense(), dense.grad)
    torch.testing.assert_close(other.grad, twin.grad)


def test_dense_gradients_are_clipped_by_torch_to_the_bit() -> None:
    (one, other), (dense, twin) = pair(), pair()
    for left, right in ((one, dense), (other, twin)):
        left.grad = torch.randn_like(left)
        right.grad = left.grad.clone()
    clip_gradient(iter([one, other]), 0.3)
    nn.utils.clip_grad_norm_([dense, twin], 0.3)
    assert torch.equal(one.grad, dense.grad)
    assert torch.equal(other.grad, twin.grad)


def test_without_gradients_there_is_nothing_to_clip() -> None:
    clip_gradient([nn.Parameter(torch.zeros(1))], 1.0)
