"""Module hooks that carry ShardedTensors held as plain attributes through ``state_dict`` and ``load_state_dict``.

ShardedTensor parameters and buffers need no hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .sharded_tensor import ShardedTensor


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """(key in the state dict, owner, name, value) of every plain attribute below the module."""
    for path, owner in module.named_modules():
        for name, value in list(vars(owner).items()):
            yield f"{prefix}{path}{'.' if path else ''}{name}", owner, name, value


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add ShardedTensor attributes to the state dict; for ``Module._register_state_dict_hook``."""
    found = _attributes(module, prefix)
    destination.update({key: value for key, _, _, value in found if isinstance(value, ShardedTensor)})


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
    """Set ShardedTensor attributes from the state dict; for ``Module._register_load_state_dict_pre_hook``.

    A key that was used is taken out of the dict, so that a strict load does not call it unexpected.
    """
    for key, owner, name, present in _attributes(module, prefix):
        value = state_dict.get(key)
        if not isinstance(value, ShardedTensor):
            if isinstance(present, ShardedTensor) and key not in state_dict and strict:
                missing_keys.append(key)
            continue
        if isinstance(present, ShardedTensor) and present.size() != value.size():
            error_msgs.append(f"size mismatch for {key}: {tuple(value.size())} given, {tuple(present.size())} present")
            continue
        setattr(owner, name, value)
        del state_dict[key]
