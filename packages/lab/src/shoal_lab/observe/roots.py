"""The outermost modules of a program, and the names of their parameters.

They are found from the modules whose forward runs: a module's parents are searched among all
objects of the garbage collector.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator

from torch import Tensor, nn

# names that wrappers such as DistributedDataParallel and torch.compile put into parameter names
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)"
)


def logical_name(name: str) -> str:
    """Remove the names of wrappers from the name of a parameter.

    Example:
        >>> logical_name("module.blocks.0._orig_mod.up.weight")
        'blocks.0.up.weight'
    """
    return _WRAPPERS.sub("", name).lstrip(".")


def _logical_path(path: str) -> str:
    """Remove the names of wrappers from the path of a module; "" if only wrappers are left.

    Example:
        >>> _logical_path("module.blocks.0._orig_mod")
        'blocks.0'
    """
    # `logical_name` removes a wrapper only where a name follows, so the path gets the name "x".
    with_parameter = logical_name(f"{path}.x")
    return with_parameter.removesuffix("x").rstrip(".")


def outermost(module: nn.Module) -> nn.Module:
    """Return the outermost module that contains this one."""
    # id of a module -> a module that has it as a child
    parents = dict[int, nn.Module]()
    for candidate in gc.get_objects():
        # `isinstance` would read `candidate.__class__`, which runs the code of proxy objects.
        if not issubclass(type(candidate), nn.Module):
            continue
        for child in candidate.__dict__.get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), candidate)
    seen = {id(module)}
    while id(module) in parents and id(parents[id(module)]) not in seen:
        module = parents[id(module)]
        seen.add(id(module))
    return module


class Roots:
    """The outermost modules with parameters, in the order in which their forwards began."""

    def __init__(self) -> None:
        self._roots = list[nn.Module]()
        # By id, which another module gets after the module is freed.
        self._known = weakref.WeakValueDictionary[int, nn.Module]()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._roots)

    def add(self, module: nn.Module) -> None:
        """Add the outermost module that contains a module.

        Args:
            module: a module whose forward begins while no other module's forward is running.
        """
        is_known = self._known.get(id(module)) is module
        has_parameters = next(module.parameters(), None) is not None
        if is_known or not has_parameters:
            return
        root = outermost(module)
        inner = {id(part) for part in root.modules()}
        # A wrapper takes the place of the module that it contains, so that names stay.
        place = len(self._roots)
        kept = list[nn.Module]()
        for other in self._roots:
            if id(other) in inner:
                place = min(place, len(kept))
            else:
                kept.append(other)
        kept.insert(place, root)
        self._roots = kept
        for part in (*root.modules(), module):
            self._known[id(part)] = part

    def paths(self) -> dict[int, str]:
        """Return the path of each module by its id."""
        paths = dict[int, str]()
        for root in self._roots:
            for path, module in root.named_modules():
                name = _logical_path(path)
                paths.setdefault(id(module), name or "model")
        return paths

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all roots by name; a name that two roots have gets a number."""
        parameters = dict[str, Tensor]()
        for root in self._roots:
            for path, parameter in root.named_parameters():
                name = logical_name(path)
                number = 1
                while name in parameters:
                    number += 1
                    name = f"{logical_name(path)} #{number}"
                parameters[name] = parameter
        return parameters
