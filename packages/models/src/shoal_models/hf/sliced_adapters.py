"""Adapters of peft whose full values every rank has; in a forward, a rank uses its slice of them.

    adapter           the whole value                         the slice
    IA3               scales of all features                  scales of this rank's features
    prefix tuning     keys and values of all heads            those of this rank's heads

The gradient of a slice is gathered, so that all ranks have the gradient of the whole value. The
optimizer and the files of such an adapter are therefore the same as without parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import with_methods
from shoal_mesh import Comm, DeviceMesh
from shoal_tp_styles import ModuleSharding
from shoal_tp_styles.internal import ColumnLinear, RowLinear, shardings_of, split


class Slices(NamedTuple):
    """The sizes of the slices of all ranks along an axis.

    Attributes:
        mesh: the mesh of the style.
        sizes: the number of features, or of heads, of each rank.
    """

    mesh: DeviceMesh
    sizes: tuple[int, ...]

    @property
    def comm(self) -> Comm:
        """The communicator of the ranks."""
        return self.mesh.comm(0)


class SlicedScales:
    """Base class that `slice_scales` adds to an IA3 layer of peft; it replaces the forward.

    The layer is around a parallel Linear, and scales the features that the Linear shards.
    """

    _shoal_slices: Slices

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with this rank's scales in place of all scales."""
        slices = self._shoal_slices
        scales: Any = self.ia3_l  # type: ignore[attr-defined]  # of peft's layer
        own_scales: dict[str, Tensor] = {}
        for name, scale in scales.items():
            own_scales[name] = split(scale.flatten(), slices.comm, 0, slices.sizes)
        # The entry hides the parameters `ia3_l`: Python looks into the dict of the instance first,
        # and calls `nn.Module.__getattr__`, which finds parameters, only if the name is not there.
        vars(self)["ia3_l"] = own_scales
        try:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]  # of peft's layer
        finally:
            del vars(self)["ia3_l"]


class SlicedPrefix:
    """Base class that `slice_prefix` adds to a peft model with prefix tuning.

    The key and value heads of the model are sharded.
    """

    _shoal_slices: Slices

    def get_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Return a cache with the prefix of this rank's heads."""
        slices = self._shoal_slices
        cache = super().get_prompt(*args, **kwargs)  # type: ignore[misc]  # of peft's model
        for layer in cache.layers:
            # (batch, heads, tokens, features of a head)
            layer.keys = split(layer.keys, slices.comm, 1, slices.sizes)
            layer.values = split(layer.values, slices.comm, 1, slices.sizes)
        return cache


def is_scaled(layer: Any) -> bool:
    """Return whether a layer of peft is IA3."""
    return isinstance(getattr(layer, "ia3_l", None), nn.ParameterDict)


def can_be_scaled(layer: Any, record: ModuleSharding) -> bool:
    """Return whether an IA3 layer can be around a Linear with a style.

    It can in two cases:

    1. The features that it scales are sharded. The scales are then sliced.
    2. The tensor that it scales is replicated. The scales and their gradients are then correct as
       they are.

    It cannot if the tokens of the tensor are sharded: the gradient of the scales on one rank would
    lack the tokens of the other ranks.
    """
    is_linear = record.lowering in (ColumnLinear, RowLinear)
    # Options divide the features in another way, such as by the blocks of a fused weight.
    if not is_linear or record.options is not None:
        return False
    if _scales_shards(layer, record):
        return True
    # A feed-forward layer scales the input of the Linear, before the style shards it. Other layers
    # scale the output, after the style has reduced or gathered it.
    if layer.is_feedforward:
        scaled = record.input_port().layout
    else:
        scaled = record.output_port().desired
    return scaled.is_replicate()


def _scales_shards(layer: Any, record: ModuleSharding) -> bool:
    """Return whether the features that an IA3 layer scales are sharded.

    IA3 scales the inputs of a feed-forward Linear, and the outputs of other Linears.
    """
    if layer.is_feedforward:
        return record.lowering is RowLinear
    return record.lowering is ColumnLinear


def slice_scales(layer: Any, record: ModuleSharding, mesh: DeviceMesh) -> None:
    """Have an IA3 layer scale this rank's features, if its features are sharded.

    The layer gets a class with the forward of `SlicedScales`, which reads `_shoal_slices`.
    """
    if not _scales_shards(layer, record) or isinstance(layer, SlicedScales):
        return
    dim = 1 if layer.is_feedforward else 0
    sizes = layer.get_base_layer().weight.spec.sizes(dim)
    layer._shoal_slices = Slices(mesh, sizes)
    cls: Any = type(layer)
    layer.__class__ = with_methods(SlicedScales, cls)


def slice_prefix(model: Any) -> None:
    """Have a peft model with prefix tuning use the keys and values of this rank's heads.

    Raises:
        UnsupportedModuleError: if the sharding of the heads cannot be seen in projections `k_proj`.
    """
    config: Any = getattr(model, "active_peft_config", None)
    has_prefix = getattr(config, "peft_type", None) == "PREFIX_TUNING"
    if not has_prefix or isinstance(model, SlicedPrefix):
        return
    is_parallel = any(True for module in model.modules() for _ in shardings_of(module))
    if not is_parallel:
        return
    # In peft's config, `token_dim` and `num_attention_heads` count the key heads, also if the model
    # has more query heads.
    head_dim = config.token_dim // config.num_attention_heads
    found = {*_slices_of_heads(model, head_dim)}
    slices = found.pop() if len(found) == 1 else None
    if slices is None or sum(slices.sizes) != config.num_attention_heads:
        raise UnsupportedModuleError(
            "parallelize_adapters: prefix tuning needs key heads that are sharded by "
            "ColwiseParallel projections named k_proj, in one layout for all layers and with whole "
            "heads on each rank. Use prompt tuning, P-tuning or LoRA, or leave the attention out "
            "of the plan"
        )
    model._shoal_slices = slices
    cls: Any = type(model)
    model.__class__ = with_methods(SlicedPrefix, cls)


def _slices_of_heads(model: nn.Module, head_dim: int) -> Iterator[Slices]:
    """Yield the numbers of key heads of all ranks, for each projection named `k_proj`.

    Example: 64 rows on one rank and 32 on another, with heads of `head_dim=32` rows -> sizes
    (2, 1). The sizes are empty for a projection that is not sharded by whole heads.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "k_proj":
            continue
        for record, mesh in shardings_of(module):
            weight = module.weight
            heads: tuple[int, ...] = ()
            if record.lowering is ColumnLinear and isinstance(weight, DTensor):
                rows = weight.spec.sizes(0)
                has_whole_heads = not any(count % head_dim for count in rows)
                if has_whole_heads:
                    heads = tuple([count // head_dim for count in rows])
            yield Slices(mesh, heads)
