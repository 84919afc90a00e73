"""Programs of DTensor: operators on uneven shards, redistribution, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .libraries import Library
from .programs import Part, assert_same, device


@dataclass(frozen=True)
class Operands:
    """What operators are called on: plain tensors, or DTensors.

    Attributes:
        x, y: (7, 5) sharded along rows, (5, 7) along columns.
        both: (7, 5) sharded along both.
        table: (7, 5) sharded along rows, over the other axis than `x`.
        ids, own_ids: (6,), replicated and sharded.
        kernel: (2, 3, 3) weights of a convolution.
    """

    x: Any
    y: Any
    both: Any
    table: Any
    ids: Any
    own_ids: Any
    kernel: Any


Call = Callable[[Operands], Any]
OPERATORS: dict[str, Call] = {
    "add": lambda o: o.x + o.x,
    "mul by a number": lambda o: o.x * 2.5,
    "mul by a scalar of the CPU": lambda o: o.x * torch.tensor(2.5),
    "mm": lambda o: o.x @ o.y,
    "matmul": lambda o: o.x @ o.x.t(),
    "einsum": lambda o: torch.einsum("ij,jk->ik", o.x, o.y),
    "sum": lambda o: o.x.sum(0),
    "mean": lambda o: o.both.mean(),
    "std": lambda o: o.both.std(0),
    "softmax": lambda o: o.x.softmax(0),
    "logsumexp": lambda o: o.x.logsumexp(0),
    "layer_norm": lambda o: F.layer_norm(o.both, (5,)),
    "norm": lambda o: o.x.norm(),
    "max": lambda o: o.both.max(),
    "median": lambda o: o.x.median(0)[0],
    "argmax": lambda o: o.x.argmax(0),
    "topk": lambda o: o.x.topk(2, 0)[0],
    "sort": lambda o: o.x.sort(0)[0],
    "cumsum": lambda o: o.x.cumsum(0),
    "slice": lambda o: o.x[1:5],
    "select": lambda o: o.x[3],
    "cat": lambda o: torch.cat([o.x, o.x]),
    "roll": lambda o: o.x.roll(1, 0),
    "flip": lambda o: o.x.flip(0),
    "tril": lambda o: o.x.tril(),
    "pad": lambda o: F.pad(o.x, (1, 1, 1, 1)),
    "view": lambda o: o.both.view(35),
    "where": lambda o: torch.where(o.x > 0, o.x, 0.0),
    "masked_fill": lambda o: o.x.masked_fill(o.x > 0, 1.0),
    "clamp_": lambda o: o.x.clone().clamp_(0),
    "embedding of sharded rows": lambda o: F.embedding(o.ids, o.table),
    "embedding of sharded ids": lambda o: F.embedding(o.own_ids, o.x),
    "index": lambda o: o.x[o.ids],
    "index_select": lambda o: o.x.index_select(0, o.ids),
    "gather": lambda o: torch.gather(o.x, 0, o.ids.view(6, 1)),
    "cross_entropy": lambda o: F.cross_entropy(o.x, o.x.argmax(1)),
    "convolution": lambda o: F.conv1d(o.x.view(1, 7, 5)[:, :3], o.kernel, padding=1),
    "svdvals": lambda o: torch.linalg.svdvals(o.x),
    "repeat_interleave": lambda o: o.x.repeat_interleave(2, 0),
    "searchsorted": lambda o: torch.searchsorted(o.x.sort(0)[0].sum(1).cumsum(0), o.y.sum(1)),
}
# What needs a value, or a size, that only the device knows; or is given as a list on the host.
OF_VALUES: dict[str, Call] = {
    "boolean mask": lambda o: o.x[o.x > 0],
    "masked_select": lambda o: o.x.masked_select(o.x > 0),
    "nonzero": lambda o: (o.x > 0).nonzero(),
    "unique": lambda o: o.ids.unique(),
    "bincount": lambda o: o.own_ids.bincount(),
    "histc": lambda o: o.x.histc(4),
    "torch.equal": lambda o: torch.equal(o.x, o.x),
    "item": lambda o: o.x.sum().item(),
    "index by a list": lambda o: o.x[[3, 0]],
    "index_put by an index": lambda o: o.x.clone().index_put((o.ids,), o.y[:, :6].t()),
    "one_hot": lambda o: F.one_hot(o.own_ids, 7),
}


def _plain() -> Operands:
    torch.manual_seed(0)
    x = torch.randn(7, 5)
    ids = torch.tensor([3, 0, 6, 5, 1, 2])
    return Operands(
        x, torch.randn(5, 7), x.clone(), torch.randn(7, 5), ids, ids.clone(), torch.randn(2, 3, 3)
    )


def _sharded(lib: Library, plain: Operands) -> Operands:
    shard, replicate = lib.tensor.Shard, lib.tensor.Replicate()
    mesh = lib.init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "tensor"))

    def on(tensor: Tensor, *placements: Any) -> Any:
        return lib.tensor.distribute_tensor(tensor.to(device()), mesh, placements)

    return Operands(
        on(plain.x, shard(0), replicate),
        on(plain.y, replicate, shard(1)),
        on(plain.both, shard(0), shard(1)),
        on(plain.table, replicate, shard(0)),
        on(plain.ids, replicate, replicate),
        on(plain.own_ids, shard(0), replicate),
        on(plain.kernel, replicate, replicate),
    )


def operators(lib: Library, calls: dict[str, Call] = OPERATORS) -> Generator[Part, Any, None]:
    """Each operator twice: the second time it is known."""
    plain = _plain()
    operands = _sharded(lib, plain)
    for name, call in calls.items():
        yield name, lambda call=call: call(operands)  # type: ignore[misc]  # lambda with a default
        got = yield name, lambda call=call: call(operands)  # type: ignore[misc]  # as above
        if lib.ours:
            assert_same(got, call(plain)) if isinstance(got, Tensor) else _assert_close(
                got, call(plain)
            )


def _assert_close(got: float | bool, expected: float | bool) -> None:
    assert abs(got - expected) < 1e-4, (got, expected)


def operators_of_values(lib: Library) -> Generator[Part, Any, None]:
    """As `operators`."""
    return operators(lib, OF_VALUES)


def redistribution(lib: Library) -> Generator[Part, Any, None]:
    """A tensor of uneven shards from each pair of placements to each other, twice.

    All of them are one part.
    """
    shard, replicate, partial = lib.tensor.Shard, lib.tensor.Replicate, lib.tensor.Partial
    mesh = lib.init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    whole = torch.randn(7, 5)
    targets = list(product([shard(0), shard(1), replicate()], repeat=2))
    sources = [
        lib.tensor.distribute_tensor(whole.to(device()), mesh, placements) for placements in targets
    ]
    local = whole.to(device()) / 2
    addends = [(partial(), replicate()), (replicate(), partial())]
    sources += [lib.tensor.DTensor.from_local(local, mesh, placements) for placements in addends]

    def run() -> list[Any]:
        return [source.redistribute(placements=target) for source in sources for target in targets]

    yield "every pair", run
    got = yield "every pair", run
    for each in got:
        assert_same(each, whole)


RANDOM: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "exponential_": lambda x: x.clone().exponential_(),
}


def random_operators(lib: Library) -> Generator[Part, Any, None]:
    """Each random operator on a sharded tensor, against the same on the whole tensor here."""
    shard = lib.tensor.Shard
    mesh = lib.init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    whole = torch.randn(64, 36).to(device())
    x = lib.tensor.distribute_tensor(whole, mesh, [shard(0), shard(1)])
    for name, call in RANDOM.items():
        torch.manual_seed(3)
        yield name, lambda call=call: call(x)  # type: ignore[misc]  # lambda with a default
        got = yield name, lambda call=call: call(x)  # type: ignore[misc]  # as above
        if lib.ours:
            torch.manual_seed(3)
            call(whole)
            assert torch.equal(got.full_tensor(), call(whole)), name
