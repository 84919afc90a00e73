"""The parameters of a unit: found in its modules and sharded; given back while styles are applied, and taken again.

May import: policies, sharded_parameters, unit_forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from shoal_dtensor import Shard
from shoal_dtensor.errors import TiedWeightError
from shoal_dtensor.internal import register_owner
from shoal_mesh import DeviceMesh

from .policies import MixedPrecisionPolicy, OffloadPolicy
from .sharded_parameters import DataAxes, Site, shard_parameter, whole_parameters
from .unit_forward import STATE, UnitState, states_of


class UnitParameters:
    """Where a unit's parameters are from, and how they are sharded.

    Attributes:
        owner: the function that makes units, for messages.
        state: of the unit.
        axes: the data axes.
        ignored: parameters that stay as they are.
    """

    owner = "fully_shard"

    def __init__(
        self,
        state: UnitState,
        axes: DataAxes,
        ignored: Sequence[nn.Parameter],
        placement: Callable[[nn.Parameter], Shard | None] | None,
        policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
    ) -> None:
        self.state = state
        self.axes = axes
        self.ignored = ignored
        self._placement, self._policies = placement, policies

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy of the module."""
        vars(self).update(state)
        register_owner(self)

    @property
    def data_mesh(self) -> DeviceMesh:
        """That of the data axes."""
        return self.axes.mesh

    @property
    def keeps_gradients(self) -> bool:
        """Whether this rank keeps gradients of the unit for a later reduction."""
        return bool(self.state.unit.kept)

    def held(self) -> Iterable[Tensor]:
        """The leaves of the unit."""
        return [parameter.leaf for parameter in self.state.unit.parameters]

    def own(self) -> list[tuple[nn.Parameter, list[Site]]]:
        """The parameters of the unit's modules and not of units in them, each once, with the modules that hold it.

        Raises:
            TiedWeightError: if one is shared with a module that is part of another unit.
        """
        owned: dict[int, tuple[nn.Parameter, list[Site]]] = {}
        inner = {state for module in self.state.modules for state in states_of(module)} - {self.state}
        others = {module for state in inner for root in state.modules for module in root.modules()}
        ignored = set(map(id, self.ignored))
        for name, owner in (pair for module in self.state.modules for pair in module.named_modules()):
            for key, param in owner._parameters.items() if owner not in others else ():
                if param is None or id(param) in ignored:
                    continue
                if hasattr(param, STATE):
                    raise TiedWeightError(
                        f"fully_shard: the parameter {key!r} of {name!r} is shared with a module that is part of "
                        "another unit; make one unit of the modules that share it, or of a module that contains them"
                    )
                owned.setdefault(id(param), (param, []))[1].append((owner, key))
        return list(owned.values())

    def take(self) -> None:
        """Shard the parameters that the modules hold now."""
        unit, owned = self.state.unit, self.own()
        unit.parameters = [shard_parameter(p, sites, self.axes, self._placement, self._policies) for p, sites in owned]
        for param, _ in owned:
            setattr(param, STATE, True)
        unit.reset()
        register_owner(self)

    def give_back(self) -> None:
        """Have the modules hold the parameters as they were before data axes sharded them."""
        unit = self.state.unit
        unit.leave()
        for parameter in unit.parameters:
            parameter.adopt()
        for parameter, param in zip(unit.parameters, whole_parameters(unit.parameters), strict=True):
            parameter.put(param)
        unit.parameters = []
        unit.reset()
