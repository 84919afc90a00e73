"""Conversion of a module's parameters to DTensors and of its forward to a lowering, and back.

A lowering is a class whose object computes the module's forward on this rank's shards (`Lowered`).

A parameter that several modules hold stays one parameter. When the first module becomes parallel,
the plain parameter gets an attribute with the DTensor that replaces it (`_SUCCESSOR`). When a later
module becomes parallel, the attribute leads from the plain parameter to the same DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Placement, Replicate, Spec, distribute_tensor, full_tensor
from shoal_dtensor.errors import LayoutError, PlanError, TiedWeightError, UnsupportedModuleError
from shoal_dtensor.internal import (
    ModuleForward,
    Scatter,
    carry_gradient,
    current_arithmetic,
    distribute_with,
    forward_of,
    has_hooks,
    holds_tensors,
    move_attachments,
    scattering,
    set_forward,
)
from shoal_mesh import DeviceMesh

from ..lowering.lowered import Lowered
from ..lowering.parameters import HOW_TO_QUANTIZE
from ..lowering.ports import DTensorForward
from ..sharding.module_kinds import computed_parameters
from ..sharding.module_sharding import (
    Adapter,
    Experts,
    FusedBlocks,
    LatentFeatures,
    ModuleSharding,
    StyleOrigin,
)

# attribute of a plain parameter: the DTensor parameter that has replaced it
_SUCCESSOR = "_shoal_successor"
# attribute of a module: the names of the applied styles without a `ModuleSharding`; such a style
# changes the module itself (`ParallelStyle._apply`)
_UNDECLARED = "_shoal_undeclared_styles"


def apply_sharding(
    module: nn.Module,
    sharding: ModuleSharding,
    mesh: DeviceMesh,
    *,
    src_data_rank: int | None = 0,
    lower: bool = True,
    scatter: Scatter | None = None,
) -> nn.Module:
    """Make a module parallel on a mesh as its sharding declares.

    Args:
        module: the module, which is changed in place.
        sharding: the declaration of a style for the module.
        mesh: the mesh on which the style acts.
        src_data_rank: the coordinate of the rank whose parameters are sent to the others; None
            keeps every rank's own values.
        lower: whether a lowering may compute the forward. If it is False, everything runs through
            DTensor dispatch.
        scatter: a collector of parameters, with the same source, that the caller sends after it has
            applied the shardings of several modules. None sends the parameters of this module at
            once.

    Returns:
        The module.

    Raises:
        LayoutError: if the mesh has several axes, or the instance has a forward that the style
            would hide.
        PlanError: if the module already has the style, or another that shards it.
        TiedWeightError: if a shared parameter already has another layout.
        UnsupportedModuleError: if a parameter is computed from others.
    """
    if mesh.ndim != sharding.axes:
        noun = "axis" if sharding.axes == 1 else "axes"
        axes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        raise LayoutError(
            f"{sharding.style} acts on {sharding.axes} mesh {noun}, but the mesh has {axes}; "
            "choose them with style.on(axis) or style.on((axis, axis)), or pass the sub-mesh"
        )
    inner = forward_of(module)
    if inner is None and "forward" in module.__dict__:
        raise LayoutError(
            f"{sharding.style}: {type(module).__name__} has a forward set on the instance, which "
            "the style would hide; define forward in the class"
        )
    # A module without a style of its own may have the forward of a mode of arithmetic, or of a
    # shared weight. The new forward takes the place of such a forward, and does not call it.
    if isinstance(inner, Lowered) and inner.sharding.origin is not StyleOrigin.PLAN:
        inner = None
    conflict = conflicting_style(module, sharding.style, "", distributes=sharding.distributes)
    if conflict is not None:
        raise PlanError(conflict)
    check_parameters(module, sharding)
    lowering = _lowering(module, sharding, inner, lower=lower)
    # A mode such as `invariant_arithmetic` replaces lowerings by its own.
    arithmetic = current_arithmetic()
    if arithmetic is not None:
        lowering = arithmetic.form_of(lowering, sharding, module)
    fused = sharding.fused
    block_names: set[str] = set()
    if fused is not None and fused.splits(mesh.size()):
        block_names = split_blocks(module, sharding.style, fused, mesh, src_data_rank=src_data_rank)
    if sharding.distributes:
        # A forward that runs on DTensors reads the buffers as DTensors, too.
        runs_on_dtensors = lowering is DTensorForward
        shards_buffers = any(map(sharding.shards, module._buffers))
        # The block of `scattering` ends with the collective. The caller sends its own scatter.
        block = scattering(src_data_rank) if scatter is None else nullcontext(scatter)
        with block as scatter_of_block:
            _distribute(
                module,
                sharding,
                mesh,
                scatter_of_block,
                left_out=block_names,
                with_buffers=shards_buffers or runs_on_dtensors,
            )
    # Have `load_state_dict` accept fused parameters that are plain, or DTensors of any layout.
    if fused is not None:
        hook = partial(split_fused_entries, fused, mesh)
        module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # torch
    if sharding.distributes:
        shard = partial(shard_assigned, sharding)
        module.register_load_state_dict_pre_hook(shard)  # type: ignore[no-untyped-call]  # torch
    set_forward(module, lowering(module, sharding, mesh, inner))
    return module


def check_parameters(module: nn.Module, sharding: ModuleSharding) -> None:
    """Refuse parameters that a style cannot shard.

    These are parameters of a class that holds other tensors, such as quantized weights, and
    parameters that are computed from others, if the style shards or reads them.
    """
    if not sharding.distributes:
        return
    for path, owner in sharding.owners(module):
        for name, param in owner._parameters.items():
            if holds_tensors(param):
                raise UnsupportedModuleError(
                    f"{sharding.style}: {name} of {type(owner).__name__} is a "
                    f"{type(param).__name__}, a tensor subclass that holds other tensors (such as "
                    f"a quantized weight), which only its library can shard. {HOW_TO_QUANTIZE}. "
                    "Or leave the module out of the plan"
                )
        computed = [f"{path}.{name}" if path else name for name in computed_parameters(owner)]
        # A lowering reads all parameters of its module.
        are_read = sharding.lowering is not None
        are_sharded = any(map(sharding.shards, computed))
        if computed and (are_read or are_sharded):
            raise UnsupportedModuleError(
                f"{sharding.style}: {', '.join(computed)} of {type(module).__name__} is computed "
                "from other parameters (a parametrization, weight_norm, pruning), which are not "
                "sharded. Make it permanent first "
                "(torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, "
                "prune.remove), or leave the module out of the plan"
            )


def _lowering(
    module: nn.Module, sharding: ModuleSharding, inner: ModuleForward | None, *, lower: bool
) -> type[Lowered]:
    """Return the class whose object becomes the module's forward.

    Args:
        module: the module.
        sharding: the declaration of a style for the module.
        inner: the forward of an earlier style, which the new forward has to call; None if there is
            none. A lowering computes the forward of the module's class and cannot call `inner`;
            a `DTensorForward` calls `inner` with DTensors.
        lower: whether a lowering may be used.
    """
    declared: type[Lowered] | None = sharding.lowering
    if declared is None:
        return DTensorForward
    if issubclass(declared, DTensorForward):
        # such a lowering calls the earlier forward
        return declared
    # Only the lowering computes these options. For example, the forward of nn.Linear, on which
    # `DTensorForward` relies, does not add the product of an `Adapter`.
    is_required = isinstance(sharding.options, FusedBlocks | Adapter | Experts | LatentFeatures)
    if not lower and not is_required:
        return DTensorForward
    if inner is None:
        return declared
    if is_required:
        raise LayoutError(
            f"{sharding.style}: {type(module).__name__} already has the style {inner.title}; apply "
            f"{sharding.style} first"
        )
    return DTensorForward


def _distribute(
    module: nn.Module,
    sharding: ModuleSharding,
    mesh: DeviceMesh,
    scatter: Scatter,
    *,
    left_out: set[str],
    with_buffers: bool,
) -> None:
    """Replace parameters by DTensors.

    Args:
        module: the module.
        sharding: the declaration with the placements.
        mesh: the mesh.
        scatter: the collector of the parameters that are sent.
        left_out: names of parameters that are not replaced.
        with_buffers: whether buffers are replaced, too.
    """
    for path, owner in sharding.owners(module):
        prefix = f"{path}." if path else ""
        for name, param in owner._parameters.items():
            full_name = prefix + name
            if param is not None and full_name not in left_out:
                placements = sharding.placements(full_name, mesh.shape)
                owner._parameters[name] = _dtensor_parameter(
                    param, full_name, placements, mesh, scatter=scatter
                )
        if not with_buffers:
            continue
        for name, buffer in owner._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                placements = sharding.placements(prefix + name, mesh.shape)
                owner._buffers[name] = distribute_with(scatter, buffer, mesh, placements)


def _dtensor_parameter(
    param: nn.Parameter,
    name: str,
    placements: tuple[Placement, ...],
    mesh: DeviceMesh,
    *,
    scatter: Scatter,
) -> nn.Parameter:
    """Return the DTensor that replaces a parameter.

    If another module shares the parameter and is already parallel, this is the DTensor that it has.
    """
    current: Tensor = getattr(param, _SUCCESSOR, param)
    if isinstance(current, DTensor):
        spec = current.spec
        requested = Spec(mesh, placements, current.shape, spec.stride, dtype=current.dtype)
        # A style of another module has placed the parameter on axes of the plan. If no axis is
        # common, something other than a style has placed it, for example on data axes.
        common_axes = set(spec.mesh.axis_names) & set(mesh.axis_names)
        if not common_axes:
            raise LayoutError(
                f"parameter {name!r} cannot become {placements} on {mesh}, because it is "
                f"{current.placements} on {current.device_mesh} already; a style places plain "
                "parameters, and parameters of modules under fully_shard and replicate"
            )
        if not spec.same_layout(requested):
            raise TiedWeightError(
                f"parameter {name!r} cannot become {placements} on {mesh}, because it is shared "
                f"and already {current.placements} on {current.device_mesh}; modules that share a "
                "parameter must have styles with equal placements"
            )
        return current  # type: ignore[return-value]  # a Parameter that holds a DTensor
    sharded = distribute_with(scatter, param.detach(), mesh, placements)
    grad = None if param.grad is None else distribute_with(scatter, param.grad, mesh, placements)
    successor = successor_of(param, sharded, grad)
    setattr(param, _SUCCESSOR, successor)
    return successor


def conflicting_style(module: nn.Module, style: str, path: str, *, distributes: bool) -> str | None:
    """Return the error message if a module already has a style that excludes `style`, else None.

    Two styles exclude each other if they are the same or if both shard parameters.
    """
    earlier = [style] if style in module.__dict__.get(_UNDECLARED, ()) else []
    for sharding, _ in shardings_of(module):
        is_same = sharding.style == style
        both_shard = sharding.distributes and distributes
        # The style of a shared weight makes way for another style.
        makes_way = sharding.origin is StyleOrigin.TIED_WEIGHT
        if is_same or (both_shard and not makes_way):
            earlier.append(sharding.style)
    if not earlier:
        return None
    name = f"module {path!r}" if path else "the module itself"
    return (
        f"{style} on {name} ({type(module).__name__}): it already has the style "
        f"{earlier[0]}, and a second style would shard its shards. Call unparallelize_module first"
    )


def note_undeclared(module: nn.Module, style: str) -> None:
    """Note that a style was applied that has no `ModuleSharding`."""
    earlier = module.__dict__.get(_UNDECLARED, ())
    module.__dict__[_UNDECLARED] = (*earlier, style)


def shardings_of(module: nn.Module) -> Iterator[tuple[ModuleSharding, DeviceMesh]]:
    """Return the shardings of a module with their meshes, in the order of application."""
    applied = []
    # The forward of the style that was applied last is the outermost one.
    forward = forward_of(module)
    while forward is not None:
        if isinstance(forward, Lowered):
            applied.append((forward.sharding, forward.mesh))
        forward = forward.inner
    return reversed(applied)


@torch.no_grad()
def plain_module(module: nn.Module) -> nn.Module:
    """Give a module plain, unsharded parameters and its own forward again; return the module.

    Shared parameters stay shared.
    """
    # The plain parameter of each DTensor, with `id(DTensor)` as the key. The value has the DTensor,
    # too, because an object that is freed may leave its id to another object.
    successors: dict[int, tuple[DTensor, nn.Parameter]] = {}
    for owner in module.modules():
        for sharding, mesh in shardings_of(owner):
            if sharding.fused is not None and sharding.fused.splits(mesh.size()):
                fuse_blocks(owner, sharding.fused)
        owner.__dict__.pop(_UNDECLARED, None)
        if forward_of(owner) is not None:
            set_forward(owner, None)
        for name, param in owner._parameters.items():
            current: Tensor | None = param
            if not isinstance(current, DTensor):
                continue
            if id(current) not in successors:
                successors[id(current)] = current, _plain_parameter(current)
            owner._parameters[name] = successors[id(current)][1]
        for name, buffer in owner._buffers.items():
            if isinstance(buffer, DTensor):
                owner._buffers[name] = buffer.full_tensor().clone()
    return module


def _plain_parameter(param: DTensor) -> nn.Parameter:
    """Return the plain parameter that replaces a DTensor, with its gradient."""
    grad = param.grad
    plain_grad = None if grad is None else full_tensor(grad).clone()
    return successor_of(param, param.full_tensor().clone(), plain_grad)


# --- fused parameters, which are split into blocks and fused again --------------------------------
# No placement describes the shard of a fused parameter whose blocks differ, such as q with 8 heads,
# k and v with 2. Each block becomes a DTensor: `weight` becomes `weight_q`, `weight_k`, `weight_v`,
# and `bias` becomes `bias_q`, ... The local shards are adjacent in one buffer. Blocks are rows: a
# fused weight of shape (in, out) is transposed when it is split, and transposed back when it is
# fused. The rows of a block are a `Heads`: a shard has complete heads.


def _rows_first(tensor: Tensor, fused: FusedBlocks) -> Tensor:
    is_transposed = fused.transposed and tensor.ndim == 2
    return tensor.t() if is_transposed else tensor


def _shard_blocks(tensor: Tensor, fused: FusedBlocks, mesh: DeviceMesh) -> list[DTensor]:
    """Return the blocks of a fused tensor."""
    # the rows of each block
    sizes = [heads.features for heads in fused.blocks.values()]
    blocks = torch.split_with_sizes(_rows_first(tensor, fused), sizes)
    shards = []
    for heads, block in zip(fused.blocks.values(), blocks, strict=True):
        head_mesh = heads.mesh(mesh)
        placements = heads.placements(mesh)
        shards.append(
            distribute_tensor(block.contiguous(), head_mesh, placements, src_data_rank=None)
        )
    return shards


class BlockRows(NamedTuple):
    """The place of a block in its fused parameter.

    Attributes:
        fused_name: name of the fused parameter.
        start: first row of the block.
        total: rows of the fused parameter.
    """

    fused_name: str
    start: int
    total: int


def block_rows(fused: FusedBlocks) -> Iterator[tuple[str, BlockRows]]:
    """Yield, for the parameter of each block, its place in the fused parameter."""
    for fused_name in fused.names:
        start = 0
        for name, heads in fused.parts(fused_name).items():
            yield name, BlockRows(fused_name, start, fused.features)
            start += heads.features


def make_adjacent(module: nn.Module, fused: FusedBlocks) -> None:
    """Copy the local shards of a module's blocks into one buffer if they are no longer adjacent."""
    for fused_name in fused.names:
        params: list[Any] = [module._parameters[name] for name in fused.parts(fused_name)]
        are_distributed = all(isinstance(param, DTensor) for param in params)
        if len(params) > 1 and are_distributed:
            shards = _adjacent([param.detach() for param in params])
            for param, shard in zip(params, shards, strict=True):
                param.data = shard


def split_blocks(
    module: nn.Module, style: str, fused: FusedBlocks, mesh: DeviceMesh, src_data_rank: int | None
) -> set[str]:
    """Replace a module's fused parameters by one DTensor parameter per block; return their names.

    Before anything is changed, the function refuses a parameter that is a DTensor already, or has
    gradient hooks.
    """
    for fused_name in fused.names:
        param = module._parameters.get(fused_name)
        if isinstance(param, DTensor):
            raise TiedWeightError(
                f"{style}: the fused parameter {fused_name!r} is a DTensor already; it cannot be "
                "split"
            )
        # Hooks would have to see all blocks at once.
        if param is not None and not fused.is_one_block and has_hooks(param):
            raise LayoutError(
                f"{style}: the fused parameter {fused_name!r} has gradient hooks, but it is "
                f"replaced by one parameter for each of {list(fused.blocks)}; remove the hooks, "
                "and register them on the new parameters afterwards"
            )
    for fused_name in fused.names:
        param = module._parameters.get(fused_name)
        if param is None:
            for name in fused.parts(fused_name):
                module.register_parameter(name, None)
            continue
        full = param.detach()
        if src_data_rank is not None:
            # One broadcast of the fused parameter; then every rank takes its shards, also of heads
            # that ranks share.
            replicated = distribute_tensor(full, mesh, (Replicate(),), src_data_rank=src_data_rank)
            full = replicated.to_local()
        shards = _adjacent(_shard_blocks(full, fused, mesh))
        module._parameters[fused_name] = None
        for name, shard in zip(fused.parts(fused_name), shards, strict=True):
            module.register_parameter(name, successor_of(param, shard, None))
    return {name for name, _ in block_rows(fused)}


def shard_assigned(
    sharding: ModuleSharding,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *_: object,
) -> None:
    """Give tensors of `load_state_dict(assign=True)` the layouts of the module's parameters.

    The function runs before the load, on full tensors and on DTensors in other layouts.

    An assigned tensor becomes the parameter, and the style's forward expects a DTensor in the
    parameter's layout. Every rank takes its shard of its own full tensor.
    """
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for path, owner in sharding.owners(module):
        owner_prefix = f"{prefix}{path}." if path else prefix
        for name, current in (*owner._parameters.items(), *owner._buffers.items()):
            assigned = state_dict.get(owner_prefix + name)
            if not isinstance(current, DTensor) or not isinstance(assigned, Tensor):
                continue
            # torch reports a wrong shape during the load
            if assigned.shape == current.shape:
                state_dict[owner_prefix + name] = _in_layout_of(current.spec, assigned.detach())


def _in_layout_of(spec: Spec, tensor: Tensor) -> DTensor:
    """Return a full tensor that all ranks have, or a DTensor, in the layout of a spec."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(spec.mesh, spec.placements, shard_order=spec.shard_order)
    return distribute_tensor(
        tensor, spec.mesh, spec.placements, src_data_rank=None, shard_order=spec.shard_order
    )


def split_fused_entries(
    fused: FusedBlocks,
    mesh: DeviceMesh,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_: object,
) -> None:
    """Replace a fused entry of a state dict by entries for the module's blocks, before loading."""
    for fused_name in fused.names:
        key = prefix + fused_name
        full = state_dict.get(key)
        param = vars(module)["_parameters"].get(fused_name)
        # The entry may be plain, or a DTensor, as a checkpoint of another plan has it.
        if isinstance(param, DTensor) and isinstance(full, Tensor) and full.shape == param.shape:
            state_dict[key] = _in_layout_of(param.spec, full.detach())
        elif param is None and full is not None and fused.splits(mesh.size()):
            with torch.no_grad():
                plain = full_tensor(state_dict.pop(key))
            shards = _shard_blocks(plain, fused, mesh)
            for name, shard in zip(fused.parts(fused_name), shards, strict=True):
                state_dict[prefix + name] = shard


def _adjacent(tensors: list[DTensor]) -> list[DTensor]:
    """Return the same DTensors, with local shards that are adjacent in one buffer."""
    local = [tensor.to_local() for tensor in tensors]
    shards = torch.split_with_sizes(torch.cat(local), [shard.shape[0] for shard in local])
    return [DTensor(shard, tensor.spec) for shard, tensor in zip(shards, tensors, strict=True)]


def fuse_blocks(module: nn.Module, fused: FusedBlocks) -> None:
    """Put the fused plain parameters back in place of the parameters of the blocks."""
    if fused.is_one_block:
        return

    def fuse(blocks: list[Tensor]) -> Tensor:
        rows = torch.cat([full_tensor(block) for block in blocks])
        return _rows_first(rows, fused).contiguous()

    for fused_name in fused.names:
        params = [module._parameters.pop(name) for name in fused.parts(fused_name)]
        present = [param for param in params if param is not None]
        if not present:
            continue
        grads = [param.grad for param in present if param.grad is not None]
        grad = fuse(grads) if len(grads) == len(present) else None
        module._parameters[fused_name] = successor_of(present[0], fuse([*present]), grad)


def successor_of(param: Tensor, tensor: Tensor, grad: Tensor | None) -> nn.Parameter:
    """Return a parameter's replacement, with its attributes, gradient hooks and gradient dtype."""
    successor = nn.Parameter(tensor, requires_grad=param.requires_grad)
    carry_gradient(param, successor, grad)
    move_attachments(param, successor)
    return successor
