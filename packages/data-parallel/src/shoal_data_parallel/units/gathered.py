"""The gathered parameters of a unit, which have memory only while they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..parameters.sharded_parameters import ShardedParameter

Versions = list[tuple[object, ...]]


@dataclass(slots=True, eq=False)
class Gathered:
    """The gathered parameters of a unit, from a forward to its backward."""

    # of the leaves when they were gathered (`Unit.versions`)
    versions: Versions
    # the gathered local tensors, one per parameter
    tensors: list[Tensor] = field(default_factory=list)
    # without values the tensors only hold their place in autograd's graph
    has_values: bool = False
    # how often each tensor had been written to when it was filled
    versions_when_filled: Sequence[int] = ()
    # this rank's shards over fewer ranks, from a forward to the gather for its backward
    shards: list[Tensor] = field(default_factory=list)

    def allocate(self, parameters: Sequence[ShardedParameter]) -> list[Tensor]:
        """Give all gathered tensors memory, and make the tensors that do not exist yet."""
        if not self.tensors:
            for spec in (parameter.gathered for parameter in parameters):
                device = spec.mesh.device_type
                self.tensors.append(torch.empty(spec.local_shape, dtype=spec.dtype, device=device))
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            size = tensor.numel() * tensor.element_size()
            # memory that was kept stays where it is
            if storage.nbytes() != size:
                storage.resize_(size)
        return self.tensors

    @property
    def were_written(self) -> bool:
        """True if a tensor was written to since it was filled."""
        return self.versions_when_filled != [tensor._version for tensor in self.tensors]

    def release(self, *, keeps_memory: bool) -> None:
        """Release the values of all gathered tensors, and their memory."""
        self.has_values = False
        self.shards = []
        if keeps_memory:
            return
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)


class Views(list[Tensor]):
    """Views of the gathered tensors, as modules see them.

    A unit holds them only while they are exposed, because their autograd graph holds the unit, in a
    cycle that the garbage collector does not see.
    """
