"""`launch`: run a function on N local ranks from a script or a notebook.

Under torchrun it runs on the ranks of torchrun.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, overload

import torch.distributed as dist

from ..accelerator import accelerator
from ..argument_types import FUNCTION, require
from ..errors import MeshError, MeshTypeError, RankError
from ..groups.world import all_gather_objects, ensure_world
from .pickle_functions import refuse_while_loading
from .pool import RankPool, kept_pool

P = ParamSpec("P")
R = TypeVar("R")
# declared mutable state: whether ranks stay up between calls of `launch`
_KEPT = [False]


@overload
def launch(
    fn: Callable[..., R],
    nprocs: int | None = None,
    *args: Any,
    backend: str,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[R]: ...


@overload
def launch(
    fn: Callable[..., R],
    nprocs: int | None = None,
    *args: Any,
    timeout: float | None,
    **kwargs: Any,
) -> list[R]: ...


@overload
def launch(
    fn: Callable[P, R], nprocs: int | None = None, *args: P.args, **kwargs: P.kwargs
) -> list[R]: ...


def launch(  # type: ignore[misc]  # a function with an argument named backend cannot be given it
    fn: Callable[..., R],
    nprocs: int | None = None,
    *args: Any,
    backend: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[R]:
    """Run a function on every rank, and return the results by rank.

    Args:
        fn: the function, which runs on each rank with a default process group. The rank imports it
            by module (or script) and name; functions of a notebook are sent as code, with the
            classes that they use.
        nprocs: number of local ranks. Under torchrun, or if there is a default group already, the
            ranks exist: then it is their number or None.
        *args: arguments of `fn`, which are pickled.
        backend: the backend of the default group. By default it is `gloo` for the CPU, and the
            backend of the accelerator if every rank has a device: `cpu:gloo,cuda:nccl` with GPUs.
        timeout: seconds until ranks that have not returned count as hung; None waits.
        **kwargs: keyword arguments of `fn`, which are pickled.

    Returns:
        The results of `fn`, by rank.

    Raises:
        MeshTypeError: an argument of a wrong type, one that `fn` does not take, or one that cannot
            be sent.
        MeshError: `nprocs` is missing, or not the number of ranks that exist.
        RankError: ranks failed differently or did not return. The text ends with the reason, and
            names a file that has whole tracebacks. (If all ranks failed with the same error, that
            error is raised instead.) It is also raised if a script calls `launch` when it is
            imported, because the ranks import the script.

    Example:
        >>> launch(lambda offset: dist.get_rank() + offset, 2, 10)
        [10, 11]
    """
    require(fn, FUNCTION, "launch runs a function")
    require(nprocs, int | None, "launch takes a number of ranks")
    if nprocs is not None:
        _require_arguments(fn, args, kwargs)
    refuse_while_loading()
    if _has_ranks():
        world = ensure_world(accelerator() or "cpu")
        size = world.size()
        if nprocs is not None and nprocs != size:
            raise MeshError(
                f"launch asked for {nprocs} ranks, but this run has {size} ranks already"
            )
        return all_gather_objects(world, fn(*args, **kwargs))
    if nprocs is None:
        raise MeshError("launch needs a number of ranks, except under torchrun")
    ranks: AbstractContextManager[RankPool]
    if _KEPT[0]:
        ranks = nullcontext(kept_pool(nprocs, backend=backend, show_output=True))
    else:
        ranks = RankPool(nprocs, backend=backend, show_output=True, once=True)
    with ranks as pool:
        try:
            return pool._run_on_ranks(fn, args, kwargs, state=None, timeout=timeout)
        except RankError as error:
            cause = error.__cause__
            all_failed = not error.hung and len(error.failures) == nprocs
            if cause is None or not all_failed or len(set(error.failures.values())) > 1:
                raise
            cause.add_note(str(error))
            raise cause from None


def _has_ranks() -> bool:
    """Return whether this process is a rank already, of torchrun or of a default group."""
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _require_arguments(
    function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise MeshTypeError for arguments that a plain function rejects, before ranks start."""
    if not isinstance(function, FunctionType):
        return
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        name = function.__name__
        text = f"launch cannot call {name} with these arguments: {error}"
        if {"args", "kwargs"} & kwargs.keys():
            text = (
                f"launch passes args= and kwargs= on to {name}, which does not take them: write "
                f"its arguments behind the number of ranks, launch({name}, 2, 1, key=value)"
            )
        raise MeshTypeError(text) from None


def keep_ranks() -> None:
    """Keep ranks alive between calls of `launch` from now on, in a pool per number of ranks."""
    _KEPT[0] = True
