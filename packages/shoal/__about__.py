"""The version of this package; the layers are released in lockstep."""

__version__ = "0.1.0"
