"""The systems that the operator sweep can test: shoal, and torch's own DTensor as the peer.

A system knows its meshes of 4 ranks, the placements to try for a tensor, how to place a tensor, and
which collectives ran. Both are asked the same questions; what only shoal has (ragged shards) is
left out for the peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

RANKS = 4
MESHES = ((4,), (2, 2))
# A partial tensor is 2x on the first coordinate of an axis, -x on the second, zero elsewhere: an
# exact sum, and an operator that is not linear cannot get away with working on the parts.  Over a
# second axis it is all on the first coordinate: 4x - 2x - 2x + x is not exact in every order, and a
# minimum that is compared with itself shows it.
WEIGHTS = (2, -1, 0, 0)
# over a second axis, and for values that are not finite
FIRST_ALONE = (1, 0, 0, 0)
MOVING = ("all_gather", "all_to_all", "broadcast", "scatter", "send", "recv")

# Tensors after so many are lists of positions that torch reads on the host, before any dispatch:
# they stay plain.
ON_HOST = {"tensor_split": 1}

Placements = tuple[Any, ...]


class System:
    """What the sweep asks of an implementation of DTensor.

    Attributes:
        kind: its DTensor class.
        ragged: whether shards of given sizes exist.
    """

    kind: Any
    make: Any
    shard: Any
    whole: Any
    partial: Any
    ragged: ClassVar[bool] = False

    def __init__(self) -> None:
        self.meshes: dict[tuple[int, ...], Any] = {}
        self.options_of: dict[Any, list[Placements]] = {}

    def init_mesh(self, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def mesh(self, shape: tuple[int, ...]) -> Any:
        """The mesh of that shape, made once: every rank comes to it at the same case."""
        if shape not in self.meshes:
            self.meshes[shape] = self.init_mesh(shape)
        return self.meshes[shape]

    def options(self, tensor: Tensor, mesh: tuple[int, ...]) -> list[Placements]:
        """The placements to try for a tensor, all replicated first."""
        linear = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        key = (tensor.shape, linear, mesh)
        if key not in self.options_of:
            single = [
                self.whole,
                *map(self.shard, range(tensor.ndim)),
                *([self.partial] if linear else []),
            ]
            found: list[Placements] = list(product(single, repeat=len(mesh)))
            for dim, n in enumerate(tensor.shape):
                if n > 2 and self.ragged and len(mesh) == 1:
                    found.append((self.shard(dim, sizes=(n - 2, 0, 2, 0)),))
                elif n > 2 and self.ragged:
                    found += [(self.shard(dim, sizes=(1, n - 1)), self.whole)]
                    found += [(self.partial, self.shard(dim, sizes=(n, 0)))] if linear else []
            self.options_of[key] = found
        return self.options_of[key]

    def place(self, tensor: Tensor, placements: Placements, mesh: tuple[int, ...]) -> Any:
        """A global tensor placed, as a leaf."""
        partial = [axis for axis, placement in enumerate(placements) if placement.is_partial()]
        value = tensor.detach()
        for axis in partial:
            at = self.mesh(mesh).get_local_rank(axis)
            alone = value if FIRST_ALONE[at] else torch.zeros_like(value)
            first = axis == partial[0]
            value = torch.where(value.isfinite(), value * WEIGHTS[at], alone) if first else alone
        kept = [
            self.whole if axis in partial else placement
            for axis, placement in enumerate(placements)
        ]
        made = self.make(value.clone(), self.mesh(mesh), kept, src_data_rank=None)
        if partial:
            made = self.as_partial(made, placements, tensor)
        return made.requires_grad_(tensor.requires_grad)

    def as_partial(self, made: Any, placements: Placements, like: Tensor) -> Any:
        """`made`, whose replicated axes that `placements` calls partial hold parts."""
        local = made.to_local()
        return self.kind.from_local(
            local,
            made.device_mesh,
            placements,
            run_check=False,
            shape=like.shape,
            stride=like.contiguous().stride(),
        )

    def place_like(self, tensor: Tensor, model: Any) -> Any:
        """A global tensor in the layout of `model`, where that is not partial."""
        if not isinstance(model, self.kind):
            return tensor
        placements = [self.whole if p.is_partial() else p for p in model.placements]
        return self.make(
            tensor, model.device_mesh, placements, src_data_rank=None, **self.order_of(model)
        )

    def order_of(self, model: Any) -> dict[str, Any]:
        """What `make` must be described besides the placements to place a tensor as `model` is."""
        return {}

    def refuses(self, error: Exception) -> bool:
        """Whether an error says that a write would have to change the written tensor's layout."""
        raise NotImplementedError

    def counted(self) -> Any:
        """A context that yields a `Counter` of the collectives inside."""
        raise NotImplementedError

    def settled(self, got: Any) -> Any:
        """A result with whatever communication it takes to compare it done.

        All ranks do it for all results.
        """
        raise NotImplementedError

    def whole_of(self, got: Any) -> Any:
        """A result as a plain tensor."""
        return got.full_tensor() if isinstance(got, self.kind) else got

    def part_of(self, expected: Tensor, got: Any) -> tuple[Tensor, Tensor]:
        """What a settled result's values on this rank should be, and what they are."""
        raise NotImplementedError


class Shoal(System):
    """shoal as the system under test: each rank compares what it holds itself."""

    ragged = True

    def __init__(self) -> None:
        super().__init__()
        import shoal_dtensor

        self.kind, self.make = shoal_dtensor.DTensor, shoal_dtensor.distribute_tensor
        self.shard, self.whole, self.partial = (
            shoal_dtensor.Shard,
            shoal_dtensor.Replicate(),
            shoal_dtensor.Partial(),
        )

    def init_mesh(self, shape: tuple[int, ...]) -> Any:
        from shoal_mesh import init_device_mesh

        return init_device_mesh("cpu", shape)

    def order_of(self, model: Any) -> dict[str, Any]:
        return {"shard_order": model._spec.shard_order}

    def refuses(self, error: Exception) -> bool:
        return type(error).__name__ == "InPlaceError"

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        from shoal_mesh.internal import observe, unobserve

        described = _Told()
        observe(described)
        try:
            yield described.ops
        finally:
            unobserve(described)

    def settled(self, got: Any) -> Any:
        if isinstance(got, self.kind) and got._spec.partials:
            return got.redistribute(
                placements=[self.whole if p.is_partial() else p for p in got.placements]
            )
        return got

    def part_of(self, expected: Tensor, got: Any) -> tuple[Tensor, Tensor]:
        from shoal_dtensor.testing import part_of

        if not isinstance(got, self.kind):
            return expected, got
        return part_of(expected, got._spec, got._spec.coordinate), got._local_tensor


class _Told:
    """An observer that counts."""

    def __init__(self) -> None:
        self.ops: Counter[str] = Counter()

    def before(self, event: Any) -> None:
        self.ops[event.op] += 1

    def after(self, event: Any) -> None:
        """Nothing more to know."""


class Torch(System):
    """torch's own DTensor, the peer."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed import tensor as peer

        self.kind, self.make = peer.DTensor, peer.distribute_tensor
        self.shard, self.whole, self.partial = peer.Shard, peer.Replicate(), peer.Partial()

    def init_mesh(self, shape: tuple[int, ...]) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", shape)

    def refuses(self, error: Exception) -> bool:
        return "in-place operations that require placement changes" in str(error)

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        from torch.distributed.tensor.debug import CommDebugMode

        described: Counter[str] = Counter()
        with CommDebugMode() as mode:  # type: ignore[no-untyped-call]  # torch gives it no types
            try:
                yield described
            finally:
                described.update({str(op): count for op, count in mode.get_comm_counts().items()})

    def settled(self, got: Any) -> Any:
        return self.whole_of(got)

    def part_of(self, expected: Tensor, got: Any) -> tuple[Tensor, Tensor]:
        return expected, got


def letter(described: Counter[str]) -> str:
    """`l`: no collective ran; `r`: only reductions; `g`: values were gathered or exchanged."""
    if not described.total():
        return "l"
    moving = any(word in op for op in described if "reduce_scatter" not in op for word in MOVING)
    return "g" if moving else "r"


def spread(count: int, limit: int) -> Sequence[int]:
    """At most `limit` of `count` indices, evenly spread."""
    return range(count) if count <= limit else sorted({i * count // limit for i in range(limit)})
