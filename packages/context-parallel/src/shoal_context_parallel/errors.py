"""Error of the context-parallel layer alone; its siblings' shared errors are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError


class UnsupportedAttentionError(StyleError, NotImplementedError):
    """An attention, or another function across positions, that a sharded sequence does not support.

    The message names the supported cases.
    """
