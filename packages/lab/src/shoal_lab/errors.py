"""Errors of certification: a program that differs from one device, and a program that cannot be certified."""

from __future__ import annotations

from shoal_mesh.errors import MeshError, MeshTypeError


class CertifyError(MeshError, ValueError):
    """A program that cannot be certified, or wrong arguments; the text says what to change."""


class CertifyTypeError(MeshTypeError, CertifyError):
    """An argument of a wrong type."""


class NotCertifiedError(AssertionError):
    """A program that does not compute what one device computes; the text is the report."""
