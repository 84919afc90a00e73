"""Covers: group_calls.py: collectives on process groups that are written in Python, whichever names they have."""

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

import shoal_mesh as sm
from shoal_mesh._torch import PrefixStore, Store
from shoal_mesh.groups.group_calls import call_of
from shoal_mesh.testing import fake_world, on_ranks

OLD = {
    "_allgather_base": "_allgather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "alltoall_base": "alltoall_base",
}
NEW = dict(zip(("all_gather_single", "reduce_scatter_single", "all_to_all_single"), OLD.values(), strict=True))
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
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows the form with a store only
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
    def call(self: GlooInPython, *args: Any) -> Any:
        self.called[name] += 1
        if "coalesced" in name:
            ([out], [source], *more) = args
            args = (out, source, *more)
        return getattr(self.inner, inner)(*args)

    return call


def written(kind: str, names: dict[str, str]) -> type[GlooInPython]:
    body: dict[str, Any] = {outer: passing_on(outer, inner) for outer, inner in names.items()}
    body |= {name: passing_on(name, name) for name in SHARED}
    return type(kind, (GlooInPython,), body | {"label": kind})


KINDS = {kind: written(kind, names) for kind, names in (("gloo_old", OLD), ("gloo_new", NEW), ("gloo_lists", LISTS))}


@contextmanager
def default_group(kind: str) -> Iterator[GlooInPython]:
    """A default group written in Python, in the place of the pool's, which has gloo again afterwards."""
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
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_collectives_run_on_groups_written_in_python(kind: str) -> None:
    with default_group(kind) as world:
        _try_collectives()
        assert world.called["allreduce"] >= 3 and world.called["broadcast"] == 1
        assert all(world.called[name] for name in {"gloo_old": OLD, "gloo_new": NEW, "gloo_lists": LISTS}[kind])


def _try_collectives() -> None:
    mesh = sm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    own = torch.arange(4.0, dtype=torch.float64) + 10 * rank
    for along, peers in (((mesh, "tp"), [rank - rank % 2, rank - rank % 2 + 1]), ((mesh, ("dp", "tp")), [0, 1, 2, 3])):
        everyone = torch.stack([torch.arange(4.0, dtype=torch.float64) + 10 * peer for peer in peers])
        place, count = peers.index(rank), len(peers)
        check(sm.all_reduce(own, along), everyone.sum(0))
        check(sm.all_gather(own, along), everyone.flatten())
        check(sm.reduce_scatter(own, along), everyone.sum(0).chunk(count)[place])
        check(sm.all_to_all(own, along, 0, 0), torch.cat([row.chunk(count)[place] for row in everyone]))
        check(sm.broadcast(own, along, 1), everyone[1])
        pending = sm.all_reduce(own, along, async_op=True)
        check(pending.wait(), everyone.sum(0))
        uneven = torch.full((rank + 1,), float(rank), dtype=torch.float64)
        gathered = torch.cat([torch.full((peer + 1,), float(peer), dtype=torch.float64) for peer in peers])
        check(sm.all_gather_v(uneven, along, [peer + 1 for peer in peers]), gathered)
        [summed] = sm.all_reduce_coalesced([own], along)
        check(summed, everyone.sum(0))
        check(sm.permute(own, along, [(place + 1) % count for place in range(count)]), everyone[place - 1])


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_groups_of_torch_are_called_by_torchs_methods() -> None:
    with fake_world(2):
        world = dist.group.WORLD
        assert world is not None
        assert call_of(world, "all_gather") is dist.ProcessGroup._allgather_base
        assert call_of(world, "all_to_all") is dist.ProcessGroup.alltoall_base
