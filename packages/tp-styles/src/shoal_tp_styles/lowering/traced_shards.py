"""`TracedShards`: the local shards of a module's parameters as compiled code reads them.

Dynamo reads attributes of tensors again before every call, and takes tensors that it finds there as inputs of its
graph.  So the shards are attributes of a tensor without elements: plain tensors on the memory of the parameters, whose
gradients an autograd node outside of the graph delivers to all parameters of the module at once.  No DTensor is an
input of the graph, none is wrapped, and none is guarded.  Every read checks that the parameters are still the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Spec, local_shard

from .._torch import disabled_torch_function, make_wrapper

__all__ = ["TracedShards"]

Deliver = Callable[[Sequence[DTensor]], Sequence[Tensor]]  # local shards whose gradients go to the parameters


class TracedShards(Tensor):
    """A tensor without elements, with attributes `local_NAME` and `spec_NAME` for every parameter of a module.

    It has the protocol of wrappers, whose class Dynamo leaves alone; no operator ever gets it.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]  # torch's stub has one argument more
    parameter_names: tuple[str, ...]
    held: Tensor
    _params: Mapping[str, Tensor | None]
    _deliver: Deliver
    _kept: dict[str, tuple[DTensor, Tensor, int, Tensor]]

    @staticmethod
    def of(params: Mapping[str, Tensor | None], deliver: Deliver) -> TracedShards:
        """The shards of a module's own dict of parameters, made by `deliver`."""
        shards = TracedShards.__tensor_unflatten__({"held": torch.empty(0, device="cpu")}, tuple(params), (0,), (1,))
        shards._params, shards._deliver, shards._kept = params, deliver, {}
        return shards

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, ...]]:
        return ["held"], self.parameter_names

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], names: tuple[str, ...], size: Any, stride: Any
    ) -> TracedShards:
        shards: TracedShards = make_wrapper(_with_attributes(names), (0,))
        shards.held, shards.parameter_names = inner["held"], names
        return shards

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch calls it
        raise NotImplementedError(f"{func}: shards are read as attributes")

    def renewed(self) -> dict[str, Tensor]:
        """The shards of all DTensors that require grad; those of parameters are kept until they change."""
        self._kept.clear()
        trained = {name: p for name, p in self._params.items() if isinstance(p, DTensor) and p.requires_grad}
        with torch.inference_mode(False), torch.enable_grad():
            shards = dict(zip(trained, self._deliver([*trained.values()]), strict=True))
        for name, param in trained.items():
            if isinstance(param, nn.Parameter):  # not what lives for one forward, such as a gathered parameter
                self._kept[name] = param, local_shard(param), shards[name].data_ptr(), shards[name]
        return shards


@lru_cache(maxsize=256)
def _with_attributes(names: tuple[str, ...]) -> type[TracedShards]:
    members: dict[str, Any] = {f"local_{name}": property(partial(_local, name=name)) for name in names}
    members |= {f"spec_{name}": property(partial(_spec, name=name)) for name in names}
    return type("TracedShards", (TracedShards,), members)


def _local(shards: TracedShards, name: str) -> Tensor | None:
    """The shard of a parameter, made again if the parameter is another one or has other memory."""
    param = shards._params[name]
    kept = shards._kept.get(name)
    if kept is not None:
        known, local, address, shard = kept
        if param is known and local_shard(known) is local and local.data_ptr() == address and known.requires_grad:
            return shard
    if isinstance(param, DTensor):
        return shards.renewed()[name] if param.requires_grad else local_shard(param)
    return param


def _spec(shards: TracedShards, name: str) -> Spec | None:
    param = shards._params[name]
    return param.spec if isinstance(param, DTensor) else None
