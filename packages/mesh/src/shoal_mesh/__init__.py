"""Ranks in a grid: device meshes, process groups and collectives for PyTorch."""

from .__about__ import __version__

__all__ = ["__version__"]
