"""What torch calls in place of its own: for operators on a class of tensors, and to read and load state dicts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

_COMPILED = ("cond", "while_loop", "scan", "map")
_LIBRARIES: list[torch.library.Library] = []  # the rules of a library last as long as it does


def register_dispatch(cls: type[torch.Tensor], run: Callable[..., Any], names: Sequence[str] | None = None) -> None:
    """Have torch call `run(cls, op, types, args, kwargs)` for operators on tensors of this very class.

    It would call `__torch_dispatch__` alike, but would first ask whether the class is its own DTensor: for which it
    imports `torch.distributed.tensor`, and sympy with that, half a second in the first operator of a process.
    The rules take 10 ms.  Operators with `out=`, a third of all, have none.

    Operators are given by name, as in `aten::add_.Tensor`: all of aten by default, and those that take functions, which
    `run` gets by their names, some of them before torch compiles the functions.
    """
    library = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch
    for name in torch._C._dispatch_get_all_op_names() if names is None else names:
        if name.startswith("aten::") and "out" not in name.partition(".")[2]:
            torch.library.register_torch_dispatch(name, cls, run, lib=library)
    _LIBRARIES.append(library)
    if names is None:
        for name, operator in torch._ops._higher_order_ops.items():
            operator.py_impl(cls)(lambda *args, _name=name, **kwargs: run(cls, _name, (cls,), args, kwargs))
        utils: Any = torch._higher_order_ops.utils
        compiled: Any = getattr(utils, "_hop_compile_and_call", None)  # torch 2.11 has no one place for it

        def before_compiling(fn: Any, args: Any, kwargs: Any = None) -> Any:
            """What `torch.cond` and its kin call outside of compiled functions."""
            name = next((name for name in _COMPILED if name in fn.__name__), None)
            if name and any(isinstance(leaf, cls) for leaf in torch.utils._pytree.tree_leaves(args)):
                return run(cls, name, (cls,), args, kwargs)
            return compiled(fn, args, kwargs)

        if compiled is not None:
            utils._hop_compile_and_call = before_compiling


# --- state dicts: the functions of torch.distributed.checkpoint.state_dict from inside --------------------------------

_API = "torch.distributed.checkpoint.state_dict"
_READERS_AND_LOADERS = (
    ("_get_model_state_dict", "_load_model_state_dict"),
    ("_get_optim_state_dict", "_load_optim_state_dict"),
)


def around_state_dicts(get: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Have state dicts read by `get(original, *args)` and loaded by `load(original, original_get, *args)`.

    The first of `args` is the model, the last one torch's record of the options; before it is the state dict to load.
    The module takes a second to import, so nothing is imported: it is wrapped when somebody imports it.
    """

    def wrap(api: Any) -> None:
        for reader, loader in _READERS_AND_LOADERS:
            original_get, original_load = getattr(api, reader), getattr(api, loader)
            setattr(api, reader, partial(get, original_get))
            setattr(api, loader, partial(load, original_load, original_get))

    if _API in sys.modules:
        wrap(sys.modules[_API])
    else:
        sys.meta_path.insert(0, _AfterImport(wrap))


class _AfterImport:
    """A finder of one module, by the loader that Python has for it, which calls a function on it once it has run."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _API:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            self._function(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]  # of this loader, made for this import
        return spec
