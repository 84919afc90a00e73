"""Errors of certification: a program differs from one device, or it cannot be certified."""

from __future__ import annotations

from shoal_mesh.errors import MeshError, MeshTypeError


class CertifyError(MeshError, ValueError):
    """A program that cannot be certified, or wrong arguments; the message names the remedy."""


class CertifyTypeError(MeshTypeError, CertifyError):
    """An argument of a wrong type."""


class NotCertifiedError(AssertionError):
    """A program whose results differ from the results of one device; the message is the report."""
