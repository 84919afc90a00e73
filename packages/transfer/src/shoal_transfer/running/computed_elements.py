"""Elements that a rank of the target computes from elements that arrived.

A function of the user computes each element that a loader would write from one element that was
moved. `Computations` runs these functions on elements that have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..errors import TransferError
from ..manifest.records import Holding, TensorRecord
from ..planning.transfer_plan import TransferPlan
from .memories import Place

Function = Callable[[Tensor], Tensor]
Tensors = Mapping[str, Tensor]


def _place_of(record: TensorRecord, holding: Holding) -> Place:
    """Return the place of a box of a target tensor in the memory of its rank."""
    sizes = tuple(stop - start for start, stop in holding.box)
    return Place(record.parts[holding.part], sizes, holding.strides, holding.offset)


class Computations:
    """The functions of the target's computed tensors, on one rank.

    Args:
        plan: the plan; its mapping names the computed tensors.
        rank: this process's rank in the target; None if it holds nothing of the target.
        functions: the functions by their names in the mapping.
    """

    def __init__(
        self, plan: TransferPlan, rank: int | None, functions: Mapping[str, Function]
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._functions = functions
        target = plan.target
        computed = plan.mapping.computed
        self._names = {target.names[name]: function for name, function in computed.items()}

    def __bool__(self) -> bool:
        return bool(self._names)

    def describe_missing(self) -> str | None:
        """Return an error text for a function that this rank did not get; None if it has all."""
        if self._rank is None:
            return None
        for name, function in self._names.items():
            if function not in self._functions:
                return (
                    f"{name!r} is computed by {function!r}; pass compute={{{function!r}: ...}} "
                    "with the function"
                )
        return None

    def elements_for(self, record: TensorRecord, view: Tensor) -> Tensor:
        """Return the target's elements for elements that have arrived: the same, or computed."""
        if record.name not in self._names:
            return view
        name = self._names[record.name]
        result = self._functions[name](view)
        if result.shape != view.shape:
            raise TransferError(
                f"{name!r} makes {tuple(result.shape)} of {tuple(view.shape)} for {record.name!r}"
            )
        return result.to(view.dtype)

    @torch.no_grad()
    def apply(self, arrived: Tensors, live: Tensors) -> None:
        """Write computed elements to the live tensors.

        Args:
            arrived: the tensors with the elements that arrived; the live ones, if they have no
                second copy.
            live: the tensors that the target uses.
        """
        for record, place in self.places():
            if record.name in self._names:
                place.view(live).copy_(self.elements_for(record, place.view(arrived)))

    def places(self) -> Iterator[tuple[TensorRecord, Place]]:
        """Yield the boxes of all target tensors on this rank: the tensor, and where its box is."""
        for record in self._plan.target.tensors.values():
            for holding in record.holdings:
                if holding.rank == self._rank:
                    yield record, _place_of(record, holding)
