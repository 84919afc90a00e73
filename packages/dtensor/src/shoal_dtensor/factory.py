"""New DTensors: each rank allocates its own part only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal_mesh import DeviceMesh

from .crossing import mesh_or_current
from .errors import PlacementError
from .per_dim import Placements, read_placements
from .placements import Partial, Replicate
from .redistribute import plan, run
from .spec import Spec
from .tensor import DTensor

__all__ = ["empty", "full", "ones", "rand", "randint", "randn", "randperm", "zeros"]


def _new(  # noqa: PLR0913  # torch's signature
    size: Sequence[Any],
    fill: Any,
    *,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
) -> DTensor:
    """A DTensor filled with a number, or left uninitialised when `fill` is None."""
    if layout is not torch.strided:
        raise PlacementError(f"only torch.strided tensors can be distributed, got {layout}")
    mesh = mesh_or_current(device_mesh)
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    wanted, shard_order = read_placements(mesh, placements)
    if dtype is None:
        dtype = torch.get_default_dtype() if fill is None or isinstance(fill, float) else torch.tensor(fill).dtype
    spec = Spec(mesh, wanted, shape, None, dtype, shard_order)
    # A partial axis must add up to the value: it starts out replicated and is shared out, without communication.
    start = spec.with_(placements=[Replicate() if isinstance(p, Partial) else p for p in spec.placements])
    local_shape = start.local_shape if start.coordinate is not None else (0,)
    if fill is None:
        local = torch.empty(local_shape, dtype=dtype, device=mesh.device_type)
    else:
        local = torch.full(local_shape, fill, dtype=dtype, device=mesh.device_type)
    if fill is not None and start is not spec:
        local = run(plan(start, spec), local)
    return DTensor(local, spec, requires_grad=requires_grad)


def empty(  # torch's signature
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """An uninitialised DTensor of global shape `size`.

    Args:
        size: global shape, as integers or one sequence.
        dtype: element type; torch's default when left out.
        layout: only `torch.strided`.
        requires_grad: whether autograd records operations on it.
        device_mesh: the mesh; the one of the enclosing `with mesh:` when left out.
        placements: one per mesh axis, or a `PerDim`; all replicated when left out.

    Raises:
        PlacementError: if the placements do not fit or the layout is another.
    """
    return _new(
        size,
        None,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )


def full(  # noqa: PLR0913  # torch's signature
    size: Sequence[int],
    fill_value: float | bool | complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A DTensor whose every element is `fill_value`, also where a placement is partial; arguments as for `empty`."""
    return _new(
        (tuple(size),),
        fill_value,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )


def zeros(  # torch's signature
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A DTensor of zeros; arguments as for `empty`."""
    return _new(
        size,
        0.0,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )


def ones(  # torch's signature
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A DTensor of ones; arguments as for `empty`."""
    return _new(
        size,
        1.0,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Uniform numbers in [0, 1): the values that `torch.rand` draws on one device; arguments as for `empty`."""
    made = empty(*size, dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements)
    made.uniform_(generator=generator)
    return made.requires_grad_(requires_grad)


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Standard normal numbers: the values that `torch.randn` draws on one device; arguments as for `empty`."""
    made = empty(*size, dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements)
    made.normal_(generator=generator)
    return made.requires_grad_(requires_grad)


def randint(  # noqa: PLR0913  # torch's arguments
    low: int,
    high: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype = torch.int64,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Integers in `[low, high)`: the values that `torch.randint` draws on one device; the rest as for `empty`."""
    made = empty(tuple(size), dtype=dtype, device_mesh=device_mesh, placements=placements)
    made.random_(low, high, generator=generator)
    return made


def randperm(
    n: int,
    *,
    dtype: torch.dtype = torch.int64,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A permutation of `range(n)`: the one that `torch.randperm` draws on one device; other arguments as for `empty`.

    Every rank draws all of it, in O(n) memory, and keeps its part.
    """
    made = empty(n, dtype=dtype, device_mesh=device_mesh, placements=placements)
    local = made._local_tensor
    whole = torch.randperm(n, dtype=dtype, device=local.device, generator=generator)
    if made._spec.coordinate is not None:
        start = made._spec.local_offset[0]
        local.copy_(whole[start : start + len(local)])
    return made
