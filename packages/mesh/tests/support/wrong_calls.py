"""Every public function with valid arguments, and the values to put in their place.

It also has the values that a function accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
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
    others |= {
        "object": object(),
        "function": lambda: 3,
        "type": int,
        "slice": slice(0, 1),
        "ellipsis": ...,
    }
    others |= {"text": "x", "no_text": "", "bytes": b"x", "exception": ValueError("x")}
    meshes: dict[str, Any] = {
        "torch_mesh": theirs,
        "torch_mesh_pair": (theirs, 0),
        "mesh": mesh,
        "mesh_and_9": (mesh, 9),
    }
    meshes |= {
        "mesh_and_none": (mesh, None),
        "mesh_alone": (mesh,),
        "comm": comm,
        "group": dist.group.WORLD,
    }
    tensors: dict[str, Any] = {
        "tensor": x,
        "int_tensor": torch.ones(2, dtype=torch.long),
        "bool_tensor": torch.ones(2, dtype=torch.bool),
    }
    tensors |= {"empty": torch.empty(0), "scalar": torch.tensor(1.0), "sparse": x.to_sparse()}
    tensors |= {"requires_grad": torch.ones(2, 2, requires_grad=True), "list_of_tensor": [x]}
    tensors |= {"list_of_requires_grad": [torch.ones(2, requires_grad=True)] * 2}
    tensors |= {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "reduce_op": dist.ReduceOp.SUM,
    }
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

    def __call__(
        self, name: str, function: Callable[..., object], /, **arguments: tuple[Any, str]
    ) -> None:
        """A function, and for each of its parameters what it takes.

        It also has the names of wrong values that are right.
        """
        accepted = {parameter: set(words.split()) for parameter, (_, words) in arguments.items()}
        operation: object = dist.ReduceOp.SUM
        # as in torch 2.11: there it passes for no function
        if not callable(operation):
            accepted = {
                p: words - {"reduce_op"} if "function" in words else words
                for p, words in accepted.items()
            }
        self.calls[name] = Call(
            function, {parameter: value for parameter, (value, _) in arguments.items()}, accepted
        )


def public_calls(mesh: m.DeviceMesh, comm: Comm, folder: Path) -> dict[str, Call]:
    """Every call by name; `mesh` is of shape (1, 2) with axes "a" and "b", `comm` has two ranks."""
    row = _Table()
    _collectives(row, comm)
    _meshes(row, mesh)
    _others(row, mesh, comm, folder)
    return row.calls


def _collectives(row: _Table, comm: Comm) -> None:
    x, f = torch.ones(2, 2), torch.ones(2)
    shaped = "tensor int_tensor bool_tensor"
    full = f"{shaped} empty scalar"
    arguments: dict[str, tuple[Any, str]] = {
        "comm": (comm, "comm"),
        "op": ("sum", ""),
        "dim": (0, "minus_one true"),
        "split_dim": (0, "minus_one true"),
        "concat_dim": (1, "minus_one true"),
        "flat": (f, "int_tensor bool_tensor"),
        "send_sizes": ((1, 1), ""),
        "recv_sizes": ((1, 1), ""),
        "src": (0, "true"),
        "dst": (0, "true"),
        "targets": ([1, 0], "range"),
    }
    tensors = {
        "all_reduce": full,
        "all_gather": full,
        "all_gather_v": shaped,
        "reduce_scatter": f"{shaped} empty",
        "reduce_scatter_v": shaped,
        "all_to_all": "tensor",
        "all_to_all_v": "",
        "broadcast": full,
        "gather": full,
        "permute": full,
        "all_reduce_replicated": full,
        "sum_gradients": full,
    }
    for name, accepted in tensors.items():
        arguments["sizes"] = ((0, 2) if name == "reduce_scatter_v" else (2, 3), "")
        for prefix, module, more in (
            ("", m, ""),
            ("differentiable.", differentiable, " requires_grad"),
        ):
            if function := getattr(module, name, None):
                every = arguments | {"tensor": (x, accepted + more)}
                row(
                    prefix + name,
                    function,
                    **{p: every[p] for p in signature(function).parameters if p in every},
                )
    row("all_reduce_", all_reduce_, tensor=(x, full), comm=(comm, "comm"), op=("sum", ""))
    src = (0, "true")
    out = (x.clone(), "tensor")
    row(
        "scatter",
        from_this_rank(m.scatter),
        tensors=([x, x], ""),
        comm=(comm, "comm"),
        src=src,
        out=out,
    )
    tensor = (x, f"{shaped} requires_grad")
    row(
        "differentiable.scatter",
        from_this_rank(differentiable.scatter),
        tensor=tensor,
        comm=(comm, "comm"),
        src=src,
    )
    lists = ([x, f], "list tuple list_of_tensor")
    dim = (0, "minus_one")
    row(
        "all_reduce_coalesced",
        m.all_reduce_coalesced,
        tensors=lists,
        comm=(comm, "comm"),
        op=("sum", ""),
    )
    row("all_gather_coalesced", m.all_gather_coalesced, tensors=lists, comm=(comm, "comm"), dim=dim)
    coalesced = m.reduce_scatter_coalesced
    row(
        "reduce_scatter_coalesced",
        coalesced,
        tensors=lists,
        comm=(comm, "comm"),
        dim=dim,
        op=("sum", ""),
    )
    into = ([[f.clone()], [f.clone()]], "")
    row(
        "all_to_all_blocks",
        m.all_to_all_blocks,
        blocks=([[f], [f]], ""),
        comm=(comm, "comm"),
        out=into,
    )
    blocks = ([f, x], "list tuple list_of_tensor list_of_requires_grad")
    row("pack_blocks", pack_blocks, blocks=blocks, like=(x, f"none {full} requires_grad sparse"))
    two = ([torch.ones(2), torch.ones(2)], "list_of_tensor")
    row("unpack_blocks", unpack_blocks, flat=(torch.ones(4), ""), out=two)
    replicas = (x, f"{full} requires_grad dict")
    row(
        "check_replicas",
        m.check_replicas,
        tensor=replicas,
        comm=(comm, "comm"),
        what=("x", "text no_text"),
    )


def _meshes(row: _Table, two: m.DeviceMesh) -> None:
    row("comm_over", comm_over, ranks=((0, 1), "range"), name=("r", "text no_text"))
    row(
        "init_device_mesh",
        m.init_device_mesh,
        device_type=("cpu", "device"),
        mesh_shape=((1, 2), "int_tensor bool_tensor"),
        mesh_dim_names=(("a", "b"), "none names"),
        backend_override=({0: "fake"}, "none dict"),
        validate=(True, "true"),
        lazy=(False, "true"),
    )
    row(
        "abstract_mesh",
        m.abstract_mesh,
        shape=((1, 2), "int_tensor bool_tensor"),
        names=(("a", "b"), "none names"),
        rank=(0, "three million true"),
        device_type=("cpu", "device"),
        connect=(None, "none function type reduce_op"),
    )
    row(
        "DeviceMesh",
        m.DeviceMesh,
        device_type=("cpu", "device"),
        mesh=([[0, 1]], "nested"),
        mesh_dim_names=(("a", "b"), "none names"),
        backend_override=({0: "fake"}, "none dict"),
    )
    row(
        "DeviceMesh.from_group",
        m.DeviceMesh.from_group,
        group=(dist.group.WORLD, "group"),
        device_type=("cpu", "device"),
        mesh=([0, 1], "none range"),
        mesh_dim_names=(("a",), "none text"),
    )
    row("mesh[]", two.__getitem__, axes=("a", "minus_one names true range"))
    row("mesh.comm", two.comm, axes=("a", "minus_one names true range reduce_op"))
    row("mesh.get_group", two.get_group, mesh_dim=("a", "minus_one names true range reduce_op"))
    row("mesh.flatten", flatten, name=("f", "none text no_text"), backend_override=(None, "none"))
    row(
        "mesh.unflatten",
        two.unflatten,
        dim=("b", "minus_one true"),
        sizes=((2, 1), ""),
        names=(("c", "d"), ""),
        backend_override=(None, "none dict"),
    )
    row("mesh.concatenate", two.concatenate, meshes=([two["a"], two["b"]], "mesh_alone"))
    row("mesh.get_all_submeshes", two.get_all_submeshes, axes=("a", "minus_one names true range"))
    row("mesh.axis_index", two.axis_index, axis=("a", "minus_one true"))
    row("mesh.size", two.size, mesh_dim=("a", "none minus_one true"))
    row("mesh.rank_at", two.rank_at, coordinate=((0, 1), "zeros range generator"))
    row("mesh.coordinate_of", two.coordinate_of, rank=(0, "three minus_one million true"))
    row(
        "mesh.ranks_along",
        two.ranks_along,
        axes=("a", "minus_one names true range"),
        coordinate=((0, 0), "none zeros range generator"),
    )
    row("mesh.get_local_rank", two.get_local_rank, mesh_dim=("a", "minus_one true"))


def _others(row: _Table, two: m.DeviceMesh, comm: Comm, folder: Path) -> None:
    mode = m.CommDebugMode()
    row(
        "Link",
        m.Link,
        latency=(1.0, "three million float true"),
        bandwidth=(1.0, "three million float true"),
    )
    row(
        "Link.seconds",
        m.Link(1.0, 1.0).seconds,
        nbytes=(1, "three minus_one million float nan true"),
    )
    row("Topology", Topology, links=((m.Link(1.0, 1.0),), "tuple"))
    row("Topology.over", Topology((m.Link(1.0, 1.0),)).over, axes=((0,), "zeros"))
    row("Topology[]", Topology((m.Link(1.0, 1.0),)).__getitem__, axis=(0, "minus_one"))
    row("topology_of", m.topology_of, mesh=(two, "mesh"))
    row("set_topology", m.set_topology, mesh=(two, "mesh"), topology=(None, "none"))
    row(
        "measure_topology",
        measure,
        mesh=(two, "mesh"),
        largest=(128, "million"),
        repeats=(1, "three million true"),
    )
    # on an axis of one rank, because all ranks of a fake world have equal tensors
    row(
        "check_distinct",
        m.check_distinct,
        tensor=(
            torch.ones(2),
            "tensor int_tensor bool_tensor empty scalar requires_grad dict",
        ),
        comm=((two, 0), ""),
        what=("x", "text no_text"),
    )
    row("observe", observe_and_stop, observer=(testing, ""))
    row("unobserve", unobserve, observer=(testing, ""))
    row("purpose", m.purpose, text=("x", "text no_text function type reduce_op"))
    row("lockstep", open_lockstep, timeout=(1.0, "three million float true"))
    row(
        "BackendChoice",
        BackendChoice,
        backend=("gloo", "none text no_text"),
        options=(None, "none"),
    )
    row("constant_when_compiled", constant_when_compiled, cls=(None, ""))
    row(
        "CommDebugMode.table", mode.generate_comm_debug_tracing_table, noise_level=(1, "three true")
    )
    row(
        "CommDebugMode.json",
        mode.generate_json_dump,
        file_name=(str(folder / "a"), "text"),
        noise_level=(1, "three true"),
    )
    row(
        "CommDebugMode.log",
        mode.log_comm_debug_tracing_table_to_file,
        file_name=(str(folder / "a"), "text"),
        noise_level=(1, "three true"),
    )
    row(
        "on_ranks",
        testing.on_ranks,
        size=(2, "three million true"),
        timeout=(1.0, "none three million float true"),
    )
    row("rank_pool", testing.rank_pool, size=(2, "three million true"))
    row(
        "RankPool",
        testing.RankPool,
        size=(2, "three million true"),
        backend=("gloo", "none text no_text"),
    )
    row("RankPool.run", run_on_one_rank, function=(None, "function type reduce_op"))
    row("launch", launch, fn=(list, "type function reduce_op"), nprocs=(2, "none"))
    row("skip_unless_gpus", testing.skip_unless_gpus, count=(1, "three minus_one million true"))
    row("skip_unless_backend", testing.skip_unless_backend, name=("gloo", "text no_text"))
    row("with_comms", testing.with_comms, body=(len, "function type reduce_op"))
