"""`replicate` against one device, on real gloo ranks: values, gradients, collectives, faults.

Covers: replicate.py, replica.py, gradient_buckets.py, forward_writes.py, values_of_one_rank.py,
registrations.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from data_parallel_checks import (
    OPTIMIZERS,
    buckets,
    replicas_are_asked_for_gradients,
    replicas_are_copied,
    replicas_are_filled,
    replicas_freeze,
    replicas_grow,
    replicas_keep_gradients,
    replicas_outlive_a_fault,
)
from data_parallel_model import (
    Block,
    Branching,
    Model,
    OptionalFirst,
    backward_of_each,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    pickled,
    same_gradients,
    train_alike,
    two_equal_models,
)
from shoal_data_parallel import (
    DataParallelMeshDims,
    FSDPModule,
    LayoutError,
    ReplicateModule,
    StyleError,
    UnsupportedModuleError,
    fully_shard,
    replicate,
)
from shoal_dtensor import Replicate, Shard, checked_replicas, distribute_tensor
from shoal_dtensor.errors import SecondOrderError
from shoal_dtensor.internal import local_shard
from shoal_mesh import CommDebugMode, DeviceMesh, LockstepError, init_device_mesh
from shoal_mesh.testing import counts, fake_world, observed, on_ranks

# bytes: of the model's 17,000 in float64, about one weight each
SMALL = 1000


def single_and_replicated(
    mesh: DeviceMesh, make: Callable[[], nn.Module] = Model, **options: Any
) -> tuple[Any, Any]:
    plain, model = two_equal_models(make)
    return plain, replicate(model, mesh["data"], **({"bucket_bytes": SMALL} | options))


SHARDED = pytest.mark.parametrize("shard_optimizer", [False, True])

# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 2**20])
@on_ranks(4)
def test_training_is_that_of_one_device(bucket_bytes: int) -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models()
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True) for m in (plain, model)]
    # after the optimizer was made: parameters stay
    replicate(model, mesh["data"], bucket_bytes=bucket_bytes)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    train_alike(plain, model, mesh, optimizers)


@on_ranks(2)
def test_gradients_take_values_that_autograd_records() -> None:
    """They were views that had been made under no_grad, which autograd refuses to write to."""
    plain, model = single_and_replicated(mesh_of(2, 1), lambda: nn.Linear(4, 4).double())
    rows = torch.ones(2, 4, dtype=torch.float64)
    for module in (plain, model):
        module(rows).sum().backward()
        for param in module.parameters():
            param.grad.copy_(param.grad / (1 + param.norm()))
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad)


@on_ranks(4)
def test_several_data_axes_and_an_axis_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "data"))
    rank = torch.distributed.get_rank()
    tokens, targets = batch(0)
    plain, model = two_equal_models()
    replicate(model, mesh)
    loss_of(plain, tokens, targets).backward()
    loss_of(model, tokens.chunk(4)[rank], targets.chunk(4)[rank]).backward()
    same_gradients(plain, model)
    with mesh_of(4, 1):
        model = replicate(two_equal_models()[1], "data")
    loss_of(model, tokens.chunk(4)[rank], targets.chunk(4)[rank]).backward()
    same_gradients(plain, model)


@SHARDED
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4)
def test_checkpointed_blocks_and_shared_parameters(
    reentrant: bool, tied: bool, shard_optimizer: bool
) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(
        mesh, lambda: Model(recompute=reentrant, tied=tied), shard_optimizer=shard_optimizer
    )
    for _ in range(2):  # the second pass adds to what is there
        backward_of_each(plain, model, mesh)
        same_gradients(plain, model)


class Repeated(nn.Module):
    """One layer in two reentrant recomputations and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return self.layer(self.last(x))


@SHARDED
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@on_ranks(4)
def test_gradients_that_arrive_in_several_turns(bucket_bytes: int, shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(
        mesh, Repeated, bucket_bytes=bucket_bytes, shard_optimizer=shard_optimizer
    )
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    plain(x).square().mean().backward()
    model(*own(mesh, x)).square().mean().backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_parameters_that_some_ranks_or_none_use_or_outside_of_the_forward() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(mesh, Branching)
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    rank = torch.distributed.get_rank()
    for one, rows in ((plain, range(4)), (model, [rank])):
        losses = [one(x[r], r % 2 == 1).sum() + one.blocks[3](x[r]).square().sum() for r in rows]
        (sum(losses) / len(losses)).backward()
    same_gradients(plain, model)
    assert model.blocks[2].up.weight.grad is None
    for one in (plain, model):
        one.zero_grad()
        one.blocks[3](x[0]).sum().backward()  # no forward of the module at all
    same_gradients(plain, model)


@SHARDED
@on_ranks(4)
def test_gradients_are_kept_until_a_pass_that_reduces_them(shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    replicas_keep_gradients(
        *single_and_replicated(mesh, shard_optimizer=shard_optimizer), mesh, shard_optimizer
    )


@SHARDED
@on_ranks(4)
def test_zero_grad_drops_what_is_kept(shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(mesh, shard_optimizer=shard_optimizer)
    with model.no_sync():
        loss_of(model, *own(mesh, *batch(1))).backward()
    model.zero_grad()
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@SHARDED
@on_ranks(4)
def test_batches_of_different_sizes_with_a_divisor_of_one(shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(mesh, shard_optimizer=shard_optimizer)
    model.set_gradient_divide_factor(1)
    # gradients are added to those of a pass before
    for step in range(2):
        tokens, targets = batch(step, rows=7)  # 2, 2, 2 and 1 rows
        loss_of(plain, tokens, targets).backward()
        mine = own(mesh, tokens, targets)
        loss: Any = F.cross_entropy(
            model(mine[0]).flatten(0, 1), mine[1].flatten(), reduction="sum"
        )
        (loss / targets.numel()).backward()
    same_gradients(plain, model)


@SHARDED
@on_ranks(4)
def test_frozen_parameters_now_and_later(shard_optimizer: bool) -> None:
    plain, model = two_equal_models()
    replicas_freeze(plain, model, mesh_of(4, 1), shard_optimizer)


@SHARDED
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(4)
def test_gradients_asked_for_by_name(compiled: bool, shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    replicas_are_asked_for_gradients(
        mesh, *single_and_replicated(mesh, shard_optimizer=shard_optimizer), compiled
    )


@SHARDED
@on_ranks(4)
def test_gradients_of_inputs_alone_take_no_collective(shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(mesh, lambda: Block(6), shard_optimizer=shard_optimizer)
    x = torch.randn(8, 6, dtype=torch.float64)
    (rows,) = (rows.requires_grad_() for rows in own(mesh, x))
    with observed() as events:
        (got,) = torch.autograd.grad(model(rows).square().sum(), rows)
    assert not events
    (expected,) = torch.autograd.grad(plain(x.requires_grad_()).square().sum(), x)
    torch.testing.assert_close(got, *own(mesh, expected))


@on_ranks(4)
def test_gradients_that_some_ranks_or_none_are_to_get() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_replicated(mesh, Branching)
    x = torch.randn(2, 6, dtype=torch.float64)
    for block, odd, found in ((2, False, None), (1, True, LayoutError), (1, False, Tensor)):
        out = model(x, odd and torch.distributed.get_rank() % 2 == 1)
        asked = [model.blocks[0].up.bias, model.blocks[block].up.bias]
        with (
            pytest.raises(LayoutError, match="2 of 4 data-parallel ranks")
            if found is LayoutError
            else nullcontext()
        ):
            _, got = torch.autograd.grad(out.sum(), asked, allow_unused=True)
            assert (got is None) is (found is None)


class Recomputed(torch.autograd.Function):
    """A layer whose backward is a pass of its own, for inputs and parameters by name."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *params: Tensor) -> Any:
        ctx.layer, ctx.x = layer, x.detach()
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            out = ctx.layer(x)
        return None, *torch.autograd.grad(out, [x, *ctx.layer.parameters()], grad)


class Recomputing(nn.Sequential):
    """Its layer, recomputed."""

    def forward(self, x: Tensor) -> Any:
        apply: Any = Recomputed.apply
        return apply(self[0], x, *self[0].parameters())


@SHARDED
@on_ranks(4)
def test_a_pass_by_name_inside_of_another_is_reduced_once(shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(
        mesh, lambda: Recomputing(nn.Linear(6, 6)), shard_optimizer=shard_optimizer
    )
    model.set_gradient_divide_factor(1)
    x = torch.randn(8, 6, dtype=torch.float64)
    plain(x).square().sum().backward()
    model(*own(mesh, x)).square().sum().backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_a_module_inside_reduces_its_own_parameters() -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models()
    replicate(model.blocks[0], mesh["data"])
    replicate(model, mesh["data"])
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


class Towers(nn.Module):
    """The sum of two towers of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(OptionalFirst(6) for _ in range(2))

    def forward(self, x: Tensor, deep: Sequence[bool]) -> Tensor:
        one, other = (tower(x, each) for tower, each in zip(self.towers, deep, strict=True))
        out: Tensor = one.tanh() + 2 * other
        return out


@SHARDED
@pytest.mark.parametrize("nested", [False, True])
@on_ranks(4)
def test_replicated_modules_of_which_ranks_use_different_parameters(
    nested: bool, shard_optimizer: bool
) -> None:
    """Each reduces its own.

    In another order on every rank, gradients of one would be those of the other.
    """
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models(Towers)
    for tower in model.towers:
        replicate(tower, mesh["data"], bucket_bytes=1, shard_optimizer=shard_optimizer)
    if nested:
        replicate(model, mesh["data"], bucket_bytes=1, shard_optimizer=shard_optimizer)
    rows = torch.randn(4, 3, 6, dtype=torch.float64)
    deep = [(True, True), (True, False), (False, True), (True, True)]
    losses = [plain(x, each).square().mean() for x, each in zip(rows, deep, strict=True)]
    (sum(losses) / len(losses)).backward()
    rank = torch.distributed.get_rank()
    model(rows[rank], deep[rank]).square().mean().backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_reduced_in_another_dtype() -> None:
    mesh = mesh_of(4, 1)
    model = replicate(Model().bfloat16(), mesh["data"], reduce_dtype=torch.float32)
    with observed() as events:
        loss_of(model, *own(mesh, *batch(0))).backward()
    assert {tensor.dtype for event in events for tensor in event.tensors} == {torch.float32}
    assert all(
        param.grad is not None and param.grad.dtype == torch.bfloat16
        for param in model.parameters()
    )


# --- sharded optimizer state ----------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(4)
def test_sharded_state_trains_as_one_device(name: str) -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(mesh, shard_optimizer=True)
    optimizers = [OPTIMIZERS[name](one) for one in (plain, model)]
    train_alike(plain, model, mesh, optimizers)
    torch.testing.assert_close(model(batch(3)[0]), plain(batch(3)[0]))


@on_ranks(4)
def test_state_and_gradients_are_sharded_and_parameters_are_views() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_replicated(mesh, shard_optimizer=True)
    seen: list[Tensor] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(module.weight))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, *own(mesh, *batch(0))).backward()
    optimizer.step()
    weight = model.head.weight  # 13 rows on 4 ranks
    assert weight.placements == weight.grad.placements == (Shard(0),)
    shards = [weight, weight.grad, optimizer.state[weight]["exp_avg"]]
    rows = 4 if mesh.get_local_rank("data") < 3 else 1
    assert all(local_shard(shard).shape == (rows, 10) for shard in shards)
    assert seen[0].shape == (13, 10)
    assert local_shard(weight).untyped_storage().data_ptr() == seen[0].untyped_storage().data_ptr()


@on_ranks(4)
def test_updated_parameters_are_gathered_once() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_replicated(mesh, shard_optimizer=True, bucket_bytes=2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for gathers in (0, 1):
        for again in (False, True):
            with CommDebugMode() as counted:
                loss = loss_of(model, *own(mesh, *batch(0)))
            assert counts(counted) == ({"all_gather": 1} if gathers and not again else {})
        with CommDebugMode() as counted:
            loss.backward()
        assert counts(counted) == {"reduce_scatter": 1, "all_reduce": 1}  # a number is not sharded
        optimizer.step()


@on_ranks(4)
def test_a_model_made_without_memory_is_filled_later() -> None:
    with torch.device("meta"):
        model = Model().double()
    replicas_are_filled(two_equal_models()[0], model, mesh_of(4, 1))


@SHARDED
@on_ranks(2)
def test_values_of_a_model_made_without_memory_are_those_of_one_rank(shard_optimizer: bool) -> None:
    """Replicas that each rank initialized from a seed of its own differed for good."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    replicate(model, mesh_of(2, 1)["data"], shard_optimizer=shard_optimizer)
    outer = nn.Sequential(model)
    outer.to_empty(device="cpu")
    with pytest.raises(StyleError, match=r"\['weight', 'bias'\] have memory but no values"):
        model(torch.ones(2, 4))
    torch.manual_seed(0 if shard_optimizer else dist.get_rank())
    model.reset_parameters()
    model(torch.ones(2, 4)).sum().backward()
    torch.manual_seed(0)
    expected = nn.Linear(4, 4)
    assert torch.equal(full(model.weight), expected.weight)
    assert torch.equal(full(model.bias), expected.bias)


@on_ranks(4)
def test_what_sharded_state_refuses() -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_replicated(mesh, shard_optimizer=True)
    data = own(mesh, *batch(0))
    handle = model.head.bias.register_hook(lambda grad: grad * 3)
    with pytest.raises(StyleError, match="gradient hook"):
        loss_of(model, *data).backward()
    handle.remove()
    model.extra = nn.Linear(4, 4)
    with pytest.raises(StyleError, match="a parameter was added"):
        model(data[0])


# --- parameters and copies ------------------------------------------------------------------------


@on_ranks(4)
def test_all_ranks_get_the_values_of_one() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(torch.distributed.get_rank())
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean += torch.rand(4)
    replicate(model, mesh["data"], src_data_rank=1)
    expected = model.state_dict()
    for data in range(2):
        # the ranks with coordinate 1 along "data"
        torch.manual_seed(mesh.get_local_rank("tensor") + 2)
        same: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        same[1].running_mean += torch.rand(4)
        assert all(
            torch.equal(value, expected[name]) for name, value in same.state_dict().items()
        ), data


@SHARDED
@on_ranks(4)
@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
def test_a_copy_is_replicated_too(
    shard_optimizer: bool, copied_by: Callable[[nn.Module], Any]
) -> None:
    mesh = mesh_of(4, 1)
    replicas_are_copied(
        *single_and_replicated(mesh, shard_optimizer=shard_optimizer), mesh, copied_by
    )


@on_ranks(4)
def test_parameters_that_are_replaced_or_added() -> None:
    mesh = mesh_of(4, 1)
    replicas_grow(*single_and_replicated(mesh), mesh)


@pytest.mark.parametrize(
    ("inside", "shard_optimizer"), [(False, False), (True, False), (True, True)]
)
@on_ranks(2)
def test_compiled_as_one_or_inside(inside: bool, shard_optimizer: bool) -> None:
    mesh = mesh_of(2, 1)
    plain, model = single_and_replicated(
        mesh,
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)),
        shard_optimizer=shard_optimizer,
    )
    for child in model if inside else ():
        child.compile(backend="aot_eager")
    compiled: Any = model if inside else torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 6, dtype=torch.float64)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for _ in range(2):
        plain(x).square().mean().backward()
        compiled(*own(mesh, x)).square().mean().backward()
        same_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- collectives ----------------------------------------------------------------------------------


@SHARDED
@on_ranks(4)
def test_one_reduction_for_each_bucket_beside_backward(shard_optimizer: bool) -> None:
    mesh = mesh_of(4, 1)
    _, model = single_and_replicated(mesh, shard_optimizer=shard_optimizer)
    began: list[int] = []
    counted = CommDebugMode()
    model.embedding.register_full_backward_pre_hook(
        lambda *_: began.append(counted.get_total_counts())
    )
    with counted:
        loss_of(model, *own(mesh, *batch(0))).backward()
    sizes = [sum(replica.leaf.nbytes for replica in bucket.replicas) for bucket in buckets(model)]
    assert all(
        size <= SMALL or len(b.parameters) == 1
        for size, b in zip(sizes, buckets(model), strict=True)
    )
    # The scalar does not have shards: with those of the others, its bucket takes a second
    # collective.
    assert counted.get_total_counts() == len(sizes) + shard_optimizer > 10
    # before the first layer's backward all but its own and the number's
    assert began[0] >= len(sizes) - 3


# --- faults ---------------------------------------------------------------------------------------


@SHARDED
@on_ranks(4)
def test_ranks_of_uneven_tensor_shards_reduce_the_same_buckets(shard_optimizer: bool) -> None:
    # Shards of 6 and 5 columns: 264 + 528 and 264 + 440 bytes, so by its own bytes one rank of two
    # would join both.
    plain = nn.Sequential(nn.Linear(6, 11, bias=False), nn.Linear(11, 11, bias=False)).double()
    model: Any = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for linear in model:
        linear.weight = nn.Parameter(
            distribute_tensor(linear.weight.detach(), mesh["tensor"], [Shard(1)])
        )
    replicate(model, mesh["data"], bucket_bytes=780, shard_optimizer=shard_optimizer)
    x = torch.randn(2, 3, 6, dtype=torch.double)
    plain(x).square().sum().div(2).backward()
    rows = distribute_tensor(x[mesh.get_local_rank("data")], mesh["tensor"], [Replicate()])
    # whose gradient is gathered after the last layer's weight
    model(rows.requires_grad_()).square().sum().backward()
    own_gradients = [p.grad.full_tensor() for p in model.parameters()]
    for got, weight in zip(own_gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(got, weight.grad)


@SHARDED
@pytest.mark.parametrize("kept", [False, True])
@on_ranks(4)
def test_a_backward_that_raises_leaves_gradients_as_they_were(
    kept: bool, shard_optimizer: bool
) -> None:
    mesh = mesh_of(4, 1)
    replicas_outlive_a_fault(
        *single_and_replicated(mesh, shard_optimizer=shard_optimizer), mesh, kept
    )


@on_ranks(4)
def test_what_is_refused() -> None:
    mesh = mesh_of(4, 1)
    plain, model = single_and_replicated(mesh)
    with pytest.raises(LayoutError, match="replicated already"):
        replicate(model, mesh["data"])
    with pytest.raises(LayoutError, match="fully_shard averages"):
        replicate(nn.Sequential(fully_shard(nn.Linear(4, 4), mesh["data"])), mesh["data"])
    with pytest.raises(StyleError, match="mesh='data' is the name of an axis"):
        replicate(plain, "data")
    with pytest.raises(StyleError, match="must be positive"):
        replicate(plain, mesh["data"], bucket_bytes=0)
    with pytest.raises(LockstepError, match="parameters"):
        replicate(nn.Linear(4, 4 + torch.distributed.get_rank() % 2), mesh["data"])
    sparse = replicate(nn.Embedding(4, 4, sparse=True), mesh["data"])
    with pytest.raises(LayoutError, match="is sparse"):
        sparse(torch.tensor([1])).sum().backward()
    loss = loss_of(model, *own(mesh, *batch(0)))
    with pytest.raises(SecondOrderError, match="create_graph=True"):
        torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    handle = model.head.weight.register_hook(lambda grad: 3 * grad)
    with pytest.raises(StyleError, match="registered after"):
        torch.autograd.grad(loss, [model.head.weight])
    handle.remove()
    model.head.weight.register_post_accumulate_grad_hook(lambda leaf: None)
    with pytest.raises(StyleError, match="post-accumulate-grad hook"):
        loss_of(model, *own(mesh, *batch(0))).backward()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(4)
@pytest.mark.parametrize(
    "shard",
    [partial(fully_shard, reshard_after_forward=False), partial(replicate, shard_optimizer=True)],
)
def test_parameters_that_get_other_data_are_gathered_again_where_shards_are_empty(
    shard: Callable[..., Any],
) -> None:
    mesh = mesh_of(4, 1)["data"]
    # two rows: two ranks are without rows, and all empty tensors have one address
    start = nn.Linear(4, 2)
    model = shard(copy.deepcopy(start), mesh)
    rows = torch.ones(1, 4)
    with torch.no_grad():
        model(rows)
        for param in (*model.parameters(), *start.parameters()):
            param.data = 2 * param.data
        torch.testing.assert_close(model(rows), start(rows))
        model.load_state_dict(
            {name: 2 * value for name, value in model.state_dict().items()}, assign=True
        )
        torch.testing.assert_close(model(rows), 2 * start(rows))


# --- writes in a forward --------------------------------------------------------------------------


class Writing(nn.Module):
    """A layer whose forward writes to its weight before it uses it."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.layer.weight, x)
        out: Tensor = self.layer(x)
        return out


def rank_writes(weight: Tensor, x: Tensor) -> None:
    """Only ranks with a positive first entry write."""
    if x[0, 0] > 0:
        weight.mul_(0.5)


def moves(weight: Tensor, x: Tensor) -> None:
    weight.data = weight.data * x.max()


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "values of the rank's rows": lambda weight, x: weight.clamp_(max=float(x.max()) * 0.1),
    "on some ranks": rank_writes,
    "through .data": lambda weight, x: weight.data.mul_(x.max()),
    "to other memory": moves,
    "through an array": lambda weight, x: weight.detach().numpy().fill(float(x.max())),
}


@SHARDED
@pytest.mark.parametrize("kept", ["", "for a backward", "for a reduction"])
@pytest.mark.parametrize("case", [*WRITES, "an embedding with max_norm", "frozen"])
@on_ranks(2)
def test_a_forward_that_writes_its_ranks_values_is_an_error(
    case: str, kept: str, shard_optimizer: bool
) -> None:
    """Replicas drifted apart for good, in silence."""
    mesh = mesh_of(2, 1)
    rank = mesh.get_local_rank("data")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 4))
    x: Any = torch.arange(5) + 5 * rank
    if case in WRITES:
        model = nn.Sequential(nn.Linear(4, 4), Writing(WRITES[case]))
        x = torch.full((3, 4), 2.0 - 3 * rank)
        nn.init.eye_(model[0].weight)
    model[0].requires_grad_(case != "frozen")
    replicate(model, mesh["data"], shard_optimizer=shard_optimizer)
    model.set_requires_gradient_sync(not kept)
    loss = model(x).sum()
    finish: Callable[[], object] = loss.backward
    if kept:
        loss.backward()
        model.set_requires_gradient_sync(True)
        finish = model.reduce_gradients
    if kept == "for a backward":
        finish = model(x).sum().backward
    with pytest.raises(StyleError, match="wrote different values to parameters"):
        finish()


class Replacing(nn.Module):
    """A layer whose forward gets another parameter, or one more."""

    def __init__(self, name: str, *, on_rank: bool) -> None:
        super().__init__()
        self.layer, self.name, self.on_rank = nn.Linear(4, 4), name, on_rank

    def forward(self, x: Tensor) -> Tensor:
        if self.on_rank:
            values = self.layer.weight.detach() * 2
            setattr(self.layer, self.name, nn.Parameter(values))
        out: Tensor = self.layer(x)
        return out if self.name == "weight" else out + getattr(self.layer, self.name, x)


@SHARDED
@pytest.mark.parametrize("name", ["weight", "bias_of_rows"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
@on_ranks(2)
def test_a_forward_that_replaces_a_parameter_is_an_error(
    ranks: list[int], name: str, shard_optimizer: bool
) -> None:
    """The gradient of the new parameter was not averaged, so replicas drifted apart."""
    mesh = mesh_of(2, 1)
    on_rank = mesh.get_local_rank("data") in ranks
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), Replacing(name, on_rank=on_rank))
    replicate(model, mesh["data"], shard_optimizer=shard_optimizer)
    loss = model(torch.ones(4, 4)).sum()
    names = rf"added the parameters \['1.layer.{name}'\]"
    with pytest.raises(StyleError, match=names if on_rank else "on this rank they wrote to no"):
        loss.backward()


@on_ranks(2)
def test_a_forward_may_register_a_parametrization_and_remove_it() -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            parametrize.register_parametrization(self, "weight", nn.Identity())
            out = super().forward(input)
            parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
            return out

    plain, model = single_and_replicated(mesh_of(2, 1), lambda: Adapted(4, 4))
    for module in plain, model:
        module(torch.ones(4, 4, dtype=torch.float64)).square().sum().backward()
    same_gradients(plain, model)


@SHARDED
@on_ranks(2)
def test_a_forward_may_write_what_all_ranks_have(shard_optimizer: bool) -> None:
    def normalize(weight: Tensor, _: Tensor) -> object:
        return weight.div_(weight.norm(dim=1, keepdim=True))

    plain, model = single_and_replicated(
        mesh_of(2, 1), lambda: Writing(normalize), shard_optimizer=shard_optimizer
    )
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for _ in range(3):
        plain(x).square().mean().backward()
        model(*own(mesh_of(2, 1), x)).square().mean().backward()
        same_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@SHARDED
@on_ranks(2)
def test_later_forwards_are_read_in_blocks_that_compare_replicas(shard_optimizer: bool) -> None:
    """Values without a version are read in the first forward; later ones would take too long."""
    mesh = mesh_of(2, 1)
    writes: list[Tensor] = []

    def write(weight: Tensor, x: Tensor) -> None:
        if writes:
            weight.data.mul_(x.max())

    model: Any = replicate(Writing(write), mesh["data"], shard_optimizer=shard_optimizer)
    x = torch.full((3, 4), 2.0 + mesh.get_local_rank("data"))
    model(x).sum().backward()
    writes.append(x)
    loss = model(x).sum()
    loss.backward()
    with checked_replicas():
        loss = model(x).sum()
    with pytest.raises(
        StyleError, match=r"on this rank they wrote to parameters \['layer.weight'\]"
    ):
        loss.backward()


@pytest.mark.parametrize("broadcast_buffers", [False, True])
@on_ranks(2)
def test_buffers_are_each_ranks_own_or_the_first_ranks(broadcast_buffers: bool) -> None:
    mesh = mesh_of(2, 1)
    torch.manual_seed(0)
    model: Any = replicate(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        mesh["data"],
        broadcast_buffers=broadcast_buffers,
    )
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(mesh.get_local_rank("data")))
    norm = copy.deepcopy(model[1])
    for _ in range(2):
        model(rows).sum().backward()
        assert model[1].running_mean.abs().sum() > 0
    # the second forward began with the statistics of the first rank
    first = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for batch_ in (first if broadcast_buffers else rows, rows):
        norm(model[0](batch_).detach())
    torch.testing.assert_close(model[1].running_mean, norm.running_mean)
    assert model[1].num_batches_tracked == 2


@pytest.mark.parametrize("shard_optimizer", [False, True])
@on_ranks(4)
def test_kept_gradients_are_reduced_without_a_backward(shard_optimizer: bool) -> None:
    """Also those of a rank that has kept none, and zeros for torch.autograd.grad meanwhile."""
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models()
    replicate(model.blocks[0], mesh["data"], shard_optimizer=shard_optimizer)
    replicate(model, mesh["data"], shard_optimizer=shard_optimizer)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        backward_of_each(plain, model, mesh, step)
    model.reduce_gradients()
    same_gradients(plain, model)
    # nothing is kept any more
    model.reduce_gradients()
    same_gradients(plain, model)
    rank = torch.distributed.get_rank()
    hidden = torch.randn(3, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for one in (plain, model):
        one.zero_grad()
    plain_loss = plain.blocks[0](hidden).square().sum()
    (plain_loss / 4).backward()
    if rank == 1:
        model.blocks[0](hidden).square().sum().backward()
    model.blocks[0].reduce_gradients()
    same_gradients(plain.blocks[0], model.blocks[0])
    hooked = model.blocks[0](hidden).square().sum()
    hooked.register_hook(lambda _: model.reduce_gradients())
    with pytest.raises(StyleError, match="a backward is running"):
        hooked.backward()


def methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))}


def test_methods_of_units_name_the_way_to_have_them() -> None:
    """They were AttributeErrors; in torch every replicated module has them."""
    assert methods(FSDPModule) <= methods(ReplicateModule)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
        plain: Any = replicate(nn.Linear(3, 3), mesh)
        for name in ("unshard", "set_is_last_backward", "finalize_backward", "reset_iter_state"):
            with pytest.raises(UnsupportedModuleError, match=f"^{name}: .*Pass dp_mesh_dims="):
                getattr(plain, name)()
        unit: Any = replicate(
            nn.Linear(3, 3), mesh, dp_mesh_dims=DataParallelMeshDims(replicate="data")
        )
        unit.set_is_last_backward(False)
        unit(torch.ones(2, 3)).sum().backward()
        assert unit.weight.grad is None
        unit.finalize_backward()
        assert unit.weight.grad is not None
