"""How random numbers relate to the mesh: a scoped setting, read when an operator draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from .._torch.interception import checkpoints, recomputed_in
from ..scopes import ScopedValue

Mode = Literal["single_device", "counter", "per_axis", "local"]


@dataclass(frozen=True, slots=True)
class RandomMode:
    """A mode and, for "per_axis", the mesh axes that have streams of their own."""

    mode: Mode = "single_device"  # as `random_mode` takes them
    axes: tuple[int | str, ...] = ()
    # the checkpoints of activations in which a block entered it; None where no block did
    outside: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)

    def hold_in_recomputation(self) -> None:
        """Hold too where backward runs again what a checkpoint inside of the block runs now."""
        if self.outside is not None:
            recomputed_in(self, partial(_current.entered, self), self.outside)


_DEFAULT = RandomMode()
_current = ScopedValue("shoal_dtensor_random_mode", _DEFAULT)
current_mode: Callable[[], RandomMode] = _current.get


def _checked(mode: Mode, axes: Sequence[int | str]) -> RandomMode:
    if mode not in get_args(Mode):
        raise ValueError(f"random mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
    if bool(axes) != (mode == "per_axis"):
        raise ValueError(
            f"random mode {mode!r}: axes are needed for 'per_axis' and for no other mode, got {list(axes)}"
        )
    return RandomMode(mode, tuple(axes))


def set_random_mode(mode: Mode, axes: Sequence[int | str] = ()) -> None:
    """Set how random operators draw from here on, in this thread; arguments and errors as for `random_mode`.

    Example:
        >>> set_random_mode("local")
        >>> set_random_mode("single_device")
    """
    _current.set(_checked(mode, axes))


def get_random_mode() -> Mode:
    """The name of the mode that is in force in this thread; see `random_mode`."""
    return _current.get().mode


def draws_at_once(device_type: str) -> bool:
    """Whether a traced draw is one node for any sizes; elsewhere where a shard begins in the stream takes integers."""
    return current_mode().mode == "local" or (current_mode().mode == "single_device" and device_type == "cpu")


@contextmanager
def random_mode(mode: Mode, axes: Sequence[int | str] = ()) -> Iterator[None]:
    """Inside the block, random operators on sharded tensors draw as `mode` says; blocks nest.

    What `torch.utils.checkpoint` runs again in backward draws by the mode of its first run; else a backward pass draws
    by the mode in which it is started.

    Args:
        mode: "single_device": the values that one device would have drawn, bit for bit, on any mesh (the default).
            "counter": values that follow from the generator's state and the element's global index alone; not those of
            one device, but the same on every mesh and on CPU and CUDA, at a cost that depends on the shard only.
            "per_axis": every coordinate of `axes` has a stream of its own; over the other axes as on one device.  An
            axis that does not shard a tensor leaves it alone: replicas stay equal.
            "local": every rank draws its own part from its own generator, apart from the others; nothing is checked.
        axes: mesh axes for "per_axis", by name or index; a mesh that has none of them draws as on one device.

    Raises:
        ValueError: if the mode is unknown, or axes are given or missing against it.

    Example:
        >>> with random_mode("per_axis", axes=("dp",)):
        ...     current_mode().axes
        ('dp',)
    """
    with _current.entered(replace(_checked(mode, axes), outside=tuple(checkpoints()))):
        yield
