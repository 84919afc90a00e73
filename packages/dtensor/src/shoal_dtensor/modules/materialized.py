"""The errors on parameters and buffers without values when a forward begins.

They are on the meta device, or `to_empty()` has given them memory and nothing has initialized them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._torch.tensors import FakeTensor, local_of
from ..errors import StyleError


def check_materialized(function: str, names: Sequence[str]) -> None:
    """Raise StyleError if there are parameters or buffers on the meta device.

    Args:
        function: the name of the function that is called, for the error.
        names: the parameters and buffers that the caller has found there; empty if it found none.
    """
    if names:
        raise StyleError(
            f"{function}: parameters or buffers {list(names)} are on the meta device and have no "
            'values: call module.to_empty(device="cpu"), or another device, and initialize them '
            "(with module.reset_parameters(), or by load_state_dict), before the first forward"
        )


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor has NaN in all elements: `to_empty()` fills memory with NaN."""
    local = local_of(tensor).detach()
    if isinstance(local, FakeTensor) or local.is_meta or not local.numel():
        return False
    return bool(local.isnan().all())


def check_initialized(function: str, names: Sequence[str]) -> None:
    """Raise StyleError if there are parameters with memory that nothing has initialized.

    Args:
        function: the name of the function that is called, for the error.
        names: the parameters that the caller has found without values (`has_no_values`); empty if
            it found none.
    """
    if names:
        raise StyleError(
            f"{function}: parameters {list(names)} have memory but no values, as module.to_empty() "
            "leaves them. Initialize the parameters (with module.reset_parameters(), or by "
            "load_state_dict) before the first forward"
        )
