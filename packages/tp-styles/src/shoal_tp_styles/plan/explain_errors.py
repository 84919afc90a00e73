"""Notes on errors that a forward raises because modules return plain local shards.

The caller of such a module may assume the sizes of one device: all features, or all heads. It then
fails in an operator whose error does not mention shards. A note on the error names the modules that
return only this rank's part. A hook of the root module adds the note when the forward ends with an
error; after a forward without an error, the hook returns at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

from torch import nn

from shoal_dtensor import DTensor, Shard

from ..apply.apply import shardings_of

_NOTE = "The model is parallel:"
# The number of modules that a note lists at most.
_MAX_LISTED_MODULES = 4
# Errors that operators raise for fewer elements than the calling code expects.
_ERRORS_OF_SIZES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def explain_local_shards(module: nn.Module, args: Any, output: Any) -> None:
    """Add a note on the likely cause to an error that a forward raised.

    This is a hook of `hook_end_of_forward`: torch also calls it while it handles an error of the
    forward, with None for the output.
    """
    if output is not None:
        return
    # It is None if the forward has returned None without an error.
    error = sys.exc_info()[1]
    if isinstance(error, _ERRORS_OF_SIZES) and not _is_explained(error):
        _add_note(error)


def _is_explained(error: BaseException) -> bool:
    """Tell whether an error explains itself, or an inner module has added the note."""
    if type(error).__module__.startswith("shoal_"):
        return True
    return any(_NOTE in note for note in getattr(error, "__notes__", ()))


def _add_note(error: BaseException) -> None:
    """Name the modules inside the innermost running module that return local shards."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if not isinstance(owner, nn.Module):
            continue
        descriptions = [*_modules_with_local_outputs(owner)]
        if descriptions:
            listed = "\n".join(descriptions[:_MAX_LISTED_MODULES])
            error.add_note(
                f"{_NOTE} modules of {type(owner).__name__} return only this rank's part of their "
                "output, but the code that reads it may count the features or heads of one "
                f"device:\n{listed}\nTo mend it, take sizes from tensors, as "
                "x.unflatten(-1, (-1, head_dim)) does. For a fused projection, use "
                "PackedColwiseParallel. If a rank must have whole heads, call .heads(count, size) "
                "of the style. Or gather the output with output_layouts=Replicate(). A cache that "
                "was made before the model was parallelized has all heads, and so does a prefix "
                "of peft before shoal_models.hf.parallelize_adapters(model)."
            )
            return


def _modules_with_local_outputs(owner: nn.Module) -> Iterator[str]:
    """Describe the modules inside another whose output is a plain local shard."""
    for path, module in owner.named_modules():
        if not path:
            continue
        for sharding, mesh in shardings_of(module):
            # the layout in which the output leaves the module
            layout = sharding.output_port().desired
            if sharding.local_outputs and isinstance(layout, Shard) and mesh.size() > 1:
                shapes = [*_shapes_of_first_sharded(module), f"output {layout}"]
                name = type(module).__name__
                yield f"  {path} ({name}, {sharding.style}): {'; '.join(shapes)}"


def _shapes_of_first_sharded(module: nn.Module) -> Iterator[str]:
    """Describe the global and local shape of the first parameter that is sharded, if any is."""
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            yield f"{name} {tuple(param.shape)}, on this rank {tuple(param.to_local().shape)}"
            return
