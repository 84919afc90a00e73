"""Error and warning of the models layer alone; errors shared by siblings are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError
from shoal_mesh import PeerError


class CheckpointError(StyleError, RuntimeError):
    """The files of a model cannot be written or read.

    The message names the files, and says which files are unchanged.
    """


class PlanWarning(UserWarning):
    """A plan that comes with a model does not fit its configuration, or could not be proven."""


class StageError(PeerError):
    """A forward of a pipeline that cannot be completed, because another stage raised an error."""
