"""The functions of torch.distributed.checkpoint.state_dict from inside: what they call to read and to load, wrapped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

API = "torch.distributed.checkpoint.state_dict"
KINDS = {
    "model": ("_get_model_state_dict", "_load_model_state_dict"),
    "optim": ("_get_optim_state_dict", "_load_optim_state_dict"),
}


def around_state_dicts(get: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Have state dicts read by `get(original, *args)` and loaded by `load(original, original_get, *args)`.

    The first of `args` is the model, the last one torch's record of the options; before it is the state dict to load.
    The module takes a second to import, so nothing is imported: it is wrapped when somebody imports it.
    """

    def wrap(api: Any) -> None:
        for reader, loader in KINDS.values():
            original_get, original_load = getattr(api, reader), getattr(api, loader)
            setattr(api, reader, partial(get, original_get))
            setattr(api, loader, partial(load, original_load, original_get))

    if API in sys.modules:
        wrap(sys.modules[API])
    else:
        sys.meta_path.insert(0, _AfterImport(wrap))


class _AfterImport:
    """A finder of modules that finds one, with the loader that Python has for it, and calls a function on it."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's spec, whose loader calls the function once the module is executed."""
        if name != API:
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
