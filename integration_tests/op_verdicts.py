"""Comparison of an operator on a mesh with one device, for a sample and its placements."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from integration_tests.op_systems import MESHES, ON_HOST, Placements, System, letter
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

# Results without meaning: only shapes are compared.
UNDEFINED = (
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_strided",
    "empty_permuted",
    "resize_",
)
# Sorts that need not be stable: which of equal elements comes first is open, and with it which of
# them gets a gradient.
TIES = ("sort", "msort")
TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# In these, a sample may lose more digits by itself than the tolerance allows: then the widest dtype
# says how many.
WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def arguments_of(sample: Any) -> Any:
    return sample.input, sample.args, sample.kwargs


def tensors_of(arguments: Any) -> list[Tensor]:
    return [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]


def placed_of(info: Any, sample: Any) -> list[Tensor]:
    """The tensors of a sample that are placed."""
    tensors = tensors_of(arguments_of(sample))
    return tensors[: ON_HOST.get(info.name, len(tensors))]


def combinations_of(system: System, info: Any, sample: Any) -> int:
    """How many ways there are to place the tensors of a sample on the mesh of one axis."""
    return prod(len(system.options(t, MESHES[0])) for t in placed_of(info, sample))


def writes(name: str) -> bool:
    """Whether an entry's operator writes to arguments by its schema, such as running statistics."""
    packet = getattr(torch.ops.aten, name, None)
    schemas = (
        [getattr(packet, overload)._schema for overload in packet.overloads()]
        if packet is not None
        else []
    )
    arguments = [a for schema in schemas if not schema.name.endswith("_") for a in schema.arguments]
    return any(
        a.alias_info is not None and a.alias_info.is_write and not a.is_out for a in arguments
    )


class _Run(NamedTuple):
    """What a call gave: its outputs, what of them is well defined, the gradients of the inputs."""

    outputs: list[Any]
    defined: list[Any]
    gradients: list[Any]


class Sample:
    """One sample, with the single device's answer computed once."""

    def __init__(self, system: System, info: Any, sample: Any, *, inplace: bool) -> None:
        self.system, self.inplace = system, inplace
        self.function = info.get_inplace() if self.inplace else info.get_op()
        self.exact = info.name not in UNDEFINED
        self.ties = info.name in TIES and not self.inplace
        self.writes = self.inplace or writes(info.name)  # whether the call may be refused
        self.arguments = arguments_of(sample)
        self.tensors = tensors_of(self.arguments)
        self.placed = len(placed_of(info, sample))  # how many of them are placed
        self.defined = sample.output_process_fn_grad
        # which tensors the call writes to: their values afterwards count as outputs
        self.written: list[int] = []
        fresh = tree_map_only(
            Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), self.arguments
        )
        versions = [t._version for t in tensors_of(fresh)]
        try:
            self.expected: _Run | None = self._run(fresh, None)
            self.written = [i for i, t in enumerate(tensors_of(fresh)) if t._version != versions[i]]
            self.expected.outputs.extend(tensors_of(fresh)[i].detach() for i in self.written)
        except Exception:  # the sample is not for this call
            self.expected = None
        if self.inplace and sample.broadcasts_input:
            self.expected = None

    def every(
        self, limit: int, seed: str
    ) -> Iterator[tuple[tuple[int, ...], tuple[Placements, ...]]]:
        """All combinations of the tensors' placements on the mesh of one axis.

        If there are very many, they are `limit` of them.
        """
        options = [self.system.options(t, MESHES[0]) for t in self.tensors[: self.placed]]
        whole = prod(map(len, options)) if self.expected is not None else 0
        for index in sorted(random.Random(seed).sample(range(whole), min(whole, limit))):
            places = []
            for option in options:
                index, at = divmod(index, len(option))
                places.append(option[at])
            yield MESHES[0], tuple(places)

    def some(
        self, each: int, seed: str, number: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[Placements, ...]]]:
        """Meshes and placements for all tensors: all alike, one alone, any.

        A sample always gets the same ones.
        """
        draw = random.Random(seed)
        if self.expected is None:
            return
        # two thirds on the one axis, the rest on two; single cases take turns
        flat = each - (each + number % 3) // 3
        for mesh, share in zip(MESHES, (flat, each - flat), strict=True):
            yield from ((mesh, drawn) for drawn in self._drawn(mesh, share, draw))

    def _drawn(
        self, mesh: tuple[int, ...], share: int, draw: random.Random
    ) -> list[tuple[Placements, ...]]:
        options = [self.system.options(t, mesh) for t in self.tensors[: self.placed]]
        seen: dict[tuple[Placements, ...], None] = {}
        for attempt in range(4 * share):
            if attempt % 3 == 0:  # all alike: what programs do
                at = draw.randrange(max(map(len, options)))
                drawn = [o[at % len(o)] for o in options]
            elif attempt % 3 == 1:  # one alone
                at = draw.randrange(len(options))
                drawn = [draw.choice(o) if i == at else o[0] for i, o in enumerate(options)]
            else:
                drawn = [draw.choice(o) for o in options]
            seen.setdefault(tuple(drawn))
        return list(seen)[:share]

    def described(self, mesh: tuple[int, ...], placements: Sequence[Placements]) -> str:
        """A case in words."""
        shapes = [tuple(t.shape) for t in self.tensors]
        return (
            f"{shapes} {['/'.join(map(str, p)) for p in placements]} on {'x'.join(map(str, mesh))}"
        )

    def verdict(
        self, mesh: tuple[int, ...], placements: Sequence[Placements], notes: list[str]
    ) -> str:
        numbered = iter(placements)
        described = self.described(mesh, placements)

        def place(tensor: Tensor) -> Any:
            layout = next(numbered, None)
            return tensor if layout is None else self.system.place(tensor, layout, mesh)

        try:
            placed = tree_map_only(Tensor, place, self.arguments)
            with self.system.counted() as counter:
                got = self._run(placed, mesh)
            got.outputs.extend(tensors_of(placed)[i].detach() for i in self.written)
            settled = self.system.whole_of if self.ties else self.system.settled
            got = _Run(*([settled(o) for o in outputs] for outputs in got))
            problem = self._difference(got)
            problem = "" if self.ties and self._sorts_like(got) else problem
        except Exception as error:  # whatever it raises is the finding
            if self.writes and self.system.refuses(error):
                return "i"
            return _noted(notes, "f", f"{described} {type(error).__name__}: {str(error)[:300]}")
        return _noted(notes, "w", f"{described} {problem}") if problem else letter(counter)

    @cached_property
    def _wide(self) -> _Run | None:
        """The single device's answer for the same values in the widest dtype.

        None if the single device has no answer.
        """
        values = tree_map_only(
            Tensor,
            lambda t: t.detach().to(WIDE.get(t.dtype, t.dtype)).requires_grad_(t.requires_grad),
            self.arguments,
        )
        try:
            return self._run(values, None, {wide: dtype for dtype, wide in WIDE.items()})
        except Exception:
            # a function that does not take the widest dtype
            return None

    def _run(
        self,
        arguments: Any,
        mesh: tuple[int, ...] | None,
        drawn: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
    ) -> _Run:
        """Outputs and gradients of the inputs; on the mesh, the outputs' gradients are placed.

        Those of an output whose dtype is in `drawn` are drawn in the dtype that it says.
        """
        wanted = [t for t in tensors_of(arguments) if t.requires_grad]
        first, args, kwargs = arguments
        # not torch.manual_seed, which formats a stack for each missing device
        torch.default_generator.manual_seed(1)
        random.seed(1)
        made = self.function(first.clone() if self.inplace else first, *args, **kwargs)
        outputs, defined = tree_leaves(made), tree_leaves(self.defined(made))
        rooted = [o for o in defined if isinstance(o, Tensor) and o.requires_grad]
        if rooted and wanted:
            seeds: list[Any] = [
                _cotangent(o.shape, drawn.get(o.dtype, o.dtype)).to(o.dtype) for o in rooted
            ]
            if mesh is not None:
                seeds = [self.system.place_like(s, o) for s, o in zip(seeds, rooted, strict=True)]
            torch.autograd.backward(rooted, seeds, inputs=wanted)
        gradients = [t.grad for t in wanted] if rooted else []
        return _Run([_detached(o) for o in outputs], [_detached(o) for o in defined], gradients)

    def _difference(self, got: _Run) -> str:
        """The first thing in which two runs differ; empty if they agree.

        Outputs must be the same. Where they are not, as eigenvectors of one matrix may differ in
        phase, what torch's database calls well defined of them must be, and the gradients that it
        has.
        """
        assert self.expected is not None, "a sample without an answer has no cases"
        return (self._first("outputs", got) and self._first("defined", got)) or self._first(
            "gradients", got
        )

    def _sorts_like(self, got: _Run) -> bool:
        """Whether a sort is right.

        Compared are the values, indices that give these values, gradients up to equal elements.
        """
        assert self.expected is not None, "a sample without an answer has no cases"
        x, args, kwargs = self.tensors[0].detach(), self.arguments[1], self.arguments[2]
        dim = (
            kwargs.get("dim", next((a for a in args if type(a) is int), -1))
            if self.expected.outputs[1:]
            else 0
        )

        def by_value(gradient: Tensor) -> Tensor:
            ordered, places = gradient.sort(dim)
            return ordered.gather(dim, x.gather(dim, places).sort(stable=True, dim=dim)[1])

        right = torch.equal(got.outputs[0], self.expected.outputs[0])
        for indices in got.outputs[1:]:
            right &= torch.equal(x.gather(dim, indices), got.outputs[0])
            right &= torch.equal(
                indices.sort(dim)[0], torch.zeros_like(x).argsort(stable=True, dim=dim)
            )
        for one, other in zip(self.expected.gradients, got.gradients, strict=True):
            right &= _alike(by_value(one), by_value(other))
        return right

    def _first(self, kind: str, got: _Run) -> str:
        ones, others = getattr(self.expected, kind), getattr(got, kind)
        if len(ones) != len(others):
            return f"{len(others)} {kind}, should be {len(ones)}"
        described = (
            (i, self._unlike(one, other))
            for i, (one, other) in enumerate(zip(ones, others, strict=True))
        )
        return next(
            (
                f"{kind} {i}: {text}"
                for i, text in described
                if text and not self._rounds_alike(kind, i, got)
            ),
            "",
        )

    def _rounds_alike(self, kind: str, index: int, got: _Run) -> bool:
        """Whether a value is about as near to the widest dtype's as the single device's value is.

        The value is float32 or complex64.

        `logcumsumexp` of values about 10000, for one, adds logarithms that complex64 has to 1e-3,
        so two orders of a sum are that far apart. Other orders may make up to four times the single
        device's error. Where that is above 1 % of the largest value, the dtypes do not compute the
        same (random numbers), and nothing is allowed.
        """
        one, other = getattr(self.expected, kind)[index], getattr(got, kind)[index]
        if (
            not isinstance(one, Tensor)
            or one.dtype not in WIDE
            or not one.numel()
            or self._wide is None
        ):
            return False
        wide = getattr(self._wide, kind)[index]
        if not isinstance(wide, Tensor) or wide.shape != one.shape:
            return False
        error, (right, held) = (one - wide).abs().max(), self.system.part_of(wide, other)
        if right.shape != held.shape or held.dtype != one.dtype or error > 0.01 * wide.abs().max():
            return False
        return bool(((held - right).abs() <= 4 * error).all())

    def _unlike(self, one: Any, other: Any) -> str:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if isinstance(one, float) and isinstance(other, float):
                one, other = torch.tensor(one), torch.tensor(other)
            elif one is None or isinstance(one, Tensor) or isinstance(other, Tensor):
                return "" if one is other else f"{other}, should be {one}"
            else:
                return "" if one == other else f"{other}, should be {one}"
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(other.shape)} {other.dtype}, should be {tuple(one.shape)} {one.dtype}"
        one, other = self.system.part_of(one, other)
        if one.shape != other.shape:
            return f"a part of shape {tuple(other.shape)}, should be {tuple(one.shape)}"
        if not self.exact or one.layout is not torch.strided or _alike(one, other):
            return ""
        return f"{other.flatten()[:6].tolist()}, should be {one.flatten()[:6].tolist()}"


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether values agree closely.

    In small dtypes they agree as far as the order of a sum of the largest values shows.
    """
    relative = TOLERANCE.get(one.dtype, 1e-6)
    absolute = relative / 10 if one.dtype in (torch.float32, torch.complex64) else 1e-8
    if one.dtype in (torch.float16, torch.bfloat16) and one.numel():
        largest = one.abs().nan_to_num(0, 0, 0).max().item()
        absolute = relative * max(largest, 1.0)
    return torch.allclose(one, other, rtol=relative, atol=absolute, equal_nan=True)


def _noted(notes: list[str], verdict: str, text: str) -> str:
    # what a rank printed is shown if it dies
    print(text, flush=True)
    if len(notes) < 8:
        notes.append(text)
    return verdict


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cotangent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), dtype=dtype, generator=torch.Generator().manual_seed(2))
