"""Random numbers for users: seeds, modes, states, and torch's tracker interface.

A program does not have to call anything here. If it seeds every rank with the same seed, it draws
the same numbers on any mesh as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import own_device, require

from ..argument_types import check_mesh, suggests_keywords
from ..errors import ArgumentTypeError, RandomStateError
from ..layout.spec import Spec
from ..rng.state import (
    check_all_meshes_again,
    check_in_step,
    current_mode,
    generator_of,
    has_generators,
    set_random_mode,
)


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Tell whether random operators on tensors of the mesh draw the same numbers as on one device.

    They do so on devices whose generators torch exposes.

    Args:
        device_mesh: the mesh of the tensors.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> is_rng_supported_mesh(abstract_mesh((2,)))
        True
    """
    return has_generators(device_mesh.device_type)


@suggests_keywords()
def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed the default generators of this rank; every rank of the mesh passes the same seed.

    The mesh's next random operator compares the states of all ranks, with one small all-gather.

    Args:
        seed: the seed, as for `torch.manual_seed`.
        device_mesh: the mesh, which determines the type of devices.

    Raises:
        RandomStateError: if shoal does not support the generator of the mesh's devices.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     manual_seed(7, mesh)
        ...     generator = torch.Generator().manual_seed(7)
        ...     torch.equal(torch.rand(2), torch.rand(2, generator=generator))
        True
    """
    require(seed, int, "manual_seed: seed is an int", ArgumentTypeError)
    check_mesh("manual_seed", device_mesh)
    if not is_rng_supported_mesh(device_mesh):
        raise RandomStateError(
            "manual_seed: expected a mesh of devices with generators that torch exposes, got "
            f"{device_mesh}"
        )
    torch.manual_seed(seed)
    # The ranks may have passed different seeds, so no mesh counts as checked any more: the next
    # random operator on each mesh compares the states of its ranks again.
    check_all_meshes_again()


def check_random_state(device_mesh: DeviceMesh) -> None:
    """Raise on all ranks of the mesh if their default generators differ in state; a collective.

    Args:
        device_mesh: the mesh; all of its ranks call this.

    Raises:
        RandomStateError: if the states differ; the error names the ranks that agree with each
            other.

    Example:
        >>> from shoal_mesh import init_device_mesh, launch
        >>> launch(lambda: check_random_state(init_device_mesh("cpu", (2,))), 2)
        [None, None]
    """
    check_in_step(device_mesh, generator_of(own_device(device_mesh.device_type)), always=True)


class OffsetBasedRNGTracker:
    """Torch's tracker of random states, for programs that use its interface.

    Args:
        device_mesh: the mesh; its device type determines the generator.
        run_state_sync: check now that the ranks of the mesh agree; torch would broadcast rank 0's
            state instead.

    Attributes:
        distribute_region_enabled: when False, random operators draw from each rank's own generator.
    """

    def __init__(self, device_mesh: DeviceMesh, run_state_sync: bool = True) -> None:
        self._mesh = device_mesh
        if run_state_sync:
            check_random_state(device_mesh)

    @property
    def distribute_region_enabled(self) -> bool:
        return current_mode().mode != "local"

    @distribute_region_enabled.setter
    def distribute_region_enabled(self, value: bool) -> None:
        set_random_mode("single_device" if value else "local")

    @property
    def rng_states(self) -> dict[str, Tensor]:
        """The state of the mesh's generator, under torch's name for it."""
        return {"parallel-rng": self._generator_of("parallel-rng").get_state()}

    def get_seed(self, name: str = "parallel-rng") -> int:
        """Return the seed that the generator started from."""
        return self._generator_of(name).initial_seed()

    def set_seed(self, name: str, seed: int) -> None:
        """Restart the generator from a seed."""
        self._generator_of(name).manual_seed(seed)
        check_all_meshes_again()

    @contextmanager
    def _distribute_region(
        self, spec: Spec, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Return a context manager without an effect, for callers of torch's tracker.

        In torch, random operators on DTensors draw the same numbers as on one device only inside of
        this region. In shoal, they do so everywhere.
        """
        yield

    def _generator_of(self, name: str) -> torch.Generator:
        if name != "parallel-rng":
            raise RandomStateError(
                f"{type(self).__name__}: expected the state 'parallel-rng', got {name!r}"
            )
        return generator_of(own_device(self._mesh.device_type))
