"""The global outputs of an operator call, computed without the values of its inputs.

The meta kernel determines the outputs. For many operators it is Python code, which takes 0.2 to 2
ms and imports a compiler. Most operators only depend on which sizes are equal to each other, to 0
or to 1 (`Rule.sizes`). In place of the meta kernel they are run on tensors of few elements (a
probe), once for all calls with the same equalities. For example, (24, 6) @ (6, 10) is run as (5, 6)
@ (6, 7), and its result of 5 x 7 elements stands for a result of 24 x 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from shoal_mesh import DeviceMesh

from .._torch.compiling import sizes_in_recorder
from .._torch.operators import Build, DataDependentError, OpOverload, direct, results_of, shapes_of
from ..errors import OperatorArgumentError, OperatorIndexError
from ..layout.memory_order import dense_order, dense_stride
from ..layout.placements import Replicate
from ..layout.spec import Spec
from ..layout.tensor_meta import (
    TensorMeta,
    constant,
    flatten,
    has_symbols,
    map_instances,
    traced_with,
)
from ..rules.language.op_call import OpSchema, schema_of
from ..rules.language.rule import LocalFunction, Rule

# Sizes of a probe start at 5, which is this number plus 2 for the sizes 0 and 1. Then a dim of the
# result that always has 2 elements is not mistaken for a dim of an input.
FIRST_PROBE_SIZE = 3
_NUMBERS = (int, float, bool, complex)


def mesh_of(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceMesh:
    """Return the mesh of the first DTensor among the arguments."""
    arguments = flatten([*args, *kwargs.values()])
    mesh: DeviceMesh = next(item._spec.mesh for item in arguments if isinstance(item, cls))
    return mesh


def replicated_spec(mesh: DeviceMesh, tensor: torch.Tensor) -> Spec:
    """Return the spec of a tensor that every rank of a mesh holds."""
    return Spec(mesh, (Replicate(),) * mesh.ndim, tensor.shape, tensor.stride(), dtype=tensor.dtype)


def specs_of(
    cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with specs in place of tensors; plain tensors count as replicated."""
    mesh = mesh_of(cls, args, kwargs)

    def spec(tensor: Any) -> Spec:
        return tensor._spec if isinstance(tensor, cls) else replicated_spec(mesh, tensor)

    return map_instances([*args], torch.Tensor, spec), map_instances({**kwargs}, torch.Tensor, spec)


def specs_in(values: Iterable[Any]) -> list[Spec]:
    """Return the specs in several arguments, in order."""
    specs: list[Spec] = []
    map_instances([*values], Spec, specs.append)
    return specs


# --- the outputs ----------------------------------------------------------------------------------


class GlobalOutputs(NamedTuple):
    """Shape, stride and dtype of the global outputs, and the search for the cheapest callable."""

    metas: tuple[TensorMeta, ...]
    binding: Callable[[], LocalFunction]


def outputs_by_meta_kernel(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], specs: Sequence[Spec]
) -> GlobalOutputs:
    """Compute the outputs of a call on global tensors, given as `specs`.

    The result is empty if the outputs depend on data.
    """
    build = _builder(args, kwargs)
    try:
        metas = _metas_of(shapes_of(op, build, specs[0].mesh.device_type))
    except DataDependentError:
        metas = ()
    except (RuntimeError, ValueError, IndexError) as error:
        refused = OperatorIndexError if isinstance(error, IndexError) else OperatorArgumentError
        inputs = ", ".join(map(repr, specs))
        raise refused(f"{op}({inputs}): {error}") from error
    return GlobalOutputs(metas, partial(direct, op, build, metas))


def outputs_by_probe(
    op: OpOverload,
    rule: Rule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    specs: Sequence[Spec],
) -> GlobalOutputs | None:
    """Derive the outputs of a call from the outputs of a smaller call; None if sizes matter.

    The arguments are the arguments of `outputs_by_meta_kernel`.
    """
    schema = schema_of(op)
    value_names = rule.sizes
    if value_names is None or not _fits_probe(schema, (*args, *kwargs.values())):
        return None
    orders = {spec: dense_order(spec.shape, spec.stride) for spec in specs}
    if None in orders.values():
        return None
    sizes = _ProbeSizes()

    def probe_argument(name: str, value: Any) -> Any:
        if isinstance(value, Spec):
            shape = sizes.of(value.shape)
            return TensorMeta(shape, dense_stride(shape, orders[value] or ()), value.dtype)
        if isinstance(value, list | tuple):
            return sizes.of(value) if name in value_names else tuple(value)
        if rule.by_value or type(value) not in (int, float):
            return value
        return type(value)(1)

    positional = zip(schema.positional, args, strict=False)
    by_place = [probe_argument(name, value) for name, value in positional]
    by_name = {name: probe_argument(name, value) for name, value in kwargs.items()}
    device_type = specs[0].mesh.device_type
    probe = run_probe(op, device_type, torch.get_default_dtype(), *by_place, **by_name)
    if probe is None:
        return None
    metas = []
    for meta in probe.metas:
        shape = sizes.sizes_of_call(meta.shape)
        if shape is None:
            return None
        order = dense_order(meta.shape, meta.stride) or ()
        metas.append(TensorMeta(shape, dense_stride(shape, order), meta.dtype))
    return GlobalOutputs(tuple(metas), probe.binding)


def _fits_probe(schema: OpSchema, values: Sequence[Any]) -> bool:
    """Tell whether a probe may stand for a call with these arguments."""
    if schema.is_random or has_symbols(values):
        return False
    lists = [value for value in values if isinstance(value, list | tuple)]
    return all(type(item) in _NUMBERS for items in lists for item in items)


class _ProbeSizes:
    """The sizes of a probe: equal where the sizes of the call are equal; 0 and 1 stay.

    Other sizes are numbered in order of first use, from `FIRST_PROBE_SIZE` + 2 on.
    """

    def __init__(self) -> None:
        self._probe_size_of = {0: 0, 1: 1}

    def of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the probe's sizes for some sizes of the call."""
        known = self._probe_size_of
        for size in sizes:
            if size not in known:
                known[size] = len(known) + FIRST_PROBE_SIZE
        return tuple([known[size] for size in sizes])

    def sizes_of_call(self, probe_sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Return the sizes of the call for some sizes of the probe.

        Return None if a size of the probe does not stand for a size of the call.
        """
        size_of = {probe_size: size for size, probe_size in self._probe_size_of.items()}
        if not size_of.keys() >= {*probe_sizes}:
            return None
        return tuple([size_of[probe_size] for probe_size in probe_sizes])


# typed: 1, 1.0 and True make different dtypes
@lru_cache(maxsize=4096, typed=True)
def run_probe(
    op: OpOverload, device_type: str, _default_dtype: torch.dtype, /, *args: Any, **kwargs: Any
) -> GlobalOutputs | None:
    """Run an operator on few elements; return None if the run does not determine the outputs.

    It runs the meta kernel where the CPU kernel does not give the right answer.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, TensorMeta)]
    has_indices = any(map(_is_of_integers, tensors))
    if has_indices and any(0 in meta.shape for meta in tensors):
        # A dim of no elements does not have valid indices, and some kernels do not check them.
        return None
    has_values = device_type == "cpu"
    build = _builder(args, kwargs, has_values=has_values)
    try:
        results = results_of(op, build) if has_values else shapes_of(op, build, device_type)
        metas = _metas_of(results)
        if any(dense_order(meta.shape, meta.stride) is None for meta in metas):
            return None
        # a written tensor is not resized
        writes = bool(schema_of(op).written)
        if writes and any(meta.shape != args[0].shape for meta in metas):
            return None
        binding = direct(op, build, metas)
    except (RuntimeError, ValueError, TypeError, LookupError):
        # The caller then runs the meta kernel, which reports errors.
        return None
    return GlobalOutputs(metas, lambda: binding)


def _builder(args: Sequence[Any], kwargs: Mapping[str, Any], *, has_values: bool = False) -> Build:
    """Return a function that builds arguments on a device: meta tensors, or values on the CPU."""

    def build(device: torch.device) -> tuple[Sequence[Any], Mapping[str, Any]]:
        def make(value: Any) -> Any:
            if isinstance(value, torch.device):
                return device
            if isinstance(value, torch.Generator):
                # Shapes do not depend on a generator, and meta kernels refuse one.
                return None
            place = torch.device("cpu") if has_values else device
            empty = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=place)
            if not has_values:
                return empty
            # 0 is a valid index of every dim with elements. 1 is out of range in a dim of one
            # element, and nll_loss_backward would write there.
            return empty.fill_(0 if _is_of_integers(value) else 1)

        kinds = (Spec, TensorMeta, torch.device, torch.Generator)
        return map_instances(args, kinds, make), map_instances({**kwargs}, kinds, make)

    return build


def _is_of_integers(meta: Spec | TensorMeta) -> bool:
    dtype = meta.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _metas_of(result: Any) -> tuple[TensorMeta, ...]:
    metas = []
    for tensor in flatten(result):
        shape = sizes_in_recorder(tensor.shape)
        metas.append(TensorMeta(shape, sizes_in_recorder(tensor.stride()), tensor.dtype))
    return tuple(metas)


# --- sizes that torch.compile keeps as symbols ----------------------------------------------------
#
# One graph serves every length. Redistributions are chosen for the sizes that the compiler traces
# with. Any choice is correct, so it needs no guard. Then the rule decides with the symbols
# themselves whether the operator may run on the shards, and each of its comparisons becomes a guard
# of the graph. A call that cannot be decided in this way is decided for constant sizes, and the
# next length needs another graph.


class NeedsConstantsError(Exception):
    """A call that cannot be decided for symbols; users never see this error."""


def without_symbols(value: Any, *, as_traced: bool) -> Any:
    """Replace the symbols in a value by constants: the sizes of the trace, or guarded sizes."""

    def replace(item: Any) -> Any:
        if isinstance(item, Spec):
            if item.example is None:
                return item
            return item.example if as_traced else constant(item)
        if isinstance(item, TensorMeta):
            return TensorMeta(*without_symbols([*item], as_traced=as_traced))
        if isinstance(item, torch.Size):
            return torch.Size(without_symbols([*item], as_traced=as_traced))
        if as_traced:
            (size,) = traced_with((item,))
            return size
        return int(item)

    return map_instances(value, (torch.SymInt, Spec, TensorMeta, torch.Size), replace)
