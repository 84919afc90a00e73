"""Components: objects in a state dict that save and load their own state, as modules do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .saved_names import (
    Path,
    SavedNames,
    insert,
    is_empty_mapping,
    leaves_of,
    name_of,
    value_at,
)


@runtime_checkable
class Stateful(Protocol):
    """An object with the two methods by which torch's objects save and load themselves."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load the state."""


def is_component(value: Any) -> bool:
    """Tell whether the value is an object with a state dict of its own."""
    return isinstance(value, Stateful) and not isinstance(value, type | Tensor | Mapping)


def state_of(value: Any) -> Any:
    """Return the value with the state dict of each component in its place, for saving."""
    if is_component(value):
        return value.state_dict()
    if isinstance(value, Mapping) and _holds_components(value):
        return {key: state_of(item) for key, item in value.items()}
    if isinstance(value, list) and _holds_components(value):
        return [state_of(item) for item in value]
    return value


def _holds_components(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_components(item) for item in value.values())
    if isinstance(value, list):
        return any(_holds_components(item) for item in value)
    return is_component(value)


def components_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the components in nested mappings and lists, with the keys that lead to them."""
    if is_component(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from components_of(item, (*path, str(key)))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from components_of(item, (*path, position))


class ComponentLoad:
    """The part of a load that fills one component.

    Attributes:
        targets: by names of entries, the tensors to fill; None for an entry that is read as it is.
        missing: names that the component has and the checkpoint does not.
    """

    targets: dict[str, Any]
    missing: list[str]

    def finish(self, loaded: Mapping[str, Any]) -> None:
        """Load the values, by the names of `targets`, into the component."""
        raise NotImplementedError


class ModuleLoad(ComponentLoad):
    """The load of a module: its own entries, and extra state of any saved structure."""

    def __init__(self, module: nn.Module, prefix: Path, saved: SavedNames) -> None:
        self.module = module
        self.prefix = prefix
        self.state: Any = module.state_dict()
        self.targets = {}
        self.missing = []
        self.places: dict[str, tuple[Any, Any]] = {}
        for leaf in leaves_of(self.state):
            name = name_of((*prefix, *leaf.path))
            if isinstance(leaf.value, Tensor) and leaf.value.is_meta:
                raise CheckpointError(
                    f"{name} is on the meta device, so it cannot be loaded into: call "
                    "module.to_empty(device=...) first"
                )
            if name in saved.kinds:
                self.targets[name] = leaf.value
                self.places[name] = (leaf.container, leaf.key)
            elif not is_empty_mapping(leaf.value):
                self.missing.append(name)
        self.extra = {}
        for name, path in saved.under(prefix).items():
            if name not in self.targets and _is_extra_state(path):
                self.extra[name] = path
        self.targets.update({name: empty_for(saved, name) for name in self.extra})

    def finish(self, loaded: Mapping[str, Any]) -> None:
        """Load the state dict, which runs the module's hooks."""
        for name, (container, key) in self.places.items():
            container[key] = loaded[name]
        for name, path in self.extra.items():
            insert(self.state, path, loaded[name])
        self.module.load_state_dict(self.state)


def _is_extra_state(path: Path) -> bool:
    """Tell whether the entry is inside a module's extra state, which may have any structure."""
    return str(path[0]).endswith("_extra_state")


class ObjectLoad(ComponentLoad):
    """The load of any other object: all entries that the checkpoint has for it.

    The object itself may not have these entries yet.
    """

    def __init__(self, component: Any, prefix: Path, saved: SavedNames) -> None:
        self.component = component
        self.state: Any = component.state_dict()
        self.entries = saved.under(prefix)
        self.targets = {}
        for name, path in self.entries.items():
            current = value_at(self.state, path)
            is_filled = isinstance(current, Tensor) and saved.is_tensor(name)
            self.targets[name] = current if is_filled else empty_for(saved, name)
        self.missing = []
        # values of the object that the checkpoint does not have
        self.kept: list[tuple[Path, Any]] = []
        saved_paths = set(self.entries.values())
        for leaf in leaves_of(self.state) if isinstance(self.state, Mapping) else ():
            if any(path[: len(leaf.path)] == leaf.path for path in saved_paths):
                continue
            self.kept.append((leaf.path, leaf.value))
            if not is_empty_mapping(leaf.value):
                self.missing.append(name_of((*prefix, *leaf.path)))

    def finish(self, loaded: Mapping[str, Any]) -> None:
        """Build the state as saved, with the object's own keys, and load it into the object."""
        state: dict[Any, Any] = {}
        for path, value in self.kept:
            insert(state, path, value)
        for name, path in self.entries.items():
            insert(state, path, loaded[name])
        self.component.load_state_dict(with_keys_of(state, self.state))


def with_keys_of(value: Any, like: Any) -> Any:
    """Return the value with the keys of the mappings in `like`, because files have keys as text."""
    if isinstance(value, list) and isinstance(like, list):
        padding = [None] * (len(value) - len(like))
        return [with_keys_of(*pair) for pair in zip(value, [*like, *padding], strict=False)]
    if not isinstance(value, Mapping) or not isinstance(like, Mapping):
        return value
    by_text = {str(key): key for key in like}
    result: dict[Any, Any] = {}
    for key, item in value.items():
        own_key = by_text.get(key, key)
        result[own_key] = with_keys_of(item, like.get(own_key))
    return result


def empty_for(saved: SavedNames, name: str) -> Tensor | None:
    """Return a host tensor for an entry without a known layout; None for other values."""
    if not saved.is_tensor(name):
        return None
    stored: Any = saved.kinds[name]
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
