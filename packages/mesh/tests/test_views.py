"""Every collective takes any view, and reads its values.

Covers: calls.py (`materialize`), on real gloo ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_mesh import (
    CollectiveError,
    Comm,
    all_gather,
    all_gather_coalesced,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_blocks,
    all_to_all_v,
    broadcast,
    comm_over,
    differentiable,
    gather,
    permute,
    reduce_scatter,
    reduce_scatter_coalesced,
    reduce_scatter_v,
    scatter,
)
from shoal_mesh.internal import Pending, all_reduce_
from shoal_mesh.testing import on_ranks

RANKS = 2
SHIFT = [*range(1, RANKS), 0]


class Subclass(Tensor):
    """A tensor subclass that changes nothing."""


def views(dtype: torch.dtype, rank: int) -> dict[str, Tensor]:
    """Views of shape (4, 4), (4, 0), (0, 4) or (); `some` is a lazy view on one rank only."""
    torch.manual_seed(rank)
    kinds: dict[str, Tensor] = {}
    if dtype.is_floating_point:
        parts = torch.randn(4, 4, dtype=torch.complex128)
        kinds |= {
            "imag": parts.imag,
            "-imag": parts.conj().imag,
            "-imag()": parts[0, 0].conj().imag,
        }
        kinds["-row"] = parts.conj().imag[:, :1].t()[:, 2:3]
        kinds["-some"] = kinds["-imag"] if rank else torch.randn(4, 4, dtype=dtype)
    drawn = (
        torch.randint(-5, 5, (6, 9)).to(dtype)
        if dtype == torch.int16
        else torch.randn(6, 9, dtype=dtype)
    )
    x = drawn[:4, :4]
    kinds |= {
        "strided": drawn[1:5, ::2][:, :4],
        "transposed": x.t(),
        "expanded": x[:, :1].expand(4, 4),
    }
    kinds |= {
        "subclass": x.contiguous().as_subclass(Subclass),
        "empty": x[:0],
        "narrow": x[:, :0],
        "scalar": x[0, 0],
    }
    if dtype.is_complex:
        kinds |= {
            "conj": x.contiguous().conj(),
            "adjoint": x.mH,
            "conj()": x[0, 0].conj(),
            "conj empty": x[:0].conj(),
        }
        kinds |= {
            "some": x.contiguous().conj() if rank else x,
            "subclass of conj": kinds["subclass"].conj(),
        }
    return kinds


def blocks(tensor: Tensor, comm: Comm) -> Any:
    """`all_to_all_blocks` of its rows, into views that are as lazy as the tensor."""
    out = [torch.zeros_like(tensor).resolve_conj().resolve_neg() for _ in range(comm.size)]
    places = [each.conj() if tensor.is_conj() else each for each in out]
    return all_to_all_blocks(
        [[*tensor.unbind()]] * comm.size, comm, [[*place.unbind()] for place in places]
    )


def exact(tensor: Tensor, comm: Comm) -> Any:
    """`all_to_all_v` of a row."""
    row = tensor.select(0, 0)
    half = len(row) // comm.size
    return all_to_all_v(row, comm, [half] * comm.size, [half] * comm.size)


def calls(comm: Comm) -> dict[str, Callable[[Tensor], Any]]:
    """Every collective, of one tensor."""
    uneven = [0] * (comm.size - 1)
    own = {f"{op}": lambda t, op=op: all_reduce(t, comm, op) for op in ("sum", "max")}
    return own | {
        "into itself": lambda t: all_reduce_(t, comm),
        "into itself later": lambda t: all_reduce_(t, comm, async_op=True),
        "coalesced": lambda t: all_reduce_coalesced([t], comm),
        "gathered": lambda t: [all_gather(t, comm, dim) for dim in range(max(t.ndim, 1))],
        "gathered later": lambda t: all_gather(t, comm, async_op=True),
        "gathered exactly": lambda t: all_gather_v(t, comm, [t.shape[0]] * comm.size),
        "gathered coalesced": lambda t: all_gather_coalesced([t], comm),
        "scattered": lambda t: [reduce_scatter(t, comm, dim) for dim in range(t.ndim)],
        "scattered unevenly": lambda t: reduce_scatter_v(t, comm, [t.shape[0], *uneven]),
        "scattered coalesced": lambda t: reduce_scatter_coalesced([t], comm),
        "exchanged": lambda t: [all_to_all(t, comm, a, b) for a in range(2) for b in range(2)],
        "exchanged exactly": lambda t: exact(t, comm),
        "blocks": lambda t: blocks(t, comm),
        "broadcast": lambda t: broadcast(t, comm),
        "from one": lambda t: scatter(
            [t] * comm.size if comm.rank == 0 else None, comm, out=torch.zeros_like(t)
        ),
        "to one": lambda t: gather(t, comm),
        "permuted": lambda t: permute(t, comm, SHIFT),
        "differentiable": lambda t: differentiable.permute(t, comm, SHIFT),
    }


def values(result: Any) -> Any:
    """Plain tensors of a result."""
    if isinstance(result, Pending):
        return values(result.wait())
    if isinstance(result, list | tuple):
        return [values(each) for each in result]
    return (
        result.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
        if isinstance(result, Tensor)
        else result
    )


def attempt(call: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Its values, or the type of its error."""
    try:
        return values(call(tensor))
    except Exception as error:
        return type(error)


def cases(comm: Comm, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    for view in views(dtype, comm.rank):
        for call in calls(comm):
            if view != "expanded" or not call.startswith("into itself"):
                yield view, call


@on_ranks(RANKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int16])
def test_every_collective_reads_the_values_of_every_view(dtype: torch.dtype) -> None:
    comm = comm_over(tuple(range(RANKS)))
    # after all collectives: a rank that stops leaves the others waiting
    wrong = []
    for view, call in cases(comm, dtype):
        tensor = views(dtype, comm.rank)[view]
        plain = values(tensor).clone(memory_format=torch.contiguous_format)
        expected, got = (attempt(calls(comm)[call], each) for each in (plain, tensor))
        if not _equal(got, expected):
            wrong.append(f"{call} of {view}: {got} instead of {expected}")
        elif (
            call.startswith("into itself")
            and not isinstance(got, type)
            and not _equal(values(tensor), expected)
        ):
            wrong.append(f"{call} of {view}: the tensor is {tensor} instead of {expected}")
    assert not wrong, "\n".join(wrong)


def _equal(got: Any, expected: Any) -> bool:
    if type(got) is not type(expected):
        return False
    if isinstance(got, list):
        return len(got) == len(expected) and all(
            _equal(a, b) for a, b in zip(got, expected, strict=True)
        )
    return torch.equal(got, expected) if isinstance(got, Tensor) else got == expected


@on_ranks(RANKS)
def test_a_lazy_gradient_is_sent_as_its_values() -> None:
    comm = comm_over(tuple(range(RANKS)))
    x = torch.randn(2, 2, dtype=torch.complex64, requires_grad=True)
    seed = torch.randn(4, 2, dtype=torch.complex64).conj()
    grads = [
        torch.autograd.grad(differentiable.all_gather(x, comm), x, g)[0]
        for g in (seed, seed.resolve_conj())
    ]
    assert torch.equal(*map(values, grads))


@on_ranks(RANKS)
def test_elements_that_are_one_memory_location_are_not_written() -> None:
    comm = comm_over(tuple(range(RANKS)))
    with pytest.raises(CollectiveError, match=r"all_reduce_ cannot write .*call clone\(\) first"):
        all_reduce_(torch.ones(2, 1).expand(2, 3), comm)
