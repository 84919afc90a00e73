"""torch's own plain tensors count as replicated, a user's are an error.

Covers: dispatch/plain_tensors.py.
"""

# mypy: allow-untyped-calls, disable-error-code="attr-defined"
# Torch gives hooks, `backward` and `apply` no types, and gradients are DTensors here.

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import rnn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from operator_calls import recording
from shoal_dtensor import (
    CommunicationForbiddenError,
    DebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    communication,
    distribute_tensor,
    full_tensor,
    implicit_replication,
    unknown_ops,
)
from shoal_dtensor.errors import MixedTensorError, PlacementError
from shoal_dtensor.rng.state import check_all_meshes_again
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks


def take_samples_in_a_composed_function(x: Tensor, one: Tensor) -> object:
    return F.fractional_max_pool2d(
        x.view(1, 1, 2, 2), 1, output_size=1, _random_samples=torch.rand(1, 1, 2)
    )


USERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "variable": lambda x, one: x + one,
    "temporary": lambda x, one: x + torch.ones(4),
    "method": lambda x, one: x.add(torch.ones(4)),
    "reflected": lambda x, one: torch.ones(4) + x,
    "keyword": lambda x, one: torch.add(x, other=torch.ones(4)),
    "in place": lambda x, one: x.add_(torch.ones(4)),
    "unpacked": lambda x, one: x.add(*(torch.ones(4),)),
    "mapped": lambda x, one: list(map(x.add, [torch.ones(4)])),
    "in a list": lambda x, one: torch.cat([x, torch.ones(4)]),
    "index": lambda x, one: x[torch.tensor([0, 1])],
    "weight, transposed inside": lambda x, one: F.linear(x, torch.ones(3, 4)),
    "expanded inside": lambda x, one: F.mse_loss(x, torch.ones(4)),
    "einsum": lambda x, one: torch.einsum("a,ab->b", x, torch.ones(4, 3)),
    "detached": lambda x, one: x + one.detach(),
    "mask of a composed function": lambda x, one: torch.masked.mean(x, 0, mask=one > 0),
    "weight that a composed function expands": lambda x, one: F.binary_cross_entropy(
        x, x, torch.ones(4)
    ),
    "matrix of a composed function": lambda x, one: torch.svd_lowrank(
        x.view(2, 2), M=torch.ones(2, 2)
    ),
    "samples of a composed function": take_samples_in_a_composed_function,
}


@pytest.mark.parametrize("use", USERS.values(), ids=USERS.keys())
def test_a_users_plain_tensor_is_an_error(use: Callable[[Tensor, Tensor], object]) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        # torch's own index of the same shape must not open the door
        x[[0, 1]]
        with pytest.raises(MixedTensorError, match="together with a plain tensor"):
            use(x, torch.ones(4))


def test_a_plain_tensor_of_compiled_code_opens_no_door() -> None:
    """Calls hold more references there.

    So what torch's own tensors have there is not what they have elsewhere.
    """
    with fake_world(2):
        x = distribute_tensor(
            torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        torch.compile(lambda x: x[[0, 1]], backend="eager")(x)
        with pytest.raises(MixedTensorError, match="together with a plain tensor"):
            x + torch.ones(4)
        x[[0, 1]]


def test_the_way_out_is_that_of_the_function_that_calls_the_operator() -> None:
    with fake_world(4):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        module = torch.nn.Linear(4, 4)
        weight = distribute_tensor(
            module.weight.detach(), grid["data"], [Shard(0)], src_data_rank=None
        )
        bias = distribute_tensor(
            module.bias.detach(), grid["model"], [Shard(0)], src_data_rank=None
        )
        module.weight, module.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        with pytest.raises(
            RuntimeError, match=r"set_model_state_dict.*full_state_dict=True"
        ) as caught:
            module.load_state_dict(torch.nn.Linear(4, 4).state_dict())
        assert "implicit_replication" not in str(caught.value)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        for foreach in (True, False):
            with pytest.raises(
                MixedTensorError, match=r"several meshes, shoal_dtensor\.clip_grad_norm_"
            ):
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=foreach)
        with pytest.raises(
            PlacementError,
            match=r"first argument is device_mesh, so write placements=\[Replicate\(\)\]",
        ):
            weight.redistribute([Replicate()])  # type: ignore[arg-type]  # as many write it


@on_ranks(4)
def test_torchs_own_tensors_are_replicated() -> None:
    mesh = init_device_mesh("cpu", (4,))
    values = torch.tensor([3.0, -1.0, 2.0, 5.0, 4.0])
    x = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    y = values.clone().requires_grad_()
    for use in (
        lambda t: t[[4, 0]],
        lambda t: torch.combinations(t, 2),
        lambda t: t.cummax(0)[0],
        lambda t: torch.quantile(t, 0.3),
        lambda t: t.cumprod(0),
        lambda t: torch.copysign(t, t.detach()),
        lambda t: torch.mvlgamma(t + 5, 2),
        lambda t: torch.select_scatter(t.view(1, 5), t, 0, 0),
    ):
        for one in (x, y):
            one.grad = None
            use(one).square().sum().backward()
        assert isinstance(x.grad, DTensor)
        assert y.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)


def unravel_positions(t: Any) -> Any:
    return t.sum() + torch.stack(torch.unravel_index(t.argsort(0), (4, 5))).sum()


COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "fractional_max_pool2d": lambda t: F.fractional_max_pool2d(
        t.view(1, 2, 6, 5), 2, output_size=3
    ),
    "svd_lowrank": lambda t: torch.svd_lowrank(t, 2)[1],
    "pca_lowrank": lambda t: torch.pca_lowrank(t, 2)[1],
    "masked.var": lambda t: torch.masked.var(t, 1, mask=t > -9),
    "unravel_index": unravel_positions,
    "embedding_bag": lambda t: F.embedding_bag(t.detach().abs().long().clamp(0, 3), t),
}


@pytest.mark.parametrize("name", COMPOSED)
@on_ranks(4)
def test_what_torch_composes_in_python(name: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    values = torch.randn(12, 5, dtype=torch.float64)
    for placement in (Shard(0), Shard(1), Shard(0, sizes=(9, 0, 1, 2))):
        x = distribute_tensor(values, mesh, [placement], src_data_rank=None).requires_grad_()
        y = values.clone().requires_grad_()
        results = []
        for one in (x, y):
            torch.manual_seed(3)
            result = COMPOSED[name](one)
            result.square().nansum().backward()
            results.append(full_tensor(result))
        torch.testing.assert_close(*results)
        assert isinstance(x.grad, DTensor)
        assert y.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)


@on_ranks(4)
def test_ranks_out_of_step_do_not_draw_inside_composed_functions() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 5), mesh, [Shard(0)], src_data_rank=None)
    torch.manual_seed(mesh.get_rank())
    check_all_meshes_again()
    with pytest.raises(MixedTensorError, match="need equal generators on all ranks"):
        torch.svd_lowrank(x, 2)


@on_ranks(4)
def test_a_gradient_that_nobody_depends_on() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(5, 5), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    tau = distribute_tensor(torch.empty(0), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    plain = x.detach().full_tensor().requires_grad_()
    torch.linalg.householder_product(x, tau).sum().backward()
    torch.linalg.householder_product(plain, torch.empty(0)).sum().backward()
    assert (x.grad is None) == (plain.grad is None)


@on_ranks(4)
def test_a_sparse_result_is_plain() -> None:
    mesh = init_device_mesh("cpu", (4,))
    values = torch.tensor([[0.0, 1], [2, 0], [0, 3]])
    for x in (
        distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None),
        DTensor.from_local(values / 4, mesh, [Partial()]),
    ):
        x.requires_grad_()
        sparse = x.to_sparse()
        assert not isinstance(sparse, DTensor)
        torch.testing.assert_close(sparse.to_dense(), values)
        sparse.to_dense().square().sum().backward()
        grad: Any = x.grad
        torch.testing.assert_close(grad.full_tensor(), 2 * values)


def cross_entropy_with_positive_weights(t: Any) -> Any:
    return F.binary_cross_entropy_with_logits(t, t.sigmoid(), pos_weight=t[0].exp())


WATCHED: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: COMPOSED[name] for name in COMPOSED if name != "embedding_bag"},
    "one_hot": lambda t: F.one_hot(t.argsort(0), 13),
    "a list as index": lambda t: t[[4, 0]],
    "combinations": lambda t: torch.combinations(t[:, 0], 2),
    "quantile": lambda t: torch.quantile(t, 0.3),
    "mvlgamma": lambda t: torch.mvlgamma(t + 9, 2),
    "binary_cross_entropy_with_logits": cross_entropy_with_positive_weights,
}


class Passing(TorchDispatchMode):
    """A mode of a user's that keeps all that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept += [args, result]
        return result


MODES: dict[str, Callable[[], Any]] = {
    "DebugMode": DebugMode,
    "CommDebugMode": CommDebugMode,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "a user's": Passing,
}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_mode_that_watches_changes_no_answer(mode: str) -> None:
    """A mode refers to the tensors that torch makes, which then were taken for the user's."""
    mesh = init_device_mesh("cpu", (2,))
    values = torch.linspace(-1, 1, 60, dtype=torch.float64).sin().view(12, 5)
    x = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
    for name, function in WATCHED.items():
        torch.manual_seed(3)
        expected = function(values)
        torch.manual_seed(3)
        with MODES[mode]():
            result: Any = function(x)
        torch.testing.assert_close(
            result.full_tensor(),
            expected,
            msg=lambda m, n=name: f"{n}: {m}",  # type: ignore[misc]  # a lambda with a default
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", USERS.values(), ids=USERS.keys())
def test_a_users_plain_tensor_is_an_error_in_a_mode(
    use: Callable[[Tensor, Tensor], object], mode: str
) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        with MODES[mode](), pytest.raises(MixedTensorError, match="together with a plain tensor"):
            use(x, torch.ones(4))


def test_a_mode_of_a_thread_does_not_end_with_that_of_another_thread() -> None:
    """Torch's flag of entered modes is reset when any thread leaves its mode."""
    first_is_in_mode, second_is_in_mode, first_has_left = (Event() for _ in range(3))

    def leave_first(x: DTensor) -> None:
        with Passing():
            x.relu()
            first_is_in_mode.set()
            second_is_in_mode.wait(20)
        first_has_left.set()

    def compute_later(x: DTensor) -> Tensor:
        first_is_in_mode.wait(20)
        with Passing():
            second_is_in_mode.set()
            first_has_left.wait(20)
            # makes a plain mask inside
            return torch.combinations(x)

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(3), mesh, [Replicate()], src_data_rank=None)
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(leave_first, x)
            second = threads.submit(compute_later, x)
            first.result(60)
            pairs: Any = second.result(60)
    assert pairs.to_local().tolist() == [[0, 1], [0, 2], [1, 2]]


class Counting(DTensor):
    """A subclass of a user's that sees every torch function and passes it on."""

    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("mode", [nullcontext, Passing])
def test_a_class_passes_functions_on(mode: Callable[[], Any]) -> None:
    """`__torch_function__` is read from the class, where it must be callable too."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        with mode():
            total = DTensor.__torch_function__(torch.add, (DTensor,), (x, x))
            doubled = Counting.__torch_function__(torch.add, (Counting,), (x,), {"other": x})
    assert type(total) is DTensor
    assert total.to_local().tolist() == [2.0, 2.0]
    assert doubled.to_local().tolist() == [2.0, 2.0]
    assert Counting.calls.pop() is torch.add


# `one_hot` checks its classes in the graph, by an operator without a rule
@pytest.mark.filterwarnings("ignore:aten._assert_async.msg does not have a sharding rule")
@pytest.mark.parametrize("name", WATCHED)
def test_tensors_that_torch_makes_while_the_compiler_traces(name: str) -> None:
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        values = torch.linspace(-1, 1, 60, dtype=torch.float64).sin().view(12, 5)
        x = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
        torch._dynamo.reset()
        torch.manual_seed(3)
        expected = WATCHED[name](values)
        torch.manual_seed(3)
        result: Any = torch.compile(WATCHED[name], backend="aot_eager")(x)
        torch.testing.assert_close(result.full_tensor(), expected)


class Scaled(torch.autograd.Function):
    """A user's function whose gradient is a plain tensor of each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return torch.full((8, 4), float(dist.get_rank()) + 1)


def _of_own(rank_only: float = 0.0) -> Tensor:
    """A plain tensor that differs between ranks; with `rank_only`, zero on all ranks but one."""
    rank = dist.get_rank()
    if rank_only:
        return torch.full((8, 4), rank_only if rank == 1 else 0.0)
    return torch.full((8, 4), rank + 1.0)


def with_hook(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    x.register_hook(hook)
    return x


def with_own_gradient(x: Tensor, rank_only: float = 0.0) -> Tensor:
    """The tensor, for whose gradient a hook gives `_of_own`."""
    return with_hook(x, lambda grad: _of_own(rank_only))


def with_own_gradient_of_a_node(x: Tensor) -> Tensor:
    """The tensor, for whose first operand's gradient a hook gives `_of_own`."""
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda grads, outs: (_of_own(), grads[1]))
    return x


def backward_behind_from_local(x: Any) -> None:
    shards = DTensor.from_local(x.to_local(), x.device_mesh, [Shard(0)])
    with_own_gradient(shards).sum().backward()


def backward_behind_redistribute(x: Any) -> None:
    with_own_gradient(x.redistribute(placements=[Replicate()])).sum().backward()


BACKWARDS: dict[str, Callable[[Any], None]] = {
    "hook": lambda x: with_own_gradient(x * 2).mul(x).sum().backward(),
    "hook before a view": lambda x: with_own_gradient((x.t() * 1).t()).sum().backward(),
    "hook on a leaf": lambda x: with_own_gradient(x).sum().backward(),
    "hook behind from_local": backward_behind_from_local,
    "hook behind redistribute": backward_behind_redistribute,
    "function": lambda x: Scaled.apply(x * 1).sum().backward(),
    "function on a leaf": lambda x: Scaled.apply(x).sum().backward(),
    "first gradient": lambda x: x.mul(x).backward(_of_own()),
    "first gradient of a view": lambda x: x.t().backward(_of_own().t()),
    "hook of a node": lambda x: with_own_gradient_of_a_node(x.mul(x)).sum().backward(),
    "zero on all ranks but one": lambda x: with_own_gradient(x * 2, 1.0).mul(x).sum().backward(),
    "summed with another gradient": lambda x: (with_own_gradient(x * 2) + x.exp()).sum().backward(),
}


@pytest.mark.parametrize("name", BACKWARDS)
@on_ranks(4)
def test_a_plain_gradient_that_differs_between_ranks_is_an_error_on_all_of_them(name: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    with pytest.raises(MixedTensorError, match="values differ between the ranks"):
        BACKWARDS[name](x)
    assert (x + 1).sum().item() == 64  # no rank waits for another


@on_ranks(4)
def test_equal_plain_gradients_are_replicated() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    values = torch.arange(32.0).view(8, 4)
    for use in (
        lambda: with_hook(x * 2, lambda grad: values).mul(3).sum().backward(),
        lambda: x.register_hook(lambda grad: values * 2),
        lambda: (x * 7).sum().backward(),
    ):
        x.grad = None
        use()
    assert isinstance(x.grad, DTensor)
    assert x.grad.placements == (Shard(0),)
    torch.testing.assert_close(x.grad.full_tensor(), values * 2)


@on_ranks(4)
def test_what_an_operator_derives_from_a_plain_argument_is_compared() -> None:
    """`pos_weight - 1` is a tensor of torch's own C++, but its values are each rank's own."""
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
    own = torch.full((4,), float(dist.get_rank()))
    with pytest.raises(MixedTensorError, match="together with a plain tensor"):
        F.binary_cross_entropy_with_logits(x, x, pos_weight=own)
    assert x.sum().item() == 32


@on_ranks(4)
def test_who_holds_references_on_one_rank_divides_no_ranks() -> None:
    """A mode on one rank keeps torch's own tensors alive: they have a name there, so all refuse."""
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
    weight = torch.ones(4)
    kept: list[Any] = []
    if dist.get_rank() == 2:
        with (
            recording(lambda op, args, kwargs: kept.append(args)),
            pytest.raises(MixedTensorError, match="together with a plain tensor"),
        ):
            F.binary_cross_entropy_with_logits(x, x, pos_weight=weight)
    else:
        with pytest.raises(MixedTensorError, match="together with a plain tensor"):
            F.binary_cross_entropy_with_logits(x, x, pos_weight=weight)


@on_ranks(4)
def test_one_element_is_replicated_if_all_ranks_hold_the_same() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
    for shape in ((1,), (1, 1)):
        assert ((x * torch.full(shape, 2.0)) - 1).sum().item() == 32
        with pytest.raises(MixedTensorError, match="values differ between the ranks"):
            x * torch.full(shape, float(dist.get_rank()))


@on_ranks(2)
def test_a_comparison_obeys_the_communication_policy() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(4.0), mesh, [Replicate()], src_data_rank=None)
    with communication("forbid"):
        with pytest.raises(CommunicationForbiddenError, match="plain tensor"):
            torch.quantile(x, 0.3)
        with pytest.raises(MixedTensorError, match="together with a plain tensor"):
            x + torch.ones(4)


@on_ranks(2)
def test_memory_is_asked_about_and_pinned_part_by_part() -> None:
    x: Any = distribute_tensor(
        torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
    )
    with communication("forbid"), unknown_ops("error"):
        assert not x.is_pinned()
        if torch.accelerator.is_available():
            assert x.pin_memory().is_pinned() and x.pin_memory().placements == (Shard(0),)
        else:
            with pytest.raises(RuntimeError, match=r"accelerator|driver") as plain:
                torch.ones(4).pin_memory()
            with pytest.raises(RuntimeError, match=str(plain.value).splitlines()[0]):
                x.pin_memory()


@on_ranks(4)
def test_memory_that_an_operator_only_writes_is_not_compared() -> None:
    """`linear_cross_entropy` multiplies into a plain buffer and copies to one.

    They hold other bits on every rank.
    """
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None).requires_grad_()

    def product(grad: Tensor) -> Tensor:
        torch.mm(grad, grad, out=(buffer := torch.full((4, 4), float(dist.get_rank()))))
        return torch.full((4, 4), float(dist.get_rank())).copy_(grad * 0) + buffer

    x.register_hook(product)
    (x * 2).sum().backward()
    grad: Any = x.grad
    torch.testing.assert_close(grad.full_tensor(), torch.full((4, 4), 16.0))


def test_shapes_are_compared_with_those_of_plain_tensors() -> None:
    with fake_world(2):
        x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        assert torch.ops.aten.is_same_size(x, torch.zeros(4, 3)) and torch.ops.aten.is_same_size(
            torch.zeros(4, 3), x
        )
        assert not torch.ops.aten.is_same_size(x, torch.zeros(2, 3))  # the shape of its shard here


def test_a_fused_layer_of_which_a_child_is_sharded_says_what_to_shard() -> None:
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        weight = distribute_tensor(layer.linear1.weight.detach(), mesh, [Shard(0)])
        layer.linear1.weight = torch.nn.Parameter(weight)
        with (
            torch.no_grad(),
            pytest.raises(
                MixedTensorError, match="parallelize the TransformerEncoderLayer, not its"
            ),
        ):
            layer(torch.ones(2, 3, 8))


@on_ranks(2)
def test_the_gradient_of_a_plain_tensor_is_plain_and_whole() -> None:
    """A number is plain without a word, more are where it is said.

    Here these are the leaf, and what a module has made.
    """
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    leaves: tuple[Any, ...] = (
        torch.tensor(2.0),
        torch.tensor([3.0, -1.0]),
        torch.tensor([[1.0, 2.0]]),
    )
    scale, weight, local = (leaf.requires_grad_() for leaf in leaves)
    with implicit_replication():
        product: Any = (x * scale * weight * (local * 2)).sum()
    expected: Any = (x.full_tensor() * scale * weight * (local * 2)).sum()
    wanted = torch.autograd.grad(expected, leaves, retain_graph=True)
    found = torch.autograd.grad(product.full_tensor(), leaves, retain_graph=True)
    assert all(
        type(got) is Tensor and torch.equal(got, one)
        for got, one in zip(found, wanted, strict=True)
    )
    for _ in range(2):
        product.full_tensor().backward(retain_graph=True)
    assert all(torch.equal(leaf.grad, 2 * one) for leaf, one in zip(leaves, wanted, strict=True))
    torch.optim.AdamW(leaves, foreach=True).step()


@on_ranks(2)
def test_gradients_of_plain_tensors_in_compiled_code() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    scale, weight = (
        torch.tensor(2.0, requires_grad=True),
        torch.tensor([3.0, -1.0], requires_grad=True),
    )

    def product(x: Any, a: Any, b: Any) -> Any:
        return (x * a * b).sum()

    with implicit_replication():
        torch.compile(product, backend="aot_eager")(x, scale, weight).full_tensor().backward()
    assert type(scale.grad) is type(weight.grad) is Tensor
    assert (scale.grad.item(), weight.grad.tolist()) == (3 * 20 - 25, [2 * 20, 2 * 25])


@on_ranks(2)
def test_a_copy_that_torch_makes_of_a_plain_tensor_with_a_gradient_is_no_tensor_of_its_own() -> (
    None
):
    """Here of a transposed one: whether its gradient is whole or a part is for the user to say."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(1, 2, 8, 4), mesh, [Shard(1)])
    weight = torch.ones(1, 2, 4, 8, requires_grad=True).transpose(-1, -2)
    for use in (
        lambda: x @ weight.transpose(-1, -2),
        lambda: x.transpose(-1, -2) @ (weight * 2).contiguous(),
    ):
        with pytest.raises(
            MixedTensorError, match=r"aten.bmm.default got DTensors together with a plain tensor"
        ):
            use()
        with implicit_replication():
            assert use().requires_grad


# Functions whose kernels fill a plain tensor of their own.
FILLING: dict[str, Callable[[Any], Any]] = {
    "vander": lambda x: torch.vander(x, 3),
    "pad_sequence": lambda x: rnn.pad_sequence([x, x[:2]], padding_value=0.5),
    "pack_sequence": lambda x: rnn.pack_sequence([x, x[:2]]).data,
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["shards", "replicas"])
@on_ranks(2)
def test_a_plain_tensor_that_torch_fills_has_all_values_and_a_whole_gradient(
    placement: Any,
) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, fill in FILLING.items():
        single = torch.arange(5.0, dtype=torch.float64, requires_grad=True)
        x = distribute_tensor(single.detach(), mesh, [placement]).requires_grad_()
        expected, filled = fill(single), fill(x)
        assert type(filled) is Tensor and torch.equal(filled, expected), name
        # torch itself cannot differentiate `vander`, which writes to what its backward reads
        if name != "vander":
            expected.pow(2).sum().backward()
            filled.pow(2).sum().backward()
            grad: Any = x.grad
            assert single.grad is not None
            assert torch.equal(grad.full_tensor(), single.grad), name
