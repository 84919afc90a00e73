"""Calls of users on parameters inside of a forward or a backward, where modules see no leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn

from .sharded_parameters import ShardedParameter


class GradientSwitch:
    """The `requires_grad_` of the tensor that modules see of a trained parameter.

    That tensor is not a leaf. Switched off, the modules see a detached tensor; switched on again,
    the recorded one. The leaf is switched along, for later forwards.
    """

    __slots__ = ("parameter", "recorded")

    def __init__(self, parameter: ShardedParameter, recorded: Tensor) -> None:
        self.parameter = parameter
        # the object that exposes the leaf holds a reference to it
        self.recorded = ref(recorded)

    def __call__(self, requires_grad: bool = True) -> Tensor | None:
        """Have the modules see the recorded tensor, or a detached one."""
        self.parameter.leaf.requires_grad_(requires_grad)
        recorded = self.recorded()
        if recorded is None:
            return None
        shown = recorded
        if not requires_grad:
            shown = recorded.detach()
            install_switch(shown, self)
        self.parameter.put(shown)
        return shown


def install_switch(tensor: Any, switch: GradientSwitch) -> None:
    """Replace `tensor.requires_grad_` by a switch.

    Torch refuses such calls for tensors that are not leaves.
    """
    tensor.requires_grad_ = switch


class SilentHooks:
    """Post-accumulate hooks that are not called in a pass: hooks of leaves without a gradient.

    Autograd runs the node of every leaf that a unit's backward leads to, and its hooks, also if the
    unit has no gradient for it.
    """

    def __init__(self) -> None:
        self._hooks: dict[int, tuple[nn.Parameter, dict[int, Callable[..., Any]]]] = {}
        self._called: set[int] = set()

    def silence(self, leaf: nn.Parameter) -> None:
        """Remove the hooks of a leaf until the pass is over, unless it has got a gradient."""
        hooks = leaf._post_accumulate_grad_hooks or {}
        if hooks and id(leaf) not in self._called:
            self._hooks[id(leaf)] = leaf, dict(hooks)
            # autograd holds this very dict
            hooks.clear()

    def call(self, leaf: nn.Parameter) -> None:
        """Have the hooks of a leaf called, because it gets a gradient."""
        self._called.add(id(leaf))
        _, hooks = self._hooks.pop(id(leaf), (leaf, {}))
        if hooks:
            leaf._post_accumulate_grad_hooks.update(hooks)

    def restore(self) -> None:
        """Give all leaves their hooks back."""
        for leaf, _ in [*self._hooks.values()]:
            self.call(leaf)
