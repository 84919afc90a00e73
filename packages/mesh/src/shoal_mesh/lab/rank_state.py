"""Process-wide state that each rank on a thread has of its own: generators, dtype, environment.

The ranks of a lab (see `run.py`) may be threads of one process, of which one runs at a time. When
another rank continues, the state is captured for the rank that stops, and the state of the rank
that continues is restored.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomStates(NamedTuple):
    """States of the default generators of torch, Python and NumPy.

    Attributes:
        of_torch: state of torch's generator on CPU.
        of_devices: states of the generators of all CUDA devices, if CUDA is in use.
        of_python: state of the module `random`.
        of_numpy: state of NumPy's legacy generator; None where NumPy is not imported.

    Example:
        >>> states = RandomStates.capture()
        >>> first = torch.rand(1)
        >>> states.restore()
        >>> bool(torch.rand(1) == first)
        True
    """

    of_torch: Tensor
    of_devices: tuple[Tensor, ...]
    of_python: Any
    of_numpy: Any

    @classmethod
    def capture(cls) -> RandomStates:
        """Return the present states."""
        numpy: Any = sys.modules.get("numpy")
        of_numpy = None if numpy is None else numpy.random.get_state()
        of_devices: tuple[Tensor, ...] = ()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # of torch
            of_devices = tuple(torch.cuda.get_rng_state_all())
        return cls(torch.get_rng_state(), of_devices, random.getstate(), of_numpy)

    def restore(self) -> None:
        """Restore these states to the generators."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        if self.of_devices:
            torch.cuda.set_rng_state_all(list(self.of_devices))
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)

    @staticmethod
    def seed(seed: int) -> None:
        """Seed torch's, Python's and, if it is imported, NumPy's default generator.

        A model may draw from any of them. For example, the speech models of transformers draw their
        masks by NumPy.

        Args:
            seed: the seed.
        """
        seed_torch(seed)
        random.seed(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's default generators of all devices.

    Args:
        seed: the seed.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # `torch.manual_seed` would format a stack trace (0.3 ms), for a device that is used later
        torch.default_generator.manual_seed(seed)


class RankState(NamedTuple):
    """Random states, default dtype and environment variables of one rank on a thread.

    Attributes:
        random: states of the default generators.
        dtype: the default dtype.
        environment: the environment variables.
    """

    random: RandomStates
    dtype: torch.dtype
    environment: dict[str, str]

    @classmethod
    def capture(cls) -> RankState:
        """Return the present state."""
        return cls(RandomStates.capture(), torch.get_default_dtype(), dict(os.environ))

    def restore(self) -> None:
        """Make this state the present one."""
        self.random.restore()
        torch.set_default_dtype(self.dtype)
        present = dict(os.environ)
        if present == self.environment:
            return
        for name in present.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)

    def with_environment(self, variables: dict[str, str]) -> RankState:
        """Return this state with more environment variables.

        Args:
            variables: the variables.
        """
        return self._replace(environment=self.environment | variables)


def environment_of(rank: int, size: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank of one machine.

    Args:
        rank: the global rank.
        size: number of ranks.
    """
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size))
    variables["GROUP_RANK"] = "0"
    # Programs read the address, but nothing listens there. `init_process_group` gets the ranks and
    # the store from the lab.
    variables["MASTER_ADDR"] = "127.0.0.1"
    variables["MASTER_PORT"] = "29500"
    return variables
