"""`Watch`: while active, torch functions propagate layouts of local tensors and draw as DTensors.

Only the torch functions that modules call are watched, not the operators in them. The code of
modules with a style is not watched, unless their style lets the module's own code run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from .._torch.interception import FunctionMode
from .._torch.tensors import local_of, saving_state, unwatched_functions
from ..layout.tensor_meta import flatten
from ..modules.forwards import ModuleForward
from .activation_axes import ActivationAxes
from .drawing_calls import draws_numbers
from .layout_inference import infer_layouts
from .layouts import (
    UNSEEN,
    UNSHARDED,
    LocalLayout,
    known_layout,
    known_spec,
    note_layout,
)
from .sharded_draws import RandomCall, draw_as_one_device
from .styled_calls import StyledCall


class Watch(FunctionMode):
    """A mode that tracks layouts of local tensors on the axes of styles and draws as one device."""

    def __init__(self, axes: ActivationAxes) -> None:
        super().__init__()
        self.axes: ActivationAxes = axes
        # The saving state at the start of the innermost watched forward. If it differs at a draw, a
        # checkpoint inside that forward would repeat the draw without a watch.
        self.saving_state: tuple[bool, object] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        # Example: "bernoulli" for `bernoulli.default`.
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        if draws_numbers(name, args, kwargs):
            in_checkpoint = self.saving_state != saving_state()
            call = RandomCall(name, func, args, kwargs)
            return draw_as_one_device(call, self.axes.mesh, in_checkpoint)
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Tensor):
            self.note_results(name, func, args, kwargs, outs=(out,))
        elif isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            tensors = [result for result in out if isinstance(result, Tensor)]
            self.note_results(name, func, args, kwargs, outs=tensors)
        elif name == "__setitem__":
            self.note_write(name, args[0], args[1:])
        return out

    def note_results(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outs: Sequence[Tensor],
    ) -> None:
        """Attach layouts to the tensors that a function returned."""
        tensors = [*flatten((*args, *kwargs.values()))]
        layouts = [known_layout(tensor) for tensor in tensors]
        if all(layout.counts_as_equal for layout in layouts):
            for out in outs:
                if known_layout(out) is UNSEEN:
                    note_layout(out, UNSHARDED)
            return
        # A function that writes in place returns one of its arguments.
        if len(outs) == 1 and any(outs[0] is tensor for tensor in tensors):
            self.note_write(name, outs[0], tensors)
            return
        shards = [*map(local_of, outs)]
        out_layouts = infer_layouts(name, func, args, kwargs, outs=shards, layouts=layouts)
        for out, layout in zip(outs, out_layouts, strict=True):
            note_layout(out, layout)

    def note_write(self, name: str, target: Tensor, sources: Sequence[Any]) -> None:
        """Note that a function wrote to a tensor, whose layout may become unknown.

        If the tensor was not known to be sharded, its layout is unknown from now on.
        """
        if known_spec(target) is not None:
            return
        others = [
            source for source in sources if isinstance(source, Tensor) and source is not target
        ]
        if not all(known_layout(source).counts_as_equal for source in others):
            note_layout(target, LocalLayout(unknown_reason=f"{name} wrote shards to it"))

    def call(self, forward: ModuleForward, *args: Any, **kwargs: Any) -> Any:
        """Run a module with a style and return its result with its layout.

        Only functions of the module's own code are watched.
        """
        source = next(flatten((*args, *kwargs.values())), None)
        call = StyledCall(self.axes, forward, source)
        with unwatched_functions():
            call.check_inputs(args, kwargs)
        with nullcontext() if forward.sampling == "watched" else unwatched_functions():
            out = forward(*args, **kwargs)
        with unwatched_functions():
            call.note_outputs(out)
        return out
