"""`typecheck`: the block in which types are checked; with the public names of this module.

May import: runtime.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from shoal_dtensor.internal import spmd

from .runtime import local_map as local_map, no_typecheck as no_typecheck

SpmdTypeMode = spmd.Checker
is_type_checking = spmd.is_type_checking


def typecheck(
    strict_mode: str | None = None, *, local: bool | None = None
) -> AbstractContextManager[None]:
    """Return a block in which the types of operators are checked.

    Args:
        strict_mode: the treatment of an operator with some operands that have no type. "strict": an
            error; "permissive": the results have no type. None keeps the mode of the enclosing
            block; outside of a block it is strict.
        local: True checks R, I, V and P only: every rank computes on its own tensors (local mode).
            False also checks that shards S(i) stay shards of the tensors of one process (global
            mode). None keeps the setting of the enclosing block; outside of a block it is True.

    Returns:
        The block. It may be nested, to change the settings inside.

    Raises:
        SpmdTypeError: for another mode; and in the block, for operators whose operands have types
            that cannot be combined.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck(local=False):
        ...     x = assert_type(torch.zeros(4, 2), {"tp": S(1)})
        ...     w = assert_type(torch.zeros(2, 3), {"tp": S(0)})
        ...     get_local_type(x @ w)
        {tp: P}
    """
    return spmd.typecheck(strict_mode, local=local)
