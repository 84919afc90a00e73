"""Modules in which operators run, in forwards and in backwards.

Autograd numbers its nodes in the order in which forwards create them, so the module of a node
follows from the numbers at which modules begin and end:

    nodes        0   1   2   3   4   5   6
    module       M   M.up    M   M.down  -
    changes      (0, M) (1, M.up) (3, M) (4, M.down) (6, Global)

There are no hooks on tensors, so a backward runs the same nodes as without an observer.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack
from typing import Any

from torch import nn

from .. import _torch

OUTSIDE = "Global"
"""The path of operators that run in no module."""


class ModulePlaces:
    """A record of the modules that run, between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        self._names: dict[nn.Module, str] = {}
        # The modules whose forward is running, innermost last. Each has the number of the backward
        # in which it began, because checkpointing computes a forward again; -1 outside of
        # backwards.
        self._running: list[tuple[str, int]] = []
        # Nodes from number `_firsts[i]` up to the next entry were created in module `_paths[i]`.
        self._firsts: list[int] = []
        self._paths: list[str] = []
        self._hooks = ExitStack()

    def __enter__(self) -> ModulePlaces:
        register_before = nn.modules.module.register_module_forward_pre_hook
        register_after = nn.modules.module.register_module_forward_hook
        self._change(OUTSIDE)
        self._hooks.callback(register_before(self._begin).remove)
        self._hooks.callback(register_after(self._end, always_call=True).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        self._running.clear()
        # keep no module alive
        self._names.clear()

    def name_of(self, module: nn.Module) -> str:
        """Return the path of a module, which begins with the class of the outermost one."""
        if module not in self._names:
            root = type(module).__name__
            for path, inner in module.named_modules():
                self._names.setdefault(inner, f"{root}.{path}" if path else root)
        return self._names[module]

    def current(self) -> str:
        """Return the path of the innermost module that runs, forward or backward."""
        backward = _torch.current_backward()
        path, began_in = self._running[-1] if self._running else (OUTSIDE, -1)
        if backward == began_in:
            # this forward runs, and not a node of a backward
            return path
        number = _torch.number_of_running_node()
        if number is None or not self._firsts:
            return OUTSIDE
        return self._paths[max(bisect_right(self._firsts, number) - 1, 0)]

    def _begin(self, module: nn.Module, args: Any) -> None:
        path = self.name_of(module)
        self._running.append((path, _torch.current_backward()))
        self._change(path)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        # the list is empty for a forward that began before the block
        if self._running:
            self._running.pop()
        self._change(self._running[-1][0] if self._running else OUTSIDE)

    def _change(self, path: str) -> None:
        """Record the module of the nodes that are created from now on."""
        first = _torch.number_of_next_node()
        if self._firsts and self._firsts[-1] >= first:
            # no node was created in between
            self._paths[-1] = path
            return
        self._firsts.append(first)
        self._paths.append(path)
