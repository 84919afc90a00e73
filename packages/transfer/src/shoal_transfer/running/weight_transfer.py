"""`WeightTransfer`: a planned transfer between two models, made once and run at each step.

In a run the members agree on a version, a `Runner` moves the elements, and the target commits them
when they have arrived on all ranks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..errors import MappingError, TransferError
from ..manifest.describe import describe_rank
from ..manifest.records import Manifest, merge_manifests
from ..manifest.weights import Model, own_rank
from ..planning.plan import plan_transfer
from ..planning.transfer_plan import TransferPlan
from .computed_elements import Computations, Function
from .memories import (
    LocalMemories,
    Place,
    group_by_memory,
    parts_of_rank,
    second_copy,
    written_places,
)
from .program import ProgramStep, Seat, compile_program
from .runner import Runner
from .wires import GroupWire, LocalWire, Roster, Wire

Mode = Literal["staged", "in_place"]
Result = TypeVar("Result")


class Sync(NamedTuple):
    """The result of one transfer on this rank.

    Attributes:
        version: version of the weights that arrived.
        was_delta: whether only changed elements were sent.
        bytes_sent: bytes that this rank sent.
        bytes_whole: bytes that this rank would have sent without a delta.

    Example:
        >>> Sync(version=1, was_delta=False, bytes_sent=8, bytes_whole=8).version
        1
    """

    version: int
    was_delta: bool
    bytes_sent: int
    bytes_whole: int


class _Report(NamedTuple):
    """The report of a member to the others before bytes move."""

    # digest of the plan
    digest: str
    # version of the weights to send; None on a rank that only receives
    version: int | None
    # version of the last transfer; None if there was none, or if it failed
    base: int | None
    shapes_changed: bool
    error: str | None


class WeightTransfer:
    """A transfer that is planned once and run at each step.

    All ranks of both sides make one, with equal plans, and call its methods in the same order.

    In mode "staged" the target has a second copy of its weights, into which elements arrive. When
    all ranks have all elements of a version, the copy is written to the weights. If a transfer
    fails before that, the target keeps its old weights. In mode "in_place" elements arrive in the
    weights themselves, so the weights must not be used during a transfer. After a fault `is_valid`
    is False until a transfer succeeds.

    Args:
        plan: the plan that `plan_transfer` returned.
        source: the model that sends; None on ranks that hold nothing of it.
        target: the model that receives; None on ranks that hold nothing of it.
        wire: the link between the ranks; by default c10d, in the world of this process. Two worlds
            need a `JointWire` or a `FolderWire`.
        mode: "staged" or "in_place".
        deltas: send only the elements whose bits changed since the last transfer, where they are
            fewer bytes. The sender keeps a copy of the elements that it sent. In mode "in_place"
            the target must not change the weights between two transfers.
        finish: called on target ranks after a transfer, once for each layer, with the names of its
            tensors; for example to quantize them.
        compute: the functions of the mapping's computed tensors, by their names in the mapping, as
            for `learn_mapping`. They are called on target ranks after a transfer and before
            `finish`.

    Attributes:
        plan: the plan; made again when shapes or strides of local tensors have changed.
        version: version of the weights that the target has, or that the source sent; None before
            the first transfer.
        is_valid: whether all of the target's weights have the same version; False while they are
            committed, and after `finish` or a function of `compute` has raised.

    Raises:
        TransferError: no wire is given for two worlds, or the mode does not exist.

    Example:
        >>> from shoal_transfer import describe, plan_transfer
        >>> trainer = torch.nn.Linear(4, 2)
        >>> server = torch.nn.Linear(4, 2)
        >>> plan = plan_transfer(describe(trainer), describe(server))
        >>> WeightTransfer(plan, source=trainer, target=server).run(version=1).version
        1
        >>> torch.equal(trainer.weight, server.weight)
        True
    """

    def __init__(  # noqa: PLR0913  # the two models and independent options, all keywords
        self,
        plan: TransferPlan,
        *,
        source: Model | None = None,
        target: Model | None = None,
        wire: Wire | None = None,
        mode: Mode = "staged",
        deltas: bool = False,
        finish: Callable[[list[str]], object] | None = None,
        compute: Mapping[str, Function] | None = None,
    ) -> None:
        if mode not in ("staged", "in_place"):
            raise TransferError(f"mode must be 'staged' or 'in_place', got {mode!r}")
        self.plan = plan
        self.version: int | None = None
        self.is_valid = True
        self._mode = mode
        self._deltas = deltas
        self._finish = finish
        self._wire = _default_wire(plan) if wire is None else wire
        self._source = LocalMemories(source)
        self._target = LocalMemories(target)
        self._models = (source, target)
        self._roster = Roster.of(plan.source, plan.target)
        self._seat = _seat_of(self._roster, self._wire, source, target)
        self._parts = self._find_parts()
        self._functions = dict(compute or {})
        self._computations = Computations(plan, self._seat.target_rank, self._functions)
        # the second copy of the target's local tensors, by name; empty in mode "in_place"
        self._staging: dict[str, Tensor] = {}
        # of the local tensors that a transfer writes in part
        self._written: dict[str, list[Place]] = {}
        self._targets_overlap = False
        # the compiled program; None if it has to be compiled
        self._steps: list[ProgramStep] | None = None
        # the version whose elements both sides have, so that a delta can follow
        self._base: int | None = None
        self._runner = Runner(self._wire, digests=True, deltas=deltas)
        self._thread: threading.Thread | None = None
        self._outcome: Sync | BaseException | None = None
        self._source.shapes_changed()
        self._target.shapes_changed()

    # --- runs ----------------------------------------------------------------------------------

    def run(self, version: int | None = None) -> Sync:
        """Move the weights; all ranks of both sides call this.

        Args:
            version: number of the weights, not smaller than the last version; needed on ranks of
                the source.

        Returns:
            The version that arrived, and the bytes that this rank sent.

        Raises:
            TransferError: on all ranks, if the ranks have different plans or versions, or the
                version is older than the target's; no data was transferred then. Also if the
                elements that arrived differ from the elements that were sent, or a rank failed: the
                message describes the state of the target.
        """
        self.wait()
        sync = self._receive(version)
        self._commit(sync.version)
        return sync

    def start(self, version: int | None = None) -> None:
        """Begin `run` in the background; `wait` returns its result.

        The source's weights must not change before they are read: `guard` lets an optimizer wait.
        Over the ranks of one world, one transfer at a time is in flight.

        Args:
            version: as for `run`.

        Example:
            >>> from shoal_transfer import describe, plan_transfer
            >>> one, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
            >>> transfer = WeightTransfer(
            ...     plan_transfer(describe(one), describe(other)), source=one, target=other
            ... )
            >>> transfer.start(version=1)
            >>> transfer.wait().version
            1
        """
        self.wait()
        self._runner.begin_reading()

        def move() -> None:
            try:
                self._outcome = self._receive(version)
            except BaseException as error:
                self._outcome = error
            finally:
                self._runner.finish_reading()

        self._thread = threading.Thread(target=move, name="shoal weight transfer", daemon=True)
        self._thread.start()

    def wait(self) -> Sync | None:
        """Wait for a transfer in the background; commit it and return its result.

        In mode "staged" the target uses its old weights until this call.

        Returns:
            The result; None if no transfer is in flight.

        Raises:
            TransferError: as for `run`.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        outcome = self._outcome
        self._outcome = None
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None, "the thread has ended"
        self._commit(outcome.version)
        return outcome

    def guard(self, optimizer: Optimizer) -> None:
        """Let an optimizer's `step` wait until a transfer in flight has read the weights.

        Args:
            optimizer: the optimizer of the source's weights.

        Example:
            >>> from shoal_transfer import describe, plan_transfer
            >>> model = torch.nn.Linear(4, 2)
            >>> plan = plan_transfer(describe(model), describe(model))
            >>> WeightTransfer(plan, source=model, target=model).guard(
            ...     torch.optim.SGD(model.parameters(), lr=0.1)
            ... )
        """

        def wait_for_reads(*_: Any) -> None:
            self._runner.wait_for_reads()

        optimizer.register_step_pre_hook(wait_for_reads)

    def witness(self) -> None:
        """Check the mapping with the weights that the target has loaded by itself: version 0.

        The source sends the same weights, and the elements that arrive are compared bitwise with
        the target's elements. Nothing is committed. Afterwards the plan counts as verified.

        Raises:
            MappingError: on all ranks, if an element differs; the message names the tensor and how
                many elements differ on which rank.
            TransferError: the mode is not "staged", or the transfer failed.

        Example:
            >>> from shoal_transfer import WeightMapping, describe, plan_transfer
            >>> source = {"gate": torch.zeros(2), "up": torch.ones(2)}
            >>> target = {"gate": torch.zeros(2), "up": torch.ones(2)}
            >>> exchanged = {"gate": "x", "up": "gate", "x": "up"}
            >>> mapping = WeightMapping.same_names({"gate": (2,), "up": (2,)}).rename(exchanged)
            >>> plan = plan_transfer(describe(source), describe(target), mapping)
            >>> try:
            ...     WeightTransfer(plan, source=source, target=target).witness()
            ... except MappingError as error:
            ...     print(str(error)[:47])
            version 0 differs: 'gate' in 2 of 2 elements on
        """
        if self._mode != "staged":
            raise TransferError("witness compares two copies, which exist only in mode 'staged'")
        self.wait()
        self._receive(0 if self._seat.source_rank is not None else None)
        different = self._differences()
        gathered = self._wire.gather(different)
        messages = [text for texts in gathered for text in texts]
        self._base = None
        if messages:
            raise MappingError(f"version 0 differs: {'; '.join(messages)}")
        self.plan = replace(self.plan, mapping=self.plan.mapping.witnessed_by("version 0"))

    # --- steps of a run ------------------------------------------------------------------------

    def _receive(self, version: int | None) -> Sync:
        """Move the elements of a version, in mode "staged" into the second copy."""
        version, is_delta = self._agree(version)
        assert self._steps is not None, "compiled before the ranks agreed"
        self._base = None
        if self._mode == "in_place":
            self.is_valid = False
        try:
            counts = self._runner.run(self._steps, is_delta, targets_overlap=self._targets_overlap)
        except Exception as error:
            raise TransferError(
                f"version {version} did not arrive ({error}); {self._state()}"
            ) from error
        self._base = version
        return Sync(version, is_delta, counts.sent, counts.whole)

    def _agree(self, version: int | None) -> tuple[int, bool]:
        """Compare what the members report; make the plan again if local tensors have changed.

        Returns:
            The version that all send, and whether only changed elements are to be sent.
        """
        reports = self._gather(self._report(version))
        agreed = _compare(reports)
        if any(one.shapes_changed for one in reports):
            self._plan_again()
            return agreed, False
        bases = {one.base for one in reports}
        return agreed, self._deltas and len(bases) == 1 and None not in bases

    def _gather(self, report: _Report) -> list[_Report]:
        try:
            return self._wire.gather(report)
        except Exception as error:
            raise TransferError(
                f"a member does not answer ({error}); no data was transferred"
            ) from error

    def _report(self, version: int | None) -> _Report:
        """Prepare this rank for a transfer; a failure is part of the report."""
        report = _Report(self.plan.digest, version, None, shapes_changed=False, error=None)
        sides = (self._source, self._target)
        try:
            # lists, because each call also notes the present addresses and shapes
            moved = [memories.refresh() for memories in sides]
            changed = [memories.shapes_changed() for memories in sides]
            if any(moved):
                self._forget_program()
            report = report._replace(
                base=self._base, shapes_changed=any(changed), error=self._refuse(version)
            )
            if report.error is None and not report.shapes_changed:
                self._compile()
        except Exception as error:  # raised by all members
            return report._replace(error=f"{type(error).__name__}: {error}")
        return report

    def _refuse(self, version: int | None) -> str | None:
        """Return the reason why this rank refuses a version; None if it does not."""
        missing = (
            self._missing_model() or self._computations.describe_missing() or self._memory_defect()
        )
        if missing is not None:
            return missing
        if self._computations and self._deltas and self._mode == "in_place":
            return "deltas need the elements as they arrived, which mode 'in_place' computes on"
        if self._seat.source_rank is not None and version is None:
            return "ranks of the source must pass a version"
        if version is not None and self.version is not None and version < self.version:
            return (
                f"version {version} is older than version {self.version}; pass an increasing "
                "version"
            )
        return None

    def _memory_defect(self) -> str | None:
        """Return the reason why the local tensors cannot be used; None if they can."""
        sides = (("source", self._source), ("target", self._target))
        for side, memories in sides:
            defect = memories.defect(self._parts[side])
            if defect is not None:
                return f"{side}: {defect}"
        for part in self._parts["target"]:
            tensor = self._target.tensors[part]
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            if any(size > 1 and not step for size, step in strides):
                return f"target: elements of {part!r} share memory, by strides of 0"
        if self._mode == "in_place":
            shared = self._target.shared_with(self._source)
            if shared is not None:
                return (
                    f"target: {shared!r} shares memory with the source, which mode 'in_place' "
                    "would overwrite before it is read; use mode 'staged'"
                )
        return None

    def _missing_model(self) -> str | None:
        """Return an error text if this rank lacks a model that the plan needs; else None."""
        sides = (("source", self._source), ("target", self._target))
        for side, memories in sides:
            for part in self._parts[side]:
                if part not in memories.tensors:
                    return (
                        f"by the plan, {side} holds {part!r} on this rank; pass its model as "
                        f"{side}="
                    )
        return None

    def _find_parts(self) -> dict[str, list[str]]:
        """Return the names of the local tensors of this process, by side."""
        member = self._wire.member
        parts = {}
        for side in ("source", "target"):
            ranks = {one: rank for rank, one in getattr(self._roster, side).items()}
            parts[side] = parts_of_rank(getattr(self.plan, side), ranks.get(member))
        return parts

    def _forget_program(self) -> None:
        self._steps = None
        self._staging = {}
        self._base = None

    def _compile(self) -> None:
        """Make the program, and the second copy that it writes to in mode "staged"."""
        if self._steps is not None:
            return
        target = self._target.tensors
        groups = group_by_memory(target, self._parts["target"])
        self._targets_overlap = any(len(group) > 1 for group in groups)
        if self._mode == "staged" and self._seat.target_rank is not None:
            self._staging = second_copy(target, groups)
            self._written = written_places(self.plan, self._seat.target_rank)
            target = self._staging
        self._steps = compile_program(self.plan, self._seat, self._source.tensors, target)

    def _plan_again(self) -> None:
        """Describe both models again, plan with the new manifests, and compile the plan."""
        self._forget_program()
        gathered = self._all_of(self._describe_again)
        manifests = []
        for side, old in enumerate((self.plan.source, self.plan.target)):
            parts = [one[side] for one in gathered]
            merged = merge_manifests([part for part in parts if part is not None])
            manifests.append(replace(old, tensors=merged.tensors))
        self.plan = plan_transfer(
            manifests[0], manifests[1], self.plan.mapping, max_bytes=self.plan.max_bytes
        )
        self._parts = self._find_parts()
        self._computations = Computations(self.plan, self._seat.target_rank, self._functions)
        self._all_of(self._compile)

    def _all_of(self, work: Callable[[], Result]) -> list[Result]:
        """Do this rank's work; return all ranks' results, or raise the first failure on all."""
        result: Result | None = None
        failure: str | None = None
        try:
            result = work()
        except Exception as error:  # raised by all members
            failure = f"{type(error).__name__}: {error}"
        reports = self._wire.gather((result, failure))
        _raise_first([failed for _, failed in reports])
        return [one for one, _ in reports]

    def _describe_again(self) -> list[Manifest | None]:
        """Return this rank's part of both manifests; None for a model that it does not have."""
        described: list[Manifest | None] = []
        for model, manifest in zip(self._models, (self.plan.source, self.plan.target), strict=True):
            if model is None:
                described.append(None)
                continue
            part = describe_rank(
                model,
                world=manifest.world,
                rename=manifest.rename,
                per_rank=manifest.per_rank,
            )
            described.append(part)
        return described

    @torch.no_grad()
    def _commit(self, version: int) -> None:
        """Use the elements that arrived on all ranks."""
        target = self._target.tensors
        # until the functions of the user below have returned
        self.is_valid = False
        for name, arrived in self._staging.items():
            if name not in self._written:
                target[name].copy_(arrived)
                continue
            for place in self._written[name]:
                place.view(target).copy_(place.view(self._staging))
        self._computations.apply(self._staging or target, target)
        if self._finish is not None and self._seat.target_rank is not None:
            for names in _layers(self.plan).values():
                self._finish(names)
        self.version = version
        self.is_valid = True

    def _differences(self) -> list[str]:
        """Describe the tensors in which elements that arrived differ from the target's elements."""
        counts = dict[str, list[int]]()
        for record, place in self._computations.places():
            arrived = self._computations.elements_for(record, place.view(self._staging))
            pair = [_bytes_of(arrived), _bytes_of(place.view(self._target.tensors))]
            count = counts.setdefault(record.name, [0, 0])
            count[0] += int((pair[0] != pair[1]).any(dim=1).sum())
            count[1] += pair[0].shape[0]
        rank = self._seat.target_rank
        messages = []
        for name, (different, total) in counts.items():
            if different:
                messages.append(
                    f"{name!r} in {different} of {total} elements on target rank {rank}"
                )
        return messages

    def _state(self) -> str:
        """Describe the state of the target after a fault."""
        if self._mode == "staged":
            return f"the target keeps the complete version {self.version}"
        return "the target's weights are invalid until a transfer succeeds"


def _seat_of(roster: Roster, wire: Wire, source: Model | None, target: Model | None) -> Seat:
    """Return the ranks of this process, by its number among the members."""
    if roster.size != wire.size:
        raise TransferError(f"the plan has {roster.size} members, but the wire has {wire.size}")
    source_ranks = {member: rank for rank, member in roster.source.items()}
    target_ranks = {member: rank for rank, member in roster.target.items()}
    source_rank = None if source is None else source_ranks.get(wire.member)
    target_rank = None if target is None else target_ranks.get(wire.member)
    return Seat(source_rank, target_rank)


def _default_wire(plan: TransferPlan) -> Wire:
    if not plan.is_one_world:
        raise TransferError(
            f"worlds {plan.source.world!r} and {plan.target.world!r} do not share a process "
            "group; pass a JointWire or a FolderWire"
        )
    ranks = sorted({*plan.source.hosts, *plan.target.hosts})
    if not dist.is_initialized():
        return LocalWire()
    if own_rank() not in ranks:
        raise TransferError(f"rank {own_rank()} is not among the ranks of the plan, {ranks}")
    return GroupWire(ranks)


def _bytes_of(view: Tensor) -> Tensor:
    """Return the bytes of each element, (n, itemsize)."""
    return view.reshape(-1).view(torch.uint8).reshape(-1, view.itemsize)


def _compare(reports: list[_Report]) -> int:
    """Return the version that all members agree on; raise TransferError if there is none."""
    _raise_first([one.error for one in reports])
    if len({one.digest for one in reports}) > 1:
        raise TransferError(
            "the members have different plans: make them from the same manifests and mapping; no "
            "data was transferred"
        )
    versions = {one.version for one in reports if one.version is not None}
    if len(versions) != 1:
        raise TransferError(
            f"the ranks of the source must send one version, got {sorted(versions)}; no data was "
            "transferred"
        )
    return versions.pop()


def _raise_first(errors: list[str | None]) -> None:
    """Raise the first member's error."""
    for member, error in enumerate(errors):
        if error is not None:
            raise TransferError(f"member {member}: {error}; no data was transferred")


def _layers(plan: TransferPlan) -> dict[str, list[str]]:
    """Group the target's tensors by layer: the part of a name up to its first number."""
    layers = dict[str, list[str]]()
    for name in plan.target.tensors:
        found = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(found[1] if found else name, []).append(name)
    return layers
