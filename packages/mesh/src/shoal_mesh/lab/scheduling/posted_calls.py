"""Calls of collectives as data: kind, group, tensors in and out, and the sources of each output.

All collectives of c10d have one form here. A call has a list of inputs and a list of outputs, and
each output is a copy of one input of one member, or a reduction of one input of every member:

    all_gather of two tensors on 2 ranks    outputs [a0, a1, b0, b1]   inputs [a, b]
    all_to_all on 2 ranks                   outputs [from 0, from 1]   inputs [to 0, to 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

# `peer` of a receive from any source
ANY = -1
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
POINT_TO_POINT = frozenset({"send", "recv"})


class Meta(NamedTuple):
    """Shape and dtype of a tensor of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return the shape and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Frame(NamedTuple):
    """A line of the program that started a call."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"


class GroupKey(NamedTuple):
    """The identity of a group, equal on all of its members.

    Attributes:
        name: the name that c10d gave the group.
        ranks: its global ranks, in the order of the group.
        generation: how often a group of this name and these ranks was created before.
    """

    name: str
    ranks: tuple[int, ...]
    generation: int = 0


class CallSource(NamedTuple):
    """An input of a member of the group."""

    member: int
    position: int


@dataclass(slots=True)
class PostedCall:
    """A call of one member of a group, without the values of its tensors.

    Attributes:
        kind: `all_reduce`, `all_gather`, `send`, ...
        group: the group.
        member: the index of the calling rank in the group.
        inputs: the tensors that this member brings.
        outputs: the tensors that this member receives.
        op: the name of the reduction; "" if there is none.
        factor: the factor of a `premul_sum`.
        root: the index of the root in the group, or None.
        peer: the other member of a send or receive; `ANY` for a receive from any source.
        tag: the tag of a send or receive.
        number: how many collectives this member has started in the group before.
        frames: the innermost lines of the program, innermost first.
    """

    kind: str
    group: GroupKey
    member: int
    inputs: tuple[Meta, ...] = ()
    outputs: tuple[Meta, ...] = ()
    op: str = ""
    factor: float | Tensor | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    number: int = 0
    frames: tuple[Frame, ...] = field(default=(), compare=False)

    @property
    def size(self) -> int:
        """Number of members of the group."""
        return len(self.group.ranks)

    @property
    def rank(self) -> int:
        """Global rank of the caller."""
        return self.group.ranks[self.member]


def sources_of(call: PostedCall, index: int) -> list[CallSource]:
    """Return the inputs that determine output `index` of a collective; several are reduced.

    Args:
        call: the call of the member that has the output.
        index: the index of the output.
    """
    members = range(call.size)
    match call.kind:
        case "all_reduce" | "reduce":
            return [CallSource(member, index) for member in members]
        case "reduce_scatter":
            # inputs on 2 ranks: tensor 0 for rank 0, tensor 0 for rank 1, tensor 1 for rank 0, ...
            block = index * call.size + call.member
            return [CallSource(member, block) for member in members]
        case "all_gather":
            # outputs on 2 ranks: tensor 0 of rank 0, tensor 0 of rank 1, tensor 1 of rank 0, ...
            tensor, member = divmod(index, call.size)
            return [CallSource(member, tensor)]
        case "all_to_all":
            return [CallSource(index, call.member)]
        case "gather":
            return [CallSource(index, 0)]
        case "broadcast":
            return [CallSource(call.root or 0, index)]
    assert call.kind == "scatter", f"no collective {call.kind}"
    return [CallSource(call.root or 0, call.member)]


def disagreement(first: PostedCall, second: PostedCall) -> str:
    """Return the property in which two calls of one collective differ, or ''."""
    if first.kind != second.kind:
        return "the collective"
    if first.op != second.op:
        return "the reduction"
    if first.root != second.root:
        return "the root"
    if first.kind not in {"all_reduce", "reduce"}:
        return ""
    if len(first.inputs) != len(second.inputs):
        return "the number of tensors"
    for tensor, other in zip(first.inputs, second.inputs, strict=True):
        if tensor.dtype != other.dtype:
            return "the dtype"
        if tensor.numel != other.numel:
            return "the number of elements"
    return ""


def misfit(calls: Mapping[int, PostedCall]) -> str:
    """Describe the first output whose size or dtype is not the one of its sources, or return ''.

    Args:
        calls: the calls of all members, by their index in the group.
    """
    for call in calls.values():
        for index, output in enumerate(call.outputs):
            for source in sources_of(call, index):
                sender = calls[source.member]
                problem = _misfit_of_pair(call, output, sender, source.position)
                if problem:
                    return problem
    return ""


def _misfit_of_pair(call: PostedCall, output: Meta, sender: PostedCall, index: int) -> str:
    """Describe an output that does not fit input `index` of its sender, or return ''."""
    if index >= len(sender.inputs):
        return (
            f"rank {call.rank} expects tensor {index} of rank {sender.rank}, which brings "
            f"{len(sender.inputs)}"
        )
    sent = sender.inputs[index]
    if sent.numel == output.numel and sent.dtype == output.dtype:
        return ""
    return f"rank {call.rank} expects {output} from rank {sender.rank}, which brings {sent}"


def describe(call: PostedCall) -> str:
    """Return a call in words, such as `all_reduce sum of float32[4] in group '0'`."""
    tensors = call.inputs or call.outputs
    words = [call.kind]
    if call.op:
        words.append(call.op)
    if tensors:
        words.append(f"of {_list_of(tensors)}")
    if call.root is not None:
        words.append(f"with root {call.group.ranks[call.root]}")
    if call.peer is not None:
        peer = "any rank" if call.peer == ANY else f"rank {call.group.ranks[call.peer]}"
        words.append(f"{'to' if call.kind == 'send' else 'from'} {peer}")
    if call.tag:
        words.append(f"tag {call.tag}")
    number = "" if call.kind in POINT_TO_POINT else f" (its collective {call.number + 1})"
    return f"{' '.join(words)} in group {call.group.name!r}{number}"


def _list_of(tensors: Sequence[Meta]) -> str:
    if len(tensors) <= 2:
        return ", ".join(map(str, tensors))
    return f"{tensors[0]} and {len(tensors) - 1} more tensors"
