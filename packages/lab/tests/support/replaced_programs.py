"""Programs that replace their model or optimizer while they train.

They are correct unless the docstring says otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hand_written import Axis, Block, average, batch, make_axes, rows

Mesh = dict[str, int]
WIDTH = 8


def _model(seed: int, tp: Axis) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(WIDTH, tp), nn.Linear(WIDTH, WIDTH))


def _copy(model: Any, tp: Axis) -> Any:
    """Copy a model, but not the process group that it refers to."""
    return copy.deepcopy(model, {id(tp.group): tp.group})


def _step(model: Any, optimizer: torch.optim.Optimizer, dp: Axis, step: int) -> None:
    """Train one step with data parallelism."""
    model(rows(batch(step, 8, WIDTH), dp)).square().mean().backward()
    average(model.parameters(), dp)
    optimizer.step()
    optimizer.zero_grad()


def _train(mesh: Mesh, replace: Callable[[Any, dict[str, Axis], int], Any]) -> Any:
    """Train three steps, and replace the model between them.

    Each model has an optimizer of its own.
    """
    axes = make_axes(mesh)
    model: Any = _model(70, axes["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        _step(model, optimizer, axes["dp"], step)
        replaced = replace(model, axes, step)
        if replaced is not model:
            model = replaced
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model


def compiled_after_a_step(mesh: Mesh) -> None:
    """Compile a model with dropout after the first step."""

    def replace(model: Any, axes: dict[str, Axis], step: int) -> Any:
        if step:
            return model
        torch.manual_seed(axes["dp"].position)
        return torch.compile(nn.Sequential(model, nn.Dropout(0.5)), backend="eager")

    _train(mesh, replace)


def copied_model(mesh: Mesh) -> None:
    """Go on with a copy of the model after each step."""
    _train(mesh, lambda model, axes, step: _copy(model, axes["tp"]))


def grown_model(mesh: Mesh) -> None:
    """Go on with another model of the same names after each step."""
    _train(mesh, lambda model, axes, step: _model(71 + step, axes["tp"]))


def replaced_layer(mesh: Mesh) -> None:
    """Replace a layer of the model by a wider one after the first step."""

    def replace(model: Any, axes: dict[str, Axis], step: int) -> Any:
        if step:
            return model
        torch.manual_seed(72)
        return nn.Sequential(model[0], nn.Linear(WIDTH, 2 * WIDTH))

    _train(mesh, replace)


def layer_replaced_in_place(mesh: Mesh) -> None:
    """Put another block into the same model, whose optimizer gets its parameters."""

    def replace(model: Any, axes: dict[str, Axis], step: int) -> Any:
        torch.manual_seed(73 + step)
        model[0] = Block(WIDTH, axes["tp"])
        return nn.Sequential(*model) if step == 1 else model

    _train(mesh, replace)


def moving_average(mesh: Mesh) -> Any:
    """Keep a moving average of the parameters, evaluate it, and continue with it at the end."""
    axes = make_axes(mesh)
    model = _model(74, axes["tp"])
    average_model = _copy(model, axes["tp"]).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        _step(model, optimizer, axes["dp"], step)
        with torch.no_grad():
            pairs = zip(average_model.parameters(), model.parameters(), strict=True)
            for mean, parameter in pairs:
                mean.lerp_(parameter, 0.5)
            average_model(batch(step, 4, WIDTH))
        if step == 1:
            model, average_model = average_model.requires_grad_(True), model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def optimizer_for_each_step(mesh: Mesh) -> None:
    """Make a new optimizer for each step, with the state of the one before."""
    axes = make_axes(mesh)
    model = _model(75, axes["tp"])
    state: Any = None
    for step in range(4):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if state is not None:
            optimizer.load_state_dict(state)
        _step(model, optimizer, axes["dp"], step)
        state = copy.deepcopy(optimizer.state_dict())
        del optimizer


def grown_model_not_reduced(mesh: Mesh) -> None:
    """Leave out the reduction in the model that replaces the first one."""
    axes = make_axes(mesh)
    model = _model(76, axes["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, axes["dp"], 0)
    torch.manual_seed(77)
    model = nn.Sequential(Block(WIDTH, axes["tp"], "no copy"), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, axes["dp"], 1)


def replaced_layer_by_rank(mesh: Mesh) -> None:
    """Draw the new layer from another seed on each data rank."""
    axes = make_axes(mesh)
    model = _model(78, axes["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, axes["dp"], 0)
    torch.manual_seed(79 + axes["dp"].position)
    model[1] = nn.Linear(WIDTH, 2 * WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, axes["dp"], 1)


def state_of_another_rank(mesh: Mesh) -> None:
    """Load the state of the shard of another rank into the second optimizer."""
    axes = make_axes(mesh)
    tp = axes["tp"]
    model = _model(80, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _step(model, optimizer, axes["dp"], 0)
    states: list[Any] = [None] * tp.size
    torch.distributed.all_gather_object(states, optimizer.state_dict(), group=tp.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.load_state_dict(states[(tp.position + 1) % tp.size])
    _step(model, optimizer, axes["dp"], 1)
