"""Functions of DTensors under torch.compile.

Covers: _torch/{compiling,compiled_gradients}.py, and what torch.compile asks of tensor/dtensor.py.

Every function compiles into one graph, gives what it gives eagerly, and so do its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import compiled_autograd

import shoal_dtensor as sd
from shoal_dtensor import (
    DTensor,
    Partial,
    PartitionSpec,
    Replicate,
    Shard,
    distribute_tensor,
    local_map,
)
from shoal_dtensor.errors import MixedTensorError
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

Function = Callable[[Any, DeviceMesh], Any]

TRACED = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)


def crossing(x: Tensor, mesh: DeviceMesh) -> Any:
    whole: Any = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    return (whole * 2).to_local()


def doubled(x: Tensor, mesh: DeviceMesh) -> Any:
    return local_map(lambda part: part * 2, out_placements=[Shard(0)], in_placements=([Shard(0)],))(
        x
    )


def looking(x: Any, mesh: DeviceMesh) -> Any:
    """Meshes, placements and specs are constants that code may ask."""
    cut = x.placements == (Shard(0),) and x.placements[0].is_shard(0) and isinstance(x, DTensor)
    known = (
        x.device_mesh.size() * mesh.ndim
        + mesh.shape[0]
        + mesh["tp"].get_local_rank()
        + mesh.comm("tp").size
    )
    return x * known if cut and (x * 2)._spec.even and x._spec.local_shape[0] else x


def redistribute_on_own_mesh(x: Any, mesh: DeviceMesh) -> Any:
    return (x + 1).redistribute((x * 2).device_mesh, [Shard(1)])


def redistribute_in_other_dtypes(x: Any, mesh: DeviceMesh) -> Any:
    return x.redistribute(
        placements=[Replicate()], forward_dtype=torch.float64, backward_dtype=torch.float32
    )


def redistribute_asynchronously(x: Any, mesh: DeviceMesh) -> Any:
    return x.redistribute(placements=[Replicate()], async_op=True) + 1


ON_DTENSORS: dict[str, Function] = {
    "operators": lambda x, mesh: (x @ x.t()).relu(),
    "redistribute": lambda x, mesh: x.redistribute(placements=[Replicate()]) * 2,
    "redistribute on a mesh": lambda x, mesh: (x + 1).redistribute(mesh, [Shard(1)]),
    "redistribute of a mesh asked for": redistribute_on_own_mesh,
    "redistribute by dims": lambda x, mesh: x.redistribute(placements=PartitionSpec(None, "tp")),
    "redistribute in other dtypes": redistribute_in_other_dtypes,
    "redistribute asynchronously": redistribute_asynchronously,
    "to_local": lambda x, mesh: (x * 2).to_local(),
    "full_tensor": lambda x, mesh: (x * 2).full_tensor(),
    "gradient placements": lambda x, mesh: x.full_tensor(grad_placements=[Partial()]),
    "a partial result": lambda x, mesh: x.sum(0),
    "constants": looking,
    "local_map": doubled,
    "factories": lambda x, mesh: x + sd.full((8, 4), 2.0, device_mesh=mesh, placements=[Shard(0)]),
    "random factories": lambda x, mesh: x + sd.rand(8, 4, device_mesh=mesh, placements=[Shard(0)]),
    "rows": lambda x, mesh: sum(row for row in x),
}


def from_local_of_a_shape(x: Any, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(x, mesh, [Shard(0)], shape=(8, 4), stride=(4, 1))


ON_TENSORS: dict[str, Function] = {
    "crossing": crossing,
    "from_local": lambda x, mesh: DTensor.from_local(x, mesh, [Shard(0)]) * 2,
    "from_local by dims": lambda x, mesh: DTensor.from_local(x, mesh, PartitionSpec(None, "tp")),
    "from_local of a shape": from_local_of_a_shape,
    "distribute_tensor": lambda x, mesh: sd.distribute_tensor(x.detach(), mesh, [Shard(0)]),
}


def run(function: Callable[[Tensor], Any], x: Tensor, grad: bool) -> list[Any]:
    """Result and gradient, as global tensors, and how they lie."""
    leaf = x.detach().clone().requires_grad_(grad)
    torch.manual_seed(3)
    result = function(leaf)
    found = [result.detach()]
    if result.requires_grad:
        result.square().sum().backward()
        found.append(leaf.grad)
    return [
        [list(map(hash, t.placements)), t.full_tensor()] if isinstance(t, DTensor) else t
        for t in found
    ]


def check(name: str, function: Function, x: Tensor, mesh: DeviceMesh, backend: str) -> None:
    for grad in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(lambda t: function(t, mesh), backend=backend, fullgraph=True)
        expected = run(lambda t: function(t, mesh), x, grad)
        torch.testing.assert_close(
            run(compiled, x, grad),
            expected,
            msg=lambda text: f"{name}, grad={grad}: {text}",  # noqa: B023  # called at once
        )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2, timeout=280)
def test_compiled_functions_equal_eager_ones(backend: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.linspace(-1, 1, 32).view(8, 4)
    x = sd.distribute_tensor(whole, mesh, [Shard(0)])
    for name, function in ON_DTENSORS.items():
        check(name, function, x, mesh, backend)
    for name, function in ON_TENSORS.items():
        check(name, function, whole[:4] + mesh.get_rank(), mesh, backend)


@TRACED
def test_one_graph_with_functional_collectives() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        compiled = torch.compile(lambda x: crossing(x, mesh), backend=backend, fullgraph=True)
        assert compiled(torch.ones(2, 3)).shape == (8, 3)
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
    assert len(calls) == 4, f"from_local, redistribute, mul, to_local: {calls}"


def test_the_mesh_of_a_block_is_not_seen_by_compiled_code() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        with mesh, pytest.raises(Exception, match="pass device_mesh"):
            torch.compile(
                lambda x: DTensor.from_local(x, placements=[Shard(0)]),
                backend="eager",
                fullgraph=True,
            )(torch.ones(2))


# a warning that is an error keeps torch from its cache
@pytest.mark.filterwarnings("ignore")
def test_ranks_share_no_graphs_through_the_cache_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank compiles is of that rank.

    The other would get its shard, as would the same rank in another mesh.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    # of no kernel that inductor would have to write and a compiler to build
    def program(x: Any) -> Any:
        return x.redistribute(placements=[Shard(0)]) @ x.t()

    for rank in range(2):
        torch._dynamo.reset()
        with fake_world(2, rank=rank):
            mesh = init_device_mesh("cpu", (2,))
            x = DTensor.from_local(torch.arange(32.0).view(8, 4), mesh, [Replicate()])
            compiled = torch.compile(program, fullgraph=True)(x)
            assert torch.equal(compiled.to_local(), program(x).to_local()), f"rank {rank}"


def convolve_transposed(x: Any) -> Any:
    return F.conv_transpose1d(x.t().unsqueeze(0), x.unsqueeze(-1).expand(5, 5, 3), padding=1)


# some ranks have nothing to add, some get nothing, and the last has no rows
UNLIKE: dict[str, Callable[..., Any]] = {
    "cumsum": lambda x: x.sum(1).cumsum(0),
    "logcumsumexp": lambda x: x.sum(1).logcumsumexp(0),
    "cummax": lambda x: x.sum(1).cummax(0)[0],
    "cat": lambda x: torch.cat([x, x * 2]),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1),
    "layer_norm": lambda x: F.layer_norm(x, (5, 5)),
    "linear": lambda x: F.linear(x, x, x[0]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "conv_transpose": convolve_transposed,
    "copy": lambda x: _copied(x * 1),
    "norm": lambda x: F.gelu(x.clamp(-1, 1)) * x.clamp(-1, 1).norm(dim=0),
    "kron": lambda x: torch.kron(x, x),
}


def _copied(x: Any) -> Any:
    x.narrow(0, 0, 1).copy_(x.narrow(0, 2, 1) * 2)
    return x


def several(x: Any, y: Any) -> list[Any]:
    x, y = x * 1, y * 1
    return [x, y, y.var(0), y.cumsum(0), (y != 0).sum().to(y.dtype), y - y.amax(0, keepdim=True)]


@TRACED
@on_ranks(4, timeout=200)
def test_inductor_keeps_the_order_of_collectives_where_ranks_need_other_memory() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    wholes = (
        torch.arange(6.0, dtype=torch.double).view(2, 3),
        torch.tensor([3.0, 4.0], dtype=torch.double),
    )
    x: Any = distribute_tensor(wholes[0], mesh, [Shard(1), Replicate()], src_data_rank=None)
    y: Any = distribute_tensor(wholes[1], mesh, [Shard(0), Shard(0)], src_data_rank=None)
    torch._dynamo.reset()
    # Scalar kernels compile faster, between the same collectives.
    fast = torch.compile(
        several, fullgraph=True, options={"fx_graph_cache": False, "cpp.simdlen": 1}
    )
    for got, expected in zip(
        fast(x.requires_grad_(), y.requires_grad_()), several(*wholes), strict=True
    ):
        torch.testing.assert_close(got.full_tensor(), expected)


class CapturedError(Exception):
    """The graphs are there; nothing is to be run."""


PARTITIONERS = ("default_partition", "min_cut_rematerialization_partition")


def graphs_of(program: Callable[..., Any], rank: int) -> list[list[str]]:
    """The collectives in a rank's forward and backward, as between GPUs.

    Compilers know them, and drop them.

    Forward and backward as the first partitioner splits the joint graph, then as the second one
    does.
    """
    # not while this file is collected: it takes seconds
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import partitioners

    graphs: list[list[str]] = []

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        for partitioner in PARTITIONERS:
            copied = torch.fx.GraphModule(joint, deepcopy(joint.graph))
            for part in getattr(partitioners, partitioner)(copied, inputs, **options):
                names = [
                    str(node.target) for node in part.graph.nodes if node.op == "call_function"
                ]
                graphs.append([name for name in names if "c10d" in name and "wait" not in name])
        raise CapturedError

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition)
    torch._dynamo.reset()
    with fake_world(4, rank=rank):
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(
            torch.ones(5, 5), mesh, [Shard(0)], src_data_rank=None
        ).requires_grad_()
        with pytest.raises(Exception, match="CapturedError"):
            torch.compile(program, backend=backend, fullgraph=True)(x)
    return graphs


@TRACED
# torch's, where graphs are copied
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("program", UNLIKE)
def test_ranks_that_compute_differently_have_the_same_collectives(program: str) -> None:
    first, *others = (graphs_of(UNLIKE[program], rank) for rank in range(4))
    assert len(first) == 2 * len(PARTITIONERS) and any(first[:2]) and any(first[2:]), (
        "it has collectives"
    )
    assert others == [first] * 3


@TRACED
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@on_ranks(4, timeout=200)
def test_ranks_that_compute_differently_meet(shape: tuple[int, ...]) -> None:
    """All programs in one graph: the ranks' collectives have one order from first to last."""

    def run_all(x: Any) -> list[Any]:
        return [program(x) for program in UNLIKE.values()]

    whole = torch.arange(25.0, dtype=torch.double).view(5, 5) / 9 - 1
    mesh = init_device_mesh("cpu", shape)
    torch._dynamo.reset()
    x: Any = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
    compiled = torch.compile(run_all, backend="aot_eager", fullgraph=True)
    leaf, one = x.requires_grad_(), whole.clone().requires_grad_()
    results = compiled(leaf), run_all(one)
    for name, got, expected in zip(UNLIKE, *results, strict=True):
        torch.testing.assert_close(
            got.full_tensor(),
            expected,
            msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]  # called at once
        )
    for outputs in results:
        sum((output * output).sum() for output in outputs).backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), one.grad)


@TRACED
@pytest.mark.parametrize("hooked", [False, True])
@on_ranks(2, timeout=100)
def test_compiled_backward_of_several_leaves(hooked: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def gradients(backward: Callable[[Tensor], object]) -> list[Tensor]:
        placements: tuple[Any, ...] = (Shard(0), Shard(0), Replicate(), Shard(1))
        leaves: list[Any] = [
            distribute_tensor((torch.arange(6.0).view(3, 2) + i) / 10, mesh, [p]).requires_grad_()
            for i, p in enumerate(placements)
        ]
        if hooked:
            leaves[1].register_hook(lambda grad: grad * 2)
        a, b, c, d = leaves
        backward(((a * b) @ c.t()).sum() + (a * b.sum(0) * d).sum())
        return [leaf.grad.full_tensor() for leaf in leaves]

    def compiled(loss: Tensor) -> None:
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            loss.backward()  # type: ignore[no-untyped-call]  # of torch

    eager = gradients(lambda loss: loss.backward())  # type: ignore[no-untyped-call]  # of torch
    torch.testing.assert_close(gradients(compiled), eager)


SEVERAL_OUTPUTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "two": lambda x: (x * 2, x + 1),
    "a replicated one": lambda x: (x * 2, x.redistribute(placements=[Replicate()]) * x),
    "a partial one": lambda x: (x * 2, x.sum(0)),
    "a local one": lambda x: (x * 2, (x * 3).to_local()),
    "a transposed one": lambda x: (x * 2, (x + 1).t()),
    "one of integers": lambda x: (x * 2, x.argmax(0), x.exp()),
    "views": lambda x: (x * 2, x.view(-1), x[0]),
}


@TRACED
@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in SEVERAL_OUTPUTS), ("a partial one", True)]
)
def test_compiled_outputs_that_the_loss_does_not_use(name: str, dynamic: bool) -> None:
    """Their gradient was a plain tensor of zeros, which the compiled code refused."""
    function = SEVERAL_OUTPUTS[name]
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.linspace(-1, 1, 8).view(4, 2)

        def gradient(run: Callable[[Any], Any], used: int) -> tuple[Tensor, set[str]]:
            leaf: Any = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
            loss = run(leaf)[used].sum()
            with CommDebugMode() as traffic:
                loss.backward()
            assert leaf.grad.placements == (Shard(0),)
            return leaf.grad.to_local(), {record.op for record in traffic.trace}

        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", dynamic=dynamic)
        for used in [0, -1]:
            expected, _ = gradient(function, used)
            got, collectives = gradient(compiled, used)
            torch.testing.assert_close(got, expected)
            # the ranks compare no zeros
            assert "all_reduce" not in collectives


@TRACED
def test_hooks_on_compiled_outputs_are_called() -> None:
    """A hook on an output was ignored.

    torch added it to those of a leaf, which the output no longer is.
    """
    with fake_world(2):
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        leaf: Any = x.requires_grad_()
        outputs: Any = torch.compile(lambda t: (t * 2, t * 3), backend="aot_eager")(leaf)
        outputs[0].register_hook(lambda grad: grad * 10)
        (outputs[0].sum() + outputs[1].sum()).backward()
        assert leaf.grad.to_local().tolist() == [23, 23]


@TRACED
@on_ranks(2, timeout=100)
def test_a_hook_gives_a_compiled_output_a_plain_gradient() -> None:
    """It counts as replicated if it is the same on all ranks, as it does eagerly."""
    mesh = init_device_mesh("cpu", (2,))
    for differs in (False, True):
        leaf: Any = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        output: Any = torch.compile(lambda t: t * 2, backend="aot_eager")(leaf)
        value = float(mesh.get_rank()) if differs else 3.0
        output.register_hook(lambda grad, value=value: torch.full((4,), value))
        if differs:
            with pytest.raises(MixedTensorError, match="values differ between the ranks"):
                output.sum().backward()
        else:
            output.sum().backward()
            assert leaf.grad.to_local().tolist() == [6, 6]
