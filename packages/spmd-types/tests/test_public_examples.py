"""Covers: the situations that the public package's documentation shows, in shoal's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as init_mesh_of_torch
from torch.nn import functional as F

import shoal_spmd_types as spmd
from shoal_mesh import DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_spmd_types import I, P, PartitionSpec, R, S, SpmdType, SpmdTypeError, V

TP = 4


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    grid = abstract_mesh((2, TP), ("dp", "tp"))
    with spmd.set_current_mesh(grid):
        yield grid


def typed(*shape: int, grad: bool = False, **types: object) -> Tensor:
    """Return a tensor without memory that has these types by axis."""
    tensor = torch.empty(shape, device="meta", requires_grad=grad)
    spmd.assert_type(tensor, types)
    return tensor


def test_a_sum_over_one_axis_makes_a_partial_tensor_replicated() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        dp = mesh.get_group("dp")
        tp = mesh.get_group("tp")
        with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
            x = spmd.assert_type(torch.randn(4), {dp: R, tp: P})
            y = spmd.all_reduce(x, tp, src=P, dst=R)
            spmd.assert_type(y, {dp: R, tp: R})
            spmd.assert_type(y * y, {"dp": R, "tp": R})
            with pytest.raises(SpmdTypeError, match="all_reduce"):
                torch.mul(x, x)


def test_a_mesh_of_torch_is_a_mesh() -> None:
    with fake_world(8):
        mesh = init_mesh_of_torch("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        group = mesh.get_group("tp")
        named = {"dp": spmd.MeshAxis.of(mesh.get_group("dp")), "tp": spmd.MeshAxis.of(group)}
        for axes in (mesh, named):
            with spmd.set_current_mesh(axes), spmd.typecheck():
                x = spmd.assert_type(torch.randn(4, 4), {"dp": R, "tp": V})
                assert spmd.all_gather(x, group, dst=I).shape == (4, 4, 4)
        assert spmd.MeshAxis.of(4, 1) == named["tp"]
        assert dist.get_world_size() == 8


@pytest.mark.usefixtures("mesh")
def test_megatron_linears_without_sequence_parallelism() -> None:
    with spmd.typecheck():
        x = typed(3, 8, grad=True, dp=V, tp=I)
        up = typed(16 // TP, 8, grad=True, dp=R, tp=V)
        down = typed(8, 16 // TP, grad=True, dp=R, tp=V)
        with pytest.raises(SpmdTypeError, match=r"convert\(x, 'tp', src=I, dst=R\)"):
            F.linear(x, up)
        inside = spmd.invariant_to_replicate(x, "tp")
        spmd.assert_type(inside, {"tp": R})
        hidden = F.linear(inside, up)
        spmd.assert_type(hidden, {"tp": V})
        out = spmd.all_reduce(F.linear(hidden, down), "tp", src=V, dst=I)
        spmd.assert_type(out, {"dp": V, "tp": I})
    with spmd.typecheck(local=False):
        hidden = typed(4, 16 // TP, dp=S(0), tp=S(1))
        product = F.linear(hidden, typed(8, 16 // TP, dp=R, tp=S(1)))
        spmd.assert_type(product, {"dp": S(0), "tp": P})
        spmd.assert_type(spmd.all_reduce(product, "tp", dst=I), {"dp": S(0), "tp": I})


@pytest.mark.usefixtures("mesh")
def test_megatron_linears_with_sequence_parallelism() -> None:
    with spmd.typecheck(local=False):
        x = typed(6, 2, 8, grad=True, dp=S(1), tp=S(0))
        weight = typed(8, grad=True, dp=R, tp=R)
        normed = F.rms_norm(x, (8,), weight)
        spmd.assert_type(normed, {"dp": S(1), "tp": S(0)})
        whole = spmd.all_gather(normed, "tp", src=S(0), dst=R)
        hidden = F.linear(whole, typed(16 // TP, 8, grad=True, dp=R, tp=S(0)))
        spmd.assert_type(hidden, {"dp": S(1), "tp": S(2)})
        product = F.linear(hidden, typed(8, 16 // TP, grad=True, dp=R, tp=S(1)))
        out = spmd.reduce_scatter(product, "tp", dst=S(0))
        spmd.assert_type(out + x, {"dp": S(1), "tp": S(0)})


@pytest.mark.usefixtures("mesh")
def test_the_norm_of_a_sequence_shard_needs_a_gradient_sum_for_an_invariant_weight() -> None:
    with spmd.typecheck():
        x = typed(6, 8, dp=V, tp=V)
        weight = typed(8, grad=True, dp=R, tp=I)
        with pytest.raises(SpmdTypeError, match="I cannot be combined"):
            F.rms_norm(x, (8,), weight)
        out = F.rms_norm(x, (8,), spmd.invariant_to_replicate(weight, "tp"))
        spmd.assert_type(out, {"dp": V, "tp": V})


@pytest.mark.usefixtures("mesh")
def test_local_rules_of_ordinary_operators() -> None:
    with spmd.typecheck():
        r, v, p = (typed(4, dp=R, tp=kind) for kind in (R, V, P))
        i = typed(4, dp=R, tp=I)
        assert spmd.get_axis_local_type(r.sin(), "tp") is R
        assert spmd.get_axis_local_type(i.sin(), "tp") is I
        assert spmd.get_axis_local_type(v.sin(), "tp") is V
        assert spmd.get_axis_local_type(r * v, "tp") is V
        assert spmd.get_axis_local_type(p + p, "tp") is P
        assert spmd.get_axis_local_type(p * r, "tp") is P
        assert spmd.get_axis_local_type(p.sum(), "tp") is P
        wrong: list[Callable[[], Tensor]] = [
            lambda: p * p,
            lambda: p + v,
            lambda: p.sin(),
            lambda: p + r,
            lambda: p + 1,
        ]
        for call in wrong:
            with pytest.raises(SpmdTypeError, match="P"):
                call()


@pytest.mark.usefixtures("mesh")
def test_without_gradients_replicated_and_invariant_tensors_may_be_combined() -> None:
    with spmd.typecheck():
        r = typed(4, grad=True, dp=R, tp=R)
        i = typed(4, dp=R, tp=I)
        assert spmd.get_axis_local_type(r * i, "tp") is R
        with pytest.raises(SpmdTypeError, match="R and I cannot be combined"):
            r * typed(4, grad=True, dp=R, tp=I)


@pytest.mark.usefixtures("mesh")
def test_partition_specs_order_the_axes_of_a_dim() -> None:
    with spmd.typecheck(local=False):
        x = torch.empty(2, 3, 8, device="meta")
        spmd.assert_type(x, {}, PartitionSpec("dp", None, "tp"))
        assert repr(spmd.get_partition_spec(x)) == "PartitionSpec(dp, None, tp)"
        same = SpmdType({}, PartitionSpec("dp", None, "tp"))
        z = spmd.assert_type(torch.empty(2, 3, 8, device="meta"), same)
        assert spmd.get_partition_spec(z) == spmd.get_partition_spec(x)
        y = spmd.assert_type(torch.empty(2, 3, 8, device="meta"), {"dp": S(0), "tp": S(2)})
        assert spmd.get_partition_spec(x) == spmd.get_partition_spec(y)
        with pytest.raises(SpmdTypeError, match="order"):
            spmd.assert_type(torch.empty(8, device="meta"), {"dp": S(0), "tp": S(0)})
        z = torch.empty(8, device="meta")
        spmd.assert_type(z, PartitionSpec(("dp", "tp")))
        with pytest.raises(SpmdTypeError, match="innermost"):
            spmd.all_gather(z, "dp", src=S(0), dst=R)
        spmd.assert_type(spmd.all_gather(z, "tp", src=S(0), dst=R), {"dp": S(0), "tp": R})


@pytest.mark.usefixtures("mesh")
def test_repeated_assertions_refine_and_do_not_contradict() -> None:
    def fresh(*types: Any) -> Tensor:
        tensor: Tensor = spmd.assert_type(torch.empty(4, 4, device="meta"), *types)
        return tensor

    with spmd.typecheck():
        for first, second in (
            ({"tp": V}, {"tp": S(0)}),
            ({"tp": S(0)}, {"tp": V}),
            ({"tp": S(0)}, {"dp": S(1)}),
            ({"dp": S(0)}, PartitionSpec("dp", "tp")),
            (PartitionSpec("dp", None), PartitionSpec("dp", "tp")),
        ):
            spmd.assert_type(fresh(first), second)
        for first, second in (
            ({"tp": S(0)}, {"tp": S(1)}),
            ({"tp": R}, {"tp": I}),
            ({"tp": S(0)}, {"dp": S(0)}),
            ({"dp": S(0)}, PartitionSpec(("dp", "tp"), None)),
            (PartitionSpec(("dp", "tp"), None), {"dp": S(1)}),
        ):
            with pytest.raises(SpmdTypeError):
                spmd.assert_type(fresh(first), second)


@pytest.mark.usefixtures("mesh")
def test_a_mesh_for_experts_over_the_same_ranks() -> None:
    experts = abstract_mesh((8,), ("ep",))
    with spmd.typecheck():
        x = typed(16, 8, grad=True, dp=V, tp=V)
        with spmd.set_current_mesh(experts):
            sent = spmd.all_to_all(spmd.reinterpret_mesh(x, experts), "ep", src=S(0), dst=S(0))
            out = sent * 2
            assert spmd.get_local_type(out) == {spmd.normalize_axis("ep"): V}
        with pytest.raises(SpmdTypeError, match="reinterpret_mesh"):
            spmd.reinterpret_mesh(typed(4, dp=R, tp=V), experts)


@pytest.mark.usefixtures("mesh")
def test_typing_is_off_outside_of_the_block_and_parameters_keep_their_types() -> None:
    x = spmd.assert_type(torch.empty(4, device="meta"), {"dp": R, "tp": R})
    assert not spmd.has_local_type(x)
    weight = nn.Parameter(torch.empty(4, device="meta"))
    spmd.assert_type(weight, {"dp": R, "tp": I})
    assert spmd.has_local_type(weight)
    assert not spmd.TYPE_CHECKING
    with spmd.typecheck():
        assert spmd.TYPE_CHECKING
        with spmd.no_typecheck():
            assert not spmd.is_type_checking()
            assert not spmd.has_local_type(weight * 2)
        assert spmd.get_axis_local_type(weight * 2, "tp") is I


@pytest.mark.usefixtures("mesh")
def test_tensors_without_types_are_errors_in_strict_mode_only() -> None:
    x = torch.empty(4, device="meta").uniform_()
    with spmd.typecheck():
        y = typed(4, dp=R, tp=R)
        with pytest.raises(SpmdTypeError, match="does not have a type"):
            x + y
        with spmd.typecheck(strict_mode="permissive"):
            assert not spmd.has_local_type(x + y)
    with pytest.raises(SpmdTypeError, match="permissive"), spmd.typecheck("loose"):
        pass


def test_names_that_are_left_out_say_what_to_use() -> None:
    for name in ("set_dist", "traceback_filtering"):
        with pytest.raises(AttributeError, match=r"shoal_mesh|line of the program"):
            getattr(spmd, name)
