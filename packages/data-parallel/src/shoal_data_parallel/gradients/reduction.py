"""Reductions of gradients over data axes, one collective per group, overlapping later work.

A `GroupReduction` sends the gradients of a group to the layouts of its leaves, in one round of
collectives over all data axes, or in a round over the shards and one over the replicas. `deliver`
adds the results to the gradients of the leaves when all have arrived. A `CommContext` has the
reductions that are in flight after their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log2
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal_dtensor import Spec
from shoal_dtensor.internal import (
    FakeTensor,
    download,
    drained,
    redistribute_shards,
)
from shoal_mesh import purpose
from shoal_mesh.internal import parts_like, positions_by_dtype

from .._torch import call_on_stream, divide_each
from ..parameters.data_axes import (
    layout_with_averages,
    move_of_flags,
    on_own_groups,
    scattered_flags,
)
from .communication import CustomScatter, ReduceScatter
from .gradient_group import Grads, Group, Kept, Scattered, in_wanted_layouts


@dataclass(slots=True)
class _Collected:
    """A rank's local gradients of a group, as they are sent."""

    # one dense tensor per trained parameter, then the flags; the list is emptied by sending
    tensors: list[Tensor]
    # their layouts
    layouts: list[Spec]
    # for each parameter whether this rank has a gradient
    present: list[bool]


class _ReductionInFlight(Protocol):
    """Gradients in flight, in one or two rounds of collectives."""

    def reach_last_round(self) -> bool:
        """Start the last round; return False if it has started already."""

    def poll(self) -> None:
        """Process data that has arrived, without waiting."""

    def wait(self) -> list[Tensor]:
        """Return the reduced tensors."""


class _TwoStages:
    """A reduction over the shards, followed by a reduction of its sums over the replicas."""

    def __init__(
        self,
        first: _ReductionInFlight,
        start_second: Callable[[list[Tensor]], _ReductionInFlight],
    ) -> None:
        self._first = first
        self._start_second = start_second
        self._second: _ReductionInFlight | None = None

    def reach_last_round(self) -> bool:
        if self._second is not None:
            return False
        self._second = self._start_second(self._first.wait())
        return True

    def poll(self) -> None:
        (self._second or self._first).poll()

    def wait(self) -> list[Tensor]:
        self.reach_last_round()
        assert self._second is not None, "the second stage has started"
        return self._second.wait()


_HALF_TYPES = (torch.float16, torch.bfloat16)


class GroupReduction:
    """The gradients of a group of parameters in flight to the layout of its leaves.

    `start` makes it. The gradients of the parameters in `returned` go to autograd, and not to the
    leaves.
    """

    __slots__ = (
        "_averaged_over", "_averaged_types", "_divisor", "_flags", "_gradients", "_in_flight",
        "_kept", "_present", "_scattered", "extra", "group", "returned", "stops_at_replicas",
    )  # fmt: skip

    def __init__(self, group: Group, returned: Collection[int]) -> None:
        self.group = group
        self.returned = returned
        # whether the group keeps the sums over the shards, in `Group.scattered`
        self.stops_at_replicas = group.has_replicas and not group.all_reduces and not returned
        # gradients that this reduction took from the group, to be returned if the pass fails
        self._kept: Kept = {}
        self._scattered: Scattered = {}
        self._present: list[bool] = []
        self._in_flight: _ReductionInFlight | None = None
        # the divisor of sums, and the number of ranks by which the collective has divided already
        self._divisor = 1.0
        self._averaged_over = 1.0
        # the dtypes whose gradients are sent as averages
        self._averaged_types: tuple[torch.dtype, ...] = ()
        # the gradients of a reduction that has been waited for
        self._gradients: Callable[[], list[Tensor]] | None = None
        # the summed flags of all ranks, if this rank needs them to know which gradients exist
        self._flags: Tensor | None = None
        # the group's extra flags, summed over the ranks; None for a group without
        self.extra: Tensor | None = None

    @classmethod
    def start(
        cls,
        group: Group,
        grads: Grads,
        returned: Collection[int] = (),
        *,
        with_kept: bool = True,
    ) -> GroupReduction:
        """Send gradients, by default with kept ones.

        `grads` are removed from the dict one by one, so that no gradient is held together with its
        sum.
        """
        reduction = cls(group, returned)
        adds = any(grad is not None for grad in grads.values())
        reduction._divisor = group.divide_by(adds=adds or not with_kept)
        kept = reduction._take_kept() if with_kept else {}
        reduction._averaged_types = reduction._types_to_average()
        collected = _collect(group, grads, kept)
        reduction._present = collected.present
        with purpose(f"{group.made_by} reduces {group.name}"):
            reduction._send(collected)
        return reduction

    def _take_kept(self) -> Kept:
        """Remove the gradients of earlier passes from the group, and return them."""
        group = self.group
        kept = group.kept
        group.kept = {}
        if not group.partially_accumulated:
            self._kept = kept.copy()
        if not self.stops_at_replicas:
            self._scattered = group.scattered
            group.scattered = {}
        return kept

    def _send(self, collected: _Collected) -> None:
        group = self.group
        reduced = [group.parameters[i].reduced for i in group.trained]
        flag_count = collected.tensors[-1].shape[1]
        flags, reduced_flags = move_of_flags(
            collected.layouts[0], group.axes, flag_count, reduced[0].dtype
        )
        sources = self._as_sent([*collected.layouts, flags])
        targets = self._on_groups([*reduced, reduced_flags])
        custom = group.communication.reduce_scatter
        if custom is None and not self._has_two_stages:
            moves = [*zip(sources, targets, strict=True)]
            self._in_flight = redistribute_shards(drained(collected.tensors), moves)
            return
        scattered = [group.parameters[i].scattered_layout(group.axes) for i in group.trained]
        scattered.append(scattered_flags(reduced_flags, group.axes))
        scattered = self._as_sent(scattered)
        moves = [*zip(sources, scattered, strict=True)]
        if custom is None:
            self._in_flight = redistribute_shards(drained(collected.tensors), moves)
        else:
            self._in_flight = self._send_by(custom, collected.tensors, moves)
        if group.has_replicas and not self.stops_at_replicas:
            last_moves = [*zip(scattered, targets, strict=True)]
            self._in_flight = _TwoStages(
                self._in_flight,
                lambda sums: redistribute_shards(self._with_scattered(sums), last_moves),
            )

    @property
    def _has_two_stages(self) -> bool:
        """True if sums over the shards alone are kept, or sums of earlier passes are added."""
        return self.stops_at_replicas or bool(self._scattered)

    def _types_to_average(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes whose gradients are sent as averages.

        The sum of half types may leave their range. A small divisor needs a sum: to get it, an
        average would be multiplied afterwards, and small gradients would be zero by then. Gradients
        that are kept between two stages are always averaged, because a later pass may have another
        divisor.
        """
        communication = self.group.communication
        if communication.reduce_scatter is not None:
            return ()
        is_small = self._divisor**2 < self.group.num_ranks
        averages = self._has_two_stages or not (is_small or communication.sums_only)
        return _HALF_TYPES if averages else ()

    def _as_sent(self, layouts: list[Spec]) -> list[Spec]:
        """Return the layouts in which local gradients are sent.

        They are sums over the data axes, or averages.
        """
        if self._averaged_types:
            data_axes = self.group.axes.mesh.ndim
            for i, layout in enumerate(layouts):
                if layout.dtype in self._averaged_types:
                    layouts[i] = layout_with_averages(layout, data_axes)
        return self._on_groups(layouts)

    def _on_groups(self, layouts: list[Spec]) -> list[Spec]:
        """Return layouts on separate process groups for collectives, if the user wants that."""
        if not self.group.communication.separate_groups:
            return layouts
        return [on_own_groups(layout) for layout in layouts]

    def _send_by(
        self, custom: ReduceScatter, tensors: list[Tensor], moves: list[tuple[Spec, Spec]]
    ) -> _ReductionInFlight:
        group = self.group
        # As in torch, the collective averages, rather than the division afterwards, if the divisor
        # is the number of ranks and sums in the dtype do not overflow.
        divides_by_ranks = self._divisor == group.num_ranks
        cannot_overflow = {tensor.dtype for tensor in tensors} <= {torch.float32, torch.bfloat16}
        needs_sums = group.communication.sums_only or self.stops_at_replicas or self._scattered
        averages = divides_by_ranks and cannot_overflow and not needs_sums
        axes = group.axes
        if group.communication.separate_groups:
            axes = axes.on_own_groups()
        # The collective sums in float16, which overflows easily: about the root of the divisor
        # comes before the sum, and the rest after it. A power of two changes no digits.
        scale = 1.0
        if tensors[0].dtype is torch.float16 and self._divisor > 1 and not self._has_two_stages:
            scale = 2.0 ** -round(log2(self._divisor) / 2)
        *gradients, flags = tensors
        scaled = [gradient * scale for gradient in gradients] if scale != 1 else gradients
        sent = CustomScatter(custom, axes, [*scaled, flags], moves, averages=averages)
        self._averaged_over = sent.divided_by / scale
        tensors.clear()
        return sent

    def _with_scattered(self, sums: list[Tensor]) -> list[Tensor]:
        """Add the sums of earlier passes, and their flags, to the sums of this one."""
        *gradients, flags = sums
        flags = flags.clone()
        for at, i in enumerate(self.group.trained):
            if i in self._scattered:
                earlier, flag = self._scattered[i]
                gradients[at] = gradients[at] + earlier
                flags[..., at] += flag
        return [*gradients, flags]

    def go_on(self) -> None:
        """Start the last round of the reduction; if it has started already, wait for it."""
        if self._in_flight is not None and not self._in_flight.reach_last_round():
            self.wait()

    def wait(self) -> None:
        """Have later work on the device wait for the reduction.

        If the leaves are on the host, start to copy the gradients there.
        """
        if self._in_flight is None:
            return
        *reduced, flags = self._in_flight.wait()
        # the finished object would keep the memory of its results
        self._in_flight = None
        if not self.stops_at_replicas:
            reduced = self._finish(reduced)
        group = self.group
        leaves = [group.parameters[i].leaf for i in group.trained]
        computes_on_device = group.axes.mesh.device_type != "cpu"
        is_offloaded = computes_on_device and any(leaf.is_cpu for leaf in leaves)
        is_downloaded = is_offloaded and not self.stops_at_replicas
        self._gradients = download(reduced) if is_downloaded else lambda: reduced
        # If this rank has all gradients, they all exist, and no flag has to be read.
        needs_flags = not all(self._present) or self._scattered or self.stops_at_replicas
        if isinstance(flags, FakeTensor) or not (needs_flags or group.extra_flags):
            return
        count = len(self._present)
        row = flags.reshape(-1, count + group.extra_flags)[0]
        if needs_flags:
            self._flags = row[:count]
        if group.extra_flags:
            extra = row[count:]
            is_average = flags.dtype in self._averaged_types
            self.extra = extra * group.num_ranks if is_average else extra

    def _finish(self, reduced: list[Tensor]) -> list[Tensor]:
        """Divide sums, and pass them to the user's hook."""
        communication = self.group.communication
        divides_last = communication.sums_only
        if not divides_last:
            self._divide(reduced)
        if communication.hook is not None:
            reduced = _apply_hook(reduced, communication.hook, communication.hook_stream)
        if divides_last:
            self._divide(reduced)
        return reduced

    def _divide(self, reduced: list[Tensor]) -> None:
        """Divide sums by the divisor, and averages by its share of the number of ranks."""
        averages = [gradient for gradient in reduced if gradient.dtype in self._averaged_types]
        sums = [gradient for gradient in reduced if gradient.dtype not in self._averaged_types]
        divisor_of_averages = self._divisor / self.group.num_ranks
        if averages and divisor_of_averages != 1:
            divide_each(averages, divisor_of_averages)
        divisor_of_sums = self._divisor / self._averaged_over
        if sums and divisor_of_sums != 1:
            divide_each(sums, divisor_of_sums)

    def gradients(self) -> list[Tensor]:
        """Return the reduced local gradients; zeros for a parameter that had none on any rank."""
        self.wait()
        assert self._gradients is not None, "the reduction has finished"
        return self._gradients()

    def poll(self) -> None:
        """Process arrived data on the CPU, so that other ranks of the host do not wait for it."""
        if self._in_flight is not None and self.group.axes.mesh.device_type == "cpu":
            self._in_flight.poll()

    def return_kept(self) -> None:
        """Return kept gradients to the group, because the pass has failed."""
        self.group.kept.update(self._kept)
        self.group.add_scattered(self._scattered)

    def keep_scattered(self) -> None:
        """Add the sums over the shards to the sums that the group keeps.

        A later pass reduces them over the replicas.
        """
        gradients = self.gradients()
        flags = self._flags
        assert flags is not None, "sums over the shards have flags"
        sums: Scattered = {}
        for at, i in enumerate(self.group.trained):
            sums[i] = (gradients[at], flags[at])
        self.group.add_scattered(sums)


def _collect(group: Group, grads: Grads, kept: Kept) -> _Collected:
    """Remove gradients of this pass and kept ones one by one, add them up, and append the flags.

    A flag is 1 if this rank has the gradient of a parameter, and else 0. There is one row of flags
    for each shard of a leaf, so that each rank gets the sums of all ranks.
    """
    tensors: list[Tensor] = []
    layouts: list[Spec] = []
    present: list[bool] = []
    for i in group.trained:
        parameter = group.parameters[i]
        grad = grads.pop(i, None)
        before = kept.pop(i, None)
        present.append(grad is not None or before is not None)
        local, spec = parameter.gradient(grad) if grad is not None or before is None else before
        if grad is not None and before is not None:
            (added,) = in_wanted_layouts([local], [spec], [before[1]])
            local = before[0].add(added)
            spec = before[1]
        tensors.append(local.to(spec.dtype).contiguous())
        layouts.append(spec)
    partial = [group.parameters[i].partial for i in group.trained]
    tensors = in_wanted_layouts(tensors, layouts, partial)
    columns = len(present) + group.extra_flags
    flags = tensors[0].new_ones((group.num_leaf_shards, columns))
    # filled on the device, so that the host does not wait for a copy to it
    for at, is_present in enumerate(present):
        if not is_present:
            flags[:, at].zero_()
    if group.extra_flags:
        extra = group.extra_columns()
        flags[:, len(present) :] = 0 if extra is None else extra
    tensors.append(flags)
    return _Collected(tensors, partial, present)


def _apply_hook(reduced: list[Tensor], hook: Callable[[Tensor], None], stream: Any) -> list[Tensor]:
    """Pass gradients to a hook, one flat tensor per dtype, which it may write to."""
    hooked = list(reduced)
    for positions in positions_by_dtype([gradient.dtype for gradient in reduced]):
        same_dtype = [reduced[i] for i in positions]
        flat = torch.cat([gradient.reshape(-1) for gradient in same_dtype])
        if stream is None:
            hook(flat)
        else:
            call_on_stream(stream, hook, flat)
        for i, part in zip(positions, parts_like(flat, same_dtype), strict=True):
            hooked[i] = part
    return hooked


def gradients_by_parameter(reductions: Sequence[GroupReduction]) -> list[dict[int, Tensor]]:
    """Return for each reduction its gradients by parameter, without gradients that no rank had.

    The host reads flags from the device only if this rank lacks a gradient. It reads the flags of
    all reductions at once.
    """
    for reduction in reductions:
        reduction.wait()
    flags_to_read = [reduction._flags for reduction in reductions if reduction._flags is not None]
    counts: list[Any] = []
    if flags_to_read:
        device = flags_to_read[0].device
        counts = torch.cat([flags.to(device) for flags in flags_to_read]).tolist()
    found = []
    read = iter(counts)
    for reduction in reductions:
        present: Sequence[float] = reduction._present
        if reduction._flags is not None:
            present = [*islice(read, len(present))]
        communication = reduction.group.communication
        # a hook may have brought gradients from elsewhere
        if communication.zeros_for_unused or communication.hook is not None:
            present = [True] * len(present)
        gradients = zip(reduction.group.trained, reduction.gradients(), present, strict=True)
        found.append({i: gradient for i, gradient, is_there in gradients if is_there})
    return found


@torch.no_grad()
def deliver(reductions: Sequence[GroupReduction]) -> None:
    """Add reduced gradients to the gradients of the leaves, when all have arrived."""
    complete = [reduction for reduction in reductions if not reduction.stops_at_replicas]
    incomplete = [reduction for reduction in reductions if reduction.stops_at_replicas]
    for reduction, grads in zip(complete, gradients_by_parameter(complete), strict=True):
        for i, grad in grads.items():
            if i not in reduction.returned:
                reduction.group.parameters[i].accumulate(grad)
    for reduction in incomplete:
        reduction.keep_scattered()


class CommContext:
    """Reductions in flight after their backward.

    A later backward stores their results as gradients, or the user's `finalize_backward` does.
    """

    def __init__(self) -> None:
        self.pending: list[GroupReduction] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the modules, in which nothing is in flight."""
        return {"pending": []}

    def take_pending(self) -> list[GroupReduction]:
        """Return all reductions, in the order in which they began, and forget them."""
        taken = self.pending
        self.pending = []
        return taken

    def drop(self, group: Group) -> None:
        """Wait for a group's reductions, and drop their results.

        The wait completes the collectives, in which the other ranks take part.
        """
        for reduction in self.pending:
            if reduction.group is group:
                reduction.wait()
        self.pending = [reduction for reduction in self.pending if reduction.group is not group]
