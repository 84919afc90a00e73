"""`rulecheck`: a check of the types that an autograd function declares, by the values it computes.

The function runs on local parts of its arguments on simulated ranks, which are threads of this
process, and once on the global arguments. The outputs of the ranks, joined by their declared types,
must be the global outputs.

May import: rules, types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal_dtensor.errors import ArgumentValueError, ShoalTensorError, SpmdTypeError
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, spmd
from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_mesh.internal import html_table

from .rules import check_arguments, run_declaration
from .types import SpmdType

__all__ = [
    "RuleCheckError",
    "RuleCheckPlacement",
    "RuleCheckRejection",
    "RuleCheckReport",
    "rulecheck",
]

RuleCheckPlacement = dict[str, dict[str, Any]]


class RuleCheckError(ShoalTensorError, AssertionError):
    """A function whose declared types do not describe the values that it computes."""


class RuleCheckRejection(NamedTuple):
    """A combination of types that a declaration refuses.

    Attributes:
        placement: the types of each tensor argument, by axis.
        reason: the text of the refusal.

    Example:
        >>> rulecheck.RuleCheckRejection({"x": {"tp": P}}, "P is not linear here").reason
        'P is not linear here'
    """

    placement: RuleCheckPlacement
    reason: str


@dataclass
class RuleCheckReport:
    """The combinations of types that `rulecheck` tried.

    Attributes:
        checked: the combinations whose values agree with the declared types.
        rejected: the combinations that the declaration refuses.

    Example:
        >>> report = rulecheck.RuleCheckReport(checked=[{"x": {"tp": R}}])
        >>> len(report.checked), len(report.rejected)
        (1, 0)
    """

    checked: list[RuleCheckPlacement] = field(default_factory=list)
    rejected: list[RuleCheckRejection] = field(default_factory=list)

    def _repr_html_(self) -> str:
        """Return the combinations as a table for notebooks."""
        agreeing = [(placement, "agrees with the values") for placement in self.checked]
        rejected = [(one.placement, f"rejected: {one.reason}") for one in self.rejected]
        return html_table(agreeing + rejected, header=("types", "result"))


class _RankResult(NamedTuple):
    """The outputs of one rank, with their types."""

    coordinate: tuple[int, ...]
    outputs: list[Tensor]
    types: list[dict[str, Any]]


def rulecheck(  # noqa: PLR0913  # the public package's arguments
    cls: type,
    args: Sequence[Any],
    placements: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    local_tensor_mode: bool = False,
) -> RuleCheckReport | None:
    """Compare the declared types of an autograd function with the values that it computes.

    Args:
        cls: an autograd function with `spmd_typecheck`.
        args: arguments of `apply`, with global tensors. A string is the name of an axis, which the
            function passes to collectives of shoal.
        placements: for each tensor argument, by its name in `forward`, types by axis or an
            `SpmdType`. None tries all combinations: replicated, dims of one size sharded together,
            partial, invariant.
        mesh: axis sizes by name. By default there are two ranks on the axis that `args` names, or
            on an axis "shard".
        rtol: relative tolerance for values; values of R and I must be equal on all ranks.
        atol: absolute tolerance.
        local_tensor_mode: accepted; ranks are always simulated.

    Returns:
        The report if `placements` is None, otherwise None.

    Raises:
        RuleCheckError: if values do not agree with the types, or the declaration refuses every
            combination.
        SpmdTypeError: if the declaration refuses `placements`.
        ArgumentValueError: if several arguments are strings and `mesh` is left out.

    Example:
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...     @staticmethod
        ...     def spmd_typecheck(*, x):
        ...         return rules.einsum("...->...", x, linear_in=(0,))
        >>> len(rulecheck.rulecheck(Double, [torch.randn(4, 6)]).checked)
        5
    """
    axes = dict(mesh) if mesh is not None else _default_axes(args)
    trial = _Trial(cls, args, axes, tolerances={"rtol": rtol, "atol": atol})
    if placements is not None:
        placement = {name: _by_name(types) for name, types in placements.items()}
        trial.check(placement)
        return None
    report = RuleCheckReport()
    for placement in trial.combinations():
        try:
            trial.check(placement)
        except SpmdTypeError as error:
            report.rejected.append(RuleCheckRejection(placement, str(error)))
        else:
            report.checked.append(placement)
    if not report.checked:
        reasons = {rejection.reason for rejection in report.rejected}
        raise RuleCheckError(
            f"{cls.__name__}.spmd_typecheck refuses every combination of types: {sorted(reasons)}"
        )
    return report


def _default_axes(args: Sequence[Any]) -> dict[str, int]:
    """Return an axis of two ranks, named by the string among the arguments."""
    names = [item for item in args if isinstance(item, str)]
    if len(names) > 1:
        raise ArgumentValueError(
            f"rulecheck: several arguments are strings, {names}; name the axes among them, such "
            f"as mesh={{{names[0]!r}: 2}}"
        )
    return {names[0]: 2} if names else {"shard": 2}


def _by_name(types: Any) -> dict[str, Any]:
    """Return types by axis, with S(i) for the axes of a partition spec."""
    if not isinstance(types, SpmdType):
        return dict(types)
    found = dict(types.local_type)
    for dim, entry in enumerate(types.partition_spec or ()):
        axes = spmd.axes_of_entry(entry)
        found.update(dict.fromkeys(axes, Shard(dim)))
    return found


class _Trial:
    """A function and its global arguments, to run on local parts of them on simulated ranks."""

    def __init__(
        self,
        cls: Any,
        args: Sequence[Any],
        axes: Mapping[str, int],
        *,
        tolerances: Mapping[str, float],
    ) -> None:
        self.cls = cls
        self.args = tuple(args)
        self.axes = dict(axes)
        self.tolerances: dict[str, Any] = dict(tolerances)
        self.names = [*inspect.signature(self.cls.forward).parameters]
        # without `setup_context`, the first argument of `forward` is the context
        has_context = "setup_context" not in vars(cls)
        if has_context:
            self.names = self.names[1:]
        one_rank = abstract_mesh((1,) * len(self.axes), tuple(self.axes))
        with spmd.set_current_mesh(one_rank):
            results = _simulate_ranks(one_rank, lambda mesh: self._apply(mesh, self.args))
        self.expected: list[Tensor] = results[0]

    def _apply(self, mesh: DeviceMesh, args: Sequence[Any]) -> list[Tensor]:
        """Return the output tensors of the function on a mesh."""
        with spmd.set_current_mesh(mesh):
            return spmd.tensors_in(self.cls.apply(*args))

    def combinations(self) -> Iterator[RuleCheckPlacement]:
        """Yield types for all tensor arguments: every combination of one choice per axis."""
        named = dict(zip(self.names, self.args, strict=False))
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        choices = [*_choices(tensors)]
        for chosen in product(choices, repeat=len(self.axes)):
            placement: RuleCheckPlacement = {name: {} for name in tensors}
            for axis, by_tensor in zip(self.axes, chosen, strict=True):
                for name, axis_type in by_tensor.items():
                    placement[name][axis] = axis_type
            if _has_one_axis_per_dim(placement):
                yield placement

    def check(self, placement: RuleCheckPlacement) -> None:
        """Compare declared types with values for one combination."""
        mesh = abstract_mesh([*self.axes.values()], tuple(self.axes))
        results = _simulate_ranks(mesh, lambda mesh: self._on_rank(mesh, placement))
        for index, expected in enumerate(self.expected):
            parts = {result.coordinate: result.outputs[index] for result in results}
            types = results[0].types[index]
            self._compare(parts, types, expected, placement)

    def _on_rank(self, mesh: DeviceMesh, placement: RuleCheckPlacement) -> _RankResult:
        """Run the function and its declaration on one rank."""
        coordinate = mesh.get_coordinate() or ()
        with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
            local_args = []
            for name, value in zip(self.names, self.args, strict=False):
                types = placement.get(name)
                if types is None or not isinstance(value, Tensor):
                    local_args.append(value)
                    continue
                with spmd.paused():
                    part = self._part(value, types, coordinate)
                types_by_axis: dict[Any, Any] = dict(types)
                spmd.assert_tensor_type(part, types_by_axis)
                local_args.append(part)
            with spmd.paused():
                check_arguments(self.cls, tuple(local_args))
                outputs = self.cls.apply(*local_args)
                run_declaration(self.cls, outputs, tuple(local_args))
            listed = spmd.tensors_in(outputs)
            types_of_outputs = [self._named_types(output) for output in listed]
        return _RankResult(coordinate, listed, types_of_outputs)

    def _named_types(self, tensor: Tensor) -> dict[str, Any]:
        """Return the type of a tensor along each axis, by name; R for an axis without a type."""
        found = spmd.type_of(tensor) or spmd.TensorType({})
        named = {repr(axis): axis_type for axis, axis_type in found.by_axis.items()}
        return {name: named.get(name, R) for name in self.axes}

    def _part(self, value: Tensor, types: Mapping[str, Any], coordinate: tuple[int, ...]) -> Tensor:
        """Return the part of a global tensor on one rank; parts of type P add up to the tensor."""
        part = value
        for (name, size), coord in zip(self.axes.items(), coordinate, strict=True):
            axis_type = types[name]
            if isinstance(axis_type, Shard):
                part = part.chunk(size, axis_type.dim)[coord]
            elif axis_type is P:
                # 3 ranks: the addends -x, x, x
                factor = 2 - size if coord == 0 else 1
                part = part * factor
        return part.clone()

    def _compare(
        self,
        parts: Mapping[tuple[int, ...], Tensor],
        types: Mapping[str, Any],
        expected: Tensor,
        placement: RuleCheckPlacement,
    ) -> None:
        """Raise RuleCheckError unless the parts of an output, joined, are the expected output."""
        joined = dict(parts)
        # The last axis is joined first: 2 x 2 parts, then 2, then 1 with the coordinate ().
        for name in reversed(self.axes):
            joined = self._join_last_axis(joined, name, types[name], placement)
        result = joined[()]
        has_shape = result.shape == expected.shape
        if not has_shape or not torch.allclose(result, expected, **self.tolerances):
            raise RuleCheckError(
                f"{self.cls.__name__} with {placement}: the ranks' outputs combined by the "
                f"declared type {dict(types)}, of shape {tuple(result.shape)}, differ from the "
                f"result of one process, of shape {tuple(expected.shape)}"
            )

    def _join_last_axis(
        self,
        parts: Mapping[tuple[int, ...], Tensor],
        axis: str,
        axis_type: Any,
        placement: RuleCheckPlacement,
    ) -> dict[tuple[int, ...], Tensor]:
        """Join the parts along the last axis of their coordinates."""
        lines: dict[tuple[int, ...], list[Tensor]] = {}
        for coordinate in sorted(parts):
            lines.setdefault(coordinate[:-1], []).append(parts[coordinate])
        joined = {}
        for coordinate, line in lines.items():
            first = line[0]
            if axis_type in (R, I):
                if not all(torch.equal(first, other) for other in line):
                    raise RuleCheckError(
                        f"{self.cls.__name__} with {placement}: an output is declared {axis_type} "
                        f"over {axis!r}, but its values differ between ranks"
                    )
                joined[coordinate] = first
            elif axis_type is P:
                joined[coordinate] = torch.stack(line).sum(0)
            elif axis_type is V:
                raise RuleCheckError(
                    f"{self.cls.__name__}: an output is declared V over {axis!r}, which "
                    "cannot be checked against its values; declare S(i), or assert it in the "
                    "caller"
                )
            else:
                joined[coordinate] = torch.cat(line, axis_type.dim)
        return joined


def _choices(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Yield types of all tensors on one axis: R, dims of one size together, P, and I."""
    replicated: dict[str, Any] = dict.fromkeys(tensors, R)
    yield dict(replicated)
    sizes = {size for tensor in tensors.values() for size in tensor.shape if size > 1}
    for size in sorted(sizes):
        places = [
            (name, dim)
            for name, tensor in tensors.items()
            for dim, size_of_dim in enumerate(tensor.shape)
            if size_of_dim == size
        ]
        for count in range(1, len(places) + 1):
            for chosen in combinations(places, count):
                sharded = {name: Shard(dim) for name, dim in chosen}
                # skip choices of two dims of one tensor
                if len(sharded) == count:
                    yield replicated | sharded
    floating = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    for name in floating:
        yield {**replicated, name: P}
    if len(floating) > 1:
        yield replicated | dict.fromkeys(floating, P)
    yield dict.fromkeys(tensors, I)


def _has_one_axis_per_dim(placement: RuleCheckPlacement) -> bool:
    """Return whether no dim is sharded by two axes, because their order would be unknown."""
    for types in placement.values():
        dims = [axis_type.dim for axis_type in types.values() if isinstance(axis_type, Shard)]
        if len({*dims}) < len(dims):
            return False
    return True


def _simulate_ranks(mesh: DeviceMesh, run: Callable[[DeviceMesh], Any]) -> list[Any]:
    """Run a function on all ranks of a mesh, and return the results by rank."""
    # imported here because few programs need the lab
    from shoal_mesh.lab import simulate_ranks

    return simulate_ranks(mesh, run)
