"""`LoRA`: low-rank adapters on parallel Linear layers, a style that composes with the base layer's.

    columns   A: R, B: S(0)    the adapter reads what the base reads; one reduction of dx for both
    rows      A: S(1), B: R    the adapter's partial sums join the base's before its one reduction

The base weight is frozen and stays cut as its own style says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import DeviceMesh

from .errors import UnsupportedModuleError
from .linear import ColwiseParallel, RowwiseParallel
from .sharding import ModuleSharding
from .style import DeclaredStyle

__all__ = ["LoRA", "adapter_parameters", "merge_adapters"]


@dataclass(frozen=True, kw_only=True, repr=False)
class LoRA(DeclaredStyle):
    """`base`, plus `alpha / rank * B A x` with `A` random and `B` zero at first.

    Args:
        base: ColwiseParallel or RowwiseParallel; its layouts hold for the whole.
        rank: inner size of the adapter.
        alpha: scale of the adapter times `rank`.
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
            raise UnsupportedModuleError(f"LoRA has adapters for Linear, not for {type(module).__name__}")
        base = self.base.sharding(module)
        if "blocks" in base.options:
            raise UnsupportedModuleError("LoRA: the base style shares heads over ranks (heads()); that has no adapter")
        columns = base.kind == "ColwiseParallel"
        adapter = (
            {"lora_A": Replicate(), "lora_B": Shard(0)} if columns else {"lora_A": Shard(1), "lora_B": Replicate()}
        )
        return ModuleSharding(
            f"LoRA {base.kind}",
            {**base.parameters, **adapter},
            inputs=base.inputs,
            outputs=base.outputs,
            local_outputs=base.local_outputs,
            options={"scale": self.alpha / self.rank},
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear), "sharding() has checked the type"
        weight = module.weight
        a = weight.new_empty(self.rank, module.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        module.register_parameter("lora_A", nn.Parameter(a))
        module.register_parameter("lora_B", nn.Parameter(weight.new_zeros(module.out_features, self.rank)))
        if not self.train_base:
            for param in (module.weight, module.bias):
                if param is not None:
                    param.requires_grad_(False)
        return super()._apply(module, device_mesh)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of all adapters (what one trains and saves)."""
    for name, param in model.named_parameters():
        if name.rpartition(".")[2] in ("lora_A", "lora_B"):
            yield name, param


def merge_adapters(model: nn.Module) -> nn.Module:
    """The model with every adapter added into its base weight and then zero; no communication beyond the adapters'."""
    with torch.no_grad():
        for module in model.modules():
            lowered = module.__dict__.get("forward")
            if "lora_A" not in module._parameters or lowered is None:
                continue
            weight, a, b = (getattr(module, name) for name in ("weight", "lora_A", "lora_B"))
            parts = [weight, a, b]
            assert all(isinstance(part, DTensor) for part in parts), "LoRA distributed them"
            scale = float(lowered.sharding.options["scale"])
            # Rows and columns are cut as the base's, so the local product is the base's local part.
            weight.to_local().add_(b.to_local() @ a.to_local(), alpha=scale)
            b.to_local().zero_()
    return model
