"""`learn_mapping`: the mapping that a server's own loader applies, recorded without weights.

The loader writes to meta twins of the model's parameters and buffers, inside a `Recorder`. The
record then gives the assignments of every parameter and buffer. Each rank of a server learns the
mapping of its own part, and `merge_ranks` merges them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.internal import check_types
from shoal_mesh.internal import agree

from ..errors import LoaderComputesError, MappingError
from ..manifest.describe import group_of
from ..manifest.records import Manifest
from ..manifest.weights import weights_of
from ..mapping.assignment import Assignment
from ..mapping.regions import format_region
from ..mapping.weight_mapping import WeightMapping
from .computations import Function
from .definitions import Source
from .recorder import Recorder
from .recordings import Checkpoint, assign_tensor
from .replay import ComputedError
from .twins import meta_twins

Load = Callable[[Iterable[tuple[str, Tensor]]], Any]
WITNESS = "recorded loader"


@check_types(model=nn.Module)
def learn_mapping(
    model: nn.Module,
    load: Load,
    sources: Manifest | Mapping[str, Tensor],
    mesh: Any = None,
    *,
    keep: Collection[str] = (),
    compute: Mapping[str, Function] | None = None,
) -> WeightMapping:
    """Learn which elements of which source tensors a server's loader writes where.

    Every rank of the server runs its own loader over meta tensors. Each write to a parameter or
    buffer is recorded: offset, shape and strides of both sides are the mapping, and nothing is
    written. Values that the loader copies on the way (`torch.cat`, `.to(device)`, `.item()`) are
    replayed for that parameter alone, on two random numberings of the elements, which must agree.

    The mapping's targets are the local tensors of each rank, named "name@rank", as
    ``describe(model, mesh, per_rank=True)`` names them. The mapping has the witness "recorded
    loader".

    Args:
        model: the server's model on this rank, with the layout that its loader fills. The model is
            unchanged afterwards; its tensors may be on any device, meta included.
        load: the model's loader: takes the pairs (name, tensor) of a checkpoint, for example
            ``model.load_weights``.
        sources: the checkpoint that the loader reads: a manifest, for example of
            `describe_files`, or tensors by name, which may be on the meta device. No value is read.
        mesh: the mesh whose ranks hold the model; by default all ranks of the world, or this
            process alone if there is no world.
        keep: patterns of names, as in `fnmatch`, of parameters and buffers that the loader does
            not write, or not completely, and that keep their values in the server.
        compute: functions by patterns of names, as in `fnmatch`, for example
            ``{"*norm.weight": lambda moved: moved + 1}``. The loader computes each element of such
            a parameter from one element, and the function must return the same values. The mapping
            moves the elements before the computation; pass the same functions to `WeightTransfer`.

    Returns:
        The same mapping on every rank of the mesh.

    Raises:
        LoaderComputesError: on all ranks, if the loader computes values of a parameter, for example
            quantizes it. The message names the parameter and the operator.
        MappingError: on all ranks, if the loader leaves elements of a parameter without a source,
            or a parameter is a DTensor.

    Example:
        >>> class Server(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.qkv = nn.Parameter(torch.empty(8, 4, device="meta"))
        ...
        ...     def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        ...         rows = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}
        ...         for name, tensor in weights:
        ...             self.qkv.data[rows[name]].copy_(tensor)
        >>> checkpoint = {"q": torch.empty(4, 4), "k": torch.empty(2, 4), "v": torch.empty(2, 4)}
        >>> server = Server()
        >>> mapping = learn_mapping(server, server.load_weights, checkpoint)
        >>> mapping.by_target["qkv@0"][1]
        Assignment('qkv@0'[4:6, 0:4] = 'k'[0:2, 0:4])
        >>> mapping.witness
        'recorded loader'
    """

    def learn() -> WeightMapping:
        return learn_on_rank(model, load, sources, keep=keep, compute=compute)

    return merge_ranks(agree(learn, group_of(mesh), None, "learn_mapping"))


def learn_on_rank(
    model: nn.Module,
    load: Load,
    sources: Manifest | Mapping[str, Tensor],
    *,
    keep: Collection[str] = (),
    compute: Mapping[str, Function] | None = None,
) -> WeightMapping:
    """Learn the mapping of this rank's part of a model, for `merge_ranks` over all ranks.

    Args:
        model: as for `learn_mapping`.
        load: as for `learn_mapping`.
        sources: as for `learn_mapping`.
        keep: as for `learn_mapping`.
        compute: as for `learn_mapping`.

    Raises:
        LoaderComputesError: the loader computes values of a parameter.
        MappingError: the loader leaves elements of a parameter without a source.
    """
    _refuse_dtensors(model)
    described = _describe_sources(sources)
    functions = dict(compute or {})
    first = _record(model, load, described, functions, side=0)
    if first.reads_numbers:
        # A number that the loader computed from a label looks like a constant. Under the other
        # numbering it has another value, so a second run finds it.
        second = _record(model, load, described, functions, side=1)
        for name, parts in first.parts.items():
            if second.parts.get(name) != parts:
                raise LoaderComputesError(
                    _computes(name, "computes numbers with .item(), which a mapping cannot record")
                )
    assignments: list[Assignment] = []
    for name, parts in first.parts.items():
        _refuse_gaps(name, parts, keep)
        assignments += parts
    shapes = {source.name: tuple(source.tensor.shape) for source in described}
    computed = {}
    for name in first.shapes:
        pattern = pattern_of(name, functions)
        if pattern is not None:
            computed[name] = pattern
    mapping = WeightMapping(shapes, first.shapes, tuple(assignments), WITNESS, computed=computed)
    mapping.check()
    return mapping


def merge_ranks(mappings: Iterable[WeightMapping]) -> WeightMapping:
    """Merge the mappings of ranks, whose targets have different names.

    Args:
        mappings: the mappings, all from the same sources.

    Raises:
        MappingError: the sources differ, or two mappings have a target of the same name.
    """
    first, *others = mappings
    targets = dict(first.targets)
    computed = dict(first.computed)
    assignments = [*first.assignments]
    for mapping in others:
        if mapping.sources != first.sources:
            raise MappingError(
                "the ranks learned from different checkpoints; pass the same checkpoint on all "
                "ranks"
            )
        both = targets.keys() & mapping.targets.keys()
        if both:
            raise MappingError(
                f"two ranks have the target {min(both)!r}; target names must be unique"
            )
        targets.update(mapping.targets)
        computed.update(mapping.computed)
        assignments += mapping.assignments
    return replace(first, targets=targets, assignments=tuple(assignments), computed=computed)


class _LoaderRecord(NamedTuple):
    """The record of one run of a loader.

    Attributes:
        shapes: the shapes of the targets after the run, by name.
        parts: the assignments of each target.
        reads_numbers: whether the loader read elements as Python numbers.
    """

    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, list[Assignment]]
    reads_numbers: bool


def _record(
    model: nn.Module,
    load: Load,
    sources: list[Source],
    functions: Mapping[str, Function],
    *,
    side: int,
) -> _LoaderRecord:
    """Run the loader once and return the assignments of each parameter and persistent buffer."""
    recorder = Recorder(side)
    weights = weights_of(model, per_rank=True)
    checkpoint = Checkpoint(recorder, sources)
    shapes = {}
    parts = {}
    with meta_twins(model) as twins:
        for original, twin in twins.pairs():
            recorder.watch_twin(twin, original)
        with torch.no_grad(), recorder:
            load((source.name, source.tensor) for source in sources)
        for weight in weights:
            tensor = weight.entry.table[weight.entry.name]
            pattern = pattern_of(weight.name, functions)
            function = None if pattern is None else functions[pattern]
            try:
                parts[weight.name] = assign_tensor(
                    recorder, weight.name, tensor, checkpoint, function=function
                )
            except ComputedError as error:
                raise LoaderComputesError(_computes(weight.name, error.reason, pattern)) from error
            shapes[weight.name] = tuple(tensor.shape)
    return _LoaderRecord(shapes, parts, bool(recorder.scalars))


def _refuse_dtensors(model: nn.Module) -> None:
    """Refuse a model of DTensors, whose layout is data already.

    Raises:
        MappingError: a parameter is a DTensor.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise MappingError(
                f"learn_mapping: {name!r} is a DTensor; describe(model, mesh) reads its layout, "
                "so recording a loader is not needed"
            )


def _describe_sources(sources: Manifest | Mapping[str, Tensor]) -> list[Source]:
    """Return the tensors of a checkpoint on the meta device, contiguous."""
    found = []
    if isinstance(sources, Manifest):
        for name, record in sources.tensors.items():
            tensor = torch.empty(record.shape, dtype=record.torch_dtype, device="meta")
            found.append(Source(name, tensor))
        return found
    for name, value in sources.items():
        tensor = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        found.append(Source(name, tensor))
    return found


def _computes(name: str, reason: str, pattern: str | None = None) -> str:
    if pattern is not None:
        return f"{name!r}: the loader does not write what compute[{pattern!r}] returns; {reason}"
    return (
        f"{name!r}: the loader {reason}; a mapping only moves elements. If it computes each "
        "element from one element, pass compute={...} with the function by the parameter's name; "
        "else let it fill the layout before such work, and do the work in the receiver's finish"
    )


def pattern_of(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that fits a parameter's name without its rank, None if none does."""
    plain, _, _ = name.rpartition("@")
    for pattern in patterns:
        if fnmatchcase(plain, pattern):
            return pattern
    return None


def _refuse_gaps(name: str, parts: Iterable[Assignment], keep: Collection[str]) -> None:
    """Refuse elements without a source, unless a pattern of `keep` fits their tensor's name.

    Raises:
        MappingError: if there are such elements.
    """
    if pattern_of(name, keep) is not None:
        return
    for part in parts:
        if part.source is None and part.fill is None:
            raise MappingError(
                f"the loader does not write {name!r}{format_region(part.region)}; add the source "
                "tensor that the loader needs, or list the name in keep=[...] to keep the "
                "server's values"
            )
