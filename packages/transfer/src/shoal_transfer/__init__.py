"""Weights of a sharded trainer in a differently sharded server: described, planned, proven, sent."""

from shoal_mesh.internal import facade

from .__about__ import __version__
from .errors import ManifestError, MappingError, ProofError, TransferError
from .manifest.describe import describe, describe_files, describe_rank
from .manifest.records import Holding, Manifest, TensorRecord, merge_manifests
from .mapping.assignment import Assignment, Strided, assign_strided
from .mapping.weight_mapping import WeightMapping

__all__ = [
    "Assignment",
    "Holding",
    "Manifest",
    "ManifestError",
    "MappingError",
    "ProofError",
    "Strided",
    "TensorRecord",
    "TransferError",
    "WeightMapping",
    "__version__",
    "assign_strided",
    "describe",
    "describe_files",
    "describe_rank",
    "merge_manifests",
]

__dir__, __getattr__ = facade(__name__, __all__)
