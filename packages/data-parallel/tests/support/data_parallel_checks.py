"""Checks of data-parallel models, with and without styles.

The first argument is the model on one device.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions

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
    raising,
    same_gradients,
    same_weights,
    shard_blocks_and_root,
)
from shoal_data_parallel import replicate
from shoal_dtensor import DTensor, distribute_tensor, get_state_dict, set_state_dict
from shoal_dtensor.errors import StyleError
from shoal_mesh import CommDebugMode, DeviceMesh
from shoal_mesh.testing import counts

# --- of units -------------------------------------------------------------------------------------


def units_keep_gradients(plain: Any, model: Any, mesh: DeviceMesh) -> None:
    """Gradients are kept until a pass that reduces them."""
    for step in range(3):
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        model.set_requires_gradient_sync(step == 2)
        with CommDebugMode() as counted:
            loss_of(model, *own(mesh, tokens, targets)).backward()
        assert counts(counted).get("reduce_scatter", 0) == (4 if step == 2 else 0)
    same_gradients(plain, model)


def units_load_their_state(plain: Any, model: Any, mesh: DeviceMesh) -> None:
    """State dicts hold shards and load again."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(isinstance(value, DTensor) for value in state.values())
    assert state.keys() == plain.state_dict().keys()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)
    tokens, targets = batch(0)
    torch.testing.assert_close(model(tokens), plain(tokens))
    model.load_state_dict({name: value.clone() * 0 for name, value in state.items()}, assign=True)
    assert model(tokens).abs().sum() == 0
    loss_of(model, tokens, targets).backward()
    assert model.head.bias.grad is not None


def units_outlive_a_fault(plain: Any, model: Any, mesh: DeviceMesh, where: str) -> None:
    """A step that raises leaves parameters and gradients as they were, and the next is right."""
    tokens, targets = batch(0)
    with raising(model.blocks[1].up, where), pytest.raises(Fault):
        loss_of(model, *own(mesh, tokens, targets)).backward()
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    same_weights(plain, model)
    loss_of(plain, tokens, targets).backward()
    loss_of(model, *own(mesh, tokens, targets)).backward()
    same_gradients(plain, model)


def units_start_as_one_device(plain: Any, model: Any) -> None:
    """A model of the meta device is initialized to the values of one device."""
    model.to_empty(device="cpu")
    for one in (plain, model):
        torch.manual_seed(3)
        for module in one.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.normal_(one.scale)
    for (name, expected), (_, got) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(full(got), expected), name


def units_load_on_other_degrees(model: Any, mesh: DeviceMesh, others: Sequence[Any]) -> None:
    """A checkpoint of the model and its optimizer is loaded by models of other degrees."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, *own(mesh, *batch(0))).backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        checkpoint.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            checkpoint_id=folders[0],
        )
        for other in others:
            loaded = torch.optim.AdamW(other.parameters(), lr=0.01)
            for param in other.parameters():
                param.grad = torch.zeros_like(param)
            loaded.step()  # makes the state
            state = {"model": other.state_dict(), "optimizer": loaded.state_dict()}
            checkpoint.load(state, checkpoint_id=folders[0])
            other.load_state_dict(state["model"])
            loaded.load_state_dict(state["optimizer"])
            for saved, got in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(full(got), full(saved))
                for key, value in optimizer.state[saved].items():
                    assert torch.equal(full(loaded.state[got][key]), full(value))
        dist.barrier()


# --- of replicas ----------------------------------------------------------------------------------


def adamw(foreach: bool | None = None, fused: bool | None = None) -> Any:
    def make(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach, fused=fused)

    return make


def sgd_with_momentum(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": adamw(),
    "AdamW, one by one": adamw(foreach=False),
    "AdamW, fused": adamw(fused=True),
    "SGD with momentum": sgd_with_momentum,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


def buckets(model: nn.Module) -> list[Any]:
    found: list[Any] = vars(model)["_shoal_replicated"].gradients.buckets
    return found


def replicas_keep_gradients(
    plain: Any, model: Any, mesh: DeviceMesh, shard_optimizer: bool
) -> None:
    """Gradients are kept until a pass that reduces them."""
    for step in range(4):
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        model.set_requires_gradient_sync(step > 0)
        with CommDebugMode() as counted:
            if step < 2:
                with model.no_sync():
                    loss_of(model, *own(mesh, tokens, targets)).backward()
            else:
                loss_of(model, *own(mesh, tokens, targets)).backward()
        found = counts(counted)
        # those of the styles, and of a number that cannot be sharded
        found.pop("all_reduce", None)
        if shard_optimizer:
            assert found == ({} if step < 2 else {"reduce_scatter": len(buckets(model))})
        if step < 2:
            assert all(param.grad is None for param in model.parameters())
    same_gradients(plain, model)


def replicas_freeze(plain: Any, model: Any, mesh: DeviceMesh, shard_optimizer: bool) -> None:
    """Parameters are frozen before they are replicated, and later, and released."""
    for one in (plain, model):
        one.embedding.requires_grad_(False)
    replicate(model, mesh["data"], shard_optimizer=shard_optimizer)
    for frozen in (True, False):
        for one in (plain, model):
            one.zero_grad()
            one.blocks[1].requires_grad_(not frozen)
            one.embedding.requires_grad_(not frozen)
        backward_of_each(plain, model, mesh)
        same_gradients(plain, model)


def replicas_are_copied(
    plain: Any, model: Any, mesh: DeviceMesh, copied_by: Callable[[Any], Any]
) -> None:
    """A copy is replicated too."""
    copied = copied_by(model)
    assert type(copied) is type(model) and type(model).__name__ == type(plain).__name__
    tokens, targets = batch(0)
    loss_of(plain, tokens, targets).backward()
    loss_of(copied, *own(mesh, tokens, targets)).backward()
    same_gradients(plain, copied)
    assert all(param.grad is None for param in model.parameters())


def replicas_grow(plain: Any, model: Any, mesh: DeviceMesh) -> None:
    """Parameters are replaced and added."""
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for one in (plain, model):
        torch.manual_seed(1)
        one.blocks.append(Block(10).double())
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


def replicas_are_filled(plain: Any, model: Any, mesh: DeviceMesh) -> None:
    """A model of the meta device whose optimizer is sharded gets its values later."""
    replicate(model, mesh["data"], shard_optimizer=True)
    model.to_empty(device="cpu")
    for (_, param), (_, value) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        with torch.no_grad():
            param.copy_(distribute_tensor(value.detach(), param.device_mesh, param.placements))
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


def replicas_outlive_a_fault(plain: Any, model: Any, mesh: DeviceMesh, kept: bool) -> None:
    """A backward that raises leaves gradients as they were.

    Kept gradients, to which it has added, have to be dropped.
    """
    held = list(model.parameters())
    batches = [batch(0), batch(1)]
    for tokens, targets in batches:
        loss_of(plain, tokens, targets).backward()
    model.set_requires_gradient_sync(not kept)
    loss_of(model, *own(mesh, *batches[0])).backward()
    before: list[Any] = [
        (p.grad, None if p.grad is None else p.grad.detach().clone()) for p in held
    ]
    with raising(model.blocks[0], "backward"), pytest.raises(Fault, match="backward"):
        loss_of(model, *own(mesh, *batches[1])).backward()
    for parameter, (grad, value) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad.detach(), value)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    if kept:
        with pytest.raises(StyleError, match="added to the kept gradients"):
            loss_of(model, *own(mesh, *batches[1])).backward()
        model.zero_grad()
        loss_of(model, *own(mesh, *batches[0])).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, *own(mesh, *batches[1])).backward()
    same_gradients(plain, model)


# --- of both --------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True)


def full_state_dicts_load(
    kind: str, parallel: Callable[[Any, DeviceMesh], Any] | None = None
) -> None:
    """Full state dicts go to one device and to other degrees.

    `parallel` makes a model parallel along "tensor".
    """

    def built(mesh: DeviceMesh | None, seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: Any = Model(6, 2).double()
        if mesh is not None:
            if parallel is not None and mesh.shape[1] > 1:
                parallel(model, mesh)
            if kind == "fully_shard":
                shard_blocks_and_root(model, mesh["data"])
            else:
                replicate(model, mesh["data"], shard_optimizer=kind == "ZeRO-1")
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    plain = built(None, 0)
    _step(*plain, None, 0)
    for shape in ((4, 1), (2, 2), (1, 4)):
        mesh = mesh_of(*shape)
        one, other, alone = built(mesh, 0), built(mesh_of(*shape[::-1]), 1), built(None, 2)
        _step(*one, mesh, 0)
        state = get_state_dict(*one, options=FULL)
        for got, expected in zip(state, get_state_dict(*plain), strict=True):
            _same(got, expected)
        _same(get_state_dict(*one)[0], state[0])  # of shards
        for target in (alone, other):
            values, moments = copy.deepcopy(state)  # an optimizer keeps what it loads
            set_state_dict(*target, model_state_dict=values, optim_state_dict=moments, options=FULL)
        _step(*alone, None, 1)
        _step(*other, mesh_of(*shape[::-1]), 1)
        for got, expected in zip(
            get_state_dict(*other, options=FULL), get_state_dict(*alone), strict=True
        ):
            _same(got, expected)


def _step(
    model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, number: int
) -> None:
    rows = batch(number) if mesh is None else own(mesh, *batch(number))
    loss_of(model, *rows).backward()
    optimizer.step()
    optimizer.zero_grad()


def _same(state: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            _same(state[key], value)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(full(state), expected)


def replicas_are_asked_for_gradients(
    mesh: DeviceMesh, plain: Any, model: Any, compiled: bool
) -> None:
    """`torch.autograd.grad` and `backward(inputs=)` of some parameters give means of replicas."""
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    names = ["head.weight", "blocks.1.up.weight", "blocks.2.down.bias", "scale"]
    for step in range(2):
        tokens, targets = batch(step)
        found: list[Any] = []
        for one, rows in ((plain, (tokens, targets)), (model, own(mesh, tokens, targets))):
            params = [one.get_parameter(name) for name in names]
            # what is returned is reduced all the same
            with one.no_sync() if one is model else nullcontext():
                loss = loss_of(one, *rows) + 2 * loss_of(one, *rows)  # two forwards, one pass
                found.append(torch.autograd.grad(loss, params))
            loss_of(one, *rows).backward(inputs=params)
            loss_of(one, *rows).backward()  # adds to them
        for expected, got in zip(*found, strict=True):
            torch.testing.assert_close(full(got), expected)
        same_gradients(plain, model)
