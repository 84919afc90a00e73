"""Plain tensors among DTensors, which may count as replicated if all ranks agree.

Torch's composite operators and gradient formulas pass tensors of their own to an operator together
with DTensors: zeros, ranges, masks. The facts that a rank observes about such a tensor (the
references to it, the caller of the operator) only make it a candidate. The ranks agree in one small
collective: the tensor counts as replicated if it is a candidate on every rank and has the same
values on every rank; otherwise every rank raises an error.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import getargvalues
from itertools import dropwhile, takewhile
from traceback import walk_stack
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.hooks import unserializable_hook

from shoal_mesh import DeviceMesh, purpose

from .. import crossings
from .._torch.compiling import has_unrecorded
from .._torch.operators import OpOverload
from .._torch.tensors import (
    TRACED,
    FakeTensor,
    current_node,
    disabled_torch_function,
    in_backward,
    make_wrapper,
    pytree,
)
from ..errors import MixedTensorError, NoRuleError
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten
from ..rows_of_ranks import extremes_of_ranks
from ..rules.language.op_call import schema_of
from ..scopes import current, notice_of
from .global_call import mesh_of


class Plain(NamedTuple):
    """A plain tensor among the arguments, as part of a key."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    # whether it has one element, or may be torch's own
    candidate: bool


def _elements_spanned(tensor: torch.Tensor) -> int:
    """Return the number of places in storage from the first to the last element of a tensor.

    For a DTensor, this is the number for the global tensor on one device.
    """
    if not tensor.numel():
        return 0
    # Example: shape (2, 3) with strides (8, 2) spans 1 + 1 * 8 + 2 * 2 = 13 places.
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    distances = [(size - 1) * stride for size, stride in steps]
    return 1 + sum(distances)


# Operators that only read shapes or local memory. Plain tensors among their arguments need not be
# replicated, and nothing is sent. Forward AD calls the first two.
OF_SHAPES: Mapping[Any, Any] = {
    torch.ops.aten.is_same_size.default: lambda one, other: one.shape == other.shape,
    torch.ops.aten._has_same_storage_numel.default: lambda *pair: (
        len({*map(_elements_spanned, pair)}) == 1
    ),
    torch.ops.aten.is_pinned.default: lambda x, *device: x._local_tensor.is_pinned(),
    torch.ops.aten._pin_memory.default: lambda x, *device: type(x)(
        x._local_tensor.pin_memory(), x._spec
    ),
}


def verify_replicated(
    mesh: DeviceMesh, operation: str, tensors: Sequence[torch.Tensor], *, candidates: bool
) -> None:
    """`R -> check`: refuse plain tensors, unless they are equal candidates on all ranks.

    Values that do not exist yet (while tracing) are not compared; tensors on the meta device do not
    have values and pass. `operation` is the operator; `candidates` is True if this rank takes all
    of the tensors for candidates. The MixedTensorError is raised on every rank.
    """
    if all(tensor.is_meta for tensor in tensors):
        return
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    is_unknown = any(isinstance(tensor, TRACED) or tensor.is_meta for tensor in tensors)
    is_alone = is_unknown or mesh.size() == 1 or mesh.get_coordinate() is None
    if not candidates and (is_alone or current().communication == "forbid"):
        raise MixedTensorError(_text_of_mixed_tensors(operation, shapes))
    if is_alone:
        return
    need = (
        f"  an all-reduce, by which the ranks compare a plain tensor of shape {shapes} that torch "
        "made"
    )
    notice = notice_of(operation, [need], current())
    if notice:
        warnings.warn(notice, stacklevel=2)
    digest = digest_of(tensors, mesh.device_type)
    numbers = torch.stack([digest, torch.full_like(digest, candidates)])
    about = f"{operation} with a plain tensor of shape {shapes}"
    with purpose(f"{operation}: comparison of plain tensors"):
        (lowest, highest), (accepted, _) = extremes_of_ranks(mesh, lambda: about, numbers)
    if not accepted:
        raise MixedTensorError(_text_of_mixed_tensors(operation, shapes))
    if lowest != highest:
        raise MixedTensorError(
            f"{operation} got DTensors together with a plain tensor of shape {shapes} whose values "
            f"differ between the ranks of {mesh}, so it is not replicated. {_way_out()}"
        )


def _way_out() -> str:
    """Return advice for plain tensors that differ between ranks."""
    if in_backward():
        return (
            "Hooks and autograd functions must return DTensors as gradients of DTensors: wrap "
            "their results with DTensor.from_local and its placements"
        )
    return (
        "It was made inside a function of torch, either from a plain argument, which must be a "
        "DTensor, or from random numbers, which need equal generators on all ranks "
        "(check_random_state)"
    )


# Operators that are mostly called by a function of torch that a function of this package replaces,
# by the start of the operator's name.
_CLIP = "; for gradients of both kinds or of several meshes, shoal_dtensor.clip_grad_norm_"
_INSTEAD = {
    **dict.fromkeys(("mul_.Tensor", "_foreach_mul_", "_foreach_norm", "stack"), _CLIP),
    "copy_": "; to load full tensors, shoal_dtensor.set_model_state_dict(model, state_dict, "
    "options=StateDictOptions(full_state_dict=True))",
    "_transformer_encoder_layer_fwd": "; parallelize the TransformerEncoderLayer, not its children "
    "one by one: a layer with a plan computes without the kernel that fuses it",
    # The constructor of DistributedDataParallel joins all parameters to one flat tensor.
    "cat.default": (
        "; for DistributedDataParallel of a module with both kinds, shoal_data_parallel.replicate"
    ),
}


def instead(operation: str) -> str:
    """Return advice to call another function than the one that calls an operator; often empty."""
    for start, advice in _INSTEAD.items():
        if operation.startswith(f"aten.{start}"):
            return advice
    return ""


def _text_of_mixed_tensors(operation: str, shapes: str) -> str:
    """Return the text of the error for a plain tensor among DTensors."""
    replicated = (
        ", or call it inside implicit_replication(), which treats plain tensors as replicated"
    )
    if operation.startswith("aten.copy_"):
        replicated = ""
    return (
        f"{operation} got DTensors together with a plain tensor of shape {shapes}; make it a "
        f"DTensor with distribute_tensor or DTensor.from_local{replicated}; a parameter of "
        "fully_shard is gathered by calling its module or unshard(), and full_tensor() returns its "
        f"values{instead(operation)}"
    )


def digest_of(tensors: Sequence[torch.Tensor], device: str) -> torch.Tensor:
    """Return a digest of 62 bits of shapes, dtypes and every bit of the values, on a device."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        digest = _digest_of_one(tensor)
        on_device = digest if digest.device.type == device else digest.item()
        total = _scramble(total + on_device)
    return total >> 2


def _digest_of_one(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of 64 bits of shape, dtype and every bit of a tensor, on its device."""
    plain = tensor.detach()
    if tensor.layout is not torch.strided:
        plain = plain.to_dense()
    dense = plain.resolve_conj().resolve_neg().contiguous()
    description = f"{tuple(dense.shape)}{dense.dtype}".encode()
    start = hashlib.blake2b(description, digest_size=7).digest()
    digest = torch.full((), int.from_bytes(start, "little"), device=dense.device)
    # a dim of one element may have any stride
    flat = dense.as_strided((dense.numel(),), (1,))
    for block in torch.split(flat.view(torch.uint8), _DIGESTED):
        # Padding returns a copy, which is aligned for a view as int64.
        padded = torch.constant_pad_nd(block, (0, -len(block) % 8))
        words = padded.view(torch.int64)
        positions = torch.arange(len(words), device=words.device)
        scrambled = _scramble(words + _scramble(positions))
        digest = _scramble(digest + scrambled.sum())
    return digest


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """Scramble integers of 64 bits, with the constants of splitmix64."""
    x = (x + _GOLDEN) * _FIRST
    x = (x ^ (x >> 29)) * _SECOND
    return x ^ (x >> 32)


_DIGESTED = 1 << 24  # bytes that are digested at once
# odd integers of 64 bits, written as signed numbers
_GOLDEN = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


# They overwrite their first argument, whose memory torch may have left uninitialized.
_OVERWRITING = frozenset({torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor})


def verify_plain(
    cls: type, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, candidates: bool
) -> None:
    """`R -> check`: apply `verify_replicated` to the plain tensors that an operator reads.

    Tensors of `out=` and overwritten tensors are not checked.
    """
    outs = schema_of(op).outs
    read = [*args[1:]] if op in _OVERWRITING else [*args]
    read += [value for name, value in kwargs.items() if name not in outs]
    plain = [tensor for tensor in flatten(read) if not isinstance(tensor, cls) and tensor.ndim]
    verify_replicated(mesh_of(cls, args, kwargs), str(op), plain, candidates=candidates)


def note_gradient(tensor: torch.Tensor) -> None:
    """Note a plain tensor that requires a gradient, among DTensors of a forward or a backward.

    In a forward, its gradient will be delivered plain. In a backward, a formula of torch computes
    the gradient of a DTensor from it: it was a factor of the DTensor, for example.
    """
    if torch.is_grad_enabled():
        keep_gradient_plain(tensor)
    if not tensor.ndim and in_backward():
        crossings.check_factor(current_node(), tensor)


def keep_gradient_plain(tensor: torch.Tensor) -> None:
    """`P or S -> R`: deliver the gradient of a replicated plain tensor whole and plain."""
    # Formulas of torch compute the gradient from DTensors. The code that receives it (an
    # optimizer's step, the module that made the tensor, the mean over data-parallel ranks) expects
    # the gradient of a plain tensor.
    if tensor._backward_hooks is None or _as_plain not in tensor._backward_hooks.values():
        tensor.register_hook(_as_plain)  # type: ignore[no-untyped-call]  # of torch


@unserializable_hook  # type: ignore[untyped-decorator]  # of torch
def _as_plain(grad: Any) -> Any:
    """Return the whole gradient for a plain tensor that is treated as replicated."""
    if not hasattr(grad, "_spec"):
        return grad
    node = current_node()
    spec = grad._spec
    _check_takes_whole(node, spec)
    with purpose("the gradient of a plain tensor that is treated as replicated"):
        whole = grad.full_tensor()
    return crossings.leave(node, whole, spec.all_replicated())


def _check_takes_whole(node: Any, spec: Spec) -> None:
    """Refuse a whole gradient for a plain tensor that takes a share of it from each rank.

    The tensor's values cannot show this, but its autograd history can. The history is followed up
    to an autograd function whose backward counts the share of each rank, such as `to_local()` of a
    shard. The `gradient_shares` of this function are the global ranks that contribute a share; they
    are empty if it passes its input on, and None if it takes a whole gradient. All ranks have the
    same history, so all raise.
    """
    for below in crossings.nodes_below(node, lambda below: _shares_of(below) != ()):
        shares = _shares_of(below)
        ranks_with_shares = {*(shares or ())}.intersection(spec.mesh.ranks)
        if len(ranks_with_shares) > 1:
            raise MixedTensorError(
                f"a plain tensor of shape {tuple(spec.shape)} was combined with DTensors on "
                f"{spec.mesh} as if it were replicated, but it is local to a rank: {below.name()} "
                f"adds a share of its gradient from each of the ranks {shares}, and each of them "
                "would pass the whole gradient. Use DTensors up to there (use_local_output=False "
                "in a style, no to_local()), or leave implicit_replication()"
            )


def _shares_of(node: Any) -> Sequence[int] | None:
    """Return the ranks that a node takes gradient shares from; `()` if it passes gradients on.

    Return None if it takes a whole gradient, or does not declare `gradient_shares`.
    """
    function = getattr(node, "_forward_cls", None)
    if function is None:
        # a node of torch's own
        return ()
    gradient_shares = getattr(function, "gradient_shares", None)
    shares: Sequence[int] | None = gradient_shares and gradient_shares(node)
    return shares


class _Outermost(threading.local):
    """The torch function that this thread is in, while a dispatch mode observes its operators."""

    # its positional and keyword arguments; None outside of such functions
    arguments: tuple[Any, Any] | None = None


_outermost = _Outermost()


def mark_outermost(
    function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Run a torch function as `__torch_function__`; plain tensors made inside are candidates.

    Torch calls it for the outermost function alone.
    """
    outside = _outermost.arguments
    _outermost.arguments = args, kwargs
    try:
        return disabled_torch_function(function, types, args, kwargs or {})
    finally:
        _outermost.arguments = outside


def is_made_inside(tensor: torch.Tensor) -> bool:
    """Tell whether the outermost torch function made a tensor, rather than received it."""
    arguments = _outermost.arguments
    # hooks of the user run inside of `backward`
    if arguments is None or in_backward():
        return False
    return all(leaf is not tensor for leaf in pytree.tree_leaves(arguments))


def is_candidate(cls: type, tensor: torch.Tensor) -> bool:
    """Tell whether torch itself may have made a plain tensor.

    A candidate was made inside an operator or inside a torch function that calls it, or is a
    gradient.

    Call it on the parameter of a function that got it from a loop over arguments: references are
    counted. A tensor that requires a gradient was computed from a user's tensor, though torch may
    have copied that (`matmul` of 4 dims does).
    """
    if tensor.requires_grad and torch.is_grad_enabled() and not in_backward():
        return False
    if _outermost.arguments is not None and not in_backward():
        return not _has_plain(cls, _outermost.arguments)
    if sys.getrefcount(tensor) == _references_of_temporary():
        base = tensor._base
        if base is None or sys.getrefcount(base) == _BASE_REFERENCES:
            return True
    is_gradient = in_backward() and not isinstance(tensor, FakeTensor)
    return is_gradient or _composed_by_torch(cls, tensor)


def _references_of_base() -> int:
    """Measure the references to the base of a view, held in a variable, with no other reference."""
    view = torch.ones(2, device="cpu").view(2)
    base = view._base
    return sys.getrefcount(base)


# measured at import, because inside a dispatch views do not expose their base
_BASE_REFERENCES = _references_of_base()


class _Probe(torch.Tensor):
    """A tensor that is indexed in order to count the references to an index that torch makes."""

    __torch_function__ = disabled_torch_function
    counted: ClassVar[list[int]] = []

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub describes the bound form
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def count(tensor: torch.Tensor) -> None:
            cls.counted.append(sys.getrefcount(tensor))

        # Passes the tensor on like the caller of `is_candidate`, so that references are equal.
        def read(arg: torch.Tensor) -> None:
            count(arg)

        for index in args[1]:
            read(index)
        return args[0]


def _references_of_temporary() -> int:
    """Measure the references that `is_candidate` counts to a temporary tensor of torch's C++ code.

    Measuring takes 8 us. It is necessary because tracers hold more references.
    """
    make_wrapper(_Probe, (2,))[[0]]
    return _Probe.counted.pop() if _Probe.counted else -1


# Frames are read, because torch's public hook for functions, `__torch_function__`, would take 1.8
# us of each call (`MarkWhileWatched`). They are read for plain tensors among DTensors alone.
# Modules of torch whose functions compose operators in Python. They do not contain modules or
# optimizers that hold tensors, so such a function has made every tensor that is not one of its
# arguments.
_COMPOSING = frozenset(
    {
        "torch._jit_internal", "torch._linalg_utils", "torch._lowrank", "torch.functional",
        "torch.masked._ops", "torch.nn.functional", "torch.nn.modules.linear_cross_entropy",
    }
)  # fmt: skip
_PACKAGE = __name__.rpartition(".")[0]

# Functions of these modules that set an argument which was left out: (function, argument).
_SET_INSIDE = frozenset({("embedding_bag", "offsets")})


def _composed_by_torch(cls: type, tensor: torch.Tensor) -> bool:
    """Tell whether a Python function of torch without plain tensor arguments calls the operator."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    callers = dropwhile(
        lambda frame: (
            _module(frame).startswith(_PACKAGE) or frame.f_code.co_name == "__torch_dispatch__"
        ),
        frames,
    )
    # Plain tensors that the outermost of these functions passes on were made by it or by its
    # arguments.
    composing = [*takewhile(lambda frame: _module(frame) in _COMPOSING, callers)]
    if not composing:
        return False
    outermost = composing[-1]
    names, varargs, keywords, values = getargvalues(outermost)
    function = outermost.f_code.co_name
    all_names = [name for name in (*names, varargs, keywords) if name in values]
    arguments = [values[name] for name in all_names if (function, name) not in _SET_INSIDE]
    return not _has_plain(cls, arguments)


def _has_plain(cls: type, arguments: Any) -> bool:
    """Tell whether the arguments of a function contain plain tensors with dims."""
    for leaf in pytree.tree_leaves(arguments):
        is_plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls)
        if is_plain and leaf.ndim:
            return True
    return False


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def check_recorded(operation: str, *shards: torch.Tensor) -> None:
    """Refuse an operator if a recorder would record a shard's present values as a constant."""
    if has_unrecorded(shards):
        raise NoRuleError(
            f"{operation} of a DTensor while torch.fx records operators (torch.func.linearize, "
            "make_fx): the current values would become constants of the record. Pass local "
            "tensors to make_fx and convert them to DTensors inside, with DTensor.from_local; or "
            "use torch.compile, or torch.func.jvp"
        )
