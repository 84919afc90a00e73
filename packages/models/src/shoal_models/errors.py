"""The error of the models layer alone; those that it shares with its siblings are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError


class CheckpointError(StyleError, RuntimeError):
    """Files of a model cannot be written or read; the message says which, and what is as it was."""
