"""MemoryTrace: how many bytes of tensors a rank holds, over time, on any device."""

from __future__ import annotations

import time
import weakref
from typing import Any

from torch import Tensor

from .._torch import TorchDispatchMode, tree_leaves, without_importing_dynamo


class MemoryTrace(TorchDispatchMode):
    """Counts the bytes of all storages that operators in a `with` block read or make, until they are freed.

    What the block finds there, such as parameters, counts from its start, but only once an operator has used it. Of
    tensors that wrap others, as DTensors do, the local tensors count. What kernels use inside is not seen.

    Attributes:
        samples: seconds since the block was entered, and bytes held then, whenever they change.
        peak: the most bytes held at one time.

    Example:
        >>> with MemoryTrace() as memory:
        ...     x = torch.ones(256)
        ...     y = x + 1
        ...     del x, y
        >>> memory.peak, memory.samples[-1][1]
        (2048, 0)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.samples: list[tuple[float, int]] = []
        self.peak: int = 0
        self._held = 0
        self._found = 0  # bytes that were there before the block
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}
        self._began = 0.0

    def __enter__(self) -> MemoryTrace:
        self._began = time.perf_counter()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here
        for seen in self._seen.values():
            seen.detach()
        self._seen.clear()
        self.samples = [(0.0, self._found), *((second, held + self._found) for second, held in self.samples)]
        self.peak = max(held for _, held in self.samples)

    def picture(self, ax: Any = None) -> Any:
        """A line over time; `draw_memory` draws several ranks together.

        Args:
            ax: matplotlib axes to draw on; those of a new figure when left out.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from .pictures import draw_memory

        return draw_memory({"this rank": self.samples}, ax)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything pass; count what is new."""
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper: it calls operators on what it holds
        for tensor in tree_leaves((args, kwargs)):
            self._count(tensor, found=True)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._count(tensor, found=False)
        return result

    def _count(self, tensor: Any, found: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        nbytes = storage.nbytes()
        self._seen[key] = weakref.finalize(storage, self._freed, key, nbytes)
        if found:
            self._found += nbytes
        else:
            self._change(nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self._seen.pop(key, None)
        self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self._held += nbytes
        self.samples.append((time.perf_counter() - self._began, self._held))


without_importing_dynamo(MemoryTrace)
