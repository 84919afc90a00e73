"""OptimizerLoad: the part of a load that fills an optimizer, which may not have made a step yet.

A checkpoint has the state of its parameters by number, as `Optimizer.state_dict` writes it, or by
name, as `get_optimizer_state_dict` does, nested or flat. The tensors to fill are the tensors of the
optimizer, or the tensors with which its first step would begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .._torch.tensors import pytree, steps_as
from ..api.optimizer_states import drop_unmade_buffers, first_states, nest_state
from ..errors import CheckpointError
from .components import ComponentLoad, empty_for, with_keys_of
from .saved_names import (
    Path,
    SavedName,
    SavedNames,
    insert,
    leaves_of,
    name_of,
    value_at,
)

# Names of the parameters of each group of an optimizer.
GroupNames = Sequence[Sequence[str]]


def is_plain_optimizer(value: Any) -> bool:
    """Tell whether an optimizer's state is keyed by parameter number, as in torch's base class."""
    if not isinstance(value, Optimizer):
        return False
    cls = type(value)
    overrides = (
        cls.state_dict is not Optimizer.state_dict
        or cls.load_state_dict is not Optimizer.load_state_dict
    )
    return not overrides


class OptimizerLoad(ComponentLoad):
    """The load of one optimizer.

    Args:
        optimizer: the optimizer, which stays as it is until `finish`.
        prefix: the keys that lead to it in the state dict.
        saved: the entries of the checkpoint.
        find_names: returns the names of its parameters in a model of the same load, if
            there is one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        prefix: Path,
        saved: SavedNames,
        find_names: Callable[[], GroupNames | None],
    ) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self.saved = saved
        self.targets = {}
        self.missing = []
        # saved entries for which the optimizer has no place
        self.unplaced: list[str] = []
        tree = saved.tree(prefix)
        if not tree:
            self.missing.append(name_of(prefix))
        if tree and "param_groups" not in tree:
            # In a flat state dict, the whole name of an entry is one key.
            names = self._require_names(find_names)
            tree = nest_state(tree, [{"params": of_group} for of_group in names])
        saved_groups = tree.get("param_groups", [])
        self.options = [self._options_of(group) for group in saved_groups]
        # For each parameter, the key of its state in the checkpoint. For each group, the position
        # of its options in the checkpoint, or None.
        self.keys, self.group_at = self._match_parameters(find_names)
        self.entries: dict[Tensor, Any] = {}
        self.reference: dict[Tensor, Any] = {}
        saved_states = tree.get("state", {})
        for param, key in self.keys.items():
            if saved_states.get(key):
                self.entries[param] = saved_states[key]
        self._add_targets()

    # --- options ----------------------------------------------------------------------------------

    def _options_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Read the options of a saved group; tensor options stay names and become targets."""

        def read(leaf: Any) -> Any:
            if not isinstance(leaf, SavedName):
                return leaf
            if self.saved.is_tensor(leaf):
                self.targets[leaf] = empty_for(self.saved, leaf)
                return leaf
            self.targets[leaf] = None
            return self.saved.read_value(leaf)

        return dict(pytree.tree_map(read, dict(group)))

    @contextmanager
    def _with_saved_options(self) -> Iterator[None]:
        """Inside the block, give the optimizer the saved options that are not tensors.

        These options determine which entries its state has.
        """
        before = self.optimizer.param_groups
        groups = []
        for group, position in zip(before, self.group_at, strict=True):
            options = {} if position is None else self.options[position]
            known = {key: value for key, value in options.items() if not _has_names(value)}
            groups.append({**group, **known, "params": group["params"]})
        self.optimizer.param_groups = groups
        try:
            yield
        finally:
            self.optimizer.param_groups = before

    # --- parameters -------------------------------------------------------------------------------

    def _match_parameters(
        self, find_names: Callable[[], GroupNames | None]
    ) -> tuple[dict[Tensor, str], list[int | None]]:
        """Return the saved key of each parameter, and the saved position of each group."""
        groups = self.optimizer.param_groups
        saved_keys = [list(options.get("params", [])) for options in self.options]
        if not self.options:
            return {}, [None] * len(groups)
        is_by_number = all(isinstance(key, int) for key in chain.from_iterable(saved_keys))
        if is_by_number:
            self._check_numbers(saved_keys)
            keys: dict[Tensor, str] = {}
            for group, numbers in zip(groups, saved_keys, strict=True):
                keys.update(zip(group["params"], map(str, numbers), strict=True))
            return keys, list(range(len(groups)))
        return self._match_names(self._require_names(find_names), saved_keys)

    def _check_numbers(self, saved_keys: Sequence[Sequence[int]]) -> None:
        """Refuse groups of other sizes or names, because numbers would mean other parameters."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        saved_sizes = [len(of_group) for of_group in saved_keys]
        has_other_names = False
        for group, options in zip(self.optimizer.param_groups, self.options, strict=False):
            names = group.get("param_names")
            saved_names = options.get("param_names")
            if names and saved_names and list(names) != list(saved_names):
                has_other_names = True
        if sizes == saved_sizes and not has_other_names:
            return
        reason = "whose names differ" if sizes == saved_sizes else f"and the optimizer {sizes}"
        raise CheckpointError(
            f"{name_of(self.prefix)}: the checkpoint has groups of {saved_sizes} parameters, "
            f"{reason}. State by number cannot be matched where parameters were added, removed or "
            "reordered: save it by name, with shoal_dtensor.get_optimizer_state_dict(model, "
            "optimizer), or leave the optimizer out of this load"
        )

    def _match_names(
        self, names: GroupNames, saved_keys: Sequence[Sequence[str]]
    ) -> tuple[dict[Tensor, str], list[int | None]]:
        """Return the name of each parameter, and for each group the position of its saved group.

        The position is None if the checkpoint has none of the names of the group.
        """
        position_of = {key: i for i, of_group in enumerate(saved_keys) for key in of_group}
        keys: dict[Tensor, str] = {}
        group_at: list[int | None] = []
        for group, of_group in zip(self.optimizer.param_groups, names, strict=True):
            positions = [position_of[name] for name in of_group if name in position_of]
            group_at.append(positions[0] if positions else None)
            keys.update(zip(group["params"], of_group, strict=True))
            dotted = name_of(self.prefix)
            unknown = [name for name in of_group if name not in position_of]
            self.missing += [f"{dotted}: the options of {name}" for name in unknown]
        return keys, group_at

    def _require_names(self, find_names: Callable[[], GroupNames | None]) -> GroupNames:
        """Return the names of parameters by group; raise an error if the model is not known."""
        names = find_names()
        if names is None:
            raise CheckpointError(
                f"{name_of(self.prefix)}: the checkpoint has the state of the optimizer by names "
                "of parameters, which the optimizer does not have: load the model in the same "
                'call, as in load({"model": model, "optimizer": optimizer}), or make the optimizer '
                "from model.named_parameters()"
            )
        return names

    # --- state ------------------------------------------------------------------------------------

    def _add_targets(self) -> None:
        """Choose a tensor for every saved entry, and record the names that only one side has."""
        with self._with_saved_options():
            made = first_states(self.optimizer, lambda param: param in self.entries)
        is_known = _makes_known_state(self.optimizer)
        for param, entry in self.entries.items():
            current = self.optimizer.state.get(param) or made.get(param) or {}
            placed: dict[Any, Any] = {}
            for leaf in leaves_of(entry):
                target = value_at(current, leaf.path)
                if target is not None:
                    self.targets[leaf.value] = self._target_like(target, leaf.value)
                elif is_known or not self._place(param, leaf.value):
                    self.unplaced.append(leaf.value)
                    continue
                insert(placed, leaf.path, leaf.value)
            self.entries[param] = placed
            self.reference[param] = current
            self._note_missing(param, current, placed)
        self._note_missing_options()

    def _target_like(self, current: Any, name: str) -> Any:
        """Return the tensor to fill, or None.

        A number that was saved as a tensor, or the reverse, is read as it is.
        """
        if not self.saved.is_tensor(name):
            return None
        return current if isinstance(current, Tensor) else empty_for(self.saved, name)

    def _place(self, param: Tensor, name: str) -> bool:
        """Make a target for saved state that the optimizer does not describe.

        Return whether the layout is certain; if it is not, there is no target.
        """
        if not self.saved.is_tensor(name):
            self.targets[name] = None
            return True
        stored: Any = self.saved.kinds[name]
        dtype = stored.properties.dtype
        if tuple(stored.size) == tuple(param.shape):
            self.targets[name] = torch.empty_like(param.detach(), dtype=dtype)
            return True
        # Imported here, because only such state needs it.
        from ..tensor.dtensor import DTensor

        if isinstance(param, DTensor) and len(stored.size):
            return False
        self.targets[name] = torch.empty(stored.size, dtype=dtype, device=param.device)
        return True

    def _note_missing(self, param: Tensor, current: Any, entry: Any) -> None:
        for leaf in leaves_of(current):
            if value_at(entry, leaf.path) is None:
                path = (*self.prefix, "state", self.keys[param], *leaf.path)
                self.missing.append(name_of(path))

    def _note_missing_options(self) -> None:
        """Note the options of the optimizer's groups that the saved groups lack."""
        for group, position in zip(self.optimizer.param_groups, self.group_at, strict=True):
            if position is None:
                continue
            lacking = [key for key in group if key not in self.options[position]]
            for key in lacking:
                self.missing.append(name_of((*self.prefix, "param_groups", position, key)))

    # --- loading ----------------------------------------------------------------------------------

    def finish(self, loaded: Mapping[str, Any]) -> None:
        """Make the optimizer load its state by number, as it was saved."""
        if not self.options:
            return

        def fill(leaf: Any) -> Any:
            return loaded[leaf] if isinstance(leaf, SavedName) else leaf

        groups: list[dict[str, Any]] = []
        states: dict[int, Any] = {}
        numbers = count()
        for group, position in zip(self.optimizer.param_groups, self.group_at, strict=True):
            saved_options = {} if position is None else self.options[position]
            options = _on_devices_of(pytree.tree_map(fill, saved_options), group)
            of_group = [next(numbers) for _ in group["params"]]
            groups.append({**group, **options, "params": of_group})
            for number, param in zip(of_group, group["params"], strict=True):
                state = self._state_of(param, fill)
                if state:
                    states[number] = state
        # Torch may have replaced the optimizer's own method by a call of its state-dict functions.
        load = type(self.optimizer).load_state_dict
        load(self.optimizer, {"state": states, "param_groups": groups})
        drop_unmade_buffers(self.optimizer)

    def _state_of(self, param: Tensor, fill: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the state of a parameter: as saved, or its present state if none was saved."""
        if param not in self.entries:
            was_saved = param in self.keys and not self._lacks(param)
            return {} if was_saved else dict(self.optimizer.state.get(param, {}))
        state = pytree.tree_map(fill, self.entries[param])
        for leaf in leaves_of(self.reference[param]):
            if value_at(state, leaf.path) is None:
                insert(state, leaf.path, leaf.value)
        return dict(with_keys_of(state, self.reference[param]))

    def _lacks(self, param: Tensor) -> bool:
        """Tell whether the checkpoint does not have the parameter at all."""
        return f"{name_of(self.prefix)}: the options of {self.keys[param]}" in self.missing


def _makes_known_state(optimizer: Optimizer) -> bool:
    """Tell whether the state at a first step has all entries that the state ever has."""
    is_of_torch = steps_as(optimizer, "torch.optim")
    return steps_as(optimizer, SGD.__module__) or (
        is_of_torch and hasattr(type(optimizer), "_init_group")
    )


def _on_devices_of(options: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with tensors on the devices of the current options."""
    moved = dict(options)
    for key, value in options.items():
        like = current.get(key)
        if isinstance(value, Tensor) and isinstance(like, Tensor):
            moved[key] = value.to(like.device)
    return moved


def _has_names(value: Any) -> bool:
    return any(isinstance(leaf, SavedName) for leaf in pytree.tree_leaves(value))
