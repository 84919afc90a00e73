"""`DrawRegion`: the watched forward of a module under which code may draw.

Modules of a parallel tree that contain such code get a `DrawRegion`, so that recomputation of any
of them in backward is watched like the first forward. If nothing draws (eval mode, a probability of
0), it only calls the module's forward.

For example, in `Sequential(Linear, Sequential(Linear, Dropout))` the two Sequentials and the
Dropout get one. The outermost region starts the watch. The inner ones are called under it, and
remember the layouts of their inputs: if a checkpoint runs the inner Sequential again in backward,
its region starts another watch, and gives these layouts to the new input tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor, nn

from shoal_mesh import DeviceMesh

from .._torch.compiling import eager_only, is_compiling
from .._torch.tensors import in_backward, saving_state, unwatched_functions
from ..layout.tensor_meta import flatten
from ..modules.forwards import ModuleForward, forward_of, set_forward
from ..rng.state import get_random_mode
from .drawing_modules import draws_now, find_drawing_modules
from .layouts import UNSEEN, UNSHARDED, LocalLayout, known_layout, note_layout
from .module_axes import find_axes, find_batch_axes, join_axes, set_batch_axes

if TYPE_CHECKING:
    from .watch import Watch

# the most inputs whose layouts a region remembers, counted by name, shape and dtype
_MOST_INPUTS = 64
_watch: ContextVar[Watch | None] = ContextVar("shoal_dtensor_watch", default=None)
current_watch: Callable[[], Watch | None] = _watch.get


def watch_draws(root: nn.Module, batch_axes: DeviceMesh | None = None) -> None:
    """Make the random numbers that a parallel module's code draws equal to those of one device.

    Args:
        root: the module.
        batch_axes: the axes of data parallelism, along which the inputs are shards of a batch.
    """
    unwatch_draws(root)
    if batch_axes is not None:
        set_batch_axes(root, batch_axes)
    batch = find_batch_axes(root)
    axes = find_axes(batch, _find_lowered_forwards(root).values())
    if not axes:
        return
    drawing_modules = {*find_drawing_modules(root)}
    if not drawing_modules:
        return
    for module in [*root.modules()]:
        drawing_inside = [child for child in module.modules() if child in drawing_modules]
        if drawing_inside:
            inner = forward_of(module)
            # A program may have replaced the forward of the class in this instance.
            instance_forward = vars(module).get("forward") if inner is None else None
            region = DrawRegion(
                module,
                inner,
                drawing_inside,
                axes,
                batch=batch,
                instance_forward=instance_forward,
            )
            set_forward(module, region)


def unwatch_draws(root: nn.Module) -> None:
    """Undo `watch_draws`."""
    for module in root.modules():
        region = forward_of(module)
        if isinstance(region, DrawRegion):
            set_forward(module, region.inner)
            if region.instance_forward is not None:
                module.__dict__["forward"] = region.instance_forward


class DrawRegion(ModuleForward):
    """The forward of a module under which code may draw."""

    __slots__ = ("axes", "batch", "drawing_modules", "instance_forward", "remembered_layouts")

    sampling: ClassVar[Literal["watched"]] = "watched"

    def __init__(
        self,
        module: nn.Module,
        inner: ModuleForward | None,
        drawing_modules: list[nn.Module],
        axes: Sequence[DeviceMesh],
        batch: DeviceMesh | None,
        instance_forward: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(module, axes[0], inner)
        # the forward that the program has given to this instance; None for the one of its class
        self.instance_forward: Callable[..., Any] | None = instance_forward
        # the modules of the tree whose own code may draw
        self.drawing_modules: list[nn.Module] = drawing_modules
        # the axes that shard activations of the tree, each as a mesh of one axis
        self.axes: tuple[DeviceMesh, ...] = tuple(axes)
        # the axes along which inputs are shards of a batch
        self.batch: DeviceMesh | None = batch
        # the layouts of inputs in the first forward, by name, shape and dtype, for a recomputation
        self.remembered_layouts: dict[Hashable, LocalLayout] = {}

    @property
    def title(self) -> str:
        return "random numbers as on one device"

    def __reduce__(self) -> tuple[Any, ...]:
        state = (
            self.module,
            self.inner,
            self.drawing_modules,
            self.axes,
            self.batch,
            self.instance_forward,
        )
        return DrawRegion, state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = super().__deepcopy__(memo)
        clone.drawing_modules = deepcopy(self.drawing_modules, memo)
        clone.instance_forward = deepcopy(self.instance_forward, memo)
        clone.remembered_layouts = {}
        return clone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(map(draws_now, self.drawing_modules)) or get_random_mode() == "local":
            return self.run_replaced_forward(*args, **kwargs)
        watch = current_watch()
        if watch is None:
            if is_compiling():
                return _start_watch_uncompiled(self, args, kwargs)
            return self.start_watch(args, kwargs)
        # Outside of backward, this is not a recomputation.
        if not in_backward():
            with unwatched_functions():
                self.remember_layouts(args, kwargs)
            self.axes = tuple(mesh for mesh in watch.axes.index if mesh.ndim == 1)
        return self.run_in_watch(watch, args, kwargs)

    def run_replaced_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that this one replaces."""
        module = self.module
        if self.instance_forward is not None:
            return self.instance_forward(*args, **kwargs)
        if self.inner is None:
            return type(module).forward(module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def start_watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward under a new watch."""
        # Imported here, because only forwards that draw need it.
        from .watch import Watch

        is_recomputation = in_backward()
        forwards = _find_lowered_forwards(self.module)
        # Modules in the tree may have become parallel since `watch_draws`.
        if not is_recomputation:
            self.batch = self.batch or find_batch_axes(self.module)
            axes = find_axes(self.batch, forwards.values())
            self.axes = tuple(dict.fromkeys((*self.axes, *axes)))
        watch = Watch(join_axes(self.axes, self.batch, forwards.values()))
        if is_recomputation:
            self.restore_layouts(args, kwargs)
        elif self.batch is not None:
            # Imported here, because only data-parallel modules need it.
            from .batch_rows import note_batch_rows

            note_batch_rows(watch.axes, [*flatten((*args, *kwargs.values()))], self.batch)
            self.remember_layouts(args, kwargs)
        token = _watch.set(watch)
        # The modules without a `DrawRegion`, which the watch has to call.
        without_region = {
            module: forward for module, forward in forwards.items() if forward_of(module) is forward
        }
        for module, forward in without_region.items():
            # A method of the forward, so that `forward_of` finds the forward.
            module.__dict__["forward"] = MethodType(watch.call, forward)
        try:
            with watch:
                return self.run_in_watch(watch, args, kwargs)
        finally:
            for module, forward in without_region.items():
                set_forward(module, forward)
            _watch.reset(token)

    def run_in_watch(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward under a watch that is active."""
        outer_saving_state = watch.saving_state
        watch.saving_state = saving_state()
        try:
            if self.inner is None:
                return self.run_replaced_forward(*args, **kwargs)
            return watch.call(self.inner, *args, **kwargs)
        finally:
            watch.saving_state = outer_saving_state

    def remember_layouts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the layouts of inputs for a recomputation, whose inputs are other tensors."""
        for key, tensor in _plain_tensors_by_key(args, kwargs):
            layout = known_layout(tensor)
            if layout.counts_as_equal:
                layout = UNSHARDED
            if self.remembered_layouts.setdefault(key, layout) != layout:
                self.remembered_layouts[key] = LocalLayout(
                    unknown_reason="an input of a recomputed module has had several layouts"
                )
        if len(self.remembered_layouts) > _MOST_INPUTS:
            self.remembered_layouts.clear()

    def restore_layouts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Give the inputs of a recomputation the layouts of the inputs of the first forward."""
        for key, tensor in _plain_tensors_by_key(args, kwargs):
            if known_layout(tensor) is UNSEEN and key in self.remembered_layouts:
                note_layout(tensor, self.remembered_layouts[key])


# A watch follows single calls, so a watched forward runs uncompiled.
_start_watch_uncompiled: Any = eager_only(DrawRegion.start_watch)


def _plain_tensors_by_key(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Hashable, Tensor]]:
    """Yield the plain tensors among arguments, each with its key in `remembered_layouts`."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if type(value) is Tensor:
            yield (name, value.shape, value.dtype), value


def _find_lowered_forwards(root: nn.Module) -> dict[nn.Module, ModuleForward]:
    """Return the modules of a tree whose forward a style has replaced, with these forwards."""
    forwards = {}
    for module in root.modules():
        forward = forward_of(module)
        if isinstance(forward, DrawRegion):
            forward = forward.inner
        if forward is not None:
            forwards[module] = forward
    return forwards
