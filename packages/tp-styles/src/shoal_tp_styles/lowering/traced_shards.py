"""`TracedShards`: the local shards of a module's parameters as compiled code reads them.

Compiled code takes the tensors that it finds in a dict as inputs of its graph.  So the shards are in a dict: plain
tensors on the memory of the parameters, whose gradients an autograd node outside of the graph delivers to all
parameters of the module at once.  No DTensor is an input of the graph, none is wrapped, and none is guarded.

Whether the parameters are still the same is asked once for a call and module: the dict is an attribute of a tensor
without elements, whose metadata Dynamo compares before every call, and whose metadata are those of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Spec, local_shard

from .._torch import disabled_torch_function, make_wrapper

__all__ = ["TracedShards"]

Deliver = Callable[[Sequence[DTensor]], Sequence[Tensor]]  # local shards whose gradients go to the parameters
Known = tuple[str, Tensor | None, Tensor | None, int, bool]  # of a parameter: name, itself, shard, address, trained


class _Shards:
    """The shards of a module's parameters, made again when their metadata are asked for and parameters have changed.

    Attributes:
        local: shard of every parameter by name.
        specs: their specs; None for plain parameters.
    """

    __slots__ = ("__weakref__", "_deliver", "_known", "_metadata", "_params", "local", "specs")

    def __init__(self, params: Mapping[str, Tensor | None], deliver: Deliver) -> None:
        self._params, self._deliver = params, deliver
        self._known: Sequence[Known] | None = None
        self._metadata = ""
        self.local: dict[str, Tensor | None] = {}
        self.specs: dict[str, Spec | None] = {}

    def metadata(self) -> str:
        """What compiled code relies on, of shards that are up to date."""
        params, known = self._params, self._known
        if known is None or len(params) != len(known):
            return self._renewed()
        for name, param, shard, address, trained in known:
            if params.get(name) is not param:
                return self._renewed()
            if shard is not None and (
                local_shard(param) is not shard  # type: ignore[arg-type]  # it has a shard, so it is a DTensor
                or shard.data_ptr() != address
                or param.requires_grad is not trained  # type: ignore[union-attr]  # likewise
            ):
                return self._renewed()
        return self._metadata

    def _renewed(self) -> str:
        """Make all shards, and keep them unless a parameter lives for one forward only, such as a gathered one."""
        params = dict(self._params)
        trained = {name: p for name, p in params.items() if isinstance(p, DTensor) and p.requires_grad}
        with torch.inference_mode(False), torch.enable_grad():
            made = dict(zip(trained, self._deliver([*trained.values()]), strict=True))
        known: list[Known] = []
        self.local.clear()
        self.specs.clear()
        for name, param in params.items():
            shard = local_shard(param) if isinstance(param, DTensor) else None
            known.append((name, param, shard, 0 if shard is None else shard.data_ptr(), name in trained))
            self.local[name] = made.get(name, param if shard is None else shard)
            self.specs[name] = param.spec if isinstance(param, DTensor) else None
        self._known = known if all(isinstance(param, nn.Parameter) for param in trained.values()) else None
        self._metadata = repr({name: _metadata_of(shard) for name, shard in self.local.items()})
        return self._metadata


def _metadata_of(shard: Tensor | None) -> tuple[Any, ...] | None:
    return None if shard is None else (*shard.shape, shard.stride(), shard.dtype, shard.device, shard.requires_grad)


class _Metadata:
    """The metadata of shards, which are up to date when this is compared; tracers that keep it keep no parameters."""

    __slots__ = ("_shards",)

    def __init__(self, shards: _Shards) -> None:
        self._shards = ref(shards)

    def now(self) -> str:
        """Those of the shards as they are now."""
        shards = self._shards()
        return "" if shards is None else shards.metadata()

    def __eq__(self, other: object) -> bool:
        return self.now() == other

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # what it equals changes

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.now()


class TracedShards(Tensor):
    """A tensor without elements, with the shards of a module's parameters as attributes; no operator ever gets it.

    It has the protocol of wrappers, whose class Dynamo leaves alone.

    Attributes:
        local: shard of every parameter by name.
        specs: their specs; None for plain parameters.
    """

    __torch_function__: Any = disabled_torch_function
    held: Tensor
    local: dict[str, Tensor | None]
    specs: dict[str, Spec | None]
    _shards: _Shards
    _flat: tuple[list[str], _Metadata]

    @staticmethod
    def of(params: Mapping[str, Tensor | None], deliver: Deliver) -> TracedShards:
        """The shards of a module's own dict of parameters, made by `deliver`."""
        shards = _Shards(params, deliver)
        result = _around(torch.empty(0, device="cpu"), _Metadata(shards))
        result._shards, result.local, result.specs = shards, shards.local, shards.specs
        return result

    def __tensor_flatten__(self) -> tuple[list[str], _Metadata]:
        return self._flat

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], metadata: _Metadata, size: Any, stride: Any) -> TracedShards:
        metadata.now()  # a tracer begins to read: what it finds from here on is up to date
        return _around(inner["held"], metadata)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch calls it
        raise NotImplementedError(f"{func}: shards are read as attributes")


def _around(held: Tensor, metadata: _Metadata) -> TracedShards:
    result: TracedShards = make_wrapper(TracedShards, (0,))
    result.held, result._flat = held, (["held"], metadata)
    return result
