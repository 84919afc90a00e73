"""The backend `lab` of c10d, in place of all other backends on the ranks of a lab.

On a rank of a lab every group is a `LabGroup`, whatever backend the program asks for: `nccl`,
`gloo` or `cpu:gloo,cuda:nccl`. `get_backend` returns the backend that the program has asked for.
The rendezvous of `env://`, `tcp://` and `file://` goes through the lab.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from ... import _torch
from ..._torch import Store
from ..scheduling.posted_calls import GroupKey
from .group import LabGroup
from .link import current_link, require_link
from .store import LabStore

NAME = "lab"
_SCHEMES = ("env", "tcp", "file")


def register() -> None:
    """Register the backend, once for each process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(
            NAME, _create_group, extended_api=True, devices=_torch.device_types()
        )


def _create_group(options: Any, backend_options: object) -> LabGroup:
    """Return the group that c10d creates for a rank of a lab."""
    link = require_link()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    name = options.group_id.removesuffix(link.facts.suffix)
    key = link.next_generation(GroupKey(name, ranks))
    return LabGroup(link, key, options.timeout)


def _create_in_lab(*args: Any, **kwargs: Any) -> Any:
    """Create a group as c10d does, by the backend `lab` on a rank of a lab."""
    link = current_link()
    if link is None:
        return _ORDINARY_HELPER(*args, **kwargs)
    size, rank, ranks, backend, store, name = args
    # with a bound device, c10d would make the group by splitting one of NCCL
    kwargs = {**kwargs, "device_id": None, "backend_options": None}
    group, own_store = _ORDINARY_HELPER(
        size, rank, ranks, NAME, store, f"{name}{link.facts.suffix}", **kwargs
    )
    if isinstance(group, LabGroup):
        _torch.note_backend(group, str(backend))
    return group, own_store


def _init_in_lab(*args: Any, **kwargs: Any) -> Any:
    """Initialize the default group; a device of an accelerator that the lab replaces is dropped."""
    link = current_link()
    if link is not None and link.facts.device is not None:
        kwargs.pop("device_id", None)
    return _ORDINARY_INIT(*args, **kwargs)


def _timeout_in_lab(backend: str) -> Any:
    """Return the timeout of a backend, which a lab does not need."""
    if current_link() is None:
        return _ORDINARY_TIMEOUT(backend)
    return _torch.default_timeout(dist.Backend("gloo"))


def _split_in_lab(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Split a group as c10d does, which asks its backend; a lab creates the group of this rank."""
    if current_link() is None:
        ordinary: dist.ProcessGroup | None = _ORDINARY_SPLIT(
            parent_pg, split_ranks, timeout, pg_options, group_desc, backend
        )
        return ordinary
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty: list the group ranks of each split")
    parent = parent_pg or dist.group.WORLD
    parent_ranks = dist.get_process_group_ranks(parent)
    own_split: list[int] | None = None
    for split in split_ranks:
        _check_split(split, len(parent_ranks))
        global_ranks = sorted(parent_ranks[rank] for rank in split)
        if dist.get_rank() in global_ranks:
            own_split = own_split or global_ranks
    if own_split is None:
        return None
    # only the members of a split create its group
    group: dist.ProcessGroup = dist.new_group(
        own_split,
        timeout,
        backend or dist.get_backend(parent),
        use_local_synchronization=True,
        group_desc=group_desc,
    )
    return group


def _check_split(split: list[int], size: int) -> None:
    """Raise ValueError, as c10d does, if a split is not a set of ranks of its parent group."""
    is_a_set = 0 < len(split) == len(set(split))
    if not is_a_set or not all(0 <= rank < size for rank in split):
        raise ValueError(
            f"a split of a group of {size} ranks lists distinct group ranks below {size}, got "
            f"{split}"
        )


_ORDINARY_HELPER = _torch.c10d_function("_new_process_group_helper")
_ORDINARY_TIMEOUT = _torch.c10d_function("_get_default_timeout")
_ORDINARY_INIT = dist.init_process_group
_ORDINARY_SPLIT = _torch.c10d_function("split_group")
# Declared mutable state: the number of open blocks of `installed`, and the replaced handlers of
# rendezvous by scheme.
_OPEN = [0]
_HANDLERS: dict[str, Any] = {}
_LOCK = threading.Lock()


class _Rendezvous(NamedTuple):
    """The result of a handler of rendezvous."""

    store: Store
    rank: int
    world_size: int


def _rendezvous_in_lab(scheme: str) -> Any:
    """Return a handler of rendezvous that gives the ranks of a lab a `LabStore`."""
    ordinary = _torch.rendezvous_handlers()[scheme]

    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[_Rendezvous]:
        link = current_link()
        if link is None:
            yield from ordinary(*args, **kwargs)
            return
        store = LabStore(link, f"{scheme}/")
        yield _Rendezvous(store, link.facts.rank, link.facts.size)

    return rendezvous


def install() -> None:
    """Have ranks of labs of this process create all their groups by the backend `lab`."""
    register()
    with _LOCK:
        _OPEN[0] += 1
        if _OPEN[0] > 1:
            return
        handlers = _torch.rendezvous_handlers()
        for scheme in _SCHEMES:
            _HANDLERS[scheme] = handlers[scheme]
            handlers[scheme] = _rendezvous_in_lab(scheme)
        _torch.set_c10d_function("_new_process_group_helper", _create_in_lab)
        _torch.set_c10d_function("_get_default_timeout", _timeout_in_lab)
        _torch.set_c10d_function("split_group", _split_in_lab)
        dist.init_process_group = _init_in_lab
        vars(dist)["split_group"] = _split_in_lab


def uninstall() -> None:
    """Undo one `install`."""
    with _LOCK:
        _OPEN[0] -= 1
        if _OPEN[0]:
            return
        _torch.rendezvous_handlers().update(_HANDLERS)
        _torch.set_c10d_function("_new_process_group_helper", _ORDINARY_HELPER)
        _torch.set_c10d_function("_get_default_timeout", _ORDINARY_TIMEOUT)
        _torch.set_c10d_function("split_group", _ORDINARY_SPLIT)
        dist.init_process_group = _ORDINARY_INIT
        vars(dist)["split_group"] = _ORDINARY_SPLIT


@contextmanager
def installed() -> Iterator[None]:
    """Open a block in which ranks of labs create all their groups by the backend `lab`."""
    install()
    try:
        yield
    finally:
        uninstall()
