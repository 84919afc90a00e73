"""`loss_parallel`: losses on DTensor logits whose classes are sharded, without gathering them.

Inside a `with loss_parallel():` block, calls of `torch.nn.functional.cross_entropy` and `nll_loss`
go to the functions in `functional.py` of this package, also if the calls are inside of modules. The
block is a mode for torch functions: it acts on the thread that enters it, and blocks may be nested.
A backward does not need the block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate
from shoal_dtensor.internal import FunctionMode, types_unchecked

from .functional import cross_entropy, nll_loss
from .logits import LogitRows


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute losses on logits that are sharded along the classes without gathering them.

    Other axes may shard the rows.

    Label smoothing, class weights, `ignore_index`, probability targets and every reduction behave
    as in `torch.nn.functional`. The loss is a replicated DTensor, or with `reduction="none"` a
    DTensor that is sharded like the rows. Outside the block the loss has the same value, but every
    rank gathers the logits.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)])
        ...     with loss_parallel():
        ...         print(functional.cross_entropy(logits, torch.tensor([0, 3])).to_local())
        tensor(1.3863)
    """
    with _Mode():
        yield


class _Mode(FunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _REPLACED:
            arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **options}
            logits = arguments.get("input")
            if isinstance(logits, DTensor):
                class_dim = 0 if logits.ndim == 1 else 1
                if any(placement.is_shard(class_dim) for placement in logits.placements):
                    # The functions on local tensors are shoal's own code, which the type checker of
                    # plain SPMD code need not check.
                    with types_unchecked():
                        return _loss(_REPLACED[func], logits, class_dim, arguments)
        return super().__torch_function__(func, types, args, options)


def _loss(
    function: Callable[..., Tensor], logits: DTensor, class_dim: int, arguments: dict[str, Any]
) -> DTensor:
    """Return a loss of `functional` as a DTensor: sharded like the rows, or replicated."""
    averages = arguments.pop("size_average", None)
    reduces = arguments.pop("reduce", None)
    # torch's older arguments in place of `reduction`, with the rule of
    # `torch.nn._reduction.legacy_get_string`; None counts as True
    if averages is not None or reduces is not None:
        reduction = "mean"
        if reduces is False:
            reduction = "none"
        elif averages is False:
            reduction = "sum"
        arguments["reduction"] = reduction
    loss = function(arguments.pop("input"), arguments.pop("target"), **arguments)
    mesh = logits.device_mesh
    rows = LogitRows.of(logits, class_dim)
    # `rows.shape` is None if no axis shards the rows. Each rank then has the losses of all rows.
    if arguments.get("reduction") == "none" and rows.shape is not None:
        return DTensor.from_local(
            loss, mesh, rows.placements, shape=rows.shape, shard_order=rows.order
        )
    return DTensor.from_local(loss, mesh, (Replicate(),) * mesh.ndim)


_REPLACED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.cross_entropy: cross_entropy,
    functional.nll_loss: nll_loss,
}
# Both functions take the arguments in this order.
_ARGUMENTS = tuple(inspect.signature(functional.cross_entropy).parameters)
