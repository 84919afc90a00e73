"""Conversion of arguments of DTensor methods: layouts become specs, indices become tensors.

`V -> R` begins the docstring of a function from tensors that may differ by rank (V, varying) to
equal tensors (R, replicated). After `V -> check`, the ranks have checked that their tensors fit.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh, broadcast, current_mesh
from shoal_mesh.internal import require

from .._torch.compiling import is_tracing
from .._torch.operators import out_of_sight
from .._torch.tensors import TRACED, apply
from ..argument_types import check_mesh, require_tensor
from ..dispatch.global_call import replicated_spec
from ..dispatch.plain_tensors import digest_of
from ..errors import ArgumentTypeError, PlacementError, ShoalTensorError
from ..host_memory import device_of_numbers, upload
from ..layout.dim_sharding import DimSharding, ShardOrder, runs_of
from ..layout.memory_order import dense_stride, dims_by_stride, is_contiguous, memory_order
from ..layout.partition_spec import Placements, normalize_placements, read_placements
from ..layout.placements import Partial, Placement, Replicate, Shard, StridedShard
from ..layout.spec import Spec
from ..layout.tensor_meta import cache_last
from ..rows_of_ranks import rows_of_ranks
from ..scopes import replicas_are_compared


def mesh_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the given mesh, or the mesh of the enclosing `with mesh:` block.

    While compiling, the mesh must be given, because compiled code could not detect another block.
    """
    if type(mesh) is DeviceMesh:
        return mesh
    if mesh is None and is_tracing():
        raise PlacementError(
            "inside torch.compile pass device_mesh: compiled code does not see `with mesh:`"
        )
    result = mesh if mesh is not None else current_mesh()
    if result is None:
        raise PlacementError("no device mesh: pass device_mesh, or call this inside `with mesh:`")
    check_mesh("device_mesh", result)
    return result


def target_spec(
    source: Spec,
    mesh: DeviceMesh | None,
    placements: Placements | None,
    shard_order: ShardOrder | None,
) -> Spec:
    """Return the spec that a call of `redistribute` requests."""
    if placements is None:
        first: object = mesh
        listed = isinstance(first, list | tuple)
        hint = f": the first argument is device_mesh, so write placements={first}" if listed else ""
        raise PlacementError(
            f"redistribute: expected placements, one per mesh axis{hint}; the tensor is {source!r}"
        )
    target_mesh = source.mesh
    if mesh is not None and mesh is not target_mesh:
        check_mesh("redistribute", mesh)
        target_mesh = mesh if mesh.identity is not target_mesh.identity else target_mesh
    placements, shard_order = read_placements(target_mesh, placements, shard_order)
    if target_mesh is source.mesh:
        return _target(source, placements, shard_order)
    # Equal meshes over other groups have other identities.
    other_mesh = (target_mesh, target_mesh.identity)
    return _target(source, placements, shard_order, other_mesh)


@cache_last(4096)
def _target(
    source: Spec,
    placements: tuple[Placement, ...],
    shard_order: ShardOrder | None,
    other_mesh: tuple[DeviceMesh, object] | None = None,
) -> Spec:
    """Return the requested spec; raise an error if an axis cannot become partial."""
    target_mesh = source.mesh if other_mesh is None else other_mesh[0]
    is_same_mesh = target_mesh == source.mesh
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Partial):
            continue
        before = source.placements[axis] if is_same_mesh else None
        becomes_sum = isinstance(before, Shard | StridedShard) and placement == Partial()
        if before is not placement and not becomes_sum:
            raise PlacementError(
                f"redistribute: cannot make mesh axis {target_mesh.axis_names[axis]!r} "
                f"{placement!r}: the tensor is {source!r}; partial values come from operators, "
                "from_local, or a redistribution from Shard to Partial() on the same mesh"
            )
    return Spec(
        target_mesh,
        placements,
        source.shape,
        source.stride,
        dtype=source.dtype,
        shard_order=shard_order,
    )


def global_spec(  # noqa: PLR0913  # the arguments of from_local
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    shard_order: ShardOrder | None,
    *,
    run_check: bool,
) -> tuple[Spec, torch.Tensor]:
    """Return the spec of the DTensor with `local` as shard here, and the local tensor to use."""
    require_tensor(local, "DTensor.from_local: local_tensor is a plain tensor")
    placements, shard_order = read_placements(mesh, placements, shard_order)
    # Marks for "conjugate (or negate) later" are ignored on a tensor inside a subclass.
    local = local.resolve_conj().resolve_neg()
    assumes_even = shape is None and not run_check
    if shape is not None:
        require(
            shape,
            (tuple, list),
            "DTensor.from_local: shape is a tuple of integers",
            ArgumentTypeError,
        )
        shape = tuple(shape)
    if run_check and mesh.get_coordinate() is not None:
        agreed, local = layout_of_ranks(
            local,
            mesh,
            placements,
            shard_order,
            about=lambda: "from_local",
            values=False,
            gradients=True,
        )
        if shape is not None and shape != agreed.shape:
            raise PlacementError(
                f"from_local: got shape {shape}, but the shards make a tensor of shape "
                f"{tuple(agreed.shape)}"
            )
        local = _with_values_of_first(local, mesh, agreed)
        placements = agreed.placements
        shape = agreed.shape
        shard_order = agreed.shard_order
    assert assumes_even or shape is not None, "a rank outside the mesh needs the shape"
    facts = (
        mesh,
        mesh.identity,
        placements,
        local.shape,
        local.stride(),
        local.dtype,
        shape,
        stride,
        shard_order,
    )
    try:
        spec = _spec_of_shard(*facts)
    except TypeError as error:
        if isinstance(error, ShoalTensorError):
            raise
        # Symbolic sizes cannot be hashed, and wrong placements may not be hashable either.
        spec = _spec_of_shard.__wrapped__(*facts)
    is_compared = assumes_even and replicas_are_compared()
    if is_compared and spec.coordinate is not None and not is_tracing():
        description = f"from_local of {spec!r}"
        actual, _ = layout_of_ranks(
            local, mesh, spec.placements, spec.shard_order, about=lambda: description, values=True
        )
        if not actual.same_layout(spec):
            raise PlacementError(
                f"from_local: {spec!r} assumes a shard of the same size on every rank, but "
                f"together the ranks hold {actual!r}; pass the shape, the sizes (Shard(dim, "
                "sizes=...)), or run_check=True"
            )
    if spec.coordinate is None:  # a rank outside the mesh holds nothing
        local = local.new_empty(spec.local_shape, requires_grad=local.requires_grad)
    return spec, local


def _with_values_of_first(local: torch.Tensor, mesh: DeviceMesh, spec: Spec) -> torch.Tensor:
    """`V -> R`: return the shard with the values of the first rank along each replicating axis."""
    values = local.detach()
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate):
            values = broadcast(values, (mesh, axis), src=0)
    return apply(_WithValues, local, values) if local.requires_grad else values


class _WithValues(torch.autograd.Function):
    """Replacement of a tensor's values by the first replica's; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None


@lru_cache(maxsize=4096)
def _spec_of_shard(  # noqa: PLR0913  # what it depends on
    mesh: DeviceMesh,
    _identity: object,
    placements: tuple[Placement, ...],
    local_shape: torch.Size,
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    shard_order: ShardOrder | None,
) -> Spec:
    """Return the spec for which this rank has a shard of the given shape.

    Without a global shape, every rank is assumed to have a shard of this shape, except on dims
    with explicit sizes.
    """
    require(
        shard_order,
        (tuple, list, type(None)),
        "DTensor.from_local: shard_order lists pairs (dim, mesh axes)",
        ArgumentTypeError,
    )
    shape = _global_shape(local_shape, placements, mesh.shape) if shape is None else shape
    normal, order = normalize_placements(
        placements, mesh.shape, len(shape), shard_order, shape=shape
    )
    # The global tensor gets the memory order of the local tensor.
    if not stride and not is_contiguous(local_shape, local_stride):
        stride = dense_stride(shape, dims_by_stride(local_stride))
    spec = Spec(mesh, normal, shape, stride or None, dtype=dtype, shard_order=order)
    if spec.coordinate is not None and spec.local_shape != local_shape:
        wanted_shape = tuple(spec.local_shape)
        raise PlacementError(
            f"from_local: {spec!r} needs a local shape of {wanted_shape} at mesh coordinate "
            f"{spec.coordinate}, got {tuple(local_shape)}; uneven shards need "
            "Shard(dim, sizes=...) or run_check=True"
        )
    return spec


def _global_shape(
    local_shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> list[int]:
    """Return the global shape for even shards; explicit sizes of all shards are added up."""
    shape = list(local_shape)
    ndim = len(local_shape)
    lengths: dict[int, int] = {}
    for placement, ranks in zip(placements, mesh_shape, strict=False):
        if not isinstance(placement, Shard | StridedShard):
            continue
        if not -ndim <= placement.dim < ndim:
            continue
        # Example: a local shape of (2, 6), with dims 0 and 1 sharded over 4 and 2 ranks, gives
        # (8, 12).
        shape[placement.dim] *= ranks
        if placement.sizes:
            lengths[placement.dim] = sum(placement.sizes) * runs_of(placement)
    for dim, length in lengths.items():
        shape[dim] = length
    return shape


def layout_of_ranks(  # noqa: PLR0913  # what a tensor is made of, and what is compared
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_order: ShardOrder | None,
    *,
    about: Callable[[], str],
    values: bool,
    gradients: bool = False,
) -> tuple[Spec, torch.Tensor]:
    """`V -> check`: return the layout of the shards of all ranks, and this rank's shard.

    The shard is in the memory order that all ranks have.

    The ranks exchange shapes, dtypes, memory orders and digests of values in one all-gather. If
    they hold their shards in different memory orders, the returned shard is row-major.

    Args:
        local: this rank's shard.
        mesh: the mesh.
        placements: one per mesh axis.
        shard_order: as for `DTensor.from_local`.
        about: returns a text that names the shards, for messages and threads.
        values: compare replicas, which is not possible while tracing.
        gradients: require that all ranks record a gradient, or none.

    Raises:
        PlacementError: on all ranks: the shapes do not fit a sharding; the dtypes, the placements,
            or whether gradients are recorded, differ; or replicas differ.
    """
    replicated = []
    for axis, (placement, ranks) in enumerate(zip(placements, mesh.shape, strict=False)):
        if isinstance(placement, Replicate) and ranks > 1:
            replicated.append(axis)
    values = values and bool(replicated) and not isinstance(local, TRACED)
    sizes = [*local.shape[:_MAX_DIMS], *([0] * (_MAX_DIMS - local.ndim))]
    number_of_layout = zlib.crc32(repr((list(placements), shard_order)).encode())
    numbers = [0, _facts_of(local, gradients), number_of_layout, *sizes]
    # Modes must not record these tensors or make them fake tensors.
    with out_of_sight():
        comm = mesh.comm(tuple(range(mesh.ndim)))
        if values:
            device = torch.device(mesh.device_type)
        else:
            device = device_of_numbers(comm, mesh.device_type)
        own_row = upload(numbers, device)
        if values:
            own_row[0] = digest_of([local], mesh.device_type)
    coordinates = product(*map(range, mesh.shape))
    rows = dict(zip(coordinates, rows_of_ranks(mesh, about, own_row), strict=True))
    facts = {coordinate: row[1] for coordinate, row in rows.items()}
    _require_equal_facts(facts, about)
    # all ranks have the rows, so all of them raise
    differing = [at for at, row in rows.items() if row[2] != number_of_layout]
    if differing:
        raise PlacementError(
            f"{about()}: all ranks must pass the same placements and shard_order; this rank passes "
            f"{list(placements)}, the rank at mesh coordinate {differing[0]} passes others"
        )
    digests: dict[tuple[int, ...], set[int]] = {}
    for coordinate, (digest, *_) in rows.items():
        shard = [*coordinate]
        for axis in replicated:
            shard[axis] = -1
        digests.setdefault(tuple(shard), set()).add(digest)
    if any(len(digests_of_replicas) > 1 for digests_of_replicas in digests.values()):
        axes = "x".join(mesh.axis_names[axis] for axis in replicated)
        raise PlacementError(
            f"{about()}, placed {list(placements)}, differs between ranks along {axes}; use "
            "Partial() if every rank has one term of a sum"
        )
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for coordinate, (_, fact, _, *lengths) in rows.items():
        shapes[coordinate] = tuple(lengths[: fact % _DIMS])
    spec = _layout_of_shapes(shapes, local.dtype, mesh, placements, shard_order=shard_order)
    orders = {fact // _ORDERS for fact in facts.values()}
    if len(orders) > 1:
        local = local.contiguous()
    return spec, local


# A row of `layout_of_ranks` has the digest, the facts, a number of the placements and this many
# sizes, filled up with zeros. Example: a shard of (3, 5) is [digest, facts,
# placements, 3, 5, 0, ...].
_MAX_DIMS = 16
# The facts are one number. Bits 0 to 7 are the number of dims, bits 8 to 15 the dtype, bit 16 tells
# whether a gradient is recorded, and the other bits are a checksum of the memory order.
_DIMS = 1 << 8
_GRADIENT = 1 << 16
_ORDERS = 1 << 17
_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})


def _facts_of(local: torch.Tensor, gradients: bool) -> int:
    """Encode everything that the shards of one tensor have in common, except sizes, as a number."""
    order = memory_order(local.shape, local.stride())
    number_of_order = zlib.crc32(bytes(order)) if order else 0
    records = gradients and torch.is_grad_enabled() and local.requires_grad
    number_of_dtype = _DTYPES.index(str(local.dtype))
    facts = min(local.ndim, _DIMS - 1) + _DIMS * number_of_dtype
    return facts + _GRADIENT * records + _ORDERS * number_of_order


def _require_equal_facts(facts: Mapping[tuple[int, ...], int], about: Callable[[], str]) -> None:
    """Raise the same PlacementError on all ranks if their shards do not belong to one tensor."""
    dims = {coordinate: fact % _DIMS for coordinate, fact in facts.items()}
    if max(dims.values()) > _MAX_DIMS:
        raise PlacementError(
            f"{about()}: run_check supports up to {_MAX_DIMS} dims, got {max(dims.values())}; "
            "pass the shape, without run_check"
        )
    dtypes = {}
    for coordinate, fact in facts.items():
        number = fact // _DIMS % _DIMS
        dtypes[coordinate] = _DTYPES[number]
    _require_equal(dtypes, "dtype", about)
    records = {}
    for coordinate, fact in facts.items():
        records[coordinate] = f"requires_grad={bool(fact & _GRADIENT)}"
    _require_equal(records, "requires_grad", about)


def _require_equal(
    values: Mapping[tuple[int, ...], str], name: str, about: Callable[[], str]
) -> None:
    """Raise the same PlacementError on all ranks if a property differs between them."""
    counts = Counter(values.values())
    if len(counts) == 1:
        return
    texts = [f"{value} on {count} ranks" for value, count in counts.items()]
    listed = ", ".join(texts)
    value_of_first = next(iter(counts))
    differing = [coordinate for coordinate, value in values.items() if value != value_of_first]
    raise PlacementError(
        f"{about()}: all ranks must pass tensors with the same {name}, got {listed}; the first "
        f"that differs is at mesh coordinate {differing[0]}"
    )


def _layout_of_shapes(
    shapes: Mapping[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_order: ShardOrder | None,
) -> Spec:
    """Return the spec of a tensor from the local shapes by mesh coordinate."""
    first = next(iter(shapes.values()))
    numbers_of_dims = {len(shape) for shape in shapes.values()}
    if len(numbers_of_dims) != 1:
        raise PlacementError(
            f"from_local: the ranks pass tensors of {sorted(numbers_of_dims)} dims"
        )
    are_even = len({*shapes.values()}) == 1
    even_shape = _global_shape(first, placements, mesh.shape) if are_even else None
    normal, order = normalize_placements(
        placements, mesh.shape, len(first), shard_order, shape=even_shape
    )
    result = list(normal)
    total = _global_shape(first, normal, mesh.shape)
    for dim, axes in order:
        if any(isinstance(normal[axis], StridedShard) for axis in axes):
            continue
        # Example: dim 0 is sharded by the first axis of a mesh of (2, 2), and the ranks have 3, 3,
        # 2 and 2 rows. The sizes by coordinate are {(0,): 3, (1,): 2}.
        by_coordinate = {}
        for coordinate, shape in shapes.items():
            by_coordinate[tuple([coordinate[axis] for axis in axes])] = shape[dim]
        sizes = tuple(size for _, size in sorted(by_coordinate.items()))
        sharding = DimSharding(axes, tuple(mesh.shape[axis] for axis in axes), sizes)
        total[dim] = sharding.length
        for axis, placement in sharding.placements(dim).items():
            result[axis] = placement
    spec = Spec(mesh, result, total, None, dtype=dtype, shard_order=order)
    for coordinate, shape in shapes.items():
        expected = spec.local_shape_at(coordinate)
        if expected != shape:
            raise PlacementError(
                f"from_local: {spec!r} needs a local shape of {tuple(expected)} at mesh "
                f"coordinate {coordinate}, but that rank passes {shape}; a dim must have the same "
                "size along mesh axes that do not shard it"
            )
    return spec


# --- indices, rewritten so that assignments write to a view of local storage ----------------------


def with_lists(cls: Any, tensor: Any, index: Any) -> Any:
    """Convert each list in an index of a DTensor to a replicated DTensor of class `cls`."""

    def make_replicated(numbers: list[Any]) -> Any:
        whole = upload(numbers, tensor._local_tensor.device)
        # `torch.tensor([])` has a floating-point dtype, which is not allowed for an index.
        if not whole.numel():
            whole = whole.long()
        return cls(whole, replicated_spec(tensor._spec.mesh, whole))

    if type(index) is list:
        return make_replicated(index)
    if type(index) is not tuple:
        return index
    return tuple([make_replicated(entry) if type(entry) is list else entry for entry in index])


class IndexedWrite(NamedTuple):
    """The assignment `tensor[index] = value`."""

    tensor: Any
    index: Any
    value: Any


def with_a_dim(tensor: Any, index: Any, value: Any) -> IndexedWrite:
    """Add a dim at the end of each part of `tensor[index] = value` if numbers select one element.

    A single element belongs to one rank only. If a dim is left, selecting a number from a sharded
    tensor gives a view on every rank, which is empty on ranks that do not have the element.
    """
    entries = index if isinstance(index, tuple) else (index,)
    numbers = [entry for entry in entries if isinstance(entry, int) and not isinstance(entry, bool)]
    fillers = [entry for entry in entries if entry is None or entry is Ellipsis]
    selects_one = bool(numbers) and len(numbers) == tensor.ndim
    if not selects_one or len(numbers) + len(fillers) != len(entries):
        return IndexedWrite(tensor, index, value)
    # Example: x[2, 1] = value with x of shape (3, 4) becomes x.unsqueeze(-1)[2, 1, :], which has
    # the shape (1,).
    if isinstance(value, Tensor) and value.ndim:
        value = value.unsqueeze(-1)
    return IndexedWrite(tensor.unsqueeze(-1), (*entries, slice(None)), value)
