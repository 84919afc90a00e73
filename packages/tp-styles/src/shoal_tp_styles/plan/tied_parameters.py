"""Parameters that several modules share, and the layouts that styles request for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from shoal_dtensor import DTensor, Replicate

from ..sharding.module_sharding import ParameterPlacement
from .styled_module import StyledModule


class ParameterOwner(NamedTuple):
    """The place of a parameter: the `id` of the module that holds it, and its name there."""

    module_id: int
    name: str


class OwnedParameter(NamedTuple):
    """A parameter in one of the modules that hold it.

    Attributes:
        owner: the module and the parameter's name in it.
        path: path of the parameter from the module whose parameters are yielded: the root of the
            model, or a module with a style.
        param: the parameter.
    """

    owner: ParameterOwner
    path: str
    param: nn.Parameter


class RequestedLayout(NamedTuple):
    """The layout that a style requests for a parameter.

    Attributes:
        on_first_axis: placement along the style's first axis.
        on_second_axis: placement along the second axis; None for styles that act on one axis.
        axis: name or names of these axes.
    """

    on_first_axis: ParameterPlacement
    on_second_axis: ParameterPlacement | None
    axis: object

    def __str__(self) -> str:
        return str(tuple(self))


class LayoutRequest(NamedTuple):
    """A request of one style on one module for one parameter."""

    styled: StyledModule
    layout: RequestedLayout


class TiedParameter(NamedTuple):
    """A plain parameter that several modules hold.

    Attributes:
        paths: path of the parameter from the root, by owner.
        requests: request of the style of each owner; owners without a style are left out.
    """

    paths: dict[ParameterOwner, str]
    requests: dict[ParameterOwner, LayoutRequest]

    def layouts_by_path(self) -> dict[str, RequestedLayout | None]:
        """Return the layout that is requested at each path; None where no style requests one."""
        layouts: dict[str, RequestedLayout | None] = {}
        for owner, path in self.paths.items():
            request = self.requests.get(owner)
            layouts[path] = None if request is None else request.layout
        return layouts


def owned_parameters(owners: Iterable[tuple[str, nn.Module]]) -> Iterator[OwnedParameter]:
    """Yield every parameter of the modules, given as (path, module), once per owner."""
    for prefix, module in owners:
        for name, param in module._parameters.items():
            if param is not None:
                path = f"{prefix}.{name}" if prefix else name
                yield OwnedParameter(ParameterOwner(id(module), name), path, param)


def tied_parameters(root: nn.Module, styled: Iterable[StyledModule]) -> list[TiedParameter]:
    """Find the plain parameters that several modules share, and the layouts requested for them."""
    paths_of: dict[int, dict[ParameterOwner, str]] = {}
    for owner, path, param in owned_parameters(root.named_modules()):
        # An earlier call has sharded a parameter that is a DTensor. Its layout is compared later,
        # where styles are applied (`apply`).
        if not isinstance(param, DTensor):
            paths_of.setdefault(id(param), {})[owner] = path
    shared = [paths for paths in paths_of.values() if len(paths) > 1]
    if not shared:
        return []
    requests = _layout_requests(styled)
    tied: list[TiedParameter] = []
    for paths in shared:
        requested = {owner: requests[owner] for owner in paths if owner in requests}
        tied.append(TiedParameter(paths, requested))
    return tied


def _layout_requests(styled: Iterable[StyledModule]) -> dict[ParameterOwner, LayoutRequest]:
    """Return the layout that a style requests for each parameter of its module."""
    requests: dict[ParameterOwner, LayoutRequest] = {}
    for styled_module in styled:
        sharding = styled_module.sharding
        # A style that does not distribute only changes layouts of inputs and outputs, and requests
        # nothing for parameters.
        if sharding is None or not sharding.distributes:
            continue
        owners = sharding.owners(styled_module.module)
        # The paths begin at the module with the style, like the keys of `sharding.parameters`.
        for owner, local_path, _ in owned_parameters(owners):
            first = sharding.parameters.get(local_path, Replicate())
            second: ParameterPlacement | None = None
            if sharding.second_axis is not None:
                second = sharding.second_axis.get(local_path, Replicate())
            layout = RequestedLayout(first, second, styled_module.style.axis)
            requests[owner] = LayoutRequest(styled_module, layout)
    return requests
