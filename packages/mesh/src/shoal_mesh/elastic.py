"""ElasticWorld: ranks that survive a loss continue in a smaller world, and newcomers join.

Worlds are numbered by rounds. The ranks agree on the members of the next world in a store that
outlives them. Every process that arrives registers for the round. The first process that sees that
all members of the last world have arrived or are gone writes the list of members, which does not
change afterwards. A process that is not on the list registers for the next round. The keys of round
3 in the store:

    3/registered        the number of registrations
    3/1, 3/2, ...       the members that have registered, in the order of their arrival
    3/members           the list of members of the world, in the order of their ranks
    3/here/0, ...       set by rank 0 when it has read the list
    3/connected/0, ...  set by rank 0 when it has made the default group

The key `left/ID` is set by a member that has finished the program.

May import: _torch, argument_types, collectives, errors, groups, shared_memory,
watch.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import _torch
from .argument_types import FUNCTION, require, suggests_keywords
from .collectives.even import all_reduce
from .errors import BackendError, MeshError, NewcomerError, PeerError
from .groups.process_groups import comm_over, forget_groups
from .groups.world import device_of, require_world
from .shared_memory.channel import give_up
from .watch.backend_work import drain
from .watch.processes import ProcessState, machine, state_of

R = TypeVar("R")
# the id, the machine and the process of a member
Member = dict[str, Any]

# seconds between two looks into the store
_POLL = 0.01


class ElasticWorld:
    """The successive worlds of a process: smaller after a loss, larger when newcomers wait.

    Every process calls `run`, at the start or at any time later. If ranks of a world are lost,
    `run` releases the groups of the old world and calls its function again in the next world. The
    end of a process on the same machine is seen at once. A process on another machine counts as
    lost if it does not arrive within `patience` seconds.

    Args:
        store: the store in which ranks meet; it has to outlive them. It may be a TCPStore in the
            launcher.
        size: the number of ranks of the first world, which begins when so many processes have
            registered.
        backend: the backend of the default group; only gloo is supported. Other backends, such as
            NCCL, do not notify a rank that another rank is lost, so a host would wait forever in a
            collective that it has started.
        at_least: the least number of ranks of a later world; with fewer, ranks wait for newcomers.
        patience: seconds that ranks wait for a member of the last world that does not arrive,
            although it runs or is on another machine.
        timeout: seconds after which collectives fail.

    Attributes:
        round: number of the present world; -1 before the first world.

    Raises:
        MeshTypeError: an argument of a wrong type.
        MeshError: a number that is not positive.
        BackendError: a backend other than gloo.

    Example:
        >>> def example() -> list[int]:
        ...     world = ElasticWorld(dist.HashStore(), size=1)
        ...     sizes: list[int] = []
        ...     world.run(lambda: sizes.append(dist.get_world_size()))
        ...     return sizes
        >>> launch(example, 1)
        [[1]]
    """

    @suggests_keywords()
    def __init__(
        self,
        store: _torch.Store,
        size: int,
        *,
        backend: str = "gloo",
        at_least: int = 1,
        patience: float = 30.0,
        timeout: float = 60.0,
    ) -> None:
        require(store, _torch.Store, "ranks of an elastic world meet in a torch.distributed store")
        require(size, int, "the first world has a number of ranks")
        require(at_least, int, "a world has at least a number of ranks")
        require(backend, str, "a backend is named by a string")
        for seconds in (patience, timeout):
            require(seconds, int | float, "patience and timeout are numbers of seconds")
        if min(size, at_least, patience, timeout) <= 0:
            raise MeshError(
                f"sizes and seconds must be positive, got size={size!r} at_least={at_least!r} "
                f"patience={patience!r} timeout={timeout!r}"
            )
        if backend not in {"gloo", "cpu:gloo"}:
            raise BackendError(
                f"an elastic world supports the backend gloo only, got {backend!r}: backends of "
                "accelerators do not end collectives that wait for a lost rank. Restart the "
                "program from a checkpoint instead (torchrun --max-restarts)"
            )
        self.round: int = -1
        self._store = _torch.PrefixStore("shoal_elastic", store)
        self._size = size
        self._backend = backend
        self._at_least = at_least
        self._patience = patience
        self._timeout = timedelta(seconds=timeout)
        self._member: Member = {
            "id": secrets.token_hex(8),
            "machine": machine(),
            "process": os.getpid(),
        }

    def run(self, function: Callable[[], R], *, wait: float = 600.0) -> R:
        """Return the result of `function` in the first world in which it returns.

        `function` is called once in each world. The groups of the previous world have been
        destroyed by then, and meshes over them cannot be used; tensors still exist.

        Args:
            function: the whole part of the program that communicates.
            wait: seconds that this rank waits for a world that includes it.

        Raises:
            Exception: the error of the function, if no rank is lost: on all ranks that raised.
            PeerError: no world took this rank in time.
            MeshTypeError: an argument of a wrong type.
        """
        allowed = "an elastic world runs a function"
        require(function, FUNCTION, allowed)
        require(wait, int | float, "wait is a number of seconds")
        failure: Exception | None = None
        while True:
            before = self.members() if self.round >= 0 else []
            is_error = failure is not None and not isinstance(failure, NewcomerError)
            if is_error:
                # others may wait for this rank in a collective
                self._leave(f"raised {failure!r:.200}")
            members = self._next_members(wait)
            # the world has lost no rank, so the function itself has failed
            if failure is not None and is_error and members == before:
                raise failure
            # all have registered, so none is in a collective of the world before
            self._leave("continues in another world")
            if not self._begin(members):
                failure = None
                continue
            try:
                result = function()
            except Exception as error:
                # the variables of the frames would keep groups alive
                for chained in (error, error.__cause__, error.__context__):
                    if chained is not None:
                        traceback.clear_frames(chained.__traceback__)
                failure = error
                continue
            self._finish(members)
            return result

    def admit(self) -> None:
        """Let newcomers in, between two steps; all ranks call this.

        If a newcomer waits, all ranks go back to `run`.

        Raises:
            NewcomerError: a newcomer waits; `run` catches it.
            PeerError: a rank is lost.
        """
        world = require_world()
        # the first registration for the next round
        has_newcomer = world.rank() == 0 and self._store.check([f"{self.round + 1}/1"])
        flag = torch.tensor([int(has_newcomer)], device=device_of(world))
        everyone = comm_over(range(world.size()))
        if all_reduce(flag, everyone, "max").item():
            raise NewcomerError("somebody waits to join")

    def members(self, number: int | None = None) -> list[Member]:
        """Return the members of a world, by rank; by default of the present one."""
        world = self.round if number is None else number
        members: list[Member] = json.loads(self._store.get(f"{world}/members"))
        return members

    def _leave(self, reason: str) -> None:
        """Release the groups of the present world, so that no rank waits for this rank there."""
        if dist.is_initialized():
            give_up(reason)
            forget_groups()
            drain(self._timeout.total_seconds())
            dist.destroy_process_group()
            # gloo closes its connections when the group is freed, and ranks that wait for this rank
            # notice it
            gc.collect()

    def _finish(self, members: list[Member]) -> None:
        """Wait for the others: the end of this process would break their running collectives."""
        self._store.set(f"left/{self._member['id']}", "1")
        next_round = self.round + 1
        for member in members:
            while not self._is_gone(member) and member not in self._registered_members(next_round):
                time.sleep(_POLL)

    def _next_members(self, wait: float) -> list[Member]:
        """Register for one world after the other, until a world includes this rank."""
        deadline = time.monotonic() + wait
        while True:
            self.round += 1
            if self._store.check([f"{self.round}/members"]):
                # this world has begun without this rank
                continue
            place = self._store.add(f"{self.round}/registered", 1)
            self._store.set(f"{self.round}/{place}", json.dumps(self._member))
            members = self._await_members(deadline)
            if self._member in members:
                return members

    def _await_members(self, deadline: float) -> list[Member]:
        """Wait until a process has written the members of this round, and return them.

        The process may be this one.
        """
        begin = time.monotonic()
        key = f"{self.round}/members"
        last = self.members(self.round - 1) if self.round else []
        rank_of_id = {member["id"]: rank for rank, member in enumerate(last)}
        while not self._store.check([key]):
            arrived = self._registered_members(self.round)
            now = time.monotonic()
            if now > deadline:
                raise PeerError(
                    f"no world accepted this rank in time; {len(arrived)} ranks have reached "
                    f"round {self.round}"
                )
            if self._is_complete(last, arrived, now - begin):
                # former members keep their order; newcomers follow in the order of their arrival
                arrived.sort(key=lambda member: rank_of_id.get(member["id"], len(last)))
                self._store.compare_set(key, "", json.dumps(arrived))
            time.sleep(_POLL)
        return self.members()

    def _registered_members(self, number: int) -> list[Member]:
        """Return the members that have registered for a round and are still there."""
        count = self._store.add(f"{number}/registered", 0)
        members = []
        for place in range(1, count + 1):
            key = f"{number}/{place}"
            if not self._store.check([key]):
                # counted, but not written yet
                continue
            member = json.loads(self._store.get(key))
            if not self._is_gone(member):
                members.append(member)
        return members

    def _is_complete(self, last: list[Member], arrived: list[Member], waited: float) -> bool:
        """Return whether the round need not wait for any other process.

        The first world waits for `size` processes. Any other world waits for the members of the
        last one.
        """
        if not last:
            return len(arrived) >= self._size
        absent = [member for member in last if member not in arrived]
        is_waiting = not all(self._is_gone(member) for member in absent)
        # newcomers alone do not decide that a world is lost
        are_newcomers = all(member not in last for member in arrived)
        if is_waiting and (waited < self._patience or are_newcomers):
            return False
        return len(arrived) >= self._at_least

    def _is_gone(self, member: Member) -> bool:
        """Return whether a member has finished the program, or has ended on this machine."""
        machine_of_member = member["machine"]
        is_local = machine_of_member and machine_of_member == self._member["machine"]
        if is_local and state_of(member["process"]) is ProcessState.ENDED:
            return True
        return self._store.check([f"left/{member['id']}"])

    def _begin(self, members: list[Member]) -> bool:
        """Make the groups of the next world; return False if a member is lost meanwhile."""
        own_rank = members.index(self._member)
        if not self._all_set("here", own_rank, members):
            return False
        try:
            dist.init_process_group(
                self._backend,
                store=_torch.PrefixStore(f"{self.round}/world", self._store),
                rank=own_rank,
                world_size=len(members),
                timeout=self._timeout,
            )
        except RuntimeError:
            # the backend did not reach a rank
            return False
        # if this rank left earlier, it would break the group that other ranks are still making
        return self._all_set("connected", own_rank, members)

    def _all_set(self, stage: str, own_rank: int, members: list[Member]) -> bool:
        """Report a stage in the store, and wait until all members have reported it.

        Returns False if a member is gone, or takes too long.
        """
        self._store.set(f"{self.round}/{stage}/{own_rank}", "1")
        deadline = time.monotonic() + self._patience
        for rank, member in enumerate(members):
            while not self._store.check([f"{self.round}/{stage}/{rank}"]):
                if self._is_gone(member) or time.monotonic() > deadline:
                    return False
                time.sleep(_POLL)
        return True
