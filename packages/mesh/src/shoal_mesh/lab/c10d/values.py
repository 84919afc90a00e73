"""Values of collectives: copies and reductions, in the order of the members.

A reduction adds the terms one by one in the order of the group, in the dtype of the tensors, so the
result depends neither on the order in which ranks arrive nor on the number of threads. A mean of a
half type is computed in float64, because the sum may leave the range where the mean does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch import ReduceOp, on_plain_kernels
from ...errors import CollectiveError
from ..scheduling.posted_calls import REDUCING, PostedCall, sources_of

# the tensors of each member, by their numbers
Inputs = Mapping[int, Sequence[Tensor] | Mapping[int, Tensor]]
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OPS: dict[str, Any] = {
    name: getattr(ReduceOp, name.upper()) for name in _COMBINE if name != "premul_sum"
}
_HALF = (torch.float16, torch.bfloat16)


def name_of_op(op: ReduceOp) -> tuple[str, float | Tensor | None]:
    """Return the name of a reduction of c10d, and the factor of a `premul_sum`.

    Raises:
        CollectiveError: torch has a reduction that the lab does not compute.
    """
    for name, known in _OPS.items():
        if op == known:
            return name, None
    premul_sum: Any = ReduceOp.PREMUL_SUM
    if op == premul_sum:
        # the only public way to the factor is through pickle
        state: Any = op.__getstate__()
        return "premul_sum", state[1]
    raise CollectiveError(f"the lab computes {', '.join(_COMBINE)}, got the reduction {op}")


def reduce_tensors(op: str, tensors: Sequence[Tensor], factor: float | Tensor | None) -> Tensor:
    """Return the reduction of tensors with equal numbers of elements, flat.

    Args:
        op: the name of the reduction.
        tensors: the terms.
        factor: the factor of a `premul_sum`.
    """
    terms = [tensor.reshape(-1) for tensor in tensors]
    dtype = terms[0].dtype
    if factor is not None:
        terms = [term * factor for term in terms]
    is_wide = op == "avg" and dtype in _HALF
    total = terms[0].to(torch.float64) if is_wide else terms[0].clone()
    combine = _COMBINE[op]
    for term in terms[1:]:
        # complex numbers and bools have kernels for sums and products in place
        combine(total, term, out=total)
    if op != "avg":
        return total.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.div(total, len(terms), rounding_mode="trunc").to(dtype)
    return (total / len(terms)).to(dtype)


def totals_of(call: PostedCall, inputs: Inputs) -> list[Tensor]:
    """Return the reduction of each input over all members, for an `all_reduce`."""
    totals = []
    for number in range(len(call.inputs)):
        terms = [inputs[member][number] for member in sorted(inputs)]
        totals.append(on_plain_kernels(reduce_tensors, call.op, terms, call.factor))
    return totals


def deliver(
    call: PostedCall, outputs: Sequence[Tensor], inputs: Inputs, totals: Sequence[Tensor] = ()
) -> None:
    """Write the outputs of one member's call.

    Args:
        call: the call.
        outputs: its output tensors.
        inputs: the inputs of the members that its outputs depend on, by member.
        totals: for an `all_reduce`, the reductions of `totals_of`.
    """
    with torch.no_grad():
        on_plain_kernels(_write, call, outputs, inputs, totals)


def _write(
    call: PostedCall, outputs: Sequence[Tensor], inputs: Inputs, totals: Sequence[Tensor]
) -> None:
    """Write all outputs."""
    for number, output in enumerate(outputs):
        if totals:
            output.copy_(totals[number].view(output.shape))
            continue
        sources = sources_of(call, number)
        terms = [inputs[source.member][source.position] for source in sources]
        if call.kind in REDUCING:
            total = reduce_tensors(call.op, terms, call.factor)
            output.copy_(total.view(output.shape))
            continue
        (term,) = terms
        is_itself = term.data_ptr() == output.data_ptr() and term.stride() == output.stride()
        if not is_itself:
            output.copy_(term.reshape(output.shape))


def copy_message(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Write the tensors of a receive.

    Args:
        inputs: the tensors that were sent.
        outputs: the tensors to write.
    """
    for sent, received in zip(inputs, outputs, strict=True):
        received.copy_(sent.reshape(received.shape))
