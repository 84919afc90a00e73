"""Models of Hugging Face transformers on a mesh: loading, saving, fine-tuning, weights for serving.

transformers, accelerate and peft are imported when a function that needs them is called.

May import: errors, planning, stages, weights.
"""

from shoal_transfer import copy_weights

from ..weights.saving import Saved, save_sharded
from .adapters import load_adapters, merging_adapters, parallelize_adapters, save_adapters
from .distributed_config import mesh_of
from .from_pretrained import from_pretrained
from .training import prepare_accelerator, prepare_trainer, single_process

__all__ = [
    "Saved",
    "copy_weights",
    "from_pretrained",
    "load_adapters",
    "merging_adapters",
    "mesh_of",
    "parallelize_adapters",
    "prepare_accelerator",
    "prepare_trainer",
    "save_adapters",
    "save_sharded",
    "single_process",
]
