"""The gathered parameters of a unit, which have memory only while they are used.

`release` frees the memory, unless `keep_unsharded_storage` keeps it. The tensors remain, because
autograd's graph refers to them, and the next gather allocates memory for the same tensors. `Views`
has views of the tensors, as modules see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal_dtensor import Spec
from shoal_dtensor.internal import (
    FakeTensor,
    ShardsInFlight,
    is_compiling,
    open_blocks,
    replicas_are_compared,
)
from shoal_mesh.internal import observers

from ..gradients.communication import CustomGather
from ..parameters.sharded_parameters import ShardedParameter
from ..parameters.written_values import digest_of
from .lent_values import LentCopy

# The default process group, then for each leaf its version, the version of its shard, the shard's
# memory and its dtype (`Unit.versions`).
Versions = list[tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class GatherInFlight:
    """Shards in flight, the versions of the leaves that were sent, and the layouts that arrive."""

    values: ShardsInFlight | CustomGather
    versions: Versions
    layouts: Sequence[Spec]


class ValueComparison:
    """Choice between two ways to find a forward that writes to the parameters of one module.

    The first forward with gradients compares values, and so does every forward inside `lockstep()`
    or `checked_replicas()`. Other forwards compare version counters, which a write through `p.data`
    does not change.
    """

    def __init__(self) -> None:
        self._had_forward_with_gradients = False

    def decide(self) -> bool:
        """Decide whether values are read now, and again at the end of the forward.

        A call for a forward with gradients changes the state: the next one is not the first.
        """
        if is_compiling():
            return False
        is_first = torch.is_grad_enabled() and not self._had_forward_with_gradients
        if is_first:
            self._had_forward_with_gradients = True
        # A quick test: `lockstep()` and `checked_replicas()` are blocks, and both lists are empty
        # outside of all blocks.
        is_in_block = bool(open_blocks or observers)
        return is_first or (is_in_block and replicas_are_compared())


@dataclass(slots=True, eq=False)
class Gathered:
    """The gathered parameters of a unit, from a forward to its backward."""

    # the versions of the leaves when they were gathered
    versions: Versions
    # the gathered local tensors, one per parameter
    tensors: list[Tensor] = field(default_factory=list)
    # the tensors that collectives write to, parameter by parameter: a gathered tensor, or the
    # outputs from which a `GatherExtension` makes a gathered tensor
    received: list[Tensor] = field(default_factory=list)
    # the inner tensors that `fsdp_post_all_gather` returns: they own memory of gathered tensors
    inner: list[Tensor] = field(default_factory=list)
    # without values the tensors only hold their place in autograd's graph
    has_values: bool = False
    # for each tensor of `tensors`, torch's counter of writes (`_version`) when it was filled
    counters_when_filled: Sequence[int] = ()
    # for each tensor of `tensors`, the digest of its values when it was filled; empty if the values
    # were not read
    digests_when_filled: Sequence[Tensor] = ()
    # with `reshard_after_forward=<int>`: this rank's larger shards, from the end of a forward to
    # the next gather
    shards: list[Tensor] = field(default_factory=list)
    # by index of the parameter: the copies that code between a forward and its backward has read
    lent: dict[int, LentCopy] = field(default_factory=dict)

    def allocate(self, layouts: Sequence[Spec]) -> list[Tensor]:
        """Return the tensors that collectives write to, with memory; make them the first time."""
        if not self.received:
            for spec in layouts:
                device = spec.mesh.device_type
                tensor = torch.empty(spec.local_shape, dtype=spec.dtype, device=device)
                self.received.append(tensor)
        _allocate(self.received)
        return self.received

    def complete(self, parameters: Sequence[ShardedParameter]) -> None:
        """Make the gathered tensors from the values that have arrived, or refill them."""
        is_first = not self.tensors
        _allocate(self.inner)
        outputs_by_parameter = self._received_by_parameter(parameters)
        for i, parameter in enumerate(parameters):
            outputs = outputs_by_parameter[i]
            extension = parameter.extension
            if extension is None:
                # The collective has written to the gathered tensor itself.
                if is_first:
                    self.tensors += outputs
                continue
            shard = parameter.shard_on_device()
            if not is_first:
                extension.refill(shard, outputs, self.tensors[i])
                continue
            tensor, inner = extension.receive(shard, outputs)
            self.tensors.append(tensor)
            self.inner += inner

    def _received_by_parameter(self, parameters: Sequence[ShardedParameter]) -> list[list[Tensor]]:
        """Return `received`, divided among the parameters."""
        outputs_by_parameter = []
        start = 0
        for parameter in parameters:
            # An extension sends any number of tensors, and has the lengths of each of them.
            extension = parameter.extension
            count = 1 if extension is None else len(extension.lengths or ())
            outputs_by_parameter.append(self.received[start : start + count])
            start += count
        assert start == len(self.received), "all that arrives belongs to a parameter"
        return outputs_by_parameter

    def note_values(self, *, reads_values: bool) -> None:
        """Note that the tensors have values now.

        Args:
            reads_values: whether to note digests of the values, too.
        """
        self.has_values = True
        self.counters_when_filled = [tensor._version for tensor in self.tensors]
        self.digests_when_filled = []
        if reads_values and not any(isinstance(tensor, FakeTensor) for tensor in self.tensors):
            self.digests_when_filled = [*map(digest_of, self.tensors)]

    @property
    def were_written(self) -> bool:
        """True if torch has counted a write to a tensor since it was filled."""
        return self.counters_when_filled != [tensor._version for tensor in self.tensors]

    @property
    def have_other_values(self) -> bool:
        """True if values were read when the tensors were filled, and differ from the values now."""
        if not self.digests_when_filled:
            return False
        pairs = zip(self.digests_when_filled, self.tensors, strict=True)
        return any(not torch.equal(digest, digest_of(tensor)) for digest, tensor in pairs)

    def take_back(self) -> bool:
        """Forget the copies that were lent; return whether one of them was written to."""
        lent = self.lent
        self.lent = {}
        return any(one.was_written for one in lent.values())

    def release(self, *, keeps_memory: bool) -> None:
        """Declare the values of all gathered tensors invalid, and free the tensors' memory.

        Args:
            keeps_memory: whether the memory is not freed.
        """
        self.has_values = False
        self.shards = []
        if keeps_memory:
            return
        for tensor in (*self.received, *self.inner):
            storage = tensor.untyped_storage()
            # memory that an array of numpy refers to cannot be freed
            if storage.resizable():
                storage.resize_(0)


def _allocate(tensors: Sequence[Tensor]) -> None:
    """Give tensors memory; memory that is there stays where it is."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.nbytes() and storage.resizable():
            storage.resize_(tensor.nbytes)


class Views(list[Tensor]):
    """A list of views of the gathered tensors, as modules see them.

    A unit refers to its views only while modules see them. The autograd graph of the views refers
    to the unit, and the garbage collector would not find this cycle. A `Forward`, which lives
    longer, has a weak reference to the list. Python has weak references to instances of a subclass
    of list, but not of list itself.
    """
