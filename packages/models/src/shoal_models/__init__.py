"""Whole models: those of Hugging Face transformers, files of weights, automatic plans and proposals."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal_mesh.internal import no_such_name

from .__about__ import __version__
from .errors import CheckpointError

if TYPE_CHECKING:
    from . import hf
    from .planning.auto import auto_plan, format_plan
    from .planning.propose import Candidate, Proposal, propose
    from .weights.loading import Loaded, load_sharded
    from .weights.saving import Saved, save_sharded

__all__ = [
    "Candidate",
    "CheckpointError",
    "Loaded",
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


# Imported when first asked for.
_LATER = {
    "Candidate": ".planning.propose",
    "Loaded": ".weights.loading",
    "Proposal": ".planning.propose",
    "Saved": ".weights.saving",
    "auto_plan": ".planning.auto",
    "format_plan": ".planning.auto",
    "hf": ".hf",
    "load_sharded": ".weights.loading",
    "propose": ".planning.propose",
    "save_sharded": ".weights.saving",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise no_such_name(__name__, name, {})
    module = import_module(_LATER[name], __name__)
    value = globals()[name] = module if name == "hf" else getattr(module, name)
    return value
