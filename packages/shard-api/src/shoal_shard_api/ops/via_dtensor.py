"""Conversion of ShardedTensor to DTensor and back, and functions by way of DTensors.

A conversion needs shards that form a ``Grid`` (grids.py). The arguments of a function are converted
to the mesh of the first tensor whose layout has placements, the home mesh. Pointwise functions,
detected by a run on meta tensors, do not need placements: they are computed on each shard alone, in
any layout. Functions get the class ShardedTensor as the argument ``cls``, because its module
imports this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from shoal_dtensor import DTensor, Replicate, Shard, Spec, implicit_replication
from shoal_dtensor.internal import Box, TorchDispatchMode, pytree
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import ScopedValue, require

from .._torch import RemoteDevice
from ..errors import ArgumentTypeError, NotExpressibleError, UnsupportedOpError
from ..ranks.process_groups import members, mesh_of, one_dim_mesh
from ..ranks.reshard import move
from ..spec.metadata import Layout, TensorProperties
from ..spec.specs import spec_of
from .grids import grid_of

_MAY_RESHARD = ScopedValue("shoal_implicit_reshard", False)
_ALSO_POINTWISE = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten._to_copy.default,
}


def spec_for(tensor: Any) -> Spec:
    """Return the spec of the DTensor with the same shards.

    Raises:
        NotExpressibleError: There is none.
    """
    group = tensor.process_group
    device_type = tensor._local_tensors[0].device.type
    shape = tuple(tensor.size())
    grid = grid_of(tensor._layout, shape, members(group))
    mesh = mesh_of(group, device_type, grid.mesh_shape, grid.ranks)
    return Spec(mesh, grid.placements, tensor.size(), tensor.stride(), dtype=tensor.dtype)


def to_dtensor(tensor: Any) -> DTensor:
    """Wrap the shards of a ShardedTensor in a DTensor."""
    local_tensors = tensor._local_tensors
    filled = [local for local in local_tensors if local.numel() > 0]
    local = filled[0] if filled else local_tensors[0]
    return _from_local(local, spec_for(tensor))


def _from_local(local: torch.Tensor, spec: Spec) -> DTensor:
    # The empty tensor of a rank without shards is 1-D.
    if local.shape != spec.local_shape:
        local = local.reshape(spec.local_shape)
    shape = torch.Size(spec.shape)
    stride = tuple(spec.stride)
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
    )


def layout_of(spec: Spec) -> Layout:
    """Return the global rank and box of every shard of a DTensor, in the order of its mesh."""
    mesh = spec.mesh
    coordinates = product(*map(range, mesh.shape))
    return tuple([(mesh.rank_at(coordinate), spec.box(coordinate)) for coordinate in coordinates])


def from_dtensor(cls: Any, dtensor: DTensor, *, like: Any = None) -> Any:
    """Wrap the shards of a DTensor in a ShardedTensor.

    Args:
        cls: The class of the result.
        dtensor: A DTensor that every mesh axis of more than one rank shards.
        like: A ShardedTensor on the same ranks, whose process group and devices the result has.

    Raises:
        NotExpressibleError: The DTensor is replicated or partial along an axis, or has no dims.
    """
    spec = dtensor.spec
    _check_sharded(spec)
    layout = layout_of(spec)
    local = dtensor.to_local()
    mesh = spec.mesh
    ranks = [rank for rank, _ in layout]
    placements = _placements_of_ranks(mesh.device_type, ranks)
    if like is None:
        every_axis = tuple(range(mesh.ndim))
        group = mesh.comm(every_axis).group
    else:
        group = like.process_group
        # Ranks without a shard in `like` keep the placement above.
        for shard in like._metadata.shards_metadata:
            if shard.placement is not None:
                placements[shard.rank] = shard.placement
    sharding_spec = spec_of(layout, placements)
    properties = TensorProperties(dtype=spec.dtype, requires_grad=local.requires_grad)
    metadata = sharding_spec.build_metadata(torch.Size(spec.shape), properties)
    return cls._wrap(sharding_spec, metadata, [local], group, stride=spec.stride)


def _check_sharded(spec: Spec) -> None:
    """Raise NotExpressibleError unless every mesh axis of more than one rank shards a dim."""
    mesh = spec.mesh
    unsharded = []
    for placement, name, size in zip(spec.placements, mesh.axis_names, mesh.shape, strict=True):
        if size > 1 and not placement.is_shard():
            unsharded.append(f"{placement!r} on axis {name!r}")
    if unsharded or spec.ndim == 0:
        reason = ", ".join(unsharded) or "no dims"
        raise NotExpressibleError(
            f"a DTensor of shape {tuple(spec.shape)} with {reason} has no sharding spec: "
            f"redistribute it to Shard on every mesh axis {mesh.axis_names}, or take full_tensor()"
        )


def _placements_of_ranks(device_type: str, ranks: Sequence[int]) -> dict[int, RemoteDevice]:
    """Return the placement of every rank: one of the devices of its host, in turn."""
    count = max(torch.get_device_module(device_type).device_count(), 1)
    placements = {}
    for rank in ranks:
        device = device_type
        if device_type != "cpu":
            device = f"{device_type}:{rank % count}"
        placements[rank] = RemoteDevice(f"rank:{rank}/{device}")
    return placements


# --- functions by way of DTensors -----------------------------------------------------------------


@contextmanager
def implicit_reshard(allow: bool = True) -> Iterator[None]:
    """Move tensors without placements to Shard(0), inside the ``with``, for ops that need them.

    Args:
        allow: False refuses such ops again, which is the default outside.

    Example:
        >>> first = ShardMetadata([0], [2], "rank:0/cpu")
        >>> second = ShardMetadata([2], [2], "rank:0/cpu")
        >>> both_on_one = EnumerableShardingSpec([first, second])
        >>> with implicit_reshard():
        ...     ones(both_on_one, 4).cumsum(0).full_tensor()
        tensor([1., 2., 3., 4.])
    """
    require(allow, bool, "implicit_reshard: allow is a bool", ArgumentTypeError)
    with _MAY_RESHARD.change(lambda _: allow):
        yield


class DTensorCall:
    """A function call by way of DTensors.

    Attributes:
        tensors: The ShardedTensors among the arguments.
        initializer: True if the function is one of torch.nn.init.
        in_place: True if the function writes to its first argument.
        specs: By the id of a tensor: the spec of its DTensor; None if its layout has no placements.
        problem: The reason why a tensor has no placements; "" if all have.
    """

    def __init__(self, cls: Any, func: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.cls = cls
        self.func = func
        self.tensors = tensors
        self.name: str = str(getattr(func, "__name__", func))
        self.initializer: bool = getattr(func, "__module__", "") == "torch.nn.init"
        is_dunder = self.name.endswith("__")
        is_named_in_place = self.name.endswith("_") and not is_dunder
        self.in_place: bool = is_named_in_place or self.name == "__setitem__"
        self.specs: dict[int, Any] = dict.fromkeys(map(id, tensors))
        self.problem = ""
        for tensor in tensors:
            try:
                self.specs[id(tensor)] = spec_for(tensor)
            except NotExpressibleError as error:
                self.problem = self.problem or str(error)

    @cached_property
    def home(self) -> DeviceMesh:
        """The mesh of the first tensor that has placements, else the 1-D mesh of all ranks."""
        for spec in self.specs.values():
            if spec is not None:
                mesh: DeviceMesh = spec.mesh
                return mesh
        first = self.tensors[0]
        device = first._local_tensors[0].device
        return one_dim_mesh(first.process_group, device.type)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        plain: Callable[[DTensor], Any] | None = None,
    ) -> Any:
        """Compute the call shard by shard or by way of DTensors, or refuse it.

        Args:
            args: The positional arguments of the function.
            kwargs: The keyword arguments of the function.
            plain: Converts a result with dims to a plain tensor; by default the result becomes a
                ShardedTensor.
        """
        self._refuse_leaf(args, kwargs)
        if self.problem:
            if is_pointwise(self.func, args, kwargs, self.tensors):
                return run_shardwise(self.func, args, kwargs, self.tensors)
            self.check_layouts()
        has_grad = torch.is_grad_enabled() and not self.initializer
        with torch.set_grad_enabled(has_grad):
            return self._run_at_home(args, kwargs, plain)

    def _run_at_home(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[[DTensor], Any] | None
    ) -> Any:
        dtensors = {id(tensor): self._to_home(tensor) for tensor in self.tensors}
        nodes_before = {key: dtensor.grad_fn for key, dtensor in dtensors.items()}
        tensor_of_dtensor = {id(dtensors[id(tensor)]): tensor for tensor in self.tensors}
        replicated = [Replicate()] * self.home.ndim

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, self.cls):
                return dtensors[id(leaf)]
            is_plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
            if is_plain and leaf.dim() > 0:
                return DTensor.from_local(leaf, self.home, replicated, run_check=False)
            return leaf

        def convert_back(leaf: Any) -> Any:
            """Turn a result into a plain tensor or a ShardedTensor."""
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) in tensor_of_dtensor:
                return tensor_of_dtensor[id(leaf)]
            if leaf.dim() == 0:
                return leaf.full_tensor()
            if plain is not None:
                return plain(leaf)
            if not all(placement.is_shard() for placement in leaf.placements):
                placements = self._placements_at_home(leaf.shape) or _shard_further(leaf)
                leaf = leaf.redistribute(placements=placements)
            return from_dtensor(self.cls, leaf, like=self.tensors[0])

        home_args = pytree.tree_map(convert, args)
        home_kwargs = pytree.tree_map(convert, kwargs)
        # Plain tensors that the function itself creates are replicated.
        with implicit_replication():
            result = self.func(*home_args, **home_kwargs)
        for tensor in self.tensors:
            key = id(tensor)
            self._write_back(tensor, dtensors[key], nodes_before[key])
        return pytree.tree_map(convert_back, result)

    def _refuse_leaf(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write to a leaf that requires grad.

        Torch would allow the write, because the DTensor of the call is not a leaf.
        """
        if self.initializer or not torch.is_grad_enabled():
            return
        written = [args[0]] if self.in_place and args else []
        written += pytree.tree_leaves(kwargs.get("out"))
        for tensor in written:
            is_sharded = isinstance(tensor, self.cls)
            if is_sharded and tensor.requires_grad and tensor.is_leaf:
                raise UnsupportedOpError(
                    f"{self.name}: a leaf ShardedTensor that requires grad cannot be written in "
                    "place; use torch.no_grad()"
                )

    def check_layouts(self) -> None:
        """Raise NotExpressibleError for a layout without placements, unless it may be moved."""
        if self.problem and not _MAY_RESHARD.context_value():
            raise NotExpressibleError(
                f"{self.name}: {self.problem}. reshard() to a ChunkShardingSpec first, or use "
                "implicit_reshard()"
            )

    def _is_at_home(self, tensor: Any) -> bool:
        spec = self.specs[id(tensor)]
        return spec is not None and spec.mesh == self.home

    def _to_home(self, tensor: Any) -> DTensor:
        """Return a tensor as a DTensor on the home mesh.

        A tensor of another layout gets the placements of an argument of its shape, or else shards
        of the dim that its first axis shards.
        """
        if self._is_at_home(tensor):
            return to_dtensor(tensor)
        placements = self._placements_at_home(tensor.shape)
        if placements is None:
            spec = self.specs[id(tensor)]
            dim = 0 if spec is None else spec.placements[0].dim
            placements = (Shard(dim),) * self.home.ndim
        target = Spec(self.home, placements, tensor.size(), tensor.stride(), dtype=tensor.dtype)
        (local,) = move(tensor._local_tensors, tensor._layout, layout_of(target), tensor._comm)
        return _from_local(local, target)

    def _placements_at_home(self, shape: torch.Size) -> tuple[Shard, ...] | None:
        """Return the placements of an argument of this shape on the home mesh, or None."""
        for tensor in self.tensors:
            if tensor.shape == shape and self._is_at_home(tensor):
                placements: tuple[Shard, ...] = self.specs[id(tensor)].placements
                return placements
        return None

    def _write_back(self, tensor: Any, dtensor: DTensor, node_before: Any) -> None:
        """Write the effect of an op on a DTensor back to its tensor.

        A tensor at home shares the memory of the DTensor and needs its autograd history. A tensor
        that was moved needs the values.
        """
        if self._is_at_home(tensor):
            if dtensor.grad_fn is not node_before:
                tensor._set_local_tensors([dtensor.to_local()])
        elif self.in_place and tensor is self.tensors[0]:
            result = from_dtensor(self.cls, dtensor, like=tensor)
            moved = result.resharded(tensor.sharding_spec())
            for local, new in zip(tensor._local_tensors, moved._local_tensors, strict=True):
                local.copy_(new)


def _shard_further(dtensor: DTensor) -> tuple[Any, ...]:
    """Return placements of shards only: Shard(0) on the axes that do not shard.

    If an axis shards dim 0 already, all axes get Shard(0).
    """
    placements = dtensor.placements
    if any(placement.is_shard(0) for placement in placements):
        return (Shard(0),) * len(placements)
    return tuple([placement if placement.is_shard() else Shard(0) for placement in placements])


# --- pointwise functions, shard by shard ----------------------------------------------------------


class _NotPointwise(Exception):  # noqa: N818, RUF100  # control flow; no user sees it
    """The function has an operator that is not elementwise."""


class _OnlyPointwise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its base is untyped
    """Raises at the first operator that is not elementwise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_pointwise = torch.Tag.pointwise in func.tags and not is_random
        if not is_pointwise and func not in _ALSO_POINTWISE:
            raise _NotPointwise
        return func(*args, **(kwargs or {}))


def is_pointwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> bool:
    """Tell whether a call can be computed shard by shard.

    The answer depends on sizes, dtypes and layouts only, so it is the same on all ranks.
    """
    first = tensors[0]
    if any(tensor._layout != first._layout for tensor in tensors):
        return False

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
        return leaf

    meta_args = pytree.tree_map(to_meta, args)
    meta_kwargs = pytree.tree_map(to_meta, kwargs)
    try:
        with torch.no_grad(), _OnlyPointwise():  # type: ignore[no-untyped-call]  # as above
            result = func(*meta_args, **meta_kwargs)
    except _NotPointwise:
        return False
    leaves = pytree.tree_leaves(result)
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not outputs:
        return False
    return all(output.shape == first.shape for output in outputs)


def run_shardwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> Any:
    """Compute a pointwise call on each local shard; no communication."""
    first = tensors[0]
    shape = tuple(first.shape)
    sharded = {id(tensor) for tensor in tensors}

    def localize(index: int, box: Box | None, leaf: Any) -> Any:
        """Return the part of an argument for one shard; a rank without shards has no box."""
        if id(leaf) in sharded:
            return leaf._local_tensors[index]
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.new_empty(0) if box is None else block_for(leaf, box, shape)
        return leaf

    def join(*local_tensors: Any) -> Any:
        """Wrap the results of all shards; return an argument that has them as local tensors."""
        if not isinstance(local_tensors[0], torch.Tensor):
            return local_tensors[0]
        for tensor in tensors:
            pairs = zip(local_tensors, tensor._local_tensors, strict=True)
            if all(result is local for result, local in pairs):
                return tensor
        return first._with_local_tensors(local_tensors)

    boxes: list[Box | None] = [shard.metadata.box for shard in first.local_shards()]
    results = []
    for index, box in enumerate(boxes or [None]):
        part = partial(localize, index, box)
        local_args = pytree.tree_map(part, args)
        local_kwargs = pytree.tree_map(part, kwargs)
        results.append(func(*local_args, **local_kwargs))
    return pytree.tree_map(join, *results)


def block_for(plain: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Slice a plain tensor so that it broadcasts against the shard with this box.

    Dims of size 1 are not sliced: they broadcast as they are.
    """
    spans_of_plain = box[len(shape) - plain.dim() :]
    slices = []
    for size, span in zip(plain.shape, spans_of_plain, strict=True):
        slices.append(slice(None) if size == 1 else slice(*span))
    return plain[tuple(slices)]
