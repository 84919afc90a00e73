"""`Recorder`: a dispatch mode that runs operators on meta tensors and records those that write.

Parameters, buffers and the tensors of the checkpoint are watched. Their operators run on the meta
device, without values, and are added to a `Tape` if they write. A loader that reads a value of the
checkpoint as a Python number gets a label instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.internal import TorchDispatchMode, pytree

from ..errors import LoaderComputesError
from ._torch import (
    Operator,
    leaves_memory_unset,
    makes_views,
    operator_name,
    sets_storage,
    storage_key,
    written_arguments,
)
from .numberings import Numbering, draw_numbering
from .replay import ComputedError, Elements, elements_of, results_of
from .tape import Memory, MemoryView, Operation, Tape

_READ_NUMBER = "aten::_local_scalar_dense"
# any two numbers, the same on all ranks
_SEEDS = (20_130_517, 71_993_021)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Records the operators that write to watched tensors or make tensors of them.

    Watched tensors are on the meta device, so nothing is written. A real tensor that meets a
    watched one in an operator becomes watched, with its values as constants.

    Args:
        side: 0 or 1, the numbering of the labels that a loader gets as Python numbers.

    Attributes:
        tape: the record.
        scalars: positions of the labels that the loader read by `.item()`.
    """

    def __init__(self, side: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class is untyped
        self.tape = Tape()
        self.scalars: dict[float, int] = {}
        self._side = side
        self._by_storage: dict[int, Memory] = {}
        # Real tensors whose storages are watched. They are kept, because a new storage could get
        # the address of a freed one.
        self._kept: list[Tensor] = []

    def watch(self, tensor: Tensor, *, labelled: bool) -> Memory:
        """Watch a meta tensor; two tensors of one storage are watched as one."""
        key = storage_key(tensor)
        if key not in self._by_storage:
            self._by_storage[key] = self.tape.add_memory(tensor, labelled=labelled)
        return self._by_storage[key]

    def watch_twin(self, twin: Tensor, original: Tensor) -> None:
        """Watch the meta twin of a parameter or buffer.

        A buffer that has values keeps them as constants, because loaders read such buffers, for
        example the numbers of a rank's experts. Other elements are labelled.
        """
        if isinstance(original, torch.nn.Parameter) or original.is_meta:
            self.watch(twin, labelled=True)
            return
        flat = _flat(original)
        memory = self.tape.add_memory(twin, constant=flat.clone())
        self._by_storage[storage_key(twin)] = memory

    def operand_of(self, tensor: Tensor) -> MemoryView | None:
        """Return a tensor as a view of a watched memory; None if it is not watched."""
        memory = self._by_storage.get(storage_key(tensor))
        if memory is None:
            return None
        return MemoryView(
            memory,
            int(tensor.storage_offset()),
            tuple(tensor.size()),
            stride=tensor.stride(),
            dtype=tensor.dtype,
        )

    def elements_of(self, operand: MemoryView) -> Elements:
        """Return the content of a watched tensor.

        Raises:
            ComputedError: the loader computes it.
        """
        return elements_of(self.tape, operand, self.numberings, self.scalars)

    @property
    def numberings(self) -> tuple[Numbering, Numbering]:
        """Two random numberings of the labelled elements."""
        size = self.tape.labelled
        first, second = _SEEDS
        return draw_numbering(first, 1, size), draw_numbering(second, -1, size)

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors_in((args, kwargs))
        if not any(storage_key(tensor) in self._by_storage for tensor in tensors):
            return self._run_unwatched(func, args, kwargs)
        if makes_views(func) and all(tensor.is_meta for tensor in tensors):
            # the results share a watched storage
            return func(*args, **kwargs)
        if operator_name(func) == _READ_NUMBER:
            return self._read_number(tensors[0])
        return self._record_operator(func, args, kwargs)

    def _run_unwatched(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator without watched arguments, for example one that makes a constant."""
        results = func(*args, **kwargs)
        if any(tensor.is_meta for tensor in _tensors_in(results)):
            return self._record_operator(func, args, kwargs)
        if leaves_memory_unset(func):
            results.zero_()
        return results

    def _record_operator(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator on meta tensors and record it if it writes."""
        originals: dict[int, Tensor] = {}
        kwargs = _without_devices(kwargs)

        def to_meta(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            replaced = self._on_meta(value)
            originals[id(replaced)] = value
            return replaced

        meta_args, meta_kwargs = pytree.tree_map(to_meta, (args, kwargs))
        if sets_storage(func):
            return func(*meta_args, **meta_kwargs)
        on_meta = {**meta_kwargs, "device": "meta"} if "device" in kwargs else meta_kwargs
        try:
            results = func(*meta_args, **on_meta)
        except NotImplementedError:
            # the size of the result depends on values, for example of a mask
            results = self._results_by_replay(func, meta_args, meta_kwargs)
        self._record(func, meta_args, meta_kwargs, results)

        def to_original(value: Any) -> Any:
            # an operator that writes to an argument returns that argument
            return originals.get(id(value), value) if isinstance(value, Tensor) else value

        return pytree.tree_map(to_original, results)

    def _record(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> None:
        outputs: list[MemoryView | None] = []
        for result in _tensors_in(results):
            is_new = storage_key(result) not in self._by_storage
            if is_new:
                self._by_storage[storage_key(result)] = self.tape.add_memory(result)
            outputs.append(self.operand_of(result) if is_new else None)
        written = [output for output in outputs if output is not None]
        written.extend(map(self._known_operand, _written_tensors(func, args, kwargs)))
        if written:
            call = self._call_of(func, args, kwargs)
            self.tape.add_operation(replace(call, written=tuple(written), outputs=tuple(outputs)))

    def _call_of(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        """Return the call of an operator as an operation without outputs."""

        def to_operand(value: Any) -> Any:
            return self._known_operand(value) if isinstance(value, Tensor) else value

        recorded_args, recorded_kwargs = pytree.tree_map(to_operand, (args, kwargs))
        read = tuple(self._known_operand(tensor) for tensor in _tensors_in((args, kwargs)))
        return Operation(func, recorded_args, recorded_kwargs, read=read)

    def _results_by_replay(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return meta tensors for the results of an operator that meta tensors cannot run."""
        written = _written_tensors(func, args, kwargs)
        if written:
            return written[0]
        call = self._call_of(func, args, kwargs)
        results = results_of(self.tape, call, self.numberings, self.scalars)
        floating = [operand.dtype for operand in call.read if operand.dtype.is_floating_point]

        def to_meta(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            is_label = result.dtype == torch.float64 and floating
            dtype = floating[0] if is_label else result.dtype
            return torch.empty_like(result, dtype=dtype, device="meta")

        return pytree.tree_map(to_meta, results)

    def _known_operand(self, tensor: Tensor) -> MemoryView:
        operand = self.operand_of(tensor)
        assert operand is not None, "arguments and results must be watched before they are recorded"
        return operand

    def adopt(self, tensor: Tensor) -> MemoryView:
        """Return a tensor as a view of a watched memory; watch it if it is not."""
        return self._known_operand(self._on_meta(tensor))

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """Return the meta tensor that stands for a tensor."""
        key = storage_key(tensor)
        if key not in self._by_storage:
            flat = _flat(tensor)
            holder = torch.empty_like(flat, device="meta")
            constant = None if tensor.is_meta else flat.clone()
            memory = self.tape.add_memory(holder, constant=constant)
            self._by_storage[key] = memory
            self._by_storage[storage_key(holder)] = memory
            self._kept.append(tensor)
        if tensor.is_meta:
            return tensor
        holder = self._by_storage[key].holder
        return holder.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _read_number(self, tensor: Tensor) -> float | int | bool:
        """Return the label of a tensor's one element, or its value if it is a constant."""
        operand = self._known_operand(tensor)
        try:
            found = self.elements_of(operand)
        except ComputedError as error:
            raise LoaderComputesError(
                f"the loader reads a number with .item() and {error.reason} for it; let the "
                "loader fill the parameters first, and do other work in the receiver's `finish`"
            ) from error
        position = found.positions.reshape(1)
        if int(position) < 0:
            return found.constants.item()
        dtype = torch.float64 if operand.dtype.is_floating_point else torch.int64
        label = self.numberings[self._side].label(position, dtype).item()
        self.scalars[label] = int(position)
        return label


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as a flat tensor of its dtype."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def _tensors_in(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _written_tensors(
    func: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors among an operator's arguments that it writes to."""
    positions, keywords = written_arguments(func)
    found = [args[position] for position in positions if position < len(args)]
    found += [kwargs[keyword] for keyword in keywords if keyword in kwargs]
    return _tensors_in(found)


def _without_devices(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an operator for a run on the CPU."""
    plain = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if plain.get("device") is not None:
        plain["device"] = torch.device("cpu")
    return plain
