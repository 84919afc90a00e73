"""The error and the warning of the models layer alone; those shared with its siblings are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError


class CheckpointError(StyleError, RuntimeError):
    """Files of a model cannot be written or read; the message says which, and what is as it was."""


class PlanWarning(UserWarning):
    """A plan that comes with a model does not fit its configuration, or could not be proven."""
