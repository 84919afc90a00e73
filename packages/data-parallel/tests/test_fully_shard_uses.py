"""`fully_shard` in uses beyond one forward, one backward and one step.

The tests run on real gloo ranks, against one device.

Covers: {unit_passes,unit_backward,fully_shard}.py.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from data_parallel_model import (
    Block,
    Fault,
    Model,
    backward_of_each,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    pickled,
    raising,
    same_gradients,
    same_weights,
    two_equal_models,
)
from shoal_data_parallel import (
    FSDPModule,
    LayoutError,
    StyleError,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
)
from shoal_data_parallel.units.unit import Forward, unit_of
from shoal_dtensor import (
    DTensor,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    full_tensor,
    implicit_replication,
)
from shoal_dtensor.errors import SecondOrderError
from shoal_dtensor.internal import local_shard
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import counts, on_ranks


def single_and_sharded(
    mesh: DeviceMesh, *, blocks: bool = True, root: bool = True, **options: Any
) -> tuple[Any, Any]:
    """A model on one device, and the same with these units."""
    plain, model = two_equal_models(lambda: Model(6, 2))
    for block in model.blocks if blocks else ():
        fully_shard(block, mesh["data"], **options)
    return plain, fully_shard(model, mesh["data"], **options) if root else model


# --- several modules and passes -------------------------------------------------------------------


@on_ranks(4)
def test_two_models_in_one_backward() -> None:
    mesh = mesh_of(4, 1)
    (plain, model), (other_plain, other) = single_and_sharded(mesh), single_and_sharded(mesh)
    tokens, targets = batch(0)
    (loss_of(plain, tokens, targets) + loss_of(other_plain, targets, tokens)).backward()
    mine = own(mesh, tokens, targets)
    (loss_of(model, *mine) + loss_of(other, *reversed(mine))).backward()
    same_gradients(plain, model)
    same_gradients(other_plain, other)


@on_ranks(4)
def test_units_without_an_outermost_one() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain = nn.Sequential(Block(6), Block(6), Block(6)).double()
    model = copy.deepcopy(plain)
    for block in model:
        fully_shard(block, mesh["data"])
    x = torch.randn(8, 6, dtype=torch.float64)
    plain(x).square().mean().backward()
    model(*own(mesh, x)).square().mean().backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_a_list_of_modules_is_one_unit() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain = nn.Sequential(Block(6), nn.LayerNorm(6), nn.Linear(6, 5)).double()
    model = copy.deepcopy(plain)
    fully_shard(model[0], mesh["data"])
    fully_shard([model[1], model[2]], mesh["data"])
    fully_shard(model, mesh["data"])
    x = torch.randn(8, 6, dtype=torch.float64)
    for _ in range(2):
        (plain(x).square().mean() + plain(-x).square().mean()).backward()
        with CommDebugMode() as counted:
            loss = model(*own(mesh, x)).square().mean()
        assert sum(counted.get_comm_counts().values()) == 2
        (loss + model(*own(mesh, -x)).square().mean()).backward()
        same_gradients(plain, model)
    with torch.no_grad():
        # the last module of the unit does not run
        model[:2](x)
        torch.testing.assert_close(model(x), plain(x))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(4)
def test_forwards_before_backwards() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh, reshard_after_forward=True)
    batches = [batch(i) for i in range(3)]
    losses = [loss_of(model, *own(mesh, *one)) for one in batches]
    for loss, one in zip(losses, batches, strict=True):
        loss_of(plain, *one).backward()
        loss.backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_inputs_first_and_parameters_later() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain = nn.Sequential(Block(6), Block(6)).double()
    model = copy.deepcopy(plain)
    for block in model:
        fully_shard(block, mesh["data"])
    fully_shard(model, mesh["data"])
    x = torch.randn(8, 6, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), own(mesh, x)[0].requires_grad_()]
    losses = [one(rows).square().sum() for one, rows in zip((plain, model), inputs, strict=True)]
    grads = [
        torch.autograd.grad(loss, rows, retain_graph=True)[0]
        for loss, rows in zip(losses, inputs, strict=True)
    ]
    torch.testing.assert_close(grads[1], own(mesh, grads[0])[0])
    assert all(param.grad is None for param in model.parameters())
    losses[0].div(4).backward()
    losses[1].backward()
    same_gradients(plain, model)


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(4)
def test_evaluation_between_steps(mode: Any) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    for number in range(2):
        with mode():
            torch.testing.assert_close(model(batch(9)[0]), plain(batch(9)[0]))
        backward_of_each(plain, model, mesh, number)
    same_gradients(plain, model)


@on_ranks(4)
def test_parameters_frozen_and_released_later() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh, blocks=False, root=False)
    for one in (plain, model):
        one.embedding.requires_grad_(False)
    fully_shard(model, mesh["data"])
    for number, (frozen, trained) in enumerate(
        [("blocks.0", "embedding"), ("head", "blocks.0"), ("blocks.1", "head")]
    ):
        for one in (plain, model):
            one.zero_grad()
            one.get_submodule(frozen).requires_grad_(False)
            one.get_submodule(trained).requires_grad_(True)
        backward_of_each(plain, model, mesh, number)
        same_gradients(plain, model)


@on_ranks(4)
def test_a_second_derivative_is_refused() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_sharded(mesh)
    loss = loss_of(model, *own(mesh, *batch(0)))
    with pytest.raises(SecondOrderError, match="fully_shard: a backward with create_graph=True"):
        torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    unit = fully_shard(nn.Linear(4, 4), mesh["data"])
    rows = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(SecondOrderError, match="fully_shard: a backward with create_graph=True"):
        # of inputs alone: the graph holds the weight
        torch.autograd.grad(unit(rows).sum(), rows, create_graph=True)


@on_ranks(4)
@pytest.mark.parametrize(
    "shard", [fully_shard, replicate, partial(replicate, shard_optimizer=True)]
)
def test_a_parameter_computed_from_others_is_refused(shard: Callable[..., Any]) -> None:
    unit = shard(nn.Linear(4, 4), mesh_of(4, 1)["data"])
    scaled = {name: 2 * param for name, param in unit.named_parameters()}
    with pytest.raises(LayoutError, match="was replaced by the result of an operation"):
        torch.func.functional_call(unit, scaled, (torch.ones(2, 4),))
    detached = {name: param.detach() for name, param in scaled.items()}
    weight, bias = (full_tensor(value) for value in (detached["weight"], detached["bias"]))
    rows = torch.ones(2, 4)
    torch.testing.assert_close(
        torch.func.functional_call(unit, detached, (rows,)), rows @ weight.T + bias
    )


@on_ranks(2)
def test_parametrizations_after_fully_shard_are_named() -> None:
    """The error said that the weight was replaced by a plain NoneType."""
    unit = fully_shard(nn.Linear(4, 4), mesh_of(2, 1)["data"])
    torch.nn.utils.parametrizations.weight_norm(unit)
    with pytest.raises(LayoutError, match="apply them before fully_shard"):
        unit(torch.ones(2, 4))


# --- copies and other ways to call ----------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
def test_copies_of_a_trained_model_train(copied_by: Callable[[nn.Module], Any]) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    backward_of_each(plain, model, mesh)
    for one in (plain, model):
        one.zero_grad()
    copied, plain_copy = copied_by(model), copy.deepcopy(plain)
    assert type(copied) is type(model) and type(model).__name__ == type(plain).__name__
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.zero_()
    backward_of_each(plain_copy, copied, mesh, 1)
    same_gradients(plain_copy, copied)
    same_weights(plain_copy, copied)
    assert full(model.head.weight).abs().sum() == 0


@on_ranks(4)
def test_an_average_of_the_weights() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    averages = [
        torch.optim.swa_utils.AveragedModel(one, avg_fn=lambda a, b, n: a * 0.9 + b * 0.1)
        for one in (plain, model)
    ]
    for number in range(3):
        backward_of_each(plain, model, mesh, number)
        for one, average in zip((plain, model), averages, strict=True):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
            average.update_parameters(one)
    same_weights(*averages)
    with torch.no_grad():
        torch.testing.assert_close(averages[1](batch(0)[0]), averages[0](batch(0)[0]))


class WithSecondForward(nn.Module):
    """A module with a second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(6)

    def encode(self, x: Tensor) -> Any:
        return self.inner(x) * 2

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@on_ranks(4)
def test_methods_that_count_as_forward() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain = WithSecondForward().double()
    model: Any = fully_shard(copy.deepcopy(plain), mesh["data"], reshard_after_forward=True)
    register_fsdp_forward_method(model, "encode")
    x = torch.randn(8, 6, dtype=torch.float64)
    plain.encode(x).mean().backward()
    model.encode(*own(mesh, x)).mean().backward()
    same_gradients(plain, model)
    with pytest.raises(LayoutError, match="no method 'decode'"):
        register_fsdp_forward_method(model, "decode")


@on_ranks(4)
def test_what_is_freed_is_chosen_later() -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models(lambda: Model(6, 2))
    for block in model.blocks:
        fully_shard(block, mesh["data"])
    model.blocks[0].set_reshard_after_forward(False)
    fully_shard(model, mesh["data"])
    tokens, targets = batch(0)
    mine = own(mesh, tokens, targets)
    expected = loss_of(plain, tokens, targets)
    expected.backward()

    def gathers(*, backward: bool) -> int:
        with CommDebugMode() as mode, torch.set_grad_enabled(backward):
            loss = loss_of(model, *mine)
            if backward:
                loss.backward()
        return counts(mode).get("all_gather", 0)

    assert gathers(backward=True) == 3 + 1, (
        "of the outermost unit and two blocks; again of the second one"
    )
    same_gradients(plain, model)
    model.set_reshard_after_forward(True)
    assert gathers(backward=True) == 3 + 3
    model.set_reshard_after_forward(False)
    assert [gathers(backward=False) for _ in range(2)] == [3, 0], (
        "an evaluation of several batches gathers once"
    )
    assert gathers(backward=True) == 0
    assert gathers(backward=True) == 3, "a backward frees"
    with pytest.raises(TypeError, match="reshard_after_forward is a bool, got int 2"):
        model.set_reshard_after_forward(2)


# --- gradients that are kept ----------------------------------------------------------------------


@on_ranks(4)
def test_kept_gradients_of_a_unit_that_the_last_pass_leaves_out() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    tokens, targets = batch(0)
    loss_of(plain, tokens, targets).backward()
    with model.no_sync():
        loss_of(model, *own(mesh, tokens, targets)).backward()
    assert all(param.grad is None for param in model.parameters())
    for one, rows in ((plain, tokens), (model, *own(mesh, tokens))):
        kept, one.blocks = one.blocks, nn.ModuleList([one.blocks[0]])
        one(rows).mean().backward()
        one.blocks = kept
    same_gradients(plain, model)


@on_ranks(4)
def test_kept_gradients_are_reduced_on_request_and_dropped_by_zero_grad() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    seen: list[Any] = []
    model.head.bias.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    for number in range(2):
        with model.no_sync():
            backward_of_each(plain, model, mesh, number)
    model.reduce_gradients()
    same_gradients(plain, model)
    assert [grad is None for grad in seen] == [False]
    with model.no_sync():
        loss_of(model, *own(mesh, *batch(7))).backward()
    for one in (plain, model):
        one.zero_grad()
    backward_of_each(plain, model, mesh, 3)
    same_gradients(plain, model)


@on_ranks(4)
def test_half_a_backward_that_keeps_gradients_is_not_used() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)

    def stop(*_: Any) -> None:
        raise RuntimeError("on purpose")

    model.set_requires_gradient_sync(False)
    handle = model.blocks[0].register_full_backward_hook(stop)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model, *own(mesh, *batch(0))).backward()
    handle.remove()
    model.set_requires_gradient_sync(True)
    with pytest.raises(StyleError, match="zero_grad"):
        loss_of(model, *own(mesh, *batch(0))).backward()
    model.zero_grad()
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@on_ranks(4)
def test_half_a_backward_that_adds_to_kept_gradients_is_not_used() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    with model.no_sync():
        loss_of(model, *own(mesh, *batch(0))).backward()
    with raising(model.blocks[0].up, "backward"), pytest.raises(Fault, match="backward"):
        loss_of(model, *own(mesh, *batch(1))).backward()
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(StyleError, match="zero_grad"):
        model.reduce_gradients()
    with pytest.raises(StyleError, match="zero_grad"):
        loss_of(model, *own(mesh, *batch(1))).backward()
    model.zero_grad()
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@on_ranks(4)
@pytest.mark.parametrize("syncs", [False, True])
def test_a_unit_that_runs_twice_adds_to_kept_gradients(syncs: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    for one in (plain, model):
        one.blocks = nn.ModuleList([*one.blocks, one.blocks[0]])
    for keeps in (True, not syncs):
        model.set_requires_gradient_sync(not keeps)
        backward_of_each(plain, model, mesh)
    model.reduce_gradients()
    same_gradients(plain, model)


@on_ranks(4)
def test_a_gradient_is_added_to_the_kept_one_before_those_of_other_layers_are_there() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    unit = unit_of(model.blocks[0])
    seen: list[list[bool]] = []
    with model.no_sync():
        backward_of_each(plain, model, mesh, 0)
    before = [unit.kept[i][0].clone() for i in unit.trained]
    hook = model.blocks[0].up.register_full_backward_hook(
        lambda *_: seen.append(
            [
                not torch.equal(old, unit.kept[i][0])
                for old, i in zip(before, unit.trained, strict=True)
            ]
        )
    )
    backward_of_each(plain, model, mesh, 1)
    hook.remove()
    same_gradients(plain, model)
    assert any(seen[0])
    assert not all(seen[0])


class Recomputed(nn.Sequential):
    """Layers of which all but the last run again in backward, each in a pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        *layers, last = self
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return last(x)  # type: ignore[no-any-return]  # of a Linear


@on_ranks(4)
def test_kept_gradients_of_a_unit_with_reentrant_checkpoints() -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models(lambda: Recomputed(*(nn.Linear(6, 6) for _ in range(3))))
    fully_shard(model[1], mesh["data"])
    fully_shard(model, mesh["data"])
    for last in (False, False, True):
        x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
        plain(x).square().mean().backward()
        model.set_requires_gradient_sync(last)
        model(*own(mesh, x.detach().requires_grad_())).square().mean().backward()
    same_gradients(plain, model)


@on_ranks(2)
def test_forwards_of_earlier_steps_are_freed() -> None:
    model = fully_shard(nn.Linear(4, 4), mesh_of(2, 1)["data"])
    counts = []
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        gc.collect()
        counts.append(sum(type(each) is Forward for each in gc.get_objects()))
    assert counts[0] == counts[-1]


@on_ranks(4)
def test_kept_gradients_outlive_a_pass_by_name_that_raises() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    with model.no_sync():
        backward_of_each(plain, model, mesh, 0)
    with raising(model.blocks[0].up, "backward"), pytest.raises(Fault, match="backward"):
        torch.autograd.grad(
            loss_of(model, *own(mesh, *batch(1))),
            [block.up.bias for block in model.blocks],
            allow_unused=True,
        )
    backward_of_each(plain, model, mesh, 2)
    same_gradients(plain, model)


# --- what would be lost ---------------------------------------------------------------------------


class Sliced(nn.Module):
    """A unit whose loss is kept in an attribute, and reads a slice of a weight in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = F.linear(x * x, self.weight[2:]).sum()
        return x


@on_ranks(4)
def test_a_slice_of_a_gathered_parameter_is_read_after_it_was_freed() -> None:
    mesh = mesh_of(4, 1)
    plain: Any = Sliced()
    model: Any = fully_shard(Sliced(), mesh["data"], reshard_after_forward=True)
    grads = []
    for one in (plain, model):
        x = torch.ones(2, 3, requires_grad=True)
        one(x)
        one.kept.backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])
    same_gradients(plain, model)


@on_ranks(4)
def test_writes_to_gathered_parameters_are_an_error() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_sharded(mesh)
    block: FSDPModule = model.blocks[0]
    block.unshard()
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    with pytest.raises(StyleError, match="written to"):
        block.reshard()
    assert isinstance(model.blocks[0].up.weight, DTensor)

    def scale(module: Any, _: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    handle = model.blocks[1].up.register_forward_pre_hook(scale)
    with pytest.raises(StyleError, match="written to"):
        model(batch(0)[0])
    handle.remove()
    model(batch(0)[0])


@on_ranks(4)
def test_containers_and_uneven_resharding_are_refused() -> None:
    mesh = mesh_of(4, 1)
    with pytest.raises(LayoutError, match="does not define forward"):
        fully_shard(nn.ModuleList([Block(4)]), mesh["data"])
    with pytest.raises(LayoutError, match="a number that divides"):
        fully_shard(Block(4), mesh["data"], reshard_after_forward=3)


# --- experts, recomputation -----------------------------------------------------------------------


class ExpertOfEachRank(nn.Module):
    """Two experts whose weights are one parameter, one on each rank of an axis of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if not isinstance(weight, DTensor):
            return torch.einsum("eij,rj->ri", weight, x)
        rows = DTensor.from_local(x, weight.device_mesh, [Replicate()])
        out: Any = torch.einsum("eij,rj->ri", weight, rows)
        return out.full_tensor()  # type: ignore[no-any-return]  # of a DTensor


@on_ranks(4)
def test_experts_on_axes_of_their_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), ExpertOfEachRank()).double()
    model: Any = copy.deepcopy(plain)
    model[1].weight = nn.Parameter(
        distribute_tensor(model[1].weight.detach(), mesh["expert"], [Shard(0)])
    )
    fully_shard(model[1], mesh["data"])
    # The experts are sharded first, then each shard over the data axis.
    assert model[1].weight.placements == (StridedShard(0, split_factor=2), Shard(0))
    fully_shard(model, mesh["data"])
    x = torch.randn(8, 6, dtype=torch.float64)
    plain(x).square().mean().backward()
    rows = x.chunk(2)[mesh.get_local_rank("data")]
    model(rows).square().mean().backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_recomputation_gathers_no_more_than_backward_does() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_sharded(mesh)
    counts = []
    for reentrant in (None, False, True):
        model.recompute = reentrant
        with CommDebugMode() as counted:
            loss_of(model, *own(mesh, *batch(0))).backward()
        counts.append({str(op): n for op, n in counted.get_comm_counts().items()})
    assert counts[0] == counts[1] == counts[2]


@on_ranks(4)
def test_a_function_inside_of_a_unit_is_recomputed() -> None:
    mesh = mesh_of(4, 1)

    class Recomputed(Block):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    torch.manual_seed(0)
    plain = nn.Sequential(Recomputed(6), Recomputed(6)).double()
    model: Any = copy.deepcopy(plain)
    for block in model:
        fully_shard(block, mesh["data"])
    fully_shard(model, mesh["data"])
    x = torch.randn(8, 6, dtype=torch.float64)
    plain(x).square().mean().backward()
    model(*own(mesh, x)).square().mean().backward()
    same_gradients(plain, model)
    assert all(local_shard(p).numel() for p in model[0].up.parameters() if isinstance(p, DTensor))


class Headed(nn.Module):
    """Hidden values of a model with a head; some of its own layers are recomputed, or all."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.first, self.blocks, self.head = (
            nn.Linear(6, 6),
            nn.ModuleList(Block(6) for _ in range(2)),
            nn.Linear(6, 5),
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if not self.recompute:
            return x
        x = checkpoint(self.first, x, use_reentrant=True)
        again = self.head(x) if self.recompute == "some" else 0
        return checkpoint(self.head, x, use_reentrant=True) + again


def headed(recompute: str = "") -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain: Any = Headed(recompute).double()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, mesh_of(4, 1)["data"])
    return plain, fully_shard(model, mesh_of(4, 1)["data"])


@pytest.mark.parametrize("recompute", ["some", "all"])
@on_ranks(4)
def test_reentrant_checkpoints_inside_of_the_outermost_unit(recompute: str) -> None:
    plain, model = headed(recompute)
    x = torch.randn(8, 6, dtype=torch.float64)
    for _ in range(2):
        plain(x).square().mean().backward()
        model(*own(mesh_of(4, 1), x)).square().mean().backward()
        same_gradients(plain, model)


def on_chunks(model: Any, hidden: Any, reentrant: bool | None) -> Any:
    def loss(chunk: Tensor) -> Any:
        return model.head(chunk).square().mean() / 2

    chunks = hidden.chunk(2)
    return sum(
        loss(c) if reentrant is None else checkpoint(loss, c, use_reentrant=reentrant)
        for c in chunks
    )


def chunk_by_chunk(model: Any, hidden: Any, gathers: bool) -> Any:
    """Backward of each chunk, then of the hidden values."""
    start = hidden.detach().requires_grad_()
    if gathers and isinstance(model, FSDPModule):
        model.unshard()
    for chunk in start.chunk(2):
        out = F.linear(chunk, model.head.weight, model.head.bias) if gathers else model.head(chunk)
        (out.square().mean() / 2).backward()
    return (hidden * start.grad).sum()


def after_other_passes(model: Any, hidden: Any) -> Any:
    """A backward and an evaluation between a call of the head and its backward."""
    out = model.head(hidden.detach().requires_grad_())
    hidden.square().mean().backward()
    with torch.no_grad():
        model.head(model(hidden.detach()))
    return out.square().mean()


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "once": lambda model, hidden: model.head(hidden).square().mean(),
    "chunks": lambda model, hidden: on_chunks(model, hidden, None),
    "chunks, recomputed": lambda model, hidden: on_chunks(model, hidden, False),
    "chunks, reentrant": lambda model, hidden: on_chunks(model, hidden, True),
    "chunk by chunk": lambda model, hidden: chunk_by_chunk(model, hidden, False),
    "chunk by chunk, gathered": lambda model, hidden: chunk_by_chunk(model, hidden, True),
    "after other passes": after_other_passes,
}


@pytest.mark.parametrize("kind", CALLS)
@on_ranks(4)
def test_a_head_that_is_called_after_the_forward_of_the_outermost_unit(kind: str) -> None:
    plain, model = headed()
    leaves = [*model.parameters()]
    for step in range(2):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        CALLS[kind](plain, plain(x)).backward()
        CALLS[kind](model, model(*own(mesh_of(4, 1), x))).backward()
        same_gradients(plain, model)
        assert all(one is other for one, other in zip(leaves, model.parameters(), strict=True))


@on_ranks(4)
def test_gradients_asked_for_by_name_are_those_of_one_pass() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    with model.no_sync():
        backward_of_each(plain, model, mesh)
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        tokens, targets = batch(1)
        expected = torch.autograd.grad(loss_of(plain, tokens, targets), [plain.head.weight])
        got = torch.autograd.grad(loss_of(model, *own(mesh, tokens, targets)), [model.head.weight])
        torch.testing.assert_close(full(got[0]), expected[0])
        assert model.head.bias.grad is None
    model.reduce_gradients()
    same_gradients(plain, model)


class Selective(nn.Module):
    """A dropped block in a checkpoint that saves matrix products alone."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop = Block(6), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(
            lambda x: self.drop(self.block(x)), x, use_reentrant=False, context_fn=contexts
        )


@pytest.mark.parametrize("kind", ["units", "replicas"])
@on_ranks(4)
def test_selective_checkpoints_see_the_operators_of_the_function_alone(kind: str) -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models(Selective)
    if kind == "units":
        fully_shard(model.block, mesh["data"])
        fully_shard(model, mesh["data"])
    else:
        replicate(model, mesh["data"])
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # in the first one, layouts of what is dropped are found; later, units gather ahead
    for step in range(3):
        for module, rows in (plain, x), (model, *own(mesh, x)):
            torch.manual_seed(step)
            module(rows).square().mean().backward()
        same_gradients(plain, model)


@pytest.mark.parametrize("kind", ["one unit", "units", "replicas"])
@on_ranks(2)
def test_parameters_beside_dtensors_get_the_whole_gradient(kind: str) -> None:
    """Rows as a DTensor: each rank computes its part of the whole gradient.

    No mean must be made of the parts.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    alone, x = copy.deepcopy(model), torch.randn(6, 4).double()
    alone(x).square().mean().backward()
    if kind == "replicas":
        replicate(model, mesh)
    else:
        for unit in (model[0], model) if kind == "units" else (model,):
            fully_shard(unit, mesh=mesh)
    with implicit_replication():
        model(distribute_tensor(x, mesh, [Shard(0)])).square().mean().full_tensor().backward()
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        got: Any = param.grad
        torch.testing.assert_close(full_tensor(got), other.grad)


class WrapsOwnForward(nn.Module):
    """A module whose instances have a forward of their own, around that of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.factor = 2.0
        inside = self.forward
        self.forward = lambda x: self.factor * inside(x)  # type: ignore[method-assign]  # as users

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.layer(x))


@pytest.mark.parametrize("trains", [False, True])
@on_ranks(2)
def test_forwards_that_instances_have_are_called(trains: bool) -> None:
    plain, model = two_equal_models(lambda: WrapsOwnForward().double())
    fully_shard(model, mesh_of(2, 1)["data"])
    for one in (plain, model):
        one.train(trains)
        torch.manual_seed(1)
        rows = torch.ones(4, 4, dtype=torch.float64)
        one(rows if one is plain else own(mesh_of(2, 1), rows)[0]).sum().backward()
    expected = plain.layer.weight.grad / 2
    torch.testing.assert_close(full(model.layer.weight.grad), expected)


@on_ranks(2)
def test_copies_and_pickles_keep_the_forwards_of_instances() -> None:
    model = WrapsOwnForward().double().eval()
    model.forward = partial(_tripled, model)  # type: ignore[method-assign]  # as programs do
    fully_shard(model, mesh_of(2, 1)["data"])
    rows = torch.ones(2, 4, dtype=torch.float64)
    for one in (model, copy.deepcopy(model), pickled(model)):
        torch.testing.assert_close(one(rows), 3 * one.layer(rows))


def _tripled(model: Any, x: Tensor) -> Any:
    return 3 * model.layer(x)
