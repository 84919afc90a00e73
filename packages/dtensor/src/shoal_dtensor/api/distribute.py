"""Plain tensors and modules spread over a mesh: `distribute_tensor` and `distribute_module`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shoal_mesh import DeviceMesh

from .._torch import whole_when_compiled
from ..argument_types import check_callable, check_type
from ..errors import ArgumentValueError, PlacementError
from ..layout.boxes import slices_of
from ..layout.dim_sharding import ShardOrder
from ..layout.partition_spec import Placements, read_placements
from ..layout.placements import Partial, Placement
from ..layout.spec import Spec
from ..redistribute.execution.execute import run
from ..redistribute.plan import plan
from ..redistribute.scatter import Scatter, shard_of
from ..tensor.autograd import gradient_spec
from ..tensor.dtensor import DTensor
from ..tensor.spec_arguments import mesh_or_current


class Sliceable(Protocol):
    """A stored tensor that is read by slices: what `safetensors.safe_open(...).get_slice(name)` gives."""

    def get_shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@whole_when_compiled
def distribute_tensor(
    tensor: torch.Tensor | Sliceable,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: ShardOrder | None = None,
) -> DTensor:
    """`V -> placements`: the DTensor with the values of one rank's plain tensor.

    Every rank but the source needs memory for its own shard only (pass, say, `torch.empty(1).expand(shape)` there). A
    tensor on the meta device gives meta shards, on every rank.

    Args:
        tensor: the global tensor, of the same shape and dtype on every rank; a leaf. A DTensor of this layout
            is returned as it is. Or a stored tensor, `safetensors.safe_open(...).get_slice(name)`, that all ranks can
            read: each reads its own shard, and nothing is sent.
        device_mesh: the mesh; the one of the enclosing `with mesh:` when left out.
        placements: one per mesh axis, or a `PartitionSpec`; all replicated when left out. Where one is partial, the
            ranks' values reduce to the tensor's.
        src_data_rank: whose values count: the rank at this coordinate of every mesh axis.  None: each rank slices its
            shard out of its own tensor, without any communication; of a memory-mapped one (`torch.load(mmap=True)`,
            `torch.from_file`) it reads only that. A stored tensor is always read so.
        shard_order: pairs (tensor dim, mesh axes outermost first) where axes do not shard in ascending order.

    Raises:
        PlacementError: if the placements do not fit, the tensor is not a leaf, or it is a DTensor of another layout.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     x = distribute_tensor(torch.zeros(10, 3), init_device_mesh("cpu", (4,)), [Shard(0)])
        ...     x.shape, x.to_local().shape  # rows of 3, 3, 3 and 1
        (torch.Size([10, 3]), torch.Size([3, 3]))
    """
    mesh = mesh_or_current(device_mesh)
    wanted, shard_order = read_placements(mesh, placements, shard_order)
    check_type("distribute_tensor", "src_data_rank", src_data_rank, (int, type(None)), "an int or None")
    if isinstance(tensor, DTensor):
        asked = Spec(mesh, wanted, tensor.shape, tensor._spec.stride, tensor.dtype, shard_order)
        if tensor._spec.same_layout(asked):
            return tensor
        raise PlacementError(
            f"distribute_tensor: the tensor is a DTensor already, {tensor._spec!r}; use redistribute to {asked!r}"
        )
    if not isinstance(tensor, torch.Tensor):
        return _read(tensor, mesh, wanted, shard_order)
    check_type("distribute_tensor", "tensor", tensor, torch.Tensor, "a tensor")
    spec = _spec_of(tensor, mesh, wanted, shard_order)
    with torch.no_grad():
        # A partial axis must reduce to the values: it starts out replicated and is shared out, without communication.
        start = gradient_spec(spec)
        local = shard_of(tensor.detach(), start, src_data_rank)
        local = local if start is spec else run(plan(start, spec), local)
    result = DTensor(local, spec, requires_grad=tensor.requires_grad)
    return nn.Parameter(result, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result  # type: ignore[return-value]  # Parameter keeps the DTensor class


def distributed_by(
    scatter: Scatter, tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """What `distribute_tensor` gives for a plain tensor, with its values once `scatter` has sent them."""
    spec = _spec_of(tensor, mesh, placements)
    return DTensor(scatter.shard(tensor.detach(), spec), spec, requires_grad=tensor.requires_grad)


def _spec_of(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shard_order: ShardOrder | None = None
) -> Spec:
    """The layout of a plain tensor on a mesh, in the memory order that it has."""
    if not tensor.is_leaf:
        raise PlacementError(
            "distribute_tensor: expected a leaf tensor; use DTensor.from_local, which is differentiable"
        )
    stride = tensor.stride() if tensor.is_contiguous() or tensor.is_meta else None
    return Spec(mesh, placements, tensor.shape, stride, tensor.dtype, shard_order)


def _read(
    stored: Sliceable, mesh: DeviceMesh, placements: tuple[Placement, ...], shard_order: ShardOrder | None
) -> DTensor:
    """Each rank reads its own box, and no rank more."""
    if not hasattr(stored, "get_shape"):
        raise PlacementError(
            "distribute_tensor: expected a tensor, or a stored one with get_shape() and slices, as safetensors' "
            f"get_slice(name) gives, got {type(stored).__name__}"
        )
    shape = tuple(stored.get_shape())
    if any(isinstance(p, Partial) for p in placements):
        raise PlacementError(
            f"distribute_tensor: a stored tensor is read as Shard or Replicate, got {list(placements)}"
        )
    nothing = stored[tuple(slice(0, 0) for _ in shape)] if shape else stored[...]
    spec = Spec(mesh, placements, shape, None, nothing.dtype, shard_order)
    device = torch.device(mesh.device_type)
    if spec.coordinate is None:
        return DTensor(nothing.new_empty((0,), device=device), spec)
    shard = (stored[slices_of(spec.box(spec.coordinate))] if shape else nothing).to(device).contiguous()
    is_view = shard.untyped_storage().nbytes() != shard.nbytes  # a view would keep more than the shard alive
    return DTensor(shard.clone() if is_view else shard, spec)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """The module itself, its parameters and buffers made DTensors and its inputs and outputs converted.

    Args:
        module: changed in place and returned. A parameter shared by several modules stays shared.
        device_mesh: the mesh; the one of the enclosing `with mesh:` when left out.
        partition_fn: called with the name, module and mesh of every sub-module, to replace parameters by DTensors;
            what it leaves plain is replicated.
        input_fn: `input_fn(module, inputs, mesh)` before forward, or, as torch once took it, `input_fn(inputs, mesh)`;
            its result replaces the inputs.
        output_fn: `output_fn(module, outputs, mesh)` after forward, or `output_fn(outputs, mesh)`; its result replaces
            the outputs.

    Raises:
        PlacementError: if the module was distributed before.
        ArgumentValueError: if a function takes another number of arguments.
    """
    mesh = mesh_or_current(device_mesh)
    check_type("distribute_module", "module", module, nn.Module, "an nn.Module")
    for name, function in (("partition_fn", partition_fn), ("input_fn", input_fn), ("output_fn", output_fn)):
        check_callable("distribute_module", name, function)
    before, after = _with_module("input_fn", input_fn), _with_module("output_fn", output_fn)
    if getattr(module, "_shoal_distributed", False):
        raise PlacementError("distribute_module: this module was distributed before; distribute a fresh one")
    shared: dict[int, nn.Parameter | torch.Tensor] = {}
    for name, child in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, child, mesh)
        _replicate(child, mesh, shared)
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, mesh))
    module._shoal_distributed = True  # type: ignore[assignment]  # a mark, not a submodule
    return module


def _with_module(name: str, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A function of (module, values, mesh) for one of that or of (values, mesh)."""
    if function is None:
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function in C says nothing of itself
        return function
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) == 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    if len(positional) == 2:
        return lambda module, values, mesh: function(values, mesh)
    raise ArgumentValueError(
        f"distribute_module: {name} takes (module, values, mesh) or (values, mesh), "
        f"got one with {len(positional)} arguments"
    )


def _replicate(module: nn.Module, mesh: DeviceMesh, shared: dict[int, Any]) -> None:
    """Replicate what is still plain; one plain tensor becomes one DTensor however many modules hold it."""
    for table in (module._parameters, module._buffers):
        for name, held in table.items():
            if held is None or isinstance(held, DTensor):
                continue
            replicated = shared.get(id(held))
            if replicated is None:
                replicated = shared[id(held)] = distribute_tensor(held, mesh)
                shared[-id(held)] = held
                _attach(held, replicated)
            table[name] = replicated  # type: ignore[assignment]  # a DTensor parameter is a Parameter


def _attach(plain: Any, replicated: Any) -> None:
    """What a user has attached to a plain tensor, attributes and hooks, for the DTensor that replaces it."""
    vars(replicated).update({name: value for name, value in vars(plain).items() if name not in vars(replicated)})
    for table, register in (
        (plain._backward_hooks, replicated.register_hook),
        (plain._post_accumulate_grad_hooks, replicated.register_post_accumulate_grad_hook),
    ):
        for key in table or ():
            register(partial(_while_registered, table, key))


def _while_registered(hooks: Mapping[int, Any], key: int, tensor: Any) -> Any:
    """Run a hook of another tensor, unless its handle has removed it."""
    hook = hooks.get(key)
    return None if hook is None else hook(tensor)
