"""Recording and refusal of a program's communication, under torch's names."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

from shoal_mesh import CommDebugMode
from shoal_mesh.internal import Event

from .._torch.tensors import pytree
from ..argument_types import suggests_keywords
from ..errors import ArgumentValueError
from ..scopes import communication
from ..tensor.dtensor import DTensor


class ExplicitRedistributionContext:
    """`communication("forbid")` under torch's name and arguments; blocks nest and are reusable.

    Args:
        enable: False allows communication inside an enabled block.
        strict: torch's refusal of redistributions that send nothing; only False is supported.
        mode: "raise", or "warn".

    Raises:
        ArgumentValueError: for another mode, or `strict=True`.

    Example:
        >>> with ExplicitRedistributionContext():
        ...     pass
    """

    def __init__(self, enable: bool = True, strict: bool = False, mode: str = "raise") -> None:
        if mode not in ("raise", "warn"):
            raise ArgumentValueError(
                f"ExplicitRedistributionContext: mode must be 'raise' or 'warn', got {mode!r}"
            )
        if strict:
            raise ArgumentValueError(
                "ExplicitRedistributionContext: strict=True is not supported, because "
                "redistributions without communication are never refused; DebugMode and explain "
                "list them"
            )
        policy = "forbid" if mode == "raise" else "warn"
        self._policy: Any = policy if enable else "allow"
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> ExplicitRedistributionContext:
        self._entered.append(communication(self._policy))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)


class DebugMode(CommDebugMode):  # type: ignore[no-untyped-call]  # untyped __init_subclass__
    """`CommDebugMode` that also records operators on DTensors, each with its collectives.

    The options are torch's. Options for values that are not recorded here are refused; options for
    the printed form have no effect.

    Args:
        record_realtensor, record_localtensor, record_output, record_profiler_context: no effect.
        record_torchfunction, record_faketensor, record_tensor_attributes, record_nn_module:
            refused.
        store_original_args, record_stack_trace, record_ids, run_compile_with_interpreter: refused.

    Attributes:
        operators: a line for each operator and collective, in order; collectives that an operator
            starts are indented.

    Raises:
        ArgumentValueError: for an option of torch's that records something else.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        ...     with DebugMode() as debug:
        ...         y = x + x.redistribute(placements=[Shard(1)])
        >>> print(debug.debug_string())
        all_to_all_single of 32 bytes along 0
        aten.add.Tensor(f32[4@(0), 4], f32[4, 4@(0)])
          all_to_all_single of 32 bytes along 0
    """

    @suggests_keywords()
    def __init__(  # noqa: PLR0913  # torch's options
        self,
        *,
        record_torchfunction: bool = False,
        record_faketensor: bool = False,
        record_realtensor: bool = True,
        record_tensor_attributes: Any = None,
        record_nn_module: bool = False,
        store_original_args: bool = False,
        record_stack_trace: bool = False,
        record_output: bool = True,
        record_ids: bool = False,
        record_profiler_context: bool = True,
        record_localtensor: bool = True,
        run_compile_with_interpreter: bool = False,
    ) -> None:
        options = dict(locals())
        super().__init__()
        off = [
            name
            for name, option in inspect.signature(DebugMode).parameters.items()
            if not option.default
        ]
        # Every option that is off by default records something that this mode does not record.
        refused = ", ".join(name for name in off if options[name])
        if refused:
            raise ArgumentValueError(
                f"DebugMode: {refused} is not supported: this mode records operators on DTensors "
                "and collectives only; CommDebugMode names the module that starts a collective, "
                "torch.utils._debug_mode.DebugMode records torch's own operators"
            )
        self.operators: list[str] = []
        self._depth = 0

    def __enter__(self) -> DebugMode:
        self.operators = []
        super().__enter__()
        return self

    def before(self, event: Event) -> None:
        """Record a collective."""
        super().before(event)
        axes = "x".join(event.comm.axes)
        self._note(f"{event.op} of {self.trace[-1].nbytes} bytes along {axes}")

    def _run_subclass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an operator with the specs of its DTensors, and run it one level deeper."""
        flat = [arg for arg in pytree.tree_leaves((args, kwargs)) if isinstance(arg, DTensor)]
        # The text of a spec, without its end ` on (mesh))`.
        specs = [repr(arg._spec).removeprefix("Spec(").rpartition(" on (")[0] for arg in flat]
        self._note(f"{func}({', '.join(specs)})")
        self._depth += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._depth -= 1

    def _note(self, text: str) -> None:
        self.operators.append("  " * self._depth + text)

    def reset(self) -> None:
        """Delete all lines."""
        self.operators = []

    def debug_string(self, show_stack_trace: bool | None = None) -> str:
        """Return all lines.

        Raises:
            ArgumentValueError: if stack traces are requested, which are not recorded.
        """
        if show_stack_trace:
            raise ArgumentValueError(
                "DebugMode.debug_string: stack traces are not recorded, got show_stack_trace=True"
            )
        return "\n".join(self.operators)
