"""Covers: owned_shards.py: matrices that one rank has each."""

# mypy: allow-untyped-calls
# Torch gives `backward` no types.

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_data_parallel import LayoutError, fully_shard, owned_shards
from shoal_dtensor import Shard
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import counts, on_ranks


class StackedExperts(nn.Module):
    """Three dense layers, and five experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: Any = {"dtype": torch.float64}
        self.inside = nn.Linear(6, 8, **options)
        self.experts = nn.Parameter(torch.randn(5, 8, 8, **options) / 4)
        self.outside = nn.Linear(8, 6, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(x)
        for expert in self.experts:
            hidden = hidden + torch.tanh(hidden @ expert)
        return self.outside(hidden)  # type: ignore[no-any-return]  # modules are untyped


def rows_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, 6, dtype=torch.float64, generator=generator)


def muon(model: Any) -> Any:
    """Muon of all matrices, and of the experts, which torch's constructor does not take."""
    optimizer = torch.optim.Muon([model.inside.weight, model.outside.weight], lr=0.1)
    optimizer.add_param_group({"params": [model.experts]})
    return optimizer


def test_matrices_are_assigned_by_memory() -> None:
    shapes = [(4, 4), (10, 10), (6, 6), (5, 5), (7,), (4, 2, 2)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    placement_of = owned_shards(params, 2)
    sizes = [placement_of(param) for param in params[:4]]
    # the vector and the stack leave 12 and 11 elements; 100 on rank 1, and 36, 25 and 16 on rank 0
    assert sizes == [Shard(0, sizes=s) for s in ((4, 0), (0, 10), (6, 0), (5, 0))]
    assert [placement_of(param) for param in params[4:]] == [Shard(0), Shard(0)]
    assert placement_of(nn.Parameter(torch.zeros(3, 3))) is None


def test_memory_of_stacks_counts() -> None:
    """One expert is on the first rank, so the first matrix goes to the second."""
    stack, matrix = nn.Parameter(torch.zeros(1, 9, 9)), nn.Parameter(torch.zeros(2, 2))
    assert owned_shards([stack, matrix], 2)(matrix) == Shard(0, sizes=(0, 2))


@pytest.mark.parametrize("ranks", [0, -1, None, 2.0])
def test_a_wrong_number_of_ranks_is_an_error(ranks: Any) -> None:
    with pytest.raises(LayoutError, match="positive number of ranks"):
        owned_shards([], ranks)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_owned_matrices_train_as_in_one_process_and_muon_sends_nothing(
    shape: tuple[int, ...],
) -> None:
    mesh = init_device_mesh("cpu", shape)
    plain, model = StackedExperts(), StackedExperts()
    place = owned_shards(model.parameters(), shape[-1])
    fully_shard(model, mesh, shard_placement_fn=place)
    sharded = muon(model)
    experts = [nn.Parameter(expert.clone()) for expert in plain.experts.detach()]
    whole: Any = torch.optim.Muon([plain.inside.weight, plain.outside.weight, *experts], lr=0.1)
    rank = torch.distributed.get_rank()
    for _ in range(2):
        losses = [plain(rows_of(r)).square().mean() for r in range(4)]
        plain.zero_grad()
        torch.stack(losses).mean().backward()
        assert plain.experts.grad is not None
        model.zero_grad()
        model(rows_of(rank)).square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            summed = one.grad.full_tensor()  # type: ignore[union-attr]  # a DTensor
            torch.testing.assert_close(summed, other.grad)
            # the update is computed in bfloat16, which enlarges differences in the last bits
            other.grad = summed
        for expert, grad in zip(experts, plain.experts.grad, strict=True):
            expert.grad = grad
        whole.step()
        with CommDebugMode() as counted:
            sharded.step()
        assert not counts(counted)
        with torch.no_grad():
            plain.experts.copy_(torch.stack([*experts]))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other)  # type: ignore[attr-defined]  # a DTensor
