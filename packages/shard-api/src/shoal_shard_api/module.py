"""Sharding of tensors, parameters and modules, each all or nothing.

Whatever a rank finds wrong with its arguments it tells the others first; then all raise the same error and nothing has
changed, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .assemble import described_by
from .chunk_spec import ChunkShardingSpec
from .errors import (
    MissingParameterError,
    ParameterError,
    PlanConflictError,
    PlanTypeError,
    ProcessGroupError,
    SharderPathError,
    UnsupportedOpError,
)
from .groups import agree, resolve
from .metadata import TensorProperties
from .plan import Sharder, ShardingPlan
from .sharded_tensor import ShardedTensor
from .spec import ShardingSpec


def _shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> ShardedTensor:
    """The ShardedTensor of the data that ``src_rank`` has; all ranks of the group call it.

    Args:
        tensor: Contiguous full tensor, of the same size and dtype on every rank.
        sharding_spec: How to cut it.
        src_rank: Rank in the process group whose data count.
        process_group: Who holds it; None is the default group.

    Raises:
        ParameterError: On every rank, if the tensor is not contiguous on some rank.
        RankMismatchError: Ranks passed a different source, spec, size or dtype; names both values and both ranks.
        ShardingSpecError: The spec does not fit the tensor or the group.
    """
    group = resolve(process_group)
    _agree_on_tensor(group, tensor, sharding_spec, src_rank, _tensor_error(tensor, sharding_spec, "tensor", group))
    made: ShardedTensor = sharding_spec.shard(tensor, src_rank=src_rank, process_group=group)
    return made


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace a parameter of ``module`` by one that holds a ShardedTensor; all ranks of the group call it.

    Args:
        module: The module that owns the parameter.
        param_name: Its name there.  A buffer stays a buffer, a tensor attribute an attribute.
        sharding_spec: How to cut it.
        src_rank: Rank in the process group whose data count.
        process_group: Who holds it; None is the default group.

    Raises:
        MissingParameterError: The module has no such attribute.
        ParameterError: It is no tensor, or not contiguous.
        RankMismatchError, ShardingSpecError: As for ``_shard_tensor``.  All of these are raised on every rank.
    """
    group = resolve(process_group)
    error = _parameter_error(module, param_name, sharding_spec, group)
    tensor = getattr(module, param_name) if error is None else None
    _agree_on_tensor(group, tensor, sharding_spec, src_rank, error)
    assert tensor is not None, "agree raises where a rank has an error"
    _install(module, param_name, sharding_spec.shard(tensor, src_rank=src_rank, process_group=group))


def _parameter_error(
    module: nn.Module, name: str, spec: Any, group: dist.ProcessGroup, path: str | None = None
) -> Exception | None:
    where = path or f"{type(module).__name__}.{name}"
    if not hasattr(module, name):
        return MissingParameterError(f"{type(module).__name__} has no attribute {name!r} (asked for {where!r})")
    return _tensor_error(getattr(module, name), spec, where, group)


def _tensor_error(tensor: Any, spec: Any, where: str, group: dist.ProcessGroup) -> Exception | None:
    """What is wrong with a tensor that is to be sharded, None if nothing is."""
    if not isinstance(tensor, torch.Tensor):
        return ParameterError(f"{where} must be a Tensor, found {type(tensor).__name__}")
    if isinstance(tensor, ShardedTensor):
        return ParameterError(f"{where} is a ShardedTensor already: use its reshard()")
    if not tensor.is_contiguous():
        return ParameterError(f"{where} is not contiguous: size {tuple(tensor.size())}, strides {tensor.stride()}")
    if not isinstance(spec, ShardingSpec):
        return PlanTypeError(f"{where}: expected a ShardingSpec, got {type(spec).__name__}")
    try:
        described_by(spec.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor)), group)
    except (ValueError, TypeError) as error:
        return type(error)(f"{where}: {error}")
    return None


def _agree_on_tensor(
    group: dist.ProcessGroup, tensor: torch.Tensor | None, spec: Any, src_rank: int, error: Exception | None
) -> None:
    facts: dict[str, Any] = {"src_rank": src_rank, "sharding_spec": spec}
    if tensor is not None and error is None:
        facts |= {"size": tuple(tensor.size()), "dtype": tensor.dtype, "requires_grad": tensor.requires_grad}
    agree(group, facts, error or _source_error(src_rank, group))


def _source_error(src_rank: Any, group: dist.ProcessGroup) -> Exception | None:
    world = dist.get_world_size(group)
    if not isinstance(src_rank, int) or not 0 <= src_rank < world:
        return ProcessGroupError(f"src_rank={src_rank} is not a rank of the process group of {world}")
    return None


def _install(module: nn.Module, name: str, tensor: ShardedTensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
    elif name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, tensor)


# --- whole modules ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Work:
    """A checked plan: what will be done to which objects."""

    parameters: dict[str, ShardingSpec] = field(default_factory=dict)
    sharders: dict[str, Sharder] = field(default_factory=dict)
    outputs: dict[str, ShardingSpec] = field(default_factory=dict)
    locals_: list[str] = field(default_factory=list)


def shard_module(
    module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> None:
    """Shard a module by a plan, in place; all ranks of the group call it, with the same plan.

    Parameters that the plan names become sharded ones (all names of a tied parameter keep sharing one), sub-modules
    with a Sharder are replaced by what it returns, and hooks reshard outputs or turn them into local tensors.

    Args:
        module: The root; paths in the plan are relative to it.
        plan: What to do.
        src_rank: Rank in the process group whose data count.
        process_group: Who holds the shards; None is the default group.

    Raises:
        PlanTypeError: The plan, or an entry, is of a type that means nothing there.
        SharderPathError: A Sharder for the empty path.
        PlanConflictError: A parameter that a Sharder's sub-tree owns, Sharders inside one another, or two different
            specs for one tied parameter.
        MissingParameterError, ParameterError, ShardingSpecError, RankMismatchError: As for ``shard_parameter``.

        Each is raised on every rank, before anything has changed.
    """
    group = resolve(process_group)
    work, error = _Work(), None
    try:
        work = _checked(module, plan, group)
    except (TypeError, KeyError, RuntimeError, AttributeError, ValueError) as found:
        error = found
    agree(group, _facts(module, work, src_rank), error or _source_error(src_rank, group))
    replacements = _run_sharders(module, work, group)
    sharded = {
        path: spec.shard(module.get_parameter(path), src_rank=src_rank, process_group=group)
        for path, spec in sorted(work.parameters.items())
    }
    for path, tensor in sharded.items():
        _install_tied(module, module.get_parameter(path), tensor)
    for path, new in replacements.items():
        _replace_everywhere(module, module.get_submodule(path), new)
    for path, spec in work.outputs.items():
        _reshard_output(module.get_submodule(path), spec)
    for path in work.locals_:
        _collect_local_shard(module.get_submodule(path))


def _checked(module: nn.Module, plan: Any, group: dist.ProcessGroup) -> _Work:
    """The plan sorted by kind, after every check that one rank can make."""
    if not isinstance(plan, ShardingPlan):
        raise PlanTypeError(f"expected a ShardingPlan, got {type(plan).__name__}")
    work = _Work()
    for path, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            if not path:
                raise SharderPathError("a Sharder needs the path of a sub-module; '' has no parent to replace it in")
            _submodule(module, path, "plan")
            work.sharders[path] = entry
        elif isinstance(entry, ShardingSpec):
            work.parameters[path] = entry
        else:
            raise PlanTypeError(f"plan[{path!r}] must be a ShardingSpec or a Sharder, got {type(entry).__name__}")
    _check_ownership(module, work)
    for path, spec in work.parameters.items():
        _check_parameter(module, path, spec, group)
    _merge_tied(module, work)
    _check_outputs(module, plan, work)
    return work


def _check_parameter(module: nn.Module, path: str, spec: ShardingSpec, group: dist.ProcessGroup) -> None:
    parent, _, name = path.rpartition(".")
    owner = _submodule(module, parent, "plan")
    error = _parameter_error(owner, name, spec, group, path)
    if error is None and name not in owner._parameters:
        error = ParameterError(f"{path} is a tensor but no parameter of {type(owner).__name__}; use shard_parameter")
    if error is not None:
        raise error


def _submodule(module: nn.Module, path: str, where: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise MissingParameterError(f"{where}: {type(module).__name__} has no sub-module {path!r} ({error})") from None


def _check_ownership(module: nn.Module, work: _Work) -> None:
    """What lies in a Sharder's sub-tree is the Sharder's alone, under every name it has."""
    for sharder in work.sharders:
        owned = {id(p): name for name, p in module.get_submodule(sharder).named_parameters(sharder)}
        for path in (*work.parameters, *work.sharders):
            if path.startswith(f"{sharder}."):
                raise PlanConflictError(f"{path!r} lies in the sub-tree that the Sharder of {sharder!r} owns")
        for path in work.parameters:
            try:
                found = module.get_parameter(path)
            except AttributeError:
                continue  # reported by _check_parameter
            if id(found) in owned:
                raise PlanConflictError(
                    f"{path!r} is tied to {owned[id(found)]!r}, which the Sharder of {sharder!r} owns"
                )


def _merge_tied(module: nn.Module, work: _Work) -> None:
    """Keep one entry for each parameter."""
    first: dict[int, str] = {}
    for path, spec in list(work.parameters.items()):
        known = first.setdefault(id(module.get_parameter(path)), path)
        if known != path:
            if work.parameters[known] != spec:
                raise PlanConflictError(
                    f"{known!r} and {path!r} are one tied parameter, but the plan gives it two specs: "
                    f"{work.parameters[known]} and {spec}"
                )
            del work.parameters[path]


def _check_outputs(module: nn.Module, plan: ShardingPlan, work: _Work) -> None:
    for path, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            raise PlanTypeError(f"output_plan[{path!r}] must be a ShardingSpec, got {type(spec).__name__}")
        work.outputs[path] = spec
    work.locals_ = list(plan.return_local_tensor or ())
    for path in (*work.outputs, *work.locals_):
        if not any(path.startswith(f"{sharder}.") for sharder in work.sharders):
            _submodule(module, path, "output_plan or return_local_tensor")


def _facts(module: nn.Module, work: _Work, src_rank: int) -> dict[str, Any]:
    """What must be equal on all ranks; Sharders are compared by their class."""
    facts: dict[str, Any] = {
        "src_rank": src_rank,
        "plan entries": sorted((*work.parameters, *work.sharders)),
        "output_plan": work.outputs,
        "return_local_tensor": work.locals_,
    }
    for path, spec in work.parameters.items():
        parameter = module.get_parameter(path)
        facts[f"sharding_spec of {path}"] = spec
        facts[f"size and dtype of {path}"] = (tuple(parameter.size()), parameter.dtype)
    for path, sharder in work.sharders.items():
        facts[f"Sharder of {path}"] = f"{type(sharder).__module__}.{type(sharder).__qualname__}"
    return facts


def _run_sharders(module: nn.Module, work: _Work, group: dist.ProcessGroup) -> dict[str, nn.Module]:
    """The new sub-modules, not in their places yet; an error of any rank's Sharder is raised on all."""
    if not work.sharders:
        return {}
    new: dict[str, nn.Module] = {}
    error: Exception | None = None
    try:
        for path, sharder in sorted(work.sharders.items()):
            made: Any = sharder.shard(module.get_submodule(path))
            if not isinstance(made, nn.Module):
                raise PlanTypeError(f"the Sharder of {path!r} returned {type(made).__name__}, not a Module")
            new[path] = made
        for path in (*work.outputs, *work.locals_):
            for sharded, made in new.items():
                if path.startswith(f"{sharded}."):
                    _submodule(made, path.removeprefix(f"{sharded}."), f"what replaces {sharded!r}")
    except Exception as found:  # noqa: BLE001, RUF100  # a Sharder is user code; the other ranks must hear of any failure
        error = found
    agree(group, {}, error)
    return new


def _install_tied(module: nn.Module, old: nn.Parameter, tensor: ShardedTensor) -> None:
    """Put one new parameter wherever the old one was."""
    new = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is old:
                owner._parameters[name] = new


def _replace_everywhere(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put the new sub-module wherever the old one was."""
    for owner, name in list(_places(module, old)):
        owner._modules[name] = new


def _places(module: nn.Module, wanted: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for owner in module.modules():
        for name, child in owner._modules.items():
            if child is wanted:
                yield owner, name


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Let the module's ShardedTensor output be laid out by ``resharding_spec``; other outputs pass unchanged."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return output.resharded(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Let the module return the local tensor of its ShardedTensor output; other outputs pass unchanged.

    Where one dim is cut and the local tensor has size 1 along it, that dim is squeezed away.
    """

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        if len(output.local_shards()) > 1:
            raise UnsupportedOpError(
                f"return_local_tensor: rank {dist.get_rank()} has {len(output.local_shards())} shards of the output"
            )
        local, spec = output._parts[0], output.sharding_spec()
        if isinstance(spec, ChunkShardingSpec) and isinstance(spec.dim, int) and local.dim() == output.dim():
            return local.squeeze(spec.dim)
        return local

    module.register_forward_hook(hook)
    return module
