"""Random numbers and random factories on four gloo ranks.

Covers: api/random.py, rng/state.py, api/constructors.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal_dtensor as sd
from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    check_random_state,
    full_tensor,
)
from shoal_dtensor.api.random import OffsetBasedRNGTracker
from shoal_dtensor.errors import CommunicationForbiddenError, RandomStateError
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh, lockstep
from shoal_mesh.testing import on_ranks


def own(value: DTensor, expected: Tensor) -> Tensor:
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    box = value._spec.box(coordinate)
    return expected[tuple(slice(start, stop) for start, stop in box)]


def same(value: Tensor, expected: Tensor) -> bool:
    assert isinstance(value, DTensor)
    return value.shape == expected.shape and torch.equal(value.to_local(), own(value, expected))


@on_ranks(4)
def test_factories_equal_one_device() -> None:
    for shape in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", shape)
        for first in (Replicate(), Shard(0), Shard(1)):
            placements = [first, Shard(0)][: len(shape)]
            torch.manual_seed(1)
            expected = [
                torch.rand(9, 5),
                torch.randn(9, 5, dtype=torch.float64),
                torch.randint(-3, 8, (9, 5)),
            ]
            state = torch.get_rng_state()
            torch.manual_seed(1)
            got = [
                sd.rand(9, 5, device_mesh=mesh, placements=placements),
                sd.randn((9, 5), dtype=torch.float64, device_mesh=mesh, placements=placements),
                sd.randint(-3, 8, (9, 5), device_mesh=mesh, placements=placements),
            ]
            assert torch.equal(torch.get_rng_state(), state)
            assert all(same(a, b) for a, b in zip(got, expected, strict=True)), placements


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("rand", (9, 5)), ("randn", (9, 5)), ("randint", (-3, 8, (9, 5))), ("randperm", (11,))],
)
def test_factories_draw_from_a_generator(name: str, sizes: tuple[Any, ...]) -> None:
    # only randperm had a test with a generator
    used, expected = [torch.Generator().manual_seed(6) for _ in range(2)]
    state = torch.get_rng_state()
    mesh = init_device_mesh("cpu", (4,))
    drawn = getattr(sd, name)(*sizes, device_mesh=mesh, placements=[Shard(0)], generator=used)
    assert same(drawn, getattr(torch, name)(*sizes, generator=expected))
    assert torch.equal(used.get_state(), expected.get_state())
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(4)
@pytest.mark.parametrize("placement", [Partial(), StridedShard(0, split_factor=2)], ids=str)
def test_a_permutation_with_terms_or_runs_is_the_one_of_one_device(placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (4,))
    sd.manual_seed(6, mesh)
    drawn = sd.randperm(16, device_mesh=mesh, placements=[placement])
    torch.manual_seed(6)
    assert torch.equal(drawn.full_tensor(), torch.randperm(16))


@on_ranks(4)
def test_generators_out_of_step_are_found() -> None:
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    for attempt in range(2):
        sd.manual_seed(7 if rank == 2 else 8, mesh)
        with pytest.raises(
            RandomStateError, match=r"ranks \[0, 1, 3\] agree; ranks \[2\] agree"
        ) as caught:
            sd.rand(8, device_mesh=mesh, placements=[Shard(0), Replicate()])
        assert "axes dp, tp" in str(caught.value), attempt
    with pytest.raises(RandomStateError, match="out of step"):
        sd.randperm(8, device_mesh=mesh)
    sd.manual_seed(3, mesh)
    check_random_state(mesh)
    first = sd.rand(8, device_mesh=mesh, placements=[Shard(0), Replicate()])
    torch.manual_seed(3)
    assert same(first, torch.rand(8))
    torch.manual_seed(rank)
    with sd.random_mode("local"):
        sd.rand(8, device_mesh=mesh, placements=[Shard(0), Replicate()])
    with pytest.raises(RandomStateError, match="out of step"):
        check_random_state(mesh)


@on_ranks(4)
def test_the_check_of_the_first_draw_obeys_the_policy() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = sd.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    sd.manual_seed(5, mesh)
    with (
        sd.communication("forbid"),
        pytest.raises(
            CommunicationForbiddenError, match=r"check_random_state\(mesh\) to run it earlier"
        ),
    ):
        F.dropout(x)
    check_random_state(mesh)
    with sd.communication("forbid"), CommDebugMode() as sent:
        F.dropout(x)
    assert not sent.get_total_counts()


@on_ranks(4)
def test_lockstep_checks_every_draw() -> None:
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (4,))
    sd.manual_seed(5, mesh)
    sd.rand(8, device_mesh=mesh, placements=[Shard(0)])
    with lockstep():
        sd.rand(8, device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(dist.get_rank() // 2)
        with pytest.raises(RandomStateError, match=r"ranks \[0, 1\] agree; ranks \[2, 3\] agree"):
            sd.rand(8, device_mesh=mesh, placements=[Shard(0)])


@on_ranks(4)
def test_state_is_saved_and_restored() -> None:
    mesh = init_device_mesh("cpu", (4,))
    sd.manual_seed(5, mesh)
    state = copy.deepcopy(sd.get_rng_state())
    first = sd.randn(30, device_mesh=mesh, placements=[Shard(0)])
    sd.set_rng_state(state)
    again = sd.randn(30, device_mesh=mesh, placements=[Replicate()])
    assert same(first, again.to_local())
    with pytest.raises(RandomStateError, match="'cpu'"):
        sd.set_rng_state({})


@on_ranks(4)
def test_tracker_has_torchs_interface() -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(5)
    tracker = OffsetBasedRNGTracker(mesh)
    tracker.set_seed("parallel-rng", 12)
    assert tracker.get_seed("parallel-rng") == 12
    assert torch.equal(tracker.rng_states["parallel-rng"], torch.get_rng_state())
    tracker.distribute_region_enabled = False
    part = sd.rand(8, device_mesh=mesh, placements=[Shard(0)]).to_local()
    tracker.distribute_region_enabled = True
    torch.manual_seed(12)
    assert torch.equal(part, torch.rand(2)), "outside the region every rank draws for itself"
    with pytest.raises(RandomStateError, match="parallel-rng"):
        tracker.get_seed("other")


def in_plain_tensors_too(function: Any) -> Any:
    """`function`, which makes index tensors of its own."""

    def run(weight: Tensor) -> None:
        with sd.implicit_replication():
            function(weight)

    return run


INITS: dict[str, Any] = {
    "uniform_": lambda w: nn.init.uniform_(w, -1, 1),
    "normal_": lambda w: nn.init.normal_(w, 1, 2),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.5, a=-0.7, b=0.8),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal_": lambda w: nn.init.kaiming_normal_(w, mode="fan_out"),
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": in_plain_tensors_too(lambda w: nn.init.sparse_(w, 0.3)),
    "eye_": nn.init.eye_,
}


@pytest.mark.parametrize("name", INITS)
@on_ranks(4)
def test_initialisation_equals_one_device(name: str) -> None:
    for shape in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", shape)
        for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
            torch.manual_seed(1)
            expected = nn.Parameter(torch.zeros(10, 9))
            INITS[name](expected)
            state = torch.get_rng_state()
            torch.manual_seed(1)
            weight = nn.Parameter(
                sd.zeros(10, 9, device_mesh=mesh, placements=placements[: len(shape)])
            )
            INITS[name](weight)
            assert same(weight.detach(), expected.detach()), f"{name} {placements}"
            assert torch.equal(torch.get_rng_state(), state)


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5)
    )


@on_ranks(4)
def test_meta_initialisation_equals_one_device() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(2)
    expected = model()
    with torch.device("meta"):
        sharded: Any = model()
    for module in sharded.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0), Shard(parameter.ndim - 1)]
            empty = sd.empty(parameter.shape, device_mesh=mesh, placements=placements)
            module.register_parameter(name, nn.Parameter(empty))
    torch.manual_seed(2)
    for module in sharded.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, got), want in zip(sharded.named_parameters(), expected.parameters(), strict=True):
        assert same(got.detach(), want.detach()), name


DROPOUTS: dict[str, Any] = {
    "Dropout": nn.Dropout(0.3),
    "Dropout in place": nn.Dropout(0.3, inplace=True),
    "Dropout1d": nn.Dropout1d(0.4),
    "AlphaDropout": nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.3),
    "RReLU": nn.RReLU(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
}


@pytest.mark.parametrize("name", DROPOUTS)
@on_ranks(4)
def test_dropout_equals_one_device_with_its_gradient(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.linspace(-1, 1, 6 * 5 * 4).reshape(6, 5, 4)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(2)]):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        expected = DROPOUTS[name](leaf * 1)
        (expected * expected).sum().backward()
        state = torch.get_rng_state()
        mine: Any = sd.distribute_tensor(x, mesh, placements).requires_grad_()
        torch.manual_seed(1)
        got = DROPOUTS[name](mine * 1)
        (got * got).sum().backward()
        assert torch.equal(torch.get_rng_state(), state), name
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-6, atol=1e-6)
        assert leaf.grad is not None
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.full_tensor(), leaf.grad, rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_attention_dropout_equals_one_device() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 6, 7, 8) for _ in range(3))
    for causal in (False, True):
        torch.manual_seed(1)
        expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=causal)
        state = torch.get_rng_state()
        for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]):
            mine = [sd.distribute_tensor(x, mesh, placements) for x in (q, k, v)]
            torch.manual_seed(1)
            # torch's math path makes the causal mask as a plain tensor.
            with sd.implicit_replication():
                got: Any = F.scaled_dot_product_attention(
                    mine[0], mine[1], mine[2], dropout_p=0.3, is_causal=causal
                )
            torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(torch.get_rng_state(), state)


def losses(parameters: Sequence[Tensor], x: Tensor, y: Tensor) -> list[float]:
    """Ten steps of an MLP with dropout on the input, the hidden layer and the output."""
    first, bias, second = parameters
    found = []
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    for _ in range(10):
        hidden = F.dropout(torch.relu(F.dropout(x, 0.1) @ first + bias), 0.5)
        loss: Any = (F.dropout(hidden @ second, 0.2) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value: Any = loss.detach()
        found.append(float(full_tensor(value)))
    return found


@on_ranks(4)
def test_training_with_dropout_does_not_depend_on_the_mesh() -> None:
    """Equal masks: loss curves differ by the order in which float32 sums are taken only."""
    torch.manual_seed(3)
    x, y = torch.randn(12, 9), torch.randn(12, 3)
    start = [torch.randn(9, 16) / 3, torch.zeros(16), torch.randn(16, 3) / 4]
    torch.manual_seed(4)
    expected = losses([p.clone().requires_grad_() for p in start], x, y)
    state = torch.get_rng_state()
    for shape in ((4,), (2, 2), (1, 2, 2)):
        mesh = init_device_mesh("cpu", shape)
        data, tensor = [Replicate()] * (len(shape) - 1), [Shard(0)]
        batch = [*([Shard(0)] * len(data)), Replicate()]
        parts = [[*data, Shard(1)], [*data, Shard(0)], [*data, *tensor]]
        weights = [
            sd.distribute_tensor(p, mesh, placements).requires_grad_()
            for p, placements in zip(start, parts, strict=True)
        ]
        inputs = sd.distribute_tensor(x, mesh, batch), sd.distribute_tensor(y, mesh, batch)
        torch.manual_seed(4)
        found = losses(weights, *inputs)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6
        )


@on_ranks(4)
def test_compiled_operators_draw_as_eager_ones() -> None:
    """Below and above the size of a chunk, traced without graph breaks."""
    mesh = init_device_mesh("cpu", (4,))

    def drop(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.5) + torch.rand_like(x)

    for n in (30, 400):
        x = torch.linspace(-1, 1, n * n).reshape(n, n)
        torch.manual_seed(0)
        expected = drop(x)
        state = torch.get_rng_state()
        sharded = sd.distribute_tensor(x, mesh, [Shard(0)])
        torch.manual_seed(0)
        got = torch.compile(drop, backend="aot_eager", fullgraph=True)(sharded)
        assert same(got, expected)
        assert torch.equal(torch.get_rng_state(), state)


BOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "randint_like": lambda x: torch.randint_like(x, 10),
    "randint_like.low_dtype": lambda x: torch.randint_like(x, -3, 10, dtype=torch.int32),
    "random_.from": lambda x: torch.ops.aten.random_(x.clone(), 2, 5),
}


@pytest.mark.parametrize("name", BOUNDED)
@on_ranks(4)
def test_compiled_integers_between_two_bounds(name: str) -> None:
    """Their graph called `aten.random.from`, a SyntaxError in the code generated for it."""
    mesh = init_device_mesh("cpu", (4,))
    draw_integers = BOUNDED[name]
    compiled = torch.compile(draw_integers, backend="aot_eager", fullgraph=True)
    x = torch.ones(30, 7)
    sharded = sd.distribute_tensor(x, mesh, [Shard(0)])
    for plain, distributed in ((x, sharded), (x.t(), sharded.t())):
        torch.manual_seed(0)
        expected = draw_integers(plain)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        assert same(compiled(distributed), expected)
        assert torch.equal(torch.get_rng_state(), state)


@on_ranks(4)
def test_ranks_outside_a_mesh_keep_step_with_those_inside() -> None:
    mesh = DeviceMesh("cpu", [2, 1])
    plain = torch.arange(35.0).view(7, 5)
    spread = sd.distribute_tensor(plain, mesh, [Shard(0)], src_data_rank=None)

    def draws(made: bool) -> list[Tensor]:
        torch.manual_seed(3)
        sized: dict[str, Any] = {"device_mesh": mesh, "placements": [Shard(0)]}
        first: Tensor = sd.randn(7, 5, **sized) if made else torch.randn(7, 5)
        return [first, F.dropout(spread if made else plain, 0.5), torch.rand_like(first)]

    expected = draws(made=False)
    state = torch.get_rng_state()
    got = draws(made=True)
    assert torch.equal(torch.get_rng_state(), state), (
        "as one device, also on ranks that hold nothing"
    )
    if mesh.get_coordinate() is not None:
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
