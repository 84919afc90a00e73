"""LoadRequest: the entries that a load takes from a checkpoint, and the missing entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..api.optimizer_states import FOR_STAGES
from ..errors import CheckpointError, StateDictError
from .components import ComponentLoad, ModuleLoad, ObjectLoad, components_of, is_component
from .optimizer_load import GroupNames, OptimizerLoad, is_plain_optimizer
from .saved_names import (
    Leaf,
    Path,
    SavedNames,
    is_empty_mapping,
    is_taken_apart,
    leaves_of,
    name_of,
    shorten,
)


class LoadRequest:
    """A state dict to fill, compared with the entries of a checkpoint.

    Attributes:
        targets: by names of entries, the tensors to fill; None for an entry that is read as it is.
        left_over: names of entries of the checkpoint that this rank does not take.

    Args:
        state_dict: the state dict of the user: values, mappings, lists and components.
        saved: the entries of the checkpoint.
        strict: raise for every entry that the state dict has and the checkpoint lacks.

    Raises:
        CheckpointError: entries that do not fit, or, with `strict`, entries that are missing.
    """

    def __init__(self, state_dict: Mapping[str, Any], saved: SavedNames, *, strict: bool) -> None:
        self.state_dict = state_dict
        self.saved = saved
        self.strict = strict
        self.targets: dict[str, Any] = {}
        self.places: dict[str, Leaf] = {}
        self.components: list[ComponentLoad] = []
        self._missing: list[str] = []
        self._empty: list[Path] = []
        self._add_values()
        self._add_components()
        taken = set(self.targets)
        self.left_over = [name for name in saved.kinds if name not in taken]
        if strict:
            self._check_complete()

    def _add_values(self) -> None:
        """Collect the targets of all values but components, and note missing values."""
        for leaf in leaves_of(self.state_dict):
            name = name_of(leaf.path)
            if is_component(leaf.value):
                continue
            if is_empty_mapping(leaf.value):
                self._empty.append(leaf.path)
            elif name in self.saved.kinds:
                self._check_kind(name, leaf.value)
                self.targets[name] = leaf.value if isinstance(leaf.value, Tensor) else None
                self.places[name] = leaf
            elif not _has_components(leaf.value):
                self._missing.append(name)

    def _check_kind(self, name: str, value: Any) -> None:
        """Raise an error if an entry is a tensor on one side only: in the checkpoint or here."""
        if isinstance(value, Tensor) != self.saved.is_tensor(name):
            kinds = ["a value", "a tensor"]
            saved_kind = kinds[self.saved.is_tensor(name)]
            wanted_kind = kinds[isinstance(value, Tensor)]
            raise CheckpointError(
                f"{name} is {saved_kind} in the checkpoint, but {wanted_kind} in the state dict "
                "to fill"
            )

    def _add_components(self) -> None:
        """Collect the loads of all components with their targets, and note missing state."""
        components = [*components_of(self.state_dict)]
        modules = [value for _, value in components if isinstance(value, nn.Module)]
        for path, value in components:
            load: ComponentLoad
            if isinstance(value, nn.Module):
                load = ModuleLoad(value, path, self.saved)
            elif is_plain_optimizer(value):
                find_names = partial(_names_of_parameters, value, modules)
                load = OptimizerLoad(value, path, self.saved, find_names)
            else:
                load = ObjectLoad(value, path, self.saved)
            self.components.append(load)
            self.targets.update(load.targets)
            self._missing += load.missing

    # --- entries that only one side has -----------------------------------------------------------

    def _check_complete(self) -> None:
        """Raise for entries only in the state dict, and for empty mappings in place of state."""
        for path in self._empty:
            below = [name for name in self.saved.under(path) if name not in self.targets]
            if below:
                raise CheckpointError(_about_empty(path, below))
        unplaced = [
            name
            for load in self.components
            if isinstance(load, OptimizerLoad)
            for name in load.unplaced
        ]
        if unplaced:
            raise CheckpointError(
                f"the checkpoint has {shorten(unplaced)}, which the optimizer does not have: "
                "construct the optimizer with the class and options with which it was saved; "
                "strict=False leaves these entries out"
            )
        if self._missing:
            missing = shorten(self._missing)
            present = shorten(self._entries())
            raise CheckpointError(
                f"the checkpoint lacks {missing}, which the state dict to fill has; it has "
                f"{present}. strict=False leaves the missing entries "
                f"unchanged{self._about_stages()}"
            )

    def _about_stages(self) -> str:
        lacks_options = any(": the options of " in name for name in self._missing)
        return f". {FOR_STAGES}" if lacks_options else ""

    def _entries(self) -> list[str]:
        """Return the names at the top of the checkpoint."""
        return [*dict.fromkeys(str(path[0]) for path in self.saved.paths.values())]

    def check_taken(self, left_over: Iterable[str]) -> list[str]:
        """Raise for entries that no rank takes, unless a part of the checkpoint is loaded alone.

        A part is a mapping or a component at the top of the state dict, or all tensors there
        together. A load of one part, for example of a model without its optimizer, leaves out the
        other parts.

        Args:
            left_over: names that no rank takes.

        Returns:
            Names at the top of the checkpoint that are left out.

        Raises:
            CheckpointError: the load leaves out an entry of a part that it takes, or it takes
                several parts and leaves out other parts.
        """
        if not self.strict:
            return []
        requested = {str(key): value for key, value in self.state_dict.items()}
        tensors = [key for key, value in requested.items() if isinstance(value, Tensor)]
        parts = [key for key, value in requested.items() if _is_part(value)]
        is_alone = len(parts) + bool(tensors) <= 1
        refused: list[str] = []
        others: dict[str, None] = {}
        for name in left_over:
            path = self.saved.paths[name]
            top = str(path[0])
            is_tensor_beside = len(path) == 1 and self.saved.is_tensor(name) and bool(tensors)
            if top in requested or is_tensor_beside or not is_alone:
                refused.append(name)
            else:
                others[top] = None
        if refused:
            raise CheckpointError(
                f"the checkpoint has {shorten(refused)}, which the state dict to fill does not "
                "contain: add the objects that were saved under these names (such as a module, "
                "an optimizer or a scheduler), or pass strict=False to leave them out"
            )
        return [*others]

    def finish(self, loaded: Mapping[str, Any]) -> None:
        """Put values into their containers, and have components take their state."""
        for name, leaf in self.places.items():
            leaf.container[leaf.key] = loaded[name]
        for load in self.components:
            load.finish(loaded)


def _about_empty(path: Path, below: list[str]) -> str:
    """Return the text of the error for an empty dict in place of saved state."""
    top = str(path[0])
    return (
        f"{name_of(path)} is an empty dict where the checkpoint has state ({shorten(below)}): the "
        "state dict of an optimizer that has not made a step is empty, and nothing would be loaded "
        f"into it. Pass the optimizer itself, as in load({{{top!r}: optimizer}}), or "
        "shoal_dtensor.get_optimizer_state_dict(model, optimizer) if it was saved so; strict=False "
        "leaves the state out"
    )


def _is_part(value: Any) -> bool:
    """Tell whether the value holds entries of a checkpoint below its own name."""
    is_container = isinstance(value, Mapping) or is_taken_apart(value)
    return is_container or is_component(value) or _has_components(value)


def _has_components(value: Any) -> bool:
    """Tell whether the value is a list with components in it."""
    return isinstance(value, list) and any(components_of(value))


def _names_of_parameters(optimizer: Optimizer, modules: Iterable[nn.Module]) -> GroupNames | None:
    """Return the names of an optimizer's parameters by its groups, or None.

    They are its own names, or the names in a module that has the parameters.
    """
    groups = optimizer.param_groups
    if all("param_names" in group for group in groups):
        return [group["param_names"] for group in groups]
    # Imported here, because only optimizers without names of parameters need it.
    from ..api.state_dicts import get_optimizer_state_dict

    for module in modules:
        try:
            named = get_optimizer_state_dict(module, optimizer)["param_groups"]
        except StateDictError:
            # The optimizer belongs to another module.
            continue
        return [group["params"] for group in named]
    return None
