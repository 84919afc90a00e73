"""New DTensors: each rank allocates its own shard only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import torch

from shoal_mesh import DeviceMesh

from .._torch import whole_when_compiled
from ..argument_types import check_type
from ..errors import ArgumentTypeError, PlacementIndexError
from ..layout.partition_spec import Placements, read_placements
from ..layout.spec import Spec
from ..redistribute.execution.execute import run
from ..redistribute.plan import plan
from ..tensor.autograd import gradient_spec
from ..tensor.dtensor import DTensor
from ..tensor.spec_arguments import mesh_or_current

F = TypeVar("F", bound=Callable[..., Any])


class Keywords(TypedDict, total=False):
    """What every factory takes by keyword."""

    dtype: torch.dtype | None  # element type; torch's default, or that of the number to fill with, when left out
    layout: torch.layout  # only `torch.strided`
    requires_grad: bool  # whether autograd records operations on the tensor
    device_mesh: DeviceMesh | None  # the mesh; the one of the enclosing `with mesh:` when left out
    placements: Placements | None  # one per mesh axis, or a `PartitionSpec`; all replicated when left out


_DEFAULTS = Keywords(dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)


def _factory(function: F) -> F:
    """Decorator: whole when compiled, with its keywords, each with its default, in the signature that tools show."""
    factory = whole_when_compiled(function)
    given = inspect.signature(factory)
    defaults: dict[str, Any] = {**_DEFAULTS}
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint.__forward_arg__)
        for name, hint in Keywords.__annotations__.items()
    ]
    factory.__signature__ = given.replace(  # type: ignore[attr-defined]  # what inspect reads
        parameters=[*(p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD), *listed]
    )
    return factory


def _spec(size: Sequence[Any], keywords: Keywords, dtype: torch.dtype) -> Spec:
    """Of a new tensor whose size is given as integers or one sequence, of `dtype` unless the keywords name one."""
    unknown = [name for name in keywords if name not in _DEFAULTS]
    if unknown:
        raise ArgumentTypeError(f"unexpected keyword {unknown[0]!r}: a factory takes {', '.join(_DEFAULTS)}")
    options = _DEFAULTS | keywords
    if options["layout"] is not torch.strided:
        raise PlacementIndexError(f"only torch.strided tensors can be distributed, got {options['layout']}")
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    for n in shape:
        check_type("a factory", "its size", n, (int, torch.SymInt), "integers or one sequence of them")
    mesh = mesh_or_current(options["device_mesh"])
    placements, shard_order = read_placements(mesh, options["placements"])
    return Spec(mesh, placements, shape, None, options["dtype"] or dtype, shard_order)


def _empty(size: Sequence[Any], keywords: Keywords, dtype: torch.dtype | None = None) -> DTensor:
    spec = _spec(size, keywords, dtype or torch.get_default_dtype())
    local = torch.empty(spec.local_shape, dtype=spec.dtype, device=spec.mesh.device_type)
    return DTensor(local, spec, requires_grad=keywords.get("requires_grad", False))


def _filled(size: Sequence[Any], number: float | bool | complex, keywords: Keywords) -> DTensor:
    check_type("full", "fill_value", number, (bool, int, float, complex), "a number")
    dtype = torch.get_default_dtype() if isinstance(number, float) else torch.tensor(number).dtype
    spec = _spec(size, keywords, dtype)
    # A partial axis must add up to the number: it starts out replicated and is shared out, without communication.
    start = gradient_spec(spec)
    local = torch.full(start.local_shape, number, dtype=spec.dtype, device=spec.mesh.device_type)
    if start is not spec:
        local = run(plan(start, spec), local)
    return DTensor(local, spec, requires_grad=keywords.get("requires_grad", False))


def _drawn(
    size: Sequence[Any], keywords: Keywords, fill: Callable[[DTensor], object], dtype: torch.dtype | None = None
) -> DTensor:
    result = _empty(size, {**keywords, "requires_grad": False}, dtype)
    fill(result)
    return result.requires_grad_(keywords.get("requires_grad", False))


@_factory
def empty(*size: Any, **keywords: Unpack[Keywords]) -> DTensor:
    """An uninitialised DTensor of global shape `size`.

    Args:
        size: global shape, as integers or one sequence.
        keywords: those of torch's factories that make sense for a DTensor, `device_mesh` and `placements`: `Keywords`.

    Raises:
        PlacementError: if the placements do not fit or the layout is another.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     x = empty(8, 3, device_mesh=init_device_mesh("cpu", (4,)), placements=[Shard(0)])
        ...     x.shape, x.to_local().shape
        (torch.Size([8, 3]), torch.Size([2, 3]))
    """
    return _empty(size, keywords)


@_factory
def full(size: int | Sequence[int], fill_value: float | bool | complex, **keywords: Unpack[Keywords]) -> DTensor:
    """A DTensor whose every element is `fill_value`, also where a placement is partial; keywords as for `empty`."""
    return _filled((size,) if isinstance(size, int) else (tuple(size),), fill_value, keywords)


@_factory
def zeros(*size: Any, **keywords: Unpack[Keywords]) -> DTensor:
    """A DTensor of zeros; arguments as for `empty`."""
    return _filled(size, 0.0, keywords)


@_factory
def ones(*size: Any, **keywords: Unpack[Keywords]) -> DTensor:
    """A DTensor of ones; arguments as for `empty`."""
    return _filled(size, 1.0, keywords)


@_factory
def rand(*size: Any, generator: torch.Generator | None = None, **keywords: Unpack[Keywords]) -> DTensor:
    """Uniform numbers in [0, 1): the values that `torch.rand` draws on one device; arguments as for `empty`."""
    return _drawn(size, keywords, lambda drawn: drawn.uniform_(generator=generator))


@_factory
def randn(*size: Any, generator: torch.Generator | None = None, **keywords: Unpack[Keywords]) -> DTensor:
    """Standard normal numbers: the values that `torch.randn` draws on one device; arguments as for `empty`."""
    return _drawn(size, keywords, lambda drawn: drawn.normal_(generator=generator))


@_factory
def randint(
    low: int, high: int, size: Sequence[int], *, generator: torch.Generator | None = None, **keywords: Unpack[Keywords]
) -> DTensor:
    """Integers in `[low, high)`: the values that `torch.randint` draws on one device; keywords as for `empty`."""
    return _drawn((tuple(size),), keywords, lambda drawn: drawn.random_(low, high, generator=generator), torch.int64)


@_factory
def randperm(n: int, *, generator: torch.Generator | None = None, **keywords: Unpack[Keywords]) -> DTensor:
    """A permutation of `range(n)`: the one that `torch.randperm` draws on one device; keywords as for `empty`.

    Every rank draws all of it, in O(n) memory, and keeps its shard.
    """
    result = _empty((n,), keywords, torch.int64)
    local = result._local_tensor
    whole = torch.randperm(n, dtype=local.dtype, device=local.device, generator=generator)
    if result._spec.coordinate is not None:
        start = result._spec.local_offset[0]
        local.copy_(whole[start : start + len(local)])
    return result
