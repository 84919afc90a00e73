"""Covers: comm_debug.py, module_places.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal_mesh import (
    CommDebugMode,
    DeviceMesh,
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    broadcast,
    init_device_mesh,
    reduce_scatter,
    reduce_scatter_v,
    scatter,
)
from shoal_mesh.testing import fake_world

OPS = torch.ops._c10d_functional


@pytest.fixture
def mesh() -> Any:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_each_collective_counts_once_whatever_runs_it(mesh: DeviceMesh) -> None:
    x = torch.ones(4, 4)
    with CommDebugMode() as comm:
        all_reduce(x, (mesh, "tp"), "avg")
        all_gather(x, (mesh, "tp"), 1)
        all_gather_v(torch.ones(3), (mesh, "tp"), [3, 2])
        reduce_scatter(x.to(torch.int16), (mesh, "tp"))
        reduce_scatter_v(torch.ones(5), (mesh, "tp"), [5, 0])
        all_to_all(x, (mesh, "tp"), 0, 1)
        broadcast(x, (mesh, ("dp", "tp")))
        scatter([x] * 2, (mesh, "dp"), out=torch.empty(4, 4))
        all_reduce(x, (init_device_mesh("cpu", (1,)), 0))  # one rank: nothing is sent
    assert comm.get_comm_counts() == {
        OPS.all_reduce: 1,
        OPS.all_gather_into_tensor: 2,
        OPS.reduce_scatter_tensor: 2,
        OPS.all_to_all_single: 1,
        OPS.broadcast: 1,
        torch.ops.c10d.scatter_: 1,
    }
    assert comm.get_total_counts() == 8
    assert comm.get_bytes()["dp",] == 128
    assert comm.get_bytes()["dp", "tp"] == 64
    assert [r.op for r in comm.trace][:2] == ["all_reduce", "all_gather_into_tensor"]
    assert comm.trace[0].seconds > 0


def test_counts_are_found_by_every_name_of_a_collective(mesh: DeviceMesh) -> None:
    with CommDebugMode() as comm:
        all_reduce(torch.ones(4), (mesh, "tp"))
    counts, legacy, c10d = comm.get_comm_counts(), torch.ops.c10d_functional, torch.ops.c10d
    assert (
        counts[legacy.all_reduce] == counts[c10d.allreduce_] == counts.get(legacy.all_reduce) == 1
    )
    assert (
        legacy.all_reduce in counts
        and legacy.broadcast not in counts
        and counts[c10d.broadcast_] == 0
    )
    assert counts == {OPS.all_reduce: 1} == counts == {legacy.all_reduce: 1} and counts != {
        legacy.all_reduce: 2
    }
    assert repr(comm) == "CommDebugMode(get_total_counts()=1)"


def test_counts_of_a_module_are_those_of_the_modules_inside_too(mesh: DeviceMesh) -> None:
    class Reduce(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return all_reduce(x, (mesh, "tp"))

    with CommDebugMode() as comm:
        torch.nn.Sequential(torch.nn.ReLU(), Reduce())(torch.ones(2))
    counted = {
        path: passes["forward"][OPS.all_reduce] for path, passes in comm.comm_module_counts.items()
    }
    assert counted == {"Global": 1, "Sequential": 1, "Sequential.1": 1}


class Reduces(torch.autograd.Function):
    """The identity, with a collective in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0], (ctx.mesh, "tp")), None


class Layer(torch.nn.Module):
    """A Linear whose backward reduces."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        reduced: Any = Reduces.apply(x, self.mesh)  # type: ignore[no-untyped-call]  # torch
        out: Tensor = self.linear(reduced)
        return out


def modules_of_backward(comm: CommDebugMode) -> list[str]:
    return [record.module for record in comm.trace if record.backward]


def test_backwards_that_ask_for_leaves_have_modules(mesh: DeviceMesh) -> None:
    """Torch's module tracker raised in `torch.autograd.grad` of a leaf."""
    model = torch.nn.Sequential(Layer(mesh), torch.nn.Sequential(torch.nn.ReLU(), Layer(mesh)))
    x = torch.ones(3, 2, requires_grad=True)
    expected = ["Sequential.1.1", "Sequential.0"]
    with CommDebugMode() as comm:
        loss = model(x).sum()
        assert torch.autograd.grad(loss, [*model.parameters(), x], retain_graph=True)
    assert modules_of_backward(comm) == expected
    # a later block does not know the modules of a forward before it
    with CommDebugMode() as comm:
        loss.backward()
    assert modules_of_backward(comm) == ["Global", "Global"]
    with CommDebugMode() as comm:
        model(x).sum().backward()
        all_reduce(x.detach(), (mesh, "tp"))
    assert modules_of_backward(comm) == expected
    assert comm.trace[-1].module == "Global"


@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_that_are_computed_again(mesh: DeviceMesh, reentrant: bool) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Layer(mesh)
            self.last = Layer(mesh)

        def forward(self, x: Tensor) -> Any:
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            return checkpoint(
                self.last, x + all_reduce(x.detach(), (mesh, "tp")), use_reentrant=reentrant
            )

    x = torch.ones(3, 2, requires_grad=True)
    with CommDebugMode() as comm:
        Outer()(x * 1).sum().backward()
    assert [record.module for record in comm.trace] == ["Outer", "Outer.last", "Outer.first"]


def test_a_backward_inside_of_a_forward_has_its_own_modules(mesh: DeviceMesh) -> None:
    class Trainer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(mesh)

        def forward(self, x: Tensor) -> None:
            self.layer(x).sum().backward()
            all_reduce(x.detach(), (mesh, "tp"))

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    model = Trainer()
    with CommDebugMode() as comm:
        model(torch.ones(3, 2, requires_grad=True))
        # a forward that raises leaves no module behind
        handle = model.layer.linear.register_forward_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.ones(3, 2))
        handle.remove()
        all_reduce(torch.ones(2), (mesh, "tp"))
    assert [record.module for record in comm.trace] == ["Trainer.layer", "Trainer", "Global"]


def test_collectives_of_others_count_too(mesh: DeviceMesh) -> None:
    x = torch.ones(4)
    with CommDebugMode() as comm:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(4) for _ in range(4)], x)
        dist.reduce_scatter(torch.empty(1), list(torch.split(x, 1)))
        dist.broadcast(x, 0)
        dist.barrier()
        funcol.all_reduce(x, "sum", mesh.get_group("tp")).add(1)
    assert comm.get_comm_counts() == {
        OPS.all_reduce: 2,
        OPS.all_gather_into_tensor: 1,
        OPS.reduce_scatter_tensor: 1,
        OPS.broadcast: 1,
    }
    assert comm.trace[0].size == 4
    assert comm.trace[0].nbytes == 16
    assert comm.trace[-1].axes == (mesh.comm("tp").name,)


class _Wrapped(Tensor):
    """A tensor subclass whose ops communicate, like the DTensor above this layer."""

    placements = ("all of it",)
    seen = 0

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.whole = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub is that of an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.seen += 1
        plain = [a.whole if isinstance(a, cls) else a for a in args]
        dist.all_reduce(plain[0])
        out = func(*plain)
        return cls(out) if isinstance(out, Tensor) else out


def test_subclasses_pass_and_what_they_call_is_seen(mesh: DeviceMesh) -> None:
    with CommDebugMode() as comm:
        out = _Wrapped(torch.ones(2)) + 1
    assert isinstance(out, _Wrapped)
    assert comm.get_comm_counts() == {OPS.all_reduce: 1}
