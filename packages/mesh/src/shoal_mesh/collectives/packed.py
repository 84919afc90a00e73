"""Many tensors in one collective.

Between CPU ranks of one host, tensors are packed straight into shared memory and read straight from
it, so sent and received tensors have no second copy. Elsewhere they are packed into a message for
the backend. `start_packed` takes flat tensors of one dtype and returns at once. The functions for
"coalesced" tensors of any shape and dtype wait: they send one message for each dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .._torch import is_traced
from ..errors import CollectiveError
from ..events import run_observed
from ..groups.process_groups import Comm
from ..transport import Flat, Pending, Sizes
from . import calls
from .calls import Along, are_equal, check_sizes, comm_of_calls, normal_dim, refuse_uneven
from .even import start_block_reduction, start_reduction
from .flat_messages import positions_by_dtype
from .reductions import in_tree, reduction

_FUNCTIONAL = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
}


def start_packed(
    kind: str,
    tensors: list[Tensor],
    comm: Along,
    sizes: Sizes = (),
    op: str = "sum",
    *,
    background: bool = True,
) -> Pending[Flat]:
    """`S -> R`, `P -> S` or `P -> R`: start a collective of many tensors in one message.

    The tensors that a gather passes to the function of `then` are overwritten after its call, so
    the function has to copy them.

    Args:
        kind: the result. An "all_gather" returns one flat tensor for each rank, in index order (if
            all have one size, that may be a matrix with a row for each rank). A "reduce_scatter"
            returns one flat tensor, this rank's block of the reduction. An "all_reduce" returns the
            reduction of every tensor, in memory of its own.
        tensors: flat, of one dtype, in the same order on all ranks; not to be written to before the
            result has been waited for. A reduce-scatter takes the tensors for the first rank, then
            the tensors for the second rank, and so on; or matrices of n rows, row i of each for
            rank i. The list is emptied once the tensors are copied to a message, so that they can
            be freed.
        comm: a communicator of n ranks, or (mesh, axes).
        sizes: (n,) elements of every rank's block, 0 allowed; equal on all ranks. Not for an
            all-reduce.
        op: as for `all_reduce`.
        background: whether the caller computes between the start and the wait.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: `sizes` does not fit the ranks or the tensors, or a tensor requires grad.

    Example:
        >>> def example() -> list[list[int]]:
        ...     tensors = [torch.arange(2), torch.arange(1)]
        ...     pending = start_packed("all_gather", tensors, comm_over((0, 1)), (3, 3))
        ...     return pending.then(lambda rows: [row.tolist() for row in rows]).wait()
        >>> launch(example, 2)[0]
        [[0, 1, 0], [0, 1, 0]]
    """
    comm = comm_of_calls(tensors, comm, "a packed collective takes a list of flat tensors")
    _check_flat(kind, tensors, comm)
    if calls.loses_gradient(tensors):
        again = partial(start_packed, kind, [*tensors], comm, sizes)
        calls.refuse_gradient(partial(again, op=op, background=background))
    dtype = tensors[0].dtype
    if set(map(type, tensors)) != {Tensor} and not is_traced(tensors[0]):
        tensors[:] = [calls.as_plain(tensor) for tensor in tensors]
    if kind == "all_gather":
        op = ""
    else:
        reduction(dtype, op)
    counts = [tensor.numel() for tensor in tensors]
    if kind == "all_reduce":
        sizes = counts
    else:
        count = sum(counts)
        total = check_sizes(sizes, comm)
        wanted = total if kind == "reduce_scatter" else sizes[comm.rank]
        if count != wanted:
            raise CollectiveError(
                f"rank {comm.rank} gives {count} elements for a packed {kind}, but sizes say "
                f"{tuple(sizes)}"
            )
    start = partial(_start_message, kind, tensors, comm, sizes, op=op, background=background)
    return run_observed(
        start, _FUNCTIONAL[kind], comm, tensors, reduce_op=op, same={"sizes": sizes}
    )


def _check_flat(kind: str, tensors: list[Tensor], comm: Comm) -> None:
    """Refuse tensors of several dtypes or of wrong shapes.

    Tensors must be flat; for a reduce-scatter they may also be matrices of n rows.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    ndims = {tensor.ndim for tensor in tensors}
    are_flat = ndims == {1}
    if kind == "reduce_scatter" and ndims == {2}:
        # compared one by one, because torch.jit.trace has tensors for sizes
        are_flat = all(tensor.shape[0] == comm.size for tensor in tensors)
    if len(dtypes) != 1 or not are_flat:
        got = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors]
        raise CollectiveError(f"a packed collective needs flat tensors of one dtype, got {got}")


def _start_message(
    kind: str, tensors: list[Tensor], comm: Comm, sizes: Sizes, op: str, background: bool
) -> Pending[Flat]:
    """Start the collective in shared memory if that can carry it, else by the backend."""
    pending: Pending[Flat] = Pending((), None)
    follows_tree = bool(op) and in_tree(tensors[0], op)
    are_traced = is_traced(tensors[0])
    if comm.size > 1 and not are_traced and not follows_tree:
        order = comm.order if kind == "all_gather" else None

        def receive(arrived: Flat) -> None:
            if kind != "all_gather":
                pending.value = arrived
            elif order is None:
                pending.lend(arrived)
            else:
                pending.lend([arrived[rank] for rank in order])

        sizes_in_group = sizes
        if order is not None:
            sizes_in_group = [sizes[index] for index in calls.group_to_index(comm)]
        calls.refuse_transformed(tensors)
        carrier = calls.carrier_of(comm, tensors[0], op)
        pending.work = carrier.start_packed(
            kind, tensors, receive, sizes_in_group, own_rank=comm.rank, op=op
        )
        if pending.work is not None:
            return pending
    arriving = [sizes[comm.rank]] if kind == "reduce_scatter" else list(sizes)
    # sizes 3, 3: a matrix (2, 3); sizes 3, 1: tensors of (3,) and (1,)
    is_matrix = any(arriving) and are_equal(arriving)
    # the blocks of a gather that fit together are packed at their place in the result
    is_in_place = kind == "all_gather" and comm.size > 1 and comm.order is None and is_matrix
    if is_in_place and not are_traced:
        message = _gather_in_place(tensors, comm, arriving[0], background)
    else:
        message = _in_one_tensor(kind, tensors, comm, sizes, op=op, background=background)
    if is_matrix:
        return message.then(lambda flat: flat.view(len(arriving), -1))
    return message.then(lambda flat: torch.split(flat, arriving))


def _gather_in_place(tensors: list[Tensor], comm: Comm, size: int, background: bool) -> Pending:
    """Gather equal blocks of `size` elements, whose index order is the group's order."""
    out = calls.in_huge_pages(tensors[0].new_empty(comm.size * size))
    # rank 2, blocks of 3: 6:9
    own_place = out.narrow(0, comm.rank * size, size)
    own_block = torch.cat(tensors, out=own_place)
    return calls.all_gather(own_block, comm, background, out)


def _in_one_tensor(
    kind: str, tensors: list[Tensor], comm: Comm, sizes: Sizes, op: str, background: bool
) -> Pending:
    """Run a collective of the tensors, packed into one message for the backend."""
    # The message of a single tensor is the caller's memory, so it is copied if it is reduced in
    # place.
    is_copied = len(tensors) > 1 or kind == "all_reduce" or comm.size == 1
    if is_copied:
        message = torch.cat(tensors, -1).view(-1)
    else:
        message = tensors[0].reshape(-1)
    tensors.clear()
    if comm.size == 1:
        return Pending(message, None)
    if kind == "all_gather":
        return calls.all_gather_v(message, comm, sizes, background)
    recipe = reduction(message.dtype, op)
    if kind == "all_reduce":
        return start_reduction(message, comm, recipe, background)
    return start_block_reduction(message, comm, recipe, background, sizes=sizes)


def _run_coalesced(
    name: str,
    tensors: Sequence[Tensor],
    comm: Comm,
    run: Callable[[list[Tensor]], list[Tensor]],
    dim: int | None,
    op: str = "",
) -> list[Tensor]:
    """Call `run` with the tensors of each dtype; return the results in the order of the tensors."""
    if calls.loses_gradient(tensors):
        calls.refuse_gradient(partial(_run_coalesced, name, tensors, comm, run, dim=dim, op=op))
    # float32, int64, float32: [0, 2] and [1]
    positions = positions_by_dtype([tensor.dtype for tensor in tensors])

    def run_each() -> list[Tensor]:
        out = list(tensors)
        for indices in positions:
            results = run([tensors[i] for i in indices])
            for i, result in zip(indices, results, strict=True):
                out[i] = result
        return out

    same = {"shapes": [tuple(tensor.shape) for tensor in tensors], "dim": dim}
    return run_observed(run_each, name, comm, tensors, reduce_op=op, same=same)


def all_reduce_coalesced(tensors: Sequence[Tensor], comm: Along, op: str = "sum") -> list[Tensor]:
    """`P -> R`: run `all_reduce` on every tensor of a list, in one collective per dtype.

    Args:
        tensors: any shapes and dtypes, in the same order on all ranks.
        comm: a communicator, or (mesh, axes).
        op: as for `all_reduce`.

    Returns:
        The reduced tensors, in the order of `tensors`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        CollectiveError: as for `all_reduce`.

    Example:
        >>> def example() -> list[torch.Tensor]:
        ...     return all_reduce_coalesced([torch.ones(2), torch.ones(())], comm_over((0, 1)))
        >>> launch(example, 2)[0]
        [tensor([2., 2.]), tensor(2.)]
    """
    comm = comm_of_calls(tensors, comm, "a coalesced collective takes a list of tensors")
    for tensor in tensors:
        reduction(tensor.dtype, op)

    def run(same_dtype: list[Tensor]) -> list[Tensor]:
        flat = [tensor.reshape(-1) for tensor in same_dtype]
        totals = start_packed("all_reduce", flat, comm, op=op, background=False).wait()
        pairs = zip(totals, same_dtype, strict=True)
        return [total.view(tensor.shape) for total, tensor in pairs]

    return _run_coalesced("all_reduce_coalesced", tensors, comm, run, dim=None, op=op)


def all_gather_coalesced(tensors: Sequence[Tensor], comm: Along, dim: int = 0) -> list[Tensor]:
    """`S(dim) -> R`: run `all_gather` on every tensor of a list, in one collective per dtype.

    Args:
        tensors: any shapes and dtypes, in the same order on all ranks.
        comm: a communicator, or (mesh, axes).
        dim: the sharded dim of every tensor.

    Returns:
        The gathered tensors, in the order of `tensors`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: a tensor has no such dim.
        CollectiveError: a tensor requires grad.

    Example:
        >>> def example() -> list[torch.Size]:
        ...     shards = [torch.ones(2), torch.ones(1, 2)]
        ...     return [whole.shape for whole in all_gather_coalesced(shards, comm_over((0, 1)))]
        >>> launch(example, 2)[0]
        [torch.Size([4]), torch.Size([2, 2])]
    """
    comm = comm_of_calls(tensors, comm, "a coalesced collective takes a list of tensors")
    for tensor in tensors:
        normal_dim(tensor if tensor.ndim else tensor.view(1), dim)

    def run(same_dtype: list[Tensor]) -> list[Tensor]:
        flat = [tensor.reshape(-1) for tensor in same_dtype]
        lengths = [tensor.numel() for tensor in flat]

        def unpack(rows: Flat) -> list[Tensor]:
            # shards_of_ranks[i][k]: tensor k of rank i
            shards_of_ranks = [torch.split(row, lengths) for row in rows]
            gathered = []
            for tensor, *shards in zip(same_dtype, *shards_of_ranks, strict=True):
                shape = tensor.shape or (1,)
                gathered.append(torch.cat([shard.view(shape) for shard in shards], dim))
            return gathered

        sizes = [sum(lengths)] * comm.size
        pending = start_packed("all_gather", flat, comm, sizes, background=False)
        return pending.then(unpack).wait()

    return _run_coalesced("all_gather_into_tensor_coalesced", tensors, comm, run, dim=dim)


def reduce_scatter_coalesced(
    tensors: Sequence[Tensor], comm: Along, dim: int = 0, op: str = "sum"
) -> list[Tensor]:
    """`P -> S(dim)`: run `reduce_scatter` on every tensor of a list, in one collective per dtype.

    Args:
        tensors: any shapes and dtypes, in the same order on all ranks; each is a multiple of n long
            along `dim`.
        comm: a communicator of n ranks, or (mesh, axes).
        dim: the dim of every tensor to shard.
        op: as for `all_reduce`.

    Returns:
        This rank's blocks, in the order of `tensors`.

    Raises:
        CollectiveTypeError: an argument of a wrong type.
        DimError: a tensor has no such dim.
        CollectiveError: as for `reduce_scatter`.

    Example:
        >>> def example() -> list[torch.Tensor]:
        ...     terms = [torch.arange(2), torch.ones(4)]
        ...     return reduce_scatter_coalesced(terms, comm_over((0, 1)))
        >>> launch(example, 2)[1]
        [tensor([2]), tensor([2., 2.])]
    """
    comm = comm_of_calls(tensors, comm, "a coalesced collective takes a list of tensors")
    for tensor in tensors:
        reduction(tensor.dtype, op)
        if tensor.shape[normal_dim(tensor, dim)] % comm.size:
            refuse_uneven(tensor, dim, comm)

    def run(same_dtype: list[Tensor]) -> list[Tensor]:
        # 2 ranks, tensors of 4 and 2 elements: rows a b and e go to rank 0, c d and f to rank 1, so
        # 3 elements to each. Each tensor is stacked to (n, *block).
        blocks = [torch.stack(tensor.chunk(comm.size, dim)) for tensor in same_dtype]
        # (2, 2) and (2, 1)
        rows = [block.view(comm.size, -1) for block in blocks]
        # 4 and 2 elements on 2 ranks: [2, 1]
        widths = [row.shape[1] for row in rows]
        sizes = [sum(widths)] * comm.size
        pending = start_packed("reduce_scatter", rows, comm, sizes, op=op, background=False)
        own_row = pending.wait()[0]
        parts = zip(torch.split(own_row, widths), blocks, strict=True)
        return [part.view(block.shape[1:]) for part, block in parts]

    return _run_coalesced("reduce_scatter_tensor_coalesced", tensors, comm, run, dim=dim, op=op)
