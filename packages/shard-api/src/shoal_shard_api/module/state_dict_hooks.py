"""Hooks that put ShardedTensors which are plain attributes of modules into state dicts, and load them from there.

Parameters and buffers need no hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..arguments import expect
from ..tensor.sharded_tensor import ShardedTensor


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """(key in the state dict, owner, name, value) of every plain attribute below the module."""
    for path, owner in module.named_modules():
        for name, value in list(vars(owner).items()):
            yield f"{prefix}{path}{'.' if path else ''}{name}", owner, name, value


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Add ShardedTensor attributes to a state dict; for ``Module._register_state_dict_hook``.

    Args:
        module: The module whose attributes, and those of its sub-modules, are added.
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
    expect("state_dict_hook", "module", module, nn.Module)
    attributes = _attributes(module, prefix)
    destination.update(
        {key: value for key, _, _, value in attributes if isinstance(value, ShardedTensor)}
    )


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
    """Set ShardedTensor attributes from a state dict; for ``Module._register_load_state_dict_pre_hook``.

    A key that is loaded is removed from the dict, so that a strict load does not report it as
    unexpected.

    Args:
        module: The module whose attributes, and those of its sub-modules, are set.
        state_dict: The state dict.
        prefix: Prefix of all keys.
        local_metadata, unexpected_keys: Ignored.
        strict: Whether missing keys are reported.
        missing_keys: Keys of present ShardedTensors that the state dict lacks are appended.
        error_msgs: Messages about sizes that differ are appended.

    Example:
        >>> module = torch.nn.Module()
        >>> module.table = zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)
        >>> _ = module._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
        >>> module.load_state_dict({"table": ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)})
        <All keys matched successfully>
        >>> module.table.sum()
        tensor(4.)
    """
    expect("pre_load_state_dict_hook", "module", module, nn.Module)
    for key, owner, name, present in _attributes(module, prefix):
        value = state_dict.get(key)
        if not isinstance(value, ShardedTensor):
            if isinstance(present, ShardedTensor) and key not in state_dict and strict:
                missing_keys.append(key)
            continue
        if isinstance(present, ShardedTensor) and present.size() != value.size():
            error_msgs.append(
                f"size mismatch for {key}: {tuple(value.size())} given, {tuple(present.size())} "
                "present"
            )
            continue
        setattr(owner, name, value)
        del state_dict[key]
