"""A `Spec` in one line: dtype, sizes with the mesh axes that shard them, and what is still to be reduced."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def described(spec: Any) -> str:
    """The line that `repr` of a `Spec` gives.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Partial, Shard, Spec
        >>> described(Spec(abstract_mesh((2, 2), ("dp", "tp")), (Shard(0), Partial()), (5, 4), dtype=torch.bfloat16))
        'Spec(bf16[5@(dp)=[3, 2], 4], partial sum over tp on (dp=2, tp=2))'
    """
    names = spec.mesh.axis_names
    dims = [
        f"{n}@({','.join(names[a] for a in sharding.axes)}){_sizes(sharding)}" if sharding.axes else str(n)
        for n, sharding in zip(spec.shape, spec.dim_shardings, strict=True)
    ]
    partial = "".join(f", partial {op} over {names[axis]}" for axis, op in spec.partials)
    mesh = ", ".join(f"{name}={size}" for name, size in zip(names, spec.mesh.shape, strict=True))
    return f"Spec({_short(spec.dtype)}[{', '.join(dims)}]{partial} on ({mesh}))"


def _sizes(sharding: Any) -> str:
    """How a sharding differs from an even one."""
    if hasattr(sharding, "levels"):
        return f" strided of {list(sharding.shape)}"
    if sharding.even:
        return ""
    if sharding.ragged is None and sharding.shards > 16:  # all is said by the first, and there may be thousands
        return f"=[{sharding.step}, ...]"
    return f"={list(sharding.sizes)}"


@cache
def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
