"""`copy_weights`: one model's weights into another one of the same names."""

from __future__ import annotations

from torch import nn

from shoal_mesh.internal import agree

from ..errors import ManifestError
from ..manifest.describe import describe_rank
from ..manifest.records import Manifest, merge_manifests
from ..manifest.weights import own_rank
from ..planning.plan import plan_transfer
from .memories import LocalMemories
from .program import Seat, compile_program
from .runner import Runner
from .wires import GroupWire, LocalWire, Wire


def copy_weights(
    source: nn.Module | None, target: nn.Module | None, *, max_bytes: int = 64 * 2**20
) -> None:
    """Write the parameters and persistent buffers of one model into another one.

    The two models may be parallel in different ways.

    Use this function for a mesh that serves and another mesh that trains: degrees, plans and ranks
    of the world may differ. All ranks of the world call the function. No rank holds more of a
    parameter than its shards of both models, and the parts in flight. To copy weights at each step,
    or between models of different names, make a `WeightTransfer`.

    Args:
        source: a parallel or plain model; None on ranks that have no part of it.
        target: a model with the same names, written in place; None on ranks that have no part of
            it.
        max_bytes: most bytes that one rank sends and receives in one message round.

    Raises:
        MappingError: on all ranks, if the target has entries that the source does not have, or has
            with another shape or dtype.
        ManifestError: on all ranks, if a model cannot be described.

    Example:
        >>> source, target = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> copy_weights(source, target)
        >>> torch.equal(source.weight, target.weight)
        True
    """
    models = (source, target)

    def describe_both() -> list[Manifest | None]:
        return [None if model is None else describe_rank(model) for model in models]

    described = agree(
        describe_both, None, ManifestError, "copy_weights: cannot describe the models"
    )
    manifests = []
    for side in range(2):
        parts = [one for pair in described if (one := pair[side]) is not None]
        merged = merge_manifests(parts)
        for record in merged.tensors.values():
            record.require_whole()
        hosts = dict.fromkeys(range(len(described)), "")
        manifests.append(Manifest(merged.tensors, hosts, merged.world))
    plan = plan_transfer(manifests[0], manifests[1], max_bytes=max_bytes)
    wire: Wire = LocalWire() if len(described) == 1 else GroupWire(range(len(described)))
    ranks = [None if model is None else own_rank() for model in models]
    memories = [LocalMemories(model).tensors for model in models]
    steps = compile_program(plan, Seat(ranks[0], ranks[1]), memories[0], memories[1])
    Runner(wire, digests=False, deltas=False).run(steps, is_delta=False)
