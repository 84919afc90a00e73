"""Certification: does a training program compute on many ranks what it computes on one device?"""

from shoal_mesh.internal import facade

from .__about__ import __version__
from .analysis.explanations import Explanation, Finding
from .certify import certify
from .errors import CertifyError, CertifyTypeError, NotCertifiedError
from .report import MeshResult, Report

__all__ = [
    "CertifyError",
    "CertifyTypeError",
    "Explanation",
    "Finding",
    "MeshResult",
    "NotCertifiedError",
    "Report",
    "__version__",
    "certify",
]

__dir__, __getattr__ = facade(__name__, __all__)
