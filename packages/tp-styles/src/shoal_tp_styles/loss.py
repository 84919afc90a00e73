"""`loss_parallel`: losses on DTensor logits whose classes are cut, without gathering them.

Inside the block `torch.nn.functional.cross_entropy`, `nll_loss` and what calls them (`nn.CrossEntropyLoss`)
go to `losses.py` when the classes of the logits are cut over a mesh axis.  It is a mode of the thread that
enters it: blocks nest, nothing global changes, and the backward may run outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoal_dtensor import DTensor, Replicate

from . import losses
from .batch import Batch

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute losses on logits cut along the classes where they lie; other axes may cut the rows.

    Label smoothing, class weights, `ignore_index`, probability targets and every reduction are those of
    `torch.nn.functional`; the loss is a replicated DTensor, or lies as the rows do where nothing is reduced.  DTensor
    logits give the same numbers outside of the block; inside it is certain that no rank gathers them.
    """
    with _Mode():
        yield


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        replacement = _REPLACED.get(func)
        if replacement is not None:
            logits = args[0] if args else kwargs.get("input")
            if isinstance(logits, DTensor) and _classes_cut(logits):
                return replacement(*args, **kwargs)
        return func(*args, **kwargs)


def _classes_cut(logits: DTensor) -> bool:
    return bool(logits._spec.cuts[_class_dim(logits)].axes)


def _class_dim(logits: DTensor) -> int:
    return 0 if logits.ndim == 1 else 1


def _as_dtensor(loss: Tensor, like: Tensor, reduction: str) -> DTensor:
    """The loss: of every row as the rows lie, or reduced and whole."""
    assert isinstance(like, DTensor), "only DTensor logits come here"
    mesh, batch = like.device_mesh, Batch.of(like, _class_dim(like))
    if reduction == "none" and batch.shape is not None:
        return DTensor.from_local(
            loss, mesh, batch.placements, run_check=False, shape=batch.shape, shard_order=batch.order
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
    loss = losses.cross_entropy(
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
    loss = losses.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
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
