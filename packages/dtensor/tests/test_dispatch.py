"""Keys and caches of dispatch.

Covers: dispatch/{dispatch,results,argument_readers}.py, _torch/{operators,tensors}.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharded_tensors import sharded
from shoal_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    cache_info,
    distribute_tensor,
    implicit_replication,
)
from shoal_dtensor._torch.operators import direct
from shoal_dtensor._torch.tensors import wrap_local
from shoal_dtensor.errors import InPlaceError, MixedTensorError, OperatorArgumentError
from shoal_dtensor.layout.dim_sharding import DimSharding
from shoal_dtensor.layout.memory_order import walking_order
from shoal_dtensor.redistribute.plan import plan
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (lambda x: x + torch.ones(3), MixedTensorError),
        (lambda x: x @ x, OperatorArgumentError),
        (lambda x: x.view(5, 5), OperatorArgumentError),
    ],
    ids=["plain", "product", "view"],
)
def test_errors_do_not_begin_with_a_miss_of_a_cache(
    mesh: DeviceMesh, program: Callable[[Any], object], error: type[Exception]
) -> None:
    with pytest.raises(error, match="aten") as raised:
        program(sharded(mesh, torch.ones(2, 3)))
    cause: BaseException | None = raised.value
    while cause is not None:
        assert not isinstance(cause, KeyError)
        cause = cause.__context__


# --- keys -----------------------------------------------------------------------------------------

NUMBERS: dict[str, tuple[str, Callable[[Any, float], object]]] = {
    "a number beside a tensor": ("aten.mul.Tensor", lambda x, s: x * s),
    "a scalar in place": ("aten.add_.Tensor", lambda x, s: x.add_(s)),
    "a keyword": ("aten.add.Tensor", lambda x, s: torch.add(x, x, alpha=s)),
    "a scalar over a list": (
        "aten._foreach_mul_.Scalar",
        lambda x, s: torch._foreach_mul_([x, x], s),
    ),
    "a list of scalars": (
        "aten._foreach_add.ScalarList",
        lambda x, s: torch._foreach_add([x, x], [s, 2 * s]),
    ),
}


@pytest.mark.parametrize(("op", "use"), NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers_that_do_not_matter_add_no_decisions(
    mesh: DeviceMesh, op: str, use: Callable[[Any, float], object]
) -> None:
    x = sharded(mesh, torch.ones(4))
    for step in range(5):
        use(x, 0.5 + step)
    assert cache_info()[op] == 1


def test_numbers_that_matter_are_part_of_the_key(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4, 6))
    for dim in (0, 1):
        for size in (2, 3):
            parts = x.split(size, dim)
            assert [part.shape[dim] for part in parts] == [size] * (x.shape[dim] // size) + (
                [x.shape[dim] % size] if x.shape[dim] % size else []
            )
    assert cache_info()["aten.split.Tensor"] == 4


SPLITS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a size": ((4,), {}),
    "a size and a dim": ((3, -1), {}),
    "a size as a tensor": ((torch.tensor(3), 1), {}),
    "sizes": (([3, 5], 1), {}),
    "sizes as a tuple": (((1, 3),), {}),
    "sizes as a shape": ((torch.Size([3, 5]), 1), {}),
    "keywords": ((), {"split_size": 3, "dim": 1}),
    "sizes by keyword": ((), {"split_size": [3, 5], "dim": 1}),
}


@pytest.mark.parametrize(("args", "kwargs"), SPLITS.values(), ids=SPLITS.keys())
def test_split_takes_what_tensors_take(
    mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    plain: Any = torch.arange(32.0).reshape(4, 8)
    x: Any = distribute_tensor(plain, mesh, [Replicate()], src_data_rank=None)
    expected = plain.split(*args, **kwargs)
    parts = x.split(*args, **kwargs)
    assert type(parts) is type(expected)
    assert [part.to_local().tolist() for part in parts] == [part.tolist() for part in expected]


def test_types_of_numbers_are_part_of_the_key(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4, dtype=torch.int64))
    for number, dtype in (
        (2, torch.int64),
        (2.0, torch.float32),
        (True, torch.int64),
        (2j, torch.complex64),
    ):
        made = x * number
        assert made.dtype == dtype
        assert made.to_local().dtype == dtype
    assert cache_info()["aten.mul.Tensor"] == 4
    lists = [torch._foreach_mul([x], [number])[0].dtype for number in (2, 2.0)]
    assert lists == [torch.int64, torch.float32]


def test_lists_are_keyed_by_what_is_in_them(mesh: DeviceMesh) -> None:
    x, y = (
        sharded(mesh, torch.ones(4)),
        distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None),
    )
    for xs in ([x], [x, x], [x, y], [y, x]):
        made: Any = torch._foreach_neg(xs)
        assert [part.placements for part in made] == [source.placements for source in xs]
    assert cache_info()["aten._foreach_neg.default"] == 4


def test_a_list_of_dims_is_a_key(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4, 3))
    assert [tuple(x.sum(dims).shape) for dims in ([0], [1], [0, 1])] == [(3,), (4,), ()]
    assert tuple(F.layer_norm(x, (3,)).shape) == (4, 3)


def test_decisions_are_bounded(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("shoal_dtensor.dispatch.dispatch"), "MAX_DECISIONS", 3)
    for size in range(1, 9):
        sharded(mesh, torch.ones(size)).neg()
    assert cache_info()["aten.neg.default"] == 3


def test_a_failing_local_call_leaves_no_wrong_decision(mesh: DeviceMesh) -> None:
    a, b = sharded(mesh, torch.ones(4, 3)), sharded(mesh, torch.ones(4, 3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="same reduction dim"):
            torch.mm(a, b)


# --- what is read ---------------------------------------------------------------------------------


def test_plain_tensors_in_lists(mesh: DeviceMesh) -> None:
    x, one = sharded(mesh, torch.ones(4)), torch.ones(4)
    for xs in ([x, one], [one, x]):
        with pytest.raises(MixedTensorError, match="plain tensor of shape"):
            torch.cat(xs)
        with implicit_replication():
            assert tuple(torch.cat(xs).shape) == (8,)


def test_copied_views_are_not_taken_for_the_tensors_that_they_are_like(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4, 6), dim=1)
    # borders within rows: nothing of it is a view of local storage
    copy = x.view(3, 8)
    like = DTensor(copy.to_local().clone(), copy._spec)
    like.add_(1)
    torch._foreach_add_([like, like], 1.0)
    with pytest.raises(InPlaceError, match="would not reach the base"):
        copy.add_(1)
    with pytest.raises(InPlaceError, match="would not reach the base"):
        torch._foreach_add_([like, copy], 1.0)


def test_dispatch_called_by_hand(mesh: DeviceMesh) -> None:
    run: Any = DTensor.__torch_dispatch__
    x = sharded(mesh, torch.arange(4.0))
    for types in ((), (DTensor,), [DTensor]):
        assert run(aten.neg.default, types, (x,)).placements == (Shard(0),)
        total = run(aten.add.Tensor, types, (x, x), {"alpha": 2})
        assert total.to_local().tolist() == (3 * x.to_local()).tolist()
        both = run(aten._foreach_add.List, types, ([x, x], [x, x]), None)
        assert [part.placements for part in both] == [(Shard(0),)] * 2


def test_a_subclass_of_dtensor_is_read_as_one(mesh: DeviceMesh) -> None:
    class Named(DTensor):
        pass

    x = sharded(mesh, torch.arange(4.0))
    named = Named(x.to_local(), x._spec)
    for made in (-named, named + x, *torch._foreach_neg([named, x])):
        assert type(made) is DTensor
        assert made.placements == (Shard(0),)


@on_ranks(2)
def test_tensors_under_way_are_waited_for_in_lists() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    for _ in range(2):  # decided, then known
        pending = x.redistribute(placements=[Replicate()], async_op=True)
        made: Any = torch._foreach_add([pending, pending], [pending, pending])
        assert [part.to_local().tolist() for part in made] == [[4.0] * 3] * 2


# --- results --------------------------------------------------------------------------------------


def test_in_place_operators_return_what_they_wrote(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4))
    for _ in range(2):
        assert x.add_(1) is x
        before = x.to_local().clone()
        torch._foreach_add_([x], 1)
        assert x.to_local().tolist() == (before + 1).tolist()
        out = sharded(mesh, torch.empty(4))
        written: Any = torch.add(x, x, out=out)
        assert written is out
        assert out.to_local().tolist() == (2 * x.to_local()).tolist()


def test_several_outputs_each_have_their_own_spec(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.randn(4, 6))
    # the general way at first, the fast one then
    for _ in range(2):
        outputs: Any = torch.native_layer_norm(x, [6], None, None, 1e-5)
        assert [tuple(t.shape) for t in outputs] == [(4, 6), (4, 1), (4, 1)]
        assert [tuple(t.to_local().shape) for t in outputs] == [(2, 6), (2, 1), (2, 1)]
        torch.testing.assert_close(outputs[0].to_local(), F.layer_norm(x.to_local(), (6,)))


def test_the_constructor_of_torch_makes_what_a_spec_says(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.randn(4, 6), dim=1).t()
    made = wrap_local(DTensor, x._local_tensor, x._spec, requires_grad=False)
    assert type(made) is DTensor
    assert made._local_tensor is x._local_tensor
    assert made._spec is x._spec
    assert (made.shape, made.stride(), made.dtype, made.device) == (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
    )
    assert not made.requires_grad
    assert wrap_local(DTensor, x._local_tensor, x._spec, requires_grad=True).requires_grad


# --- the local call -------------------------------------------------------------------------------


def _direct(op: Any, *shapes: tuple[int, ...], **kwargs: Any) -> Any:
    def build(device: torch.device) -> Any:
        return [torch.empty(shape, device=device) for shape in shapes], {
            name: torch.empty(value, device=device) if isinstance(value, tuple) else value
            for name, value in kwargs.items()
        }

    args, named = build(torch.device("meta"))
    made = op(*args, **named)
    return direct(op, build, [made] if isinstance(made, Tensor) else list(made or ()))


def test_the_cheapest_binding_is_found() -> None:
    assert _direct(aten.mm.default, (2, 3), (3, 4)) is torch._C._VariableFunctions.mm
    assert _direct(aten.relu.default, (2, 3)) is torch._C.TensorBase.relu
    assert _direct(aten.add_.Tensor, (2, 3), (2, 3)) is torch._C.TensorBase.add_


@pytest.mark.parametrize("op", [aten.add.out, aten._softmax_backward_data.out])
def test_an_operator_that_no_binding_fits_runs_itself(op: Any) -> None:
    shapes = [(2, 3), (2, 3)]
    if op is aten.add.out:
        assert _direct(op, *shapes, out=(2, 3)) is op._op
    else:
        assert direct(op, lambda device: ([], {}), []) is op._op


@pytest.mark.parametrize(
    ("op", "binding"),
    [
        (
            aten.linalg_inv_ex.default,
            torch._C._linalg.linalg_inv_ex,  # type: ignore[attr-defined]  # private
        ),
        (aten.gelu.default, torch._C._nn.gelu),
        (
            aten.special_erfcx.default,
            torch._C._special.special_erfcx,  # type: ignore[attr-defined]  # private
        ),
    ],
)
def test_families_have_bindings_of_their_own(op: Any, binding: Any) -> None:
    assert _direct(op, (3, 3)) is binding


@on_ranks(2)
def test_only_the_arguments_that_lie_wrong_are_moved() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(4.0).reshape(2, 2)
    rows, columns = (distribute_tensor(values, mesh, [Shard(dim)]) for dim in (0, 1))
    for _ in range(2):  # decided, then known
        total = rows + columns
        sums: Any = torch._foreach_add([rows, rows], [rows, columns])
        out: Any = torch.add(
            rows, columns, out=distribute_tensor(torch.empty(2, 2), mesh, [Shard(0)])
        )
        stacked: Any = torch.stack([rows, columns, rows])
        for made in (total, *sums, out):
            assert made.full_tensor().tolist() == (2 * values).tolist()
        assert stacked.full_tensor().tolist() == torch.stack([values] * 3).tolist()
        assert columns.placements == (Shard(1),)


@pytest.mark.parametrize("rows", [2 * 16384, 2 * 16384 - 1])
def test_first_uses_list_no_shards_of_16384_ranks(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(sharding: DimSharding) -> tuple[int, ...]:
        assert sharding.shards <= 1, "an entry for each rank"
        return (sharding.length,)

    with fake_world(16384):
        mesh = init_device_mesh("cpu", (16384,))
        monkeypatch.setattr(DimSharding, "sizes", property(listed))
        monkeypatch.setattr(DimSharding, "offsets", property(listed))
        x: Any = DTensor.from_local(
            torch.ones(2, 8), mesh, [Shard(0)], shape=(rows, 8), stride=(8, 1)
        )
        w: Any = DTensor.from_local(torch.ones(8, 8), mesh, [Replicate()])
        assert (
            (x + x).placements == (x @ w).placements == x.view(-1, 2, 4).placements == (Shard(0),)
        )
        assert x.sum(0).placements == (Partial(),) and x[:, ::2].placements == x[
            ::2
        ].placements == (Shard(0),)
        assert x.sum(0).redistribute(placements=[Replicate()]).to_local().shape == (8,)
        assert plan(x.spec, w.spec.with_(shape=(rows, 8))).steps[0].name == "AllGather"


def test_a_moved_operand_that_was_expanded_does_not_set_the_memory_order() -> None:
    """Its stride 0 leaves the order to the other one.

    As a summand of 5 x 5 x 3 it has strides 15, 3, 1.
    """
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.randn(5, 3, 5), mesh, [Partial()]).transpose(1, 2)
        expanded = distribute_tensor(
            torch.ones(()), mesh, [Replicate()], src_data_rank=None
        ).expand(5, 5, 3)
        total: Any = expanded + partial
        assert total.stride() == total.to_local().stride() == (15, 1, 5)
        assert total.transpose(1, 2).view(15, 5).shape == (15, 5)


def _mib() -> float:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(900)
@on_ranks(2, timeout=800)
def test_memory_is_flat_over_operators_and_shapes() -> None:
    mesh, seen = init_device_mesh("cpu", (2,)), list[float]()
    x: Any = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(6, 4), mesh, [Replicate()])
    for _ in range(10):
        for _ in range(2500):
            y = x @ w + 1.0
            y.sum(), y.redistribute(mesh, [Replicate()])[1:3]
        seen.append(_mib())
    assert seen[-1] < seen[0] + 2, seen  # 112,500 operators later
    # 10,000 shapes, of which caches keep some thousand
    for rows in range(1, 101):
        for columns in range(1, 101):
            a: Any = distribute_tensor(
                torch.ones(rows, columns), mesh, [Shard(0)], src_data_rank=None
            )
            (a + 1.0).sum(0), a.redistribute(mesh, [Replicate()])[1:].softmax(-1)
        seen.append(_mib())
    assert seen[-1] < seen[-40] + 4, seen[::10]


def gradient_of_layer_norm(x: Any) -> Any:
    return torch.autograd.grad(F.layer_norm(x.requires_grad_(), (4,)).sum(), x)[0]


AROUND_COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "layer_norm_backward": gradient_of_layer_norm,
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cumsum": lambda x: x.cumsum(-1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "sort": lambda x: x.sort(-1).values,
    "pad": lambda x: F.pad(x, (1, 1)),
}


@pytest.mark.parametrize("name", AROUND_COLLECTIVES)
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 2, 1)])
def test_results_have_the_memory_walk_of_one_device(name: str, order: tuple[int, ...]) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for dim in range(3):
            x = distribute_tensor(torch.randn(4, 4, 4), mesh, [Shard(dim)]).permute(order)
            for _ in range(2):  # decided, and remembered
                out: Any = AROUND_COLLECTIVES[name](x)
                assert walking_order(out.shape, out.stride()) == walking_order(
                    out.shape, out.to_local().stride()
                )
                if out.is_contiguous():
                    assert out.view(out.shape[0], -1).shape == (4, out.numel() // 4)


def test_memory_after_the_meta_device_has_no_numbers_by_chance() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            module = nn.Linear(4, 6)
        for name, param in list(module.named_parameters()):
            part = DTensor.from_local(param.detach(), mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(part))
        module.to_empty(device="cpu")
        for param in module.parameters():
            local: Any = param.to_local()  # type: ignore[attr-defined]  # a DTensor
            assert local.device.type == "cpu"
            assert local.isnan().all()
