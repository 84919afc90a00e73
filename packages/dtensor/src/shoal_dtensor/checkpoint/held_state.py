"""HeldState: what ranks that go on still hold of a run's state, moved to a new mesh without reading a checkpoint."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_mesh import comm_over, purpose
from shoal_mesh.internal import agree

from ..argument_types import check_type
from ..errors import CheckpointError
from ..layout.boxes import Box, slices_of, volume, whole_box
from ..redistribute.blocks import Blocks, Shards, exchange_blocks, move_blocks
from ..tensor.dtensor import DTensor

Name = tuple[str | int, ...]  # the keys that lead to a value in nested mappings and lists


@dataclass(frozen=True, slots=True)
class _HeldShards:
    """What a rank has of a tensor, or wants of it: boxes of the global tensor, each with its place in the local one."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[Box, Box], ...]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one rank tells the others; `step` is None if it holds no whole state.

    Attributes:
        values: those that are not tensors, by name.
    """

    step: int | None
    lineage: str
    fresh: str
    held: Mapping[Name, _HeldShards]
    values: Mapping[Name, object]
    wanted: Mapping[Name, _HeldShards]


class HeldState:
    """The newest whole state that this rank holds its shards of, for the ranks that are left after a loss.

    After a loss the shards of a tensor may still all be there: along a data-parallel axis, for one, another rank has
    the same. `recover` then moves them to the layout of the new mesh. What it brings is of one step: where ranks
    stopped at different ones, the newest that is complete. Nothing is mixed with a checkpoint.

    Example:
        >>> import torch
        >>> from shoal_dtensor import Replicate, Shard, distribute_tensor
        >>> from shoal_dtensor.checkpoint import HeldState
        >>> from shoal_mesh import init_device_mesh, launch
        >>> def moved() -> tuple[int | None, list[float]]:
        ...     mesh, held = init_device_mesh("cpu", (2,)), HeldState()
        ...     held.keep(7, {"weight": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])})
        ...     weight = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
        ...     return held.recover({"weight": weight}), weight.to_local().tolist()
        >>> launch(moved, 2)[0]
        (7, [0.0, 1.0, 2.0, 3.0])
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._lineage = ""
        self._tensors: dict[Name, tuple[_HeldShards, Tensor]] = {}
        self._values: dict[Name, object] = {}

    def keep(self, step: int, state_dict: Mapping[str, Any]) -> None:
        """Remember the state after a step, by reference: nothing is copied or sent.

        Args:
            step: its number.
            state_dict: tensors, DTensors and other values by name; mappings and lists may be nested.

        Raises:
            ArgumentTypeError: an argument of a wrong type.
            CheckpointError: a DTensor is partial.
        """
        check_type("HeldState.keep", "step", step, int, "an int")
        check_type("HeldState.keep", "state_dict", state_dict, Mapping, "a mapping")
        self.forget()
        for name, _, value in _leaves(state_dict):
            if isinstance(value, Tensor):
                self._tensors[name] = _shards_of(name, value)
            else:
                self._values[name] = value
        self._step = step

    def forget(self) -> None:
        """Called before what is remembered changes: from here to the next `keep` this rank holds no whole state."""
        self._step, self._tensors, self._values = None, {}, {}

    @torch.no_grad()
    def recover(self, state_dict: dict[str, Any]) -> int | None:
        """Fill a state dict from what the ranks hold; called by all ranks of the world, newcomers too.

        Args:
            state_dict: what to fill in place, in its layout: of the same names, shapes and dtypes.

        Returns:
            The step; None where the ranks hold no step whole, and nothing is changed.

        Raises:
            ArgumentTypeError: `state_dict` is not a dict.
            CheckpointError: on all ranks: a tensor is held in another shape or dtype.
        """
        check_type("HeldState.recover", "state_dict", state_dict, dict, "a dict")
        targets = {n: _shards_of(n, value) for n, _, value in _leaves(state_dict) if isinstance(value, Tensor)}
        facts = agree(lambda: self._facts(targets), dist.group.WORLD, CheckpointError)
        self._lineage, found = facts[0].fresh, _newest(facts)
        if found is None:
            return None
        holders = [rank for rank, fact in enumerate(facts) if (fact.step, fact.lineage) == found]
        with purpose(f"recover step {found[0]}"):
            self._exchange(facts, holders, targets)
        values = facts[holders[0]].values
        for name, container, value in [*_leaves(state_dict)]:
            if not isinstance(value, Tensor) and name in values:
                container[name[-1]] = values[name]
        return found[0]

    def _facts(self, targets: Mapping[Name, tuple[_HeldShards, Tensor]]) -> _Facts:
        return _Facts(
            self._step,
            self._lineage,
            secrets.token_hex(8),  # what is kept from now on is never taken for what was kept before
            {name: shards for name, (shards, _) in self._tensors.items()},
            self._values,
            {name: shards for name, (shards, _) in targets.items()},
        )

    def _exchange(
        self, facts: list[_Facts], holders: list[int], targets: Mapping[Name, tuple[_HeldShards, Tensor]]
    ) -> None:
        """One all-to-all for each dtype and kind of device."""
        me, size = dist.get_rank(), dist.get_world_size()
        moves = defaultdict[str, list[tuple[Blocks, Shards, Shards]]](list)
        for name in sorted({name for fact in facts for name in fact.wanted}, key=repr):
            dtype = next(fact.wanted[name].dtype for fact in facts if name in fact.wanted)
            before = [_boxes(fact.held, name) if rank in holders else [] for rank, fact in enumerate(facts)]
            after = [_boxes(fact.wanted, name) for fact in facts]
            blocks = exchange_blocks(me, before, after)
            moves[dtype].append((blocks, _views(self._tensors, name), _views(targets, name)))
        for each in moves.values():
            move_blocks(each, comm_over(range(size)))


def _leaves(value: Any, name: Name = ()) -> Iterator[tuple[Name, Any, Any]]:
    """Every value with its name and what it is in."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, each in items:
        if isinstance(each, Mapping | list):
            yield from _leaves(each, (*name, key))
        else:
            yield (*name, key), value, each


def _shards_of(name: Name, tensor: Tensor) -> tuple[_HeldShards, Tensor]:
    """What this rank has of a tensor, and the local tensor that holds it."""
    shape, kind = tuple(tensor.shape), f"{tensor.dtype} on {tensor.device.type}"
    if not isinstance(tensor, DTensor):
        return _HeldShards(shape, kind, ((whole_box(shape), whole_box(shape)),)), tensor.detach()
    if tensor.spec.partials:
        raise CheckpointError(f"{'.'.join(map(str, name))} is partial ({tensor.placements}): redistribute it first")
    spec = tensor.spec
    boxes = [] if spec.coordinate is None else spec.boxes(spec.coordinate)
    return _HeldShards(shape, kind, tuple(pair for pair in boxes if volume(pair[0]))), tensor._local_tensor.detach()


def _newest(facts: list[_Facts]) -> tuple[int, str] | None:
    """The newest step, with its lineage, of which the ranks hold all that any of them wants."""
    wanted = {name: shards for fact in facts for name, shards in fact.wanted.items()}
    candidates = {(fact.step, fact.lineage) for fact in facts if fact.step is not None}
    for step, lineage in sorted(candidates, reverse=True):
        held = defaultdict[Name, set[Box]](set)
        for fact in facts:
            if (fact.step, fact.lineage) == (step, lineage):
                for name, shards in fact.held.items():
                    _check_same(name, shards, wanted.get(name, shards))
                    held[name] |= {box for box, _ in shards.boxes}
        if all(sum(map(volume, held[name])) == prod(shards.shape) for name, shards in wanted.items()):
            return step, lineage
    return None


def _check_same(name: Name, held: _HeldShards, wanted: _HeldShards) -> None:
    if (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
        raise CheckpointError(
            f"{'.'.join(map(str, name))} is held as {held.shape} of {held.dtype} and wanted as {wanted.shape} of "
            f"{wanted.dtype}: recover into a state of the same shapes"
        )


def _boxes(tensors: Mapping[Name, _HeldShards], name: Name) -> list[Box]:
    return [box for box, _ in tensors[name].boxes] if name in tensors else []


def _views(tensors: Mapping[Name, tuple[_HeldShards, Tensor]], name: Name) -> Shards:
    """This rank's boxes of a tensor, each with the view of the local tensor that holds it."""
    if name not in tensors:
        return []
    shards, local = tensors[name]
    return [(box, local[slices_of(place)]) for box, place in shards.boxes]
