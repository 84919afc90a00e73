"""The stages of a model that a `DistributedConfig` with `pp_size` describes.

The whole model is checked before it is made parallel: all ranks raise the same error, before any
communication. `cut` then leaves each rank the modules of its stage, and `join` connects the
gradients of the stages once the parameters have values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from shoal_dtensor.errors import PlanError, UnsupportedModuleError
from shoal_dtensor.internal import register_norm_scope
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import agree
from shoal_transfer.internal import entries_of

from ..stages.links import CommLink
from ..stages.model_parts import check_ties, parts_of, tied_weights
from ..stages.stage import Stage
from ..stages.stage_norms import StageNorms
from ..stages.tied_weights import TiedWeights
from ..weights.loading import Loaded, Source, Stored, load_sharded
from .checked_stages import check_stages

# The attribute of a model that holds the scope of its norms, so that it lives as long as the model.
_NORMS = "_shoal_stage_norms"


def stage_axis_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of stages of the mesh of a configuration, or None."""
    return mesh["pp"] if "pp" in mesh.axis_names else None


def load_model(model: Any, source: Source) -> None:
    """Fill a model from files of a whole model; a stage ignores the entries of other stages.

    Raises:
        PlanError: on all ranks, if the files and the model do not have the same entries. Entries
            that no stage has are not an error.
    """
    if not hasattr(model, _NORMS):
        load_sharded(model, source)
        return

    def load() -> None:
        loaded = load_sharded(model, source, strict=False)
        if loaded.missing:
            raise PlanError(f"the files of the model do not have {loaded.missing}")

    agree(load)


class PipelineStages:
    """The stages of a model.

    Args:
        model: the whole model, which is not parallel.
        mesh: the axis of stages.
        loaded: the comparison of the files and the model, with the missing entries.

    Raises:
        PlanError: if the model has no parts for stages, if its stages would compute other values,
            or if the files do not have all of its tensors.
        TiedWeightError: if stages would share other weights than embeddings and head.
    """

    def __init__(self, model: Any, mesh: DeviceMesh, loaded: Loaded) -> None:
        stages = mesh.size()
        if loaded.missing:
            # Each stage would draw random values without those of the stages before.
            raise PlanError(
                f"DistributedConfig(pp_size={stages}): the files do not have {loaded.missing[:3]}, "
                "and stages would not initialize them to the values of one process; load the model "
                "with tp_size or fsdp_size, save it, and load that"
            )
        self._mesh = mesh
        self._parts = parts_of(model, stages)
        self._tied: list[str] = []
        check_ties(model, self._parts, stages)
        check_stages(model, stages)

    def cut(self, model: Any, stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """Leave a model the modules of this rank's stage; return the tensors that it reads.

        Args:
            model: the whole model, parallel or plain, on the meta device; it is changed in place.
            stored: the tensors of the files, by their names in the model.
        """
        tied = {id(weight) for weight in tied_weights(model, self._parts)}
        self._tied = [name for name, weight in model.named_parameters() if id(weight) in tied]
        entries_of_model = {entry.source for entry in entries_of(model)}
        link = CommLink(self._mesh.comm(0))
        stage = Stage(model, self._parts, link)
        if not stage.is_last:
            # The head is on the last stage, where it is tied.
            model.all_tied_weights_keys = {}
        entries_of_stage = {entry.source for entry in entries_of(model)}
        entries_of_others = entries_of_model - entries_of_stage
        # Entries that no stage has are kept, for the report of unexpected entries.
        return {name: tensor for name, tensor in stored.items() if name not in entries_of_others}

    def join(self, model: Any) -> None:
        """Have gradients of tied weights, and norms of gradients, be those of all stages.

        Args:
            model: the model with the modules of this rank's stage, whose parameters have values.
        """
        comm = self._mesh.comm(0)
        tied = None
        if self._tied and comm.rank in (0, comm.size - 1):
            tied = TiedWeights(model, comm, self._tied)
        norms = StageNorms(model, comm, tied)
        register_norm_scope(norms)
        setattr(model, _NORMS, norms)
        model.resize_token_embeddings = _refuse_to_resize
        if hasattr(model, "init_continuous_batching"):
            model.init_continuous_batching = _refuse_to_batch


def _refuse_to_resize(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise the error for resizing a model whose embeddings and head are on different stages."""
    raise UnsupportedModuleError(
        "resize_token_embeddings: the embeddings and the head of a model with pp_size are on "
        "different stages; load the model with tp_size, resize it, save it, and load that"
    )


def _refuse_to_batch(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise the error for continuous batching, which runs parts of the model."""
    raise UnsupportedModuleError(
        "generate_batch of a model with pp_size: transformers sizes its cache by all layers; use "
        "generate(), or load the model with tp_size"
    )
