"""shard_parameter, _shard_tensor and shard_module: what they do, and every way they refuse, on all ranks alike.

Covers: module.py, plan.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ChunkShardingSpec,
    MissingParameterError,
    ParameterError,
    PlanConflictError,
    PlanTypeError,
    ProcessGroupError,
    RankMismatchError,
    ShardedTensor,
    Sharder,
    SharderPathError,
    ShardingPlan,
    ShardingPlanner,
    ShardingSpecError,
    UnsupportedOpError,
    _collect_local_shard,
    _reshard_output,
    _shard_tensor,
    shard_module,
    shard_parameter,
)
from shoal_shard_api.testing import chunk, enumerable

GRID = enumerable(([0, 0], [4, 8], 0), ([4, 0], [4, 8], 1), ([0, 8], [4, 8], 2), ([4, 8], [4, 8], 3))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(16, 8)
        self.down = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


class Doubled(Sharder):
    """Replaces a Linear by one that holds a sharded weight and doubles its result."""

    def shard(self, module: Any) -> nn.Module:
        class Double(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(_shard_tensor(module.weight.detach(), chunk(0)))
                self.inner = nn.Identity()

            def forward(self, x: torch.Tensor) -> Any:
                return self.inner(torch.nn.functional.linear(x, self.weight) * 2)

        return Double()


def snapshot(module: nn.Module) -> list[Any]:
    """All that sharding could change: objects, not copies."""
    return [
        (path, id(owner), [(n, id(p)) for n, p in owner._parameters.items()], len(owner._forward_hooks))
        for path, owner in module.named_modules()
    ]


@on_ranks(4)
@pytest.mark.parametrize("spec", [chunk(0), chunk(1, (3, 1, 0, 2)), GRID, enumerable(([0, 0], [8, 16], 2))], ids=str)
def test_shard_parameter_takes_the_data_of_the_source(spec: Any) -> None:
    torch.manual_seed(dist.get_rank())
    linear = nn.Linear(16, 8)
    expected = [torch.empty_like(linear.weight) for _ in range(4)]
    dist.all_gather(expected, linear.weight.detach())
    shard_parameter(linear, "weight", spec, src_rank=2)
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, ShardedTensor)
    assert weight.sharding_spec() == spec
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.equal(weight.detach(), expected[2])
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]


@on_ranks(4)
def test_what_is_no_parameter_stays_what_it_is() -> None:
    module = nn.BatchNorm1d(8)
    module.register_buffer("table", torch.arange(8.0))
    module.plain = torch.arange(4.0)
    shard_parameter(module, "table", chunk(0))
    shard_parameter(module, "plain", chunk(0))
    assert isinstance(module.get_buffer("table"), ShardedTensor)
    assert isinstance(module.__dict__["plain"], ShardedTensor)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    shard_parameter(frozen, "weight", chunk(0))
    assert not frozen.weight.requires_grad


def _on(rank: int, there: Any, elsewhere: Any) -> Any:
    return there if dist.get_rank() == rank else elsewhere


PARAMETER_FAILURES: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "no attribute": (lambda m: ("absent", chunk(0)), AttributeError, "Linear has no attribute 'absent'"),
    "no attribute on one rank": (
        lambda m: (_on(2, "absent", "weight"), chunk(0)),
        AttributeError,
        r"on rank\(s\) 2 of the 4 .*'absent'",
    ),
    "no tensor": (lambda m: ("in_features", chunk(0)), ValueError, "in_features must be a Tensor, found int"),
    "not contiguous": (lambda m: ("turned", chunk(0)), ValueError, r"turned is not contiguous: size \(8, 16\)"),
    "not contiguous on one rank": (
        lambda m: (_on(3, "turned", "weight"), chunk(0)),
        ValueError,
        r"rank\(s\) 3 .*not contiguous",
    ),
    "no spec": (lambda m: ("weight", "rows"), TypeError, "expected a ShardingSpec, got str"),
    "dim out of range": (lambda m: ("weight", chunk(2)), ValueError, r"Linear.weight: dim 2 .*\(8, 16\)"),
    "rank outside": (lambda m: ("weight", chunk(0, (0, 4))), ValueError, "global rank 4 is not among"),
    "spec with a gap": (
        lambda m: ("weight", enumerable(([0, 0], [8, 8], 0))),
        ValueError,
        r"no shard holds .*\[0:8, 8:16\]",
    ),
    "different specs": (
        lambda m: ("weight", _on(1, chunk(1), chunk(0))),
        ValueError,
        r"sharding_spec=.*dim=0.* on rank: 0 does not match with sharding_spec=.*dim=1.* on rank: 1",
    ),
    "different sources": (
        lambda m: ("weight", chunk(0), _on(2, 1, 0)),
        ValueError,
        "src_rank=0 on rank: 0 .* src_rank=1 on rank: 2",
    ),
    "no such source": (lambda m: ("weight", chunk(0), 4), RuntimeError, "src_rank=4 is not a rank .* of 4"),
    "different sizes": (lambda m: (_on(1, "bias", "weight"), chunk(0)), ValueError, r"size=\(8, 16\) .*size=\(8,\)"),
}


@on_ranks(4)
@pytest.mark.parametrize("case", PARAMETER_FAILURES)
def test_shard_parameter_refuses_on_all_ranks_and_changes_nothing(case: str) -> None:
    arguments, kind, text = PARAMETER_FAILURES[case]
    module = nn.Linear(16, 8)
    module.turned = module.weight.detach().t().contiguous().t()
    before = snapshot(module)
    with pytest.raises(kind, match=f"(?s){text}") as raised:
        shard_parameter(module, *arguments(module))
    assert snapshot(module) == before
    messages: list[Any] = [None] * 4
    dist.all_gather_object(messages, (type(raised.value).__name__, str(raised.value)))
    assert len(set(messages)) == 1
    shard_parameter(module, "weight", chunk(0))  # nobody is left in a collective
    assert torch.equal(module.weight, module.weight)


@on_ranks(4)
def test_the_errors_have_their_own_types() -> None:
    linear = nn.Linear(4, 4)
    with pytest.raises(MissingParameterError):
        shard_parameter(linear, "absent", chunk(0))
    shard_parameter(linear, "weight", chunk(0))
    with pytest.raises(ParameterError, match="already"):
        shard_parameter(linear, "weight", chunk(1))
    with pytest.raises(ProcessGroupError):
        shard_parameter(linear, "bias", chunk(0), src_rank=-1)


@on_ranks(4)
def test_shard_tensor_refuses_on_all_ranks() -> None:
    rank = dist.get_rank()
    full = torch.arange(12.0).view(3, 4)
    with pytest.raises(ValueError, match=r"rank\(s\) 1 .*tensor is not contiguous"):
        _shard_tensor(full.t() if rank == 1 else full.t().contiguous(), chunk(0))
    with pytest.raises(RankMismatchError, match=r"dtype=torch.float32 on rank: 0.*torch.float64 on rank: 3"):
        _shard_tensor(full.double() if rank == 3 else full, chunk(0))
    with pytest.raises(RankMismatchError, match=r"src_rank=0 on rank: 0 .*src_rank=1 on rank: 1"):
        _shard_tensor(full, chunk(0), src_rank=rank)
    with pytest.raises(RankMismatchError, match=r"sharding_spec=.*rank:3/cpu, rank:2.* on rank: 2"):
        _shard_tensor(full, chunk(0, (3, 2, 1, 0)) if rank == 2 else chunk(0))
    assert torch.equal(_shard_tensor(full, chunk(0)), full)


# --- whole modules ------------------------------------------------------------------------------------------------


def megatron(output: Any = None) -> ShardingPlan:
    return ShardingPlan(
        plan={"up.weight": chunk(0), "up.bias": chunk(0), "down.weight": chunk(1)},
        output_plan={"": output or chunk(0)},
        return_local_tensor=[""],
    )


@on_ranks(4)
def test_a_plan_shards_parameters_and_hooks_outputs() -> None:
    model = MLP()
    alone = copy.deepcopy(model)
    shard_module(model, megatron())
    x = torch.randn(8, 16)
    local, rank = model(x), dist.get_rank()
    assert type(local) is torch.Tensor
    torch.testing.assert_close(local, alone(x)[2 * rank : 2 * rank + 2])
    assert {n for n, p in model.named_parameters() if isinstance(p, ShardedTensor)} == {
        "up.weight",
        "up.bias",
        "down.weight",
    }


@on_ranks(4)
def test_a_megatron_mlp_trains_as_on_one_device() -> None:
    model = MLP()
    alone = copy.deepcopy(model)
    shard_module(model, megatron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    rank = dist.get_rank()
    for step in range(5):
        torch.manual_seed(step)
        x, target = torch.randn(8, 16), torch.randn(8, 16)
        rows = slice(2 * rank, 2 * rank + 2)
        ((model(x) - target[rows]) ** 2).sum().backward()
        ((alone(x) - target) ** 2).sum().backward()
        for name, parameter in alone.named_parameters():
            got = model.get_parameter(name).grad
            assert got is not None
            full = got.full_tensor() if isinstance(got, ShardedTensor) else got
            torch.testing.assert_close(full, parameter.grad)
        optimizer.step(), expected.step()
        optimizer.zero_grad(), expected.zero_grad()
    for name, parameter in alone.named_parameters():
        got = model.get_parameter(name).detach()
        full = got.full_tensor() if isinstance(got, ShardedTensor) else got
        torch.testing.assert_close(full, parameter.detach())


@on_ranks(4)
def test_the_squeezed_dim_is_that_of_the_sharding_alone() -> None:
    class Give(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    give = _collect_local_shard(Give())
    full = torch.arange(20.0).view(4, 5)
    assert give(_shard_tensor(full, chunk(0))).shape == (5,)
    assert give(_shard_tensor(full, chunk(1))).shape == (
        (4, 2) if dist.get_rank() < 2 else (4,) if dist.get_rank() == 2 else (4, 0)
    )
    assert give(_shard_tensor(torch.zeros(8, 1), chunk(0))).shape == (2, 1)
    assert give(full) is full
    pair = [full]
    assert give(pair) is pair
    cells = enumerable(([0, 0], [1, 5], 0), ([1, 0], [1, 5], 1), ([2, 0], [2, 5], 2))
    assert give(_shard_tensor(full, cells)).shape == {0: (1, 5), 1: (1, 5), 2: (2, 5), 3: (0,)}[dist.get_rank()]
    several = enumerable(([0, 0], [2, 5], 0), ([2, 0], [2, 5], 0))
    if dist.get_rank() == 0:
        with pytest.raises(UnsupportedOpError, match="rank 0 has 2 shards"):
            give(_shard_tensor_alone(full, several))


def _shard_tensor_alone(full: torch.Tensor, spec: Any) -> ShardedTensor:
    """Two shards on this rank, without the others' help."""
    made = ShardedTensor(spec, *full.shape)
    for part, new in zip(made._parts, full.chunk(2), strict=True):
        part.copy_(new)
    return made


@on_ranks(4)
def test_reshard_output_leaves_other_outputs_alone() -> None:
    identity = _reshard_output(nn.Identity(), chunk(1))
    tensor = _shard_tensor(torch.arange(20.0).view(4, 5), chunk(0))
    assert identity(tensor).sharding_spec() == chunk(1)
    assert tensor.sharding_spec() == chunk(0)
    plain = torch.zeros(2)
    assert identity(plain) is plain


@on_ranks(4)
def test_a_sharder_replaces_its_module() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 16))
    alone = copy.deepcopy(model)
    plan = ShardingPlan(
        plan={"0": Doubled(), "2.weight": chunk(0)}, output_plan={"0.inner": chunk(1)}, return_local_tensor=[]
    )
    shard_module(model, plan)
    assert type(model[0]).__name__ == "Double"
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x).full_tensor(), alone[2](torch.relu(alone[0](x) * 2)))


@on_ranks(4)
def test_a_module_that_occurs_twice_is_replaced_twice() -> None:
    shared = nn.Linear(16, 16, bias=False)
    model: Any = nn.Sequential(shared, nn.Sequential(shared))
    shard_module(model, ShardingPlan(plan={"1.0": Doubled()}))
    assert model[0] is model[1][0]
    assert type(model[0]).__name__ == "Double"


@on_ranks(4)
@pytest.mark.parametrize("both", [False, True], ids=["one name", "both names"])
def test_tied_parameters_stay_tied(both: bool) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(12, 8), "head": nn.Linear(8, 12, bias=False)})
    model["head"].weight = model["embed"].weight
    plan = {"embed.weight": chunk(0)} | ({"head.weight": chunk(0)} if both else {})
    shard_module(model, ShardingPlan(plan=plan))
    assert isinstance(model["head"].weight, ShardedTensor)
    assert model["head"].weight is model["embed"].weight
    with torch.no_grad():
        model["head"].weight.fill_(1)
    assert torch.equal(model["embed"].weight.detach(), torch.ones(12, 8))


@on_ranks(4)
def test_nested_modules_and_a_planner() -> None:
    class Rows(ShardingPlanner):
        def build_plan(self, module: nn.Module) -> ShardingPlan:
            return ShardingPlan(plan={name: chunk(0) for name, p in module.named_parameters() if p.dim() == 2})

    model = nn.Sequential(MLP(), nn.Sequential(MLP()))
    alone = copy.deepcopy(model)
    shard_module(model, Rows().build_plan(model))
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x).full_tensor(), alone(x))


class _Raises(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        if dist.get_rank() == 2:
            raise ZeroDivisionError("no way")
        return nn.Identity()


class _Nothing(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return None  # type: ignore[return-value]  # the mistake under test


def _plan(entries: dict[str, Any], **more: Any) -> ShardingPlan:
    return ShardingPlan(plan={"up.bias": chunk(0), **entries}, **more)


MODULE_FAILURES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no plan": (lambda: {"up.weight": chunk(0)}, TypeError, "expected a ShardingPlan, got dict"),
    "entry of another type": (lambda: _plan({"up.weight": 3}), TypeError, r"plan\['up.weight'\] .* got int"),
    "output of another type": (
        lambda: _plan({}, output_plan={"": Doubled()}),
        TypeError,
        r"output_plan\[''\] must be a ShardingSpec, got Doubled",
    ),
    "no such parameter": (lambda: _plan({"up.weigth": chunk(0)}), AttributeError, "Linear has no attribute 'weigth'"),
    "no such module": (lambda: _plan({"upp.weight": chunk(0)}), AttributeError, "no sub-module 'upp'"),
    "a module for a parameter": (lambda: _plan({"up": chunk(0)}), ValueError, "up must be a Tensor, found Linear"),
    "a spec that does not fit": (lambda: _plan({"up.weight": chunk(4)}), ValueError, "up.weight: dim 4"),
    "a Sharder for the root": (lambda: _plan({"": Doubled()}), KeyError, "a Sharder needs the path"),
    "a Sharder for nothing": (lambda: _plan({"middle": Doubled()}), AttributeError, "no sub-module 'middle'"),
    "a parameter below a Sharder": (
        lambda: _plan({"down": Doubled(), "down.weight": chunk(0)}),
        RuntimeError,
        "'down.weight' lies in .*Sharder of 'down'",
    ),
    "no such output": (lambda: _plan({}, output_plan={"middle": chunk(0)}), AttributeError, "output_plan.*'middle'"),
    "no such local": (lambda: _plan({}, return_local_tensor=["middle"]), AttributeError, "'middle'"),
    "an error on one rank": (
        lambda: _plan(_on(1, {"up.weight": chunk(7)}, {"up.weight": chunk(0)})),
        ValueError,
        r"on rank\(s\) 1 of the 4",
    ),
    "different entries": (lambda: _plan(_on(3, {}, {"up.weight": chunk(0)})), ValueError, r"plan entries=.*rank: 3"),
    "different specs": (
        lambda: _plan({"up.weight": _on(3, chunk(1), chunk(0))}),
        ValueError,
        "sharding_spec of up.weight=.*dim=0.*dim=1.*rank: 3",
    ),
    "different outputs": (lambda: _plan({}, output_plan=_on(1, {"": chunk(0)}, None)), ValueError, "output_plan="),
    "different Sharders": (
        lambda: _plan({"down": _on(1, _Nothing(), Doubled())}),
        ValueError,
        "Sharder of down=.*Doubled.*_Nothing",
    ),
    "a Sharder that raises": (lambda: _plan({"down": _Raises()}), ZeroDivisionError, r"on rank\(s\) 2 .*no way"),
    "a Sharder that returns nothing": (
        lambda: _plan({"down": _Nothing()}),
        TypeError,
        "returned NoneType, not a Module",
    ),
    "an output below a Sharder that is gone": (
        lambda: _plan({"down": Doubled()}, output_plan={"down.linear": chunk(0)}),
        AttributeError,
        "what replaces 'down'",
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("case", MODULE_FAILURES)
def test_shard_module_refuses_on_all_ranks_and_changes_nothing(case: str) -> None:
    plan, kind, text = MODULE_FAILURES[case]
    model = MLP()
    before = snapshot(model)
    with pytest.raises(kind, match=f"(?s){text}") as raised:
        shard_module(model, plan())
    assert snapshot(model) == before
    messages: list[Any] = [None] * 4
    dist.all_gather_object(messages, (type(raised.value).__name__, str(raised.value)))
    assert len(set(messages)) == 1
    shard_module(model, megatron())  # nobody is left in a collective


@on_ranks(4)
def test_tied_parameters_that_a_plan_tears_apart() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(12, 8), "head": nn.Linear(8, 12, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(
        PlanConflictError, match=r"'embed.weight' and 'head.weight' are one tied parameter.*dim=0.*dim=1"
    ):
        shard_module(model, ShardingPlan(plan={"embed.weight": chunk(0), "head.weight": chunk(1)}))
    with pytest.raises(PlanConflictError, match=r"'embed.weight' is tied to 'head.weight'.*Sharder of 'head'"):
        shard_module(model, ShardingPlan(plan={"embed.weight": chunk(0), "head": Doubled()}))
    assert type(model["embed"].weight) is nn.Parameter


@on_ranks(4)
def test_the_errors_of_plans_have_their_own_types() -> None:
    for entries, kind in (
        ({"": Doubled()}, SharderPathError),
        ({"up": 3}, PlanTypeError),
        ({"up.bias": chunk(3)}, ShardingSpecError),
    ):
        with pytest.raises(kind):
            shard_module(MLP(), _plan(entries))
    assert str(SharderPathError("text")) == "text"


@on_ranks(4)
def test_modules_on_sub_groups() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    pair = ((0, 1), (2, 3))[mine]
    model = MLP()
    alone = copy.deepcopy(model)
    specs: dict[str, ChunkShardingSpec] = {
        "up.weight": chunk(0, pair),
        "up.bias": chunk(0, pair),
        "down.weight": chunk(1, pair),
    }
    shard_module(model, ShardingPlan(plan=specs), src_rank=1, process_group=groups[mine])
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x).full_tensor(), alone(x))
