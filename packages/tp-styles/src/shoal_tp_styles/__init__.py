"""Tensor-parallel styles for modules, lowered to local computation with explicit collectives."""

from .__about__ import __version__

__all__ = ["__version__"]
