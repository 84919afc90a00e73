"""Reductions and clipping on ranks.

Covers: optim/clip_grad.py, redistribute/execution/rank_steps.py, rules/math/reduction.py,
interop.py.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    full_tensor,
)
from shoal_dtensor.errors import MixedTensorError
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# uneven on 4 ranks, and with empty shards
SHAPES = [(5, 3), (2, 6), (3,), (1,), (2, 2)]
LAYOUTS: dict[tuple[int, ...], list[list[Placement]]] = {
    (4,): [[S0], [S1], [R], [S0], [R]],
    (2, 2): [[S0, S0], [S1, R], [R, R], [R, S0], [S0, S1]],
}
ORDERS = [2.0, 1.0, 3.0, 2.5, 0.0, inf, -inf, -2.0]


def whole(tensor: Any) -> Tensor:
    value: Tensor = tensor.full_tensor()
    return value


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def parameters(shape: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Parameters with gradients, plain and spread."""
    mesh = init_device_mesh("cpu", shape)
    plain: list[Any] = [nn.Parameter(torch.zeros_like(g)) for g in gradients()]
    spread: list[Any] = [
        nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, layout))
        for g, layout in zip(gradients(), LAYOUTS[shape], strict=True)
    ]
    for one, many, g, layout in zip(plain, spread, gradients(), LAYOUTS[shape], strict=True):
        one.grad, many.grad = g.clone(), distribute_tensor(g.clone(), mesh, layout)
    return plain, spread


@pytest.mark.parametrize("foreach", [None, True], ids=["foreach=None", "foreach=True"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@on_ranks(4)
def test_clipping_takes_one_collective(
    shape: tuple[int, ...], order: float, foreach: bool | None
) -> None:
    plain, spread = parameters(shape)
    expected = nn.utils.clip_grad_norm_(plain, 0.5, norm_type=order, foreach=foreach)
    with CommDebugMode() as counted:
        got = nn.utils.clip_grad_norm_(
            spread, 0.5, norm_type=order, error_if_nonfinite=True, foreach=foreach
        )
        value = got.item()
    assert counted.get_total_counts() == 1, counted.get_comm_counts()
    assert value == pytest.approx(expected.item(), rel=1e-13)
    for one, many in zip(plain, spread, strict=True):
        torch.testing.assert_close(many.grad.full_tensor(), one.grad, rtol=1e-13, atol=0)


@on_ranks(4)
def test_a_total_norm_of_nan_is_refused_on_every_rank() -> None:
    _, spread = parameters((4,))
    local = spread[0].grad.to_local()
    if spread[0].device_mesh.get_rank() == 0:
        local[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(spread, 0.5, error_if_nonfinite=True)


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@on_ranks(4)
def test_a_norm_of_norms_is_reduced_in_one_collective_for_each_axis(shape: tuple[int, ...]) -> None:
    plain, spread = parameters(shape)
    with CommDebugMode() as counted:
        rows = [torch.linalg.vector_norm(p.grad, 3, dim=dim) for dim, p in enumerate(spread[:2])]
        total: Any = torch.linalg.vector_norm(torch.cat(rows), 3)
    assert counted.get_total_counts() <= len(shape)
    assert set(total.placements) == {R}
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain[:2]]), 3)
    torch.testing.assert_close(total.to_local(), expected)


@on_ranks(4)
def test_what_enters_a_stack_of_norms_keeps_its_sign() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    norm = torch.linalg.vector_norm(distribute_tensor(torch.arange(5.0), mesh, [S0, S0]))
    other = distribute_tensor(torch.tensor(-3.0), mesh, [R, R])
    stacked: Any = torch.stack([norm, other, -norm])
    torch.testing.assert_close(stacked.full_tensor(), torch.tensor([30**0.5, -3.0, -(30**0.5)]))


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 2.5, inf, -inf], ids=str)
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@on_ranks(4)
def test_gradients_of_norms(shape: tuple[int, ...], order: float) -> None:
    mesh = init_device_mesh("cpu", shape)
    for whole, layout in zip(gradients()[:3], LAYOUTS[shape], strict=False):
        one = whole.clone().requires_grad_()
        many: Any = distribute_tensor(whole.clone(), mesh, layout).requires_grad_()
        for dim, keepdim in ((None, False), (0, True)):
            expected: Any = torch.linalg.vector_norm(one, order, dim, keepdim)
            got: Any = torch.linalg.vector_norm(many, order, dim, keepdim)
            torch.testing.assert_close(got.full_tensor(), expected)
            (expected * expected).sum().backward()
            (got * got).sum().backward()
        torch.testing.assert_close(many.grad.full_tensor(), one.grad)


@on_ranks(4)
def test_a_norm_is_reduced_once_until_it_is_written_to() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x: Any = distribute_tensor(torch.arange(8.0), mesh, [S0]).requires_grad_()
    with CommDebugMode() as counted:
        norm: Any = torch.linalg.vector_norm(x)
        (x / norm).to_local()
        assert norm.isfinite().item() and norm.item() == pytest.approx(140**0.5)
        assert norm.placements == (Partial("norm2"),)
    assert counted.get_total_counts() == 1
    with torch.no_grad(), CommDebugMode() as counted:
        norm.full_tensor().zero_()
        assert norm.item() == pytest.approx(140**0.5), "what full_tensor gave is the caller's own"
        norm.to_local().mul_(2)
        assert norm.item() == pytest.approx(560**0.5)
    assert counted.get_total_counts() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@on_ranks(4)
def test_squares_do_not_overflow_between_ranks(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (4,))
    big = torch.finfo(dtype).max / 4
    for target in ([R], [S0]):
        parts = DTensor.from_local(torch.full((4,), big, dtype=dtype), mesh, [Partial("norm2")])
        whole: Any = parts.redistribute(placements=target).full_tensor()
        torch.testing.assert_close(whole, torch.full((4,), 2 * big, dtype=dtype))
    exact = torch.linalg.vector_norm(torch.arange(64.0).to(dtype))
    got: Any = torch.linalg.vector_norm(distribute_tensor(torch.arange(64.0).to(dtype), mesh, [S0]))
    # each part is rounded once more than the plain norm's are
    eps = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.full_tensor(), exact, rtol=eps, atol=0)


@on_ranks(4)
def test_parts_of_a_norm_given_by_hand() -> None:
    mesh = init_device_mesh("cpu", (4,))
    rank = mesh.get_rank()
    local = torch.tensor([[-3.0, 4.0, 0.0, 0.0][rank]])
    norm = DTensor.from_local(local, mesh, [Partial("norm2")])
    assert norm.full_tensor().item() == 5.0, "the norm of any numbers"
    assert local.item() == [-3.0, 4.0, 0.0, 0.0][rank]
    whole: Any = torch.linalg.vector_norm(norm, 3).full_tensor()
    assert whole.item() == 5.0, "a norm of another order takes the value"


@pytest.mark.parity
@on_ranks(4)
def test_meshes_without_names_to_and_from_torch() -> None:
    from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

    from shoal_dtensor.interop import mesh_from_torch, mesh_to_torch

    mesh = init_device_mesh("cpu", (2, 2))
    peer = mesh_to_torch(mesh)
    assert (peer.mesh.tolist(), peer.mesh_dim_names) == ([[0, 1], [2, 3]], mesh.axis_names)
    assert (
        mesh_from_torch(peer).shape
        == mesh_from_torch(init_torch_mesh("cpu", (2, 2))).shape
        == (2, 2)
    )
    assert mesh_to_torch(init_device_mesh("cpu", (4,))).mesh_dim_names is None


@pytest.mark.parity
@on_ranks(2)
def test_partial_norms_to_and_from_torch() -> None:
    from torch.distributed.tensor import Shard as TorchShard, distribute_tensor as distribute_torch

    from shoal_dtensor.interop import from_torch, mesh_to_torch, to_torch

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0)
    peer: Any = torch.linalg.vector_norm(
        distribute_torch(whole, mesh_to_torch(mesh), [TorchShard(0)])
    )
    mine: Any = from_torch(peer, mesh)
    assert mine.placements == (Partial("norm2"),)
    torch.testing.assert_close(mine.full_tensor(), whole.norm())
    torch.testing.assert_close(to_torch(mine, peer.device_mesh).full_tensor(), whole.norm())


@pytest.mark.parametrize("foreach", [None, False], ids=["foreach=None", "foreach=False"])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, inf], ids=str)
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@on_ranks(4)
def test_clipping_local_parts(shape: tuple[int, ...], order: float, foreach: bool | None) -> None:
    plain, spread = parameters(shape)
    mesh, one = spread[0].device_mesh, nn.Parameter(torch.zeros(3, dtype=torch.float64))
    one.grad = torch.ones(3, dtype=torch.float64)
    late = nn.Parameter(
        distribute_tensor(torch.zeros(2, dtype=torch.float64), mesh, [R] * mesh.ndim)
    )
    late.grad = DTensor.from_local(
        torch.ones(2, dtype=torch.float64), mesh, [Partial("avg")] * mesh.ndim
    )
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
    other = nn.Parameter(distribute_tensor(torch.zeros(6, dtype=torch.float64), flat, [S0]))
    other.grad = distribute_tensor(torch.ones(6, dtype=torch.float64), flat, [S0])
    extra = torch.ones(11, dtype=torch.float64)
    expected_all = torch.cat([*(p.grad.flatten() for p in plain), extra])
    expected = torch.linalg.vector_norm(expected_all, order)
    with CommDebugMode() as counted:
        got = clip_grad_norm_(
            [*spread, one, late, other, nn.Parameter(extra)], 0.5, order, foreach=foreach
        )
    assert type(got) is Tensor and counted.get_total_counts() == 3, (
        "one for each mesh, one for the partial gradient"
    )
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
    factor = min(1.0, 0.5 / (expected.item() + 1e-6))
    for p, q in zip(plain, spread, strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad * factor, rtol=1e-13, atol=0)
    late_grad: Any = late.grad
    assert late_grad.placements == (R,) * mesh.ndim
    for done in (one.grad, late_grad.to_local(), other.grad):
        whole = full_tensor(done)
        torch.testing.assert_close(whole, torch.full_like(whole, factor), rtol=1e-13, atol=0)


@on_ranks(4)
def test_clipping_local_parts_takes_one_collective() -> None:
    plain, spread = parameters((2, 2))
    with CommDebugMode() as counted:
        got = clip_grad_norm_(spread, 0.5)
    assert counted.get_total_counts() == 1
    torch.testing.assert_close(got, nn.utils.clip_grad_norm_(plain, 0.5))
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    spread[0].grad.to_local().fill_(inf if spread[0].device_mesh.get_rank() == 1 else 1.0)
    with pytest.raises(RuntimeError, match=r"of order 2\.0 of the gradients is inf"):
        clip_grad_norm_(spread, 0.5, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="must be positive"):
        clip_grad_norm_(spread, 0.5, 0.0)
    spread[0].grad = torch.ones(spread[0].shape, dtype=spread[0].dtype)
    with pytest.raises(MixedTensorError, match="is a plain tensor of shape"):
        clip_grad_norm_(spread, 0.5)


@pytest.mark.parametrize("placement", [R, S0, Shard(-1)], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)], ids=str)
@on_ranks(4)
def test_weights_of_given_norm(shape: tuple[int, ...], placement: Placement) -> None:
    """Torch's decomposition divides a vector by the norm of all of it.

    It should divide by its elements' absolute values.
    """
    mesh = init_device_mesh("cpu", (4,))
    for dim in (0, len(shape) - 1):
        v = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        g = torch.norm_except_dim(v, 2, dim).mul(3)
        plain = v.clone().requires_grad_(), g.clone().requires_grad_()
        spread = (
            distribute_tensor(v, mesh, [placement]).requires_grad_(),
            distribute_tensor(g, mesh, [R]).requires_grad_(),
        )
        expected, got = torch._weight_norm(*plain, dim), torch._weight_norm(*spread, dim)
        torch.testing.assert_close(whole(got), expected, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(expected.pow(3).sum(), plain)
        for one, many in zip(grads, torch.autograd.grad(got.pow(3).sum(), spread), strict=True):
            torch.testing.assert_close(whole(many), one, rtol=1e-12, atol=1e-12)


@on_ranks(4)
@pytest.mark.parametrize("name", ["mean", "mse_loss", "nll_loss", "multi_margin_loss"])
@pytest.mark.parametrize(("rows", "shape"), [(8, (4,)), (7, (4,)), (8, (2, 2)), (6, (2, 2))])
def test_what_to_local_reads_of_a_mean_is_a_mean(
    name: str, rows: int, shape: tuple[int, ...]
) -> None:
    """Of the local shard along axes with even shards, as torch has it; else of the whole tensor."""
    mesh = init_device_mesh("cpu", shape)
    x = torch.randn(rows, 4, dtype=torch.float64)
    classes = torch.arange(rows) % 4
    target = torch.randn(rows, 4, dtype=torch.float64) if name == "mse_loss" else classes
    placements = [Shard(0)] * len(shape)
    sharded = [
        distribute_tensor(t, mesh, placements, src_data_rank=None)
        for t in (x.requires_grad_(), target)
    ]
    source: Any = sharded[0].detach().requires_grad_()
    reduce = {"mean": lambda x, _: x.mean()}.get(name) or getattr(torch.nn.functional, name)
    expected, got = reduce(x, target), reduce(source, sharded[1])
    assert got.placements[-1] == (Partial("avg") if rows % 4 == 0 else Replicate())
    averaged = [
        Shard(0) if placement.is_partial("avg") else Replicate() for placement in got.placements
    ]
    parts = [t.redistribute(placements=averaged).to_local().detach() for t in sharded]
    torch.testing.assert_close(got.to_local(), reduce(*parts))
    torch.testing.assert_close(got.full_tensor(), expected)
    expected.backward()
    got.backward()
    assert source.grad is not None and x.grad is not None
    torch.testing.assert_close(whole(source.grad), x.grad)
    x.grad = None
