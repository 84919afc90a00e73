"""Checks of parameters: data-parallel ranks have the same ones, and they have values.

Parameters on the meta device, or without initialized values, are errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from shoal_dtensor.internal import (
    check_initialized,
    check_materialized,
    check_same_parameters,
    has_no_values,
)

from .data_axes import DataAxes
from .leaf_checks import check_steps_in_backward
from .sharded_parameters import ShardedParameter, Site


def check_same_on_data_axes(
    function: str, parameters: Iterable[tuple[str, Tensor]], axes: DataAxes
) -> None:
    """Raise LockstepError unless all data-parallel ranks have the same parameters.

    A parameter that is frozen on one rank and trained on another also differs, because only the
    second rank would reduce its gradient.
    """
    check_same_parameters(function, parameters, axes.mesh, "data-parallel ranks")


def check_module_values(function: str, module: nn.Module) -> None:
    """Raise StyleError if parameters of a module have no values."""
    named = [*module.named_parameters()]
    check_materialized(function, [name for name, p in named if p.is_meta])
    check_initialized(function, [name for name, p in named if has_no_values(p)])


def check_values(
    function: str,
    modules: Sequence[nn.Module],
    parameters: Sequence[ShardedParameter],
    *,
    were_on_meta: bool,
) -> None:
    """Raise StyleError if sharded parameters of modules have no values, or step in the backward.

    Nothing is checked on a mesh of the device type meta, where no parameter ever has values.

    Args:
        function: the name of the function that is called, for the error.
        modules: the modules that contain the parameters. In the error, the name of a parameter is
            its path from one of these modules.
        parameters: the parameters.
        were_on_meta: whether parameters were on the meta device when they were sharded.
    """
    for parameter in parameters:
        check_steps_in_backward(function, parameter.leaf)
    # `gathered` is the layout of a parameter in the modules' computation. All parameters are on one
    # mesh.
    if not parameters or parameters[0].gathered.mesh.device_type == "meta":
        return
    on_meta = [p for p in parameters if p.leaf.device.type == "meta"]
    if on_meta:
        # This raises for these parameters, and so does `check_initialized` below.
        sites = [site for parameter in on_meta for site in parameter.sites]
        check_materialized(function, [*_names_of(sites, modules)])
    # Only parameters that were on the meta device can have memory without values (`to_empty()`).
    # The check reads all elements, so it is left out for others.
    if were_on_meta:
        unset = [site for p in parameters if has_no_values(p.leaf) for site in p.sites]
        check_initialized(function, [*_names_of(unset, modules)])


def _names_of(sites: Sequence[Site], modules: Sequence[nn.Module]) -> Iterator[str]:
    """Return the names of parameters in modules."""
    for root in modules:
        for path, module in root.named_modules():
            yield from (f"{path}.{key}".lstrip(".") for owner, key in sites if owner is module)
