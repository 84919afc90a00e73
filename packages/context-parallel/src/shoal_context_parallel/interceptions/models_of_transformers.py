"""Models of transformers in a `context_parallel` block: changed registries, and refused models.

transformers looks up masks and attention by the name of an implementation. While a block is active,
look-ups in the registries of transformers return functions with global positions: masks get this
rank's rows and all columns, "sdpa" is the attention of the block, and any other implementation gets
the keys and values of all ranks. A model that mixes positions by other means is refused where it is
called.

This file is here and not in shoal_models, because a program may run a model of transformers in a
block without importing shoal_models. Without this file its results would be silently wrong.

May import: active_block, attention_of_transformers, flex, masks_of_transformers.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import unwatched, unwatched_functions
from shoal_mesh import all_gather_v

from ..errors import UnsupportedAttentionError
from ..sequence_layout import SequenceLayout, order_gathered
from .active_block import HOW_TO_PASS_POSITIONS, OTHER_WAYS, ActiveBlock, Block, layout_of
from .attention_of_transformers import look_up_attention
from .flex import gather_keys
from .masks_of_transformers import find_documents, make_mask, refuse_other_positions

# Names of classes of modules that carry a state from one position to the next.
_STATEFUL_CLASSES = re.compile(
    r"Mamba|SSM|Mixer$|Recurrent|RgLru|Lru$|DeltaNet|KimiDelta|LinearAttention|LightningAttention|"
    r"Rwkv|ShortConv|FourierTransform|Hyena|LSTM|TokenShift|Indexer|Compressor|Engram"
)
# Types of models that compute attention in their own code, with keys and values from a cache, and
# that use the mask unchanged. They get a cache with the keys and values of all ranks.
_TYPES_WITH_CACHE = frozenset({"biogpt", "bloom", "codegen", "falcon", "gptj", "mpt", "stablelm"})
# Names of classes of modules and of models that read one position for the whole sequence.
_POOLER_CLASSES = re.compile(r"Pooler$")
_POOLING_MODELS = re.compile(r"For(SequenceClassification|MultipleChoice|NextSentencePrediction)$")


def change_registries(active: ActiveBlock) -> Iterator[Callable[[], None]]:
    """Change the registries of transformers, if it is imported; yield functions to undo this.

    Each change is made when the caller takes the function that undoes it. An error in a change
    therefore leaves the caller with the functions that undo the changes before it.

    Args:
        active: returns the innermost active block of the calling thread, or None.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if masking is None or modeling is None:
        return
    masks = masking.ALL_MASK_ATTENTION_FUNCTIONS
    for name in [*masks]:
        yield _replace_item(masks, name, partial(make_mask, active, name, masks[name]))
    finder = masking.find_packed_sequence_indices
    yield _replace(masking, finder.__name__, partial(find_documents, active, finder))
    attentions = modeling.ALL_ATTENTION_FUNCTIONS
    yield _replace(attentions, "get_interface", partial(look_up_attention, active, attentions))

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Compilation cannot trace the look-up of blocks, so compiled models are not checked.
        block = None if torch.compiler.is_compiling() else active()
        if block is not None:
            kwargs = prepare_call(block, model, args, kwargs)
        return nn.Module.__call__(model, *args, **kwargs)

    yield _replace(modeling.PreTrainedModel, "__call__", call)


def _replace_item(registry: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an item of a registry; return a function to undo this.

    A registry of transformers has items that all registries share, and local items, which take
    precedence. Setting and deleting an item concern the local ones.
    """
    before = registry._local_mapping.get(name)
    registry[name] = value
    if before is None:
        return partial(registry.__delitem__, name)
    return partial(registry.__setitem__, name, before)


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; return a function to undo this."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    if before is None:
        return partial(delattr, owner, name)
    return partial(setattr, owner, name, before)


class KeysOfAllRanks:
    """A cache in place of transformers' cache; its update returns keys and values of all ranks.

    Args:
        block: the active block.
        layout: the positions of the ranks.
        gathers: whether `update` gathers keys and values; False for a model that calls the
            attention of the block, because this attention gathers them itself.
    """

    def __init__(self, block: Block, layout: SequenceLayout, *, gathers: bool) -> None:
        self._block = block
        self._layout = layout
        self._gathers = gathers

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole sequence, or this rank's if the attention gathers."""
        if not self._gathers:
            return key, value
        # A cache does not get the queries. The keys stand for them, because both have this rank's
        # positions. It does not get the mask either.
        self._block.agree((key, key, value), None)
        # The block need not follow positions through the functions that gather.
        with unwatched_functions():
            return gather_keys(key, value, self._block.comm, self._layout)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions on other ranks.

        The model adds this rank's positions and so gets the length of the whole sequence.
        """
        return self._layout.length - self._layout.sizes[self._block.comm.rank]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns of a mask, and the position of the first one."""
        return self._layout.length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return zero: `make_mask` takes this rank's queries, and looks their positions up."""
        return 0


def prepare_call(block: Block, model: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check a model of transformers that is called in a block; return its keyword arguments.

    A model that computes attention in its own code gets a cache with the keys of all ranks. Labels
    of a causal model are shifted over the whole sequence, because the model would shift only this
    rank's labels.

    Raises:
        UnsupportedAttentionError: if the model mixes positions by code that the block does not
            replace.
        LayoutError: if the model would number this rank's positions from 0.
    """
    if block.comm.size == 1:
        return kwargs
    name = type(model).__name__
    problem = describe_mixing(model)
    if problem:
        raise UnsupportedAttentionError(
            f"{name} cannot run in a context_parallel block: {problem}, and each rank has its own "
            f"positions only. {OTHER_WAYS}"
        )
    parameters = inspect.signature(model.forward).parameters
    arguments = dict(zip(parameters, args, strict=False)) | kwargs
    _check_positions(block, model, parameters, arguments)
    kwargs = dict(kwargs)
    if model.config.model_type in _TYPES_WITH_CACHE and arguments.get("past_key_values") is None:
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments.get("inputs_embeds")
        layout = None if tokens is None else layout_of(block, tokens.shape[1])
        if layout is not None:
            gathers = model.config._attn_implementation != "sdpa"
            kwargs["past_key_values"] = KeysOfAllRanks(block, layout, gathers=gathers)
            kwargs["use_cache"] = False
    labels = arguments.get("labels")
    is_causal = getattr(model, "loss_type", None) == "ForCausalLM"
    if labels is not None and is_causal and arguments.get("shift_labels") is None:
        kwargs["shift_labels"] = _shift_labels(block, labels)
    return kwargs


def _check_positions(block: Block, model: Any, parameters: Any, arguments: Any) -> None:
    """Refuse a model that would number this rank's positions from 0, and wrong `position_ids`.

    These are ids that differ from this rank's positions in the sequence.
    """
    name = type(model).__name__
    if "position_ids" not in parameters:
        # These models compute biases of positions (ALiBi) from the lengths of the cache.
        if model.config.model_type in _TYPES_WITH_CACHE:
            return
        raise UnsupportedAttentionError(
            f"{name} cannot run in a context_parallel block: its forward does not take "
            f"position_ids, so it would number this rank's positions from 0. {OTHER_WAYS}"
        )
    ids = arguments.get("position_ids")
    if ids is None:
        raise LayoutError(
            f"{name} needs position_ids in a context_parallel block. {HOW_TO_PASS_POSITIONS}"
        )
    # Multimodal models take ids (3, batch, length), for time, height and width of images. These ids
    # are not positions of the sequence, so they are not compared.
    if isinstance(ids, Tensor) and ids.ndim == 2:
        layout = layout_of(block, ids.shape[-1])
        if layout is not None:
            refuse_other_positions(block, layout, ids)


def _shift_labels(block: Block, labels: Tensor) -> Tensor:
    """Return for each of this rank's positions the label of the next position of the sequence."""
    # Not `layout_of(block, ...)`, which returns None for labels of another length. This raises.
    layout = block.options.layout_of(labels.shape[-1], block.comm)
    # `unwatched_functions`: the block need not follow positions through these functions.
    # `unwatched`: selective activation checkpointing must not save the result of a collective.
    with unwatched_functions(), unwatched():
        gathered = all_gather_v(labels.contiguous(), block.comm, layout.sizes, labels.ndim - 1)
    whole = order_gathered(gathered, layout, -1)
    # The last position has no next label: -100 is the index that losses ignore.
    shifted = nn.functional.pad(whole[..., 1:], (0, 1), value=-100)
    return layout.shard(shifted, -1, block.comm.rank)


def describe_mixing(model: Any) -> str:
    """Describe the part of a model that mixes positions by other means than attention.

    The description is empty if there is no such part.
    """
    for path, module in model.named_modules():
        class_name = type(module).__name__
        subject = f"{path or 'the model'} ({class_name})"
        if isinstance(module, nn.RNNBase) or _STATEFUL_CLASSES.search(class_name):
            return f"{subject} carries a state from one position to the next"
        if isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1:
            return f"{subject} reads neighboring positions"
        if _POOLER_CLASSES.search(class_name):
            return f"{subject} reads one position for the whole sequence"
    name = type(model).__name__
    if _POOLING_MODELS.search(name):
        return f"{name} reads one position for the whole sequence"
    config = model.config
    uses_sdpa = config._attn_implementation == "sdpa"
    by_interface = getattr(model, "_supports_attention_backend", False)
    by_torch = uses_sdpa and getattr(model, "_supports_sdpa", False)
    by_cache = config.model_type in _TYPES_WITH_CACHE
    has_checkpoints = getattr(model, "is_gradient_checkpointing", False)
    if by_cache and model.training and has_checkpoints:
        return (
            "its activation checkpoints drop the cache through which it would get the keys of "
            "other ranks"
        )
    if not by_interface and not by_torch and not by_cache:
        problem = "it computes attention in its own code, which cannot be replaced"
        if model._supports_sdpa:
            problem += " (load it with attn_implementation='sdpa')"
        return problem
    return ""
