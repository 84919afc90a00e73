"""Hooks of state dicts for ShardedTensors that are plain attributes of modules.

One hook adds these attributes to a state dict, the other sets them from a state dict. Parameters
and buffers need no hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from shoal_mesh.internal import require

from ..errors import ArgumentTypeError
from ..tensor.sharded_tensor import ShardedTensor


class _Attribute(NamedTuple):
    """A plain attribute of a module or sub-module, and its key in a state dict."""

    key: str
    owner: nn.Module
    name: str
    value: Any


def _attributes(module: nn.Module, prefix: str) -> Iterator[_Attribute]:
    """Yield every plain attribute of a module and of its sub-modules."""
    for path, owner in module.named_modules():
        prefix_of_owner = f"{prefix}{path}." if path else prefix
        for name, value in list(vars(owner).items()):
            yield _Attribute(f"{prefix_of_owner}{name}", owner, name, value)


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Add ShardedTensor attributes to a state dict; for ``Module._register_state_dict_hook``.

    Args:
        module: The module whose attributes are added, with the attributes of its sub-modules.
        destination: The state dict.
        prefix: Prefix of all keys.
        local_metadata: Ignored.

    Example:
        >>> module = torch.nn.Module()
        >>> module.table = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)
        >>> _ = module._register_state_dict_hook(state_dict_hook)
        >>> list(module.state_dict())
        ['table']
    """
    require(module, nn.Module, "state_dict_hook: module must be an nn.Module", ArgumentTypeError)
    for attribute in _attributes(module, prefix):
        if isinstance(attribute.value, ShardedTensor):
            destination[attribute.key] = attribute.value


def pre_load_state_dict_hook(  # noqa: PLR0913  # torch's signature for such a hook
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set ShardedTensor attributes from a state dict.

    It is a hook for ``Module._register_load_state_dict_pre_hook``. A key that is loaded is removed
    from the dict, so that a strict load does not report it as unexpected.

    Args:
        module: The module whose attributes are set, with the attributes of its sub-modules.
        state_dict: The state dict.
        prefix: Prefix of all keys.
        local_metadata: Ignored.
        strict: Report missing keys.
        missing_keys: Keys of present ShardedTensors that the state dict lacks are appended.
        unexpected_keys: Ignored.
        error_msgs: Messages about sizes that differ are appended.

    Example:
        >>> module = torch.nn.Module()
        >>> module.table = zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)
        >>> _ = module._register_load_state_dict_pre_hook(
        ...     pre_load_state_dict_hook, with_module=True
        ... )
        >>> loaded = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)
        >>> module.load_state_dict({"table": loaded})
        <All keys matched successfully>
        >>> module.table.sum()
        tensor(4.)
    """
    requirement = "pre_load_state_dict_hook: module must be an nn.Module"
    require(module, nn.Module, requirement, ArgumentTypeError)
    for key, owner, name, present in _attributes(module, prefix):
        is_sharded = isinstance(present, ShardedTensor)
        if strict and is_sharded and key not in state_dict:
            missing_keys.append(key)
        value = state_dict.get(key)
        # A value of another type stays in the dict, so a strict load reports it as unexpected.
        if not isinstance(value, ShardedTensor):
            continue
        if is_sharded and present.size() != value.size():
            size = tuple(value.size())
            present_size = tuple(present.size())
            error_msgs.append(f"size mismatch for {key}: {size} given, {present_size} present")
            continue
        # As in torch, the value also replaces an attribute of another type, such as a None in the
        # place of the tensor.
        setattr(owner, name, value)
        del state_dict[key]
