"""Gradient clipping on local shards, with one collective for each mesh.

The result is the result of `torch.nn.utils.clip_grad_norm_`, which passes every gradient through
dispatch twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache, reduce
from itertools import chain
from math import inf, ldexp, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_mesh import DeviceMesh, all_reduce, purpose
from shoal_mesh.internal import all_reduce_, is_observed, require, sums_are_in_tree

from .._torch.compiling import is_tracing, whole_when_compiled
from ..argument_types import suggests_keywords
from ..errors import ArgumentTypeError, ArgumentValueError, MixedTensorError
from ..host_memory import device_of_numbers, upload
from ..layout.spec import Spec
from ..redistribute.shards_in_flight import coalesce
from ..tensor.autograd import gradient_spec, move_to
from ..tensor.dtensor import DTensor
from .norm_scope import NormScope, scope_of


@torch.no_grad()
@suggests_keywords()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place to a norm of at most `max_norm`, and return their norm.

    The norm of all gradients together is a plain tensor, the same on every rank.

    Gradients may have any layout, on several meshes. Plain gradients count as replicated. All ranks
    of a mesh must pass gradients of the same layouts. If the model is the stage of a pipeline that
    `shoal_models.hf.from_pretrained` has loaded, the norm is the norm of all stages.

    Args:
        parameters: tensors; the ones without a gradient are ignored.
        max_norm: the largest norm that is not scaled.
        norm_type: the order of the norm, positive, or infinity; order 2 is exact inside
            `shoal_mesh.sums_in_tree`.
        error_if_nonfinite: raise for a norm that is not finite, rather than scale by it.
        foreach: use foreach operators; by default where the device supports them.

    Raises:
        RuntimeError: if the norm is not finite and `error_if_nonfinite` is set; on every rank.
        ArgumentValueError: if the order is not positive.
        MixedTensorError: if the gradient of a DTensor is a plain tensor, because ranks would
            compute different norms.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     weight = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).requires_grad_()
        ...     weight.grad = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
        ...     clip_grad_norm_([weight], 1.0), weight.grad.to_local()
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    order = float(norm_type)
    if not order > 0:
        raise ArgumentValueError(
            f"clip_grad_norm_: norm_type must be positive, got {norm_type}; torch.nn.utils "
            "supports other orders"
        )
    require(
        parameters, (Tensor, Iterable), "clip_grad_norm_: parameters are tensors", ArgumentTypeError
    )
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    scope = scope_of(owners)
    if scope is None:
        total, shards = _norm(owners, order, foreach)
    else:
        total, shards = _norm_in_scope(scope, owners, order, foreach)
    if not shards:
        return total
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {order} of the gradients is {total.item()}; pass "
            "error_if_nonfinite=False to scale by it anyway"
        )
    # torch reads only `grad` of these.
    holders: Any = [_Holder(shard) for shard in shards]
    nn.utils.clip_grads_with_norm_(holders, max_norm, total, foreach)
    return total


def _norm(
    owners: Sequence[Tensor], order: float, foreach: bool | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the norm of the gradients of some tensors, and their local shards."""
    grads_or_none: list[Any] = [owner.grad for owner in owners]
    grads = [grad for grad in grads_or_none if grad is not None]
    if not grads:
        return torch.tensor(0.0, device="cpu"), []
    specs = tuple([grad._spec if isinstance(grad, DTensor) else grad.dtype for grad in grads])
    contribution = _looked_up(specs)
    _check_plain(owners if contribution.plain else ())
    if contribution.partial:
        _reduce_gradients(owners)
        return _norm(owners, order, foreach)
    shards = _shards(grads)
    return _total(contribution, shards, specs, order, foreach=foreach), shards


def _norm_in_scope(
    scope: NormScope, owners: Sequence[Tensor], order: float, foreach: bool | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the norm over all ranks of a scope, and the local shards of this rank's gradients."""
    norm, _ = _norm([owner for owner in owners if scope.counts(owner)], order, foreach)
    comm = scope.comm()
    gradients = [owner.grad for owner in owners if owner.grad is not None]
    device = gradients[0].device if gradients else norm.device
    # As for the norm of one rank, powers are float64, so that they do not overflow.
    term = norm.to(device_of_numbers(comm, device), torch.float64, copy=True)
    if order == inf:
        total = all_reduce_(term, comm, "max")
    else:
        total = all_reduce_(term.pow_(order), comm, "sum").pow_(1 / order)
    # A rank may have no gradients, and then its parameters show the dtype.
    dtypes = [tensor.dtype for tensor in (gradients or owners)]
    return total.to(device, reduce(torch.promote_types, dtypes)), _shards(gradients)


def _reduce_gradients(owners: Sequence[Tensor]) -> None:
    """`P -> R`: reduce the partial gradients of some tensors, all together."""
    with coalesce():
        for owner in owners:
            grad = owner.grad
            if isinstance(grad, DTensor) and grad._spec.partials:
                owner.grad = move_to(DTensor, grad, gradient_spec(grad._spec))


@whole_when_compiled
def _shards(grads: list[Any]) -> list[Tensor]:
    """Return the local shards.

    A compiler that traced the attribute would not count writing to the shards as writing to the
    DTensors.
    """
    return [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]


class _Holder(NamedTuple):
    """Stand-in for a parameter: an object with a gradient that a compiler can trace."""

    grad: Tensor


class _Part(NamedTuple):
    """The gradients of one mesh."""

    # the position of one of these gradients
    first: int
    # axes of the mesh to reduce over
    axes: tuple[int, ...]
    # positions of the gradients whose shards this rank adds to the norm
    counted: tuple[int, ...]


class _Contribution(NamedTuple):
    """The contribution of this rank to the norm."""

    # one for each mesh, and one for plain gradients
    parts: tuple[_Part, ...]
    dtype: torch.dtype  # the dtype of the norm
    plain: bool  # whether a gradient is plain
    # whether a gradient is partial, so that it has to be reduced first
    partial: bool


def _check_plain(owners: Sequence[Tensor]) -> None:
    """Raise an error if the gradient of a DTensor is a plain tensor."""
    for owner in owners:
        if not isinstance(owner, DTensor) or owner.grad is None:
            continue
        if not isinstance(owner.grad, DTensor):
            raise MixedTensorError(
                f"clip_grad_norm_: the gradient of {owner._spec!r} is a plain tensor of shape "
                f"{tuple(owner.grad.shape)}; make it a DTensor: distribute_tensor or "
                "DTensor.from_local"
            )


def _total(
    contribution: _Contribution,
    shards: Sequence[Tensor],
    gradients: Sequence[Spec | torch.dtype],
    order: float,
    foreach: bool | None,
) -> Tensor:
    """Return the norm of all gradients together."""
    if order == 2 and sums_are_in_tree():
        return _exact_total(contribution, shards, gradients)
    is_maximum = order == inf
    totals = []
    for part in contribution.parts:
        counted = _non_empty(shards, part)
        if counted:
            value = nn.utils.get_total_norm(counted, order, foreach=foreach)
        else:
            value = shards[0].new_zeros(())
        # As for partial norms, powers are float64, so that they do not overflow.
        value = value.to(torch.float64, copy=True)
        if not is_maximum:
            value = value.pow_(order)
        totals.append(_over_ranks(gradients, part, value, "max" if is_maximum else "sum"))
    if is_maximum:
        return reduce(torch.maximum, totals).to(contribution.dtype)
    return reduce(torch.add, totals).pow_(1 / order).to(contribution.dtype)


def _non_empty(shards: Sequence[Tensor], part: _Part) -> list[Tensor]:
    """Return the shards with elements that this rank counts in a part."""
    return [shards[i] for i in part.counted if shards[i].numel()]


def _exact_total(
    contribution: _Contribution, shards: Sequence[Tensor], gradients: Sequence[Spec | torch.dtype]
) -> Tensor:
    """Return the norm of order 2, computed from sums of squares without rounding."""
    elements = 0
    for shard, spec in zip(shards, gradients, strict=True):
        elements += spec.shape.numel() if isinstance(spec, Spec) else shard.numel()
    largest = shards[0].new_zeros((), dtype=torch.float64)
    for part in contribution.parts:
        peaks = [shard.abs().amax().double() for shard in _non_empty(shards, part)]
        peak = torch.stack(peaks).amax() if peaks else largest.new_zeros(())
        largest = torch.maximum(largest, _over_ranks(gradients, part, peak, "max"))
    # The smallest exponent e with largest < 2 ** e.
    exponent = torch.frexp(largest).exponent
    limbs = []
    for part in contribution.parts:
        limbs_of_rank = square_limbs(_non_empty(shards, part), exponent, elements)
        limbs.append(_over_ranks(gradients, part, limbs_of_rank, "sum"))
    # The host waits for the device only here: it reads whether the largest is finite, the exponent
    # and the limbs.
    facts = torch.stack([largest.isfinite().long(), exponent.long()])
    summed_limbs = torch.stack(limbs).sum(0)
    finite, power, *both = torch.cat([facts, summed_limbs]).tolist()
    if not finite:
        return largest.to(contribution.dtype)
    return upload(norm_of_limbs(both, power, elements), shards[0].device, contribution.dtype)


def _over_ranks(gradients: Sequence[Any], part: _Part, value: Tensor, op: str) -> Tensor:
    """Return a value reduced over the axes of a part, of the norm of its gradients."""
    if not part.axes:
        return value
    mesh = gradients[part.first].mesh
    comm = mesh.comm(part.axes)
    if value.is_cpu and device_of_numbers(comm, mesh.device_type).type != "cpu":
        # Gradients are kept on the host, whose tensors the backend does not send.
        reduced = _over_ranks(gradients, part, value.to(mesh.device_type), op)
        return reduced.to(value.device)
    if is_tracing():
        return all_reduce(value, comm, op)
    with purpose("clip_grad_norm_") if is_observed() else nullcontext():
        return all_reduce_(value, comm, op)


def _looked_up(gradients: tuple[Spec | torch.dtype, ...]) -> _Contribution:
    """Return `_contribution` as a constant for compilers, which guard the gradients' specs."""
    return _contribution(gradients)


# `assume_constant_result` makes the same mark, but it imports the compiler.
_looked_up._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's mark


@lru_cache(maxsize=64)
def _contribution(gradients: tuple[Spec | torch.dtype, ...]) -> _Contribution:
    """Return this rank's contribution: replicated gradients count at an axis's first coordinate."""
    # positions of the gradients of each mesh; the key None is for plain gradients
    members: dict[Any, list[int]] = {}
    specs: Any = gradients
    for i, item in enumerate(gradients):
        members.setdefault(getattr(item, "mesh", None), []).append(i)
    plain = tuple(members.pop(None, ()))
    parts = [_part_of_mesh(mesh, indices, specs) for mesh, indices in members.items()]
    if plain:
        parts.append(_Part(plain[0], (), plain))
    partial = any(item.partials for item in gradients if isinstance(item, Spec))
    dtypes = [item.dtype if isinstance(item, Spec) else item for item in gradients]
    dtype = reduce(torch.promote_types, dtypes)
    return _Contribution(tuple(parts), dtype, bool(plain), partial)


def _part_of_mesh(mesh: DeviceMesh, indices: Sequence[int], specs: Sequence[Spec]) -> _Part:
    """Return this rank's part of the gradients of one mesh, at these positions."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return _Part(indices[0], (), ())
    sharding_axes = {}
    for i in indices:
        axes_of_dims = [axes for _, axes in specs[i].shard_order]
        sharding_axes[i] = set(chain.from_iterable(axes_of_dims))
    all_axes = sorted(set().union(*sharding_axes.values()))
    axes = [axis for axis in all_axes if mesh.shape[axis] > 1]
    counted = []
    for i, own_axes in sharding_axes.items():
        replicating = [axis for axis in axes if axis not in own_axes]
        if not any(coordinate[axis] for axis in replicating):
            counted.append(i)
    return _Part(indices[0], tuple(axes), tuple(counted))


# --- exact sums of squares, which do not depend on the sharding of their terms --------------------
#
# Every gradient is divided by a power of two above the largest absolute value, so squares are below
# 1. The first bits of each square are one integer, the next bits a second integer (two limbs).
# Integers add up exactly, in any order. With 2**k elements in all, limbs of 62 - k bits add up
# within an int64. For 128 million elements the limbs have 2 * 35 bits, more than a float64 has.


def square_limbs(shards: Sequence[Tensor], exponent: Tensor, elements: int) -> Tensor:
    """Return (2,) int64: the sums of the first and of the second limbs of all squares.

    All elements of the shards are below 2 ** exponent in absolute value. `elements` is the largest
    possible number of terms on all ranks together.
    """
    bits = _bits(elements)
    limbs = torch.zeros(2, dtype=torch.int64, device=exponent.device)
    unit = torch.tensor(bits, device="cpu")
    for shard in shards:
        scaled = torch.ldexp(shard.double(), -exponent).square_()
        scaled = torch.ldexp(scaled, unit)
        first = scaled.floor()
        rest = torch.ldexp(scaled.sub_(first), unit).round_()
        sums = [first.to(torch.int64).sum(), rest.to(torch.int64).sum()]
        limbs += torch.stack(sums)
    return limbs


def norm_of_limbs(limbs: Sequence[int], exponent: int, elements: int) -> float:
    """Return the norm from the limbs of all ranks."""
    bits = _bits(elements)
    first, rest = limbs
    square = ldexp(float((first << bits) + rest), -2 * bits)
    return ldexp(sqrt(square), exponent)


def _bits(elements: int) -> int:
    """Return the number of bits of a limb, so that the limbs of all elements add up in an int64."""
    return 62 - max(elements - 1, 0).bit_length()
