"""Random numbers for users: seeds, and checks that generators are in step.

Nothing has to be called: a program that seeds every rank alike (`torch.manual_seed`) draws, on any mesh, what one
device would draw.  `rng` holds the streams themselves.
"""

from __future__ import annotations

import torch

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import own_device

from ..argument_types import check_mesh, check_type
from ..errors import RandomStateError
from ..rng.state import check_in_step, forget_checks, generator_of, has_generators


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Whether random operators on tensors of the mesh draw as on one device: where torch shows its generators.

    Args:
        device_mesh: of the tensors.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> is_rng_supported_mesh(abstract_mesh((2,)))
        True
    """
    return has_generators(device_mesh.device_type)


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed the default generators of this rank; every rank of the mesh passes the same seed.

    The mesh's next random operator checks that they did, with one small all-gather.

    Args:
        seed: as for `torch.manual_seed`.
        device_mesh: the mesh, for the type of its devices.

    Raises:
        RandomStateError: if the mesh's devices have no generator that shoal knows.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     manual_seed(7, mesh)
        ...     torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(7)))
        True
    """
    check_type("manual_seed", "seed", seed, int, "an int")
    check_mesh("manual_seed", device_mesh)
    if not is_rng_supported_mesh(device_mesh):
        raise RandomStateError(
            f"manual_seed: expected a mesh of devices whose generators torch shows, got {device_mesh}"
        )
    torch.manual_seed(seed)
    forget_checks()


def check_random_state(device_mesh: DeviceMesh) -> None:
    """Raise on every rank of the mesh unless all ranks' default generators are in the same state; a collective.

    Args:
        device_mesh: the mesh; all of its ranks call this.

    Raises:
        RandomStateError: if they differ; it names the ranks that agree with each other.

    Example:
        >>> from shoal_mesh import init_device_mesh, launch
        >>> launch(lambda: check_random_state(init_device_mesh("cpu", (2,))), 2)
        [None, None]
    """
    check_in_step(device_mesh, generator_of(own_device(device_mesh.device_type)), always=True)
