"""The error of the context-parallel layer alone; those that it shares with its siblings are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError


class UnsupportedAttentionError(StyleError, NotImplementedError):
    """Attention of a sharded sequence does not compute this; the message names what it does."""
