"""The errors of the tp-styles layer alone; those that it shares with its siblings are in `shoal_dtensor`."""

from shoal_dtensor.errors import LayoutError, PlanError, StyleTypeError


class LayoutCountError(LayoutError, AssertionError):
    """Layouts and desired layouts of a style are not as many."""


class StyleNameError(PlanError, StyleTypeError):
    """A plan names a style that is not known; torch's plans know no names, only styles."""


class UnmatchedPlanWarning(UserWarning):
    """A key of a plan matches no module, or a plan is missing."""
