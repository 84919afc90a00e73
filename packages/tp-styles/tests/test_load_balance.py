"""The loss of all tokens on ranks that each have some, against one device.

Covers: losses/functional.py.
"""

from __future__ import annotations

import pytest
import torch

from shoal_mesh import all_reduce
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import LayoutError
from shoal_tp_styles.losses import load_balance


@on_ranks(4)
def test_the_loss_and_its_gradient_are_those_of_all_tokens() -> None:
    comm = all_ranks().comm(0)
    logits = torch.randn(9, 5, dtype=torch.double)
    router = torch.randn(5, 5, dtype=torch.double, requires_grad=True)
    mine = router.detach().clone().requires_grad_()
    sizes = [4, 0, 3, 2]
    rows = logits.split(sizes)[comm.rank]  # type: ignore[no-untyped-call]  # torch
    losses = []
    for weight, tokens, along in ((router, logits, None), (mine, rows, comm)):
        probabilities = (tokens @ weight).softmax(-1)
        losses.append(load_balance(probabilities, probabilities.topk(2, -1).indices, along))
        losses[-1].backward()  # type: ignore[no-untyped-call]  # torch
    torch.testing.assert_close(losses[1], losses[0])
    assert mine.grad is not None
    # as data parallelism averages
    torch.testing.assert_close(all_reduce(mine.grad, comm) / 4, router.grad)


def test_an_even_router_costs_one_and_tokens_must_be_the_same() -> None:
    assert load_balance(torch.full((2, 2, 4), 0.25), torch.tensor([[[0], [1]], [[2], [3]]])) == 1
    with pytest.raises(LayoutError, match=r"got \(2, 4\) and \(3, 1\)"):
        load_balance(torch.ones(2, 4), torch.zeros(3, 1, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_count_all_choices(dtype: torch.dtype) -> None:
    # In bfloat16 the count of an expert stopped at 256, in float16 at 2,048.
    chosen = torch.cat([torch.zeros(3000, 1), torch.ones(1000, 1)]).long()
    probabilities = torch.tensor([[0.75, 0.25]], dtype=dtype).expand(4000, 2)
    loss = load_balance(probabilities, chosen)
    assert loss.dtype == dtype and loss.item() == 2 * (0.75 * 0.75 + 0.25 * 0.25)
