"""An entry of torch's databases of modules and optimizers, on the mesh and on one device.

The databases are `module_db` and `optim_db`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import shoal_tp_styles
from random_specs import draw_spec
from shoal_dtensor import (
    DTensor,
    Replicate,
    Shard,
    ShoalTensorError,
    distribute_module,
    distribute_tensor,
    full_tensor,
)
from shoal_dtensor.errors import StyleError
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.errors import MeshError
from shoal_tp_styles import parallelize_module

__all__ = [
    "MOST",
    "STYLES",
    "ModuleCase",
    "OptimizerCase",
    "modules",
    "optimizer_inputs",
    "optimizers",
    "samples",
    "verdict",
]

TYPED = (ShoalTensorError, StyleError, MeshError)
MESHES = ((4,), (2, 2))
STEPS = 3
# Each takes and gives what is replicated, so that the module's meaning stays.
STYLES: dict[str, dict[str, Any]] = {
    "ColwiseParallel": {"output_layouts": Replicate()},
    "RowwiseParallel": {"input_layouts": Replicate()},
    "SequenceParallel": {"sequence_dim": 0},
    "ChannelParallel": {"use_local_output": False},
    "HeadParallel": {},
}


@dataclass(frozen=True, slots=True)
class ModuleCase:
    """A sample of a module, and how the module is placed.

    Attributes:
        name: of the entry.
        training: whether in training mode.
        sample: number of the sample.
        route: `distribute` or a style's name.
        turn: which of its random placements.
    """

    name: str
    training: bool
    sample: int
    route: str
    turn: int


@dataclass(frozen=True, slots=True)
class OptimizerCase:
    """An input of an optimizer in one of its forms, and which random placements.

    The forms are `for-loop`, `foreach` and `fused`.
    """

    name: str
    sample: int
    form: str
    turn: int


@cache
def modules() -> dict[str, Any]:
    """Torch's descriptions of modules by name."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


@cache
def optimizers() -> dict[str, Any]:
    """Torch's descriptions of optimizers by name."""
    from torch.testing._internal.common_optimizers import optim_db

    infos: Sequence[Any] = optim_db
    return {info.optim_cls.__name__: info for info in infos}


@cache
def samples(name: str, training: bool, most: int) -> list[Any]:
    """Up to so many samples of a module, the same on every rank."""
    torch.manual_seed(0)
    info = modules()[name]
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )
    found = list(islice(made, 120))
    return found[:: max(1, -(-len(found) // most))]


@cache
def optimizer_inputs(name: str) -> list[Any]:
    """The inputs of an optimizer."""
    found: list[Any] = optimizers()[name].optim_inputs_func(device="cpu")
    return found


def verdict(case: ModuleCase | OptimizerCase) -> str:
    """One rank's part: "" if right.

    Else it is `refused: Type: ...`, `wrong: ...`, `error: ...`, or `void: ...`.
    """
    warnings.simplefilter("ignore")
    mesh_shape = (
        MESHES[case.turn % 2]
        if isinstance(case, OptimizerCase) or case.route == "distribute"
        else MESHES[0]
    )
    mesh = init_device_mesh("cpu", mesh_shape)
    try:
        expected = _run(case, None)
    except Exception as error:
        # a sample that is for another device or dtype
        return f"void: {type(error).__name__}: {str(error)[:200]}"
    try:
        got = _run(case, mesh)
    except TYPED as error:
        return f"refused: {type(error).__name__}: {str(error)[:300]}"
    except Exception as error:  # whatever it raises is the result
        return f"error: {type(error).__name__}: {str(error)[:300]}"
    return _difference(expected, got, 1e-6, 1e-8)


def _run(case: ModuleCase | OptimizerCase, mesh: DeviceMesh | None) -> dict[str, Any]:
    return _module_run(case, mesh) if isinstance(case, ModuleCase) else _optimizer_run(case, mesh)


def _difference(expected: dict[str, Any], got: dict[str, Any], rtol: float, atol: float) -> str:
    whole = {name: full_tensor(v) for name, v in got.items()}
    if set(whole) != set(expected):
        return f"wrong: other names: {sorted(set(whole) ^ set(expected))}"
    for name, one in expected.items():
        other = whole[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if one is not other and one != other:
                return f"wrong: {name}: expected {one}, got {other}"
            continue
        try:
            torch.testing.assert_close(other, one, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"wrong: {name}: {' '.join(str(error).split())[:200]}"
    return ""


Place = Callable[[Tensor], Any]


def _placer(case: Any, mesh: DeviceMesh) -> Place:
    """Places tensors at random, the same way on every rank."""
    draw = Random(repr(case))

    def place(tensor: Tensor) -> Any:
        if isinstance(tensor, DTensor):
            return tensor
        spec = draw_spec(draw, mesh, tuple(tensor.shape), ops=(), ragged=0.2)
        made = distribute_tensor(
            tensor.detach(),
            mesh,
            spec.placements,
            src_data_rank=None,
            shard_order=spec.shard_order or None,
        )
        return made.requires_grad_(tensor.requires_grad)

    return place


# --- modules --------------------------------------------------------------------------------------

MOST = 6  # samples of an entry and mode


def _module_run(case: ModuleCase, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Outputs, gradients and buffers after a forward and a backward pass."""
    sample = samples(case.name, case.training, MOST)[case.sample]
    torch.manual_seed(1)
    args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
    module: Any = (
        modules()[case.name].module_cls(*copy.deepcopy(args), **copy.deepcopy(kwargs)).double()
    )
    module.train(case.training)
    forward = tree_map_only(
        Tensor, _fresh, (sample.forward_input.args, sample.forward_input.kwargs)
    )
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        with torch.no_grad():
            # a lazy module takes its shapes from its first input
            module(*forward[0], **forward[1])
    if mesh is not None:
        if case.route == "distribute":
            place = _placer(case, mesh)
            module = distribute_module(module, mesh, partial(_placed, place=place))
            forward = tree_map_only(Tensor, place, forward)
        else:
            module, forward = _styled(case.route, module, forward, mesh)
    torch.manual_seed(2)
    made = module(*forward[0], **forward[1])
    outputs = [o for o in tree_leaves(made) if isinstance(o, Tensor)]
    rooted = [o for o in outputs if o.requires_grad]
    if rooted:
        loss: Any = sum((o * o).sum() + o.sum() for o in rooted)
        loss.backward()
    seen = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    seen |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    seen |= {f"buffer {name}": b.detach() for name, b in module.named_buffers()}
    given = [t for t in tree_leaves(forward) if isinstance(t, Tensor) and t.is_leaf]
    return seen | {f"gradient of input {i}": t.grad for i, t in enumerate(given)}


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _placed(name: str, module: nn.Module, mesh: DeviceMesh, place: Place) -> None:
    for table in (module._parameters, module._buffers):
        for key, tensor in table.items():
            if tensor is not None and not isinstance(tensor, DTensor):
                made = place(tensor)
                table[key] = (
                    nn.Parameter(made, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else made
                )


def _styled(route: str, module: Any, forward: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """The module under a style, and inputs that it takes."""
    style = getattr(shoal_tp_styles, route)(**STYLES[route])
    module = parallelize_module(module, mesh, style)
    # a plain input would be this rank's shard
    if route in ("SequenceParallel", "ChannelParallel"):
        args, kwargs = forward
        name = None if args else next(iter(kwargs))
        first = args[0] if name is None else kwargs[name]
        dim = 0 if route == "SequenceParallel" else min(1, first.ndim - 1)
        placed = distribute_tensor(first.detach(), mesh, [Shard(dim)], src_data_rank=None)
        placed.requires_grad_(first.requires_grad)
        forward = (
            ((placed, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: placed})
        )
    return module, forward


# --- optimizers -----------------------------------------------------------------------------------

SHAPES = ((5, 3), (8,), (4, 6), (3, 3), (1, 7))


def _optimizer_run(case: OptimizerCase, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Parameters and states after some steps."""
    info, sample = optimizers()[case.name], optimizer_inputs(case.name)[case.sample]
    generator = torch.Generator().manual_seed(3)
    shapes = [shape for shape in SHAPES if len(shape) == 2 or case.name != "Muon"]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    place = _placer(case, mesh) if mesh is not None else _fresh
    parameters = [nn.Parameter(place(value)) for value in values]
    forms = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    kwargs = copy.deepcopy(sample.kwargs) | (
        forms[case.form] if "foreach" in info.supported_impls else {}
    )
    optimizer = info.optim_cls(parameters, **kwargs)
    goals = [torch.randn(value.shape, generator=generator, dtype=torch.float64) for value in values]
    placed = [
        _like(goal, p) if isinstance(p, DTensor) else goal
        for goal, p in zip(goals, parameters, strict=True)
    ]

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = sum(
            ((p - goal) ** 2 + (p - goal) ** 4).sum()
            for p, goal in zip(parameters, placed, strict=True)
        )
        loss.backward()
        return loss

    for _ in range(STEPS):
        closure()
        optimizer.step(closure if info.step_requires_closure else None)
    seen: dict[str, Any] = {f"parameter {i}": p.detach() for i, p in enumerate(parameters)}
    for i, p in enumerate(parameters):
        state = {
            key: value for key, value in optimizer.state[p].items() if isinstance(value, Tensor)
        }
        seen |= {f"state {key} of {i}": value.detach() for key, value in state.items()}
    return seen


def _like(tensor: Tensor, parameter: DTensor) -> Any:
    """The tensor with the layout of a parameter."""
    spec = parameter.spec
    return distribute_tensor(
        tensor, spec.mesh, spec.placements, src_data_rank=None, shard_order=spec.shard_order or None
    )
