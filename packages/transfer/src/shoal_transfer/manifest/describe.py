"""`describe`: the manifest of a model, a state dict or files.

`weights_of` finds the tensors of this rank, and their boxes. Each rank describes its own boxes, and
`merge_manifests` makes one manifest of all descriptions. Only shapes and layouts are read, no
values.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any

import torch.distributed as dist
from torch import nn

from shoal_dtensor.internal import check_types, volume, whole_box
from shoal_mesh import comm_over
from shoal_mesh.internal import agree

from ..errors import ManifestError
from .records import Holding, Manifest, TensorRecord, contiguous_strides, merge_manifests
from .weights import Model, NamedBox, own_rank, weights_of

FILE_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


@check_types(model=(nn.Module, Mapping))
def describe(
    model: Model,
    mesh: Any = None,
    *,
    world: str = "world",
    rename: Mapping[str, str] | None = None,
    per_rank: bool = False,
) -> Manifest:
    """Describe the weights of a model on all ranks of a mesh, without reading a value.

    All ranks of the mesh call this function. Parameters and persistent buffers are described under
    the names of the plain model. If a style splits a fused parameter into several parameters, or
    packs its blocks in another order, the manifest describes the fused parameter of the plain
    model. Tied weights are one tensor with aliases. Ranks may hold different tensors, for example
    stages of a pipeline.

    Args:
        model: a module, parallel or plain, or a state dict. Its tensors are DTensors of shoal or
            torch, ShardedTensors or plain tensors, which each rank holds whole. They may be on the
            meta device.
        mesh: the mesh whose ranks hold the model; by default all ranks of the world, or this
            process alone if there is no world.
        world: name of this world; a trainer and a server in different worlds have different names.
        rename: replacements in names by regular expression, for example to give the layers of a
            pipeline's stage their numbers in the whole model.
        per_rank: describe each rank's local tensors as tensors of their own, named "name@rank". Use
            it for a model whose code shards plain tensors itself.

    Returns:
        The same manifest on every rank of the mesh.

    Raises:
        StyleTypeError: the model is neither a module nor a mapping.
        ManifestError: on all ranks of the mesh, if a tensor is partial, ranks disagree about
            a shape, or no rank holds some elements.

    Example:
        >>> from torch import nn
        >>> from shoal_mesh import init_device_mesh, launch
        >>> from shoal_tp_styles import parallelize_module
        >>> def example() -> list[tuple[int, object]]:
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     model = parallelize_module(nn.Linear(2, 4), mesh, "colwise")
        ...     record = describe(model, mesh).tensors["weight"]
        ...     return [(holding.rank, holding.box) for holding in record.holdings]
        >>> launch(example, 2)[0]
        [(0, ((0, 2), (0, 2))), (1, ((2, 4), (0, 2)))]
    """

    def describe_own() -> Manifest:
        return describe_rank(model, world=world, rename=rename, per_rank=per_rank)

    manifests = agree(describe_own, group_of(mesh), ManifestError, "describe")
    manifest = merge_manifests(manifests)
    # Many records share one tuple of holdings, for example the weights of all layers. For records
    # with the same holdings and shape the check has the same result, so only one is checked.
    record_by_layout = {
        (id(record.holdings), record.shape): record for record in manifest.tensors.values()
    }
    for record in record_by_layout.values():
        record.require_whole()
    return manifest


def group_of(mesh: Any) -> Any:
    """Return the process group of all ranks of a mesh; None is the world, or this process alone."""
    if mesh is None or not dist.is_initialized():
        return None
    return comm_over(mesh.mesh.flatten().tolist()).group


def describe_rank(
    model: Model,
    *,
    world: str = "world",
    rename: Mapping[str, str] | None = None,
    per_rank: bool = False,
) -> Manifest:
    """Describe the weights that this rank holds; `merge_manifests` merges the ranks' manifests.

    Args:
        model: as for `describe`.
        world: as for `describe`.
        rename: as for `describe`.
        per_rank: as for `describe`.

    Raises:
        ManifestError: a tensor is partial.

    Example:
        >>> describe_rank(torch.nn.Linear(4, 2)).tensors["bias"].parts
        ('bias',)
    """
    rank = own_rank()
    tensors = dict[str, TensorRecord]()
    for weight in weights_of(model, rename=rename, per_rank=per_rank):
        parts = list[str]()
        holdings = list[Holding]()
        for held in weight.boxes():
            if held.part not in parts:
                parts.append(held.part)
            if volume(held.box):
                holdings.append(_holding(rank, held, parts.index(held.part)))
        if weight.name in tensors:
            # A style has split a fused parameter of the plain model, such as the weight of queries,
            # keys and values, into several parameters. Each of them is a weight with the name of
            # the fused parameter. Their parts and holdings are joined in one record; `Holding.part`
            # is an index into the joined parts.
            earlier = tensors[weight.name]
            first_part = len(earlier.parts)
            holdings = [holding._replace(part=first_part + holding.part) for holding in holdings]
            parts = [*earlier.parts, *parts]
            holdings = [*earlier.holdings, *holdings]
        name = weight.name
        dtype = str(weight.dtype).removeprefix("torch.")
        layout = tuple(holdings)
        tensors[name] = TensorRecord(
            name, weight.shape, dtype, layout, parts=tuple(parts), aliases=weight.aliases
        )
    hosts = {rank: socket.gethostname()}
    return Manifest(tensors, hosts, world, rename=rename or {}, per_rank=per_rank)


def _holding(rank: int, held: NamedBox, part: int) -> Holding:
    # `view` and `memory` are views of one storage, and `storage_offset` counts from its beginning.
    # A holding counts from the beginning of `memory`.
    offset = int(held.view.storage_offset() - held.memory.storage_offset())
    return Holding(rank, held.box, offset, tuple(held.view.stride()), part=part)


def describe_files(paths: Iterable[str | PathLike[str]], *, world: str = "files") -> Manifest:
    """Describe the tensors of safetensors files.

    The manifest is the manifest of a world with one rank, 0, which holds every tensor whole. The
    memory of a tensor is its data in the file.

    Args:
        paths: paths of the files.
        world: name of their world.

    Returns:
        A manifest; offsets count from the beginning of each tensor in its file.

    Raises:
        ManifestError: a file does not have the header of a safetensors file, or a dtype that torch
            does not have.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.torch import save_file
        >>> with TemporaryDirectory() as home:
        ...     save_file({"w": torch.zeros(2, 3)}, f"{home}/model.safetensors")
        ...     describe_files([f"{home}/model.safetensors"]).tensors["w"].shape
        (2, 3)
    """
    tensors = {}
    for path in paths:
        for name, value in read_header(path).items():
            shape = tuple(value["shape"])
            if value["dtype"] not in FILE_DTYPES:
                raise ManifestError(f"{fspath(path)}: {name!r} is {value['dtype']}")
            dtype = FILE_DTYPES[value["dtype"]]
            strides = contiguous_strides(shape)
            whole = Holding(0, whole_box(shape), 0, strides)
            holdings = (whole,) if volume(whole.box) else ()
            tensors[name] = TensorRecord(name, shape, dtype, holdings, parts=(name,))
    return Manifest(tensors, {0: socket.gethostname()}, world)


def read_header(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the header of a safetensors file without its metadata."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = file.seek(0, 2)
        if not 0 < length <= size - 8:
            raise ManifestError(
                f"{fspath(path)} is not a safetensors file: its header cannot be read"
            )
        file.seek(8)
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return dict(header)
