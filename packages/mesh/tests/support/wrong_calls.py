"""Every public function with valid arguments, the values to put in their place, and which of them it accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as torchs_init_device_mesh

import shoal_mesh as m
from shoal_mesh import Comm, comm_over, differentiable, testing
from shoal_mesh.events import Observer
from shoal_mesh.groups.process_groups import BackendChoice
from shoal_mesh.internal import (
    Topology,
    all_reduce_,
    constant_when_compiled,
    observe,
    pack_blocks,
    unobserve,
    unpack_blocks,
)


@dataclass
class Call:
    """A public function.

    Attributes:
        function: what is called.
        valid: arguments that it takes.
        accepted: parameter -> names of the wrong values that happen to be right there.
    """

    function: Callable[..., object]
    valid: dict[str, Any]
    accepted: dict[str, set[str]]


def wrong_values(mesh: m.DeviceMesh, comm: Comm) -> dict[str, Any]:
    """Values that most parameters do not take, by name."""
    theirs, x = torchs_init_device_mesh("cpu", (2,)), torch.ones(2, 2)
    numbers: dict[str, Any] = {
        "three": 3,
        "minus_one": -1,
        "million": 10**6,
        "float": 1.5,
        "nan": float("nan"),
        "true": True,
        "complex": 1j,
    }
    lists: dict[str, Any] = {
        "list": [],
        "tuple": (),
        "list_of_none": [None],
        "names": ["a", "b"],
        "floats": [1.5, 2],
        "zeros": [0, 0],
    }
    lists |= {"out_of_range": [-1, 3], "nested": [[1]], "range": range(2)}
    others: dict[str, Any] = {
        "dict": {},
        "filled_dict": {"a": 1},
        "set": {1},
        "generator": (i for i in range(2)),
        "none": None,
    }
    others |= {"object": object(), "function": lambda: 3, "type": int, "slice": slice(0, 1), "ellipsis": ...}
    others |= {"text": "x", "no_text": "", "bytes": b"x", "exception": ValueError("x")}
    meshes: dict[str, Any] = {
        "torch_mesh": theirs,
        "torch_mesh_pair": (theirs, 0),
        "mesh": mesh,
        "mesh_and_9": (mesh, 9),
    }
    meshes |= {"mesh_and_none": (mesh, None), "mesh_alone": (mesh,), "comm": comm, "group": dist.group.WORLD}
    tensors: dict[str, Any] = {
        "tensor": x,
        "int_tensor": torch.ones(2, dtype=torch.long),
        "bool_tensor": torch.ones(2, dtype=torch.bool),
    }
    tensors |= {"empty": torch.empty(0), "scalar": torch.tensor(1.0), "sparse": x.to_sparse()}
    tensors |= {"requires_grad": torch.ones(2, 2, requires_grad=True), "list_of_tensor": [x]}
    tensors |= {"list_of_requires_grad": [torch.ones(2, requires_grad=True)] * 2}
    tensors |= {"dtype": torch.float32, "device": torch.device("cpu"), "reduce_op": dist.ReduceOp.SUM}
    return numbers | lists | others | meshes | tensors


def open_lockstep(timeout: float) -> None:
    with m.lockstep(timeout=timeout):
        pass


def observe_and_stop(observer: Observer) -> None:
    observe(observer)
    unobserve(observer)


def flatten(name: str | None, backend_override: object) -> None:
    m.abstract_mesh((1, 2), ("a", "b")).flatten(name, backend_override)


def launch(fn: Any, nprocs: int | None) -> None:
    if fn is list or not callable(fn):
        m.launch(fn, nprocs)


def from_this_rank(function: Callable[..., object]) -> Callable[..., object]:
    """The function, unless another rank is the source: a fake world receives nothing from it."""
    return lambda *, src, **kwargs: None if src is True else function(src=src, **kwargs)


def measure(mesh: m.DeviceMesh, largest: int, repeats: Any) -> None:
    if not isinstance(repeats, int) or repeats != 10**6:
        m.measure_topology(mesh, largest=largest, repeats=repeats)


def run_on_one_rank(function: Any) -> None:
    if not callable(function):
        testing.RankPool(1).run(function)


class _Table:
    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}

    def __call__(self, name: str, function: Callable[..., object], valid: dict[str, Any], /, **accepted: str) -> None:
        names = {parameter: set(words.split()) for parameter, words in accepted.items()}
        operation: object = dist.ReduceOp.SUM
        if not callable(operation):  # as in torch 2.11: there it passes for no function
            names = {p: words - {"reduce_op"} if "function" in words else words for p, words in names.items()}
        if "comm" in valid:
            names["comm"] = {"comm"}
        self.calls[name] = Call(function, valid, names)


def public_calls(mesh: m.DeviceMesh, comm: Comm, folder: Path) -> dict[str, Call]:
    """Every call by name; `mesh` is of shape (1, 2) with axes "a" and "b", `comm` has two ranks."""
    row = _Table()
    _collectives(row, comm)
    _meshes(row, mesh)
    _others(row, mesh, comm, folder)
    return row.calls


def _collectives(row: _Table, comm: Comm) -> None:
    x, f = torch.ones(2, 2), torch.ones(2)
    row(
        "all_reduce",
        m.all_reduce,
        {"tensor": x, "comm": comm, "op": "sum"},
        tensor="tensor int_tensor bool_tensor empty scalar",
    )
    row(
        "differentiable.all_reduce",
        differentiable.all_reduce,
        {"tensor": x, "comm": comm, "op": "sum"},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad",
    )
    row(
        "all_gather",
        m.all_gather,
        {"tensor": x, "comm": comm, "dim": 0},
        tensor="tensor int_tensor bool_tensor empty scalar",
        dim="minus_one true",
    )
    row(
        "differentiable.all_gather",
        differentiable.all_gather,
        {"tensor": x, "comm": comm, "dim": 0},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad",
        dim="minus_one true",
    )
    row(
        "all_gather_v",
        m.all_gather_v,
        {"tensor": x, "comm": comm, "sizes": (2, 3), "dim": 0},
        tensor="tensor int_tensor bool_tensor",
        dim="minus_one true",
    )
    row(
        "differentiable.all_gather_v",
        differentiable.all_gather_v,
        {"tensor": x, "comm": comm, "sizes": (2, 3), "dim": 0},
        tensor="tensor int_tensor bool_tensor requires_grad",
        dim="minus_one true",
    )
    row(
        "reduce_scatter",
        m.reduce_scatter,
        {"tensor": x, "comm": comm, "dim": 0, "op": "sum"},
        tensor="tensor int_tensor bool_tensor empty",
        dim="minus_one true",
    )
    row(
        "differentiable.reduce_scatter",
        differentiable.reduce_scatter,
        {"tensor": x, "comm": comm, "dim": 0, "op": "sum"},
        tensor="tensor int_tensor bool_tensor empty requires_grad",
        dim="minus_one true",
    )
    row(
        "reduce_scatter_v",
        m.reduce_scatter_v,
        {"tensor": x, "comm": comm, "sizes": (0, 2), "dim": 0, "op": "sum"},
        tensor="tensor int_tensor bool_tensor",
        dim="minus_one true",
    )
    row(
        "differentiable.reduce_scatter_v",
        differentiable.reduce_scatter_v,
        {"tensor": x, "comm": comm, "sizes": (0, 2), "dim": 0, "op": "sum"},
        tensor="tensor int_tensor bool_tensor requires_grad",
        dim="minus_one true",
    )
    row(
        "all_to_all",
        m.all_to_all,
        {"tensor": x, "comm": comm, "split_dim": 0, "concat_dim": 1},
        tensor="tensor",
        split_dim="minus_one true",
        concat_dim="minus_one true",
    )
    row(
        "differentiable.all_to_all",
        differentiable.all_to_all,
        {"tensor": x, "comm": comm, "split_dim": 0, "concat_dim": 1},
        tensor="tensor requires_grad",
        split_dim="minus_one true",
        concat_dim="minus_one true",
    )
    row(
        "all_to_all_v",
        m.all_to_all_v,
        {"flat": f, "comm": comm, "send_sizes": (1, 1), "recv_sizes": (1, 1)},
        flat="int_tensor bool_tensor",
    )
    row(
        "differentiable.all_to_all_v",
        differentiable.all_to_all_v,
        {"flat": f, "comm": comm, "send_sizes": (1, 1), "recv_sizes": (1, 1)},
        flat="int_tensor bool_tensor",
    )
    row(
        "broadcast",
        m.broadcast,
        {"tensor": x, "comm": comm, "src": 0},
        tensor="tensor int_tensor bool_tensor empty scalar",
        src="true",
    )
    row(
        "differentiable.broadcast",
        differentiable.broadcast,
        {"tensor": x, "comm": comm, "src": 0},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad",
        src="true",
    )
    row(
        "gather",
        m.gather,
        {"tensor": x, "comm": comm, "dst": 0},
        tensor="tensor int_tensor bool_tensor empty scalar",
        dst="true",
    )
    row(
        "differentiable.gather",
        differentiable.gather,
        {"tensor": x, "comm": comm, "dst": 0},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad",
        dst="true",
    )
    row(
        "permute",
        m.permute,
        {"tensor": x, "comm": comm, "targets": [1, 0]},
        tensor="tensor int_tensor bool_tensor empty scalar",
        targets="range",
    )
    row(
        "differentiable.permute",
        differentiable.permute,
        {"tensor": x, "comm": comm, "targets": [1, 0]},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad",
        targets="range",
    )
    row(
        "scatter",
        from_this_rank(m.scatter),
        {"tensors": [x, x], "comm": comm, "src": 0, "out": torch.ones(2, 2)},
        out="tensor",
        src="true",
    )
    row(
        "differentiable.scatter",
        from_this_rank(differentiable.scatter),
        {"tensor": x, "comm": comm, "src": 0},
        tensor="tensor int_tensor bool_tensor requires_grad",
        src="true",
    )
    row(
        "differentiable.all_reduce_replicated",
        differentiable.all_reduce_replicated,
        {"tensor": x, "comm": comm},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad",
    )
    row(
        "differentiable.sum_gradients",
        differentiable.sum_gradients,
        {"tensor": x, "comm": comm},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad",
    )
    row(
        "all_reduce_",
        all_reduce_,
        {"tensor": x, "comm": comm, "op": "sum"},
        tensor="tensor int_tensor bool_tensor empty scalar",
    )
    row(
        "all_reduce_coalesced",
        m.all_reduce_coalesced,
        {"tensors": [x, f], "comm": comm, "op": "sum"},
        tensors="list tuple list_of_tensor",
    )
    row(
        "all_gather_coalesced",
        m.all_gather_coalesced,
        {"tensors": [x, f], "comm": comm, "dim": 0},
        tensors="list tuple list_of_tensor",
        dim="minus_one",
    )
    row(
        "reduce_scatter_coalesced",
        m.reduce_scatter_coalesced,
        {"tensors": [x, f], "comm": comm, "dim": 0, "op": "sum"},
        tensors="list tuple list_of_tensor",
        dim="minus_one",
    )
    row(
        "all_to_all_blocks",
        m.all_to_all_blocks,
        {"blocks": [[f], [f]], "comm": comm, "out": [[f.clone()], [f.clone()]]},
    )
    row(
        "pack_blocks",
        pack_blocks,
        {"blocks": [f, x], "like": x},
        blocks="list tuple list_of_tensor list_of_requires_grad",
        like="none tensor int_tensor bool_tensor empty scalar requires_grad sparse",
    )
    row(
        "unpack_blocks",
        unpack_blocks,
        {"flat": torch.ones(4), "out": [torch.ones(2), torch.ones(2)]},
        out="list_of_tensor",
    )
    row(
        "check_replicas",
        m.check_replicas,
        {"tensor": x, "comm": comm, "what": "x"},
        tensor="tensor int_tensor bool_tensor empty scalar requires_grad dict",
        what="text no_text",
    )


def _meshes(row: _Table, two: m.DeviceMesh) -> None:
    row("comm_over", comm_over, {"ranks": (0, 1), "name": "r"}, ranks="range", name="text no_text")
    row(
        "init_device_mesh",
        m.init_device_mesh,
        {
            "device_type": "cpu",
            "mesh_shape": (1, 2),
            "mesh_dim_names": ("a", "b"),
            "backend_override": {0: "fake"},
            "validate": True,
            "lazy": False,
        },
        device_type="device",
        mesh_shape="int_tensor bool_tensor",
        mesh_dim_names="none names",
        backend_override="none dict",
        validate="true",
        lazy="true",
    )
    row(
        "abstract_mesh",
        m.abstract_mesh,
        {"shape": (1, 2), "names": ("a", "b"), "rank": 0, "device_type": "cpu", "connect": None},
        shape="int_tensor bool_tensor",
        names="none names",
        rank="three million true",
        device_type="device",
        connect="none function type reduce_op",
    )
    row(
        "DeviceMesh",
        m.DeviceMesh,
        {"device_type": "cpu", "mesh": [[0, 1]], "mesh_dim_names": ("a", "b"), "backend_override": {0: "fake"}},
        device_type="device",
        mesh="nested",
        mesh_dim_names="none names",
        backend_override="none dict",
    )
    row(
        "DeviceMesh.from_group",
        m.DeviceMesh.from_group,
        {"group": dist.group.WORLD, "device_type": "cpu", "mesh": [0, 1], "mesh_dim_names": ("a",)},
        group="group",
        device_type="device",
        mesh="none range",
        mesh_dim_names="none text",
    )
    row("mesh[]", two.__getitem__, {"axes": "a"}, axes="minus_one names true range")
    row("mesh.comm", two.comm, {"axes": "a"}, axes="minus_one names true range reduce_op")
    row("mesh.get_group", two.get_group, {"mesh_dim": "a"}, mesh_dim="minus_one names true range reduce_op")
    row(
        "mesh.flatten",
        flatten,
        {"name": "f", "backend_override": None},
        name="none text no_text",
        backend_override="none",
    )
    row(
        "mesh.unflatten",
        two.unflatten,
        {"dim": "b", "sizes": (2, 1), "names": ("c", "d"), "backend_override": None},
        dim="minus_one true",
        backend_override="none dict",
    )
    row("mesh.concatenate", two.concatenate, {"meshes": [two["a"], two["b"]]}, meshes="mesh_alone")
    row("mesh.get_all_submeshes", two.get_all_submeshes, {"axes": "a"}, axes="minus_one names true range")
    row("mesh.axis_index", two.axis_index, {"axis": "a"}, axis="minus_one true")
    row("mesh.size", two.size, {"mesh_dim": "a"}, mesh_dim="none minus_one true")
    row("mesh.rank_at", two.rank_at, {"coordinate": (0, 1)}, coordinate="zeros range generator")
    row("mesh.coordinate_of", two.coordinate_of, {"rank": 0}, rank="three minus_one million true")
    row(
        "mesh.ranks_along",
        two.ranks_along,
        {"axes": "a", "coordinate": (0, 0)},
        axes="minus_one names true range",
        coordinate="none zeros range generator",
    )
    row("mesh.get_local_rank", two.get_local_rank, {"mesh_dim": "a"}, mesh_dim="minus_one true")


def _others(row: _Table, two: m.DeviceMesh, comm: Comm, folder: Path) -> None:
    mode = m.CommDebugMode()
    row(
        "Link",
        m.Link,
        {"latency": 1.0, "bandwidth": 1.0},
        latency="three million float true",
        bandwidth="three million float true",
    )
    row("Link.seconds", m.Link(1.0, 1.0).seconds, {"nbytes": 1}, nbytes="three minus_one million float nan true")
    row("Topology", Topology, {"links": (m.Link(1.0, 1.0),)}, links="tuple")
    row("Topology.over", Topology((m.Link(1.0, 1.0),)).over, {"axes": (0,)}, axes="zeros")
    row("Topology[]", Topology((m.Link(1.0, 1.0),)).__getitem__, {"axis": 0}, axis="minus_one")
    row("topology_of", m.topology_of, {"mesh": two}, mesh="mesh")
    row("set_topology", m.set_topology, {"mesh": two, "topology": None}, mesh="mesh", topology="none")
    row(
        "measure_topology",
        measure,
        {"mesh": two, "largest": 128, "repeats": 1},
        mesh="mesh",
        largest="million",
        repeats="three million true",
    )
    row("observe", observe_and_stop, {"observer": testing})
    row("unobserve", unobserve, {"observer": testing})
    row("purpose", m.purpose, {"text": "x"}, text="text no_text function type reduce_op")
    row("lockstep", open_lockstep, {"timeout": 1.0}, timeout="three million float true")
    row(
        "BackendChoice",
        BackendChoice,
        {"backend": "gloo", "options": None},
        backend="none text no_text",
        options="none",
    )
    row("constant_when_compiled", constant_when_compiled, {"cls": None})
    row("CommDebugMode.table", mode.generate_comm_debug_tracing_table, {"noise_level": 1}, noise_level="three true")
    row(
        "CommDebugMode.json",
        mode.generate_json_dump,
        {"file_name": str(folder / "a"), "noise_level": 1},
        file_name="text",
        noise_level="three true",
    )
    row(
        "CommDebugMode.log",
        mode.log_comm_debug_tracing_table_to_file,
        {"file_name": str(folder / "a"), "noise_level": 1},
        file_name="text",
        noise_level="three true",
    )
    row(
        "on_ranks",
        testing.on_ranks,
        {"size": 2, "timeout": 1.0},
        size="three million true",
        timeout="none three million float true",
    )
    row("rank_pool", testing.rank_pool, {"size": 2}, size="three million true")
    row(
        "RankPool",
        testing.RankPool,
        {"size": 2, "backend": "gloo"},
        size="three million true",
        backend="none text no_text",
    )
    row("RankPool.run", run_on_one_rank, {"function": None}, function="function type reduce_op")
    row("launch", launch, {"fn": list, "nprocs": 2}, fn="type function reduce_op", nprocs="none")
    row("skip_unless_gpus", testing.skip_unless_gpus, {"count": 1}, count="three minus_one million true")
    row("skip_unless_backend", testing.skip_unless_backend, {"name": "gloo"}, name="text no_text")
    row("with_comms", testing.with_comms, {"body": len}, body="function type reduce_op")
