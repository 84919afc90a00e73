"""`verify_mapping`: the comparison of a declared mapping with a recorded one.

The two mappings agree if each element of each target has the same source in both.
"""

from __future__ import annotations

from ..errors import MappingError
from ..mapping.assignment import Assignment
from ..mapping.regions import format_region
from ..mapping.weight_mapping import WeightMapping


def verify_mapping(declared: WeightMapping, recorded: WeightMapping) -> WeightMapping:
    """Compare a mapping that somebody wrote with a recorded one, and return it with a witness.

    A mapping that exchanges gate and up is complete and free of overlaps, so the proof of a plan
    cannot find the error. The comparison with the server's own loader finds it, before anything is
    sent.

    Args:
        declared: the mapping to check.
        recorded: the mapping of `learn_mapping`, possibly composed with `learn_conversion`.
            Elements that it keeps, because the loader does not write them, are not compared.

    Returns:
        The declared mapping with the witness of the recorded one.

    Raises:
        MappingError: if an element of a target has another origin; the message names the target,
            the region and both origins. Also if the mappings have different targets, or the
            recorded mapping does not have a witness.

    Example:
        >>> checkpoint = {"gate": torch.empty(2, 4), "up": torch.empty(2, 4)}
        >>> class Server(torch.nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.both = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
        ...
        ...     def load_weights(self, weights) -> None:
        ...         for (_, tensor), rows in zip(weights, self.both.data.chunk(2)):
        ...             rows.copy_(tensor)
        >>> from shoal_transfer import learn_mapping
        >>> server = Server()
        >>> recorded = learn_mapping(server, server.load_weights, checkpoint)
        >>> shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}
        >>> same = WeightMapping.same_names(shapes)
        >>> verify_mapping(same.fuse({"both@0": ("gate", "up")}), recorded).witness
        'recorded loader'
        >>> verify_mapping(same.fuse({"both@0": ("up", "gate")}), recorded)
        Traceback (most recent call last):
        shoal_transfer.errors.MappingError: 'both@0'[0:2, 0:4] is 'up'[0:2, 0:4] in the mapping, but
        'gate'[0:2, 0:4] in the witness
    """
    if recorded.witness is None:
        raise MappingError("verify_mapping needs a mapping with a witness")
    only_one = declared.targets.keys() ^ recorded.targets.keys()
    if only_one:
        raise MappingError(
            f"only one of the two mappings has the target {min(only_one)!r}; remove it from that "
            "mapping or add it to the other"
        )
    for name, parts in recorded.by_target.items():
        if declared.targets[name] != recorded.targets[name]:
            raise MappingError(
                f"{name!r} is {declared.targets[name]} in the mapping, but "
                f"{recorded.targets[name]} in the server"
            )
        function = recorded.computed.get(name)
        if declared.computed.get(name) != function:
            raise MappingError(
                f"{name!r} is computed by {declared.computed.get(name)!r} in the mapping, by "
                f"{function!r} in the server"
            )
        for part in parts:
            if part.source is not None or part.fill is not None:
                _compare(part, declared.by_target.get(name, ()))
    return declared.witnessed_by(recorded.witness)


def _compare(recorded: Assignment, declared: tuple[Assignment, ...]) -> None:
    """Compare one recorded assignment with the declared ones of the same target.

    Raises:
        MappingError: an element has another origin.
    """
    for other in declared:
        compared = recorded.restricted_to(other.region)
        if compared is None:
            continue
        common = other.restricted_to(compared.region)
        assert common is not None, "both have the elements of the region"
        if _origin(compared) != _origin(common):
            place = f"{compared.target!r}{format_region(compared.region)}"
            raise MappingError(
                f"{place} is {_describe(common)} in the mapping, but {_describe(compared)} in the "
                "witness"
            )


def _origin(part: Assignment) -> tuple[object, ...]:
    """Return a value that is equal for assignments of the same elements to the same region."""
    if part.source is None:
        return (None, part.fill)
    start = tuple(indices.start for indices in part.source_region)
    steps = []
    for indices, dim in zip(part.region, part.dims, strict=True):
        advances = dim is not None and len(indices) > 1
        steps.append((dim, part.source_region[dim].step) if advances and dim is not None else None)
    return (part.source, start, tuple(steps))


def _describe(part: Assignment) -> str:
    """Return the right side of an assignment."""
    _, _, origin = str(part).partition(" = ")
    return origin
