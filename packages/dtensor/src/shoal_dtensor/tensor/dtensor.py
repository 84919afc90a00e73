"""`DTensor`: one global tensor, of which each rank of a device mesh holds a shard.

Docstrings of conversions begin with the layouts before and after: `placements` is a DTensor's, R is
replicated, and V (varying) is a plain tensor that may differ by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MethodType
from typing import Any, ClassVar

import torch

from shoal_mesh import DeviceMesh, safe_globals as mesh_globals
from shoal_mesh.internal import require

from .._torch.compiling import is_tracing, whole_when_compiled
from .._torch.tensors import (
    BASE,
    INTERCEPTED,
    apply,
    forward_levels,
    is_followed,
    shares_memory,
    split,
    wrap_local,
)
from ..dispatch.dispatch import MarkWhileWatched, dispatch
from ..dispatch.plain_tensors import check_recorded
from ..dispatch.results import local_of_copied_view
from ..errors import ArgumentTypeError, PlacementError
from ..layout.dim_sharding import ShardOrder
from ..layout.memory_order import contiguous_stride
from ..layout.partition_spec import Placements
from ..layout.placements import PICKLED, Absent, Placement, Replicate, norm_order
from ..layout.spec import Spec
from ..redistribute.plan import plan
from ..scopes import obey
from . import serialization
from .autograd import (
    FromLocal,
    Redistribute,
    ToLocal,
    as_gradient,
    check_differentiable,
    gradient_spec,
    move_to,
)
from .gradients import CheckedHook, install_gradient_hook, postpone_use
from .spec_arguments import global_spec, mesh_or_current, target_spec, with_a_dim, with_lists


class DTensor(torch.Tensor):
    """A global tensor spread over a device mesh.

    Operators, autograd, optimizers and checkpoints use the global tensor; each rank stores only its
    shard. Create one with `distribute_tensor`, with `DTensor.from_local`, or with a factory such as
    `zeros`.

    Attributes:
        device_mesh: the mesh.
        placements: the placement along each mesh axis.

    Example:
        >>> from shoal_dtensor import Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        ...     x.shape, x.to_local().shape, (x + x).placements
        (torch.Size([8, 3]), torch.Size([2, 3]), (Shard(dim=0),))
    """

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: torch.Tensor
    _spec: Spec
    copied_view: ClassVar[type[DTensor]]
    pending: ClassVar[type[DTensor]]
    local_slot: ClassVar[Any]
    __torch_function__: Any = MarkWhileWatched()
    split = split
    _repr_html_: property = property(attrgetter("_spec._repr_html_"))  # what notebooks show
    data_ptr = serialization.refuse_memory
    const_data_ptr = data_ptr
    storage = data_ptr
    _typed_storage = data_ptr
    share_memory_ = data_ptr
    __dlpack__ = data_ptr
    apply_ = serialization.refuse_memory
    map_ = apply_
    map2_ = apply_
    untyped_storage = serialization.storage_for_compilers
    fsdp_pre_all_gather: property = property(serialization.refuse_fsdp)
    _op_dispatcher = Absent(
        "use cache_info, clear_cache, explain, register_rule and implicit_replication"
    )

    @staticmethod
    def __new__(
        cls, local_tensor: torch.Tensor, spec: Spec, *, requires_grad: bool = False
    ) -> DTensor:
        """Make a DTensor around `local_tensor` without checks; users call `from_local`."""
        result: DTensor = wrap_local(cls, local_tensor, spec, False)
        return result.requires_grad_() if requires_grad else result

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The constructor of torch does not take arguments. `__new__` has done everything.
        super().__init__()

    spec: Spec = property(  # type: ignore[assignment]  # a property is read as its value
        # `attrgetter` needs no Python call. Backward passes of lowered modules read the spec four
        # times per parameter.
        attrgetter("_spec"),
        doc="Mesh, placements, shard order, global shape, stride and dtype in one interned value.",
    )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is spread over."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each mesh axis."""
        return self._spec.placements

    @property
    def shard_order(self) -> ShardOrder:
        """For every sharded tensor dim, the mesh axes that shard it, outermost first."""
        return self._spec.shard_order

    @staticmethod
    def from_local(  # noqa: PLR0913  # torch's signature
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
        shard_order: ShardOrder | None = None,
    ) -> DTensor:
        """`V -> placements`: make a DTensor from this rank's local shard; differentiable.

        Args:
            local_tensor: this rank's shard.
            device_mesh: the mesh; the mesh of the enclosing `with mesh:` block when left out.
            placements: one per mesh axis, or a `PartitionSpec`; all replicated when left out.
            run_check: compare shapes, dtypes and whether gradients are recorded over the mesh
                first. Uneven shards become ragged ones, shards in different memory orders become
                row-major, and replicas take the values of their group's first rank; any other
                difference raises on every rank.
            shape: global shape; needed for uneven shards unless `run_check` is set. When it is left
                out, every rank is assumed to hold a shard of the same shape and memory order.
            stride: global stride in elements.
            grad_placements: the placements of the gradient that `local_tensor` gets back.
            shard_order: pairs (tensor dim, mesh axes outermost first) for axes that do not shard in
                ascending order.

        Raises:
            PlacementError: if the placements do not fit, or `shape` requires another local shape.
        """
        mesh = mesh_or_current(device_mesh)
        if isinstance(local_tensor, DTensor):
            raise ArgumentTypeError(
                "DTensor.from_local: expected local_tensor to be a plain tensor, got "
                f"{local_tensor._spec!r}; redistribute it, or pass its to_local()"
            )
        if is_tracing():
            options = (run_check, shape, stride, grad_placements, shard_order)
            return _from_local(local_tensor, mesh, placements, *options)
        spec, local = global_spec(
            local_tensor,
            mesh,
            placements,
            shape,
            stride=stride,
            shard_order=shard_order,
            run_check=run_check,
        )
        if spec.partials and any(norm_order(op) for _, op in spec.partials):
            # The terms of a norm must not be negative.
            local = local.abs()
        # `apply` refuses a tensor that is followed: operators on DTensors do not see a tangent, or
        # a batch of vmap, of the local tensor.
        if (torch.is_grad_enabled() and local.requires_grad) or is_followed(local):
            check_differentiable(spec)
            require(
                grad_placements,
                (tuple, list, type(None)),
                "DTensor.from_local: grad_placements is a list",
                ArgumentTypeError,
            )
            from_local: DTensor = apply(FromLocal, local, DTensor, spec, grad_placements)
            return from_local
        local = local.detach() if local.requires_grad else local
        return wrap_local(DTensor, local, spec, False)  # type: ignore[no-any-return]  # a DTensor

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """`placements -> V`: return this rank's shard; differentiable.

        Args:
            grad_placements: placements of the returned tensor's gradient; this tensor's own when
                left out, replicated where this tensor is partial. If ranks use a replicated tensor
                in different ways, its gradient is `Partial()`.
        """
        if not is_tracing():
            check_recorded("to_local", self._local_tensor)
        # `apply` refuses a tangent, which the local tensor does not have.
        has_history = torch.is_grad_enabled() and self.requires_grad
        if has_history or INTERCEPTED or forward_levels._current_level >= 0:
            return apply(ToLocal, self, grad_placements)  # type: ignore[no-any-return]  # of torch
        return self._local_tensor

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        shard_order: ShardOrder | None = None,
    ) -> DTensor:
        """`any -> placements`: return the same values in another layout; differentiable.

        Args:
            device_mesh: the target mesh; this tensor's own when left out.
            placements: one per mesh axis of the target, or a `PartitionSpec`.
            async_op: return before the data have arrived; the first use of the result waits. This
                tensor may be written to in the meantime: the result has the values at the time of
                the call.
            forward_dtype: convert to this dtype before moving.
            backward_dtype: convert the gradient to this dtype before moving it back.
            shard_order: pairs (tensor dim, mesh axes outermost first) for axes that do not shard in
                ascending order.

        Raises:
            PlacementError: if the placements do not fit or name a partial state that the tensor is
                not in.
        """
        target = target_spec(self._spec, device_mesh, placements, shard_order)
        if forward_dtype is not None or backward_dtype is not None:
            for dtype in (forward_dtype, backward_dtype):
                require(
                    dtype,
                    (torch.dtype, type(None)),
                    "redistribute: a dtype is a torch.dtype",
                    ArgumentTypeError,
                )
        has_history = torch.is_grad_enabled() and self.requires_grad
        if has_history or INTERCEPTED or forward_levels._current_level >= 0:
            dtypes = (forward_dtype, backward_dtype)
            moved: DTensor = apply(Redistribute, self, DTensor, target, dtypes, async_op)
            return moved
        source = (
            self if forward_dtype is None or forward_dtype == self.dtype else self.to(forward_dtype)
        )
        target = target if forward_dtype is None else target.with_(dtype=forward_dtype)
        result: DTensor = move_to(DTensor, source, target, async_op=async_op)
        return result

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """`any -> R -> V`: return the global tensor on every rank; differentiable.

        Args:
            grad_placements: the placements of the returned tensor's gradient; replicated when left
                out.
        """
        whole = self.redistribute(placements=[Replicate()] * self._spec.mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Record operations on the tensor; hooks receive a leaf's gradient in the leaf's layout."""
        super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf:
            install_gradient_hook(DTensor, self)
        return self

    requires_grad: property = property(
        BASE.requires_grad.__get__,
        requires_grad_,  # type: ignore[arg-type]  # returns the tensor
    )

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call `hook` on the gradient, and replace the gradient if the hook returns another one.

        Args:
            hook: gets the gradient, a DTensor, and returns None or a DTensor. A plain tensor counts
                as replicated if it is the same on every rank; a leaf's gradient is redistributed to
                the leaf's layout once more.

        Returns:
            A handle whose `remove()` takes the hook away.

        Raises:
            MixedTensorError: (in backward, on every rank) if the hook returns plain tensors that
                differ between ranks.
        """
        if not is_tracing():
            hook = CheckedHook(DTensor, self._spec, hook, self.is_leaf)
            if self.is_leaf and self._backward_hooks is not None:
                # `Module.to` exchanges a parameter with another tensor, and autograd then calls the
                # hooks of that tensor. The assignment makes autograd call the hooks of this one.
                install_gradient_hook(DTensor, self)
                self._backward_hooks = self._backward_hooks
        return super().register_hook(hook)  # type: ignore[no-untyped-call]  # of torch

    @property
    def data(self) -> Any:
        """Tensor without autograd history; assigning replaces shard, layout, shape and dtype."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise PlacementError(
                f"data: expected a DTensor, got {type(value).__name__} of shape "
                f"{tuple(value.shape)}"
            )
        BASE.data.__set__(self, value)
        self._become(value._local_tensor, value._spec)

    def _become(self, local: torch.Tensor, spec: Spec) -> None:
        """Replace the local shard and the layout; torch has the shape and dtype already."""
        self._local_tensor = local
        self._spec = spec
        if self.requires_grad and self.is_leaf:
            install_gradient_hook(DTensor, self)

    def tolist(self) -> Any:
        """Return the global tensor as nested lists of numbers, the same on every rank."""
        return self._gather_for("tolist").tolist()

    def _gather_for(self, reader: str) -> Any:
        """Gather the global tensor for a read that does not mention communication.

        The result is not differentiable.
        """
        replicated = self._spec.all_replicated()
        obey(f"{reader} of", self._spec, plan(self._spec, replicated))
        with torch.no_grad():
            return self.full_tensor()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the tensor as a NumPy array.

        Args:
            force: gather and detach first where needed.

        Raises:
            PlacementError: if the tensor is not replicated and `force` is not set.
        """
        if not self._spec.replicated and not force:
            raise PlacementError(
                f"numpy() of {self._spec!r}: only replicated DTensors can be converted to arrays; "
                "use numpy(force=True)"
            )
        return (self._gather_for("numpy(force=True)") if force else self.to_local()).numpy(
            force=force
        )

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(with_lists(DTensor, self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        target, index, value = with_a_dim(self, with_lists(DTensor, self, index), value)
        if target is not self and isinstance(value, DTensor) and shares_memory(value, self):
            # `x[0, 1:] += y` assigns elements to themselves by another view, which torch refuses.
            value = value.clone()
        if torch.is_grad_enabled():
            # A slice of a whole view is the view itself. torch takes it for a leaf until `grad_fn`
            # is read.
            _ = target.grad_fn
        super(DTensor, target).__setitem__(index, value)

    def __format__(self, wanted: str) -> str:
        # A DTensor without dims is formatted as a number. Without a format specification this must
        # not communicate.
        is_number = not self.ndim and type(self._local_tensor) is torch.Tensor and not self.is_meta
        if is_number and (wanted or self._spec.replicated):
            return format(self.item(), wanted)
        return object.__format__(self, wanted)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's private argument is not taken
        spec = self._spec
        layout = f"placements={spec.placements}, device_mesh={spec.mesh}"
        meta = f"shape={tuple(spec.shape)}, dtype={spec.dtype}"
        return f"DTensor({meta}, {layout}, local_tensor={self._local_tensor!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copy: DTensor = serialization.deep_copy(DTensor, self, memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return serialization.reduce(DTensor, self)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        spec = self._spec
        return ["_local_tensor"], (
            spec.example or spec,
            self.requires_grad,
            getattr(self, "_is_param", False),
        )

    @classmethod
    def __metadata_guard__(cls, compiled: Any, passed: Any) -> bool:
        """Tell whether a graph compiled for one flattened DTensor serves another.

        torch guards the sizes itself.
        """
        layout_of = attrgetter("mesh.identity", "placements", "shard_order", "dtype")
        compiled_spec, *compiled_facts = compiled
        passed_spec, *passed_facts = passed
        has_same_layout = bool(layout_of(compiled_spec) == layout_of(passed_spec))
        return has_same_layout and compiled_facts == passed_facts

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> DTensor:
        spec, requires_grad, is_parameter = context
        local = inner["_local_tensor"]
        spec = serialization.rebuilt_spec(spec, local, size, stride, is_parameter=is_parameter)
        return DTensor(local, spec, requires_grad=requires_grad)

    def __coerce_tangent_metadata__(self) -> DTensor:
        """Return this tensor in the layout that torch.compile may expect of its gradient."""
        return self.__coerce_same_metadata_as_tangent__(
            (gradient_spec(self._spec), self.requires_grad)
        )

    def __coerce_same_metadata_as_tangent__(
        self, context: Any, expected: type | None = None
    ) -> DTensor:
        """Return this gradient in the layout that the compiled code expects."""
        target: Spec = context[0].with_(shape=self._spec.shape, stride=self._spec.stride)
        return DTensor(move_to(DTensor, self, target)._local_tensor, target)

    # Methods that torch.distributed.checkpoint and torch.compile's cache call.
    __create_write_items__ = serialization.checkpoint_write_items
    __create_chunk_list__ = serialization.checkpoint_chunks
    __get_tensor_shard__ = serialization.checkpoint_shard
    _raise_if_contains_partial_placements = serialization.refuse_partial
    _stable_hash_for_caching = serialization.refuse_graph_cache


class _CopiedView(DTensor):
    """A view that had to be redistributed and does not share storage with its base.

    Writing to it is an error.
    """

    __slots__ = ()


class DeferredDTensor(DTensor):
    """A DTensor whose local tensor is still in flight.

    The first use waits for the local tensor and makes the object a plain DTensor.
    """

    __slots__ = ()

    # The slot of the class has the batch until the local tensor arrives.
    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]  # a property for a slot
        DTensor.local_slot.__get__(self).flush()
        return DTensor.local_slot.__get__(self)  # type: ignore[no-any-return]  # a slot has no type

    def arrive(self, local: torch.Tensor) -> None:
        """Take the local tensor."""
        DTensor.local_slot.__set__(self, local)
        self.__class__ = DTensor  # type: ignore[assignment]  # same layout, nothing is pending


def run_on_pending(
    cls: type[DTensor],
    op: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run an operator on tensors that are in flight, or postpone it until they arrive."""
    waiting = None if kwargs else postpone_use(DTensor, op, args)
    return dispatch(DTensor, op, types, args, kwargs=kwargs) if waiting is None else waiting


def gradient_of_output(gradient: torch.Tensor, context: Any) -> Any:
    """`R -> R`: convert the plain gradient of a compiled function's output to a DTensor.

    The ranks compare the gradient first.
    """
    return as_gradient(DTensor, gradient, context[0])


def zeros_of_output(shape: Sequence[int], context: Any) -> DTensor:
    """Return zeros of a global shape in the layout that compiled code expects of a gradient."""
    spec: Spec = context[0].with_(shape=shape, stride=contiguous_stride(shape))
    local = torch.zeros(spec.local_shape, dtype=spec.dtype, device=spec.mesh.device_type)
    return DTensor(local, spec)


# These are bound methods, because a method that calls the function would take 0.1 us more.
DTensor.__torch_dispatch__ = MethodType(dispatch, DTensor)
DeferredDTensor.__torch_dispatch__ = MethodType(run_on_pending, DTensor)
DTensor.copied_view = _CopiedView
DTensor.pending = DeferredDTensor
DTensor.local_slot = DTensor.__dict__["_local_tensor"]
_CopiedView._local_tensor = local_of_copied_view(  # type: ignore[assignment]  # for a slot
    DTensor.local_slot
)


@whole_when_compiled
def _from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements | None, *options: Any
) -> DTensor:
    """Call `DTensor.from_local` as a function, for the compiler."""
    names = ("run_check", "shape", "stride", "grad_placements", "shard_order")
    return DTensor.from_local(local, mesh, placements, **dict(zip(names, options, strict=True)))


def local_shard(tensor: DTensor) -> torch.Tensor:
    """`placements -> V`: return this rank's shard itself, outside of autograd.

    It is for modules that compute on local tensors and deliver gradients themselves; all other code
    calls `to_local()`, which is differentiable. It waits for a collective that is still in flight.
    """
    # hot loops of lowered modules call this for every parameter
    if type(tensor) is not DTensor:
        require(tensor, DTensor, "local_shard: tensor is a DTensor", ArgumentTypeError)
    return tensor._local_tensor


def safe_globals() -> list[Any]:
    """Return the classes of a pickled DTensor, for `torch.load(..., weights_only=True)`.

    Importing shoal does not register them.

    Example:
        >>> with torch.serialization.safe_globals(safe_globals()):
        ...     pass  # torch.load("model.pt"); add_safe_globals(safe_globals()) is for good
    """
    return [serialization.rebuild, DTensor, Spec, *PICKLED, *mesh_globals()]
