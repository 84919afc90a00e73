"""Running a function of plain tensors on the local shards of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from shoal_mesh import DeviceMesh

from .._torch import is_tracing, pytree
from ..argument_types import check_callable, check_mesh, check_type
from ..errors import MixedTensorError, PlacementError, PlacementIndexError
from ..layout.placements import Placement
from ..tensor.dtensor import DTensor
from ..tensor.spec_arguments import check_replicated, compared_shapes

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """`func` on local tensors, as a function on DTensors.

    Args:
        func: takes and returns plain tensors; left out, this is a decorator.
        out_placements: placements of the outputs: one list for all of them, or a tuple with one for each;
            None leaves an output plain.
        in_placements: placements that the inputs (flattened) must have, one entry each; None for
            what is no DTensor, or for any.
        in_grad_placements: placements of the inputs' gradients as they come back from `func`.
        device_mesh: the mesh of the outputs; the inputs' own when left out.
        redistribute_inputs: redistribute inputs of other placements instead of raising.

    Returns:
        The wrapped function; given plain tensors alone it is `func`. In the first call with inputs of these specs, the
        ranks compare the shapes of the outputs, and the values of replicated ones. The shapes are compared in every
        call if an input or an output is unevenly sharded, so that uneven outputs are right too.

    Raises:
        PlacementError: (when called) if an input has other placements, if the number of placements does not fit, or
            on all ranks, if outputs that are said to be replicated differ.
        MixedTensorError: (when called) if a placement is given for a plain tensor.
    """
    if func is None:
        options = (out_placements, in_placements, in_grad_placements, device_mesh)
        return lambda func: local_map(func, *options, redistribute_inputs=redistribute_inputs)

    check_callable("local_map", "func", func)
    _check_types(out_placements, device_mesh, in_placements=in_placements, in_grad_placements=in_grad_placements)

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten(args)
        kinds = [isinstance(item, DTensor) for item in flat if isinstance(item, torch.Tensor)]
        if kinds and not any(kinds):
            return func(*args, **kwargs)
        _check_counts(len(flat), in_placements=in_placements, in_grad_placements=in_grad_placements)
        wanted = in_placements or (None,) * len(flat)
        mesh, uneven, local = device_mesh, False, []
        for i, item in enumerate(flat):
            if not isinstance(item, DTensor):
                local.append(_plain(i, item, wanted[i]))
                continue
            placed = _placed(i, item, wanted[i], redistribute_inputs)
            mesh = mesh or placed.device_mesh
            uneven = uneven or not placed._spec.even
            gradient = in_grad_placements[i] if in_grad_placements is not None else None
            local.append(placed.to_local(grad_placements=gradient))
        result = func(*pytree.tree_unflatten(local, structure), **kwargs)
        return _outputs(result, out_placements, mesh, _Signature(_key(func, flat), uneven))

    return mapped


def _key(func: Any, flat: Sequence[Any]) -> tuple[Any, ...]:
    """What calls of one signature share: the code of the function, and the specs of its inputs."""
    return getattr(func, "__code__", func), tuple(item._spec for item in flat if isinstance(item, DTensor))


def _check_types(outputs: Any, mesh: Any, **inputs: Any) -> None:
    for name, entries in inputs.items():
        check_type("local_map", name, entries, (tuple, list, type(None)), "a tuple with one entry for each input")
    check_type("local_map", "out_placements", outputs, (tuple, list, type(None)), "a list of placements")
    if mesh is not None:
        check_mesh("local_map", mesh)


def _plain(number: int, item: Any, wanted: Placements) -> Any:
    """An input that is no DTensor, if no placements are asked of it."""
    if wanted is not None and isinstance(item, torch.Tensor):
        raise MixedTensorError(f"local_map: input {number} is a plain tensor, but {list(wanted)} is asked of it")
    return item


def _check_counts(inputs: int, **given: Sequence[Placements] | None) -> None:
    for name, entries in given.items():
        if entries is not None and len(entries) != inputs:
            raise PlacementIndexError(f"local_map: {name} has {len(entries)} entries, the function got {inputs} inputs")


def _placed(index: int, item: DTensor, wanted: Placements, redistribute: bool) -> DTensor:
    """An input in the placements that are asked of it."""
    if wanted is None:
        return item
    target = item._spec.with_(placements=tuple(wanted))
    if item._spec.same_layout(target):
        return item
    if not redistribute:
        raise PlacementError(
            f"local_map: input {index} is {item._spec!r}, but {list(wanted)} is asked of it; "
            f"redistribute it, or set redistribute_inputs=True"
        )
    return item.redistribute(placements=wanted)


class _Signature:
    """One function on inputs of certain specs: whether its outputs were compared, and whether they always are."""

    __slots__ = ("always", "first", "key")

    # (function, specs) -> whether an output is unevenly sharded; the same on every rank.
    _known: ClassVar[dict[Any, bool]] = {}

    def __init__(self, key: Any, uneven: bool) -> None:
        self.key, self.first = key, key not in self._known
        self.always = uneven or self._known.get(key, False)

    def remember(self, uneven: bool) -> None:
        """Keep what the first call has shown."""
        if len(self._known) >= MAX_SIGNATURES:
            del self._known[next(iter(self._known))]
        self._known[self.key] = uneven


MAX_SIGNATURES = 4096


def _outputs(result: Any, out_placements: Any, mesh: DeviceMesh | None, signature: _Signature) -> Any:
    flat, structure = pytree.tree_flatten(result)
    each = out_placements if isinstance(out_placements, tuple) else (out_placements,) * len(flat)
    if len(each) != len(flat):
        raise PlacementIndexError(
            f"local_map: out_placements has {len(each)} entries, the function returned {len(flat)} outputs"
        )
    outputs: list[Any] = []
    for i, (item, placements) in enumerate(zip(flat, each, strict=True)):
        if placements is None or not isinstance(item, torch.Tensor):
            outputs.append(item)
            continue
        if mesh is None:
            raise PlacementError("local_map: no input is a DTensor, so device_mesh is needed for the outputs")
        outputs.append(_wrapped(i, item, mesh, placements, signature))
    if signature.first and not is_tracing():
        signature.remember(any(isinstance(item, DTensor) and not item._spec.even for item in outputs))
    return pytree.tree_unflatten(outputs, structure)


def _wrapped(
    index: int, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], signature: _Signature
) -> DTensor:
    """An output as a DTensor, compared over the mesh where its signature asks for it."""
    compares = (signature.first or signature.always) and mesh.get_coordinate() is not None and not is_tracing()
    shape, order = None, None
    if compares:
        placements, shape, order = compared_shapes(local, mesh, placements, None)
    if compares and signature.first:
        check_replicated(f"output {index} of local_map", local.detach(), mesh, placements)
    return DTensor.from_local(local, mesh, placements, shape=shape, shard_order=order)
