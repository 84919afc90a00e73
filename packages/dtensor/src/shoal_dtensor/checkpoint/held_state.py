"""HeldState: state that the remaining ranks still hold, moved to a new mesh without a checkpoint.

Each rank describes the boxes that it holds and wants. From these descriptions all ranks determine
the newest step that they hold completely, and exchange its blocks.

`V -> V` begins the docstring of a collective whose tensors may differ by rank (V, varying), before
and after it.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shoal_mesh import comm_over, purpose
from shoal_mesh.internal import agree, require

from ..api.optimizer_states import drop_unmade_buffers, with_first_states
from ..errors import ArgumentTypeError, CheckpointError
from ..layout.boxes import Box, slices_of, volume, whole_box
from ..redistribute.blocks import BlockMove, Shards, exchange_blocks, move_blocks
from ..tensor.dtensor import DTensor
from .components import is_component, state_of
from .optimizer_load import is_plain_optimizer
from .saved_names import shorten

# the keys that lead to a value in nested mappings and lists
Name = tuple[str | int, ...]


class _HeldPart(NamedTuple):
    """The boxes of a global tensor that a rank holds or wants.

    Attributes:
        shape: the shape of the global tensor.
        kind: its dtype and type of device, as text.
        boxes: the boxes.
    """

    shape: tuple[int, ...]
    kind: str
    boxes: tuple[Box, ...]


class _Facts(NamedTuple):
    """The message of one rank to the others."""

    # step and lineage of the state that it holds whole
    held: tuple[int, str] | None
    # distinguishes states kept after this recovery from states kept before it
    fresh: str
    present: Mapping[Name, _HeldPart]
    values: Mapping[Name, object]  # values that are not tensors
    wanted: Mapping[Name, _HeldPart]
    # names of everything that the rank requests, tensors and other values
    requested: frozenset[Name]


class HeldState:
    """The newest whole state whose shards this rank holds, for recovery after ranks are lost.

    After a loss of ranks all shards of a tensor may still exist: along a data-parallel axis, for
    example, another rank has the same shard. `recover` moves them to the layout of the new mesh.
    The recovered state belongs to one step: if ranks stopped at different steps, it is the newest
    complete one. It is not mixed with a checkpoint.

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
        self._tensors: dict[Name, tuple[_HeldPart, Shards]] = {}
        self._values: dict[Name, object] = {}

    def keep(self, step: int, state_dict: Mapping[str, Any]) -> None:
        """Record the state after a step by reference: nothing is copied or sent.

        Args:
            step: its number.
            state_dict: tensors, DTensors and other values by name, and modules, optimizers,
                schedulers and other objects with a `state_dict`; mappings and lists may be nested.

        Raises:
            ArgumentTypeError: an argument of a wrong type.
            CheckpointError: a DTensor is partial.
        """
        require(step, int, "HeldState.keep: step is an int", ArgumentTypeError)
        require(state_dict, Mapping, "HeldState.keep: state_dict is a mapping", ArgumentTypeError)
        self.forget()
        for name, _, value in _leaves(state_dict, state_of):
            if isinstance(value, Tensor):
                self._tensors[name] = _part_of(name, value)
            else:
                self._values[name] = value
        self._step = step

    def forget(self) -> None:
        """Discard the recorded state, before it changes.

        From here to the next `keep`, this rank does not hold a whole state.
        """
        self._step = None
        self._tensors = {}
        self._values = {}

    @torch.no_grad()
    def recover(self, state_dict: dict[str, Any], *, strict: bool = True) -> int | None:
        """Fill a state dict from the shards that ranks hold.

        All ranks of the world call this, including new ones.

        Args:
            state_dict: the state to fill in place, in its layout, with the same names, shapes and
                dtypes. Modules, optimizers, schedulers and similar objects load their state
                themselves.
            strict: raise if the ranks hold entries that no rank's state dict takes; False leaves
                them out.

        Returns:
            The step; None if the ranks do not hold a whole step. Then nothing is changed.

        Raises:
            ArgumentTypeError: `state_dict` is not a dict.
            CheckpointError: on all ranks: a tensor is held in another shape or dtype, or, with
                `strict`, the ranks hold an entry that no rank takes.
        """
        require(state_dict, dict, "HeldState.recover: state_dict is a dict", ArgumentTypeError)
        components: list[tuple[Any, Any]] = []
        leaves = [*_leaves(state_dict, partial(_read_into, components))]
        targets = {}
        for name, _, value in leaves:
            if isinstance(value, Tensor):
                targets[name] = _part_of(name, value)

        def own_facts() -> _Facts:
            held = None if self._step is None else (self._step, self._lineage)
            present = {name: part for name, (part, _) in self._tensors.items()}
            wanted = {name: part for name, (part, _) in targets.items()}
            requested = frozenset(leaf.name for leaf in leaves)
            fresh = secrets.token_hex(8)
            values = self._values
            return _Facts(held, fresh, present, values, wanted=wanted, requested=requested)

        facts = agree(own_facts, dist.group.WORLD, CheckpointError)
        wanted = {name: part for fact in facts for name, part in fact.wanted.items()}
        self._lineage = facts[0].fresh
        newest = _newest(facts, wanted)
        if newest is None:
            return None
        holders = [rank for rank, fact in enumerate(facts) if fact.held == newest]
        if strict:
            _check_taken(facts, [facts[rank] for rank in holders])
        step, _ = newest
        with purpose(f"recover step {step}"):
            self._move(facts, holders, wanted, targets)
        values: dict[Name, object] = {}
        for rank in reversed(holders):
            values.update(facts[rank].values)
        for name, container, value in leaves:
            if not isinstance(value, Tensor) and name in values:
                container[name[-1]] = values[name]
        _load_components(components)
        return step

    def _move(
        self,
        facts: Sequence[_Facts],
        holders: Sequence[int],
        wanted: Mapping[Name, _HeldPart],
        targets: Mapping[Name, tuple[_HeldPart, Shards]],
    ) -> None:
        """`V -> V`: copy the shards that holders have to the targets of all ranks."""
        missing_part = _HeldPart((), "", ())
        no_shards: tuple[_HeldPart, Shards] = (missing_part, [])
        moves = defaultdict[str, list[BlockMove]](list)
        for name in sorted(wanted, key=repr):
            before = []
            for rank, fact in enumerate(facts):
                part = fact.present.get(name, missing_part)
                before.append(part.boxes if rank in holders else ())
            after = [fact.wanted.get(name, missing_part).boxes for fact in facts]
            blocks = exchange_blocks(dist.get_rank(), before, after)
            _, sources = self._tensors.get(name, no_shards)
            _, destinations = targets.get(name, no_shards)
            moves[wanted[name].kind].append(BlockMove(blocks, sources, destinations))
        # one all-to-all for each dtype and kind of device
        for moves_of_kind in moves.values():
            move_blocks(moves_of_kind, comm_over(range(dist.get_world_size())))


def _read_into(components: list[tuple[Any, Any]], component: Any) -> Any:
    """Return the state of a component to fill; for an optimizer, its state at a first step."""
    optimizers = [component] if is_plain_optimizer(component) else []
    with with_first_states(optimizers):
        state = component.state_dict()
    components.append((component, state))
    return state


def _check_taken(facts: list[_Facts], holders: list[_Facts]) -> None:
    """Raise, equally on all ranks, for held values that no rank requests."""
    requested = {name for fact in facts for name in fact.requested}
    held = {name: None for fact in holders for name in (*fact.present, *fact.values)}
    left_over = [".".join(map(str, name)) for name in held if name not in requested]
    if left_over:
        raise CheckpointError(
            f"the ranks hold {shorten(left_over)}, which the state dict to fill does not contain: "
            "add these entries; an optimizer that has not made a step has an empty state dict, "
            "so pass the optimizer itself. strict=False leaves these entries out"
        )


class _HeldLeaf(NamedTuple):
    """A value of a state dict, with its name and the container that holds it."""

    name: Name
    container: Any
    value: Any


def _leaves(value: Any, read: Callable[[Any], Any], name: Name = ()) -> Iterator[_HeldLeaf]:
    """Yield every value with its name and its container.

    A component is replaced by the values of the state that `read` returns for it.
    """
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        content = read(item) if is_component(item) else item
        if isinstance(content, Mapping | list):
            yield from _leaves(content, read, (*name, key))
        else:
            yield _HeldLeaf((*name, key), value, content)


def _part_of(name: Name, tensor: Tensor) -> tuple[_HeldPart, Shards]:
    """Return this rank's part of a tensor and its boxes, each with the view of the local tensor."""
    shape = tuple(tensor.shape)
    storage = f"{tensor.dtype} on {tensor.device.type}"
    if not isinstance(tensor, DTensor):
        whole = whole_box(shape)
        return _HeldPart(shape, storage, (whole,)), [(whole, tensor.detach())]
    if tensor.spec.partials:
        raise CheckpointError(
            f"{'.'.join(map(str, name))} is partial ({tensor.placements}): redistribute it first"
        )
    spec = tensor.spec
    local = tensor._local_tensor.detach()
    shards: list[tuple[Box, Tensor]] = []
    if spec.coordinate is not None:
        for box, place in spec.boxes(spec.coordinate):
            if volume(box):
                shards.append((box, local[slices_of(place)]))
    return _HeldPart(shape, storage, tuple(box for box, _ in shards)), shards


def _load_components(components: Sequence[tuple[Any, Any]]) -> None:
    """Have modules, optimizers and similar objects load their states."""
    for component, state in components:
        component.load_state_dict(state)
        if isinstance(component, Optimizer):
            drop_unmade_buffers(component)


def _newest(facts: list[_Facts], wanted: Mapping[Name, _HeldPart]) -> tuple[int, str] | None:
    """Return the newest step, with its lineage, of which the ranks hold everything they want."""
    known = {fact.held for fact in facts if fact.held is not None}
    for held in sorted(known, reverse=True):
        boxes = defaultdict[Name, set[Box]](set)
        for fact in facts:
            if fact.held != held:
                continue
            for name, part in fact.present.items():
                target = wanted.get(name, part)
                if (part.shape, part.kind) != (target.shape, target.kind):
                    dotted = ".".join(map(str, name))
                    is_held = f"{part.shape} of {part.kind}"
                    is_wanted = f"{target.shape} of {target.kind}"
                    raise CheckpointError(
                        f"{dotted} is held as {is_held}, but the state to fill has {is_wanted}: "
                        "recover into a state of the same shapes"
                    )
                boxes[name] |= {*part.boxes}
        if all(_cover(boxes[name], part.shape) for name, part in wanted.items()):
            return held
    return None


def _cover(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Tell whether disjoint boxes cover a tensor."""
    return sum(map(volume, boxes)) == prod(shape)
