"""The error that only this layer raises; errors shared with its siblings are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import StyleError


class VariantArithmeticError(StyleError, RuntimeError):
    """The bits of this device's operators depend on the number of ranks; the message names them."""
