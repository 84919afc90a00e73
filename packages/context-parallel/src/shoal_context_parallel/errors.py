"""The error of this package alone; errors that packages share are in `shoal_dtensor.errors`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError


class UnsupportedAttentionError(StyleError, NotImplementedError):
    """An attention, or another function across positions, that a sharded sequence does not support.

    The message names a way that is supported.
    """
