"""Random training steps under the checker of types, in one process on a fake mesh."""

from __future__ import annotations

from typing import Any

from integration_tests.random_training.compose import Program
from integration_tests.random_training.train import Training
from integration_tests.typed_forwards import EndOfForward, type_error_of
from torch import Tensor

from shoal_dtensor import DTensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_spmd_types import I, R, V, assert_type, set_current_mesh, typecheck

__all__ = ["type_error"]


class _TypedTraining(Training):
    """A training that ends after the first loss, which runs under the checker in global mode."""

    def _losses(self, number: int, where: str = "") -> list[Tensor]:
        assert self.mesh is not None, "types are on a mesh"
        # A rank's loss is the mean over its own rows, not a shard or an addend of one loss.
        data_axes = [name for name in self.mesh.axis_names if name != "tensor"]
        with (
            set_current_mesh(self.mesh, local_axes=data_axes),
            typecheck(local=False),
        ):
            for parameter in self.model.parameters():
                self._assert_parameter(parameter)
            super()._losses(number)
        raise EndOfForward

    def _call(self, x: Tensor, y: Tensor, use: bool, number: int) -> tuple[Any, Any]:
        assert self.mesh is not None, "types are on a mesh"
        types = {name: I if name == "tensor" else V for name in self.mesh.axis_names}
        for rows in (x, y):
            assert_type(rows, types)
        logits, targets = super()._call(x, y, use, number)
        # A DTensor does not have types along axes outside of its mesh, nor does its local tensor.
        return assert_type(logits, types), targets

    def _assert_parameter(self, parameter: Tensor) -> None:
        """Declare a parameter equal on all ranks; its gradient is summed over data axes.

        A DTensor says the types along the axes of its mesh itself.
        """
        assert self.mesh is not None, "types are on a mesh"
        own = parameter.device_mesh.axis_names if isinstance(parameter, DTensor) else ()
        others = [name for name in self.mesh.axis_names if name not in own]
        assert_type(parameter, {name: I if name == "tensor" else R for name in others})


def type_error(program: Program) -> str | None:
    """Return the checker's error about a program's first forward (`type_error_of`)."""
    with fake_world(4):
        names = ("replica", "data") if program.parallel == "hybrid" else ("data", "tensor")
        mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
        return type_error_of(_TypedTraining(program, mesh).run)
