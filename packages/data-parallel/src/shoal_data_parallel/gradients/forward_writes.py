"""Writes to replicated parameters in a forward, found by each rank and compared between ranks.

A forward may normalize its weights in place, equally on all ranks. Writes that depend on a rank's
rows (`nn.Embedding(max_norm=...)`) make replicas drift apart. A digest of the parameters that a
forward has written to is sent with the flags of the next reduction, one bit a column:

    rank 0 wrote    1 | 1 0 1      the first column: this rank has written something
    rank 1 wrote    1 | 0 0 1
    sum             2 | 1 0 2      a column that is neither 0 nor the number of ranks: they differ
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal_dtensor.errors import StyleError

from ..parameters.written_values import Fingerprints, digest_of
from .registrations import Registrations

# Columns of flags: whether a rank has written, and 15 bits of the digest. Unequal writes have equal
# bits about once in 2**15 times.
COLUMNS = 16
_BITS = COLUMNS - 1


class ForwardWrites:
    """The parameters that forwards have written to since the last reduction."""

    def __init__(self) -> None:
        # the tensors that modules use in the running forward
        self._used: Sequence[Tensor] = []
        # for each of them the parameter that optimizers update: the same tensor, or its shard
        self._parameters: Sequence[Tensor] = []
        # as the tensors were at the beginning of the forward
        self._before = Fingerprints([], reads_values=False)
        self._registrations = Registrations()
        # the names of parameters that forwards have replaced or added
        self._new: list[str] = []
        # by `id`: the tensors that were written to, and the parameters that optimizers update
        self._written: dict[int, Tensor] = {}
        self._digest: Tensor | None = None

    def begin(
        self, used: Sequence[Tensor], parameters: Sequence[Tensor], *, reads_values: bool
    ) -> None:
        """Take fingerprints at the beginning of a forward.

        Args:
            used: the tensors that modules use in the forward.
            parameters: for each of them the parameter that optimizers update.
            reads_values: whether fingerprints have digests of the values, too.
        """
        self._registrations.begin()
        # tensors of inference mode do not count their versions
        countable = [i for i, tensor in enumerate(used) if not tensor.is_inference()]
        self._used = [used[i] for i in countable]
        self._parameters = [parameters[i] for i in countable]
        self._before = Fingerprints(self._used, reads_values=reads_values)

    def end(self, module: nn.Module) -> None:
        """Digest the parameters that have changed, and name the new ones, since the beginning."""
        used = self._used
        parameters = self._parameters
        self._new += self._registrations.end(module, [*used, *parameters])
        written = self._before.written()
        self._used = []
        self._parameters = []
        self._before = Fingerprints([], reads_values=False)
        if not written and not self._new:
            return
        for i in written:
            for tensor in (used[i], parameters[i]):
                self._written[id(tensor)] = tensor
        digests = [digest_of(used[i]) for i in written]
        # new parameters change the digest, so that ranks without them find them too
        digests.append(torch.full((), len(self._new), device=used[0].device))
        digest = torch.stack(digests).sum()
        # the factor makes the digest depend on the order of forwards
        self._digest = digest if self._digest is None else self._digest * 31 + digest

    def columns(self) -> Tensor | None:
        """Return this rank's `(COLUMNS,)` flags, 0 or 1, of the writes since the last call.

        Returns None if there were no writes.
        """
        digest = self._digest
        self._digest = None
        return None if digest is None else _as_columns(digest)

    @property
    def has_written(self) -> bool:
        return bool(self._written or self._new)

    def check(self, sums: Sequence[float], ranks: int, module: nn.Module) -> None:
        """Raise StyleError if the sums of the ranks' columns show different writes.

        The error names the parameters.
        """
        written = self._written
        new = self._new
        self._written = {}
        self._new = []
        if new:
            raise StyleError(
                f"replicate: forwards replaced or added the parameters {new}, so their gradients "
                "are not averaged over ranks, and no optimizer has them. Write to the parameter "
                "instead (under no_grad: self.weight.copy_(values)), or assign it outside of the "
                "forward"
            )
        if all(count in (0, ranks) for count in sums):
            return
        names = [name for name, p in module.named_parameters() if id(p) in written]
        of_rank = f"parameters {names}" if names else "no parameters"
        raise StyleError(
            "replicate: forwards wrote different values to parameters on different ranks, so their "
            f"replicas are no longer equal; on this rank they wrote to {of_rank}. An Embedding "
            "with max_norm does so for the rows of its own batch: write after the optimizer's step "
            "instead, from values that all ranks have (embedding.weight.data.renorm_(2, 0, "
            "max_norm)), or keep the values in a buffer"
        )


def _as_columns(digest: Tensor) -> Tensor:
    """Return the flags of a digest of 64 bits.

    All bits of the digest are mixed into the last ones.
    """
    for shift in (32, 16):
        digest = digest ^ (digest >> shift)
    bits = (digest >> torch.arange(_BITS, device=digest.device)) & 1
    return torch.cat([bits.new_ones(1), bits])
