"""Styles `PrepareModuleInput`, `PrepareModuleOutput` and `PrepareModuleInputOutput`.

The styles change the layouts of the tensors that enter and leave a module, and no parameter.
`input_reshard` changes the layout of the tensors that are saved for backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Placement, Replicate, Shard
from shoal_dtensor.internal import check_types, pytree
from shoal_mesh import DeviceMesh

from ..errors import LayoutCountError
from ..sharding.module_sharding import ModuleSharding, Port
from .style import DeclaredStyle

Layouts = Placement | tuple[Placement | None, ...] | None


def _ports(style: str, layouts: Layouts, desired: Layouts) -> tuple[Port | None, ...] | None:
    """Pair the layouts of plain tensors with the desired ones; None entries pass through."""
    if layouts is None:
        if desired is not None:
            raise LayoutCountError(
                f"{style}: desired layouts {desired} were passed without layouts of the plain "
                "tensors; pass both"
            )
        return None
    if desired is None:
        raise LayoutCountError(
            f"{style}: layouts {layouts} were passed without desired layouts; pass both"
        )
    sources = _as_tuple(layouts)
    targets = _as_tuple(desired)
    if len(sources) != len(targets):
        raise LayoutCountError(
            f"{style}: layouts and desired layouts must have the same length, got {len(sources)} "
            f"{sources} and {len(targets)} {targets}"
        )
    ports: list[Port | None] = []
    for source, target in zip(sources, targets, strict=True):
        ports.append(None if source is None else Port(source, target or source))
    return tuple(ports)


def _as_tuple(
    layouts: Placement | tuple[Placement | None, ...],
) -> tuple[Placement | None, ...]:
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _keyword_ports(
    layouts: Mapping[str, Placement] | None, desired: Mapping[str, Placement] | None
) -> dict[str, Port]:
    """Pair the layouts of keyword inputs with the desired ones, by name.

    The two mappings must have the same length, as in torch, but may have different names. An input
    that only one of them names keeps its layout.
    """
    sources = dict(layouts or {})
    targets = dict(desired or {})
    if len(sources) != len(targets):
        raise LayoutCountError(
            "input_kwarg_layouts and desired_input_kwarg_layouts must have the same length, got "
            f"{sorted(sources)} and {sorted(targets)}"
        )
    ports: dict[str, Port] = {}
    for name in sorted({*sources, *targets}):
        source = sources.get(name) or targets.get(name)
        target = targets.get(name) or sources.get(name)
        if source is not None and target is not None:
            ports[name] = Port(source, target)
    return ports


class _Prepare(DeclaredStyle):
    """Base class of the styles in this file: checks layouts, and keeps them in torch's form.

    Torch's form is tuples, and dicts of keyword inputs.
    """

    def __post_init__(self) -> None:
        # Called for its checks: it raises LayoutCountError if the numbers of layouts differ.
        self.sharding(nn.Identity())
        for name, value in vars(self).items():
            if isinstance(value, Placement):
                setattr(self, name, (value,))
            elif value is None and name.endswith("kwarg_layouts"):
                setattr(self, name, {})


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class PrepareModuleInput(_Prepare):
    """Style that brings the inputs of a module to its layouts before the forward runs.

    Args:
        input_layouts: layout of each plain positional input; None passes it through.
        desired_input_layouts: layout of each positional input inside the module.
        input_kwarg_layouts: the same for keyword inputs, by name.
        desired_input_kwarg_layouts: the same for keyword inputs, by name.
        use_local_output: pass plain local tensors to the module instead of DTensors.

    Raises:
        LayoutCountError: if layouts and desired layouts have different lengths (at construction).
        LayoutError: if the call has another number of inputs than layouts.

    Example:
        >>> from shoal_dtensor import Replicate, Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(4):
        ...     layouts = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
        ...     style = PrepareModuleInput(**layouts, use_local_output=True)
        ...     model = parallelize_module(nn.Identity(), init_device_mesh("cpu", (4,)), style)
        ...     model(torch.ones(2, 3)).shape
        torch.Size([8, 3])
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: dict[str, Placement] | None = None
    desired_input_kwarg_layouts: dict[str, Placement] | None = None
    use_local_output: bool = False

    @property
    def with_kwargs(self) -> bool:
        """True if there are layouts of keyword inputs."""
        return bool(self.input_kwarg_layouts)

    def sharding(self, module: nn.Module) -> ModuleSharding:
        return ModuleSharding(
            "PrepareModuleInput",
            inputs=_ports("PrepareModuleInput", self.input_layouts, self.desired_input_layouts),
            keywords=_keyword_ports(self.input_kwarg_layouts, self.desired_input_kwarg_layouts),
            local_inputs=self.use_local_output,
            # No parameter becomes a DTensor. A call with more or fewer inputs than layouts is an
            # error.
            distributes=False,
            strict=True,
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class PrepareModuleOutput(_Prepare):
    """Style that brings the outputs of a module to the desired layouts after the forward ran.

    Args:
        output_layouts: layout of each plain output; None passes it through.
        desired_output_layouts: layout in which each output leaves.
        use_local_output: return plain local tensors instead of DTensors.

    Raises:
        LayoutCountError: if layouts and desired layouts have different lengths (at construction).
        LayoutError: if the module returns another number of outputs than layouts.
    """

    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def sharding(self, module: nn.Module) -> ModuleSharding:
        return ModuleSharding(
            "PrepareModuleOutput",
            outputs=_ports("PrepareModuleOutput", self.output_layouts, self.desired_output_layouts),
            local_outputs=self.use_local_output,
            distributes=False,
            strict=True,
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class PrepareModuleInputOutput(_Prepare):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one.

    Args:
        input_layouts: as PrepareModuleInput.
        desired_input_layouts: as PrepareModuleInput.
        input_kwarg_layouts: as PrepareModuleInput.
        desired_input_kwarg_layouts: as PrepareModuleInput.
        use_local_input: pass plain local tensors to the module instead of DTensors.
        output_layouts: as PrepareModuleOutput.
        desired_output_layouts: as PrepareModuleOutput.
        use_local_output: return plain local tensors instead of DTensors.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: dict[str, Placement] | None = None
    desired_input_kwarg_layouts: dict[str, Placement] | None = None
    use_local_input: bool = False
    # `field()` without a default: the argument is required.
    output_layouts: Layouts = field()
    desired_output_layouts: Layouts = field()
    use_local_output: bool = True

    @property
    def prepare_module_input(self) -> PrepareModuleInput:
        """The style for the inputs."""
        return PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        )

    @property
    def prepare_module_output(self) -> PrepareModuleOutput:
        """The style for the outputs."""
        return PrepareModuleOutput(
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        )

    def sharding(self, module: nn.Module) -> ModuleSharding:
        inputs = self.prepare_module_input.sharding(module)
        outputs = self.prepare_module_output.sharding(module)
        return replace(
            inputs,
            style="PrepareModuleInputOutput",
            outputs=outputs.outputs,
            local_outputs=outputs.local_outputs,
        )


@check_types(module=nn.Module)
def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Save this rank's shard of a module's replicated inputs for backward, and gather it there.

    Return the module.

    Trades an all-gather in the backward for memory. Only tensors known to be replicated are
    sharded: the plain tensors that the module is called with (and aliases of them), and replicated
    DTensors.

    Args:
        module: the module, changed in place: it gets two hooks.
        tp_device_mesh: a mesh with one axis, over which the inputs are replicated.
        input_reshard_dim: the dim along which the inputs are sharded; None leaves the module as it
            is.

    Returns:
        `module`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     linear = input_reshard(nn.Linear(4, 8), init_device_mesh("cpu", (4,)), 0)
        ...     linear(torch.zeros(8, 4)).shape  # (2, 4) of the input are saved for backward
        torch.Size([8, 8])
    """
    if input_reshard_dim is None:
        return module
    running: list[_Resharding] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        hooks = _Resharding(tp_device_mesh, input_reshard_dim, tensors)
        running.append(hooks)
        hooks.__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    return module


class _Resharding(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks of one forward; packed tensors stay packed until its backward."""

    def __init__(self, mesh: DeviceMesh, dim: int, inputs: list[Tensor]) -> None:
        super().__init__(self.pack, _unpack)
        self.mesh = mesh
        self.dim = dim
        # (address, shape, strides) of each plain input, all of which are replicated
        self.replicated = set()
        for tensor in inputs:
            if not isinstance(tensor, DTensor) and tensor.numel():
                self.replicated.add((tensor.data_ptr(), tensor.shape, tensor.stride()))
        # by address of a plain input: the packed object
        self.shards: dict[int, tuple[DTensor]] = {}

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.replicated.clear()
        self.shards.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that is saved instead of a tensor.

        A tuple stands for a plain tensor that is sharded.
        """
        # An autograd node that saves its own output would hold a reference to itself, and would not
        # be freed without a backward. Therefore the tensor is saved detached.
        is_leaf = tensor.is_leaf
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            # A leaf, such as a parameter, is in memory anyway, so a shard of it would save nothing.
            is_replicated = tensor.spec.replicated and tensor.device_mesh.ndim == 1
            if is_replicated and tensor.ndim > self.dim and not is_leaf:
                return tensor.redistribute(placements=(Shard(self.dim),))
            return tensor
        pointer = tensor.data_ptr()
        is_input = (pointer, tensor.shape, tensor.stride()) in self.replicated
        if not is_input or tensor.ndim <= self.dim:
            return tensor
        # several readers of one input save one shard
        if pointer not in self.shards:
            whole = DTensor.from_local(tensor, self.mesh, (Replicate(),), run_check=False)
            self.shards[pointer] = (whole.redistribute(placements=(Shard(self.dim),)),)
        return self.shards[pointer]


def _unpack(saved: Any) -> Tensor:
    """Return the tensor for which `_Resharding.pack` returned an object.

    The shard of a plain tensor is gathered. A sharded DTensor is returned as it is, because it has
    the same global values as the replicated one.
    """
    tensor: Tensor = saved[0].full_tensor() if isinstance(saved, tuple) else saved
    return tensor
