"""Random programs under the checker of types, in one process on a fake mesh."""

from __future__ import annotations

from typing import Any

from integration_tests.random_modules import blocks
from integration_tests.random_modules.program import Program
from integration_tests.random_modules.train import Run
from integration_tests.typed_forwards import EndOfForward, type_error_of
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_spmd_types import (
    I,
    assert_type,
    register_local_autograd_function,
    set_current_mesh,
    typecheck,
)

__all__ = ["type_error"]

# Users declare the types of their autograd functions; these two compute on a rank's tensors alone.
register_local_autograd_function(blocks._Straight)
register_local_autograd_function(blocks._Exp)


class _TypedRun(Run):
    """A training that ends after the first loss, which runs under the checker in global mode."""

    def loss(self, step: int, model: nn.Module) -> Any:
        assert self.mesh is not None, "types are on a mesh"
        # Ranks along "dp" repeat the computation; the plan is for the ranks along "tp".
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh["tp"]
        with set_current_mesh(mesh), typecheck(local=False):
            for tensor in (*model.parameters(), *model.buffers()):
                _assert_equal_on_ranks(tensor)
            super().loss(step, model)
        raise EndOfForward

    def put(self, tensor: Tensor, name: str) -> Any:
        placed = super().put(tensor, name)
        _assert_equal_on_ranks(placed)
        return placed


def _assert_equal_on_ranks(tensor: Tensor) -> None:
    if not isinstance(tensor, DTensor):
        assert_type(tensor, {"tp": I})


def type_error(program: Program) -> str | None:
    """Return the checker's error about a program's first forward (`type_error_of`)."""
    with fake_world(4):
        names = ("tp",) if len(program.mesh) == 1 else ("dp", "tp")
        mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
        return type_error_of(lambda: _TypedRun(program, mesh, lambda model: None).train())
