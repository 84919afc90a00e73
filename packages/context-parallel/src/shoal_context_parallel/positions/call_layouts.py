"""`CallLayouts`: the layouts of a call's results, by dispatch on DTensors without memory.

May import: calls_of_functions, sequence_dims.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor, Partial, Spec
from shoal_dtensor.errors import CommunicationForbiddenError
from shoal_dtensor.internal import pytree, run_without_memory
from shoal_mesh import DeviceMesh

from ..sequence_layout import SequenceLayout
from .calls_of_functions import (
    EXPANDING,
    PLAIN,
    RESHAPING,
    SUMS,
    MixedPositionsError,
    TorchCall,
    UnfollowedCallError,
    check_dims,
    reason,
    reduction_of,
    takes_rows_by_value,
    with_whole_slices,
)
from .sequence_dims import SequenceDim, expanded, holds_blocks, reshaped, sequence_dim

# For a tensor without a note, the layouts that are tried where it does not fit as replicated.
_MOST_GUESSES = 16


class CountedPositionsError(Exception):
    """The error for a call that takes numbers of a rank's own positions for those of the sequence."""


class CallLayouts:
    """The layouts of results of calls on tensors with positions.

    Args:
        mesh: an abstract mesh of one axis.
        layout: the positions of its ranks.
        is_counted: tells whether a tensor counts this rank's positions from 0.
    """

    def __init__(
        self, mesh: DeviceMesh, layout: SequenceLayout, is_counted: Callable[[Any], bool]
    ) -> None:
        self._mesh = mesh
        self._layout = layout
        self._is_counted = is_counted

    def after(self, call: TorchCall, outs: Sequence[Tensor]) -> list[Spec | None]:
        """Return the layouts of a call's results; None for a result that is not followed.

        Raises:
            MixedPositionsError: the function mixes positions.
            UnfollowedCallError: its effect is unknown.
        """
        source = call.args[0] if call.args else None
        if not isinstance(source, Spec) and call.name in RESHAPING | EXPANDING:
            # the argument with positions only gives a shape or a dtype
            raise UnfollowedCallError
        if isinstance(source, Spec):
            if call.name in RESHAPING:
                if any(isinstance(leaf, torch.dtype) for leaf in call.leaves):
                    raise UnfollowedCallError
                return [reshaped(source, outs[0].shape, self._layout)]
            if call.name in EXPANDING:
                return [expanded(source, outs[0].shape)]
            if call.func is functional.scaled_dot_product_attention:
                # the attention of the block
                return [expanded(source, outs[0].shape)]
            check_dims(call)
            call = with_whole_slices(call)
        reduction = reduction_of(call)
        if reduction:
            return self._after_loss(call, reduction)
        if call.func not in SUMS:
            return self._run_as_fits(call, outs or None)
        total: Any = SUMS[call.func]
        specs = self._run_as_fits(call._replace(func=total), outs)
        return [_averaged(spec) for spec in specs]

    def _after_loss(self, call: TorchCall, reduction: str) -> list[Spec | None]:
        """Return the layout of a loss over all elements.

        The loss of each element is taken instead, because the loss itself communicates: it counts
        the elements of all ranks, and compares labels with the number of classes.
        """
        name = "sum" if reduction == "sum" else "avg"
        bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
        bound.arguments["reduction"] = "none"
        each = call._replace(args=bound.args, kwargs=bound.kwargs)
        (spec,) = self._run_as_fits(each, None)
        if spec is None or not sequence_dim(spec):
            return [None]
        return [Spec(self._mesh, [Partial(name)], (), None, dtype=spec.dtype)]

    def _run_as_fits(self, call: TorchCall, outs: Sequence[Tensor] | None) -> list[Spec | None]:
        """Return the layouts of results of the first guess that fits.

        A guess is a layout of the tensors that are not followed: replicated, or sharded like one
        that is. `outs` are the results; None if their shapes are not compared.
        """
        refused: MixedPositionsError | None = None
        counted = [leaf for leaf in call.leaves if self._is_counted(leaf)]
        for guess in islice(_guesses(call, counted), _MOST_GUESSES):
            try:
                return self._run(guess, outs)
            except MixedPositionsError as error:
                refused = refused or error
            except UnfollowedCallError:
                continue
        if refused is not None and takes_rows_by_value(call):
            raise UnfollowedCallError
        if refused is not None:
            raise refused
        if counted and self._fits_as_positions(call, outs):
            raise CountedPositionsError
        raise UnfollowedCallError

    def _fits_as_positions(self, call: TorchCall, outs: Sequence[Tensor] | None) -> bool:
        """Tell whether a call fits if tensors that count from 0 are taken for positions."""
        for guess in islice(_guesses(call, []), _MOST_GUESSES):
            with suppress(MixedPositionsError, UnfollowedCallError):
                self._run(guess, outs)
                return True
        return False

    def _run(self, call: TorchCall, outs: Sequence[Tensor] | None) -> list[Spec | None]:
        """Return the layouts of the results of a function on DTensors without memory."""
        try:
            results = self._run_without_memory(call)
        except CommunicationForbiddenError as error:
            raise MixedPositionsError(reason(call)) from error
        except Exception as error:
            # An error of any type: the function does not take DTensors, or sizes do not fit.
            raise UnfollowedCallError from error
        if outs is not None and len(results) != len(outs):
            raise UnfollowedCallError
        specs: list[Spec | None] = []
        for index, result in enumerate(results):
            spec = result.spec if isinstance(result, DTensor) else None
            if spec is not None and not self._is_whole(spec, call):
                raise MixedPositionsError(reason(call))
            if spec is not None and outs is not None and spec.local_shape != outs[index].shape:
                raise UnfollowedCallError
            specs.append(spec)
        return specs

    def _run_without_memory(self, call: TorchCall) -> list[Tensor]:
        try:
            return run_without_memory(self._mesh, call.func, call.args, call.kwargs)
        except CommunicationForbiddenError:
            if not any(spec.is_strided for spec in call.specs):
                raise
        # Few rules take a batch that is folded into the sequence. For a function that treats rows
        # alone, other rows are the same. Its result is not followed, because its rows are others.
        args, kwargs = pytree.tree_map(_in_one_run, (call.args, call.kwargs))
        run_without_memory(self._mesh, call.func, args, kwargs)
        raise UnfollowedCallError

    def _is_whole(self, spec: Spec, call: TorchCall) -> bool:
        """Tell whether ranks hold the rows of a result that belong to their positions."""
        if sequence_dim(spec) is None:
            return True
        sources = [each for each in call.specs if sequence_dim(each) is not None]
        return any(holds_blocks(self._layout, source, spec) for source in sources)


def _averaged(spec: Spec | None) -> Spec | None:
    """Return the layout of a mean, from the layout of the sum of the same elements."""
    if spec is None or not spec.partials:
        return spec
    return spec.with_(placements=[Partial("avg")])


def _in_one_run(value: Any) -> Any:
    """Return a layout with as many rows of one run, for a layout with several runs of positions."""
    held = sequence_dim(value) if isinstance(value, Spec) else None
    if held is None or held.runs == 1:
        return value
    sizes = tuple([size * held.runs for size in held.sizes])
    return SequenceDim(held.dim, 1, sizes).spec_of(value.mesh, value.local_shape, value.dtype)


def _guesses(call: TorchCall, counted: Sequence[Tensor]) -> Iterator[TorchCall]:
    """Yield the call with layouts for the tensors that are not followed.

    Those in `counted` are replicated.
    """
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    held = [found for found in map(sequence_dim, call.specs) if found is not None]
    choices: list[list[Any]] = []
    for leaf in leaves:
        options = [leaf]
        if type(leaf) in PLAIN and not any(leaf is other for other in counted):
            options += _as_shards(leaf, held, call.specs[0].mesh)
        choices.append(options)
    for chosen in product(*choices):
        args, kwargs = pytree.tree_unflatten(list(chosen), structure)
        yield call._replace(args=args, kwargs=kwargs)


def _as_shards(tensor: Tensor, held: Sequence[SequenceDim], mesh: DeviceMesh) -> list[Spec]:
    """Return the layouts of a tensor whose dims have as many rows as those of followed tensors."""
    rank = mesh.get_local_rank()
    found: dict[Spec, None] = {}
    for each in held:
        for dim, size in enumerate(tensor.shape):
            if size == each.runs * each.sizes[rank]:
                placed = each._replace(dim=dim)
                found[placed.spec_of(mesh, tensor.shape, tensor.dtype)] = None
    return [*found]
