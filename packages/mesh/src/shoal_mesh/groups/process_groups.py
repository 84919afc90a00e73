"""The process groups that exist; the only file that creates them or looks them up.

A group is identified by its ranks and its backend options. A request for the ranks and options of a
live group returns that group: the default group, one that the user created, or one of another mesh.
A new group is created by its members alone. Its name depends only on its ranks, its options, and
the number of times that it was created before, so all members use the same name, whatever other
groups they belong to.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from threading import Lock
from types import SimpleNamespace
from typing import ClassVar
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist

from .. import _torch
from .._torch import WORLDS, ProcessGroup, constant_when_compiled
from ..argument_types import require, require_each, suggests_keywords
from ..errors import BackendError, MeshError, NoGroupError
from ..transport import Transport
from .world import WorldPlace, require_world, world_place


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A user's choice of backend and options for the groups of one axis.

    By default the groups have the backend of the default group.

    Raises:
        MeshTypeError: a backend that is not a text, or options without a backend.
    """

    # `gloo`, `nccl`, `cpu:gloo,cuda:nccl`, ...; None is the default group's
    backend: str | None = None
    # the backend's own option object (`ProcessGroupNCCL.Options`), compared by its plain attributes
    options: object | None = None
    # The purpose of the group if it serves one purpose alone; '' for a group of any use. A request
    # with a tag never returns a group that was created without this tag.
    tag: str = ""
    # Whether the ranks of the group count in the order of the mesh instead of by number.
    keeps_rank_order: bool = False

    def __post_init__(self) -> None:
        require(self.backend, str | None, "a backend is named by a string, such as 'gloo'")
        requirement = "options of a backend are an object of its Options class"
        require(self.options, _torch.BackendOptions | None, requirement)

    def __setstate__(self, state: Sequence[object]) -> None:
        """Restore the fields of a pickle; pickles of earlier versions do not have the last ones."""
        stored = dict(zip(self.__slots__, state, strict=False))
        for entry in fields(self):
            object.__setattr__(self, entry.name, stored.get(entry.name, entry.default))

    @property
    def key(self) -> str:
        """A text that is equal on every rank with the same choice."""
        backend = self.backend or "default"
        order = " in rank order" if self.keeps_rank_order else ""
        return f"{backend} {fingerprint(self.options)}{self.tag}{order}".rstrip()


def fingerprint(options: object | None) -> str:
    """Return the plain attributes of a backend's option object as text; '' for None."""
    if options is None:
        return ""
    parts = []
    for name in sorted(dir(options)):
        if name.startswith("__") or name in {"group_name", "global_ranks_in_group"}:
            continue
        try:
            value = getattr(options, name)
        except (AttributeError, RuntimeError, TypeError):
            # pybind attributes without a Python type
            continue
        if callable(value):
            continue
        cls = type(value)
        if isinstance(value, bool | int | float | str | dt.timedelta | None):
            parts.append(f"{name}={value}")
        elif cls.__module__.startswith("torch") and not cls.__name__.startswith("_"):
            parts.append(f"{name}={fingerprint(value)}")
    return f"{type(options).__name__}({', '.join(parts)})"


@constant_when_compiled
@dataclass(slots=True, eq=False, weakref_slot=True)
class Comm:
    """The communicator of this rank along some mesh axes.

    It is compared by identity; a mesh returns one object for the same axes. It outlives the default
    group. A program may replace the default group by one with the same world size, ranks and
    backend: with `restart_world`, or with `destroy_process_group` and `init_process_group`. The
    next collective of the communicator then looks up or creates its group again.

    Attributes:
        name: the name of the group, which functional collectives take.
        axes: names of the mesh axes, outermost first.
        size: number of ranks.
        rank: index of this rank, row-major over the axes in the given order.
        line: global ranks in index order; a range for the default group, which is as cheap for
            16,384 ranks as for four.
        order: index along the communicator -> rank in the group; None when they are the same. c10d
            orders the ranks of a group by number. Along a transposed or irregular mesh the index
            follows another order, and the collectives translate between the two.
        backend: device to backend map of the group, such as `cpu:gloo`.
        on_gloo: whether torch's gloo sends CPU tensors; if so, shared memory may replace it.
        in_python: whether the group is an object of a Python class that sends without any of
            torch's backends.
        transport: the transport of the present group; None until it is decided.
    """

    # functions that are called once, before the first communicator is made, instead of at import
    on_first_use: ClassVar[list[Callable[[], None]]] = []

    _group: ProcessGroup | None
    name: str
    axes: tuple[str, ...]
    size: int
    rank: int
    line: Sequence[int]
    order: tuple[int, ...] | None
    backend: str
    on_gloo: bool = False
    in_python: bool = False
    transport: Transport | None = None
    # The next three fields are needed to make the group again. They are the default group under
    # which it was made, the size, own rank and backend of that default group (`world_place`), and
    # the options of the group.
    _world: ProcessGroup | None = None
    _place: WorldPlace | None = None
    _choice: BackendChoice | None = None
    # the result of `comm_of_threads`, once it was made
    _of_threads: Comm | None = None
    # the default group under which the group was ended (`end_groups`)
    _ended_under: ReferenceType[ProcessGroup] | None = None

    @property
    def group(self) -> ProcessGroup:
        """The c10d group to call, under the present default group.

        Raises:
            NoGroupError: the default group was destroyed. Now there is none, or one with another
                number of ranks, another rank of this process, or another backend.
        """
        # The default group is another one, or the group was released, so it must be renewed.
        # Communicators of simulated ranks have no place, and their group is not of c10d, so they
        # are never renewed.
        is_current = self._group is not None and WORLDS._default_pg is self._world
        if not is_current and self._place is not None:
            _renew(self)
        return self._group  # type: ignore[return-value]  # `_renew` sets it or raises

    @property
    def is_ended(self) -> bool:
        """True if the group was ended, and the default group is still the same."""
        return self._ended_under is not None and self._ended_under() is WORLDS._default_pg

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks in index order."""
        return tuple(self.line)

    def __eq__(self, other: object) -> bool:
        return self is other

    # A class that defines `__eq__` loses its hash. The hash of `object` also goes by identity, and
    # it is written in C, so it is faster than a method in Python.
    __hash__ = object.__hash__

    @classmethod
    def prepare_first_use(cls) -> None:
        """Run the functions of `on_first_use`; later calls do nothing."""
        while cls.on_first_use:
            cls.on_first_use.pop()()

    @classmethod
    def over(
        cls,
        group: ProcessGroup,
        axes: tuple[str, ...],
        ranks: Sequence[int],
        choice: BackendChoice | None = None,
    ) -> Comm:
        """Return the communicator that counts the group's ranks in the order of `ranks`.

        Args:
            group: the c10d group.
            axes: names of the mesh axes.
            ranks: the global ranks of the group.
            choice: the options with which the group was created; None if the user created it.
        """
        cls.prepare_first_use()
        world = require_world()
        require(group, ProcessGroup, "a communicator runs over a process group")
        require_each(axes, str, "the axes of a communicator are strings")
        order = None
        # The default group with its ranks as a range is in order, and needs no check. Other
        # sequences, also a tuple of the same ranks, differ from a range and are checked.
        if group is not world or ranks != range(world.size()):
            require_each(ranks, int, "the ranks of a communicator are int")
            order = _order_in_group(group, ranks, world.rank())
            ranks = tuple(ranks)
        backend = _torch.backend_config(group)
        comm = cls(
            _group=group,
            name=group.group_name,
            axes=axes,
            size=len(ranks),
            rank=ranks.index(world.rank()),
            line=ranks,
            order=order,
            backend=backend,
            on_gloo=_torch.is_on_gloo(group),
            in_python=_torch.is_in_python(group),
            _world=world,
            _place=world_place(),
            _choice=choice,
        )
        _COMMS.add(comm)
        return comm

    def __repr__(self) -> str:
        axes = "x".join(self.axes)
        return f"Comm({axes}: rank {self.rank} of {self.size}, group {self.name!r})"


def _order_in_group(
    group: ProcessGroup, ranks: Sequence[int], own_rank: int
) -> tuple[int, ...] | None:
    """Return index -> rank in the group; None when they are the same.

    Raises MeshError if the ranks are not those of the group.
    """
    positions = _torch.group_ranks(group)
    has_these_ranks = set(ranks) == set(positions) and len(ranks) == len(positions)
    if not has_these_ranks or own_rank not in positions:
        raise MeshError(
            f"the group on rank {own_rank} has the ranks {tuple(positions)}, got {ranks}"
        )
    # torchft's groups have several members, but torchft registers them with torch as groups of one
    # rank, so their `size()` differs from the number of ranks that torch lists
    if group.size() != len(positions):
        raise MeshError(
            f"the group {type(group).__name__} has {group.size()} members, but torch lists the "
            f"ranks {tuple(positions)}: a group whose members change cannot be an axis of a mesh; "
            "call it directly, as in torch.distributed.all_reduce(gradient.to_local(), group=group)"
        )
    order = tuple(positions[rank] for rank in ranks)
    is_identity = order == tuple(range(len(order)))
    return None if is_identity else order


GROUPS_IN_GRAPHS = SimpleNamespace()
"""The groups that compiled code has read from a mesh, as attributes by name.

A graph reads a group from here each time it runs.
"""


def note_group(comm: Comm) -> str:
    """Keep a communicator's group for compiled code; return its name.

    Groups of an earlier world are forgotten. Each group is an attribute and not an entry of a dict,
    because Dynamo would keep the keys that a dict had when it was first traced.
    """
    world = require_world()
    groups = vars(GROUPS_IN_GRAPHS)
    # The name "" has the default group under which the other groups were noted.
    if groups.get("") is not world:
        groups.clear()
        groups[""] = world
    groups[comm.name] = comm.group
    return comm.name


@dataclass(slots=True)
class _GroupRecord:
    """The group over some ranks with some options, under one default group."""

    group: ProcessGroup | None = None
    # how often a group over these ranks with these options was created
    times: int = 0
    # Held while a thread creates the group; other threads that request the group wait. There is one
    # lock per group, because threads may create groups of different ranks, in different orders on
    # different ranks, and must not wait for each other.
    lock: Lock = field(default_factory=Lock)


# --- the mutable state of this file
# Default group -> the groups that exist under it, by their ranks and options. An entry is dropped
# with its default group.
_GROUPS: WeakKeyDictionary[ProcessGroup, dict[tuple[tuple[int, ...], str], _GroupRecord]] = (
    WeakKeyDictionary()
)
# all communicators
_COMMS: WeakSet[Comm] = WeakSet()
# Group that a program gave to a mesh -> its number. The numbers distinguish meshes that are equal
# except for their groups. Unlike an `id`, a number is never used again.
_NUMBERS: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_NEXT_NUMBER = count()
# guards all of these; it is never held while ranks wait for each other
_LOCK = Lock()


@suggests_keywords()
def comm_over(ranks: Sequence[int], name: str = "ranks") -> Comm:
    """Return the communicator over any global ranks, whether or not they follow axes of a mesh.

    Its index follows the order of `ranks`. The group is created at first use, by its members alone,
    and kept.

    Args:
        ranks: distinct global ranks, this one among them.
        name: the name of its axis in reports and errors.

    Raises:
        NoGroupError: there is no default group, or this rank is not among `ranks`.
        MeshTypeError: `ranks` is not a sequence of integers.
        MeshError: ranks are repeated, or not in the world.

    Example:
        >>> launch(lambda: comm_over((1, 0)).rank, 2)
        [1, 0]
    """
    world = require_world()
    require_each(ranks, int, "comm_over takes a sequence of global ranks")
    require(name, str, "the name of a communicator is a string")
    size = world.size()
    is_repeated = len(set(ranks)) != len(ranks)
    if is_repeated or not all(0 <= rank < size for rank in ranks):
        raise MeshError(f"comm_over takes distinct ranks from 0 to {size - 1}, got {tuple(ranks)}")
    if world.rank() not in ranks:
        raise NoGroupError(
            f"rank {world.rank()} is not among {tuple(ranks)}: only members can create the "
            "communicator"
        )
    choice = BackendChoice()
    group = find_or_create(ranks, choice, name)
    return Comm.over(group, (name,), tuple(ranks), choice)


def comm_of_threads(comm: Comm) -> Comm | None:
    """Return the communicator for messages of threads that the program did not start.

    An example is autograd's thread for the backward on a GPU. Such threads send in any order, and
    at the same time as the main thread. Their messages need a group of their own, and each message
    has to name its subject. The index along the communicator follows the rank numbers, whatever
    order `comm` has. Returns None for simulated ranks, which are threads themselves.
    """
    if comm._place is None:
        return None
    if comm._of_threads is None:
        comm._of_threads = comm_for("threads", sorted(comm.line))
    return comm._of_threads


def comm_for(purpose: str, ranks: Sequence[int], backend: str | None = None) -> Comm:
    """Return the communicator of a group that serves one purpose alone; all its ranks call this."""
    choice = BackendChoice(backend, tag=purpose)
    group = find_or_create(ranks, choice, purpose)
    return Comm.over(group, (purpose,), ranks, choice)


def _renew(comm: Comm) -> None:
    """Find or create the group of a communicator under the present default group."""
    world = _torch.default_group()
    place = world_place()
    with _LOCK:
        if comm._world is world and comm._group is not None:
            # another thread has renewed the communicator
            return
        if world is None or place is None or place != comm._place:
            present = "none" if place is None else f"one of (size, own rank, backend) {place}"
            raise NoGroupError(
                f"the default process group that {comm!r} was created under was destroyed, and "
                f"there is {present} now, not one of {comm._place}: begin one alike, or make new "
                "meshes and move what is sharded"
            )
        if comm.is_ended:
            raise NoGroupError(
                f"the group of {comm!r} was aborted by DeviceMesh.abort(): make a new mesh over "
                "ranks that are alive, or begin a new default group (restart_world)"
            )
        # No communicator can use a group of the old default group any more, so all of these groups
        # are released, also the group of `comm`. `_forget_group` also sets a missing `_choice` if
        # the group can be made again with default options.
        for other in list(_COMMS):
            if other._world is not world:
                _forget_group(other, world)
    if comm._choice is None:
        raise NoGroupError(
            f"{comm!r} was made from a group with its own options: make the group and its mesh "
            "again"
        )
    description = f"mesh_{'_'.join(comm.axes)}"
    group = find_or_create(comm.line, comm._choice, description)
    if _torch.backend_config(group) != comm.backend:
        raise NoGroupError(
            f"{comm!r} was made from a group of backend {comm.backend!r}: make its mesh again"
        )
    comm._group = group
    comm.name = group.group_name
    comm.transport = None
    comm._world = world
    comm._ended_under = None


def forget_groups() -> None:
    """Release the groups of all communicators.

    Otherwise the communicators would keep groups alive, and connected, after the end of the default
    group.
    """
    world = require_world()
    for comm in list(_COMMS):
        _forget_group(comm, world)


def _forget_group(comm: Comm, world: ProcessGroup) -> None:
    """Release the group of a destroyed world, with its threads, files and memory."""
    if comm._group is None:
        return
    # A group that the user created can only be made again if its options are the default ones.
    if comm._choice is None and _have_equal_options(comm._group, world):
        comm._choice = BackendChoice()
    comm._group = None
    comm.transport = None
    comm._world = None
    vars(GROUPS_IN_GRAPHS).clear()


def end_groups(groups: Sequence[ProcessGroup]) -> None:
    """Abort and destroy groups: collectives that run in them fail.

    Their communicators raise NoGroupError until another default group begins. If the default group
    is among them, all groups end.
    """
    world = require_world()
    if world in groups:
        groups = list(WORLDS.pg_map)
    with _LOCK:
        for comm in list(_COMMS):
            if comm._group in groups:
                _forget_group(comm, world)
                comm._ended_under = ref(world)
        for record in _GROUPS.get(world, {}).values():
            if record.group in groups:
                record.group = None
    for group in groups:
        _torch.abort(group)
    # imported here for the same reason as in `restart_world`
    from ..watch.backend_work import drain

    span = _torch.timeout_of_any(world)
    drain(span.total_seconds() if span is not None else 0.0)
    if world in groups:
        dist.destroy_process_group()
        return
    for group in groups:
        dist.destroy_process_group(group)


def _have_equal_options(one: ProcessGroup, other: ProcessGroup) -> bool:
    """Return whether the backends of two groups have options with equal attributes."""
    options_of_one = [fingerprint(options) for options in _torch.backend_options(one)]
    return options_of_one == [fingerprint(options) for options in _torch.backend_options(other)]


def number_of_given(group: ProcessGroup) -> int | None:
    """Return a number that distinguishes a group given by a program from all others.

    Returns None for a group that any mesh over its ranks gets: the default group, and groups that
    `find_or_create` has found or created with default options.
    """
    world = require_world()
    if group is world:
        return None
    members = tuple(sorted(_torch.group_ranks(group)))
    with _LOCK:
        known = _GROUPS.get(world, {}).get((members, BackendChoice().key))
        if known is not None and known.group is group:
            return None
        return _NUMBERS.setdefault(group, next(_NEXT_NUMBER))


def find_or_create(ranks: Sequence[int], choice: BackendChoice, description: str) -> ProcessGroup:
    """Return the group over global ranks in any order; only members call this.

    The description is the name of the group in messages of c10d.
    """
    world = require_world()
    if choice == BackendChoice() and ranks == range(world.size()):
        return world
    members = tuple(sorted(ranks))
    if choice.keeps_rank_order:
        # ranks that ascend need no group of their own
        is_ascending = tuple(ranks) == members
        choice = replace(choice, keeps_rank_order=not is_ascending)
        members = tuple(ranks)
    with _LOCK:
        records = _GROUPS.setdefault(world, {})
        known = records.setdefault((members, choice.key), _GroupRecord())
    with known.lock:
        group = known.group
        if group is None or not _torch.is_live(group):
            group = _find(world, members, choice) or _create(known, members, choice, description)
        # a reference to the world in its own entry of `_GROUPS` would keep the entry alive
        if group is not world:
            known.group = group
    return group


def _find(
    world: ProcessGroup, members: tuple[int, ...], choice: BackendChoice
) -> ProcessGroup | None:
    """Return the default group or a user's group with exactly these ranks and options."""
    if choice.options is not None or choice.tag:
        return None
    if choice.backend:
        config = _torch.full_backend_config(choice.backend)
    else:
        config = _torch.backend_config(world)
    # the oldest group first
    for group in list[object](WORLDS.pg_group_ranks):
        if not isinstance(group, ProcessGroup):
            # `new_group` leaves a number here on ranks that are not in the new group
            continue
        if group.size() != len(members) or _torch.backend_config(group) != config:
            continue
        is_world_in_order = group is world and not choice.keeps_rank_order
        if not is_world_in_order and tuple(_torch.ranks_in_order(group)) != members:
            continue
        if group is world or _have_equal_options(group, world):
            return group
    return None


def _create(
    known: _GroupRecord, members: tuple[int, ...], choice: BackendChoice, description: str
) -> ProcessGroup:
    """Create the group over some ranks, under a name that its members agree on."""
    numbers = ",".join(map(str, members))
    text = f"{numbers}|{choice.key}"
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]
    name = f"shoal_{digest}_{known.times}"
    # a destroyed group leaves its keys in the store, so its successor needs another name
    known.times += 1
    try:
        return _torch.new_group(
            members,
            name=name,
            description=description,
            backend=choice.backend,
            options=choice.options,
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if choice == BackendChoice():
            raise
        raise BackendError(
            f"cannot create a {choice.backend} group over ranks {members}: {error}"
        ) from error
