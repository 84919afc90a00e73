"""Certification: compare a training program on many ranks with the same program on one device."""

from shoal_mesh.internal import facade

from .__about__ import __version__
from .analysis.explanations import CertificationFinding, FittingExplanation
from .certify import certify
from .errors import CertifyError, CertifyTypeError, NotCertifiedError
from .report import CertificationReport, MeshResult

__all__ = [
    "CertificationFinding",
    "CertificationReport",
    "CertifyError",
    "CertifyTypeError",
    "FittingExplanation",
    "MeshResult",
    "NotCertifiedError",
    "__version__",
    "certify",
]

__dir__, __getattr__ = facade(__name__, __all__)
