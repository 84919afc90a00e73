"""Operators that DTensors do not support are refused with the remedy.

Dtypes that torch can only move are gathered.

Covers: _torch/interception.py, _torch/compiling.py, _torch/operators.py,
rules/language/local_ops.py.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_replication
from shoal_dtensor.errors import ArgumentTypeError, MixedTensorError, OperatorArgumentError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

MAP: Any = torch_map


def loop_while(x: Any) -> Any:
    def below_three(i: Any, _: Any) -> Any:
        return i < 3

    def add_one(i: Any, y: Any) -> Any:
        return i + 1, y + 1

    return while_loop(below_three, add_one, (torch.tensor(0), x))


def scan_sums(x: Any) -> Any:
    def add(carry: Any, y: Any) -> Any:
        return carry + y, carry + y

    return scan(add, x[0], x)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "flex_attention": lambda x: flex_attention(x, x, x),
    "cond": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "while_loop": loop_while,
    "scan": scan_sums,
    "map": lambda x: MAP(torch.sin, x),
    "print": lambda x: torch.ops.higher_order.print("{}", x),
}


compiled_first = pytest.mark.skipif(
    not hasattr(torch._higher_order_ops.utils, "_hop_compile_and_call"),
    reason="torch 2.11 compiles these before it asks a tensor's class, and its compiler raises",
)


# flex_attention, of calls that are not compiled
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    ["flex_attention", "print"]
    + [pytest.param(name, marks=compiled_first) for name in ("cond", "while_loop", "scan", "map")],
)
def test_operators_that_take_functions(name: str) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(4, 2, 8, 16), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(
            OperatorArgumentError, match=f"^{name} does not support DTensors: .* local_map"
        ) as caught:
            FUNCTIONS[name](x)
    assert "\n" not in str(caught.value)
    assert type(pickle.loads(pickle.dumps(caught.value))) is OperatorArgumentError


@compiled_first
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_such_an_operator_in_compiled_code(backend: str) -> None:
    """The error was a page of the compiler about fake tensors."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        compiled = torch.compile(FUNCTIONS["cond"], backend=backend)
        with pytest.raises(RuntimeError, match=r"cond does not support DTensors: .* local_map"):
            compiled(x)
        torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin())


class DTensorOfTorch(Tensor):
    """A tensor whose class says that it is torch's own DTensor."""


DTensorOfTorch.__name__ = "DTensor"
DTensorOfTorch.__module__ = "torch.distributed.tensor"


def test_dtensors_of_torch_are_converted() -> None:
    """Operators were a RuntimeError about as_strided; from_local made a DTensor of a DTensor."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        other = torch.ones(4).as_subclass(DTensorOfTorch)
        for use in (lambda: x + other, lambda: torch.cat([x, other]), lambda: x.copy_(other)):
            with pytest.raises(MixedTensorError, match=r"torch\.distributed\.tensor.*from_torch"):
                use()
        for make in (DTensor.from_local, distribute_tensor):
            with pytest.raises(ArgumentTypeError, match=r"torch\.distributed\.tensor.*from_torch"):
                make(other, mesh, [Shard(0)])


def narrow_to_jagged(x: Any) -> Any:
    return torch.nested.narrow(
        x, 1, torch.tensor([0, 1, 0, 0]), torch.tensor([1, 1, 1, 1]), layout=torch.jagged
    )


NESTED: dict[str, Callable[[Any], Any]] = {
    "from_jagged": lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4])),
    "as_nested_tensor": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
    "narrow": narrow_to_jagged,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_of_dtensors(name: str, implicit: bool) -> None:
    """In implicit_replication they were made, and failed later with an internal AttributeError."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
        block = implicit_replication() if implicit else nullcontext()
        with block, pytest.raises(OperatorArgumentError, match="nested tensor is local to a rank"):
            NESTED[name](x)


def test_such_operators_on_plain_tensors_are_those_of_torch() -> None:
    with fake_world(2):
        init_device_mesh("cpu", (2,))
        distribute_tensor(
            torch.ones(2), src_data_rank=None, device_mesh=init_device_mesh("cpu", (2,))
        )
        torch.testing.assert_close(FUNCTIONS["cond"](torch.ones(3)), torch.ones(3).sin())


# torch, of nested and of sparse tensors as prototypes
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["nested", "jagged", "coo", "csr"])
def test_tensors_without_strides(kind: str) -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    value = {
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "coo": lambda: torch.eye(4).to_sparse(),
        "csr": lambda: torch.eye(4).to_sparse_csr(),
    }[kind]()
    way_out = "to_padded_tensor" if kind in ("nested", "jagged") else "to_dense"
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for call in (distribute_tensor, DTensor.from_local):
            with pytest.raises(
                ArgumentTypeError, match=rf"shards must be strided tensors; .*\.{way_out}\("
            ):
                call(value, mesh, [Shard(0)])


@on_ranks(4, timeout=120)
def test_gradients_of_embeddings_are_dense() -> None:
    mesh = init_device_mesh("cpu", (4,))
    table = torch.arange(28.0).reshape(7, 4).sin().double()
    plain = table.clone().requires_grad_()

    def both(indices: Any, offsets: Any, weight: Any) -> Any:
        rows = nn.functional.embedding(indices, weight, sparse=True)
        return (
            rows.square().sum()
            + nn.functional.embedding_bag(indices, weight, offsets, mode="sum", sparse=True).sum()
        )

    given = torch.tensor([1, 2, 5, 5]), torch.tensor([0, 2])
    both(given[0], given[1], plain).backward()
    for placement in (Shard(0), Shard(1), Replicate()):
        for of_indices in (Replicate(), Shard(0)):
            weight = nn.Parameter(distribute_tensor(table, mesh, [placement]))
            indices, offsets = (distribute_tensor(each, mesh, [of_indices]) for each in given)
            both(indices, offsets, weight).backward()
            assert isinstance(weight.grad, DTensor)
            assert plain.grad is not None
            torch.testing.assert_close(weight.grad.full_tensor(), plain.grad.to_dense())


LOOKUPS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "index": lambda x, index: x[index([1, 5, 6])],
    "two indices": lambda x, index: x[index([1, 5]), index([0, 2])],
    "index_select": lambda x, index: x.index_select(0, index([1, 5])),
    "embedding": lambda x, index: nn.functional.embedding(index([1, 5]), x),
}


@on_ranks(4, timeout=120)
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32]
)
def test_numbers_that_torch_only_moves(dtype: torch.dtype) -> None:
    table = torch.arange(21).reshape(7, 3).to(dtype)
    mesh = init_device_mesh("cpu", (4,))
    for dim in (0, 1):
        for name, look_up in LOOKUPS.items():
            got = look_up(
                distribute_tensor(table, mesh, [Shard(dim)]),
                lambda numbers: distribute_tensor(torch.tensor(numbers), mesh, [Replicate()]),
            )
            expected = look_up(table, torch.tensor)
            assert torch.equal(got.full_tensor().view(torch.uint8), expected.view(torch.uint8)), (
                dim,
                name,
            )


REARRANGED: dict[str, Callable[[Any], Any]] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(2, 0),
    "roll of columns": lambda x: x.roll(-1, 1),
    "repeat": lambda x: x.repeat(2, 1),
}


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=str)
def test_float8_numbers_change_places(dtype: torch.dtype) -> None:
    # What arrives was first filled with zeros, which float8_e8m0fnu does not have; torch flips no
    # float8 matrix of one column.
    table = torch.arange(21.0).reshape(7, 3).exp2().to(dtype)
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Shard(0, sizes=(7, 0))):
        for name, rearrange in REARRANGED.items():
            got = rearrange(distribute_tensor(table, mesh, [placement])).full_tensor()
            expected = rearrange(table)
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name


@on_ranks(4, timeout=120)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_masks_of_bytes() -> None:
    mesh = init_device_mesh("cpu", (4,))
    full, mask = (
        torch.arange(14.0).reshape(7, 2),
        torch.tensor([1, 0, 1, 0, 0, 1, 1], dtype=torch.uint8),
    )
    for placement in (Shard(0), Replicate()):
        x, chosen = (
            distribute_tensor(full, mesh, [Shard(0)]),
            distribute_tensor(mask, mesh, [placement]),
        )
        assert torch.equal(x[chosen].full_tensor(), full[mask])


@on_ranks(4, timeout=120)
def test_inverses_say_nothing_where_all_is_well_and_the_same_on_all_ranks_where_not() -> None:
    mesh = init_device_mesh("cpu", (4,))
    matrices = torch.eye(3, dtype=torch.float64).repeat(5, 1, 1) * 2

    def sharded(tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in (
            torch.linalg.inv,
            torch.linalg.cholesky,
            lambda x: torch.linalg.solve(x, x),
        ):
            torch.testing.assert_close(
                function(sharded(matrices)).full_tensor(), function(matrices)
            )
    matrices[4, 1, 1] = 0
    with pytest.raises(RuntimeError, match=r"Batch element 4.*singular"):
        torch.linalg.inv(sharded(matrices))
