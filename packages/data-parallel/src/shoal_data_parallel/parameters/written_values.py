"""Fingerprints of parameters, by which a forward that writes to them is found.

An in-place operator counts up a tensor's version, and `p.data = values` moves it to other memory. A
write through `p.data` or `p.numpy()` changes the values alone, so that a digest has to read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_dtensor.internal import FakeTensor, local_of, memory_of
from shoal_mesh.internal import is_traced

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The version, the place in memory, and perhaps the digest of a tensor at one moment."""

    version: int
    memory: object
    digest: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, *, reads_values: bool) -> Fingerprint:
        """Return the fingerprint of a tensor, with a digest if `reads_values` is true."""
        local = local_of(tensor)
        # In a mode of fake tensors, the digest of a real tensor is fake too.
        has_values = reads_values and not is_traced(local)
        digest = digest_of(tensor) if has_values else None
        return cls(tensor._version, memory_of(local), digest)

    def differs_from(self, tensor: Tensor) -> bool:
        """Return whether the tensor was written to since the fingerprint was taken."""
        if tensor._version != self.version or memory_of(local_of(tensor)) != self.memory:
            return True
        return self.digest is not None and not torch.equal(self.digest, digest_of(tensor))


@torch.no_grad()
def digest_of(tensor: Tensor) -> Tensor:
    """Return one integer, on the device, that is equal if all local values have equal bits."""
    local = local_of(tensor).detach()
    if isinstance(local, FakeTensor) or local.is_meta:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    real = torch.view_as_real(local) if local.is_complex() else local
    bits = real.contiguous().view(_INTEGERS[real.element_size()])
    return bits.sum(dtype=torch.int64)
