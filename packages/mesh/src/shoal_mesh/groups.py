"""Which process groups exist: the only file that makes or finds them.

A group is known by its ranks and its backend options. Whoever asks for ranks and options that some live group has - the
default group, one that the user made, one of another mesh - gets that group. A new one is made by its members alone,
under a name that depends on nothing but its ranks, its options and how often it was made before, so members agree on it
whatever other groups they belong to.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from . import _torch
from ._torch import ProcessGroup, constant_when_compiled
from .errors import BackendError, NoGroupError

__all__ = ["BackendChoice", "Comm", "comm_over", "find_or_make", "require_world"]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What a user may choose for the groups of one axis; the default takes what the default group has.

    Attributes:
        backend: `gloo`, `nccl`, `cpu:gloo,cuda:nccl`, ...; None is the default group's.
        options: the backend's own option object (`ProcessGroupNCCL.Options`), compared by its plain attributes.
    """

    backend: str | None = None
    options: object | None = None

    @property
    def key(self) -> str:
        """Text that is equal on every rank that chose the same."""
        return f"{self.backend or ''}|{fingerprint(self.options)}"


def fingerprint(options: object | None) -> str:
    """The plain attributes of a backend's option object as text; '' for None."""
    if options is None:
        return ""
    parts = []
    for name in sorted(n for n in dir(options) if not n.startswith("__")):
        try:
            value = getattr(options, name)
        except (AttributeError, RuntimeError, TypeError):  # pybind attributes without a Python type
            continue
        if name in {"group_name", "global_ranks_in_group"} or callable(value):
            continue
        if isinstance(value, bool | int | float | str | dt.timedelta | None):
            parts.append(f"{name}={value}")
        elif type(value).__module__.startswith("torch") and not type(value).__name__.startswith("_"):
            parts.append(f"{name}={fingerprint(value)}")
    return f"{type(options).__name__}({', '.join(parts)})"


@constant_when_compiled
@dataclass(frozen=True, slots=True, eq=False)
class Comm:
    """The communicator of this rank along some mesh axes. Compared by identity; a mesh hands out one per axes.

    Attributes:
        group: the c10d group to call.
        name: its name, as functional collectives want it.
        axes: names of the mesh axes, outermost first.
        size: number of ranks.
        rank: index of this rank, row-major over the axes in the order asked for.
        ranks: global ranks in index order.
        order: index -> rank in the group, None when they are the same. c10d may hold the ranks in another order than a
            transposed or irregular mesh; the collectives hide that.
        backend: device to backend map of the group, such as `cpu:gloo`.
    """

    group: ProcessGroup
    name: str
    axes: tuple[str, ...]
    size: int
    rank: int
    ranks: tuple[int, ...]
    order: tuple[int, ...] | None
    backend: str

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __fx_repr__(self) -> tuple[str, dict[str, object]]:
        """How code that torch.compile generates spells it: by a name of its own."""
        name = f"comm_{id(self)}"
        return name, {name: self}

    @classmethod
    def over(cls, group: ProcessGroup, axes: tuple[str, ...], ranks: tuple[int, ...]) -> Comm:
        """The communicator that counts the group's ranks in the order of `ranks`."""
        world = require_world()
        position = _positions(group)
        order = tuple(position[rank] for rank in ranks)
        return cls(
            group=group,
            name=_torch.group_name(group),
            axes=axes,
            size=len(ranks),
            rank=ranks.index(world.rank()),
            ranks=ranks,
            order=None if order == tuple(range(len(ranks))) else order,
            backend=_torch.backend_config(group),
        )

    def __repr__(self) -> str:
        return f"Comm({'x'.join(self.axes)}: rank {self.rank} of {self.size}, group {self.name!r})"


@dataclass(slots=True)
class _Made:
    """The groups made for one lifetime of the default group."""

    by_key: dict[tuple[tuple[int, ...], str], ProcessGroup] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)


# The one mutable state of this file; an entry goes when its default group does.
_MADE: WeakKeyDictionary[ProcessGroup, _Made] = WeakKeyDictionary()


def comm_over(ranks: Sequence[int], name: str = "ranks") -> Comm:
    """The communicator over any global ranks, this one among them, that need not lie along axes of one mesh.

    Its index follows the order of `ranks`. The group is made at first use, by its members alone, and kept.

    Args:
        ranks: distinct global ranks.
        name: what stands for its axis in reports.
    """
    return Comm.over(find_or_make(ranks, BackendChoice(), name), (name,), tuple(ranks))


def require_world() -> ProcessGroup:
    """The default group; raises NoGroupError when there is none."""
    world = _torch.default_group()
    if world is None:
        raise NoGroupError(
            "this needs a default process group: call init_device_mesh or torch.distributed.init_process_group first "
            "(or shoal_mesh.testing.fake_world for one process); abstract_mesh needs none"
        )
    return world


def find_or_make(ranks: Sequence[int], choice: BackendChoice, description: str) -> ProcessGroup:
    """The group over `ranks` with these backend options; members only.

    Args:
        ranks: global ranks in any order, this rank among them.
        choice: backend and options.
        description: what c10d's own messages and traces call the group.
    """
    world = require_world()
    members = tuple(sorted(ranks))
    made = _MADE.get(world)
    if made is None:
        made = _MADE[world] = _Made()
    key = (members, choice.key)
    group = made.by_key.get(key)
    if group is None or not _torch.is_live(group):
        group = _find(world, members, choice)
    if group is None:
        group = _make(made, members, choice, description)
    if group is not world:  # holding the world here would keep its entry alive
        made.by_key[key] = group
    return group


def _find(world: ProcessGroup, members: tuple[int, ...], choice: BackendChoice) -> ProcessGroup | None:
    """The default group or a group that the user made, if it has just these ranks and options."""
    if choice.options is not None:
        return None
    config = _torch.full_backend_config(choice.backend) if choice.backend else _torch.backend_config(world)
    for group in _torch.known_groups():
        if group.size() != len(members) or _torch.backend_config(group) != config:
            continue
        if len(members) != world.size() and tuple(sorted(_torch.group_ranks(group))) != members:
            continue
        if group is world or _is_plain(world, group):
            return group
    return None


def _is_plain(world: ProcessGroup, group: ProcessGroup) -> bool:
    """Whether the options of a group are those of the default group."""
    return [fingerprint(o) for o in _torch.backend_options(group)] == [
        fingerprint(o) for o in _torch.backend_options(world)
    ]


def _make(made: _Made, members: tuple[int, ...], choice: BackendChoice, description: str) -> ProcessGroup:
    text = f"{','.join(map(str, members))}|{choice.key}"
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
    name = f"shoal_{digest}_{made.times[digest]}"
    made.times[digest] += 1  # a destroyed group leaves its keys in the store, so its successor needs another name
    try:
        return _torch.new_group(
            members,
            name=name,
            description=description,
            backend=choice.backend,
            options=choice.options,
            timeout=getattr(choice.options, "_timeout", None),
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if choice.backend is None:
            raise
        raise BackendError(
            f"cannot make a process group of backend {choice.backend!r} over ranks {members}: {error}"
        ) from error


def _positions(group: ProcessGroup) -> dict[int, int]:
    """Global rank -> rank in the group."""
    return _torch.group_ranks(group)
