"""`DrawRegion`: the watched forward of a module under which code may draw.

Modules of a parallel tree that contain such code get a `DrawRegion`, so that recomputation of any
of them in backward is watched like the first forward. If nothing draws (eval mode, a probability of
0), it only calls the module's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from functools import lru_cache
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

if TYPE_CHECKING:
    from .watch import Watch

_MOST_SHAPES = 64
# the attribute with the data axes of a module whose inputs are shards of a batch
_BATCH_AXES = "_shoal_batch_axes"
_watch: ContextVar[Watch | None] = ContextVar("shoal_dtensor_watch", default=None)
current_watch: Callable[[], Watch | None] = _watch.get


def watch_draws(root: nn.Module, batch_axes: DeviceMesh | None = None) -> None:
    """Make the random numbers that a parallel module's code draws equal to those of one device.

    `batch_axes` are the axes of data parallelism, along which the inputs are shards of a batch.
    """
    unwatch_draws(root)
    if batch_axes is not None:
        root.__dict__[_BATCH_AXES] = batch_axes
    batch = _batch_axes(root)
    meshes = _axes_of(batch, _lowered_forwards(root))
    if not meshes:
        return
    drawers = {*find_drawing_modules(root)}
    if not drawers:
        return
    for module in [*root.modules()]:
        drawers_inside = [child for child in module.modules() if child in drawers]
        if drawers_inside:
            inner = forward_of(module)
            # a program may have replaced the forward of the class in this instance
            instance_forward = vars(module).get("forward") if inner is None else None
            region = DrawRegion(
                module,
                inner,
                drawers_inside,
                meshes,
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

    __slots__ = ("arrived", "batch", "drawers", "instance_forward", "meshes")

    sampling: ClassVar[Literal["watched"]] = "watched"

    def __init__(
        self,
        module: nn.Module,
        inner: ModuleForward | None,
        drawers: list[nn.Module],
        meshes: Sequence[DeviceMesh],
        batch: DeviceMesh | None,
        instance_forward: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(module, meshes[0], inner)
        # the forward that the program has given to this instance; None for the one of its class
        self.instance_forward: Callable[..., Any] | None = instance_forward
        self.drawers: list[nn.Module] = drawers  # the modules whose code may draw
        # the axes that shard activations of the tree, each as a mesh of one axis
        self.meshes: tuple[DeviceMesh, ...] = tuple(meshes)
        # the axes along which inputs are shards of a batch
        self.batch: DeviceMesh | None = batch
        # the layouts of inputs in the first forward, by name, shape and dtype, for a recomputation
        self.arrived: dict[Any, LocalLayout] = {}

    @property
    def title(self) -> str:
        return "random numbers as on one device"

    def __reduce__(self) -> tuple[Any, ...]:
        state = (
            self.module,
            self.inner,
            self.drawers,
            self.meshes,
            self.batch,
            self.instance_forward,
        )
        return DrawRegion, state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = super().__deepcopy__(memo)
        clone.drawers = deepcopy(self.drawers, memo)
        clone.instance_forward = deepcopy(self.instance_forward, memo)
        clone.arrived = {}
        return clone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(map(draws_now, self.drawers)) or get_random_mode() == "local":
            return self.forward(*args, **kwargs)
        watch = current_watch()
        if watch is None:
            if is_compiling():
                return _uncompiled(self, args, kwargs)
            return self.run_watched(args, kwargs)
        # Outside of backward, this is not a recomputation.
        if not in_backward():
            with unwatched_functions():
                self.remember(args, kwargs)
            self.meshes = tuple(mesh for mesh in watch.axes if mesh.ndim == 1)
        return self.under(watch, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, unwatched."""
        module = self.module
        if self.instance_forward is not None:
            return self.instance_forward(*args, **kwargs)
        if self.inner is None:
            return type(module).forward(module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def run_watched(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward under a watch of its own."""
        recomputes = in_backward()
        lowered = _lowered_forwards(self.module)
        # Modules in the tree may have become parallel since `watch_draws`.
        if not recomputes:
            self.batch = self.batch or _batch_axes(self.module)
            self.meshes = tuple(dict.fromkeys((*self.meshes, *_axes_of(self.batch, lowered))))
        crossing = [mesh for mesh in self.meshes if not _divides(mesh, self.batch)]
        joint = crossing[0] if len(crossing) == 1 else DeviceMesh.concatenate(crossing)
        axes: dict[DeviceMesh, int] = {mesh: axis for axis, mesh in enumerate(crossing)}
        # A style on several axes shards its inputs along the first axis.
        for forward in lowered.values():
            first = _single_axes(forward.mesh)[0]
            if first in axes:
                axes.setdefault(forward.mesh, axes[first])
        # Imported here, because only forwards that draw need it.
        from .watch import Watch

        watch = Watch(joint, axes)
        if recomputes:
            for key, tensor in _plain_tensors_by_key(args, kwargs):
                if known_layout(tensor) is UNSEEN and key in self.arrived:
                    note_layout(tensor, self.arrived[key])
        elif self.batch is not None:
            watch.enter_batch([*flatten((*args, *kwargs.values()))], self.batch)
            self.remember(args, kwargs)
        token = _watch.set(watch)
        # The modules without a `DrawRegion`, which the watch has to call.
        direct = {
            module: forward for module, forward in lowered.items() if forward_of(module) is forward
        }
        for module, forward in direct.items():
            # bound to the forward, so that `forward_of` finds it
            module.__dict__["forward"] = MethodType(watch.call, forward)
        try:
            with watch:
                return self.under(watch, args, kwargs)
        finally:
            for module, forward in direct.items():
                set_forward(module, forward)
            _watch.reset(token)

    def under(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward under a watch."""
        before = watch.saving_state
        watch.saving_state = saving_state()
        try:
            if self.inner is None:
                return self.forward(*args, **kwargs)
            return watch.call(self.inner, *args, **kwargs)
        finally:
            watch.saving_state = before

    def remember(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the layouts of inputs for a recomputation, whose inputs are other tensors."""
        for key, tensor in _plain_tensors_by_key(args, kwargs):
            layout = known_layout(tensor)
            layout = UNSHARDED if layout.counts_as_equal else layout
            if self.arrived.setdefault(key, layout) != layout:
                self.arrived[key] = LocalLayout(
                    unknown_reason="an input of a recomputed module has had several layouts"
                )
        if len(self.arrived) > _MOST_SHAPES:
            self.arrived.clear()


# A watch follows single calls, so a watched forward runs uncompiled.
_uncompiled: Any = eager_only(DrawRegion.run_watched)


def _plain_tensors_by_key(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the plain tensors among arguments, each with its key in `DrawRegion.arrived`."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if type(value) is Tensor:
            yield (name, value.shape, value.dtype), value


def _lowered_forwards(root: nn.Module) -> dict[nn.Module, ModuleForward]:
    """Return the modules of a tree whose forward a style has replaced, with these forwards."""
    lowered = {}
    for module in root.modules():
        forward = forward_of(module)
        if isinstance(forward, DrawRegion):
            forward = forward.inner
        if forward is not None:
            lowered[module] = forward
    return lowered


def _batch_axes(root: nn.Module) -> DeviceMesh | None:
    """Return the axes over which a module gets shards of a batch.

    They are taken from the first module in its tree that has them.
    """
    return next(
        (vars(module)[_BATCH_AXES] for module in root.modules() if _BATCH_AXES in vars(module)),
        None,
    )


def _axes_of(
    batch: DeviceMesh | None, lowered: Mapping[nn.Module, ModuleForward]
) -> list[DeviceMesh]:
    """Return the axes that shard the activations of a tree: axes of its batch and its styles."""
    meshes = [] if batch is None else [batch]
    for outer in lowered.values():
        chain: list[DeviceMesh] = []
        forward: ModuleForward | None = outer
        while forward is not None:
            chain.append(forward.mesh)
            forward = forward.inner
        # The innermost callable was made first.
        meshes += reversed(chain)
    return [*dict.fromkeys(axis for mesh in meshes for axis in _single_axes(mesh))]


@lru_cache(maxsize=256)
def _divides(mesh: DeviceMesh, batch: DeviceMesh | None) -> bool:
    """Tell whether an axis is a part of an axis of the batch, such as one that divides experts.

    Rows along it are rows of the batch, whose axes already describe where they are.
    """
    if batch is None or mesh.size() == 1:
        return False
    axes_of_batch = _single_axes(batch)
    if mesh in axes_of_batch:
        return False
    ranks = _ranks_of(mesh)
    return any(ranks <= _ranks_of(axis) for axis in axes_of_batch)


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _single_axes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return each axis of a mesh as a mesh of its own."""
    return [mesh] if mesh.ndim == 1 else [mesh[name] for name in mesh.axis_names]
