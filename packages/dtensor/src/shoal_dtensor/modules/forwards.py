"""`ModuleForward`: the callable that stands in for a module's forward.

Its bound `__call__` is stored in the instance (`module.forward`), so `nn.Module.__call__`, hooks
and `state_dict` work as before. A compiler guards the function of a bound method and not the
object, so blocks of equal structure share one graph. The callable refers to its module weakly, so
that a model is freed as soon as it is dropped.

A package above may enter a mode of arithmetic. The mode determines the class that replaces a
module's forward, and the order in which ranks add up terms. Backward passes, which run in threads
of their own, use the mode too.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import ScopedValue, value_when_traced

from .._torch.compiling import is_compiling
from ..layout.placements import Placement
from ..layout.spec import Spec


class ModuleForward(ABC):
    """Base of the callables that replace forwards of modules."""

    __slots__ = ("_module", "inner", "mesh")

    # The way in which random numbers become the numbers of one device. "own": the callable draws
    # the numbers of one device itself. "watched": the callable runs the module's code, whose
    # functions are watched. "refused": the callable would draw for rows in another order, so draws
    # are refused.
    sampling: ClassVar[Literal["own", "watched", "refused"]] = "own"
    # whether the callable draws the numbers of one device only if no other axis shards its input
    one_axis: ClassVar[bool] = False

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, inner: ModuleForward | None = None
    ) -> None:
        self._module = weakref.ref(module)
        self.mesh: DeviceMesh = mesh  # the axes on which it acts
        # the callable that it replaces; None if it replaces the forward of the class
        self.inner: ModuleForward | None = inner

    @property
    @abstractmethod
    def title(self) -> str:
        """Its name in messages, such as the name of a style."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's forward."""

    @property
    def module(self) -> nn.Module:
        """The module whose forward is replaced."""
        module = self._module()
        assert module is not None, "a forward outlived its module"
        return module

    def extra_repr(self) -> str:
        """Return the text that the module adds to its printed form."""
        if self.inner is not None:
            return self.inner.extra_repr()
        return type(self.module).extra_repr(self.module)

    # --- layouts of plain inputs and outputs along the axis of a one-axis mesh --------------------

    def declared_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[tuple[Any, Placement]]:
        """Return each input of a call for which a layout is declared, with the layout."""
        return ()

    def output_layouts(self) -> Sequence[Placement | None]:
        """Return the layout of each plain output; None if the output passes through."""
        return ()

    def output_sizes(self, index: int, size: int) -> Sequence[int] | None:
        """Return the sizes of an output's shards on all ranks; None if only inputs determine them.

        This rank's shard has `size`.
        """
        return None

    def output_blocks(self) -> Sequence[Sequence[int]] | None:
        """Return the sizes of an output's blocks on all ranks; None for an output of one block.

        An output with blocks consists of shards of several tensors, one after the other. The result
        is empty if several ranks hold the same elements.
        """
        return None

    def dims_of_tokens(self, ndim: int) -> range:
        """Return the dims of the input along which the module computes each element alone.

        A shard of any of them has the same output as the whole, whatever dim the style names.
        """
        return range(0)

    def keeps_shard(self, spec: Spec, axis: int, output: Tensor) -> bool:
        """Tell whether the output is the shard that the input is along an axis.

        It is if the module computes tokens alone and the input is a shard of tokens, whatever dim
        the style names: the norms of queries and keys get shards of heads, dim 2, where their style
        names positions, dim 1.

        Args:
            spec: the layout of the input.
            axis: an axis of the mesh of `spec`.
            output: the output on this rank.
        """
        dim = getattr(spec.placements[axis], "dim", None)
        is_token_dim = dim is not None and dim in self.dims_of_tokens(output.ndim)
        return is_token_dim and output.shape == spec.local_shape

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = copy.copy(self)
        memo[id(self)] = clone
        clone._module = weakref.ref(copy.deepcopy(self.module, memo))
        clone.inner = copy.deepcopy(self.inner, memo)
        return clone

    # The default copies by `__reduce__`, which runs `__init__` again in subclasses.
    def __copy__(self) -> Self:
        clone = object.__new__(type(self))
        for cls in type(self).__mro__:
            for name in getattr(cls, "__slots__", ()):
                setattr(clone, name, getattr(self, name))
        return clone


def forward_of(module: nn.Module) -> ModuleForward | None:
    """Return the `ModuleForward` that replaces a module's forward, or None."""
    owner = getattr(module.__dict__.get("forward"), "__self__", None)
    return owner if isinstance(owner, ModuleForward) else None


def set_forward(module: nn.Module, forward: ModuleForward | None) -> None:
    """Replace a module's forward by a callable; None restores the forward of its class."""
    if forward is None:
        module.__dict__.pop("forward", None)
        module.__dict__.pop("extra_repr", None)
    else:
        module.__dict__["forward"] = MethodType(
            _call_with_signature(type(forward), type(module).forward), forward
        )
        module.__dict__["extra_repr"] = forward.extra_repr


@lru_cache(maxsize=1024)
def _call_with_signature(cls: type[ModuleForward], forward: Any) -> FunctionType:
    """Return `cls.__call__` with the signature of the replaced forward.

    Libraries inspect that signature for its inputs.
    """
    # The same function for all modules of one class: a compiler guards it, so they share a graph.
    call: Any = cls.__call__
    function = FunctionType(
        call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )
    function.__kwdefaults__ = call.__kwdefaults__
    function.__qualname__ = call.__qualname__
    function.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # for inspect
    return function


# --- the mode of arithmetic -----------------------------------------------------------------------


class DataDtypes(NamedTuple):
    """The dtypes of gradients that data parallelism sums.

    Attributes:
        compute: the dtype of the computation; None for the dtype of the parameters.
        reduce: the dtype of the sums over data ranks; None for the dtype of the computation.
    """

    compute: torch.dtype | None
    reduce: torch.dtype | None


class Arithmetic(Protocol):
    """Decisions of a mode of arithmetic."""

    def own_blocks(self, ranks: int, size: int, dim_name: str) -> int:
        """Return the number of blocks that one of the ranks has of a dim of `size` elements."""

    def form_of(self, lowering: type[Any], sharding: Any, module: nn.Module) -> type[Any]:
        """Return the class whose object becomes the module's forward in this mode.

        Args:
            lowering: the class that a style's declaration chose.
            sharding: the declaration.
            module: the module.
        """

    def complete(self, mesh: DeviceMesh, module: nn.Module, over_data: DataDtypes | None) -> None:
        """Give the modules of a tree that no style shards the forwards that they need.

        Args:
            mesh: the mesh on which the modules are made parallel: by data parallelism, which sums
                gradients over this mesh, if `over_data` is given; otherwise by a plan of styles.
            module: the root of the tree.
            over_data: the dtypes of gradients that are summed over `mesh`; None if none are.
        """


_current: ScopedValue[Arithmetic | None] = ScopedValue("shoal_dtensor_arithmetic", None)
# modes of the blocks that a compiler traces, because a compiler does not follow context variables
_traced: list[Arithmetic] = []


def current_arithmetic() -> Arithmetic | None:
    """Return the mode that is entered, or None."""
    if _traced:
        return _traced[-1]
    if not _current.blocks:
        return None
    return value_when_traced(_current) if is_compiling() else _current.get()


@contextmanager
def arithmetic(mode: Arithmetic) -> Iterator[None]:
    """Enter a mode inside the block."""
    if is_compiling():
        _traced.append(mode)
        try:
            yield
        finally:
            _traced.pop()
        return
    with _current.change(lambda _: mode):
        yield


def complete_forwards(
    mesh: DeviceMesh, *modules: nn.Module, over_data: DataDtypes | None = None
) -> None:
    """Give modules on a mesh that no style shards the forwards that an entered mode needs.

    If gradients are to be summed over the mesh, `over_data` are their dtypes. The mode refuses a
    module without a suitable forward, and gradients that it cannot sum.
    """
    mode = current_arithmetic()
    if mode is not None:
        for module in modules:
            mode.complete(mesh, module, over_data)
