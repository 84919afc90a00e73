"""Errors of the tp-styles layer alone; errors shared by its siblings are in `shoal_dtensor`."""

from shoal_dtensor.errors import LayoutError, PlanError, StyleTypeError


class LayoutCountError(LayoutError, AssertionError):
    """The layouts and the desired layouts of a style differ in number."""


class StyleNameError(PlanError, StyleTypeError):
    """A plan names an unknown style; torch's plans contain styles only, not names."""


class UnmatchedPlanWarning(UserWarning):
    """A key of a plan matches no module, or a plan is missing."""
