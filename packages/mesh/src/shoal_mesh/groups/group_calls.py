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


def call_of(group: ProcessGroup, name: Literal["all_gather", "reduce_scatter", "all_to_all"]) -> Callable[..., Work]:
    """The function that a group takes a call by: (group, output, input, further arguments).

    Args:
        group: the group.
        name: the collective.

    Returns:
        The method that the group's class has written itself; torch's own where it has none, which raises `BackendError`
        for a group that has no backend either.
    """
    kind: Any = type(group)
    return _written(kind, name)


@cache
def _written(kind: type[Any], name: str) -> Callable[..., Work]:
    single, many = _NAMES[name]
    for each in single:
        if _is_written_in(kind, each):
            found: Callable[..., Work] = getattr(kind, each)
            return found
    for each in many:
        if _is_written_in(kind, each):
            method: Callable[..., Work] = getattr(kind, each)
            return lambda group, output, source, *more: method(group, [output], [source], *more)
    own: Callable[..., Work] = getattr(kind, single[0])
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


def _is_written_in(kind: type[Any], name: str) -> bool:
    return getattr(kind, name, None) is not getattr(ProcessGroup, name, None)
