"""`TracedShards`: the local shards of the parameters of a block's modules, as compiled code reads them.

Compiled code takes the tensors that it finds in a dict as inputs of its graph.  So the shards are in dicts: plain
tensors on the memory of the parameters, whose gradients one autograd node outside of the graph delivers to all
parameters of the block at once.  No DTensor is an input of the graph, none is wrapped, and none is guarded.

Whether the parameters are still the same is asked once for a call and block: the dicts are attributes of a tensor
without elements, whose metadata Dynamo compares before every call.  To compare them renews shards whose parameters have
changed; what graphs rely on, sizes and dtypes of the shards, Dynamo guards as that of any other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Spec
from shoal_dtensor.internal import disabled_torch_function, local_shard, make_wrapper

Deliver = Callable[[Sequence[DTensor]], Sequence[Tensor]]  # local shards whose gradients go to the parameters


class _Known:
    """Of which parameters shards were made, and from what; all is compared before every call.

    Attributes:
        dicts: of each module a reference, its dict of parameters, and how many there are.
        distributed: of each DTensor in them its dict, name, itself, its shard, the address of that, and whether it is
            trained.
        others: of each other entry its dict, name and value.
    """

    __slots__ = ("dicts", "distributed", "others")

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self.dicts: list[tuple[ReferenceType[nn.Module], dict[str, Any], int]] = [
            (ref(module), module._parameters, len(module._parameters)) for module in modules
        ]
        self.distributed: list[tuple[dict[str, Any], str, DTensor, Tensor, int, bool]] = []
        self.others: list[tuple[dict[str, Any], str, object]] = []
        for _, params, _ in self.dicts:
            for name, value in params.items():
                if isinstance(value, DTensor):
                    shard = local_shard(value)
                    self.distributed.append((params, name, value, shard, shard.data_ptr(), value.requires_grad))
                else:
                    self.others.append((params, name, value))

    def holds(self) -> bool:
        """Whether nothing has changed."""
        for module, params, count in self.dicts:
            if getattr(module(), "_parameters", None) is not params or len(params) != count:
                return False
        try:
            for params, name, param, shard, address, trained in self.distributed:
                if (
                    params[name] is not param
                    or param._local_tensor is not shard  # the slot: `local_shard` would cost as much as all the rest
                    or shard.data_ptr() != address
                    or param.requires_grad is not trained
                ):
                    return False
            for params, name, value in self.others:
                if params[name] is not value:
                    return False
        except KeyError:
            return False
        return True


class _Shards:
    """The shards of the parameters of some modules, made again when they are asked for and parameters have changed.

    Attributes:
        local: by the module's name in the block, shard of every parameter by name.
        specs: likewise their specs; None for plain parameters.
    """

    __slots__ = ("__weakref__", "_deliver", "_known", "_modules", "local", "specs")

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._modules: dict[str, ReferenceType[nn.Module]] = {}
        self._known: _Known | None = None
        self.local: dict[str, dict[str, Tensor | None]] = {}
        self.specs: dict[str, dict[str, Spec | None]] = {}

    def include(self, name: str, module: ReferenceType[nn.Module]) -> None:
        """Hold the shards of one more module."""
        self._modules[name], self._known = module, None

    def renew(self) -> None:
        """Bring the shards up to date."""
        if self._known is None or not self._known.holds():
            self._make()

    def _make(self) -> None:
        """Make all shards, and keep them unless a parameter lives for one forward only, such as a gathered one."""
        alive = {name: module for name, reference in self._modules.items() if (module := reference()) is not None}
        self._modules = {name: self._modules[name] for name in alive}
        params: dict[str, dict[str, Any]] = {name: {**module._parameters} for name, module in alive.items()}
        every = [param for of_module in params.values() for param in of_module.values()]
        trained = [param for param in dict.fromkeys(every) if isinstance(param, DTensor) and param.requires_grad]
        with torch.inference_mode(False), torch.enable_grad():
            made = dict(zip(map(id, trained), self._deliver(trained), strict=True))
        self.local.clear()
        self.specs.clear()
        for name, of_module in params.items():
            self.specs[name] = {each: p.spec if isinstance(p, DTensor) else None for each, p in of_module.items()}
            shards = {each: local_shard(p) if isinstance(p, DTensor) else p for each, p in of_module.items()}
            self.local[name] = {each: made.get(id(param), shards[each]) for each, param in of_module.items()}
        lasting = all(isinstance(param, nn.Parameter) for param in trained)
        self._known = _Known(alive.values()) if lasting else None


class _Metadata:
    """Equal to whatever it is compared with, once the shards are up to date; tracers that keep it keep no shards."""

    __slots__ = ("_shards",)

    def __init__(self, shards: _Shards) -> None:
        self._shards = ref(shards)

    def renew(self) -> None:
        """Bring the shards up to date."""
        shards = self._shards()
        if shards is not None:
            shards.renew()

    def __eq__(self, other: object) -> bool:
        self.renew()
        return True

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # it equals everything

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return ""


class TracedShards(Tensor):
    """A tensor without elements, with the shards of a block's parameters as attributes; no operator ever gets it.

    It has the protocol of wrappers, whose class Dynamo leaves alone.

    Attributes:
        local: by the module's name in the block, shard of every parameter by name.
        specs: likewise their specs; None for plain parameters.
    """

    __torch_function__: Any = disabled_torch_function
    held: Tensor  # without it Dynamo does not see a tensor of its own making
    local: dict[str, dict[str, Tensor | None]]
    specs: dict[str, dict[str, Spec | None]]
    _shards: _Shards
    _flat: tuple[list[str], _Metadata]

    @staticmethod
    def of(deliver: Deliver) -> TracedShards:
        """Of no module yet; made by `deliver`."""
        shards = _Shards(deliver)
        result = _around(torch.empty(0, device="cpu"), _Metadata(shards))
        result._shards, result.local, result.specs = shards, shards.local, shards.specs
        return result

    def include(self, name: str, module: ReferenceType[nn.Module]) -> None:
        """Hold the shards of one more module's own parameters, by this name."""
        self._shards.include(name, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedShards:
        """Of no module yet: the copies of the modules are added as they are made."""
        memo[id(self)] = clone = TracedShards.of(self._shards._deliver)
        return clone

    def __tensor_flatten__(self) -> tuple[list[str], _Metadata]:
        return self._flat

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], metadata: _Metadata, size: Any, stride: Any) -> TracedShards:
        metadata.renew()  # a tracer begins to read: what it finds from here on is up to date
        return _around(inner["held"], metadata)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch calls it
        raise NotImplementedError(f"{func}: shards are read as attributes")


def _around(held: Tensor, metadata: _Metadata) -> TracedShards:
    result: TracedShards = make_wrapper(TracedShards, (0,))
    result.held, result._flat = held, (["held"], metadata)
    return result
