"""Collectives on process groups that are written in Python, whichever names they have.

Covers: _torch.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import shoal_mesh as sm
from shoal_mesh import Comm
from shoal_mesh._torch import PrefixStore, Store, call_of
from shoal_mesh.errors import BackendError
from shoal_mesh.testing import fake_world, on_ranks

OLD = {
    "_allgather_base": "_allgather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "alltoall_base": "alltoall_base",
}
NEW = dict(
    zip(
        ("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
        OLD.values(),
        strict=True,
    )
)
LISTS = {  # torchft's
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "alltoall_base": "alltoall_base",
}
SHARED = ("allreduce", "allgather", "broadcast", "barrier", "send", "recv")


class GlooInPython(dist.ProcessGroup):
    """A group that passes calls on to gloo, and counts them."""

    called: Counter[str]
    label: ClassVar[str]

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub takes a store
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.called = Counter()
        self._size, self._name = size, ""

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return self.label

    @property
    def group_name(self) -> str:  # type: ignore[override]  # the stub wants torch's kind of str
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


def passing_on(name: str, inner: str) -> Callable[..., Any]:
    def call(self: GlooInPython, *args: Any, **options: Any) -> Any:
        self.called[name] += 1
        if "coalesced" in name:
            ([out], [source], *more) = args
            args = (out, source, *more)
        return getattr(self.inner, inner)(*args, **options)

    return call


def written(kind: str, names: dict[str, str]) -> type[GlooInPython]:
    body: dict[str, Any] = {outer: passing_on(outer, inner) for outer, inner in names.items()}
    body |= {name: passing_on(name, name) for name in SHARED}
    return type(kind, (GlooInPython,), body | {"label": kind})


KINDS = {
    kind: written(kind, names)
    for kind, names in (("gloo_old", OLD), ("gloo_new", NEW), ("gloo_lists", LISTS))
}


@contextmanager
def default_group(kind: str) -> Iterator[GlooInPython]:
    """A default group written in Python in place of the pool's, which has gloo again afterwards."""
    if kind not in dist.Backend.backend_list:
        dist.Backend.register_backend(kind, KINDS[kind], devices=["cpu"])
    store = dist.distributed_c10d._get_default_store()
    _begin(kind, PrefixStore(kind, store))
    group = dist.group.WORLD
    assert isinstance(group, GlooInPython)
    try:
        yield group
    finally:
        _begin("gloo", PrefixStore(f"after {kind}", store))


def _begin(backend: str, store: Store) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_collectives_run_on_groups_written_in_python(kind: str) -> None:
    with default_group(kind) as world:
        _try_collectives()
        assert world.called["allreduce"] >= 3 and world.called["broadcast"] == 1
        assert all(
            world.called[name]
            for name in {"gloo_old": OLD, "gloo_new": NEW, "gloo_lists": LISTS}[kind]
        )


def _try_collectives() -> None:
    mesh = sm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    own = torch.arange(4.0, dtype=torch.float64) + 10 * rank
    for along, peers in (
        ((mesh, "tp"), [rank - rank % 2, rank - rank % 2 + 1]),
        ((mesh, ("dp", "tp")), [0, 1, 2, 3]),
    ):
        everyone = torch.stack(
            [torch.arange(4.0, dtype=torch.float64) + 10 * peer for peer in peers]
        )
        place, count = peers.index(rank), len(peers)
        check(sm.all_reduce(own, along), everyone.sum(0))
        check(sm.all_gather(own, along), everyone.flatten())
        check(sm.reduce_scatter(own, along), everyone.sum(0).chunk(count)[place])
        check(
            sm.all_to_all(own, along, 0, 0),
            torch.cat([row.chunk(count)[place] for row in everyone]),
        )
        check(sm.broadcast(own, along, 1), everyone[1])
        pending = sm.all_reduce(own, along, async_op=True)
        check(pending.wait(), everyone.sum(0))
        uneven = torch.full((rank + 1,), float(rank), dtype=torch.float64)
        gathered = torch.cat(
            [torch.full((peer + 1,), float(peer), dtype=torch.float64) for peer in peers]
        )
        check(sm.all_gather_v(uneven, along, [peer + 1 for peer in peers]), gathered)
        [summed] = sm.all_reduce_coalesced([own], along)
        check(summed, everyone.sum(0))
        check(
            sm.permute(own, along, [(place + 1) % count for place in range(count)]),
            everyone[place - 1],
        )


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_torchs_calls_reach_the_groups_of_a_mesh(kind: str) -> None:
    with default_group(kind):
        mesh = sm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group, rank = mesh.get_group("tp"), dist.get_rank()
        assert type(group) is KINDS[kind]
        first, peer = rank - rank % 2, rank + 1 - 2 * (rank % 2)
        dist.barrier(group=group)
        got = torch.empty(2)
        for step in ("send", "recv") if rank == first else ("recv", "send"):
            if step == "send":
                dist.send(torch.full((2,), float(rank)), peer, group)
            else:
                dist.recv(got, peer, group)
        check(got, torch.full((2,), float(peer)))
        names = [f"rank {rank}"]
        dist.broadcast_object_list(names, src=first, group=group)
        assert names == [f"rank {first}"]
        assert group.called["barrier"] == group.called["send"] == group.called["recv"] == 1


def _program(x: Tensor, comm: Comm, tp: dist.ProcessGroup) -> dict[str, Tensor]:
    return {
        "sum": sm.all_reduce(x, comm),
        "gathered": sm.all_gather(x, comm, 1),
        "uneven": sm.all_gather_v(x[: 1 + comm.rank], comm, [1, 2]),
        "scattered": sm.reduce_scatter(x, comm, 1),
        "averages": sm.reduce_scatter(x, comm, 0, "avg"),
        "largest": sm.reduce_scatter(x, comm, 0, "max"),
        "exchanged": sm.all_to_all(x, comm, 1, 0),
        "permuted": sm.permute(x, comm, [1, 0]),
        "sent": sm.broadcast(x, comm, 1),
        "torch's": functional.all_reduce(x, "sum", tp) * 1,
    }


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4, timeout=120)
def test_compiled_code_runs_on_groups_written_in_python(kind: str) -> None:
    with default_group(kind):
        mesh = sm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.arange(8.0, dtype=torch.float64).view(4, 2) + 10.0 * dist.get_rank() ** 2
        # A graph reads its group each time that it runs, so the group is asked for inside.
        expected = _program(x, mesh.comm("tp"), mesh.get_group("tp"))
        compiled = torch.compile(
            lambda x: _program(x, mesh.comm("tp"), mesh.get_group("tp")),
            backend="eager",
            fullgraph=True,
        )
        found = compiled(x)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


FEW = written("gloo_few", {})


@on_ranks(2)
def test_a_call_that_a_group_has_not_is_named() -> None:
    with default_group("gloo_old"):
        dist.Backend.register_backend("gloo_few", FEW, devices=["cpu"])
        comm = Comm.over(dist.new_group([0, 1], backend="gloo_few"), ("few",), (0, 1))
        x = torch.ones(2)
        check(sm.all_reduce(x, comm), x * 2)
        with pytest.raises(
            BackendError, match=r"gloo_few does not have all_gather: .* needs one of"
        ):
            sm.all_gather(x, comm)
        with pytest.raises(BackendError, match="gloo_few does not have reduce_scatter"):
            sm.reduce_scatter(x, comm)
        with pytest.raises(BackendError, match="gloo_few does not have all_to_all"):
            sm.all_to_all(x, comm, 0, 0)
        if torch.__version__ >= "2.12":
            with pytest.raises(BackendError, match="gloo_few does not have all_to_all"):
                torch.compile(
                    lambda x: sm.all_to_all(x, comm, 0, 0), backend="eager", fullgraph=True
                )(x)


@on_ranks(2)
def test_a_group_whose_members_come_and_go_is_no_axis() -> None:
    """As torchft registers them: torch knows this rank alone, members are of other worlds."""
    with default_group("gloo_old") as world:
        resizable = type("Resizable", (FEW,), {"label": "gloo_resizable"})
        inner = world.inner

        def made(store: Any, rank: int, size: int, timeout: timedelta) -> GlooInPython:
            group: GlooInPython = resizable(store, rank, size, timeout)
            group.inner, group._size = inner, dist.get_world_size()
            return group

        dist.Backend.register_backend("gloo_resizable", made, devices=["cpu"])
        group = dist.new_group(
            [dist.get_rank()], backend="gloo_resizable", use_local_synchronization=True
        )
        assert isinstance(group, GlooInPython)
        with pytest.raises(
            sm.MeshError, match=r"Resizable has 2 members, but torch lists .* call it directly"
        ):
            sm.all_reduce(torch.ones(2), (sm.DeviceMesh.from_group(group, "cpu"), 0))
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        check(total, torch.full((2,), 2.0))


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_groups_of_torch_are_called_by_torchs_methods() -> None:
    with fake_world(2):
        kind: Any = type(dist.group.WORLD)
        assert call_of(kind, "all_gather") is dist.ProcessGroup._allgather_base
        assert call_of(kind, "all_to_all") is dist.ProcessGroup.alltoall_base
