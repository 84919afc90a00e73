"""What a function of ShardedTensors does: the first of these that applies.

1. the user's override of the function, ``custom_sharded_op_impl``;
2. the user's override for the class of the spec, ``custom_sharding_spec_op``;
3. the table at the end of handlers.py: metadata, work on each shard, refusals;
4. shard by shard, if the function is pointwise and a layout has no placements;
5. embedding and embedding_bag with plain indices, lookup.py;
6. by way of DTensors, via_dtensor.py.  Results without dims are plain tensors, others ShardedTensors: a replicated or
   partial result is sharded like an argument of its shape, else along dim 0.

A layout without placements (several shards on a rank, no grid) is refused in 6, or moved inside ``implicit_reshard()``.
The class ShardedTensor is an argument here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch import tree_leaves
from ..errors import UnsupportedOpError
from ..spec.sharding_spec import CustomOp, override_of, overriding
from .handlers import HANDLERS
from .lookup import LOOKUPS, look_up
from .via_dtensor import DTensorCall


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[CustomOp], CustomOp]:
    """A decorator that registers a function in place of ``func`` for arguments that include a ShardedTensor.

    The decorated function is called with ``(types, args, kwargs, process_group)``.

    Args:
        func: A function of torch, or a method of torch.Tensor.

    Raises:
        ArgumentTypeError: ``func``, or the decorated function, is not callable.

    Example:
        >>> @custom_sharded_op_impl(torch.asin)
        ... def asin(types, args, kwargs, process_group): ...
    """
    return overriding("custom_sharded_op_impl", None, func)


_sharded_op_impl = custom_sharded_op_impl  # the name of torch for its own ops


def run(
    cls: Any, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Result of ``func``, some of whose arguments are ShardedTensors; all ranks call it.

    Raises:
        UnsupportedOpError: The function is not defined on a ShardedTensor, or its arguments are on several groups.
        NotExpressibleError: A layout has no placements, and the function is not pointwise.
    """
    tensors = list({id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)}.values())
    override = override_of(tensors[0].sharding_spec(), func) if tensors else None
    if override is not None:
        return override(types, args, kwargs, tensors[0].process_group)
    if func in HANDLERS:
        return HANDLERS[func](cls, func, args, kwargs)
    name = getattr(func, "__name__", func)
    if not tensors:
        raise UnsupportedOpError(f"{name} has no ShardedTensor with a process group among its arguments")
    if any(each.process_group is not tensors[0].process_group for each in tensors):
        raise UnsupportedOpError(f"{name} has ShardedTensors of different process groups among its arguments")
    call = DTensorCall(cls, func, tensors)
    return look_up(call, args, kwargs) if func in LOOKUPS else call.run(args, kwargs)
