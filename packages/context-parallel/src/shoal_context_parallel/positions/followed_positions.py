"""`FollowedPositions`: which dims of local tensors hold positions, and what functions do with them.

A tensor of the block that holds this rank's positions has a note with its layout. The rules of
operators on DTensors tell how a torch function changes layouts: the function runs once on DTensors
without memory, where communication is forbidden. A function that would need to communicate mixes
positions: on local tensors it would compute on this rank's positions alone, so it is refused. Later
calls with the same layouts look the decision up.

Three kinds of tensors are followed: shards of the sequence, sums over positions of one rank
(`Partial`), and tensors that count this rank's positions from 0. All others have no note, and are
taken for replicated where their shapes allow it, otherwise for shards. Decisions depend on layouts
and shapes, so they are the same on all ranks.

May import: call_layouts, calls_of_functions, sequence_dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal_dtensor import Spec
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import TensorNote, draws_numbers, pytree, unwatched_functions
from shoal_mesh import abstract_mesh

from ..errors import UnsupportedAttentionError
from ..sequence_layout import SequenceLayout
from .call_layouts import CallLayouts, CountedPositionsError
from .calls_of_functions import (
    BY_INDEX,
    COPYING,
    LISTS,
    PLAIN,
    MixedPositionsError,
    TorchCall,
    UnfollowedCallError,
    computes_in_torch,
    indices_by_dim,
    ndim_of,
    takes_local_rows,
    takes_whole_blocks,
)
from .sequence_dims import (
    SequenceDim,
    TornPositionsError,
    UnknownReshapeError,
    sequence_dim,
)

# The attribute of a tensor that holds its note.
_ATTRIBUTE = "_shoal_positions"
# Most decisions that are kept, for programs whose shapes change with each step.
_MOST_DECISIONS = 4096
# Functions whose result may count positions, though no argument is followed.
_COUNTING = frozenset((torch.arange, Tensor.__getitem__))
# Types of results that hold no positions. Most calls that a block observes read sizes and other
# attributes.
UNFOLLOWED_RESULTS = frozenset((torch.Size, int, bool, float, torch.dtype, torch.device))
# Functions of two losses whose result is again each rank's loss: sums with a term that is equal on
# all ranks, means over a rank's own tokens, and replacements of losses that are not finite.
_COMBINING = frozenset(
    {
        "__iadd__",
        "__isub__",
        "__itruediv__",
        "__radd__",
        "__rsub__",
        "__truediv__",
        "add",
        "add_",
        "div",
        "div_",
        "nan_to_num",
        "sub",
        "sub_",
        "true_divide",
        "where",
    }
)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor of C


@dataclass(frozen=True, slots=True, eq=False)
class Note(TensorNote):
    """Attribute of a tensor that is followed.

    Attributes:
        owner: the object that follows the tensor.
        spec: its layout; None for a tensor that counts this rank's positions from 0.
    """

    owner: FollowedPositions
    spec: Spec | None


class _MixingRefusal(NamedTuple):
    """The decision that a function mixes positions.

    Attributes:
        reason: completes the sentence about the function.
        on_all_ranks: whether all ranks decide so, and may raise without an agreement.
    """

    reason: str
    on_all_ranks: bool = True


# The decision about a function: the notes of its results, in order, or a refusal. Results without
# an entry keep the notes that they have.
_Decision = tuple[Note | None, ...] | _MixingRefusal
WAY_OUT = (
    "For attention call F.scaled_dot_product_attention or context_parallel_attention. Otherwise "
    "compute it before the block and pass the result (positions, shifted labels, a table) as one "
    "of the buffers, gather the positions of all ranks with context_parallel_unshard, or reduce "
    "over the ranks with shoal_mesh.differentiable.all_reduce"
)


_COUNTED = (
    "one of its arguments counts from 0 on every rank, by arange(n) or table[:n] of this rank's "
    "number of positions, where it needs the positions of the sequence: layout.positions(rank), or "
    "arange(length) among the buffers"
)


class FollowedPositions:
    """Notes on tensors of blocks with one layout over the same ranks.

    Args:
        layout: the positions of the ranks, at least two on each.
        rank: this rank's place in the layout.
    """

    def __init__(self, layout: SequenceLayout, rank: int) -> None:
        self._layout = layout
        # Decisions need no process groups.
        self._mesh = abstract_mesh((layout.ranks,), ("sequence",), rank=rank)
        self._layouts = CallLayouts(self._mesh, layout, self._is_counted)
        self._count = layout.sizes[rank]
        # The note of tensors that count this rank's positions from 0.
        self._counting = Note(self, None)
        # The note of `arange(0, n)` on other ranks than 0, if rank 0 holds the first positions. On
        # rank 0 the same code is right, as `arange(k, k + n)` would be here. So rank 0 raises no
        # error, and this rank must not raise alone.
        self._perhaps_counting = Note(self, None)
        self._is_rank_0 = rank == 0
        # One note for each layout, so that keys compare notes by identity.
        self._notes: dict[Spec, Note] = {}
        # By the function and the properties of its arguments.
        self._decisions: dict[Any, _Decision] = {}
        # By local shape and sequence dim.
        self._notes_of_buffers: dict[tuple[torch.Size, int], Note] = {}
        # Whether rank 0 holds the first positions of the sequence and no others.
        self._rank_0_holds_first = layout.ranges[0] == ((0, layout.sizes[0]),)

    def note_shard(self, tensor: Tensor, dim: int) -> None:
        """Note that dim `dim` of a tensor holds this rank's positions."""
        key = (tensor.shape, dim)
        note = self._notes_of_buffers.get(key)
        if note is None:
            held = SequenceDim(dim % tensor.ndim, 1, self._layout.sizes)
            note = self._note_of(held.spec_of(self._mesh, tensor.shape, tensor.dtype))
            self._notes_of_buffers[key] = note
        self._set_note(tensor, note)

    def forget(self, tensor: Tensor) -> None:
        """Drop the note of a tensor."""
        self._set_note(tensor, None)

    def follows(self, value: Any) -> bool:
        """Tell whether a value is a tensor that is followed."""
        note = getattr(value, _ATTRIBUTE, None)
        return bool(note and note.owner is self)

    def follow(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        out: Any,
        *,
        refuse_later: Callable[[StyleError], None],
    ) -> None:
        """Note what the results of a function hold of the sequence.

        Args:
            func: the torch function.
            args: its arguments.
            kwargs: its keyword arguments.
            out: what it returned.
            refuse_later: called with an error that other ranks may not have.

        Raises:
            UnsupportedAttentionError: on all ranks, if the function mixes positions.
        """
        outs = _tensors_of(out)
        if not outs and func is not Tensor.__setitem__:
            self._forget_written(func, args, kwargs)
            return
        key: list[Any] = [func]
        is_followed = self._append_properties(args, key)
        if kwargs:
            key.append(tuple(kwargs))
            is_followed = self._append_properties(kwargs.values(), key) or is_followed
        if not is_followed:
            if func in _COUNTING:
                self._set_note(outs[0], self._counting_note(func, args, kwargs, outs[0]))
            return
        key.append(any(out.requires_grad for out in outs))
        decision = self._look_up_decision(tuple(key), args, kwargs, outs)
        if isinstance(decision, _MixingRefusal):
            error = _make_error(func, decision)
            if decision.on_all_ranks:
                raise error
            refuse_later(error)
            return
        for tensor, note in zip(outs, decision, strict=False):
            self._set_note(tensor, note)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Drop the notes of tensors that a collective, or `x.data = y`, gives other contents."""
        if func == _SET_DATA:
            self.forget(args[0])
        elif str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if self.follows(leaf):
                    self.forget(leaf)

    def _set_note(self, tensor: Tensor, note: Note | None) -> None:
        # Most tensors have no note, and need no attribute to say so.
        if note is not None or hasattr(tensor, _ATTRIBUTE):
            setattr(tensor, _ATTRIBUTE, note)

    def _note_of(self, spec: Spec) -> Note:
        """Return the note of a layout."""
        # One dtype for all, because the dtype of a tensor is not part of its layout here.
        spec = spec.with_(shape=spec.shape, dtype=torch.float32)
        return self._notes.setdefault(spec, Note(self, spec))

    # --- tensors that count positions from 0 ------------------------------------------------------

    def _counting_note(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Note | None:
        """Return the note of a result that counts this rank's positions, from unfollowed arguments.

        These are `arange(n)` and `table[:n]` for the number `n` of positions that this rank has.
        """
        # By `==`, because torch makes a new object of a builtin function for each call.
        if func == torch.arange:
            start = args[0] if len(args) > 1 else kwargs.get("start")
            step = args[2] if len(args) > 2 else kwargs.get("step", 1)
            if out.shape != (self._count,) or (start or 0) != 0 or step != 1:
                return None
            # `arange(n)` counts from 0 on every rank, whatever the program means.
            if start is None or not self._rank_0_holds_first:
                return self._counting
            return None if self._is_rank_0 else self._perhaps_counting
        if type(args[0]) not in PLAIN:
            return None
        first_rows = slice(None, self._count)
        shape = args[0].shape
        # strict=False: the index True selects from no dim, but has an entry.
        for size, index in zip(shape, indices_by_dim(shape, args[1]), strict=False):
            if type(index) is slice and index == first_rows and size > self._count:
                return self._counting
        return None

    def _decide_about_counting(self, call: TorchCall, outs: Sequence[Tensor]) -> _Decision:
        """Decide about a function of tensors that count positions, and of none that is followed.

        Its results count positions too, with two exceptions. A sum with another number may be a
        position of the sequence. Rows that are taken by counted indices are local rows, unless a
        larger table is indexed.
        """
        numbers = [leaf for leaf in call.leaves if isinstance(leaf, Tensor | int | float)]
        counted = [leaf for leaf in numbers if isinstance(leaf, Tensor) and self._is_counted(leaf)]
        # "add" of "__radd__", "__iadd__" or "add_"
        operation = call.name.strip("_").removeprefix("r").removeprefix("i")
        if operation in ("add", "sub") and len(counted) < len(numbers):
            return ()
        source = call.args[0] if call.args else None
        if call.name in BY_INDEX and isinstance(source, Tensor):
            is_local_table = not self._is_counted(source) and len(source) <= self._count
            if is_local_table:
                return ()
        is_certain = any(getattr(leaf, _ATTRIBUTE) is self._counting for leaf in counted)
        note = self._counting if is_certain else self._perhaps_counting
        return tuple([note if self._count in out.shape else None for out in outs])

    def _is_counted(self, value: Any) -> bool:
        """Tell whether a value is a tensor that counts positions from 0."""
        note = getattr(value, _ATTRIBUTE, None)
        return note is self._counting or note is self._perhaps_counting

    # --- decisions --------------------------------------------------------------------------------

    def _append_properties(self, values: Iterable[Any], key: list[Any]) -> bool:
        """Append to a key all properties of arguments that a decision depends on.

        These are notes or shapes, dtypes, lengths of lists, and values of other arguments.

        Returns:
            Whether one of the arguments is followed.
        """
        is_followed = False
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                note = getattr(value, _ATTRIBUTE, None)
                if note and note.owner is self:
                    is_followed = True
                    key.append(note)
                else:
                    key.append(value.shape)
                key.append(value.dtype)
            elif kind in LISTS:
                key.append(len(value))
                is_followed = self._append_properties(value, key) or is_followed
            elif kind is slice:
                key += (slice, value.start, value.stop, value.step)
            else:
                # The type tells values that are equal apart, such as 1 and True.
                key += (kind, value)
        return is_followed

    def _look_up_decision(
        self, key: tuple[Any, ...], args: Any, kwargs: Any, outs: Sequence[Tensor]
    ) -> _Decision:
        """Return what a call with followed arguments does, as decided at the first such call."""
        try:
            decision = self._decisions.get(key)
        except TypeError:
            # An argument is not hashable: nothing is noted.
            return ()
        if decision is None:
            func = key[0]
            with unwatched_functions():
                decision = self._decide(func, _name_of(func), args, kwargs, outs=outs)
            if len(self._decisions) < _MOST_DECISIONS:
                self._decisions[key] = decision
        return decision

    def _decide(
        self,
        func: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: Any,
        outs: Sequence[Tensor],
    ) -> _Decision:
        """Decide about a call with followed arguments."""
        arguments = (tuple(args), dict(kwargs))
        call = TorchCall(name, func, *pytree.tree_map(self._spec_or_value, arguments))
        tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
        if not computes_in_torch(func) or any(type(tensor) not in PLAIN for tensor in tensors):
            return ()
        if not call.specs:
            return self._decide_about_counting(call, outs)
        # Results of these calls are not followed, and nothing about them is refused.
        if takes_local_rows(call) or takes_whole_blocks(call, self._layout):
            return ()
        source = next((value for value in call.args if isinstance(value, Spec)), call.specs[0])
        # Random functions such as dropout have the layout of their argument.
        if draws_numbers(name, args, kwargs) or name in COPYING:
            return self._notes_like(source, outs)
        has_only_numbers = not any(map(ndim_of, call.leaves))
        if has_only_numbers and not any(map(sequence_dim, call.specs)):
            return self._decide_about_numbers(call, source, outs)
        try:
            return self._notes_of(self._layouts.results_of(call, outs), outs)
        except (UnfollowedCallError, UnknownReshapeError):
            return ()
        except TornPositionsError:
            return _MixingRefusal(
                f"its result of local shape {tuple(outs[0].shape)} would have rows with positions "
                f"of several ranges or batch rows, because this rank's {self._count} of "
                f"{self._layout.length} positions are not whole blocks of such rows"
            )
        except CountedPositionsError:
            # `arange(0, n)` has no note on rank 0, which therefore decides otherwise.
            is_certain = any(
                getattr(leaf, _ATTRIBUTE, None) is self._counting for leaf in call.leaves
            )
            return _MixingRefusal(_COUNTED, on_all_ranks=is_certain)
        except MixedPositionsError as error:
            return _MixingRefusal(str(error))

    def _decide_about_numbers(
        self, call: TorchCall, source: Spec, outs: Sequence[Tensor]
    ) -> _Decision:
        """Decide about a function of numbers that are sums or means over a rank's positions.

        Example: `sigmoid` of a sum over positions is refused if a gradient flows through it. A
        number without a gradient is for the rank's own report.
        """
        trains = any(out.requires_grad for out in outs)
        if trains and call.name not in _COMBINING:
            try:
                self._layouts.results_of(call, outs)
            except MixedPositionsError as error:
                return _MixingRefusal(f"{error} (for a report, take it of x.detach())")
            except UnfollowedCallError:
                return ()
        return self._notes_like(source, outs)

    def _spec_or_value(self, value: Any) -> Any:
        """Return the layout of a tensor that is followed; another value as it is."""
        note = getattr(value, _ATTRIBUTE, None)
        if not note or note.owner is not self or note.spec is None:
            return value
        return note.spec.with_(dtype=value.dtype)

    def _notes_like(self, spec: Spec, outs: Sequence[Tensor]) -> _Decision:
        """Return notes with the layout of an argument for the results of its local shape."""
        note = self._note_of(spec)
        return tuple([note if out.shape == spec.local_shape else None for out in outs])

    def _notes_of(self, specs: Sequence[Spec | None], outs: Sequence[Tensor]) -> _Decision:
        """Return the notes of results with these layouts."""
        notes: list[Note | None] = []
        # A function that writes to a tensor returns none, so `strict` is off without results.
        for spec, out in zip(specs, outs, strict=bool(outs)):
            # Sums of integers, such as numbers of tokens, are for the rank's own bookkeeping.
            is_count = spec is not None and spec.partials and not out.is_floating_point()
            is_followed = spec is not None and not spec.replicated and not is_count
            notes.append(self._note_of(spec) if spec is not None and is_followed else None)
        return tuple(notes)


@lru_cache(maxsize=64)
def followed_positions(
    line: tuple[int, ...], rank: int, layout: SequenceLayout
) -> FollowedPositions | None:
    """Return the object that follows tensors in blocks over the same ranks with the same layout.

    Args:
        line: the global ranks of the axis.
        rank: this rank's place among them.
        layout: their positions.

    Returns:
        None if one rank holds the whole sequence, if the layout is for another number of ranks, or
        if a rank has fewer than two positions: sizes would not show which dim holds them.
    """
    if layout.ranks != len(line) or layout.ranks == 1 or min(layout.sizes) < 2:
        return None
    return FollowedPositions(layout, rank)


def _make_error(func: Any, refusal: _MixingRefusal) -> UnsupportedAttentionError:
    """Return the error of a refused call, with the line of the program."""
    # imported here, because few programs use the type checker
    from shoal_dtensor.internal import spmd

    # The line is one of the program, not of this package.
    spmd.hide_frames_of(str(Path(__file__).parents[1]))
    return UnsupportedAttentionError(
        f"{spmd.user_line()}: {_name_of(func)} inside of context parallelism: {refusal.reason}. "
        f"{WAY_OUT}"
    )


def _tensors_of(out: Any) -> Sequence[Tensor]:
    """Return the tensors of a function's result; none if it is not a tensor or a list of them."""
    if isinstance(out, Tensor):
        return (out,)
    if isinstance(out, LISTS) and out and isinstance(out[0], Tensor):
        return [item for item in out if isinstance(item, Tensor)]
    return ()


def _name_of(func: Any) -> str:
    # Example: "relu" for `relu.default`.
    return str(getattr(func, "__name__", "")).partition(".")[0]
