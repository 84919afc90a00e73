"""Hooks into torch: modes, operators on a tensor class, state dicts, and recomputation in scopes.

A function that `torch.utils.checkpoint` runs inside scopes is run again in backward, after the
blocks of the scopes have ended; the scopes are then entered again. For this, the function is
replaced in the object that the checkpoint keeps for the recomputation. Frames of the first run
refer to this object in both kinds of checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from importlib.util import find_spec
from inspect import unwrap
from pickle import UnpicklingError
from traceback import walk_stack
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction as CheckpointFunction

from .tensors import INTERCEPTED

_COMPILED = ("cond", "while_loop", "scan", "map")
# Autograd's keys of the devices that meshes are on, and of tensors without memory.
_AUTOGRAD = tuple(
    f"Autograd{device}" for device in ("CPU", "CUDA", "XPU", "HPU", "PrivateUse1", "Meta")
)
# The operators with function arguments that torch's compiler traces with fake tensors.
_TRACED = ("associative_scan", "cond", "map_impl", "scan", "while_loop")
# functions of torch's compiler that return addresses of tensors
_ADDRESSES = ("unsafe_alloc_void_ptr_from_tensor", "unsafe_alloc_void_ptrs_from_tensors")
# Torch drops the registrations of a library when the library is freed, so it is kept here.
_LIBRARIES: list[torch.library.Library] = []


def register_dispatch(
    cls: type[torch.Tensor], run: Callable[..., Any], names: Sequence[str] | None = None
) -> None:
    """Make torch call `run(cls, op, types, args, kwargs)` for operators on tensors of a class.

    Subclasses are not included. `names` are the operators; the default is all operators of aten and
    the operators that take functions, such as `cond`. For an operator that takes functions, `run`
    gets its name, in some cases before torch compiles the functions.

    The class's `__torch_dispatch__` alone would do the same, but torch would first check whether
    the class is its own DTensor. For this check it imports that class and sympy; the import takes
    half a second. The registration takes 10 ms. Operators with `out=`, a third of all operators,
    are left out.
    """
    library = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch
    for name in torch._C._dispatch_get_all_op_names() if names is None else names:
        if name.startswith("aten::") and "out" not in name.partition(".")[2]:
            torch.library.register_torch_dispatch(name, cls, run, lib=library)
    _LIBRARIES.append(library)
    if names is None:
        for name, operator in torch._ops._higher_order_ops.items():
            operator.py_impl(cls)(
                lambda *args, _name=name, **kwargs: run(cls, _name, (cls,), args, kwargs=kwargs)
            )
        utils: Any = torch._higher_order_ops.utils
        # Torch 2.11 does not have this function.
        compiled: Any = getattr(utils, "_hop_compile_and_call", None)

        def before_compiling(fn: Any, args: Any, kwargs: Any = None) -> Any:
            """Run `torch.cond` and similar operators outside of compiled functions."""
            name = next((name for name in _COMPILED if name in fn.__name__), None)
            leaves = torch.utils._pytree.tree_leaves(args) if name else []
            if any(isinstance(leaf, cls) for leaf in leaves):
                return run(cls, name, (cls,), args, kwargs=kwargs)
            return compiled(fn, args, kwargs)

        if compiled is not None:
            utils._hop_compile_and_call = before_compiling
        for name in _TRACED:
            if name in torch._ops._higher_order_ops:
                _trace_by(cls, run, name)


def _trace_by(cls: type[torch.Tensor], run: Callable[..., Any], name: str) -> None:
    """Make the compiler call `run` for operators that take functions, on tensors of this class."""
    table: Any = torch._ops._higher_order_ops[name].python_key_table
    trace = table.get(FakeTensorMode)

    def trace_others(mode: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, cls) for leaf in leaves):
            return run(cls, name.removesuffix("_impl"), (cls,), args, kwargs=kwargs)
        return trace(mode, *args, **kwargs)

    if trace is not None:
        table[FakeTensorMode] = trace_others


def keep_whole(names: Sequence[str]) -> None:
    """Keep composite operators without derivatives, by their names, whole for tensor classes.

    Autograd would first replace such an operator by its parts. From the parts a class cannot
    recognize the operator that was called: the parts of `one_hot` do not compare indices with the
    number of classes. Without autograd, plain tensors use the same kernel as before.
    """
    make_library: Any = torch.library.Library
    library = make_library("aten", "FRAGMENT")
    for name in names:
        for key in _AUTOGRAD:
            # A copy of this package inside another package may have registered it already.
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                library.impl(name, torch.library.fallthrough_kernel, key)
    _LIBRARIES.append(library)


# --- inner functions of torch.distributed.checkpoint.state_dict -----------------------------------

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"


def around_state_dicts(get: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Read state dicts by `get(original, *args)`; load by `load(original, original_get, *args)`.

    The first of `args` is the model, and the last one is torch's record of the options. For a load,
    the state dict precedes the options. The module takes a second to import, so it is wrapped when
    a program imports it.
    """

    def wrap(api: Any) -> None:
        for kind in ("model", "optim"):
            reader = f"_get_{kind}_state_dict"
            loader = f"_load_{kind}_state_dict"
            original_get = getattr(api, reader)
            original_load = getattr(api, loader)
            setattr(api, reader, partial(get, original_get))
            setattr(api, loader, partial(load, original_load, original_get))

    call_after_import(_STATE_DICTS, wrap)


def call_after_import(name: str, function: Callable[[Any], None]) -> None:
    """Call a function with a module: now if the module is imported, otherwise after its import."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport(NamedTuple):
    """Finder of one module that calls a function on the module once Python has loaded it."""

    module: str
    function: Callable[[Any], None]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            self.function(module)

        spec.loader.exec_module = execute_and_patch  # of this loader, made for this import
        return spec


# --- functions in C that read memory --------------------------------------------------------------


def guard_memory_exports(cls: type[torch.Tensor], refuse: Callable[[Any], Any]) -> None:
    """Make torch's functions that export tensor memory call `refuse` for tensors of a class.

    These functions are builtins without dispatch: they would export or return the null pointer of
    a wrapper, and the first read of it ends the process.
    """
    places: list[tuple[Any, str]] = [
        (torch._C, "_to_dlpack"),
        (torch._C, "_to_dlpack_versioned"),
        (torch._C, "_pickle_save"),
        (torch._C, "_data_address"),
    ]
    # Compiled code passes tensors on by their addresses.
    aoti = getattr(torch._C, "_aoti", None)
    places += [(aoti, name) for name in _ADDRESSES if hasattr(aoti, name)]
    refusing: dict[int, Callable[..., Any]] = {}
    for owner, name in places:
        function = getattr(owner, name)
        refusing[id(function)] = _with_refusal(function, cls, refuse)
        setattr(owner, name, refusing[id(function)])
    _replace_in_modules(refusing)


def _replace_in_modules(replacements: Mapping[int, Callable[..., Any]]) -> None:
    """Replace functions, given by `id`, in all modules that have imported them.

    Programs write `from torch.utils.dlpack import to_dlpack` before they make their first DTensor.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        found = [name for name, value in [*names.items()] if id(value) in replacements]
        for name in found:
            setattr(module, name, replacements[id(names[name])])


def _with_refusal(
    function: Callable[..., Any], cls: type[torch.Tensor], refuse: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return `function`, preceded by calls of `refuse` for each tensor of `cls` in its argument."""

    @wraps(function)
    def export(value: Any, *args: Any, **options: Any) -> Any:
        # some of the functions take containers with tensors
        for leaf in tree_leaves(value):
            if isinstance(leaf, cls):
                refuse(leaf)
        return function(value, *args, **options)

    return export


def explain_weights_only(prefix: str, way_out: str) -> None:
    """Add a remedy to torch's error about a file with classes from modules with a prefix."""
    unpickler = torch._weights_only_unpickler.Unpickler
    original: Callable[..., Any] = unpickler.load

    @wraps(original)
    def load(self: Any) -> Any:
        try:
            return original(self)
        except UnpicklingError as error:
            if f"GLOBAL {prefix}" not in str(error):
                raise
            raise UnpicklingError(f"{error} {way_out}") from None

    unpickler.load = load  # type: ignore[method-assign]  # of all readers of files


# --- copies of state dicts that torch.distributed.checkpoint stages and offloads ------------------


def around_staging(copy: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """Make torch's copies of state dicts handle tensors of another library.

    Torch's stager and its helpers recognize tensors without memory by a null pointer, and torch's
    DTensor by its class.

    Args:
        copy: called as `copy(original, stager, tensor, memo, **options)` for every tensor to stage.
        apply: called as `apply(original, value, gathers, *args, **options)` for every value in a
            state dict that a helper walks over; `gathers` where it gathers torch's DTensors.
    """

    def wrap_stager(module: Any) -> None:
        stager = module.StateDictStager
        original = stager._offload_tensor

        @wraps(original)
        def offload_tensor(self: Any, x: Any, memo: Any, **options: Any) -> Any:
            return copy(original, self, x, memo, **options)

        stager._offload_tensor = offload_tensor

    def wrap_helpers(module: Any) -> None:
        original = module._iterate_state_dict

        @wraps(original)
        def iterate(value: Any, shards: Any, dtensors: Any, tensors: Any, **options: Any) -> Any:
            gathers = dtensors.__qualname__.startswith("_gather_state_dict.")
            return apply(original, value, gathers, shards, dtensors, tensors, **options)

        # the function calls itself by this name
        module._iterate_state_dict = iterate

    call_after_import("torch.distributed.checkpoint._state_dict_stager", wrap_stager)
    call_after_import("torch.distributed._state_dict_utils", wrap_helpers)


# --- modes for torch functions --------------------------------------------------------------------


def _copy_without_modes(source: Any) -> Callable[..., Any]:
    """Return a copy of a torch function that no mode observes, though modes observe its callees."""
    # The copy does not look for modes or tensor classes that handle the function.
    checks = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda _: False)
    unobserved = FunctionType(
        source.__code__,
        source.__globals__ | checks,
        source.__name__,
        source.__defaults__,
        source.__closure__,
    )
    unobserved.__kwdefaults__ = source.__kwdefaults__
    return unobserved


_BACKWARD = {
    f: _copy_without_modes(f)
    for f in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


class FunctionMode(TorchFunctionMode):
    """A mode that stays active in backward passes, which may recompute forwards.

    Torch deactivates a mode while it handles a function, so this mode activates itself again for
    the functions that run a backward pass.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unobserved = _BACKWARD.get(func)
        if unobserved is None:
            return func(*args, **kwargs)
        subclass = next((cls for cls in types if cls is not torch.Tensor), None)
        with self:
            if subclass is not None:
                return subclass.__torch_function__(func, types, args, kwargs)
            return unobserved(*args, **kwargs)


_active: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack


class ReplacedAttention(FunctionMode):
    """Replacement of `F.scaled_dot_product_attention` in a block, and in recomputations of it."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self._attend = attend
        # for each time that the mode was entered, the checkpoints that were running then
        self._outside: list[list[Any]] = []

    def __enter__(self) -> Self:
        self._outside.append(checkpoints())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: Any) -> None:
        self._outside.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here

    @classmethod
    def active(cls) -> list[Self]:
        """Return the active modes of this class, the innermost first.

        They will also be active when backward recomputes the caller.
        """
        modes = [mode for mode in reversed(_active()) if isinstance(mode, cls)]
        for mode in modes:
            mode.hold_in_recomputation()
        return modes

    def hold_in_recomputation(self) -> None:
        """Stay active when backward recomputes the calls that a checkpoint makes in this block."""

        def enter_once() -> AbstractContextManager[object]:
            return nullcontext() if self in _active() else self

        recomputed_in(self, enter_once, self._outside[-1])

    def _run_replaced(self, args: Any, kwargs: Any) -> Any:
        self.hold_in_recomputation()
        return self._attend(*args, **kwargs)

    # Compiled code has a graph break here, because the attention depends on the settings of its
    # block and on its layout.
    _replaced_in_graphs: ClassVar[Any] = _disable_dynamo(_run_replaced)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            compiling = torch.compiler.is_compiling()
            replaced = (
                ReplacedAttention._replaced_in_graphs
                if compiling
                else ReplacedAttention._run_replaced
            )
            return replaced(self, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


# --- recomputation in the scopes of the first run -------------------------------------------------

Enter = Callable[[], AbstractContextManager[object]]

# torch has no public hook at the begin of a recomputation, and programs call torch's `checkpoint`
# themselves. Therefore the frames are read of the functions that refer to the object with the
# function to recompute, for the two kinds of checkpoint. From torch 2.14 on, `checkpoint` calls an
# inner function for the second kind.
_REENTRANT = CheckpointFunction.forward.__code__
_NON_REENTRANT = unwrap(
    getattr(torch.utils.checkpoint, "_checkpoint_impl", torch.utils.checkpoint.checkpoint)
).__code__


class _InScopes(NamedTuple):
    """A function that runs in scopes, each entered by the function that is stored for it."""

    function: Callable[..., Any]
    scopes: dict[Hashable, Enter]

    def __call__(self, *args: Any) -> Any:
        with ExitStack() as stack:
            for enter in self.scopes.values():
                stack.enter_context(enter())
            return self.function(*args)


def checkpoints() -> list[Any]:
    """Return the records of the checkpoints that now run a function, the innermost first.

    A record is the object from which backward recomputes the function. Recomputations do not count,
    and the list is empty while compiling.
    """
    if torch.compiler.is_compiling():
        return []
    running: list[Any] = []
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code is _REENTRANT:
            running.append(frame.f_locals["ctx"])
        elif frame.f_code is _NON_REENTRANT and "gen" in frame.f_locals:
            record = frame.f_locals["gen"].gi_frame.f_locals.get("new_frame")
            # Without gradients there is no record.
            running += [] if record is None else [record]
    return running


def recomputed_in(scope: Hashable, enter: Enter, outside: Collection[object]) -> None:
    """Make recomputations of the functions that checkpoints now run enter a scope by `enter`.

    `outside` are the checkpoints around the scope's block; their functions enter it themselves.
    """
    for record in checkpoints():
        if any(record is other for other in outside):
            continue
        # the attribute of the reentrant kind, or of the other kind
        name = "run_function" if hasattr(record, "run_function") else "recompute_fn"
        function = getattr(record, name)
        if not isinstance(function, _InScopes):
            function = _InScopes(function, {})
            setattr(record, name, function)
        function.scopes.setdefault(scope, enter)


# --- autograd functions ---------------------------------------------------------------------------

_Handler = Callable[[type[torch.autograd.Function], Callable[..., Any], tuple[Any, ...]], Any]


@contextmanager
def intercept_autograd_functions(handler: _Handler) -> Iterator[None]:
    """Call `handler(function, apply, args)` for autograd functions while the block is open.

    Torch's modes do not observe autograd functions. `Function.apply` is replaced while any thread
    is in such a block, so the handler must check whether its own thread is in one.
    """

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # torch 2.15 defines the class method in C
        run = partial(_APPLY.__get__(None, cls), **kwargs)
        return handler(cls, run, args) if INTERCEPTED else run(*args)

    if not INTERCEPTED:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]  # a wrapper
    INTERCEPTED.append(handler)
    try:
        yield
    finally:
        INTERCEPTED.pop()
        if not INTERCEPTED:
            torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]  # restored


_APPLY: Any = torch.autograd.Function.__dict__["apply"]
