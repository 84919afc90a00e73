"""The errors of the tp-styles layer: each says what was asked, what is allowed and what was got."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "LayoutCountError",
    "LayoutError",
    "LayoutTypeError",
    "PlanError",
    "SecondOrderError",
    "StyleError",
    "StyleNameError",
    "StyleTypeError",
    "TiedWeightError",
    "UnmatchedPlanWarning",
    "UnsupportedAttentionError",
    "UnsupportedModuleError",
    "VariantArithmeticError",
]


class StyleError(Exception):
    """Base of every error that the tp-styles layer raises on purpose."""


class StyleTypeError(StyleError, TypeError):
    """An argument of a public function has a wrong type."""


class PlanError(StyleError, ValueError, RuntimeError):
    """A parallelization plan does not fit the module: unmatched, ambiguous or indivisible entries."""


class LayoutError(StyleError, ValueError, RuntimeError):
    """The layouts of a style do not fit each other, the inputs or the mesh."""


class LayoutCountError(LayoutError, AssertionError):
    """Layouts and desired layouts of a style are not as many."""


class LayoutTypeError(LayoutError, StyleTypeError):
    """What was given as a layout of a style is no placement."""


class StyleNameError(PlanError, StyleTypeError):
    """A plan names a style that is not known; torch's plans know no names, only styles."""


class TiedWeightError(PlanError):
    """Modules that share one parameter ask for different placements of it."""


class UnsupportedModuleError(StyleError, NotImplementedError):
    """A style cannot shard this type of module; the message names the types it can."""


class UnsupportedAttentionError(StyleError, NotImplementedError):
    """Attention of a sharded sequence does not compute this; the message names what it does."""


class CheckpointError(StyleError, RuntimeError):
    """Files of a model cannot be written or read; the message says which, and what is as it was."""


class SecondOrderError(StyleError, RuntimeError):
    """A lowered module was differentiated twice; its backward is not differentiable."""


class VariantArithmeticError(StyleError, RuntimeError):
    """Operators of this device have other bits on other numbers of ranks; the message names them."""


class UnmatchedPlanWarning(UserWarning):
    """A key of a plan matches no module, or a plan is missing."""
