"""Settings of torch inside a block, a mode that only watches, and calls that may refuse values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal_dtensor.errors import OperatorArgumentError, OperatorIndexError, ShoalTensorError
from shoal_mesh.errors import PeerError

__all__ = ["Watcher", "default_dtype", "deterministic", "unless_refused"]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """Deterministic kernels alone; where torch has none, an error or a warning."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """A mode that only watches."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def unless_refused(call: Callable[[], Any]) -> Any:
    """The result of a call; None if it refuses its values, as one process or as shoal does."""
    try:
        return call()
    except PeerError:
        # Ranks part ways, or their group has failed: no rank has refused a value.
        raise
    except ShoalTensorError as error:
        if not isinstance(error, OperatorArgumentError | OperatorIndexError):
            raise
    except (RuntimeError, IndexError, ValueError):
        # on a mesh too: modules compute on plain tensors under styles
        pass
    return None
