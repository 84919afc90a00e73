"""What torch.compile must know of this package: whether it traces, and which functions become one node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo as eager_only
from torch._guards import detect_fake_mode

from shoal_mesh.internal import sums_are_in_tree

__all__ = [
    "eager_only",
    "is_compiling",
    "is_tracing",
    "never_compiled",
    "not_cached",
    "recorder",
    "records_values",
    "whole_when_compiled",
]


Function = TypeVar("Function", bound=Callable[..., Any])


# Whether torch.compile, or an exporter, reads or traces the program that is running.
is_compiling = torch.compiler.is_compiling

# The same, False while autograd traces what was read.
is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling


# What records operators as nodes of a graph, None for most of the time; asked for each operator, so without Python.
recorder: Callable[[], object] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)


def records_values() -> bool:
    """Whether a recorder sees real tensors: `torch.func.linearize`, `make_fx`."""
    return torch._guards.TracingContext.try_get() is None and detect_fake_mode() is None


def never_compiled(function: Callable[..., Any]) -> None:
    """Run a function and all that it calls as it is where eager code calls it between two graphs.

    Without a word torch.compile tries each Python function that runs there, this package's own among them.
    """
    actions, strategy = eval_frame._FrameAction, eval_frame._FrameExecStrategy
    eval_frame.set_code_exec_strategy(function.__code__, strategy(actions.SKIP, actions.SKIP))


def not_cached(reason: str) -> NoReturn:
    """Answer torch's question how to find a graph in its cache on disk: not at all, it is traced again.

    Raises:
        BypassAOTAutogradCache: always; torch goes on without the cache.
    """
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache  # loaded by who asks

    raise BypassAOTAutogradCache(reason)


_WHOLE: dict[str, Callable[..., Any]] = {}


def whole_when_compiled(function: Function) -> Function:
    """Decorator: torch.compile records a call as one node of its graph, and traces what the call does afterwards.

    So the function may look at meshes, specs and caches as it likes, and keep state on tensors.

    Args:
        function: of tensors and constants; one of a module, by whose name the graph calls it.

    Returns:
        The function; eager calls pass straight through.

    Example:
        >>> @whole_when_compiled
        ... def doubled(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> doubled(torch.ones(2))
        tensor([2., 2.])
    """
    name = f"{function.__module__}.{function.__qualname__}"
    _WHOLE[name] = function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            record_whole(name, sums_are_in_tree())  # what the node becomes depends on it
        return function(*args, **kwargs)

    return cast(Function, call)


def record_whole(name: str, *guarded: bool) -> None:
    """Tell the compiler, which runs this while it traces, about a function that it is about to meet.

    Args:
        name: of the function.
        guarded: what the compiler has to guard; torch 2.15 guards no value that nothing takes.
    """
    torch.compiler.allow_in_graph(_WHOLE[name])  # type: ignore[no-untyped-call]  # torch gives it no types


record_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result marks it, which imports the compiler
