"""The same bits on any number of ranks: arithmetic independent of the degree, and records of runs to compare."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal_mesh.internal import no_such_name

from .__about__ import __version__
from .arithmetic import invariant_arithmetic
from .errors import VariantArithmeticError

if TYPE_CHECKING:
    from .invariant.self_check import check_arithmetic
    from .microbatches import accumulate_in_tree, accumulate_stage_in_tree
    from .runs.fingerprints import StepFingerprints
    from .runs.record import Comparison, RunRecord, compare_runs, record_run

__all__ = [
    "Comparison",
    "RunRecord",
    "StepFingerprints",
    "VariantArithmeticError",
    "__version__",
    "accumulate_in_tree",
    "accumulate_stage_in_tree",
    "check_arithmetic",
    "compare_runs",
    "invariant_arithmetic",
    "record_run",
]


# Imported when first asked for.
_LATER = {
    "Comparison": ".runs.record",
    "RunRecord": ".runs.record",
    "StepFingerprints": ".runs.fingerprints",
    "accumulate_in_tree": ".microbatches",
    "accumulate_stage_in_tree": ".microbatches",
    "check_arithmetic": ".invariant.self_check",
    "compare_runs": ".runs.record",
    "record_run": ".runs.record",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise no_such_name(__name__, name, {})
    value = globals()[name] = getattr(import_module(_LATER[name], __name__), name)
    return value
