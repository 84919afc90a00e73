"""By which names the process groups of a class take calls.

torch 2.13 renamed three of them. Its own groups answer to both names, but a group written in Python has old ones, new
ones, or only those that functional collectives call, which take lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from .._torch import ProcessGroup, Work
from ..errors import BackendError

# What is called -> names with one output and one input, and names with a list of each; the first is torch's own.
_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all_gather": (
        ("_allgather_base", "all_gather_single"),
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ),
    "reduce_scatter": (
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ),
    "all_to_all": (("alltoall_base", "all_to_all_single"), ()),
}


@cache
def call_of(kind: type[Any], name: Literal["all_gather", "reduce_scatter", "all_to_all"]) -> Callable[..., Work]:
    """The function that groups of a class take a call by: (group, output, input, further arguments).

    It is the method that the class has written itself; torch's own where it has none, which raises `BackendError` for a
    group that has no backend either.
    """
    single, many = _NAMES[name]
    own: Callable[..., Work] = getattr(kind, single[0])
    written = [each for each in single + many if getattr(kind, each, None) is not getattr(ProcessGroup, each, None)]
    if written:
        method: Callable[..., Work] = getattr(kind, written[0])
        if written[0] in single:
            return method
        return lambda group, output, source, *more: method(group, [output], [source], *more)
    if kind is ProcessGroup:
        return own

    def of_its_backend(group: ProcessGroup, *arguments: Any) -> Work:
        if not group._device_types:
            raise BackendError(
                f"the process group {kind.__name__} has no {name}: a group written in Python needs one of the methods "
                f"{', '.join(single + many)}"
            )
        return own(group, *arguments)

    return of_its_backend
