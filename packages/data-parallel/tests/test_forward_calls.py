"""Calls of users on parameters inside of a forward, hooks, and draws of a batch.

They are compared with one device, on gloo ranks.

Covers: sharded_parameters.py, unit.py, unit_passes.py, equal_rows.py, written_values.py.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from data_parallel_model import mesh_of, own, same_gradients
from shoal_data_parallel import EqualRowsWarning, StyleError, fully_shard, replicate
from shoal_dtensor import DTensor, checked_replicas, full_tensor
from shoal_mesh import lockstep
from shoal_mesh.testing import on_ranks


class Shifted(nn.Module):
    """A parametrization that adds to a weight."""

    def __init__(self, change: Callable[[], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change()


class ParametrizedInForward(nn.Module):
    """LoRA on a parameter: a parametrization for one forward, as peft's `target_parameters`."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(not frozen)
        self.a = nn.Parameter(torch.randn(2, 6))
        self.b = nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Any:
        change = Shifted(lambda: self.b @ self.a)
        parametrize.register_parametrization(self.base, "weight", change)
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class Switched(nn.Module):
    """A layer whose parameters require no gradient for a part of the forward."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.again = nn.Linear(6, 6), nn.Linear(6, 6), again

    def forward(self, x: Tensor) -> Any:
        self.inner.requires_grad_(False)
        hidden = self.inner(x)
        self.inner.requires_grad_(True)
        out = self.outer(hidden.tanh())
        return out + self.inner(x) if self.again else out


class FreezesForGood(nn.Module):
    """A layer that freezes a part of itself in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.forwards = nn.Linear(6, 6), nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        if self.forwards == 2:
            self.inner.requires_grad_(False)
        return self.outer(self.inner(x).tanh())


class DropsRows(nn.Module):
    """Stochastic depth, as timm has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        hidden = self.layer(x)
        kept = hidden.new_empty((hidden.shape[0],) + (1,) * (hidden.ndim - 1)).bernoulli_(0.6)
        return x + hidden * kept.div_(0.6)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "parametrized": ParametrizedInForward,
    "parametrized and trained": lambda: ParametrizedInForward(frozen=False),
    "switched off": lambda: Switched(again=False),
    "switched off and on": lambda: Switched(again=True),
    "frozen for good": FreezesForGood,
    "drops rows": DropsRows,
}


def over_data(model: Any, how: str, data: Any) -> Any:
    if how == "replicas":
        return replicate(model, data)
    if how == "optimizer":
        return replicate(model, data, shard_optimizer=True)
    if how == "units":
        fully_shard(model[0], data)
    return fully_shard(model, data)


@pytest.mark.parametrize("how", ["replicas", "optimizer", "one unit", "units"])
@pytest.mark.parametrize("kind", MODULES)
@on_ranks(2)
def test_forwards_that_change_their_module_are_those_of_one_device(kind: str, how: str) -> None:
    """Units said that gathered parameters were written to, or that these are not leaves.

    Draws were refused.
    """
    data = mesh_of(2, 1)["data"]
    torch.manual_seed(0)
    plain: Any = nn.Sequential(MODULES[kind](), nn.Linear(6, 3)).double()
    model: Any = over_data(copy.deepcopy(plain), how, data)
    x = torch.randn(8, 6, dtype=torch.float64)
    names = plain.state_dict().keys()
    for step in range(3):
        for module, rows in (plain, x), (model, *own(mesh_of(2, 1), x)):
            torch.manual_seed(step)
            module(rows).square().mean().backward()
        same_gradients(plain, model)
        assert model.state_dict().keys() == names
        assert not [*model.buffers()]
    trained = [p.requires_grad for p in plain.parameters()]
    assert [p.requires_grad for p in model.parameters()] == trained


@on_ranks(2)
def test_a_forward_that_unfreezes_is_an_error() -> None:
    class Unfreezes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.weight.requires_grad_(True)
            return super().forward(input)

    model: Any = Unfreezes(4, 4)
    model.weight.requires_grad_(False)
    fully_shard(model, mesh_of(2, 1)["data"])
    with pytest.raises(StyleError, match="'weight' of 'Unfreezes' was made to require gradients"):
        model(torch.ones(2, 4))
    assert isinstance(model.weight, DTensor)


def moves(weight: Tensor) -> None:
    weight.data = weight.data * 2


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "through .data": lambda weight: weight.data.mul_(2),
    "to other memory": moves,
    "through an array": lambda weight: weight.detach().numpy().fill(2.0),
}


class Writes(nn.Linear):
    """A layer whose forward writes to its weight before it uses it."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__(4, 4)
        self.write = write

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.weight)
        return super().forward(input)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_root", [False, True])
@on_ranks(2)
def test_gathered_parameters_that_change_are_still_an_error(is_root: bool, write: str) -> None:
    data = mesh_of(2, 1)["data"]
    model: Any = fully_shard(Writes(WRITES[write]), data)
    if not is_root:
        model = fully_shard(nn.Sequential(model), data)
    with pytest.raises(StyleError, match="were written to; the written values are lost"):
        model(torch.ones(2, 4)).sum().backward()


# its values and its gradient were lost without a word
@on_ranks(2)
def test_a_gathered_parameter_that_is_replaced_is_an_error() -> None:
    class Replaces(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight.detach() * 2)
            return super().forward(input)

    model: Any = fully_shard(nn.Sequential(Replaces(4, 4)), mesh_of(2, 1)["data"])
    with pytest.raises(StyleError, match="were written to; the written values are lost"):
        model(torch.ones(2, 4))
    assert isinstance(model[0].weight, DTensor)


@on_ranks(2)
def test_later_forwards_are_read_in_blocks_that_compare_replicas() -> None:
    """Values without a version are read in the first forward; later ones would take too long."""
    writes: list[str] = []
    layer = Writes(lambda weight: weight.data.mul_(2) if writes else weight)
    model: Any = fully_shard(layer, mesh_of(2, 1)["data"])
    model(torch.ones(2, 4)).sum().backward()
    writes.append("now")
    rows = torch.full((2, 4), float(torch.distributed.get_rank()))
    model(rows).sum().backward()
    with (
        checked_replicas(),
        pytest.raises(StyleError, match="were written to; the written values are lost"),
    ):
        model(rows).sum().backward()


@on_ranks(2)
def test_an_array_of_a_gathered_parameter_may_be_read() -> None:
    """The memory of the parameter could not be freed while the array was there."""
    arrays: list[object] = []
    layer = Writes(lambda weight: arrays.append(weight.detach().numpy()))
    model: Any = fully_shard(nn.Sequential(layer), mesh_of(2, 1)["data"])
    plain = nn.Linear(4, 4)
    for step in range(3):
        plain.load_state_dict({name: full_tensor(p) for name, p in layer.state_dict().items()})
        x = torch.full((2, 4), float(step))
        out = model(x)
        torch.testing.assert_close(out, plain(x))
        out.sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)


# --- rows -----------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A model that is called with keywords, one of which is equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, rows: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, self.layer(rows), 0.0)


@pytest.mark.parametrize("how", ["replicas", "optimizer", "one unit"])
@pytest.mark.parametrize("block", [checked_replicas, lockstep])
@on_ranks(4)
def test_ranks_that_read_equal_rows_are_named(
    block: Callable[[], AbstractContextManager[None]], how: str
) -> None:
    """Ranks along a data axis silently trained on the same rows: a DataLoader without a sampler."""
    mesh = mesh_of(2, 2)
    model: Any = over_data(Masked(), how, mesh["data"])
    mask = torch.ones(3, 4, dtype=torch.bool)
    equal = torch.ones(3, 4)
    own_rows = equal * mesh.get_local_rank("data")
    with block():
        model(rows=own_rows, mask=mask).sum().backward()
        with pytest.warns(
            EqualRowsWarning, match="input of .*Masked has equal values on ranks .* along data"
        ):
            model(rows=equal, mask=mask).sum().backward()
        # a forward that is not trained may evaluate the same rows on all ranks
        with torch.no_grad():
            model(rows=equal, mask=mask)
        model.eval()
        model(rows=equal, mask=mask)
    model.train()
    model(rows=equal, mask=mask)


# --- hooks ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_post_accumulate_hooks_run_where_a_gradient_is_accumulated() -> None:
    """In passes that reduce nothing they were called too.

    They got no gradient, or the gradient of an earlier pass.
    """
    data = mesh_of(2, 1)["data"]
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (model[0], model):
        fully_shard(unit, data)
    calls: list[str] = []
    for name, param in model.named_parameters():

        def note(param: Any, name: str = name) -> None:
            assert isinstance(param.grad, DTensor), name
            calls.append(name)

        param.register_post_accumulate_grad_hook(note)
    names = sorted(name for name, _ in model.named_parameters())
    used = [name for name in names if not name.startswith("2")]
    x = torch.randn(2, 4)

    def called() -> list[str]:
        found = sorted(calls)
        calls.clear()
        return found

    with model.no_sync():
        model(x).sum().backward()
    assert called() == []
    model(x).sum().backward()
    assert called() == names
    with model.no_sync():
        model(x).sum().backward()
    assert called() == []
    model.reduce_gradients()
    assert called() == names
    # parameters that no rank uses
    model[2].forward = lambda rows: rows
    model(x).sum().backward()
    assert called() == used


# --- torch.func -----------------------------------------------------------------------------------


def summed(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The sum of a function's values, as a function."""
    return lambda t: f(t).sum()


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(summed(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(4, 3, dtype=x.dtype))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "gradients of rows": lambda f, x: torch.func.vmap(torch.func.grad(summed(f)))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(summed(f))(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
}


@pytest.mark.parametrize("how", ["replicas", "optimizer", "one unit", "units"])
@on_ranks(2)
def test_transforms_are_those_of_one_device(how: str) -> None:
    """A unit's hooks, which transforms forbid, ended in an internal error of torch.

    The cleanup hid the error.
    """
    data = mesh_of(2, 1)["data"]
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model: Any = over_data(copy.deepcopy(plain), how, data)
    x = torch.randn(4, 6, dtype=torch.float64)
    for name, transform in TRANSFORMS.items():
        expected = transform(lambda t: plain(t).tanh(), x)
        torch.testing.assert_close(transform(lambda t: model(t).tanh(), x), expected, msg=name)
    # gradients of parameters through an inner gradient
    for module in (plain, model):
        inner = torch.func.grad(lambda t, module=module: module(t).tanh().sum())(x)
        inner.square().sum().backward()
        module(x).square().mean().backward()
    same_gradients(plain, model)
    # graphs that linearize has recorded hold each other, and gathered parameters
    for _ in range(2):
        gc.collect()


def plain_and_units_with_rows() -> tuple[Any, Any, Tensor]:
    """Return a model, an equal one of units on 2 ranks, and rows for both."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model: Any = over_data(copy.deepcopy(plain), "units", mesh_of(2, 1)["data"])
    return plain, model, torch.randn(4, 6, dtype=torch.float64)


@on_ranks(2)
def test_transforms_run_while_gradients_are_kept() -> None:
    plain, model, x = plain_and_units_with_rows()
    for module, keeps in ((plain, nullcontext()), (model, model.no_sync())):
        with keeps:
            inner = torch.func.grad(lambda t, module=module: module(t).tanh().sum())(x)
            inner.square().sum().backward()
        module(x).square().mean().backward()
    same_gradients(plain, model)


@on_ranks(2)
def test_forward_mode_differentiation_of_a_unit() -> None:
    plain, model, x = plain_and_units_with_rows()
    tangents = []
    # torch gives it no types
    forward_ad: Any = torch.autograd.forward_ad
    for module in (plain, model):
        with forward_ad.dual_level():
            out = module(forward_ad.make_dual(x, torch.ones_like(x)))
            tangents.append(forward_ad.unpack_dual(out).tangent)
    torch.testing.assert_close(tangents[1], tangents[0])
