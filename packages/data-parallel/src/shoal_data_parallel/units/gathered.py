"""The gathered parameters of a unit, which have memory only while they are used.

`release` frees the memory, unless the user keeps it. The tensors remain, because autograd's graph
refers to them, and the next gather allocates memory for the same tensors. `Views` has views of the
tensors, as modules see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal_dtensor import Spec
from shoal_dtensor.internal import (
    FakeTensor,
    is_compiling,
    open_blocks,
    replicas_are_compared,
)
from shoal_mesh.internal import observers

from ..parameters.sharded_parameters import ShardedParameter
from ..parameters.written_values import digest_of

Versions = list[tuple[object, ...]]


class ValueComparison:
    """The choice of the forwards whose parameters are compared value by value.

    These are the first forward with gradients, and every one in `lockstep()` and
    `checked_replicas()`. The others compare versions, which a write through `p.data` does not have.
    """

    def __init__(self) -> None:
        self._was_made = False

    def is_due(self) -> bool:
        """Return whether values are read now, and again at the end of the forward."""
        if is_compiling():
            return False
        is_first = torch.is_grad_enabled() and not self._was_made
        self._was_made |= is_first
        # empty lists outside of every block, in which alone replicas may be compared
        has_block = bool(open_blocks or observers)
        return is_first or (has_block and replicas_are_compared())


@dataclass(slots=True, eq=False)
class Gathered:
    """The gathered parameters of a unit, from a forward to its backward."""

    # the versions of the leaves when they were gathered (`Unit.versions`)
    versions: Versions
    # the gathered local tensors, one per parameter
    tensors: list[Tensor] = field(default_factory=list)
    # the tensors that collectives write to: gathered tensors, and the outputs from which a
    # `GatherExtension` makes a gathered tensor
    received: list[Tensor] = field(default_factory=list)
    # the inner tensors that `fsdp_post_all_gather` returns: they own memory of gathered tensors
    inner: list[Tensor] = field(default_factory=list)
    # without values the tensors only hold their place in autograd's graph
    has_values: bool = False
    # the version of each tensor when it was filled, and its digest if the values were read then
    versions_when_filled: Sequence[int] = ()
    digests_when_filled: Sequence[Tensor] = ()
    # with `reshard_after_forward=<int>`: this rank's larger shards, from the end of a forward to
    # the next gather
    shards: list[Tensor] = field(default_factory=list)

    def allocate(self, layouts: Sequence[Spec]) -> list[Tensor]:
        """Return the tensors that collectives write to, with memory; make them the first time."""
        if not self.received:
            for spec in layouts:
                device = spec.mesh.device_type
                tensor = torch.empty(spec.local_shape, dtype=spec.dtype, device=device)
                self.received.append(tensor)
        for tensor in self.received:
            _resize(tensor, tensor.numel() * tensor.element_size())
        return self.received

    def complete(self, parameters: Sequence[ShardedParameter]) -> None:
        """Make the gathered tensors from the values that have arrived, or refill them."""
        is_first = not self.tensors
        for tensor in self.inner:
            _resize(tensor, tensor.numel() * tensor.element_size())
        arrived = iter(self.received)
        for i, parameter in enumerate(parameters):
            extension = parameter.extension
            if extension is None:
                tensor = next(arrived)
                if is_first:
                    self.tensors.append(tensor)
                continue
            outputs = [next(arrived) for _ in extension.lengths or ()]
            shard = parameter.shard_on_device()
            if not is_first:
                extension.refill(shard, outputs, self.tensors[i])
                continue
            tensor, inner = extension.receive(shard, outputs)
            self.tensors.append(tensor)
            self.inner += inner

    def note_values(self, *, reads_values: bool) -> None:
        """Note that the tensors have values now, and which ones if `reads_values` is true."""
        self.has_values = True
        self.versions_when_filled = [tensor._version for tensor in self.tensors]
        are_fake = any(isinstance(tensor, FakeTensor) for tensor in self.tensors)
        reads_values = reads_values and not are_fake
        self.digests_when_filled = [*map(digest_of, self.tensors)] if reads_values else []

    @property
    def were_written(self) -> bool:
        """True if a tensor was written to since it was filled, as its version says."""
        return self.versions_when_filled != [tensor._version for tensor in self.tensors]

    @property
    def have_other_values(self) -> bool:
        """True if values were read when they were filled, and differ now."""
        digests = zip(self.digests_when_filled, self.tensors, strict=False)
        return any(not torch.equal(digest, digest_of(tensor)) for digest, tensor in digests)

    def release(self, *, keeps_memory: bool) -> None:
        """Release the values of all gathered tensors, and their memory."""
        self.has_values = False
        self.shards = []
        if keeps_memory:
            return
        for tensor in (*self.received, *self.inner):
            _resize(tensor, 0)


def _resize(tensor: Tensor, size: int) -> None:
    """Change the number of bytes of a tensor's memory; memory that is there stays where it is.

    Memory that an array of numpy refers to keeps its size.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != size and storage.resizable():
        storage.resize_(size)


class Views(list[Tensor]):
    """Views of the gathered tensors, as modules see them.

    A unit refers to its views only while modules see them. The autograd graph of the views refers
    to the unit, and the garbage collector would not find this cycle.
    """
