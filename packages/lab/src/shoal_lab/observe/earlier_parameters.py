"""Parameters of earlier steps: their values for stale forwards, and names that got others since."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor


class ParameterIdentities:
    """The parameters that names belonged to when they were seen last."""

    def __init__(self) -> None:
        self._parameters = dict[str, weakref.ref[Tensor]]()

    def note(self, parameters: Mapping[str, Tensor]) -> set[str]:
        """Return the names that belonged to other parameters before, and remember these parameters.

        Args:
            parameters: by name.
        """
        replaced = set[str]()
        for name, parameter in parameters.items():
            known = self._parameters.get(name)
            if known is not None and known() is not parameter:
                replaced.add(name)
            self._parameters[name] = weakref.ref(parameter)
        return replaced


class StaleParameters:
    """The values that parameters had in the forward before, for forwards that use them again."""

    def __init__(self) -> None:
        self._values = dict[str, Tensor]()

    def swap_in(self, parameters: Mapping[str, Tensor]) -> None:
        """Run the next forward with the values that the last one saw.

        Args:
            parameters: by name.
        """
        current = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._write(parameters)
        self._values = current

    def swap_out(self, parameters: Mapping[str, Tensor]) -> None:
        """Have the optimizer update the true parameters.

        Args:
            parameters: by name.
        """
        self._write(parameters)

    def _write(self, parameters: Mapping[str, Tensor]) -> None:
        """Write the kept values to all parameters but those that another shape has replaced."""
        for name, parameter in parameters.items():
            value = self._values.get(name)
            if value is not None and value.shape == parameter.shape:
                parameter.data.copy_(value)
