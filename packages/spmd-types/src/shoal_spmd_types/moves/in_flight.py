"""Results of collectives in flight: tensors that wait when an operator reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal_dtensor.internal import disabled_torch_function, make_wrapper, pytree
from shoal_mesh.internal import Pending


class InFlight(Tensor):
    """The result of a collective that may still be running.

    Its shape and dtype are known, and autograd records it as the result of the collective. Every
    operator on it waits for the collective, and computes with the arrived tensor; the operator's
    results are ordinary tensors. Until the collective has ended, the program must not write to the
    tensor that is sent.

    Args:
        pending: the collective.
        shape: the shape of its result.
        like: a tensor with the dtype and the device of the result.
    """

    _pending: Pending[Tensor]

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, pending: Pending[Tensor], shape: Sequence[int], like: Tensor) -> InFlight:
        tensor: InFlight = make_wrapper(cls, shape, dtype=like.dtype, device=like.device)
        tensor._pending = pending
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it for instances
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # id of an arrived tensor -> the argument that waited for it
        wrappers: dict[int, InFlight] = {}

        def read(value: Any) -> Any:
            if not isinstance(value, InFlight):
                return value
            tensor = value._pending.wait()
            wrappers[id(tensor)] = value
            return tensor

        positional, named = pytree.tree_map(read, (args, {**(kwargs or {})}))
        out = func(*positional, **named)
        # An operator that writes to its argument returns this argument.
        return wrappers.get(id(out), out)

    def wait(self) -> Tensor:
        """Return the arrived tensor, with the gradient of the collective."""
        # Any operator waits, and returns an ordinary tensor. A view copies nothing, and autograd
        # records it.
        return self.view_as(self)

    def is_completed(self) -> bool:
        """Return whether the collective has ended, without waiting for it."""
        return self._pending.is_completed()

    # These methods read memory without an operator.

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.wait().numpy(force=force)

    def data_ptr(self) -> int:
        """Return the address of the arrived tensor."""
        return self.wait().data_ptr()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch passes some
        """Return the text of the arrived tensor."""
        return repr(self.wait())


def wait_without_gradient(tensor: Tensor) -> Tensor:
    """Wait for a tensor that may be in flight; return the arrived tensor, which has no gradient.

    A tensor that is not in flight is returned itself.

    Args:
        tensor: a tensor, which may be in flight.
    """
    return tensor._pending.wait() if isinstance(tensor, InFlight) else tensor
