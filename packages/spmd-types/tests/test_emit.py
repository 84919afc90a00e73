"""Covers: emission/: programs that are emitted, checked and run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal_dtensor import DTensor, PartitionSpec, Shard, distribute_tensor, implicit_replication
from shoal_dtensor.errors import ArgumentTypeError, ArgumentValueError
from shoal_mesh import DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_spmd_types import (
    EmissionError,
    EmittedProgram,
    I,
    P,
    S,
    V,
    assert_type,
    emit,
    set_current_mesh,
    typecheck,
)

MESH = abstract_mesh((2,), ("tp",))


class ScaledResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x)))) * scale
        return out


class AttentionWithManyOutputs(nn.Module):
    """Heads, a buffer, a mask of numbers, a sum that waits, and several results."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> dict[str, Any]:
        parts = self.qkv(x).view(2, 6, 4, 6).transpose(1, 2).split([2, 2, 2], -1)
        q, k, v = parts
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        joined = heads.transpose(1, 2).reshape(2, 6, 8)
        positions = torch.arange(6)[None, :, None] / 10
        out = self.out(joined + positions)
        with torch.no_grad():
            size = out.abs().amax()
        return {"out": -out, "size": size, "nothing": None, "all": (out.relu(), 3)}


MLP_PLAN: dict[str, Any] = {
    "up.weight": {"tp": S(0)},
    "down.weight": {"tp": S(1)},
    "down": {"tp": I},
}
SEQUENCE_PLAN: dict[str, Any] = {**MLP_PLAN, "down": {"tp": S(1)}}


def of_mlp(plan: Any = MLP_PLAN, mesh: DeviceMesh = MESH, **options: Any) -> EmittedProgram:
    return emit(ScaledResidual(), plan, mesh, torch.zeros(2, 6, 8), **options)


def lines_of(program: EmittedProgram) -> list[str]:
    body = program.source.partition("without autocast")[2]
    return [line.strip() for line in body.splitlines()[1:] if line.strip()]


def test_the_lines_of_a_program() -> None:
    assert lines_of(of_mlp()) == [
        'norm = F.layer_norm(x, [8], weights["norm.weight"], weights["norm.bias"], 1e-05)'
        "  # f32[2, 6, 8] tp: I",
        'norm_r = convert(norm, "tp", src=I, dst=R)  # f32[2, 6, 8] tp: R',
        'up = F.linear(norm_r, weights["up.weight"])  # f32[2, 6, 8] tp: S(2)',
        "up = F.gelu(up)  # f32[2, 6, 8] tp: S(2)",
        'bias = convert(weights["down.bias"], "tp", src=I, dst=P, expert_mode=True)'
        "  # f32[8] tp: P",
        'down = F.linear(up, weights["down.weight"], bias)  # f32[2, 6, 8] tp: P',
        'down = all_reduce(down, "tp", src=P, dst=I)  # f32[2, 6, 8] tp: I',
        "down = down * 1.0  # f32[2, 6, 8] tp: I",
        "total = x + down  # f32[2, 6, 8] tp: I",
        "return total",
    ]


def test_sequence_parallelism_gathers_and_scatters() -> None:
    lines = lines_of(of_mlp(SEQUENCE_PLAN, input_types={"x": {"tp": S(1)}}))
    moves = [line.partition(" = ")[2].partition("  #")[0] for line in lines if "dst=" in line]
    assert moves == [
        'convert(weights["norm.weight"], "tp", src=I, dst=R)',
        'convert(weights["norm.bias"], "tp", src=I, dst=R)',
        'all_gather(norm, "tp", src=S(1), dst=R)',
        'convert(weights["down.bias"], "tp", src=I, dst=P, expert_mode=True)',
        'reduce_scatter(down, "tp", src=P, dst=S(1))',
    ]


def test_a_program_passes_the_checker_and_asserts_what_it_was_made_for() -> None:
    program = of_mlp()
    forward = program.load()
    assert str(program) == program.source

    def weights() -> dict[str, Tensor]:
        return {
            name: torch.empty(
                spec.local_shape, dtype=spec.dtype, device="meta", requires_grad=name != "x"
            )
            for name, spec in program.specs.items()
        }

    with set_current_mesh(MESH), typecheck(local=False):
        given = weights()
        x = given.pop("x")
        assert_type(forward(given, x), {"tp": I})
    wrong: list[tuple[str, dict[str, Tensor], DeviceMesh]] = [
        ("made for tp=2", {}, abstract_mesh((4,), ("tp",))),
        (r"x: made for \(2, 6, 8\)", {"x": torch.zeros(2, 5, 8)}, MESH),
        ("x: made for torch.float32", {"x": torch.zeros(2, 6, 8).double()}, MESH),
        ("x: made for one without", {"x": torch.zeros(2, 6, 8, requires_grad=True)}, MESH),
        (r"up.weight: made for \(8, 8\)", {"up.weight": torch.zeros(16, 8)}, MESH),
    ]
    for message, changes, mesh in wrong:
        given = {**weights(), **changes}
        x = given.pop("x")
        with set_current_mesh(mesh), pytest.raises(AssertionError, match=message):
            forward(given, x)
    given = weights()
    x = given.pop("x")
    with (
        set_current_mesh(MESH),
        pytest.raises(AssertionError, match="without autocast"),
        torch.autocast("cpu"),
    ):
        forward(given, x)
    scaled = emit(ScaledResidual(), MLP_PLAN, MESH, torch.zeros(2, 6, 8), scale=2.0).load()
    with set_current_mesh(MESH), pytest.raises(AssertionError, match=r"made for scale=2\.0"):
        scaled(given, x, scale=1.0)


def beside_dispatch(
    module: nn.Module,
    plan: dict[str, Any],
    mesh: DeviceMesh,
    x: Tensor,
    **options: Any,
) -> tuple[Any, Any]:
    """Return the results of a program and of dispatch on this rank, after comparing gradients."""
    program = emit(module, plan, mesh, x, **options)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers()), "x": x}
    placed: dict[str, Any] = {}
    for name, tensor in named.items():
        placements = program.specs[name].placements
        distributed = distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)
        placed[name] = distributed.requires_grad_(tensor.requires_grad)
    local = {}
    for name, distributed in placed.items():
        shard = distributed.detach().to_local().clone()
        local[name] = shard.requires_grad_(distributed.requires_grad)
    weights = {name: tensor for name, tensor in local.items() if name != "x"}
    with set_current_mesh(mesh):
        got = program.load()(weights, local["x"])
        loss(got).backward()
    handles = []
    for path, one in module.named_modules():
        if path in plan:
            handles.append(one.register_forward_hook(Placed(program, plan[path], mesh)))
    inputs = {name: tensor for name, tensor in placed.items() if name != "x"}
    with implicit_replication():
        expected = torch.func.functional_call(module, inputs, (placed["x"],))
        loss(expected).backward()
    for handle in handles:
        handle.remove()
    for name, tensor in local.items():
        grad = placed[name].grad
        assert (tensor.grad is None) == (grad is None), name
        if tensor.grad is not None:
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(tensor.grad, grad.to_local())
    return got, expected


class Placed:
    """A hook that redistributes the output of a module, as the plan says."""

    def __init__(self, program: EmittedProgram, types: dict[str, Any], mesh: DeviceMesh) -> None:
        from shoal_spmd_types import spmd_type_to_dtensor_placement as placement

        self.placements = [placement(types.get(name, I)) for name in mesh.axis_names]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output.redistribute(placements=self.placements)


def loss(result: Any) -> Any:
    out = result["out"] if isinstance(result, dict) else result
    return out.square().sum()


def check_bits(got: Tensor, expected: Any) -> None:
    assert torch.equal(got, expected.to_local() if isinstance(expected, DTensor) else expected)


@on_ranks(2)
def test_programs_have_the_bits_of_dispatch_and_its_gradients() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(2, 6, 8, dtype=torch.double, requires_grad=True)
    plans: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (MLP_PLAN, {}),
        ({**MLP_PLAN, "norm": {"tp": S(1)}}, {}),
        (SEQUENCE_PLAN, {"x": {"tp": S(1)}}),
        ({}, {"x": {"tp": S(0)}}),
    ]
    for plan, types in plans:
        torch.manual_seed(1)
        module = ScaledResidual().double()
        check_bits(*beside_dispatch(module, plan, mesh, x, input_types=types))
    torch.manual_seed(2)
    plan = {
        "qkv.weight": {"tp": S(0)},
        "qkv.bias": {"tp": S(0)},
        "out.weight": {"tp": S(1)},
        "out": {"tp": I},
    }
    got, expected = beside_dispatch(AttentionWithManyOutputs().double(), plan, mesh, x)
    assert got.keys() == {"out", "size", "all"}
    check_bits(got["out"], expected["out"])
    check_bits(got["size"], expected["size"])
    check_bits(got["all"][0], expected["all"][0])
    assert not got["size"].requires_grad
    assert got["all"][1] == 3


@on_ranks(4)
def test_programs_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(2, 6, 8, dtype=torch.double, requires_grad=True)
    torch.manual_seed(1)
    module = ScaledResidual().double()
    types: dict[str, Any] = {"x": {"dp": S(0)}}
    plan = {**MLP_PLAN, "down": {"dp": S(0)}}
    check_bits(*beside_dispatch(module, plan, mesh, x, input_types=types))


class Kept(nn.Module):
    """A result of a block without gradients, in the layout of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            kept = self.whole(x)
        return {"out": x * 2, "kept": kept}


def check_axes_of_one_rank(shape: tuple[int, ...]) -> None:
    """Compare programs with dispatch on a mesh with axes of one rank."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    x = torch.randn(2, 6, 8, dtype=torch.double, requires_grad=True)
    for plan, types in ((MLP_PLAN, {}), (SEQUENCE_PLAN, {"x": {"tp": S(1)}})):
        torch.manual_seed(1)
        module = ScaledResidual().double()
        check_bits(*beside_dispatch(module, plan, mesh, x, input_types=types))
    plan = {"qkv.weight": {"tp": S(0)}, "qkv.bias": {"tp": S(0)}, "out.weight": {"tp": S(1)}}
    got, expected = beside_dispatch(
        AttentionWithManyOutputs().double(), {**plan, "out": {"tp": I}}, mesh, x
    )
    check_bits(got["out"], expected["out"])
    check_bits(got["size"], expected["size"])
    types = {"x": {"tp": S(1)}}
    got, expected = beside_dispatch(Kept(), {"whole": {"tp": I}}, mesh, x, input_types=types)
    check_bits(got["kept"], expected["kept"])
    assert not got["kept"].requires_grad
    assert not expected["kept"].requires_grad


@on_ranks(1)
def test_programs_on_one_rank() -> None:
    check_axes_of_one_rank((1,))


@on_ranks(2)
def test_programs_on_an_axis_of_one_rank_beside_another() -> None:
    check_axes_of_one_rank((2, 1))


def test_lines_on_one_rank_have_no_collectives() -> None:
    lines = lines_of(of_mlp(SEQUENCE_PLAN, abstract_mesh((1,), ("tp",))))
    assert lines[0].endswith(", 1e-05)  # f32[2, 6, 8]")
    assert not any("dst=" in line for line in lines)


def test_layouts_are_types_specs_or_placements() -> None:
    module = nn.Linear(8, 4, bias=False)
    layouts = ({"tp": S(0)}, {"tp": S(-2)}, PartitionSpec("tp"), [Shard(0)])
    plans: list[dict[str, Any]] = [{"*": layout} for layout in layouts]
    texts = {emit(module, plan, MESH, torch.zeros(2, 8)).source for plan in plans}
    assert len(texts) == 1


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


class Assembled(nn.Module):
    """Keys of heads, of parts that are written to their places as in latent attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(8, 24, bias=False)
        self.shared = nn.Linear(8, 2)
        self.out = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        own = self.heads(x).view(2, 6, 4, 6).transpose(1, 2)
        shared = self.shared(x).view(2, 1, 6, 2)
        keys = own.new_empty(2, 4, 6, 8)
        keys[..., :6] = own
        keys[..., 6:] = shared
        keys[:, :, 0].mul_(2)
        keys.tanh_()
        rest = keys[..., 2:]
        out: Tensor = self.out(rest.transpose(1, 2).reshape(2, 6, 24))
        return out


ASSEMBLED_PLAN: dict[str, Any] = {
    "heads.weight": {"tp": S(0)},
    "out.weight": {"tp": S(1)},
    "out": {"tp": I},
}


def test_writes_in_place_are_operators_that_return_new_tensors() -> None:
    program = emit(Assembled(), ASSEMBLED_PLAN, MESH, torch.zeros(2, 6, 8))
    assert "copy_" not in program.source
    assert "slice_scatter(" in program.source
    assert "select_scatter(" in program.source
    # a write whose values no result reads is left out
    assert "zero" not in emit(Overwritten(), {}, MESH, torch.zeros(2, 8)).source


@on_ranks(2)
def test_programs_without_writes_have_the_bits_of_programs_that_write() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8, requires_grad=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    check_bits(*beside_dispatch(Assembled(), ASSEMBLED_PLAN, mesh, x))
    check_bits(*beside_dispatch(Masks(), {}, mesh, x.detach().requires_grad_()))


class Overwritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 3
        unread = torch.ones_like(x)
        unread.zero_()
        return x


class Masks(nn.Module):
    """A mask that is written by indices, and numbers of another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        best = x.topk(2, -1).indices
        mask = torch.zeros_like(x).scatter_(-1, best, 1)
        counted = torch.zeros(2, 6, 8, dtype=torch.int64)
        counted[:, 1:3].fill_(2)
        counted[1] = best[1, :, :1]
        out = x * mask
        out += counted
        return out


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:1].mul_(2)
        return x


class WritesBuffer(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class WritesTransposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x.transpose(0, 1).mul_(2)
        return x


class AssignsNumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x[0] = 2.5
        return x


class ReadsViewOfWritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        view = x[:1]
        x.mul_(2)
        return view * 1


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = [torch.ones(8)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table[0]


class ReturnsAnObject(nn.Module):
    def forward(self, x: Tensor) -> object:
        return {x}


class TakesConstants(nn.Module):
    def forward(self, constants: Tensor, _constants: float = 2.0) -> Tensor:
        return constants * _constants + torch.ones(2, 8).tril()


class TakesTensor(nn.Module):
    def forward(self, tensor: Tensor, x: Tensor) -> Tensor:
        return tensor - x


def test_arguments_do_not_take_names_of_the_file() -> None:
    x = torch.ones(2, 8)
    program = emit(TakesConstants(), {}, MESH, x, _constants=3.0)
    with set_current_mesh(MESH):
        assert torch.equal(program.load()({}, x, _constants=3.0), TakesConstants()(x, 3.0))
    with pytest.raises(EmissionError, match="uses the name 'tensor'"):
        emit(TakesTensor(), {}, MESH, x, x)


class TakesAll(nn.Module):
    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0]


def test_what_no_program_is_written_for() -> None:
    x = torch.zeros(2, 8)
    refused: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("dropout to 0", nn.Dropout(), {}),
        ("writes in place to the input x", WritesInput(), {}),
        ("writes in place to the weight or buffer count", WritesBuffer(), {}),
        ("a view made by aten.transpose", WritesTransposed(), {}),
        (r"write x\[...\].fill_\(number\)", AssignsNumber(), {}),
        ("take the view after the write", ReadsViewOfWritten(), {}),
        ("register it as a buffer", Remembers(), {}),
        ("returns a set", ReturnsAnObject(), {}),
        ("does not divide", nn.Linear(8, 3), {"weight": {"tp": S(0)}}),
        ("differ between ranks", nn.Embedding(4, 8), {"weight": {"tp": S(0)}}),
    ]
    for message, module, plan in refused:
        given = torch.zeros(2, dtype=torch.int64) if isinstance(module, nn.Embedding) else x
        with pytest.raises(EmissionError, match=message):
            emit(module, plan, MESH, given)
    with pytest.raises(EmissionError, match="reads values"):
        emit(ReadsValues(), {}, MESH, x)
    with pytest.raises(EmissionError, match="no typed collective"):
        mesh = abstract_mesh((2, 2), ("dp", "tp"))
        types = {"input": {"dp": P, "tp": P}}
        emit(nn.Identity(), {"": {"dp": I, "tp": I}}, mesh, x, input_types=types)
    with pytest.raises(ArgumentValueError, match="matches no parameter"):
        emit(nn.Linear(8, 4), {"wieght": {"tp": S(0)}}, MESH, x)
    with pytest.raises(ArgumentValueError, match="not a tensor argument"):
        emit(nn.Linear(8, 4), {}, MESH, x, input_types={"x": {"tp": S(0)}})
    with pytest.raises(ArgumentValueError, match="not V"):
        emit(nn.Linear(8, 4), {"weight": {"tp": V}}, MESH, x)
    with pytest.raises(ArgumentTypeError, match="by name"):
        emit(TakesAll(), {}, MESH, x)
