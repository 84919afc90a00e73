"""`fully_shard` against one device, on real gloo ranks.

Compared are values, gradients, collectives, memory and faults.

Covers: fully_shard.py, leaf_checks.py, policies.py, _torch.py, and what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel_checks import units_keep_gradients, units_load_their_state, units_outlive_a_fault
from data_parallel_model import (
    Block,
    Branching,
    Model,
    backward_of_each,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    same_gradients,
    train_alike,
    two_equal_models,
)
from shoal_data_parallel import (
    CPUOffloadPolicy,
    FSDPModule,
    LayoutError,
    MixedPrecisionPolicy,
    StyleError,
    TiedWeightError,
    fully_shard,
    replicate,
)
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_dtensor.internal import local_shard
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import counts, on_ranks


def single_and_sharded(
    mesh: DeviceMesh, make: Callable[[], nn.Module] = Model, **options: Any
) -> tuple[Any, Any]:
    """A model on one device, and the same sharded over "data"."""
    plain, model = two_equal_models(make)
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mesh["data"], **options)
    return plain, fully_shard(model, mesh["data"], **options)


# --- values and gradients -------------------------------------------------------------------------


@on_ranks(4)
def test_training_is_that_of_one_device() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    train_alike(plain, model, mesh, optimizers)


@on_ranks(4)
def test_two_data_axes_replicate_over_the_first() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    torch.manual_seed(0)
    plain = Model().double()
    torch.manual_seed(0)
    model: Any = Model().double()
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    tokens, targets = batch(0)
    loss_of(plain, tokens, targets).backward()
    rank = torch.distributed.get_rank()
    loss_of(model, tokens.chunk(4)[rank], targets.chunk(4)[rank]).backward()
    assert model.head.weight.placements == (Replicate(), Shard(0))
    same_gradients(plain, model)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(4)
def test_checkpointed_units(reentrant: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh, lambda: Model(recompute=reentrant))
    runs = [0, 0]
    for index, module in enumerate((plain, model)):
        module.blocks[1].norm.register_forward_hook(
            lambda *_, index=index: runs.__setitem__(index, runs[index] + 1)
        )
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)
    assert runs == [2, 2]  # once more in backward


@on_ranks(4)
def test_recomputation_inside_of_a_unit() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain = Model(recompute=False).double()
    torch.manual_seed(0)
    # blocks: no units
    model = fully_shard(Model(recompute=False).double(), mesh["data"], reshard_after_forward=True)
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@on_ranks(4)
def test_a_parameter_that_two_modules_share_stays_one() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh, lambda: Model(tied=True))
    assert model.head.weight is model.embedding.weight
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@on_ranks(4)
def test_units_used_twice_in_part_or_not_at_all() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain: Any = Branching().double()
    torch.manual_seed(0)
    model: Any = Branching().double()
    fully_shard(model.blocks[0], mesh["data"])
    fully_shard(model, mesh["data"], reshard_after_forward=True)
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    rank = torch.distributed.get_rank()
    sum(plain(x[r], r % 2 == 1).sum() for r in range(4)).div(4).backward()
    model(x[rank], rank % 2 == 1).sum().backward()
    same_gradients(plain, model)
    assert model.blocks[2].up.weight.grad is None


@on_ranks(4)
def test_gradients_are_kept_until_a_pass_that_reduces_them() -> None:
    mesh = mesh_of(4, 1)
    units_keep_gradients(*single_and_sharded(mesh), mesh)


class TwoAddends(nn.Module):
    """Two parameters that get one and the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return (self.one + self.other) * x


@on_ranks(4)
def test_kept_gradients_of_two_parameters_are_two_tensors() -> None:
    plain, model = TwoAddends(), fully_shard(TwoAddends(), mesh_of(4, 1)["data"])
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        for one in (plain, model):
            one(torch.full((4,), step + 1.0)).sum().backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_batches_of_different_sizes_with_a_divisor_of_one() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(1)
    tokens, targets = batch(0, rows=7)  # 2, 2, 2 and 1 rows
    loss_of(plain, tokens, targets).backward()
    mine = own(mesh, tokens, targets)
    loss: Any = (
        F.cross_entropy(model(mine[0]).flatten(0, 1), mine[1].flatten(), reduction="sum")
        / targets.numel()
    )
    loss.backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_frozen_parameters_and_hooks_of_users() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain: Any = Model().double()
    torch.manual_seed(0)
    model: Any = Model().double()
    seen: list[str] = []
    for one in (plain, model):
        one.embedding.requires_grad_(False)
        one.blocks[0].requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh["data"])
    fully_shard(model, mesh["data"])
    plain.head.bias.register_hook(lambda grad: grad * 3)
    model.head.bias.register_hook(lambda grad: grad * 3)
    model.head.weight.register_post_accumulate_grad_hook(
        lambda leaf: seen.append(str(leaf.grad.placements))
    )
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)
    assert seen == ["(Shard(dim=0),)"]


@on_ranks(4)
def test_gradients_asked_for_by_name() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    tokens, targets = batch(0)
    expected = torch.autograd.grad(
        loss_of(plain, tokens, targets), [plain.head.weight, plain.blocks[1].up.bias]
    )
    loss = loss_of(model, *own(mesh, tokens, targets))
    got = torch.autograd.grad(loss, [model.head.weight, model.blocks[1].up.bias])
    for one, other in zip(map(full, got), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert all(param.grad is None for param in model.parameters())


@on_ranks(4)
def test_ignored_parameters_stay_as_they_are() -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models()
    ignored = {model.head.weight, model.blocks[0].norm.bias}
    fully_shard(model, mesh["data"], ignored_params=ignored)
    assert model.head.weight in ignored and model.blocks[0].norm.bias in ignored
    assert {param for param in model.parameters() if not isinstance(param, DTensor)} == ignored
    tokens, _ = batch(0)
    torch.testing.assert_close(model(tokens), plain(tokens))


@on_ranks(4)
def test_mixed_precision_and_masters() -> None:
    mesh = mesh_of(4, 1)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    torch.manual_seed(0)
    model: Any = Model()
    torch.manual_seed(0)
    plain = Model().bfloat16()
    for block in model.blocks:
        fully_shard(
            block, mesh["data"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        )
    fully_shard(model, mesh["data"], mp_policy=policy)
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(
        lambda module, _, out: seen.append(module.weight.dtype)
    )
    tokens, targets = batch(0)
    logits = model(own(mesh, tokens)[0])
    assert logits.dtype == torch.float32
    assert torch.equal(logits, plain(own(mesh, tokens)[0]).float())
    loss: Any = F.cross_entropy(logits.flatten(0, 1), own(mesh, targets)[0].flatten())
    loss.backward()
    assert seen == [torch.bfloat16]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


@on_ranks(4)
def test_shards_kept_on_the_host() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh, offload_policy=CPUOffloadPolicy())
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


class Auxiliary(nn.Module):
    """A model of which one block keeps a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.blocks[0].register_forward_hook(self.keep)

    def keep(self, block: Any, inputs: Any, output: Tensor) -> None:
        self.kept = block.down(block.up(output)).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(4)
def test_a_loss_that_leaves_a_unit_by_an_attribute() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain: Any = Auxiliary().double()
    torch.manual_seed(0)
    model: Any = Auxiliary().double()
    for block in model.blocks:
        fully_shard(block, mesh["data"])
    fully_shard(model, mesh["data"])
    x = torch.randn(3, 6, dtype=torch.float64)
    for one in (plain, model):
        one(x)
        one.kept.backward()
    same_gradients(plain, model)


# --- collectives and memory -----------------------------------------------------------------------


@on_ranks(4)
def test_one_gather_forward_one_backward_one_reduction() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_sharded(mesh)
    with CommDebugMode() as forward:
        loss = loss_of(model, *own(mesh, *batch(0)))
    with CommDebugMode() as backward:
        loss.backward()
    # Four units; the outermost stays gathered.  One parameter is a number, which no rank can have a
    # shard of.
    assert counts(forward) == {"all_gather": 4}
    assert counts(backward) == {"all_gather": 3, "reduce_scatter": 4, "all_reduce": 1}


@on_ranks(4)
def test_what_is_gathered_is_freed() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_sharded(mesh)
    held: dict[str, Tensor] = {}
    for name, block in enumerate(model.blocks):
        block.up.register_forward_hook(
            lambda m, _, out, name=str(name): held.update({name: m.weight.detach()})
        )
    loss = loss_of(model, *own(mesh, *batch(0)))
    assert [held[str(i)].untyped_storage().nbytes() for i in range(3)] == [0, 0, 0]
    loss.backward()
    assert [held[str(i)].untyped_storage().nbytes() for i in range(3)] == [0, 0, 0]
    rows = [sum(local_shard(p).numel() for p in block.parameters()) for block in model.blocks]
    whole = sum(p.numel() for p in model.blocks[0].parameters())
    # 80: uneven dims of 10 and 30 rows
    assert sum(torch.tensor(rows).tolist()) <= 3 * (whole // 4 + 80)


@on_ranks(4)
def test_evaluation_holds_nothing_and_follows_the_optimizer() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    tokens, _ = batch(0)
    gathered: list[Tensor] = []
    # The head is in the outermost unit, which stays gathered after a forward that records
    # gradients.
    model.head.register_forward_hook(lambda head, _, out: gathered.append(head.weight.detach()))
    model(tokens)
    assert gathered.pop().untyped_storage().nbytes() > 0
    model.reshard()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens))
        assert gathered.pop().untyped_storage().nbytes() == 0
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            param.mul_(1.5)
            other.mul_(1.5)
        torch.testing.assert_close(model(tokens), plain(tokens))


@on_ranks(4)
def test_gathering_by_hand() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_sharded(mesh)
    block: FSDPModule = model.blocks[1]
    block.unshard()
    assert torch.equal(model.blocks[1].up.weight, plain.blocks[1].up.weight)
    block.reshard()
    assert model.blocks[1].up.weight.placements == (Shard(0),)
    handle = block.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert torch.equal(model.blocks[1].up.weight, plain.blocks[1].up.weight)
    block.reshard()


@on_ranks(4)
def test_state_dicts_hold_shards_and_load_again() -> None:
    mesh = mesh_of(4, 1)
    units_load_their_state(*single_and_sharded(mesh), mesh)


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(4)
def test_a_step_that_raises_leaves_parameters_and_gradients(where: str) -> None:
    mesh = mesh_of(4, 1)
    units_outlive_a_fault(*single_and_sharded(mesh), mesh, where)


@on_ranks(4)
def test_a_write_between_forward_and_backward_is_an_error() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_sharded(mesh)
    loss = loss_of(model, *own(mesh, *batch(0)))
    with torch.no_grad():
        model.blocks[2].up.weight.mul_(2)
    with pytest.raises(StyleError, match="written to between a forward and its backward"):
        loss.backward()


@on_ranks(4)
def test_what_cannot_be_sharded_is_refused() -> None:
    mesh = mesh_of(4, 1)
    model = fully_shard(Block(4), mesh["data"])
    with pytest.raises(LayoutError, match="sharded already"):
        fully_shard(model, mesh["data"])
    tied = Model(tied=True)
    fully_shard(tied.embedding, mesh["data"])
    with pytest.raises(TiedWeightError, match="shared with a module that is part of another unit"):
        fully_shard(tied, mesh["data"])
    with pytest.raises(LayoutError, match="one or two data axes"):
        fully_shard(Block(4), init_device_mesh("cpu", (1, 2, 2)))
    with pytest.raises(LayoutError, match="interop"):
        fully_shard(Block(4), "data")  # type: ignore[call-overload]  # on purpose
    lookup = fully_shard(nn.Embedding(8, 4, sparse=True), mesh["data"])
    with pytest.raises(LayoutError, match="is sparse"):
        lookup(torch.arange(4)).sum().backward()
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    with pytest.raises(LayoutError, match="with a mesh of two axes also over replicas"):
        replicate(fully_shard(Block(4), both["data"]), both["replica"])
    with pytest.raises(LayoutError, match="replicates over the first"):
        fully_shard(replicate(Block(4), both["replica"]), both["data"])


@on_ranks(4)
def test_gradients_of_a_plain_model_are_refused() -> None:
    model = Model().double()
    loss_of(model, *batch(0)).backward()
    with pytest.raises(StyleError, match="parameters have gradients"):
        fully_shard(model, mesh_of(4, 1)["data"])
