"""Whole models: Hugging Face transformers, files of weights, automatic plans and proposals."""

from shoal_mesh.internal import facade

from . import hf
from .__about__ import __version__
from .errors import CheckpointError, PlanWarning
from .planning.auto import auto_plan, format_plan
from .planning.propose import Candidate, Proposal, propose
from .weights.loading import Loaded, load_sharded
from .weights.saving import Saved, save_sharded

__all__ = [
    "Candidate",
    "CheckpointError",
    "Loaded",
    "PlanWarning",
    "Proposal",
    "Saved",
    "__version__",
    "auto_plan",
    "format_plan",
    "hf",
    "load_sharded",
    "propose",
    "save_sharded",
]

__dir__, __getattr__ = facade(__name__, __all__)
