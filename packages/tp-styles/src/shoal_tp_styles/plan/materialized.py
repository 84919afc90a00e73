"""The check of a module's first forward: parameters and buffers have left the meta device.

A module may be made parallel on the meta device and get its values later. Torch's operators would
otherwise fail with an error that names no tensor, or return results without values. A hook of the
root module looks at parameters and buffers before a forward, and removes itself once they have
values. Parameters that `to_empty()` has allocated have none: it fills DTensors with NaN. Buffers
stay behind where `load_state_dict(assign=True)` gives values to parameters: a state dict does not
have the buffers that are not persistent.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from shoal_dtensor.internal import (
    check_initialized,
    check_materialized,
    has_no_values,
    pytree,
)
from shoal_mesh.internal import is_traced

from .._torch import hook_start_of_forward, unhook_start_of_forward


def await_values(module: nn.Module) -> None:
    """Check a module at its first forward if it has parameters or buffers on the meta device."""
    if _on_meta(module):
        hook_start_of_forward(module, _check_values)


def _check_values(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise StyleError if parameters or buffers are on the meta device, but not all inputs are."""
    if is_traced():
        return
    names = _on_meta(module)
    # A forward of meta tensors computes shapes only, and does not need values.
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(tensor.device.type != "meta" for tensor in inputs):
        check_materialized("parallelize_module", names)
        named = module.named_parameters()
        check_initialized("parallelize_module", [name for name, p in named if has_no_values(p)])
    if not names:
        unhook_start_of_forward(module)


def _on_meta(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers on the meta device."""
    named = chain(module.named_parameters(), module.named_buffers())
    return [name for name, tensor in named if tensor.device.type == "meta"]
