"""Parameters that modules are given while a forward of a replicated module runs.

`self.weight = nn.Parameter(values)` replaces a parameter by one without hooks: its gradient would
not be averaged in this pass, and no optimizer has it. Writes to the old parameter do not show this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class _Registration(NamedTuple):
    """One parameter that a module was given, in the place of another one or of none."""

    module: nn.Module
    name: str
    replaced: Tensor | None


class Registrations:
    """The parameters that modules are given between `begin` and `end`."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._seen: list[_Registration] = []

    def begin(self) -> None:
        """Note each parameter that any module is given from now on."""
        self._handle = register_module_parameter_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, _: Tensor | None) -> None:
        self._seen.append(_Registration(module, name, module._parameters.get(name)))

    def end(self, root: nn.Module, used: Iterable[Tensor]) -> list[str]:
        """Return the names of trained parameters below `root` that are not the ones it used.

        A parameter that a module has got back is not named, as when a parametrization is registered
        and removed.
        """
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        seen = self._seen
        self._seen = []
        if not seen:
            return []
        known = {id(tensor) for tensor in used}
        prefixes = {id(module): prefix for prefix, module in root.named_modules()}
        names = []
        for module, name, replaced in seen:
            held = module._parameters.get(name)
            is_new = held is not None and id(held) not in known and id(module) in prefixes
            if is_new and any(t is not None and t.requires_grad for t in (held, replaced)):
                names.append(f"{prefixes[id(module)]}.{name}".removeprefix("."))
        return names
