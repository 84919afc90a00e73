"""`loss_parallel`: losses on DTensor logits whose classes are sharded, without gathering them.

Inside the block `torch.nn.functional.cross_entropy`, `nll_loss` and what calls them (`nn.CrossEntropyLoss`)
are computed by `functional.py` when the classes of the logits are sharded over a mesh axis.  It is a mode of the
thread that enters it: blocks nest, nothing global changes, and the backward may run outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate
from shoal_dtensor.internal import FunctionMode

from .functional import cross_entropy, nll_loss
from .rows import LogitRows


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute losses on logits sharded along the classes without gathering them; other axes may shard the rows.

    Label smoothing, class weights, `ignore_index`, probability targets and every reduction are those of
    `torch.nn.functional`; the loss is a replicated DTensor, or sharded like the rows where nothing is reduced.  DTensor
    logits give the same numbers outside of the block; inside no rank gathers them.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     logits = distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (1,)), [Shard(1)])
        ...     with loss_parallel():
        ...         print(functional.cross_entropy(logits, torch.tensor([0, 3])).to_local())
        tensor(1.3863)
    """
    with _Mode():
        yield


class _Mode(FunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        replacement = _REPLACED.get(func)
        if replacement is not None:
            logits = args[0] if args else kwargs.get("input")
            if isinstance(logits, DTensor) and _shards_classes(logits):
                return replacement(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _shards_classes(logits: DTensor) -> bool:
    return any(placement.is_shard(_class_dim(logits)) for placement in logits.placements)


def _class_dim(logits: DTensor) -> int:
    return 0 if logits.ndim == 1 else 1


def _as_dtensor(loss: Tensor, like: Tensor, reduction: str) -> DTensor:
    """The loss as DTensor: sharded like the rows, or reduced and replicated."""
    assert isinstance(like, DTensor), "only DTensor logits come here"
    mesh, rows = like.device_mesh, LogitRows.of(like, _class_dim(like))
    if reduction == "none" and rows.shape is not None:
        return DTensor.from_local(
            loss, mesh, rows.placements, run_check=False, shape=rows.shape, shard_order=rows.order
        )
    return DTensor.from_local(loss, mesh, (Replicate(),) * mesh.ndim, run_check=False)


def _cross_entropy(  # noqa: PLR0913  # torch's signature
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    reduction = _legacy(size_average, reduce, reduction)
    loss = cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return _as_dtensor(loss, input, reduction)


def _nll_loss(  # noqa: PLR0913  # torch's signature
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
) -> Tensor:
    reduction = _legacy(size_average, reduce, reduction)
    loss = nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    return _as_dtensor(loss, input, reduction)


def _legacy(size_average: bool | None, reduce: bool | None, reduction: Any) -> Any:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


_REPLACED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.cross_entropy: _cross_entropy,
    functional.nll_loss: _nll_loss,
}
