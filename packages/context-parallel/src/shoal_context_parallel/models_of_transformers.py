"""Models of transformers in a block: masks by global positions, and attention of all ranks' keys.

transformers looks up masks and attention by the name of an implementation. While a block is active,
look-ups in the registries of transformers return functions with global positions: masks get this
rank's rows and all columns, "sdpa" is the attention of the block, and any other implementation gets
the keys and values of all ranks. A model that mixes positions by other means is refused where it is
called.

This file is in this package, because a program that imports no package above may run such a model
in a block; the results would then be silently wrong.

May import: _torch, context_options, errors, flex, position_mask, sequence_layout.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import unwatched, unwatched_functions
from shoal_mesh import Comm, all_gather_v

from ._torch import disable_dynamo
from .context_options import ContextOptions
from .errors import UnsupportedAttentionError
from .flex import function_of, gather_keys
from .position_mask import PositionMask, chunks_as_documents
from .sequence_layout import AttentionMask, Documents, SequenceLayout, order_gathered

# Names of classes of modules that carry a state from one position to the next.
_MIXES = re.compile(
    r"Mamba|SSM|Mixer$|Recurrent|RgLru|Lru$|DeltaNet|KimiDelta|LinearAttention|LightningAttention|"
    r"Rwkv|ShortConv|FourierTransform|Hyena|LSTM|TokenShift|Indexer|Compressor|Engram"
)
# Models that compute attention in their own code, read keys and values from a cache and use the
# mask unchanged: they get a cache with the keys and values of all ranks.
_READ_A_CACHE = frozenset({"biogpt", "bloom", "codegen", "falcon", "gptj", "mpt", "stablelm"})
# Modules that read one position for the whole sequence.
_POOLS = re.compile(r"Pooler$")
_POOLING_HEADS = re.compile(r"For(SequenceClassification|MultipleChoice|NextSentencePrediction)$")
_HOW_TO_PASS_POSITIONS = (
    "Pass position_ids=layout.positions(rank)[None], or arange(length)[None] among the buffers; "
    "leave out attention_mask, pass documents= for packed documents (behind a causal mask, padding "
    "at the end needs no mask)"
)
_OTHER_WAYS = (
    "Use tensor parallelism or `fully_shard` for it, or call context_parallel_attention in the "
    "layers that only attend"
)


class Block(Protocol):
    """The interface of an active block that this file needs."""

    comm: Comm
    options: ContextOptions

    def agree(self, qkv: Any, attn_mask: Tensor | None) -> None:
        """Raise on all ranks if the arguments of some do not fit."""

    def refuse(self, error: StyleError) -> None:
        """Make all ranks raise at the next agreement, or raise here if there is none."""

    def ruled(self, rule: AttentionMask) -> Any:
        """Enter a scope in which attention has these masks too."""


ActiveBlock = Callable[[], Block | None]


def change_registries(active: ActiveBlock) -> Iterator[Callable[[], None]]:
    """Change the registries of transformers, if it is imported; yield functions to undo this."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if masking is None or modeling is None:
        return
    masks = masking.ALL_MASK_ATTENTION_FUNCTIONS
    for name in [*masks]:
        yield _replace_item(masks, name, partial(_make_mask, active, name, masks[name]))
    find_documents = masking.find_packed_sequence_indices
    yield _replace(
        masking, find_documents.__name__, partial(_find_documents, active, find_documents)
    )
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    yield _replace(functions, "get_interface", partial(_look_up_attention, active, functions))

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        block = None if torch.compiler.is_compiling() else active()
        if block is not None:
            kwargs = check_model(block, model, args, kwargs)
        return nn.Module.__call__(model, *args, **kwargs)

    yield _replace(modeling.PreTrainedModel, "__call__", call)


def _replace_item(registry: Any, name: str, value: Any) -> Callable[[], None]:
    before = registry._local_mapping.get(name)
    registry[name] = value
    if before is None:
        return partial(registry.__delitem__, name)
    return partial(registry.__setitem__, name, before)


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    if before is None:
        return partial(delattr, owner, name)
    return partial(setattr, owner, name, before)


# --- masks ----------------------------------------------------------------------------------------


def _sharding_block(active: ActiveBlock) -> Block | None:
    """Return the active block, or None if attention needs no change.

    No change is needed if one rank holds the whole sequence and the options add no mask.
    """
    block = active()
    if block is None or block.comm.size > 1:
        return block
    options = block.options
    is_plain = options.documents is None and options.window == (None, None)
    return None if is_plain else block


@disable_dynamo
def _make_mask(
    active: ActiveBlock, name: str, original: Callable[..., Any], **arguments: Any
) -> Any:
    """Make the mask of this rank's queries and all keys by a function of transformers.

    The function is from transformers' registry.
    """
    block = _sharding_block(active)
    if block is None:
        return original(**arguments)
    count = arguments["q_length"]
    layout = _layout_of(block, count)
    is_of_block = layout is not None and arguments["kv_length"] in (count, layout.length)
    if layout is None or not is_of_block or _has_offset(arguments):
        # Attention refuses tensors that are not this rank's positions.
        return original(**arguments)
    padding = arguments.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        block.refuse(
            LayoutError(
                "the attention_mask in a context_parallel block has columns for this rank's "
                "positions only. " + _HOW_TO_PASS_POSITIONS
            )
        )
    rule = _rule_of(arguments, layout, block.options.documents)
    if rule is not None and (name == "sdpa" or "flash" in name):
        device = arguments.get("device", "cpu")
        return PositionMask.of(rule, count, layout.length, device)
    if rule == AttentionMask() and block.options.window == (None, None):
        return None
    return _whole_rows(block, layout, original, arguments)


def _has_offset(arguments: Any) -> bool:
    """Tell whether queries follow keys of a cache."""
    offsets = (arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
    return any(isinstance(offset, Tensor) or offset != 0 for offset in offsets)


def _layout_of(block: Block, count: int) -> SequenceLayout | None:
    """Return the layout of the block's sequence; None if this rank holds another length."""
    try:
        return block.options.layout_of(count, block.comm)
    except LayoutError:
        return None


def _rule_of(
    arguments: Any, layout: SequenceLayout, documents: Documents | None
) -> AttentionMask | None:
    """Return the mask as ranges of positions; None for a mask that is known only as a function."""
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    if not any(arguments.get(name, False) for name in skips):
        return None
    size = arguments.get("local_size")
    length = layout.length
    for rule in _known_rules(size, length):
        if not _is_same_mask(arguments["mask_function"], rule, size or length, length):
            continue
        if documents is None:
            return rule
        if rule.documents is not None:
            documents = chunks_as_documents(size or length, length, documents)
        return replace(rule, documents=documents)
    return None


def _known_rules(size: int | None, length: int) -> list[AttentionMask]:
    """Return the masks that transformers makes without overlays: causal, full, windows, chunks."""
    if size is None:
        return [AttentionMask(causal=True), AttentionMask()]
    rules = [AttentionMask(causal=True, window=(size - 1, None))]
    chunks = chunks_as_documents(size, length, None)
    rules.append(AttentionMask(causal=True, documents=chunks))
    sides = (size, size // 2, size - 1)
    rules.extend(AttentionMask(window=(side, side)) for side in sides)
    return rules


def _is_same_mask(
    function: Callable[..., Any], rule: AttentionMask, size: int, length: int
) -> bool:
    """Compare a function of indices with a rule around the borders of windows and chunks."""
    half = size // 2
    borders = torch.tensor([0, half, size, size + half, 2 * size, length])
    near_borders = borders[:, None] + torch.arange(-2, 3)
    positions = near_borders.flatten().clamp(0, max(length - 1, 0))
    queries = positions[:, None]
    keys = positions[None, :]
    zero = torch.zeros((), dtype=torch.long)
    try:
        wanted = torch.as_tensor(function(zero, zero, queries, keys))
    except (IndexError, RuntimeError):
        # The function reads tensors of this rank's positions.
        return False
    ahead = keys - queries
    left, right = rule.reach
    allowed = (ahead <= right) & (-ahead <= left)
    if rule.documents is not None:
        ids = rule.documents.ids()[0]
        allowed = allowed & (ids[queries] == ids[keys])
    return torch.equal(wanted.expand_as(allowed), allowed)


def _whole_rows(
    block: Block, layout: SequenceLayout, original: Callable[..., Any], arguments: Any
) -> Any:
    """Return the original's mask of this rank's rows and all columns, made from global indices."""
    device = arguments.get("device", "cpu")
    positions = layout.positions(block.comm.rank, device)
    options = block.options
    options_mask = AttentionMask(False, options.window, options.documents)
    by_options = function_of(options_mask, device)
    function = arguments["mask_function"]

    def by_position(row: Any, head: Any, query: Any, key: Any) -> Any:
        # block masks also evaluate indices after the last query
        position = positions[query.clamp(max=len(positions) - 1)]
        key = key.clamp(max=layout.length - 1)
        return function(row, head, position, key) & by_options(row, position, key)

    changes = {
        "kv_length": layout.length,
        "mask_function": by_position,
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
        "local_size": None,
    }
    try:
        with unwatched_functions():
            return original(**{**arguments, **changes})
    except IndexError:
        block.refuse(
            UnsupportedAttentionError(
                "a mask of transformers indexes a tensor with global positions, but the tensor "
                "has only this rank's positions (groups of image tokens, for instance). "
                + _OTHER_WAYS
            )
        )
        return None


@disable_dynamo
def _find_documents(
    active: ActiveBlock, original: Callable[[Tensor], Any], position_ids: Tensor
) -> Any:
    """Find documents by jumps of position ids.

    There are none if the ids are the positions that this rank holds.
    """
    block = _sharding_block(active)
    layout = None if block is None else _layout_of(block, position_ids.shape[-1])
    if block is None or layout is None:
        return original(position_ids)
    held_positions = layout.positions(block.comm.rank, position_ids.device)
    is_own = torch.equal(position_ids, held_positions.expand_as(position_ids))
    if block.options.documents is None and not is_own:
        block.refuse(
            LayoutError(
                "position_ids differ from the positions that this rank holds. "
                + _HOW_TO_PASS_POSITIONS
            )
        )
    return None


# --- attention ------------------------------------------------------------------------------------


@disable_dynamo
def _look_up_attention(
    active: ActiveBlock, registry: Any, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the attention of an implementation, of the whole sequence if a block is active."""
    function: Callable[..., Any] = type(registry).get_interface(registry, implementation, default)
    block = _sharding_block(active)
    if block is None:
        return function
    name = implementation or ""
    # `flex_attention` itself is redirected.
    if name == "flex_attention":
        return function
    if name == "sdpa" or "flash" in name:
        return partial(_attend_by_block, block, registry["sdpa"])
    return partial(_attend_all_keys, block, function)


def _attend_by_block(  # noqa: PLR0913  # the arguments of transformers' functions
    block: Block,
    implementation: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """Call transformers' "sdpa" function, whose call of attention the block replaces."""
    if not isinstance(attention_mask, PositionMask):
        return implementation(module, query, key, value, attention_mask, **options)
    # Without a mask, the function does not repeat shared heads of keys, so fewer keys are sent.
    with block.ruled(attention_mask.rule):
        return implementation(module, query, key, value, None, **options)


@disable_dynamo
def _attend_all_keys(  # noqa: PLR0913  # likewise
    block: Block,
    implementation: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """Attend from this rank's queries to the keys and values of all ranks, by another function."""
    if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
        raise UnsupportedAttentionError(
            "attention of DTensors in a context_parallel block supports "
            "attn_implementation='sdpa' only; use it, or plain local tensors"
        )
    dropout = options.get("dropout") or 0.0
    if dropout:
        raise UnsupportedAttentionError(
            f"dropout of attention weights ({dropout}) is not supported over a sharded sequence, "
            "because no rank has all weights that one device would draw random numbers for. Set "
            "attention_dropout=0 in the configuration"
        )
    layout = _layout_of(block, query.shape[-2])
    # the model's cache (`KeysOfAllRanks`) may have gathered the keys
    is_whole = layout is not None and key.shape[-2] == layout.length
    if not is_whole:
        block.agree((query, key, value), None)
    with unwatched_functions():
        layout = block.options.layout_of(query.shape[-2], block.comm)
        columns = None if attention_mask is None else attention_mask.shape[-1]
        if columns not in (None, 1, layout.length):
            raise LayoutError(
                f"the mask has {columns} columns, but the sequence has {layout.length} positions. "
                + _HOW_TO_PASS_POSITIONS
            )
        if not is_whole:
            key, value = gather_keys(key, value, block.comm, layout)
        return implementation(module, query, key, value, attention_mask, **options)


# --- models ---------------------------------------------------------------------------------------


class KeysOfAllRanks:
    """A cache in place of transformers' cache; its update returns keys and values of all ranks.

    Args:
        block: the active block.
        layout: the positions of the ranks.
        gathers: whether keys are gathered; not for code that calls the attention of the block.
    """

    def __init__(self, block: Block, layout: SequenceLayout, *, gathers: bool) -> None:
        self._block = block
        self._layout = layout
        self._gathers = gathers

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole sequence."""
        if not self._gathers:
            return key, value
        self._block.agree((key, key, value), None)
        with unwatched_functions():
            return gather_keys(key, value, self._block.comm, self._layout)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions on other ranks.

        The model adds this rank's positions and so gets the length of the whole sequence.
        """
        return self._layout.length - self._layout.sizes[self._block.comm.rank]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the columns of a mask, and the position of the first one."""
        return self._layout.length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return zero, because `_make_mask` counts the rows of a mask."""
        return 0


def check_model(block: Block, model: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check a model of transformers that is called in a block; return its keyword arguments.

    Labels of a causal model are shifted over the whole sequence, because the model would shift only
    this rank's labels.

    Raises:
        UnsupportedAttentionError: if the model mixes positions by code that the block does not
            replace.
        LayoutError: if the model would number this rank's positions from 0.
    """
    if block.comm.size == 1:
        return kwargs
    name = type(model).__name__
    problem = mixed_by(model)
    if problem:
        raise UnsupportedAttentionError(
            f"{name} cannot run in a context_parallel block: {problem}, and each rank has its own "
            f"positions only. {_OTHER_WAYS}"
        )
    parameters = inspect.signature(model.forward).parameters
    arguments = dict(zip(parameters, args, strict=False)) | kwargs
    _check_positions(block, model, parameters, arguments)
    kwargs = dict(kwargs)
    if model.config.model_type in _READ_A_CACHE and arguments.get("past_key_values") is None:
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments.get("inputs_embeds")
        layout = None if tokens is None else _layout_of(block, tokens.shape[1])
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
    """Raise if the model would number this rank's positions from 0."""
    name = type(model).__name__
    if "position_ids" not in parameters:
        # these models compute biases of positions (ALiBi) from the lengths of the cache
        if model.config.model_type in _READ_A_CACHE:
            return
        raise UnsupportedAttentionError(
            f"{name} cannot run in a context_parallel block: its forward does not take "
            f"position_ids, so it would number this rank's positions from 0. {_OTHER_WAYS}"
        )
    ids = arguments.get("position_ids")
    if ids is None:
        raise LayoutError(
            f"{name} needs position_ids in a context_parallel block. {_HOW_TO_PASS_POSITIONS}"
        )
    if isinstance(ids, Tensor) and ids.ndim == 2:
        _find_documents(lambda: block, lambda _: None, ids)


def _shift_labels(block: Block, labels: Tensor) -> Tensor:
    """Return the label of the next position of the sequence, for each of this rank's positions."""
    layout = block.options.layout_of(labels.shape[-1], block.comm)
    with unwatched_functions(), unwatched():
        gathered = all_gather_v(labels.contiguous(), block.comm, layout.sizes, labels.ndim - 1)
    whole = order_gathered(gathered, layout, -1)
    # the last position has no next label: -100 is the index that losses ignore
    shifted = nn.functional.pad(whole[..., 1:], (0, 1), value=-100)
    return layout.shard(shifted, -1, block.comm.rank)


def mixed_by(model: Any) -> str:
    """Describe the part of a model that mixes positions by other means than attention.

    The description is empty if there is no such part.
    """
    for path, module in model.named_modules():
        class_name = type(module).__name__
        subject = f"{path or 'the model'} ({class_name})"
        if isinstance(module, nn.RNNBase) or _MIXES.search(class_name):
            return f"{subject} carries a state from one position to the next"
        if isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1:
            return f"{subject} reads neighboring positions"
        if _POOLS.search(class_name):
            return f"{subject} reads one position for the whole sequence"
    name = type(model).__name__
    if _POOLING_HEADS.search(name):
        return f"{name} reads one position for the whole sequence"
    config = model.config
    uses_sdpa = config._attn_implementation == "sdpa"
    by_interface = getattr(model, "_supports_attention_backend", False)
    by_torch = uses_sdpa and getattr(model, "_supports_sdpa", False)
    by_cache = config.model_type in _READ_A_CACHE
    has_checkpoints = getattr(model, "is_gradient_checkpointing", False)
    if by_cache and model.training and has_checkpoints:
        return (
            "its activation checkpoints drop the cache through which it would get the keys of "
            "other ranks"
        )
    if not by_interface and not by_torch and not by_cache:
        way_out = " (that of attn_implementation='sdpa' can)" if model._supports_sdpa else ""
        return f"it computes attention in its own code, which cannot be replaced{way_out}"
    return ""
