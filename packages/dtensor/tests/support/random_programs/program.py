"""A program: lines of Python on tensors, and running them on one device and on a mesh.

Lines are text, so a program that fails prints itself. They make tensors with the names of
`Machine.names()` and use nothing else but torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from settings_and_refusals import Watcher, deterministic, unless_refused
from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    local_map,
    zeros,
)
from shoal_dtensor.errors import ShoalTensorError
from shoal_dtensor.layout.dim_sharding import ShardOrder
from shoal_dtensor.tensor.autograd import move_to
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import rank_pool

__all__ = ["Machine", "Program", "loss_of", "run_many", "run_one"]

# Of values that went through a dtype; a program with a narrower one is compared no more closely
# than that.
TOLERANCES = {torch.float32: 2e-4, torch.complex64: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}
# Methods of `Machine` that lines may call.
NAMES = (
    "real", "leaf", "ints", "flags", "const", "place", "near", "tried", "watched", "default",
    "deterministic", "rebuilt", "spread", "placed", "filled", "mapped",
)  # fmt: skip
# Autograd, of a write with a gradient to a view that `t_` or the like has reshaped, or to its base.
RESHAPED_VIEW = "This view is the output of a function that returns multiple views"


@dataclass(frozen=True, slots=True)
class Program:
    """A mesh shape and the lines to run on it.

    Example:
        >>> program = Program((4,), ("a = real(0, (3,), [Shard(0)])", "b = a + 1"))
        >>> print(program.script())  # doctest: +ELLIPSIS
        from random_programs import Program, run_one
        from shoal_mesh.testing import rank_pool
        ...
    """

    mesh: tuple[int, ...]
    lines: tuple[str, ...]

    @property
    def changes_settings(self) -> bool:
        """Whether lines change settings of the process, which ranks on threads share."""
        return any("default(" in line or "deterministic(" in line for line in self.lines)

    def script(self) -> str:
        """A script that runs the program on four ranks, and shows where it differs."""
        lines = "\n".join(f"    {line!r}," for line in self.lines)
        return (
            f"from {__package__} import Program, run_one\n"
            f"from {rank_pool.__module__} import rank_pool\n\n"
            f"PROGRAM = Program({self.mesh}, (\n{lines}\n))\n\n"
            'if __name__ == "__main__":\n'
            "    for outcome in rank_pool(4).run(run_one, PROGRAM):\n"
            "        print(outcome)\n"
        )


@dataclass
class Machine:
    """Runs lines on plain tensors, or on DTensors if there is a mesh.

    Attributes:
        mesh: the mesh.
        dtype: torch's default dtype while lines run.
        leaves: the tensors that get a gradient.
        kept: tensors whose memory a redistribution may share, so that they must not be written to.
        values: what the lines have made, by name.
    """

    mesh: DeviceMesh | None = None
    dtype: torch.dtype = torch.float32
    leaves: dict[str, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        """What lines may name."""
        made = {name: getattr(self, name) for name in NAMES}
        placements = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
        return {"torch": torch, "F": F, **placements, **made}

    def run(self, lines: Sequence[str]) -> None:
        """Run lines, one after the other."""
        names = self.names()
        # names of tensors inside of a lambda are looked up there
        names.update(self.values)
        before = torch.get_default_dtype()
        try:
            for line in lines:
                torch.set_default_dtype(self.dtype)
                exec(line, names, self.values)
                names.update(self.values)
                # Torch takes a view of what has got a gradient for a leaf until its history is
                # asked for.
                _ = [x.is_leaf for x in self.tensors().values()]
        finally:
            torch.set_default_dtype(before)

    def real(
        self, seed: int, shape: tuple[int, ...], placements: Sequence[Placement], **order: Any
    ) -> Any:
        """Distinct values between -1 and 1, partial ones among the placements."""
        count = torch.Size(shape).numel()
        return self._put(
            (torch.arange(count, dtype=torch.float64) * (0.73 + 0.31 * seed) + 0.2)
            .sin()
            .reshape(shape),
            placements,
            **order,
        )

    def leaf(
        self, seed: int, shape: tuple[int, ...], placements: Sequence[Placement], **order: Any
    ) -> Any:
        """The same, with a gradient.

        It is not a view, through which torch can lose a gradient (a leaf that views what has none).
        """
        made = self.real(seed, shape, placements, **order).clone().requires_grad_()
        self.leaves[f"leaf {len(self.leaves)}"] = made
        return made

    def ints(
        self, seed: int, shape: tuple[int, ...], placements: Sequence[Placement], **order: Any
    ) -> Any:
        """Whole numbers between -7 and 7."""
        count = torch.Size(shape).numel()
        values = (torch.arange(count) * (3 + 2 * seed) + seed) % 15 - 7
        return self._put(values.reshape(shape), placements, **order)

    def flags(
        self, seed: int, shape: tuple[int, ...], placements: Sequence[Placement], **order: Any
    ) -> Any:
        """Truth values."""
        count = torch.Size(shape).numel()
        values = (torch.arange(count, dtype=torch.float64) * (1.1 + 0.37 * seed) + seed).sin() > 0
        return self._put(values.reshape(shape), placements, **order)

    def const(self, values: Any, placements: Sequence[Placement], **order: Any) -> Any:
        """A tensor of listed values."""
        return self._put(torch.tensor(values), placements, **order)

    def place(
        self, x: Any, placements: Sequence[Placement], order: ShardOrder | None = None
    ) -> Any:
        """The same tensor, in another layout."""
        self.kept.append(x)
        return x if self.mesh is None else x.redistribute(placements=placements, shard_order=order)

    # --- the edges

    def near(
        self,
        seed: int,
        shape: tuple[int, ...],
        placements: Sequence[Placement],
        *,
        scale: float,
        dtype: torch.dtype,
        **order: Any,
    ) -> Any:
        """Half numbers between once and one and a half times a scale."""
        count = torch.Size(shape).numel()
        values = 1.25 + 0.25 * (torch.arange(count, dtype=torch.float64) * (seed + 1.3)).sin()
        whole = (values * scale).to(dtype).reshape(shape)
        averaged = [Partial("avg") if p.is_partial() else p for p in placements]
        return self._put(whole, averaged, **order)

    def tried(self, call: Callable[[], Any]) -> Any:
        """What a call returns; the number -1 if it refuses its values."""
        result = unless_refused(call)
        if result is not None:
            return result
        number = torch.tensor(-1.0, dtype=torch.float64)
        return self._put(number, [Replicate()] * (self.mesh.ndim if self.mesh else 0))

    def watched(self, call: Callable[[], Any]) -> Any:
        """What a call returns while a mode watches: the same, or a refusal that is there anyway."""
        if self.mesh is None:
            return call()
        state = torch.get_rng_state()
        call()
        torch.set_rng_state(state)
        try:
            with Watcher():  # type: ignore[no-untyped-call]  # as above
                return call()
        except ShoalTensorError as error:
            raise AssertionError(f"refused only where a mode watches: {error}") from error

    def default(self, dtype: torch.dtype) -> None:
        """Another default dtype from here on."""
        self.dtype = dtype
        torch.set_default_dtype(dtype)

    def deterministic(self) -> AbstractContextManager[None]:
        """Deterministic kernels alone, with a warning where torch has none."""
        return deterministic(warn_only=True)

    def rebuilt(self, x: Any) -> Any:
        """The tensor of a local part and the placements that it came with."""
        if self.mesh is None:
            return x.detach().clone()
        x = x.detach()
        local = x.to_local().clone()
        return DTensor.from_local(local, self.mesh, x.placements, shape=x.shape, stride=x.stride())

    def spread(self, x: Any, y: Any) -> Any:
        """The values of one tensor in the placements of another one."""
        if self.mesh is None:
            return x.detach().clone()
        whole = x.detach().full_tensor().clone()
        return distribute_tensor(whole, self.mesh, self._of(y), src_data_rank=None)

    def placed(self, x: Any, y: Any) -> Any:
        """The tensor, redistributed to the placements of another one."""
        self.kept.append(x)
        return x if self.mesh is None else x.redistribute(placements=self._of(y))

    def filled(self, x: Any, y: Any) -> Any:
        """Zeros in the placements of another tensor, and the values added."""
        if self.mesh is None:
            return torch.zeros(x.shape, dtype=x.dtype) + x
        return zeros(x.shape, dtype=x.dtype, device_mesh=self.mesh, placements=self._of(y)) + x

    def mapped(self, x: Any) -> Any:
        """The tensor, doubled by a local function in the placements that it has."""
        if self.mesh is None:
            return x * 2
        placements = self._of(x)
        double = local_map(
            lambda local: local * 2,
            out_placements=placements,
            in_placements=(placements,),
            device_mesh=self.mesh,
            redistribute_inputs=True,
        )
        return double(x)

    @staticmethod
    def _of(x: Any) -> list[Placement]:
        """The placements of a tensor, replicated where they are partial."""
        return [Replicate() if p.is_partial() else p for p in x.placements]

    def _put(
        self, whole: Tensor, placements: Sequence[Placement], order: ShardOrder | None = None
    ) -> Any:
        if self.mesh is None:
            return whole
        plain = [Replicate() if p.is_partial() else p for p in placements]
        made = distribute_tensor(whole, self.mesh, plain, src_data_rank=None, shard_order=order)
        if list(placements) == plain:
            return made
        return move_to(DTensor, made, made._spec.with_(placements=placements))

    def tensors(self) -> dict[str, Any]:
        """The tensors that lines have made."""
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    def backward(self) -> str:
        """Give all leaves the gradient of a number that depends on every value.

        Return what torch says if it cannot.
        """
        total: Any = 0
        try:
            terms = [loss_of(x) for x in self.tensors().values() if x.requires_grad]
            for term in terms:
                total = total + term
            if terms:
                total.backward()
        except Exception as error:  # of any kind: it is a result to compare
            return f"{_kind(error)}: {type(error).__name__}: {error}"
        return ""


def _kind(error: Exception) -> str:
    return (
        "refused" if isinstance(error, ShoalTensorError) or RESHAPED_VIEW in str(error) else "error"
    )


def loss_of(x: Any) -> Any:
    """A number that depends on every element, smoothly."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.to(torch.float64)
    return (x * x).sum() + x.sum() / 2


def run_one(program: Program, mesh: DeviceMesh | None = None) -> str:
    """One rank's part of a program's test: "" if the mesh gives what one device gives.

    Else it is what differs.

    A refusal by a typed error starts with "refused".

    Args:
        program: the program.
        mesh: one of the program's shape; made when left out.
    """
    plain, sharded = Machine(), Machine(mesh or init_device_mesh("cpu", program.mesh))
    states, failed = [], []
    for machine in (plain, sharded):
        torch.manual_seed(7)
        line = ""
        try:
            for line in program.lines:
                machine.run([line])
        except Exception as error:  # whatever goes wrong is the result
            return f"{_kind(error)}: {line}: {type(error).__name__}: {error}"
        states.append(torch.get_rng_state())
        failed.append(machine.backward())
    if failed[1].startswith("refused"):
        return failed[1]
    if bool(failed[0]) != bool(failed[1]):
        alone, together = failed[0] or "well", failed[1] or "well"
        return f"error: backward is {alone} on one device, {together} on the mesh"
    if not torch.equal(states[0], states[1]):
        return "wrong: the generator's state"
    return _difference(plain, sharded, gradients=not failed[0])


def run_many(programs: Sequence[Program]) -> list[str]:
    """One rank's part of the test of many programs."""
    return [run_one(program) for program in programs]


def _difference(plain: Machine, sharded: Machine, *, gradients: bool) -> str:
    """What differs first; "" if nothing does."""
    expected = plain.tensors()
    tolerance = max(
        [1e-8, *(TOLERANCES[x.dtype] for x in expected.values() if x.dtype in TOLERANCES)]
    )
    pairs = {name: (one, sharded.values.get(name)) for name, one in expected.items()}
    messages = [_unlike(name, one, many) for name, (one, many) in pairs.items()]
    for (name, one), many in (
        zip(plain.leaves.items(), sharded.leaves.values(), strict=True) if gradients else ()
    ):
        messages.append(_unlike_gradient(name, one, many))
        if one.grad is not None and many.grad is not None:
            pairs["gradient of " + name] = one.grad, many.grad
    # Collectives must be the same on all ranks whatever differs where, so everything is gathered
    # before a verdict.
    messages += [
        _far(name, one, many, tolerance)
        for name, (one, many) in pairs.items()
        if isinstance(many, DTensor)
    ]
    return next((message for message in messages if message), "")


def _unlike(name: str, one: Any, many: Any) -> str:
    """Names of the ways in which a tensor is not a part of the tensor of one device."""
    if not isinstance(many, DTensor):
        return f"wrong: {name} is {type(many)}"
    if many._local_tensor.shape != many._spec.local_shape:
        held, expected = many._local_tensor.shape, many._spec.local_shape
        return f"wrong: {name} has a local shape {held}, not {expected}"
    return (
        ""
        if many.requires_grad == one.requires_grad
        else f"wrong: {name} requires_grad is {many.requires_grad}"
    )


def _unlike_gradient(name: str, one: Any, many: Any) -> str:
    """How the gradient of a leaf is not there, or is not placed as the leaf."""
    if one.grad is None or many.grad is None:
        same = one.grad is many.grad
        return (
            ""
            if same
            else f"wrong: the gradient of {name} is {one.grad} on one device, {many.grad} on the "
            "mesh"
        )
    leaf, grad = many._spec, many.grad._spec
    if grad.placements == leaf.placements and grad.shard_order == leaf.shard_order:
        return ""
    return f"wrong: {name} is {leaf!r}, its gradient {grad!r}: {leaf.placements}, {grad.placements}"


def _far(name: str, one: Any, many: Any, tolerance: float) -> str:
    """How the values differ."""
    whole, expected = many.detach().full_tensor(), one.detach()
    try:
        torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        return f"wrong: {name} {many._spec!r}: {error}\n  expected {expected}\n  got {whole}"
    return ""
