"""`LabGroup`: a process group whose collectives are calls to the scheduler of a lab.

A lab runs all ranks of a program on one machine. Each rank posts its calls to the scheduler of the
lab. The scheduler computes the values of a collective when all members have posted it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..._torch import PythonGroup
from ...errors import CollectiveError
from ..scheduling.posted_calls import ANY, GroupKey, Meta, PostedCall
from .link import SchedulerLink, program_frames
from .values import name_of_op
from .work import LabWork

Tensors = Sequence[Tensor]


class LabGroup(PythonGroup):  # type: ignore[misc]  # its type is Any
    """The group of one rank, with the methods that c10d calls.

    Args:
        link: the link of the rank.
        key: the identity of the group.
        timeout: the timeout that the program set. It is only kept for programs that read it: no
            call times out, because the scheduler raises a DeadlockError at once.
    """

    # c10d reads these from the result of `_get_backend`, which is the group itself
    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_tensor_alloc = False

    def __init__(
        self, link: SchedulerLink, key: GroupKey, timeout: dt.timedelta | None = None
    ) -> None:
        self.key = key
        self._member = key.ranks.index(link.facts.rank)
        super().__init__(self._member, len(key.ranks))
        self._link = link
        self._name = key.name
        self._description = "undefined"
        self.options = SimpleNamespace(_timeout=timeout or dt.timedelta(minutes=30))

    # --- names and other attributes that c10d reads ---------------------------------------------

    @property
    def group_name(self) -> str:
        """The name of the group in the registry of this process."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description of the group."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "lab"

    def name(self) -> str:
        """Return the name of the backend."""
        return "lab"

    def _get_backend(self, device: torch.device) -> LabGroup:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._link.count_started(self.key)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: dt.timedelta, device: torch.device | None = None) -> None:
        """Set the timeout that `options` has."""
        self.options._timeout = timeout

    def abort(self) -> None:
        """Do nothing: a lab has no connections to close."""

    def shutdown(self) -> None:
        """Do nothing: a lab has no connections to close."""

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> None:
        pass

    def __repr__(self) -> str:
        return f"LabGroup({self._name!r}: rank {self._member} of {len(self.key.ranks)})"

    # --- reductions ----------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> LabWork:
        """Reduce each tensor over the group, in place."""
        return self._reduce("all_reduce", tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> LabWork:
        """Reduce each tensor over the group, in place on the root."""
        return self._reduce("reduce", tensors, opts, root=_root_of(opts))

    def _reduce(self, kind: str, tensors: Tensors, opts: Any, root: int | None = None) -> LabWork:
        op = _op_of(opts)
        tensors = _list_of(tensors)
        is_receiver = root is None or root == self._member
        outputs = tensors if is_receiver else ()
        return self._start(kind, inputs=tensors, outputs=outputs, result=tensors, op=op, root=root)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> LabWork:
        """Reduce lists of one block per member; each member gets the block of its own index.

        `inputs[t][i]` is this member's addend for member i, and `outputs[t]` gets the reduction of
        `inputs[t][this member]` over the group.
        """
        blocks = [block for blocks_of_tensor in inputs for block in blocks_of_tensor]
        return self._start(
            "reduce_scatter", inputs=blocks, outputs=outputs, result=outputs, op=_op_of(opts)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> LabWork:
        """Reduce equal blocks of each tensor over the group."""
        return self.reduce_scatter(outputs, [self._blocks(tensor) for tensor in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> LabWork:
        """Reduce equal blocks of a tensor over the group."""
        return self.reduce_scatter([output], [self._blocks(tensor)], opts)

    _reduce_scatter_base = reduce_scatter_single

    # --- copies --------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> LabWork:
        """Copy each tensor of the root to all members."""
        tensors = _list_of(tensors)
        root = _root_of(opts)
        inputs = tensors if root == self._member else ()
        outputs = () if root == self._member else tensors
        return self._start("broadcast", inputs=inputs, outputs=outputs, result=tensors, root=root)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> LabWork:
        """Copy each tensor of each member to all members.

        `outputs[t][i]` gets tensor t of member i.
        """
        flat = [output for outputs_of_tensor in outputs for output in outputs_of_tensor]
        return self._start("all_gather", inputs=inputs, outputs=flat, result=flat)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> LabWork:
        """Copy each tensor of each member to all members.

        `outputs[i][t]` gets tensor t of member i: the indices of `allgather` in the other order.
        """
        outputs_by_tensor = list(zip(*outputs, strict=True))
        return self.allgather(outputs_by_tensor, inputs)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> LabWork:
        """Copy each tensor of each member to equal blocks of an output."""
        blocks = [block for output in outputs for block in self._blocks(output)]
        # The blocks are views of the outputs. A work returns the outputs themselves, as c10d does.
        return self._start("all_gather", inputs=inputs, outputs=blocks, result=outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> LabWork:
        """Copy a tensor of each member to equal blocks of an output."""
        return self.all_gather_single_coalesced([output], [tensor])

    _allgather_base = all_gather_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> LabWork:
        """Copy a tensor of each member to the root."""
        flat = [output for outputs_of_tensor in outputs for output in outputs_of_tensor]
        return self._start("gather", inputs=inputs, outputs=flat, result=flat, root=_root_of(opts))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> LabWork:
        """Copy tensor i of the root to member i."""
        flat = [tensor for tensors in inputs for tensor in tensors]
        return self._start(
            "scatter", inputs=flat, outputs=outputs, result=outputs, root=_root_of(opts)
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LabWork:
        """Copy tensor i of each member to member i."""
        return self._start("all_to_all", inputs=inputs, outputs=outputs, result=outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        opts: Any = None,
    ) -> LabWork:
        """Copy block i of each member's tensor to member i.

        `received` and `sent` have the numbers of rows of the blocks, one for each member. An empty
        list means blocks of equal size.
        """
        # The blocks are views of the output. A work returns the output itself, as c10d does.
        return self._start(
            "all_to_all",
            inputs=self._rows(tensor, sent),
            outputs=self._rows(output, received),
            result=[output],
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> LabWork:
        """Wait for all members."""
        return self._start("barrier", inputs=(), outputs=(), result=())

    def monitored_barrier(
        self, timeout: dt.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all members.

        If a member never comes, the scheduler raises a DeadlockError that names it.
        """
        self.barrier().wait()

    # --- messages ------------------------------------------------------------------------------

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> LabWork:
        """Send a tensor to a member; it is complete when the member receives it."""
        call = self._call("send", tensors, (), peer=destination, tag=tag)
        return self._post(call, tensors, (), result=tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> LabWork:
        """Receive a tensor from a member."""
        call = self._call("recv", (), tensors, peer=source, tag=tag)
        return self._post(call, (), tensors, result=tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> LabWork:
        """Receive a tensor from any member."""
        return self.recv(tensors, ANY, tag)

    # --- calls ---------------------------------------------------------------------------------

    def _start(
        self,
        kind: str,
        *,
        inputs: Tensors,
        outputs: Tensors,
        result: Tensors,
        op: tuple[str, Any] = ("", None),
        root: int | None = None,
    ) -> LabWork:
        """Post a collective.

        Args:
            kind: the name of the collective.
            inputs: the tensors that this member sends.
            outputs: the tensors that are written on this member.
            result: the tensors that the work returns.
            op: the name of the reduction, and the factor of a `premul_sum`.
            root: the index of the root, for a collective that has one.
        """
        name_of_reduction, factor = op
        call = self._call(kind, inputs, outputs, root=root)
        call.op = name_of_reduction
        call.factor = factor
        call.number = self._link.count_start(self.key)
        return self._post(call, inputs, outputs, result=result)

    def _call(self, kind: str, inputs: Tensors, outputs: Tensors, **facts: Any) -> PostedCall:
        """Return a call of this member, with the lines of the program that makes it."""
        return PostedCall(
            kind=kind,
            group=self.key,
            member=self._member,
            inputs=tuple(map(Meta.of, inputs)),
            outputs=tuple(map(Meta.of, outputs)),
            frames=program_frames(),
            **facts,
        )

    def _post(
        self, call: PostedCall, inputs: Tensors, outputs: Tensors, *, result: Tensors
    ) -> LabWork:
        return LabWork(self._link, self._link.post(call, inputs, outputs), list(result))

    def _blocks(self, tensor: Tensor) -> list[Tensor]:
        """Return equal blocks of a tensor, one for each member, as flat views."""
        members = len(self.key.ranks)
        count, rest = divmod(tensor.numel(), members)
        if rest or not tensor.is_contiguous():
            raise CollectiveError(
                f"a tensor with one block for each of {members} ranks must be contiguous, and its "
                f"number of elements must be a multiple of {members}; got the shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        return list(tensor.detach().view(-1).split_with_sizes([count] * members))

    def _rows(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the blocks of rows of a tensor, one for each member."""
        members = len(self.key.ranks)
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes and rows % members == 0:
            sizes = [rows // members] * members
        if len(sizes) != members or sum(sizes) != rows:
            raise CollectiveError(
                f"the sizes of the blocks for {members} ranks must be {members} numbers that add "
                f"up to the {rows} rows of the tensor, got {list(sizes)}"
            )
        return list(tensor.detach().split_with_sizes(list(sizes)))


def _op_of(opts: Any) -> tuple[str, Any]:
    """Return the name of a reduction and the factor of a `premul_sum`.

    Args:
        opts: c10d's options of a collective, or only the reduction; None for a sum.
    """
    return ("sum", None) if opts is None else name_of_op(getattr(opts, "reduceOp", opts))


def _root_of(opts: Any) -> int:
    """Return the index of a root from c10d's options of a collective, or from the index alone."""
    root: int = getattr(opts, "rootRank", opts)
    return root


def _list_of(tensors: Tensors | Tensor) -> Tensors:
    """Return a list of tensors; c10d's groups also accept a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else tensors
