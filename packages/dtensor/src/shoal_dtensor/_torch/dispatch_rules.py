"""How an operator gets from torch to a class: by a rule for it, with which torch does not import its own DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []  # the rules of a library last as long as it does


def register_dispatch(cls: type[torch.Tensor], run: Callable[..., Any], names: Sequence[str] | None = None) -> None:
    """Have torch call `run(cls, op, types, args, kwargs)` for operators on tensors of this very class.

    It would call `__torch_dispatch__` alike, but would first ask whether the class is its own DTensor: for which it
    imports `torch.distributed.tensor`, and sympy with that, half a second in the first operator of a process.
    The rules take 10 ms.  Operators with `out=`, a third of all, have none.

    Args:
        cls: the class; run: what is called.
        names: of the operators, as in `aten::add_.Tensor`; all of aten by default.
    """
    library = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch
    for name in torch._C._dispatch_get_all_op_names() if names is None else names:
        if name.startswith("aten::") and "out" not in name.partition(".")[2]:
            torch.library.register_torch_dispatch(name, cls, run, lib=library)
    _LIBRARIES.append(library)
