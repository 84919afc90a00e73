"""`run_without_memory`: a torch function on DTensors without memory, for its results' layouts.

A DTensor without memory has a local tensor on the meta device, so a run computes only shapes and
placements. For example, `torch.transpose` for a `Spec` of shape (8, 6) in the layout S(0) returns a
DTensor of shape (6, 8) in the layout S(1).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh

from .._torch.operators import out_of_sight
from .._torch.tensors import pytree
from ..dispatch.global_call import replicated_spec
from ..layout.spec import Spec
from ..scopes import communication
from ..tensor.dtensor import DTensor


def run_without_memory(
    mesh: DeviceMesh,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Tensor]:
    """Run a function on DTensors without memory; return the tensors among its results.

    Args:
        mesh: the mesh of the DTensors.
        function: a torch function that does not draw random numbers.
        args: its arguments. A `Spec` stands for a DTensor with this layout, and a plain tensor for
            a replicated DTensor of its shape. A device stands for the device without memory.
        kwargs: its keyword arguments, likewise.

    Raises:
        CommunicationForbiddenError: the function would communicate.
        Exception: any other error of the function.
    """

    def make_shadow(value: Any) -> Any:
        """Return a DTensor without memory for a spec or a plain tensor, and "meta" for a device."""
        if isinstance(value, torch.device):
            return torch.device("meta")
        spec = replicated_spec(mesh, value) if isinstance(value, Tensor) else value
        if not isinstance(spec, Spec):
            return value
        local = torch.empty_strided(
            spec.local_shape, spec.local_stride, dtype=spec.dtype, device="meta"
        )
        return DTensor(local, spec)

    # Dispatch modes, such as selective checkpoints and counters of users, must not observe these
    # operators.
    with out_of_sight(), warnings.catch_warnings(), communication("forbid"), torch.no_grad():
        warnings.simplefilter("ignore")
        shadow_args, shadow_kwargs = pytree.tree_map(make_shadow, (tuple(args), dict(kwargs)))
        results = pytree.tree_leaves(function(*shadow_args, **shadow_kwargs))
    return [result for result in results if isinstance(result, Tensor)]
