"""Lowered modules pass the checker of plain SPMD code, with the right types.

Covers: declared_types.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowering_cases import CASES
from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import I, P, R, ShardType as S, spmd
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import (
    ColwiseParallel,
    LatentProjection,
    PackedColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    local_parameters,
    loss_parallel,
    parallelize_module,
)
from shoal_tp_styles.lowering import collective_functions as moves


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def typed(mesh: DeviceMesh, kind: object, *shape: int) -> Tensor:
    tensor = torch.randn(shape, requires_grad=True)
    spmd.assert_tensor_type(tensor, {"tp": kind})  # type: ignore[dict-item]  # a type
    return tensor


def type_over(tensor: Tensor, mesh: DeviceMesh) -> object:
    found = spmd.type_of(tensor)
    assert found is not None
    return found.by_axis[spmd.normalize_axis("tp")]


def test_a_block_of_linears_takes_and_returns_invariant_activations(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        x = typed(mesh, I, 4, 16)
        hidden = block[0](x)
        assert type_over(hidden, mesh) is S(1)
        assert type_over(block[2](block[1](hidden)), mesh) is I
        # three readers of one activation share a reduction
        assert type_over(block(x) + block(x), mesh) is I
        with pytest.raises(SpmdTypeError, match="source type is I"):
            block(typed(mesh, R, 4, 16))
        with pytest.raises(SpmdTypeError, match=r"source type is S\(1\)"):
            block[2](typed(mesh, S(0), 4, 8))


def test_sequence_parallelism_has_shards_between_the_linears(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16))
    plan = {
        "0": SequenceParallel(sequence_dim=0, use_local_output=True),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(block, mesh, plan)
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        normed = block[0](typed(mesh, S(0), 8, 16))
        assert type_over(normed, mesh) is S(0)
        assert type_over(block[1](normed), mesh) is S(1)
        assert type_over(block(normed), mesh) is S(0)


def test_inputs_that_are_passed_by_name_give_outputs_their_types(mesh: DeviceMesh) -> None:
    norm = parallelize_module(nn.RMSNorm(8), mesh, SequenceParallel(use_local_output=True))
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        assert type_over(norm(input=typed(mesh, S(1), 2, 6, 8)), mesh) is S(1)


def test_styled_modules_that_draw_keep_their_types(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16), nn.Dropout(0.5))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        assert type_over(block(typed(mesh, I, 4, 16)), mesh) is I
        with pytest.raises(SpmdTypeError, match="source type is I"):
            block(typed(mesh, R, 4, 16))


def test_norms_keep_any_shard_of_tokens(mesh: DeviceMesh) -> None:
    norm = parallelize_module(nn.RMSNorm(8), mesh, SequenceParallel(use_local_output=True))
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        heads = norm(typed(mesh, S(2), 2, 6, 4, 8))
        assert type_over(heads, mesh) is S(2)
        assert type_over(norm(typed(mesh, S(0), 2, 6, 4, 8)), mesh) is S(0)
        # features belong to one token
        with pytest.raises(SpmdTypeError, match=r"is S\(3\) .* source type is S\(1\)"):
            norm(typed(mesh, S(3), 2, 6, 4, 8))
        with pytest.raises(SpmdTypeError, match=r"is I .* source type is S\(1\)"):
            norm(typed(mesh, I, 2, 6, 4, 8))


def test_a_latent_projection_has_two_kinds_of_features(mesh: DeviceMesh) -> None:
    down = parallelize_module(nn.Linear(16, 12), mesh, LatentProjection(rotary=4))
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        out = down(typed(mesh, I, 2, 6, 16))
        assert repr(type_over(out, mesh)) == "I[0:8] R[8:12] along dim 2"
        latent, rotary = torch.split(out, [8, 4], -1)
        assert type_over(latent, mesh) is I
        assert type_over(rotary, mesh) is R
        heads = rotary.unsqueeze(1).expand(-1, 3, -1, -1) * typed(mesh, S(1), 2, 3, 6, 4)
        assert type_over(heads, mesh) is S(1)
        with pytest.raises(SpmdTypeError, match="would mix them"):
            down(typed(mesh, I, 2, 6, 16)).sum(-1)


def test_a_packed_projection_has_a_shard_of_each_block(mesh: DeviceMesh) -> None:
    gate_and_up = nn.Linear(16, 48)
    plan = PackedColwiseParallel(blocks={"gate": 32, "up": 16})
    parallelize_module(gate_and_up, mesh, plan)
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        out = gate_and_up(typed(mesh, I, 4, 16))
        assert repr(type_over(out, mesh)) == "S(1)[0:8] S(1)[8:12] along dim 1"
        gate, up = torch.split(out, [8, 4], -1)
        assert type_over(gate, mesh) is S(1)
        assert type_over(up, mesh) is S(1)
        with pytest.raises(SpmdTypeError, match="shards of different tensors"):
            torch.softmax(out, -1)


def test_a_plain_output_of_a_dtensor_has_the_type_of_its_layout(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    parallelize_module(block, mesh, plan)
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        assert type_over(block(typed(mesh, I, 4, 16)), mesh) is I


@pytest.mark.parametrize("grad", [True, False])
def test_a_prepared_input_is_a_shard(grad: bool, mesh: DeviceMesh) -> None:
    style = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    )
    module = parallelize_module(KeepsTypeOfInput(), mesh, style)
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        x = typed(mesh, I, 2, 8)
        module(x.requires_grad_(grad))
        assert module.kind is S(1)


class KeepsTypeOfInput(nn.Module):
    """A module that keeps the type of its input."""

    kind: object = None

    def forward(self, x: Tensor) -> Tensor:
        found = spmd.type_of(x)
        self.kind = None if found is None else found.by_axis[spmd.normalize_axis("tp")]
        return x


def test_a_loss_on_dtensors_is_not_checked_inside(mesh: DeviceMesh) -> None:
    # shards of 4, 4, 4 and 1 classes, which do not have a type as plain tensors
    logits = distribute_tensor(torch.randn(6, 13), mesh, [Shard(1)], src_data_rank=None)
    targets = torch.randint(0, 13, (6,))
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False), loss_parallel():
        spmd.assert_tensor_type(targets, {"tp": I})
        loss = functional.cross_entropy(logits, targets)
    assert isinstance(loss, DTensor)


def test_dropout_keeps_the_type_of_shards_of_different_sizes(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.Linear(8, 10), nn.Dropout(0.5), nn.Linear(10, 8))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        assert type_over(block(typed(mesh, I, 4, 8)), mesh) is I


@pytest.mark.parametrize("name", CASES)
def test_no_lowering_raises_a_false_alarm(name: str, mesh: DeviceMesh) -> None:
    case = CASES[name]
    module = parallelize_module(case.make(), mesh, {case.path: case.style})
    full = torch.randn(case.input) if isinstance(case.input, tuple) else case.input
    dim = getattr(case.layout, "dim", None)
    x = full.clone() if dim is None else full.chunk(4, dim)[0].clone()
    # a prepared partial output of a module that returns its input
    is_partial = name in ("prepared output, reduced", "prepared output, scattered")
    kind = S(dim % x.ndim) if dim is not None else P if is_partial else I
    if x.is_floating_point():
        x.requires_grad_()
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        spmd.assert_tensor_type(x, {"tp": kind})
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                # on shards its gradient is partial, and whoever updates it sums it
                spmd.assert_tensor_type(parameter, {"tp": I if dim is None else R})
        out = module(x)
    first = out[0] if isinstance(out, tuple) else out
    assert isinstance(first, DTensor) or spmd.type_of(first) is not None


def test_tables_sharded_by_rows_and_by_columns(mesh: DeviceMesh) -> None:
    tables = nn.ModuleList([nn.Embedding(32, 8), nn.Embedding(32, 8)])
    parallelize_module(
        tables, mesh, {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()}
    )
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        tokens = torch.arange(6)
        spmd.assert_tensor_type(tokens, {"tp": I})
        assert type_over(tables[0](tokens), mesh) is I
        assert type_over(tables[1](tokens), mesh) is S(1)


def test_parameters_and_moves_of_custom_lowerings_have_types(mesh: DeviceMesh) -> None:
    linear = parallelize_module(nn.Linear(16, 32), mesh, RowwiseParallel())
    comm = mesh.comm("tp")
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        local = local_parameters({"weight": linear.weight, "bias": linear.bias})
        summed = local_parameters({"bias": linear.bias}, comm)["bias"]
        assert local["weight"] is not None
        assert local["bias"] is not None
        assert summed is not None
        assert type_over(local["weight"], mesh) is S(1)
        assert type_over(local["bias"], mesh) is I
        assert type_over(summed, mesh) is R
        assert type_over(moves.reduce(typed(mesh, P, 8, 4), comm), mesh) is I
        assert type_over(moves.scatter(typed(mesh, P, 8, 4), comm, 0), mesh) is S(0)
        assert type_over(moves.gather(typed(mesh, S(0), 8, 4), comm, 0), mesh) is I
        assert type_over(moves.split(typed(mesh, I, 8, 4), comm, 1), mesh) is S(1)
        with pytest.raises(SpmdTypeError, match="source type is P"):
            moves.reduce(typed(mesh, I, 8, 4), comm)


def test_local_tensors_of_dtensors_have_the_types_of_their_placements(mesh: DeviceMesh) -> None:
    linear = parallelize_module(nn.Linear(16, 32), mesh, ColwiseParallel())
    weight = linear.weight
    assert isinstance(weight, DTensor)
    with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
        assert type_over(weight.to_local(), mesh) is S(0)
        whole = weight.redistribute(placements=[Replicate()])
        assert type_over(whole.to_local(), mesh) is I
        assert type_over(whole.to_local(grad_placements=[Partial()]), mesh) is R
