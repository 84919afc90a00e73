"""Models of Hugging Face transformers on a mesh: loading, saving, generation, weights for serving.

Imported when asked for; transformers itself when a function is called.
"""

from ..apply.saving import Saved, save_sharded
from .from_pretrained import from_pretrained

__all__ = ["Saved", "from_pretrained", "save_sharded"]
