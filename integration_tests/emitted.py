"""Emitted programs of architectures of transformers, compared with dispatch on real ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from integration_tests.architectures import VOCABULARY, build
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, distribute_tensor, implicit_replication
from shoal_mesh import DeviceMesh
from shoal_spmd_types import EmittedProgram, I, S, emit, set_current_mesh

__all__ = ["Comparison", "compared", "plan_of", "program_of"]

COLUMNWISE = {"tp": S(0)}
ROWWISE = {"tp": S(1)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A program beside dispatch, on this rank.

    Attributes:
        same_bits: whether the logits are equal bit by bit.
        gradient_error: the largest error of a gradient of a parameter, relative to its norm.
        seconds: the host time of the program, the least of several forwards.
        seconds_of_dispatch: that of dispatch.
    """

    same_bits: bool
    gradient_error: float
    seconds: float
    seconds_of_dispatch: float


def plan_of(model: Any) -> dict[str, dict[str, Any]]:
    """The columnwise and rowwise entries of a model's own plan, as types."""
    plan: dict[str, dict[str, Any]] = {}
    for pattern, style in (model.tp_plan or {}).items():
        if style == "colwise":
            plan[f"{pattern}.weight"] = COLUMNWISE
            plan[f"{pattern}.bias"] = COLUMNWISE
        elif style == "rowwise":
            plan[f"{pattern}.weight"] = ROWWISE
            plan[pattern] = {"tp": I}
    names = {path for path, _ in model.named_modules()}
    names |= {name for name, _ in model.named_parameters()}
    return {
        pattern: layout
        for pattern, layout in plan.items()
        if any(fnmatchcase(name, pattern) for name in names)
    }


def program_of(model: nn.Module, mesh: DeviceMesh, tokens: Tensor) -> EmittedProgram:
    """The program of a model by its own plan."""
    return emit(model, plan_of(model), mesh, input_ids=tokens, use_cache=False)


def compared(name: str, mesh: DeviceMesh) -> Comparison:
    """One rank's part of the comparison of an architecture."""
    model = build(name)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    program = program_of(model, mesh, tokens)
    forward = program.load()
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    placed: dict[str, Any] = {}
    for path, tensor in whole.items():
        distributed = distribute_tensor(
            tensor.detach(), mesh, program.specs[path].placements, src_data_rank=None
        )
        placed[path] = distributed.requires_grad_(tensor.requires_grad)
    local = {}
    for path, distributed in placed.items():
        shard = distributed.detach().to_local().clone()
        local[path] = shard.requires_grad_(distributed.requires_grad)
    with set_current_mesh(mesh):
        got = forward(local, tokens)["logits"]
        got.square().sum().backward()
    handles = _place_outputs(model, mesh)
    ids = distribute_tensor(tokens, mesh, src_data_rank=None)
    call = partial(_by_dispatch, model, placed, ids)
    expected = call()
    expected.square().sum().backward()
    errors = [0.0]
    for path, tensor in local.items():
        if tensor.grad is not None:
            errors.append(_relative_error(tensor.grad, placed[path].grad))
    with set_current_mesh(mesh):
        seconds = _least_seconds(lambda: forward(local, tokens))
    seconds_of_dispatch = _least_seconds(call)
    for handle in handles:
        handle.remove()
    same = torch.equal(got, expected.to_local())
    return Comparison(same, max(errors), seconds, seconds_of_dispatch)


def _by_dispatch(model: nn.Module, placed: Mapping[str, Tensor], ids: Tensor) -> Any:
    arguments = {"input_ids": ids, "use_cache": False}
    with implicit_replication():
        return torch.func.functional_call(model, dict(placed), (), arguments).logits


def _place_outputs(model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Redistribute the outputs that the plan places, as the program does."""

    def replicate(module: nn.Module, args: Any, output: Any) -> Any:
        return output.redistribute(placements=[Replicate()] * mesh.ndim)

    patterns = plan_of(model)
    handles = []
    for path, module in model.named_modules():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            handles.append(module.register_forward_hook(replicate))
    return handles


def _relative_error(local: Tensor, expected: Any) -> float:
    whole = expected.to_local() if isinstance(expected, DTensor) else expected
    return float((local - whole).norm() / (whole.norm() + 1e-30))


def _least_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
    return best
