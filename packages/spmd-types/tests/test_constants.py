"""Covers: emission/constants.py and _once.py: values of programs that are computed once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal_dtensor.internal import FakeTensorMode
from shoal_mesh import abstract_mesh
from shoal_spmd_types import EmittedProgram, computed_once, emit, set_current_mesh, typecheck

MESH = abstract_mesh((2,), ("tp",))


class MasksTwice(nn.Module):
    """Two layers that make the same mask, and a third that makes one of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for number in (1.0, 1.0, True):
            mask = torch.full((4, 4), number).tril()
            x = x @ mask.to(x.dtype)
        return x


class ReturnsPositions(nn.Module):
    """Results that are constants, a view of one, and none."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base = torch.arange(4)
        positions = base * 2
        return x + positions, positions, base.unsqueeze(0)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.arange(4), torch.rand(4) + torch.arange(4)


def constants_of(program: EmittedProgram) -> list[str]:
    """Return the statements of the function of constants, without comments."""
    body = program.source.partition("def constants")[2].partition("def forward")[0]
    lines = [line.partition("  #")[0].strip() for line in body.splitlines()[2:]]
    return [line for line in lines if line and not line.startswith("#")]


def test_equal_constants_are_one() -> None:
    program = emit(MasksTwice(), {}, MESH, torch.zeros(4, 4))
    statements = constants_of(program)
    # one for the two layers, and one for the layer of booleans
    assert sum(".tril()" in line for line in statements) == 2
    forward_text = program.source.partition("def forward")[2]
    assert "tril" not in forward_text
    assert "full(" not in forward_text
    x = torch.arange(16.0).view(4, 4)
    forward = program.load()
    module = MasksTwice()
    weights = dict(module.named_parameters())
    with set_current_mesh(MESH):
        for _ in range(2):
            assert torch.equal(forward(weights, x), module(x))


def test_a_result_is_not_kept() -> None:
    program = emit(ReturnsPositions(), {}, MESH, torch.zeros(4))
    assert "def constants" not in program.source
    forward = program.load()
    with set_current_mesh(MESH):
        _, positions, view = forward({}, torch.zeros(4))
        positions.zero_()
        view.zero_()
        total, positions, view = forward({}, torch.zeros(4))
    assert total.tolist() == [0, 2, 4, 6]
    assert positions.tolist() == [0, 2, 4, 6]
    assert view.tolist() == [[0, 1, 2, 3]]


def test_random_numbers_are_not_kept() -> None:
    program = emit(Draws(), {}, MESH, torch.zeros(4))
    assert constants_of(program) == ['arange = torch.arange(4, device="cpu")', "return arange"]
    forward = program.load()
    with set_current_mesh(MESH):
        _, first = forward({}, torch.zeros(4))
        _, second = forward({}, torch.zeros(4))
    assert not torch.equal(first, second)


class Counted:
    """A function of constants that counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> Tensor:
        self.runs += 1
        return torch.arange(3.0)


def counted() -> tuple[Counted, Callable[[], Tensor]]:
    function = Counted()
    return function, computed_once(lambda: function())


def test_constants_are_computed_at_the_first_call() -> None:
    function, constants = counted()
    assert function.runs == 0
    assert constants() is constants()
    assert function.runs == 1


def test_constants_of_one_run_are_not_kept() -> None:
    function, constants = counted()
    with FakeTensorMode():
        assert type(constants()) is not Tensor
    with set_current_mesh(MESH), typecheck(local=False):
        constants()
    assert function.runs == 2
    kept = constants()
    assert type(kept) is Tensor
    with FakeTensorMode():
        assert constants() is not kept
    assert constants() is kept
    assert function.runs == 4


def test_constants_of_inference_can_be_saved_for_a_backward() -> None:
    _, constants = counted()
    with torch.inference_mode():
        constants()
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((x * constants()).sum(), [x])
    assert gradient.tolist() == [0, 1, 2]


def test_compiled_programs_have_no_kept_tensors() -> None:
    constants = computed_once(lambda: torch.arange(3.0))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: F.relu(x) + constants(), backend=keep, fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [1, 2, 3]
    (graph,) = graphs
    assert "arange" in graph.code
