"""Private and unstable names of torch that shoal_mesh uses, all in one file.

May import: errors.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions as AllgatherOptions,
    AllreduceOptions as AllreduceOptions,
    AllToAllOptions as AllToAllOptions,
    Backend,
    BroadcastOptions as BroadcastOptions,
    PrefixStore as PrefixStore,
    ReduceOp as ReduceOp,
    ReduceScatterOptions as ReduceScatterOptions,
    Store as Store,
    TCPStore as TCPStore,
    Work as Work,
)
from torch._compile import _disable_dynamo
from torch._library import opaque_object
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup as ProcessGroup, distributed_c10d as _c10d
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._pytree import tree_leaves as tree_leaves

from .errors import BackendError, MeshTypeError

Result = TypeVar("Result")
BackendOptions = Backend.Options
# Base class of groups that are written in Python. Its type is Any because the stubs declare all
# overloads of a method, while such a group only needs the overload that c10d calls.
PythonGroup: Any = ProcessGroup
functional = torch.ops._c10d_functional
c10d_ops = torch.ops.c10d

is_compiling = torch.compiler.is_compiling
# is_compiling without torch.export's tracing on fake tensors, in half of the time
is_compiling_code = torch.compiler.is_dynamo_compiling
is_exporting = torch.compiler.is_exporting
# writes each tensor of the second list to the tensor at its position in the first list
copy_each = torch._foreach_copy_
# device to backend map of a group as text, such as `cpu:gloo,cuda:nccl`
backend_config = dist.get_backend_config
# the global ranks of a group
ranks_in_order = dist.get_process_group_ranks
# the store of the default group
default_store = _c10d._get_default_store
# the timeout of a backend for groups without a timeout of their own
default_timeout = _c10d._get_default_timeout


def is_traced(tensor: torch.Tensor | None = None) -> bool:
    """Return whether a collective must be recorded as an operator of torch instead of being called.

    This is the case under a compiler, under make_fx, and for fake tensors. A compiler or make_fx
    records operators and would miss a direct call. A fake `tensor` has no memory to send, and stays
    fake outside of its mode.
    """
    # torch.export traces in a fake mode, which is asked for below.
    if is_compiling_code() or _is_included(_BEFORE_DISPATCH):
        return True
    if _active_modes() and (_active_mode(_KINDS.FAKE) or _active_mode(_KINDS.PROXY)) is not None:
        return True
    return type(tensor) is not torch.Tensor and isinstance(tensor, FakeTensor)


# a block in which results do not take the class of a tensor subclass
disabled_subclasses = torch._C.DisableTorchFunctionSubclass
_active_modes = torch._C._len_torch_dispatch_stack
_active_mode = torch._C._get_dispatch_mode
_KINDS = torch._C._TorchDispatchModeKey
# The dispatch key that make_fx(pre_dispatch=True) includes.
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch


# Returns whether a transform of `torch.func` runs.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# The module with the number of the innermost level of forward-mode AD, -1 outside of all levels.
forward_levels = forward_ad
# Returns whether a tensor is a wrapper of `torch.func`: a batch of vmap, or a level of grad.
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
# Returns whether a tensor is a batch of gradients, of `torch.autograd.grad(is_grads_batched=True)`.
_is_batch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def transforms_run() -> bool:
    """Return whether a transform of `torch.func` or forward-mode AD runs, outside of compilers."""
    runs = forward_ad._current_level >= 0 or transforms_active()
    return runs and not is_compiling()


def is_batch_of_gradients(grad: torch.Tensor) -> bool:
    """Return whether a gradient is a batch (`is_grads_batched`), outside of compilers."""
    return not is_compiling() and _is_batch(grad)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a tangent, or stands for a tensor of a transform."""
    return _is_wrapped(tensor) or _is_batch(tensor) or has_tangent(tensor)


# Returns whether a kernel runs, below autograd. Tensors there do not have tangents.
_is_excluded: Callable[[torch._C.DispatchKey], bool] = (
    torch._C._dispatch_tls_is_dispatch_key_excluded
)
_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether forward-mode AD follows a tensor."""
    if forward_ad._current_level < 0 or _is_excluded(_AUTOGRAD):
        return False
    dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]  # torch has no types
    return dual.tangent is not None


@contextmanager
def unseen() -> Iterator[None]:
    """Open a block in which modes and Python's dispatcher do not see operators.

    Tracers with symbolic sizes run in Python's dispatcher, which keeps the interpreter's lock
    during the calls that it makes. A thread of gloo that frees the tensors of its last collective
    waits for this lock and holds gloo's mutex meanwhile. If the caller enqueues the next collective
    with the lock held, it waits for the mutex: a deadlock.
    """
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


# `WORLDS._default_pg` is the default group. A read takes 10 ns; the public property takes 100 ns.
WORLDS = _c10d._world


def kept_in_order(collective: Any, directly: str) -> None:
    """Have inductor, if it is loaded, run an operator in the order of the graph.

    Inductor keeps this order for torch's own collectives. It runs other independent operators in
    the order that needs the least memory for the sizes of this rank's tensors, so ranks could run
    collectives in different orders.

    Args:
        collective: the operator.
        directly: the expression that inductor's generated code calls instead of the operator. The
            path through torch's dispatcher takes 12 us, as long as a small all-reduce.
    """
    inductor = sys.modules.get("torch._inductor.lowering")
    if inductor is None or collective in inductor.lowerings:
        return
    # an import here would load all of inductor
    ir: Any = sys.modules["torch._inductor.ir"]

    class DirectCall(ir._CollectiveKernel):  # type: ignore[misc]  # its base is Any
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.python_kernel_name = directly

    def create_call(*arguments: Any) -> Any:
        result = DirectCall.create_out_of_place(collective, *arguments)
        return ir.TensorBox.create(result)

    inductor.add_layout_constraint(collective, inductor.constrain_to_fx_strides)
    inductor.register_lowering(collective)(create_call)


Class = TypeVar("Class", bound=type)

# Parts of torch that need torch's own mesh, and what to call instead.
_MADE_FOR_ITS_OWN_MESH = {
    "torch.distributed.tensor": (
        "the function of the same name of shoal_dtensor, or shoal_tp_styles.parallelize_module"
    ),
    "torch.distributed.fsdp": "shoal_data_parallel.fully_shard or shoal_data_parallel.replicate",
    "torch.distributed._functional_collectives": (
        "the collectives of shoal_mesh, which accept the mesh, or pass mesh.get_group(axis)"
    ),
}


def refuse_torch_as_caller(mesh: object) -> None:
    """Raise MeshTypeError if the caller was called by a part of torch that needs torch's own mesh.

    Such a part of torch accepts any mesh, and fails later, in C++.
    """
    # frame 0 is this function, frame 1 its caller, frame 2 the caller of that
    name = sys._getframe(2).f_globals.get("__name__", "")
    if not name.startswith("torch.distributed."):
        return
    # torch.distributed.tensor.parallel.api -> torch.distributed.tensor
    part = ".".join(name.split(".")[:3])
    replacement = _MADE_FOR_ITS_OWN_MESH.get(part)
    if replacement is not None:
        raise MeshTypeError(
            f"{part} takes torch's DeviceMesh, got shoal's {mesh!r}; use {replacement}, or pass "
            "shoal_dtensor.interop.mesh_to_torch(mesh)"
        )


def constant_when_compiled(cls: Class) -> Class:
    """Have torch.compile treat instances of the decorated class as constants of its graph.

    While torch.compile traces, it creates, reads and calls instances itself. Its guards compare
    them by equality, so the class needs `__eq__` and `__hash__`. An instance may be an argument of
    a function that the graph calls.

    The method `__fx_repr__` returns the expression for an instance in generated code, and the names
    that the expression needs. If the class does not have the method, it gets one that gives each
    instance a name of its own. Traced code may read slots and call methods, but it cannot read
    properties. A class lists its methods that return process groups in `_TRACED`: the compiler
    traces into these methods, because a group is an input of the graph.

    Raises:
        MeshTypeError: the decorated object is not a class of Python, or its instances have no hash.

    Example:
        >>> from dataclasses import dataclass
        >>> @constant_when_compiled
        ... @dataclass(frozen=True, slots=True)
        ... class Scale:
        ...     by: float
        ...
        ...     def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        ...         return f"Scale({self.by})", {"Scale": Scale}
    """
    fits = issubclass(type(cls), type) and getattr(cls, "__hash__", None) is not None
    try:
        if fits and not hasattr(cls, "__fx_repr__"):
            cls.__fx_repr__ = _name_for_fx  # type: ignore[attr-defined]  # torch.fx looks for it
    except TypeError:
        # a type that is written in C
        fits = False
    if not fits:
        raise MeshTypeError(
            f"constant_when_compiled takes a class with __eq__ and __hash__, got {cls!r:.80}"
        )
    names = [name for name in dir(cls) if not name.startswith("__") or name == "__getitem__"]
    traced_names = getattr(cls, "_TRACED", ())
    members = dict.fromkeys(names, opaque_object.MemberType.USE_REAL)
    members |= dict.fromkeys(traced_names, opaque_object.MemberType.INLINED)
    # torch 2.15 renames `register_opaque_type`; a call by the old name logs
    register = getattr(opaque_object, "register_custom_class", None)
    try:
        if register is not None:
            register(cls, typ="constant", members=members)
        else:
            opaque_object.register_opaque_type(cls, typ="value", members=members)
    except TypeError:
        # torch 2.11 demands a metaclass that only types passed by reference need. Register the
        # class as `register_opaque_type` would, without this demand.
        name = f"{cls.__module__}.{cls.__qualname__}"
        # Any: the stub may have the arguments of another version
        make_info: Any = opaque_object._OpaqueTypeInfo
        info = make_info(name, "value", None, members, False)
        opaque_object._OPAQUE_TYPES[cls] = info
        opaque_object._OPAQUE_TYPES_BY_NAME[name] = info
        torch._C._register_opaque_type(name)
    return cls


def _name_for_fx(instance: object) -> tuple[str, dict[str, object]]:
    """Return a name of an instance for generated code, and the namespace that has it."""
    name = f"{type(instance).__name__}_{id(instance)}"
    return name, {name: instance}


def default_group() -> ProcessGroup | None:
    """Return the group of all ranks, or None if there is none.

    There is none before `init_process_group` and after `destroy_process_group`.
    """
    return dist.group.WORLD


def on_plain_kernels(function: Callable[..., Result], *args: Any) -> Result:
    """Return the result of a function whose operators run directly on their kernels.

    Modes, autograd and version counters do not see the operators. Copies into and out of shared
    memory are therefore invisible to a program, like the copies of a backend.
    """
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS):
        return function(*args)


_Key = torch._C.DispatchKey
# the keys of modes, of autograd, and of version counters
_ABOVE_KERNELS = torch._C.DispatchKeySet(_Key.Python)
for _key in (_Key.PythonDispatcher, _Key.PythonTLSSnapshot, _Key.AutogradCPU, _Key.ADInplaceOrView):
    _ABOVE_KERNELS = _ABOVE_KERNELS.add(_key)


def timeout_of(group: ProcessGroup) -> float:
    """Return the seconds after which a collective of the group on CPU tensors times out."""
    # the stub lacks the timeout
    options: Any = group._get_backend(torch.device("cpu")).options
    timeout: dt.timedelta = options._timeout
    return timeout.total_seconds()


def sequence_of(group: ProcessGroup) -> int:
    """Return how many collectives of a group this rank has started; 0 if they are not counted."""
    try:
        # the stub lacks it
        return int(getattr(group, "_get_sequence_number_for_group")())  # noqa: B009
    except (AttributeError, RuntimeError):
        return 0


def is_live(group: ProcessGroup) -> bool:
    """Return whether the group has not been destroyed."""
    return group in _c10d._world.pg_map


def is_in_python(group: ProcessGroup) -> bool:
    """Return whether a group is an object of a Python class that has none of torch's backends."""
    return type(group) is not ProcessGroup and not group._device_types


def is_on_gloo(group: ProcessGroup) -> bool:
    """Return whether the group is one of torch's own class whose gloo backend sends CPU tensors."""
    return type(group) is ProcessGroup and "cpu:gloo" in backend_config(group).split(",")


def abort(group: ProcessGroup) -> None:
    """End the running collectives of a group, as far as its backends can."""
    # a group of a Python class may lack the method, or inherit one that refuses
    with suppress(AttributeError, NotImplementedError, RuntimeError):
        group.abort()


def group_ranks(group: ProcessGroup) -> dict[int, int]:
    """Return the map from global ranks to ranks in the group."""
    return _c10d._world.pg_group_ranks[group]


def group_by_name(name: str) -> ProcessGroup:
    """Return the live group of a name; raise RuntimeError if there is none."""
    # the stub lacks it
    resolve: Callable[[str], ProcessGroup] = getattr(_c10d, "_resolve_process_group")  # noqa: B009
    return resolve(name)


def full_backend_config(backend: str) -> str:
    """Return the text of `backend_config` for a backend that a user passes.

    The user passes `gloo`, `nccl`, `cpu:gloo,cuda:nccl` or the like.
    """
    return str(_c10d.BackendConfig(dist.Backend(backend)))


def backend_options(group: ProcessGroup) -> list[Any]:
    """Return the option object of each backend of a group, as far as the backend exposes it."""
    options = []
    for device in sorted(map(str, group._device_types)):
        try:
            options.append(group._get_backend(torch.device(device)).options)
        except (AttributeError, RuntimeError):
            # backends without options, devices without a backend
            continue
    return options


def new_group(
    ranks: Sequence[int], *, name: str, description: str, backend: str | None, options: Any | None
) -> ProcessGroup:
    """Make a process group over `ranks` (global, in group order); its members alone call this.

    The public `new_group(use_local_synchronization=True)` derives the name from the number of
    groups that this rank has. Members would derive different names if one of them belongs to more
    groups than the others, so the caller gives the name here.
    """
    world = _c10d._get_default_group()
    default_backend, store = _c10d._world.pg_map[world]
    backend = dist.Backend(backend or default_backend)
    bound = world.bound_device_id
    device_id = bound
    config = full_backend_config(str(backend))
    if device_id is not None and f"{device_id.type}:gloo" in config.split(","):
        # gloo exchanges through the host, so its group is not bound to a device
        device_id = None
    own_timeout = getattr(options, "_timeout", None)
    timeout = own_timeout or timeout_of_any(world) or default_timeout(backend)
    # If the default group is bound to a device, c10d makes the new group by splitting it. A split
    # is a collective of all ranks, and only the members call this function.
    world.bound_device_id = None
    try:
        group, _ = _c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(world.rank()),
            list(ranks),
            backend,
            store,
            _c10d.GroupName(name),
            backend_options=options,
            timeout=timeout,
            device_id=device_id,
            group_desc=description,
        )
    finally:
        world.bound_device_id = bound
    _c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return cast(ProcessGroup, group)


def timeout_of_any(group: ProcessGroup) -> dt.timedelta | None:
    """Return the timeout of the first backend of a group that has a timeout, or None.

    The groups of a mesh take the timeout of the default group.
    """
    for options in backend_options(group):
        timeout: dt.timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


# Collective -> (names of its methods with one output and one input, names of its methods with lists
# of outputs and inputs). The first name is the one that torch's own groups override. torch 2.13
# renamed three methods; torch's own groups have both names. A group that is written in Python has
# the old names, the new names, or only the methods with lists, which functional collectives call.
_CALLS = {
    "all_gather": (
        ("_allgather_base", "all_gather_single"),
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ),
    "reduce_scatter": (
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ),
    "all_to_all": (("alltoall_base", "all_to_all_single"), ()),
}


@cache
def call_of(cls: type[Any], name: str) -> Callable[..., Work]:
    """Return the function through which groups of a class run one of `_CALLS`.

    Its arguments are (group, output, input, further arguments). It is the method that the class
    overrides, or else torch's own method, which raises `BackendError` for a group without a
    backend.
    """
    single, many = _CALLS[name]
    method_of_torch: Callable[..., Work] = getattr(cls, single[0])
    for method_name in single + many:
        method: Any = getattr(cls, method_name, None)
        is_overridden = method is not getattr(ProcessGroup, method_name, None)
        if not is_overridden:
            continue
        if method_name in single:
            overriding: Callable[..., Work] = method
            return overriding
        return lambda group, output, source, *more: method(group, [output], [source], *more)
    if cls is ProcessGroup:
        return method_of_torch

    def of_its_backend(group: ProcessGroup, *arguments: Any) -> Work:
        if not group._device_types:
            raise BackendError(
                f"the process group {cls.__name__} does not have {name}: a group written in "
                f"Python needs one of the methods {', '.join(single + many)}"
            )
        return method_of_torch(group, *arguments)

    return of_its_backend


def in_backward() -> bool:
    """Return whether this thread is running the backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


# The number of the backward that this thread is running; -1 outside of backwards.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
# The number of the next autograd node that this thread creates.
number_of_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


def number_of_running_node() -> int | None:
    """Return the number of the autograd node that runs.

    Returns None for the node of a leaf, and if no node runs.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number: int = node._sequence_nr()
    # nodes of leaves have the largest numbers, so that they run first
    return None if number >= torch.iinfo(torch.int64).max else number


def without_importing_dynamo(mode: Class) -> Class:
    """Let the decorated dispatch mode run without an import of torch.compile.

    Torch imports all of torch.compile (six seconds) to exclude a mode from compilation. After
    another part of the program has imported torch.compile, torch excludes the mode as usual.
    """
    handler = cast(Any, mode).__torch_dispatch__
    raw = getattr(handler, "__wrapped__", None)
    if raw is None:
        # a torch that does not wrap
        return mode

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return raw(*args, **kwargs)
        del raw.__dict__["__dynamo_disable"]
        return handler(*args, **kwargs)

    # torch's wrapper calls the function in this attribute. Only if the attribute is missing, the
    # wrapper imports torch.compile and sets it.
    raw.__dict__["__dynamo_disable"] = call
    return mode


def group_of_op(args: tuple[Any, ...]) -> ProcessGroup | None:
    """Return the process group among the arguments of a c10d op, or None if there is none."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return None


def fake_store() -> Store:
    """Make a store for the fake backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# --- objects of a thread, which the threads of its backward passes have too -----------------------


# Absent before torch 2.13. A thread that still has an object when it ends takes the GIL to release
# it. At the end of the process that ends in std::terminate, and the process aborts.
_REMOVE: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)


def thread_object(key: str) -> Any:
    """Return the object that this thread holds under a name, or None.

    The threads of a backward pass hold the objects of the thread that called it.
    """
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_thread_object(key: str, value: Any) -> None:
    """Store an object of this thread under a name; None removes it."""
    # the compiler would trace this function, and look into the object and all that it refers to
    if torch.compiler.is_dynamo_compiling():
        _uncompiled(key, value)
        return
    if value is None and _REMOVE is not None:
        if torch._C._is_key_in_tls(key):
            _REMOVE(key)
        return
    if _stash_takes_over():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


_uncompiled: Callable[[str, Any], None] = _disable_dynamo(set_thread_object)


@cache
def _stash_takes_over() -> bool:
    """Return whether torch releases a stashed object that it has not counted a reference to.

    Torch 2.11 does.
    """
    key = "shoal_mesh.probe"
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    is_uncounted = sys.getrefcount(probe) == before
    if is_uncounted:
        # torch will release both: the probe in the next call, None at some later time
        for stashed in (probe, None):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(stashed))
    torch._C._stash_obj_in_tls(key, None)
    if _REMOVE is not None:
        _REMOVE(key)
    return is_uncounted


# --- backward passes ------------------------------------------------------------------------------


def run_at_end_of_backward(function: Callable[[], None]) -> None:
    """Have the running backward pass call a function when all gradients are computed."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# --- functions of c10d that create groups; the simulated ranks of `lab` replace them --------------


def c10d_function(name: str) -> Callable[..., Any]:
    """Return the function that c10d calls by a name."""
    function: Callable[..., Any] = getattr(_c10d, name)
    return function


def set_c10d_function(name: str, function: Callable[..., Any]) -> None:
    """Have c10d call another function by a name."""
    setattr(_c10d, name, function)


def note_backend(group: ProcessGroup, backend: str) -> None:
    """Have c10d report a backend for a group, in `get_backend` and in its configuration."""
    _, store = _c10d._world.pg_map[group]
    _c10d._world.pg_map[group] = (backend, store)
    _c10d._world.pg_backend_config[group] = str(_c10d.BackendConfig(dist.Backend(backend)))


def rendezvous_handlers() -> dict[str, Callable[..., Any]]:
    """Return the handlers of `init_method`, by the scheme of its address."""
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    handlers: dict[str, Callable[..., Any]] = rendezvous._rendezvous_handlers
    return handlers


def device_types() -> list[str]:
    """Return the device types of this build of torch: `cpu`, and its accelerators."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


# --- CUDA; the simulated ranks of `lab` may map it to the CPU -------------------------------------


def device_mesh_class() -> type:
    """Return torch's own class of device meshes."""
    mesh_class: type = sys.modules["torch.distributed.device_mesh"].DeviceMesh
    return mesh_class


def set_cuda_initialization(function: Callable[[], object]) -> None:
    """Have functions of `torch.cuda` that need a device call another function first."""
    torch.cuda._lazy_init = function
