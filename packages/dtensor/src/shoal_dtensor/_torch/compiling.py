"""Support for torch.compile: detection of tracing, calls as one node, symbols for sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch._subclasses.functional_tensor import FunctionalTensor

from shoal_mesh.internal import sums_are_in_tree

# Decorator for a function that the compiler must not trace: it runs eagerly between two graphs.
eager_only = _disable_dynamo
Function = TypeVar("Function", bound=Callable[..., Any])

# Tells whether torch.compile or an exporter is tracing the program. `is_tracing` is False while
# autograd is traced.
is_compiling: Callable[[], bool] = torch.compiler.is_compiling
is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling

# The recorder of operators as graph nodes, usually None. It is read for each operator, so it must
# not run Python code.
recorder: Callable[[], object] = partial(
    torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
)
# Returns the number of active dispatch modes.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_recorder_before_dispatch: Callable[[], object] = partial(
    torch._ops._mode_stack_state_for_pre_dispatch.get, 0
)


def has_unrecorded(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether a recorder would record one of the tensors as a constant.

    It does so for a tensor that does not depend on the inputs of the graph. Recorders are make_fx
    and torch.func.linearize.
    """
    # Counting the modes takes a third of the time of looking for a recorder among them.
    recording = recorder() if dispatch_modes() else None
    mode: Any = recording or _recorder_before_dispatch()
    if mode is None or torch._guards.TracingContext.try_get() is not None:
        return False
    # imported here because only recording needs it
    from torch.fx.experimental.proxy_tensor import has_proxy_slot

    for tensor in tensors:
        if isinstance(tensor, FunctionalTensor):
            continue
        if not has_proxy_slot(tensor, mode.tracer):
            return True
    return False


def never_compiled(function: Callable[..., Any]) -> None:
    """Run a function and its callees eagerly when eager code between graphs calls it.

    Otherwise torch.compile would try to compile each of them.
    """
    actions = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy
    eval_frame.set_code_exec_strategy(function.__code__, strategy(actions.SKIP, actions.SKIP))


def not_cached(reason: str) -> NoReturn:
    """Refuse to store a graph in torch's cache on disk, so that each process traces it."""
    # imported here because only compilation needs it
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    raise BypassAOTAutogradCache(reason)


def raised_as_it_is(error: Exception) -> Exception:
    """Return an error that torch.compile, if it runs, raises with the same type and text."""
    dynamo: Any = sys.modules.get("torch._dynamo.exc")
    if dynamo is None:
        return error

    def rebuild(_: BaseException) -> tuple[type[BaseException], tuple[Any, ...]]:
        return type(error), error.args

    namespace = {"__str__": lambda _: str(error), "__reduce__": rebuild}
    bases = (type(error), dynamo.Unsupported)
    error_type = type(type(error).__name__, bases, namespace)
    return cast("Exception", error_type(*error.args))


_WHOLE: dict[str, Callable[..., Any]] = {}


def whole_when_compiled(function: Function) -> Function:
    """Decorate a function so that torch.compile records each call as one node of its graph.

    The compiler's first stage does not look into the node; a later stage traces its operators.
    Therefore the function, which takes tensors and constants, may use meshes, specs and caches
    freely, and keep state on tensors. It must be defined at the top level of a module, because the
    graph calls it by its module and name. Eager calls are not changed.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    _WHOLE[name] = function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            # The traced operators of the node depend on the second argument.
            record_whole(name, sums_are_in_tree())
        return function(*args, **kwargs)

    return cast(Function, call)


def record_whole(name: str, *guarded: bool) -> None:
    """Allow a function as one node of the graph; the compiler runs this while it traces.

    `guarded` are values that the compiler must guard. Torch 2.15 guards a value only if it is an
    argument of some call.
    """
    torch.compiler.allow_in_graph(_WHOLE[name])  # type: ignore[no-untyped-call]  # of torch


# `assume_constant_result` makes the same mark, but it imports the compiler.
record_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's mark


# --- symbols for sizes in a recorded graph --------------------------------------------------------
#
# A recorder can compute a symbol if it recorded how the symbol was computed. Symbols of another
# stage of the compiler, or symbols computed while it did not record, do not have a node in its
# graph. Torch then builds a node from the symbol's expression. But from a product of three or more
# factors it takes only the first two (torch 2.11 to 2.15), and it does not support powers. Symbols
# of a gradient's size cannot be used either, because the forward must not depend on them. Therefore
# every symbol is computed again from the inputs of the graph.


def recorder_of_sizes() -> Any:
    """Return the tracker of a graph's size symbols while it is recorded; None otherwise."""
    mode: Any = recorder()
    return None if mode is None else mode.tracer


def sizes_in_recorder(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Return sizes as expressions of the recorder's first symbols: the inputs of the forward."""
    tracer = recorder_of_sizes()
    if tracer is None:
        return tuple(sizes)
    return tuple([_size_in_recorder(size, tracer) for size in sizes])


def _size_in_recorder(size: Any, tracer: Any) -> Any:
    """Return a size computed from symbols of the recorder.

    Return the size itself if the recorder lacks one of its symbols, or if the size is not an
    integer.
    """
    if type(size) is not torch.SymInt:
        return size
    # imported here because only symbolic sizes need them
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expression = size.node.expr
    known: dict[Any, Any] = {}
    for node in tracer.symnode_tracker.sym_node_dict:
        known.setdefault(node.expr, node)
    if not expression.free_symbols <= known.keys():
        return size
    symint: Any = torch.SymInt
    symbols = {symbol: symint(known[symbol]) for symbol in expression.free_symbols}
    computed = sympy_interp(PythonReferenceAnalysis, symbols, expression)
    return computed if isinstance(computed, int | torch.SymInt) else size
