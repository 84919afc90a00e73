"""`activation_bytes`: what a rank keeps of a forward for its backward, from one forward on the meta device.

Simulated ranks run the parallel model on tensors without values.  Every storage that is made is watched, and those that
live when the forward is over count: what autograd, custom functions and checkpoints keep, and the outputs.  Attention
without dropout is that of torch's fused kernels, which the meta device has not: they keep no weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_context_parallel.internal import flash_attention
from shoal_dtensor import DTensor
from shoal_dtensor.internal import ReplacedAttention, TorchDispatchMode, pytree
from shoal_mesh import DeviceMesh, all_reduce
from shoal_tp_styles.internal import Plan, StorageReference, apply_plan, to_meta


class _Storages(TorchDispatchMode):
    """Watches the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.made: dict[int, tuple[StorageReference, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in map(_storage, _tensors(out)):
            self.made[storage._cdata] = StorageReference(storage), storage.nbytes()  # type: ignore[no-untyped-call]  # torch
        return out

    def alive(self, known: set[int]) -> int:
        """Bytes of those that live, but for the known ones."""
        made: Any = self.made.items()
        return sum(nbytes for key, (storage, nbytes) in made if key not in known and not storage.expired())


def _attention(  # noqa: PLR0913  # torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention, which keeps on the meta device what a fused kernel keeps."""
    fits = query.ndim == key.ndim == value.ndim == 4 and query.shape[-1] == value.shape[-1]
    if dropout_p or not fits or any(isinstance(each, DTensor) for each in (query, key, value)):
        out: Tensor = functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    mask = attn_mask if attn_mask is None or attn_mask.is_floating_point() else attn_mask.to(query.dtype)
    return flash_attention(query, key, value, is_causal, mask, scale)[0]


def activation_bytes(model: nn.Module, plan: Plan, mesh: DeviceMesh, args: Any, kwargs: Any) -> int:
    """Bytes that the rank which keeps most holds of activations when a forward is over.

    Args:
        model: not parallel; in the mode, and with the checkpoints, in which it will train.
        plan: as for `parallelize_module`.
        mesh: with one axis, also an `abstract_mesh`.
        args: example inputs, of global shape.
        kwargs: likewise.

    Raises:
        Exception: what the model raises where it reads values, which tensors on the meta device have not.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_tp_styles.testing import StackedMLP
        >>> activation_bytes(StackedMLP(), {}, abstract_mesh((1,)), (torch.randn(8, 10),), {})
        1664
    """
    from shoal_dtensor.testing import simulate_ranks  # here: it takes longer to import than the whole layer

    def one_rank(view: DeviceMesh) -> int:
        module = _on_meta(model)
        apply_plan(plan, module, view)
        tensors = [*module.parameters(), *module.buffers()]
        known = {_storage(tensor)._cdata for tensor in tensors}
        storages = _Storages()
        inputs, named = to_meta(args), to_meta(kwargs)
        with torch.enable_grad(), storages, ReplacedAttention(_attention):
            out = module(*inputs, **named)
        all_reduce(torch.zeros(1), view.comm(0))  # ranks that have not come as far refer to what this one has sent
        nbytes = storages.alive(known)
        del out  # not before: it holds the graph
        return nbytes

    with torch.random.fork_rng(devices=()):
        return max(simulate_ranks(mesh, one_rank))


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no values; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> Any:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
