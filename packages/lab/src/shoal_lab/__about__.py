"""The version of this layer; the layers are released in lockstep."""

__version__ = "0.1.0"
