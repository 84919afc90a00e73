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
from .sequence_dims import SequenceDim, expand_layout, keeps_fractions, reshape_layout, sequence_dim

# Most guesses of the layouts of a call's tensors that are not followed.
_MOST_GUESSES = 16


class CountedPositionsError(Exception):
    """The error for a call that takes numbers counted from 0 on each rank for global positions."""


class CallLayouts:
    """The layouts of results of calls on tensors with positions.

    Args:
        mesh: an abstract mesh of one axis.
        layout: the positions of its ranks.
        is_counted: tells whether a value is a tensor that counts this rank's positions from 0.
    """

    def __init__(
        self, mesh: DeviceMesh, layout: SequenceLayout, is_counted: Callable[[Any], bool]
    ) -> None:
        self._mesh = mesh
        self._layout = layout
        self._is_counted = is_counted

    def results_of(self, call: TorchCall, outs: Sequence[Tensor]) -> list[Spec | None]:
        """Return the layouts of a call's results; None for a result that is not followed.

        Args:
            call: the call.
            outs: its results on this rank.

        Raises:
            MixedPositionsError: if the function mixes positions.
            UnfollowedCallError: if its effect is unknown.
            CountedPositionsError: if it takes numbers counted from 0 for global positions.
            TornPositionsError: if a reshape mixes positions of several ranges in a row.
            UnknownReshapeError: if a reshape does not show which dim holds positions.
        """
        source = call.args[0] if call.args else None
        if not isinstance(source, Spec) and call.name in RESHAPING | EXPANDING:
            # The argument with positions only gives a shape or a dtype.
            raise UnfollowedCallError
        if isinstance(source, Spec):
            if call.name in RESHAPING:
                if any(isinstance(leaf, torch.dtype) for leaf in call.leaves):
                    # `view(dtype)` may change the number of elements.
                    raise UnfollowedCallError
                return [reshape_layout(source, outs[0].shape, self._layout)]
            if call.name in EXPANDING:
                return [expand_layout(source, outs[0].shape)]
            if call.func is functional.scaled_dot_product_attention:
                # The block replaces this function: the output has the positions of the queries.
                return [expand_layout(source, outs[0].shape)]
            check_dims(call)
            call = with_whole_slices(call)
        reduction = reduction_of(call)
        if reduction:
            return self._results_of_loss(call, reduction)
        if call.func not in SUMS:
            # A function that writes to a tensor has no results to compare.
            return self._run_first_fitting_guess(call, outs or None)
        sum_function: Any = SUMS[call.func]
        specs = self._run_first_fitting_guess(call._replace(func=sum_function), outs)
        return [_mean_of_sum(spec) for spec in specs]

    def _results_of_loss(self, call: TorchCall, reduction: str) -> list[Spec | None]:
        """Return the layout of a loss over all elements.

        The loss of each element is taken instead, because the loss itself communicates: it counts
        the elements of all ranks, and compares labels with the number of classes.
        """
        reduce_op = "sum" if reduction == "sum" else "avg"
        bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
        bound.arguments["reduction"] = "none"
        by_element = call._replace(args=bound.args, kwargs=bound.kwargs)
        # The results are compared with nothing, because they have another shape than the loss.
        (spec,) = self._run_first_fitting_guess(by_element, None)
        if spec is None or not sequence_dim(spec):
            return [None]
        return [Spec(self._mesh, [Partial(reduce_op)], (), None, dtype=spec.dtype)]

    def _run_first_fitting_guess(
        self, call: TorchCall, outs: Sequence[Tensor] | None
    ) -> list[Spec | None]:
        """Return the layouts of the results by the first guess that fits.

        A guess is a layout of each tensor that is not followed: replicated, or sharded like a
        tensor that is followed. A guess fits if the function runs without communication.

        Args:
            call: the call.
            outs: its results on this rank, whose shapes must fit too; None to compare no shapes.
        """
        refused: MixedPositionsError | None = None
        counted = [leaf for leaf in call.leaves if self._is_counted(leaf)]
        for guess in islice(_guess_layouts(call, counted), _MOST_GUESSES):
            try:
                return self._run(guess, outs)
            except MixedPositionsError as error:
                refused = refused or error
            except UnfollowedCallError:
                continue
        if refused is not None and takes_rows_by_value(call):
            raise UnfollowedCallError
        if refused is not None:
            # no guess fits, so the function mixes positions
            raise refused
        if counted and self._fits_as_positions(call, outs):
            raise CountedPositionsError
        raise UnfollowedCallError

    def _fits_as_positions(self, call: TorchCall, outs: Sequence[Tensor] | None) -> bool:
        """Tell whether a call fits if tensors that count from 0 are taken for positions."""
        for guess in islice(_guess_layouts(call, []), _MOST_GUESSES):
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
            if spec is not None and not self._holds_own_rows(spec, call):
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
        # Few rules support a batch that is folded into the sequence. A function that treats each
        # row alone also runs if the dim has one long run of as many rows, so it does not mix
        # positions. If it mixes them, this raises CommunicationForbiddenError again. The layout of
        # the result would be that of other rows, so the result is not followed.
        args, kwargs = pytree.tree_map(_with_one_run, (call.args, call.kwargs))
        run_without_memory(self._mesh, call.func, args, kwargs)
        raise UnfollowedCallError

    def _holds_own_rows(self, spec: Spec, call: TorchCall) -> bool:
        """Tell whether each rank holds the rows of a result that belong to its positions."""
        if sequence_dim(spec) is None:
            return True
        sources = [source for source in call.specs if sequence_dim(source) is not None]
        return any(keeps_fractions(self._layout, source, spec) for source in sources)


def _mean_of_sum(spec: Spec | None) -> Spec | None:
    """Return the layout of a mean, from the layout of the sum of the same elements."""
    if spec is None or not spec.partials:
        return spec
    return spec.with_(placements=[Partial("avg")])


def _with_one_run(value: Any) -> Any:
    """Return a layout with one run of as many rows; a value that is no such layout as it is."""
    held = sequence_dim(value) if isinstance(value, Spec) else None
    if held is None or held.runs == 1:
        return value
    sizes = tuple([size * held.runs for size in held.sizes])
    return SequenceDim(held.dim, 1, sizes).spec_of(value.mesh, value.local_shape, value.dtype)


def _guess_layouts(call: TorchCall, counted: Sequence[Tensor]) -> Iterator[TorchCall]:
    """Yield the call with each choice of layouts for the tensors that are not followed.

    Args:
        call: the call.
        counted: the tensors that are replicated in each guess.
    """
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    held_dims = [held for held in map(sequence_dim, call.specs) if held is not None]
    choices_of_leaves: list[list[Any]] = []
    for leaf in leaves:
        # A plain tensor is replicated, which is the first choice.
        choices = [leaf]
        if type(leaf) in PLAIN and not any(leaf is other for other in counted):
            choices += _layouts_as_shards(leaf, held_dims, call.specs[0].mesh)
        choices_of_leaves.append(choices)
    for chosen in product(*choices_of_leaves):
        args, kwargs = pytree.tree_unflatten(list(chosen), structure)
        yield call._replace(args=args, kwargs=kwargs)


def _layouts_as_shards(
    tensor: Tensor, held_dims: Sequence[SequenceDim], mesh: DeviceMesh
) -> list[Spec]:
    """Return layouts of a tensor as a shard of the sequence.

    There is one for each dim that has as many rows on this rank as a followed tensor's dim with
    positions.

    Args:
        tensor: a local tensor that is not followed.
        held_dims: the dims with positions of the followed tensors.
        mesh: the mesh of the layouts.
    """
    rank = mesh.get_local_rank()
    # a dict as a set in order, because several followed tensors may give one layout
    layouts: dict[Spec, None] = {}
    for held in held_dims:
        local_rows = held.runs * held.sizes[rank]
        for dim, size in enumerate(tensor.shape):
            if size == local_rows:
                placed = held._replace(dim=dim)
                layouts[placed.spec_of(mesh, tensor.shape, tensor.dtype)] = None
    return [*layouts]
