"""A sharded trainer's weights in a differently sharded server: described, planned, proven, sent."""

from shoal_mesh.internal import facade

from .__about__ import __version__
from .errors import LoaderComputesError, ManifestError, MappingError, ProofError, TransferError
from .learn.conversions import learn_conversion
from .learn.loaders import learn_mapping
from .learn.witness import verify_mapping
from .manifest.describe import describe, describe_files, describe_rank
from .manifest.records import Holding, Manifest, TensorRecord, merge_manifests
from .mapping.assignment import Assignment, Strided, assign_strided
from .mapping.weight_mapping import WeightMapping
from .planning.copies import Copy, MemoryBlock
from .planning.plan import plan_transfer
from .planning.transfer_plan import Traffic, TransferPlan
from .running.copy_weights import copy_weights
from .running.folder_wire import FolderWire
from .running.weight_transfer import Sync, WeightTransfer
from .running.wires import GroupWire, JointWire, LocalWire, Roster, Wire

__all__ = [
    "Assignment",
    "Copy",
    "FolderWire",
    "GroupWire",
    "Holding",
    "JointWire",
    "LoaderComputesError",
    "LocalWire",
    "Manifest",
    "ManifestError",
    "MappingError",
    "MemoryBlock",
    "ProofError",
    "Roster",
    "Strided",
    "Sync",
    "TensorRecord",
    "Traffic",
    "TransferError",
    "TransferPlan",
    "WeightMapping",
    "WeightTransfer",
    "Wire",
    "__version__",
    "assign_strided",
    "copy_weights",
    "describe",
    "describe_files",
    "describe_rank",
    "learn_conversion",
    "learn_mapping",
    "merge_manifests",
    "plan_transfer",
    "verify_mapping",
]

__dir__, __getattr__ = facade(__name__, __all__)
