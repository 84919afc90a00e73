"""How a dim of a state is sharded, as small integers.

A token is three times the mesh axis plus where its sizes come from: `CHUNK` (like torch.chunk), `AS_SRC` or `AS_DST`
(explicit sizes of that spec).  Equal tuples of tokens are equal shardings, a prefix is a coarser one.
"""

from __future__ import annotations

from collections.abc import Iterable

Tokens = tuple[int, ...]
Dims = tuple[Tokens, ...]

CHUNK, AS_SRC, AS_DST = 0, 1, 2


def mask_of(tokens: Iterable[int]) -> int:
    """The axes of some tokens as bits.

    Example:
        >>> mask_of((0, 7))  # axes 0 and 2
        5
    """
    mask = 0
    for token in tokens:
        mask |= 1 << token // 3
    return mask


def shared(old: Tokens, new: Tokens) -> int:
    """Number of outer axes that two shardings of a dim have in common.

    Example:
        >>> shared((0, 3), (0, 6))
        1
    """
    length = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        length += 1
    return length


def valid_tokens(tokens: Tokens, old: Tokens, new: Tokens) -> Tokens:
    """Tokens with explicit sizes only where everything outside them is as those sizes assume."""
    for i, token in enumerate(tokens):
        if token % 3 != CHUNK and tokens[: i + 1] not in (old[: i + 1], new[: i + 1]):
            return valid_tokens((*tokens[:i], token // 3 * 3, *tokens[i + 1 :]), old, new)
    return tokens
