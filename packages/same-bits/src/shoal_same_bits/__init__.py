"""Arithmetic with the same bits on any number of ranks, and records of runs to compare."""

from shoal_mesh.internal import facade

from .__about__ import __version__
from .arithmetic import invariant_arithmetic
from .errors import VariantArithmeticError
from .invariant.self_check import check_arithmetic
from .microbatches import accumulate_in_tree, accumulate_stage_in_tree
from .runs.record import Comparison, RunRecord, compare_runs, record_run

__all__ = [
    "Comparison",
    "RunRecord",
    "VariantArithmeticError",
    "__version__",
    "accumulate_in_tree",
    "accumulate_stage_in_tree",
    "check_arithmetic",
    "compare_runs",
    "invariant_arithmetic",
    "record_run",
]

__dir__, __getattr__ = facade(__name__, __all__)
