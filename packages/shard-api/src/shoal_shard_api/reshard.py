"""Moving a tensor from any layout to any other: exact box intersections and one all-to-all.

``plan`` is pure and says what one rank sends and receives; ``move`` runs it, differentiably.  Scattering from one rank
is a move from a layout with one shard, gathering to one rank a move to such a layout.  Ranks without a shard pass an
empty tensor in place of one, so that every rank takes part in the gradient's collective too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from shoal_mesh import Comm, all_gather_v, all_to_all_v

from .boxes import Box, intersection, relative, volume
from .metadata import Layout

Part = tuple[int, tuple[slice, ...]]
"""A block of a local shard: position of the shard among this rank's shards, and the index of the block in it."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's share of a move.

    Attributes:
        sends: Blocks of the local source shards, in the order in which they are sent.
        send_sizes: Elements that go to every rank of the group.
        receives: Blocks of the local target shards, in the order in which they arrive.
        recv_sizes: Elements that come from every rank of the group.
        shapes: Shape of every local target shard; one empty shape where this rank gets none.
        send_as_is: The local source shard, flattened, already is what is sent.
        recv_dim: Dim along which the arriving blocks, one after the other, make up the one local target shard (along
            dim 0 what arrives already is it); None if they do not.
    """

    sends: tuple[Part, ...]
    send_sizes: tuple[int, ...]
    receives: tuple[Part, ...]
    recv_sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    send_as_is: bool
    recv_dim: int | None


@lru_cache(maxsize=4096)
def plan(source: Layout, target: Layout, ranks: tuple[int, ...], rank: int) -> Exchange:
    """What global rank ``rank`` sends and receives when a tensor moves from ``source`` to ``target``.

    Example:
        >>> rows = ((0, ((0, 1), (0, 2))), (1, ((1, 2), (0, 2))))
        >>> columns = ((0, ((0, 2), (0, 1))), (1, ((0, 2), (1, 2))))
        >>> plan(rows, columns, (0, 1), 0).send_sizes
        (1, 1)
    """
    held = {each: [box for r, box in source if r == each] for each in ranks}
    wanted = {each: [box for r, box in target if r == each] for each in ranks}
    sends, send_sizes = _blocks([(held[rank], wanted[peer]) for peer in ranks], of_source=True)
    receives, recv_sizes = _blocks([(held[peer], wanted[rank]) for peer in ranks], of_source=False)
    return Exchange(
        sends,
        send_sizes,
        receives,
        recv_sizes,
        tuple(tuple(stop - start for start, stop in box) for box in wanted[rank]) or ((0,),),
        _stacked(sends, held[rank]) == 0,
        _stacked(receives, wanted[rank]),
    )


def _blocks(pairs: list[tuple[list[Box], list[Box]]], *, of_source: bool) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    parts: list[Part] = []
    sizes = []
    for sources, targets in pairs:
        elements = 0
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                common = intersection(source, target)
                if common is not None:
                    parts.append((i, relative(common, source)) if of_source else (j, relative(common, target)))
                    elements += volume(common)
        sizes.append(elements)
    return tuple(parts), tuple(sizes)


def _stacked(parts: Sequence[Part], boxes: Sequence[Box]) -> int | None:
    """The dim along which the blocks, one after the other, make up the one local shard; None if there is none."""
    if len(boxes) != 1 or not parts:
        return None
    shape = [stop - start for start, stop in boxes[0]]
    for dim in range(len(shape)):
        at = 0
        for _, where in parts:
            whole = all(s.stop - s.start == n for d, (s, n) in enumerate(zip(where, shape, strict=True)) if d != dim)
            if where[dim].start != at or not whole:
                break
            at = where[dim].stop
        else:
            if at == shape[dim]:
                return dim
    return None


def move(parts: Sequence[torch.Tensor], source: Layout, target: Layout, comm: Comm) -> list[torch.Tensor]:
    """This rank's shards under ``target``, given its shards under ``source``; differentiable, all ranks call it.

    Args:
        parts: Local source shards in the order of the layout; one empty tensor if there are none.
        source: Present holder and box of every shard.
        target: Wanted holder and box of every shard.
        comm: The communicator over the process group.

    Returns:
        The local target shards in the order of the layout, or one empty tensor.  The given tensors themselves if the
        two layouts are equal.
    """
    if source == target:
        return list(parts)
    moved: tuple[torch.Tensor, ...] = _Move.apply(source, target, comm, *parts)  # type: ignore[no-untyped-call]  # torch
    return list(moved)


class _Move(torch.autograd.Function):
    """The gradient of a move is the move back."""

    @staticmethod
    def forward(ctx: Any, source: Layout, target: Layout, comm: Comm, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.back = (target, source, comm)
        return tuple(_run(plan(source, target, comm.ranks, comm.ranks[comm.rank]), parts, comm))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Move.apply(*ctx.back, *grads)  # type: ignore[no-untyped-call]  # torch


def _run(exchange: Exchange, parts: Sequence[torch.Tensor], comm: Comm) -> list[torch.Tensor]:
    arrived = all_to_all_v(_packed(exchange, parts), comm, exchange.send_sizes, exchange.recv_sizes)
    if exchange.recv_dim == 0:
        return [arrived.view(exchange.shapes[0])]
    if exchange.recv_dim is not None:
        shapes = [[each.stop - each.start for each in where] for _, where in exchange.receives]
        blocks = torch.split(arrived, [prod(shape) for shape in shapes])
        return [torch.cat([b.view(shape) for b, shape in zip(blocks, shapes, strict=True)], exchange.recv_dim)]
    out = [arrived.new_empty(shape) for shape in exchange.shapes]
    _unpack(exchange, arrived, out)
    return out


def _packed(exchange: Exchange, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What this rank sends, block after block."""
    if exchange.send_as_is:
        return parts[0].contiguous().view(-1)
    flat = parts[0].new_empty(sum(exchange.send_sizes))
    at = 0
    for index, where in exchange.sends:
        block = parts[index][where]
        flat[at : at + block.numel()].view(block.shape).copy_(block)
        at += block.numel()
    return flat


def _unpack(exchange: Exchange, arrived: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
    """Put what arrived where it belongs."""
    at = 0
    for index, where in exchange.receives:
        block = out[index][where]
        block.copy_(arrived[at : at + block.numel()].view(block.shape))
        at += block.numel()


def collect(parts: Sequence[torch.Tensor], layout: Layout, shape: torch.Size, comm: Comm) -> torch.Tensor:
    """The full tensor, on every rank; differentiable, all ranks call it.

    The result counts as one value that all ranks hold, so a rank's gradient of it is taken as everyone's.
    """
    full: torch.Tensor = _Collect.apply(layout, shape, comm, *parts)  # type: ignore[no-untyped-call]  # torch
    return full


class _Collect(torch.autograd.Function):
    """All-gather of exact sizes; backward keeps the own part."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, shape: torch.Size, comm: Comm, *parts: torch.Tensor) -> torch.Tensor:
        rank = comm.ranks[comm.rank]
        ctx.own = [box for r, box in layout if r == rank]
        sizes = [sum(volume(box) for r, box in layout if r == each) for each in comm.ranks]
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        arrived = all_gather_v(flat, comm, sizes, 0)
        full = parts[0].new_empty(shape)
        at = 0
        for each in comm.ranks:
            for box in (box for r, box in layout if r == each):
                block = full[tuple(slice(start, stop) for start, stop in box)]
                block.copy_(arrived[at : at + block.numel()].view(block.shape))
                at += block.numel()
        assert at == prod(shape), "the layout holds every element once"
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        own = [grad[tuple(slice(start, stop) for start, stop in box)].contiguous() for box in ctx.own]
        return None, None, None, *(own or [grad.new_empty(0)])


def deliver(full: torch.Tensor, layout: Layout, src: int, comm: Comm) -> list[torch.Tensor]:
    """This rank's shards of the full tensor that ``src`` (rank in the group) has; all ranks call it.

    Args:
        full: The tensor; on the other ranks only its size and dtype count.
        layout: Wanted holder and box of every shard.
        src: Whose data are sent, an index in the group.
        comm: The communicator over the process group.
    """
    whole = tuple((0, size) for size in full.shape)
    part = full.contiguous() if comm.rank == src else full.new_empty(0)
    source = ((comm.ranks[src], whole),)
    if source == layout:
        return [part.clone()]
    with torch.no_grad():
        return move([part], source, layout, comm)


def gather(parts: Sequence[torch.Tensor], layout: Layout, dst: int, comm: Comm, out: torch.Tensor | None) -> None:
    """Write the full tensor into ``out`` on ``dst`` (rank in the group); all ranks call it."""
    # One block from every rank, copied straight to where it belongs: no second full tensor on dst.
    target = ((comm.ranks[dst], tuple((0, max(box[dim][1] for _, box in layout)) for dim in range(len(layout[0][1])))),)
    exchange = plan(layout, target, comm.ranks, comm.ranks[comm.rank])
    arrived = all_to_all_v(_packed(exchange, parts), comm, exchange.send_sizes, exchange.recv_sizes)
    if out is not None:
        _unpack(exchange, arrived, [out])
