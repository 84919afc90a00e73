"""Calls to validate rules with: recorded from torch's operator database."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal_dtensor._torch.operators import OpOverload
from shoal_dtensor.internal import pytree

__all__ = ["Call", "Calls", "copied", "kind", "recorded", "recording"]

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
# elements of a tensor; larger ones are slow to compare and show nothing more
LARGEST = 1500


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An operator with global arguments."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        """What it returns; its own arguments are not written."""
        args, kwargs = copied((self.args, dict(self.kwargs)))
        with torch.no_grad():
            return self.op(*args, **kwargs)

    def runs(self) -> bool:
        """Whether the operator takes these arguments."""
        try:
            self.run()
        except Exception:
            # whatever an operator says to arguments that are not for it
            return False
        return True

    def resizes(self) -> bool:
        """Whether what it writes to gets another shape.

        addbmm_ does so to a first argument that broadcasts.
        """
        if (
            not self.op._schema.name.endswith("_")
            or not self.args
            or not isinstance(self.args[0], Tensor)
        ):
            return False
        return bool(self.run().shape != self.args[0].shape)

    def __str__(self) -> str:
        return f"{self.op}{kind((self.args, dict(self.kwargs)))}"


Calls = dict[OpOverload, list[Call]]


def recorded(
    ops: Container[OpOverload], *, samples: int, per_op: int, dtypes: Sequence[torch.dtype] = DTYPES
) -> Calls:
    """Calls of `ops` that torch's public operators make, forward, in place and backward.

    Args:
        ops: the overloads wanted.
        samples: how many of an operator's samples to run, evenly spread.
        per_op: how many calls of an overload to keep, no two of one kind.
        dtypes: an operator runs with the first of these that it supports.
    """
    found: dict[OpOverload, dict[Any, Call]] = {}

    def note(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        calls = found.setdefault(op, {}) if op in ops else None
        if calls is None or len(calls) >= per_op or not _usable((args, kwargs)):
            return
        key = kind((args, kwargs))
        if key not in calls:
            calls[key] = Call(op, *copied((tuple(args), dict(kwargs))))

    from torch.testing._internal.common_methods_invocations import op_db  # importing it takes 2 s

    for info in op_db:
        for function, sample in _samples(info, samples, dtypes):
            try:
                _run(function, sample, note)
            except Exception:
                # a sample that this form of the operator refuses
                continue
    working = {op: [call for call in calls.values() if call.runs()] for op, calls in found.items()}
    return {op: calls for op, calls in working.items() if calls}


@contextmanager
def recording(
    note: Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], None],
) -> Iterator[None]:
    """Inside the block, `note` sees every operator that runs below autograd, before it runs."""

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            note(op, args, kwargs or {})
            return op(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]  # torch gives it no types
        yield


def _samples(info: Any, count: int, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Any, Any]]:
    """Forms of an operator with samples for them."""
    dtype = next((d for d in dtypes if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    # Not `sample_inputs`: that walks the whole call stack for every sample, which takes minutes
    # under pytest.
    made = list(info.sample_inputs_func(info, "cpu", dtype, differentiable))
    for sample in made[:: max(1, len(made) // count)][:count]:
        for function in (info.get_op(), info.get_inplace()):
            if function is not None:
                yield function, sample


def _run(function: Any, sample: Any, note: Any) -> None:
    with warnings.catch_warnings(), recording(note):
        warnings.simplefilter("ignore")
        first = sample.input
        if function.__name__.endswith("_") and isinstance(first, Tensor):
            first = first.clone()
        made = pytree.tree_leaves(function(first, *sample.args, **sample.kwargs))
        roots = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.randn_like(t) for t in roots])


def _usable(values: Any) -> bool:
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
    return all(
        t.layout is torch.strided and t.numel() <= LARGEST and t.device.type == "cpu"
        for t in tensors
    )


def copied(values: Any) -> Any:
    """Arguments whose tensors and generators are copies."""

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        return value.clone_state() if isinstance(value, torch.Generator) else value

    return pytree.tree_map(copy, values)


def kind(value: Any) -> Any:
    """What roughly distinguishes calls for a rule.

    It is dtypes, which dims are 1 or empty, flags, and small numbers.
    """
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(min(n, 2) for n in value.shape))
    if isinstance(value, Mapping):
        return tuple((name, kind(item)) for name, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(kind(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-2, min(value, 2))
    return (
        type(value).__name__ if isinstance(value, float | complex | torch.Generator) else str(value)
    )
