"""`LoRA`: low-rank adapters on parallel Linear layers, a style that composes with the base layer's.

The adapter has the weights `A` (rank, inputs) and `B` (outputs, rank). R is `Replicate()`, S(dim)
is `Shard(dim)`, and dx is the gradient of the input.

columns  A: R, B: S(0)   the adapter reads what the base reads; one reduction of dx for both
rows     A: S(1), B: R   the adapter's partial sums are added to the base's before the one reduction
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal_dtensor import Replicate
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import check_types
from shoal_mesh import DeviceMesh

from ..apply.apply import shardings_of
from ..modules.composed_linear import AdapterLinear
from ..modules.sharded_linear import ColumnLinear, RowLinear
from ..sharding.module_sharding import Adapter, ModuleSharding
from .linear import ColwiseParallel, RowwiseParallel
from .style import DeclaredStyle


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class LoRA(DeclaredStyle):
    """Style that adds `alpha / rank * B A x` to `base`, with `A` random and `B` zero at first.

    Args:
        base: ColwiseParallel or RowwiseParallel. Its input and output layouts are also the layouts
            of the whole layer, whose output is the base's output plus the adapter's output.
        rank: inner size of the adapter.
        alpha: scale of the adapter, multiplied by `rank`: the adapter's output is scaled by
            `alpha / rank`.
        train_base: leave the base weight trainable.

    Example:
        >>> LoRA(base=ColwiseParallel(), rank=4).sharding(nn.Linear(8, 8)).parameters["lora_B"]
        Shard(dim=0)
    """

    base: ColwiseParallel | RowwiseParallel
    rank: int = 8
    alpha: float = 16.0
    train_base: bool = False

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if not isinstance(module, nn.Linear):
            raise UnsupportedModuleError(
                f"LoRA supports adapters for Linear only, got {type(module).__name__}"
            )
        base = self.base.sharding(module)
        # The lowering is the class that computes the forward: None for a module with a forward of
        # its own, another class for `ColwiseParallel.heads`. `overlapped()` sets options for it.
        if base.lowering not in (ColumnLinear, RowLinear) or base.options is not None:
            raise UnsupportedModuleError(
                f"LoRA: {type(module).__name__} under {self.base} is not supported; the base must "
                "be ColwiseParallel or RowwiseParallel (without heads() and overlapped()), and "
                "the module a Linear with torch's forward"
            )
        is_by_columns = base.lowering is ColumnLinear
        parameters = dict(base.parameters)
        # The adapter's sharded factor has the shards of the weight: heads, or multiples of
        # features.
        sharded = parameters["weight"]
        parameters["lora_A"] = Replicate() if is_by_columns else sharded
        parameters["lora_B"] = sharded if is_by_columns else Replicate()
        options = Adapter(self.rank, self.alpha / self.rank, self.train_base)
        return replace(
            base, style="LoRA", parameters=parameters, lowering=AdapterLinear, options=options
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear), "sharding() has checked the type"
        if not self.train_base:
            # before the module gets the parameters of the adapter
            module.requires_grad_(False)
        a = module.weight.new_empty(self.rank, module.in_features)
        b = module.weight.new_empty(module.out_features, self.rank)
        module.register_parameter("lora_A", nn.Parameter(a))
        module.register_parameter("lora_B", nn.Parameter(b))
        initialize_adapter(module)
        return super()._apply(module, device_mesh)


def initialize_adapter(module: nn.Module) -> None:
    """Initialize `A` as a Linear's weight, `B` with zeros."""
    nn.init.kaiming_uniform_(module.get_parameter("lora_A"), a=math.sqrt(5))
    nn.init.zeros_(module.get_parameter("lora_B"))


@check_types(model=nn.Module)
def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters of all adapters, the parameters to train and save.

    Args:
        model: a model with modules that have the style `LoRA`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1):
        ...     style = LoRA(base=ColwiseParallel(), rank=4)
        ...     linear = parallelize_module(nn.Linear(4, 8), init_device_mesh("cpu", (1,)), style)
        ...     [name for name, _ in adapter_parameters(linear)]
        ['lora_A', 'lora_B']
    """
    for name, param in model.named_parameters():
        if name.rpartition(".")[2] in ("lora_A", "lora_B"):
            yield name, param


@check_types(model=nn.Module)
def merge_adapters(model: nn.Module) -> nn.Module:
    """Add every adapter to its base weight and set the adapter to zero; return the model.

    Nothing is sent, unless `fully_shard` has sharded the adapters over data axes too.

    Args:
        model: the model, changed in place.

    Returns:
        `model`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1):
        ...     style = LoRA(base=ColwiseParallel(), rank=4)
        ...     linear = parallelize_module(nn.Linear(4, 8), init_device_mesh("cpu", (1,)), style)
        ...     merge_adapters(linear).lora_B.to_local().any()
        tensor(False)
    """
    with torch.no_grad():
        for module in model.modules():
            for sharding, _ in shardings_of(module):
                if not isinstance(sharding.options, Adapter):
                    continue
                linear: Any = module
                product_scale = sharding.options.scale
                linear.weight.addmm_(linear.lora_B, linear.lora_A, alpha=product_scale)
                linear.lora_B.zero_()
    return model
