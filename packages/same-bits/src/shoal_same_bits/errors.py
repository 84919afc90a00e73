"""The error of the same-bits layer alone; those that it shares with its siblings are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError


class VariantArithmeticError(StyleError, RuntimeError):
    """Operators of this device have other bits on other numbers of ranks; the message names them."""
