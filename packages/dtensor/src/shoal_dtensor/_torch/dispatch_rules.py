"""How an operator gets from torch to a class: by a rule for it, with which torch does not import its own DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_COMPILED = ("cond", "while_loop", "scan", "map")
_LIBRARIES: list[torch.library.Library] = []  # the rules of a library last as long as it does


def register_dispatch(cls: type[torch.Tensor], run: Callable[..., Any], names: Sequence[str] | None = None) -> None:
    """Have torch call `run(cls, op, types, args, kwargs)` for operators on tensors of this very class.

    It would call `__torch_dispatch__` alike, but would first ask whether the class is its own DTensor: for which it
    imports `torch.distributed.tensor`, and sympy with that, half a second in the first operator of a process.
    The rules take 10 ms.  Operators with `out=`, a third of all, have none.

    Args:
        cls: the class; run: what is called.
        names: of the operators, as in `aten::add_.Tensor`; all of aten by default, and those that take functions, by
            their names, which some of these are called by before torch compiles the functions.
    """
    library = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch
    for name in torch._C._dispatch_get_all_op_names() if names is None else names:
        if name.startswith("aten::") and "out" not in name.partition(".")[2]:
            torch.library.register_torch_dispatch(name, cls, run, lib=library)
    _LIBRARIES.append(library)
    if names is None:
        for name, operator in torch._ops._higher_order_ops.items():
            operator.py_impl(cls)(_named(run, cls, name))
        utils: Any = torch._higher_order_ops.utils
        utils._hop_compile_and_call = _before_compiling(cls, run, utils._hop_compile_and_call)


def _named(run: Callable[..., Any], cls: type[torch.Tensor], name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(cls, name, (cls,), args, kwargs)


def _before_compiling(cls: type[torch.Tensor], run: Callable[..., Any], compiled: Callable[..., Any]) -> Any:
    """What `torch.cond` and its kin call outside of compiled functions."""

    def call(fn: Any, args: Any, kwargs: Any = None) -> Any:
        name = next((name for name in _COMPILED if name in fn.__name__), None)
        if name and any(isinstance(each, cls) for each in torch.utils._pytree.tree_leaves(args)):
            return run(cls, name, (cls,), args, kwargs)
        return compiled(fn, args, kwargs)

    return call
