"""Sharding of operators that draw random numbers.

Any cut of the result is free: each rank fills its own box of the global tensor (`rng.draw`), and how the values relate
to the mesh is the random mode's affair, read when the operator runs.  Addends are never drawn: they would not add up to
the distribution asked for.  Operators that use up the generator as their input's values say run whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from shoal_mesh import all_reduce

from ..placements import REDUCE_OPS, Replicate
from ..redistribute import plan, run
from ..rng import Fill, draw, draw_dropout_mask, draw_rows, empty_box, law_of
from ..spec import Spec
from .local import cutting
from .notation import pointwise
from .rule import ANY_NORM, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["RANDOM"]


def _cut_anywhere(call: OpCall) -> list[Row]:
    """Cut like the first input, which is all that is read of it; a partial tensor that is written to stays one."""
    rows = [Row((S(dim),), (S(dim),)) for dim in range(call.tensors[0].ndim)]
    if call.written:
        return [*rows, *(Row((P(op),), (P(op),)) for op in ("sum", "avg", "max", "min"))]
    return [*rows, *(Row((p,), (R,)) for p in (*map(P, REDUCE_OPS), ANY_NORM))]


def _broadcast(call: OpCall) -> list[Row]:
    """Cut like the result, of whose shape the inputs are up to broadcasting."""
    return list(pointwise().rows(call))


def _fills(name: str, *parameters: str) -> Rule:
    """The rule of an operator that is one fill: its in-place form, `out=` form, functional form or `_like` form."""

    def local(decided: LocalCall) -> LocalFunction:
        call = decided.call
        values = [call[parameter] for parameter in parameters]
        return _filling(decided, Fill(name, tuple(values)))

    return Rule(_cut_anywhere, local)


def _filling(decided: LocalCall, fill: Fill) -> LocalFunction:
    (spec,) = decided.outputs
    in_place = bool(decided.call.written)
    # Every rank draws; of a partial sum the first coordinate has the values, the others zeros.
    summed = [axis for axis, op in spec.partials if op == "sum"]
    silent = spec.coordinate is not None and any(spec.coordinate[axis] for axis in summed)
    whole = spec.with_(placements=[Replicate() if p.is_partial() else p for p in spec.placements])

    def run_fill(
        like: Tensor, *_: Any, generator: Generator | None = None, out: Tensor | None = None, **__: Any
    ) -> Tensor:
        target = like if in_place else out
        made = draw(whole, fill, generator, out=empty_box(spec, like.device) if target is None else target)
        return made.zero_() if silent else made

    return run_fill


def _like(name: str, **parameters: Any) -> Rule:
    """The rule of a `rand..._like`: parameters are numbers, or names of the operator's own arguments."""

    def local(decided: LocalCall) -> LocalFunction:
        call = decided.call
        values = tuple(call[value] if isinstance(value, str) else value for value in parameters.values())
        return _filling(decided, Fill(name, values))

    return Rule(_cut_anywhere, local)


def _read_anywhere(call: OpCall) -> list[Row]:
    """Cut like the first input, whose values are read."""
    return [Row((S(dim),), (S(dim),)) for dim in range(call.tensors[0].ndim)]


def _bernoulli_of_self(decided: LocalCall) -> LocalFunction:
    (spec,) = decided.outputs

    def run_fill(chances: Tensor, *, generator: Generator | None = None, out: Tensor | None = None) -> Tensor:
        target = empty_box(spec, chances.device) if out is None else out
        return draw(spec, Fill("bernoulli_"), generator, out=target, operand=chances)

    return run_fill


def _bernoulli_of_tensor(decided: LocalCall) -> LocalFunction:
    (spec,) = decided.outputs
    in_place = bool(decided.call.written)

    def run_fill(like: Tensor, p: Tensor, *, generator: Generator | None = None, out: Tensor | None = None) -> Tensor:
        target = like if in_place else out
        target = empty_box(spec, like.device) if target is None else target
        return draw(spec, Fill("bernoulli_"), generator, out=target, operand=p.expand(target.shape))

    return run_fill


def _normal(decided: LocalCall) -> LocalFunction:
    """Normal numbers with means or deviations as tensors: torch scales and moves standard ones, in that order."""
    (spec,) = decided.outputs

    def run_fill(
        mean: Tensor | float,
        std: Tensor | float = 1.0,
        *,
        generator: Generator | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        device = mean.device if isinstance(mean, Tensor) else torch.device(spec.mesh.device_type)
        target = empty_box(spec, std.device if isinstance(std, Tensor) else device) if out is None else out
        fill = Fill("normal_", (0.0, 1.0 if isinstance(std, Tensor) else std))
        drawn = draw(spec, fill, generator, out=target)
        if isinstance(std, Tensor):
            drawn.mul_(std)
        return drawn.add_(mean)

    return run_fill


def _dropout_rows(call: OpCall) -> list[Row]:
    return [Row((S(dim),), (S(dim), S(dim))) for dim in range(call.tensors[0].ndim)]


def _native_dropout(decided: LocalCall) -> LocalFunction:
    chance, train = float(decided.call["p"]), decided.call["train"]
    made, mask_spec = decided.outputs

    def run_dropout(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        mask = empty_box(mask_spec, x.device)
        if train is False or x.device.type == "meta":
            return x.clone(), mask.fill_(True)
        draw_dropout_mask(mask_spec, chance, made.dtype, out=mask)
        scale = 0.0 if chance == 1.0 else 1.0 / (1.0 - chance)
        return x.mul(mask).mul_(scale), mask

    return run_dropout


def _rows_of_chances(call: OpCall) -> list[Row]:
    """A matrix of probabilities may be cut by rows."""
    return [Row((S(0),), (S(0),))] if call.tensors[0].ndim == 2 else []


def _multinomial(decided: LocalCall) -> LocalFunction | None:
    (spec,) = decided.inputs
    axes = cutting(spec)
    if not axes:
        return None
    words = _words_a_row(decided.call, spec)
    if words is None:
        return _gathered(decided)
    count, replacement = decided.call["num_samples"], decided.call["replacement"]
    rows = spec.local_shape[0]

    def run_rows(chances: Tensor, *_: Any, generator: Generator | None = None, **__: Any) -> Tensor:
        made = torch.empty((rows, count), dtype=torch.int64, device=chances.device)

        def sample() -> None:
            if rows:
                made.copy_(torch.multinomial(chances, count, replacement, generator=generator))

        failure: RuntimeError | None = None
        try:
            draw_rows(spec, words, generator, sample)
        except RuntimeError as error:
            failure = error
        # Probabilities can be bad on one rank alone: all ranks raise, or none.
        failed = torch.tensor(int(failure is not None), device=chances.device)
        if all_reduce(failed, spec.mesh.comm(axes), "max").item():
            raise failure or RuntimeError(f"multinomial: invalid probabilities on another rank of {spec}")
        return made

    return run_rows


def _words_a_row(call: OpCall, spec: Spec) -> int | None:
    """32-bit words of the generator that a row of a multinomial takes; None if the rows' numbers are not in order.

    Drawn with replacement, every sample takes a float64 uniform number; without, every probability an exponential one.
    """
    if spec.mesh.device_type != "cpu":
        return None
    if call["replacement"] and call["num_samples"] > 1:
        return 2 * int(call["num_samples"])
    words = law_of(Fill("exponential_", (1.0,)), spec.dtype, contiguous=True).words
    return None if words is None else words * spec.shape[1]


def _rrelu_rows(call: OpCall) -> list[Row]:
    """Free dims; while training the input is gathered inside: the generator is used for negative elements only."""
    return [Row((S(dim), S(dim)), (S(dim),)) for dim in range(call.tensors[0].ndim)]


def _rrelu(decided: LocalCall) -> LocalFunction | None:
    if not decided.call["training"]:
        return None
    return _gathered(decided)


def _gathered(decided: LocalCall) -> LocalFunction:
    """The operator on gathered inputs, of whose results, and of the tensors that it writes, each rank keeps its box."""
    call = decided.call
    wholes = [spec.with_(placements=[Replicate()] * spec.mesh.ndim) for spec in decided.inputs]
    plans = [plan(spec, whole) for spec, whole in zip(decided.inputs, wholes, strict=True)]
    op, written = call.op, call.written

    def run_whole(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        whole = [run(step, tensor) for step, tensor in zip(plans, tensors, strict=True)]
        whole = [tensor.clone() if i in written else tensor for i, tensor in enumerate(whole)]
        following = iter(whole)
        result: Tensor = op(*(next(following) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
        for i in written:
            tensors[i].copy_(_own(whole[i], decided.inputs[i]))
        return _own(result, decided.outputs[0]).clone()

    return run_whole


def _own(whole: Tensor, spec: Spec) -> Tensor:
    """This rank's box of a whole tensor."""
    if spec.coordinate is None:
        return whole.new_empty(0)
    return whole[tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate))]


_WHOLE = Rule(lambda call: ())

RANDOM: Table = family(
    {
        "normal_ normal_functional normal.out": _fills("normal_", "mean", "std"),
        "uniform": _fills("uniform_", "from", "to"),
        "exponential": _fills("exponential_", "lambd"),
        "cauchy": _fills("cauchy_", "median", "sigma"),
        "geometric": _fills("geometric_", "p"),
        "log_normal": _fills("log_normal_", "mean", "std"),
        "random random_.default": _fills("random_"),
        "random.to random.to_out random_.to": _fills("random_", "to"),
        "random.from random.from_out random_.from": _fills("random_", "from", "to"),
        "rand_like": _like("uniform_", low=0.0, high=1.0),
        "randn_like": _like("normal_", mean=0.0, std=1.0),
        "randint_like": _like("random_", low=0, high="high"),
        "randint_like.low_dtype randint_like.low_generator_dtype": _like("random_", low="low", high="high"),
        "randint_like.low_dtype_out randint_like.low_generator_dtype_out": _like("random_", low="low", high="high"),
        "randint_like.Tensor randint_like.Tensor_generator": _WHOLE,
        "randint_like.Tensor_out randint_like.Tensor_generator_out": _WHOLE,
        "bernoulli_.float bernoulli.p bernoulli.float_out": _fills("bernoulli_", "p"),
        "bernoulli.default bernoulli.out": Rule(_read_anywhere, _bernoulli_of_self),
        "bernoulli.Tensor bernoulli.Tensor_out bernoulli_.Tensor": Rule(_broadcast, _bernoulli_of_tensor),
        "normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor": Rule(_broadcast, _normal),
        "normal.Tensor_float_out normal.float_Tensor_out normal.Tensor_Tensor_out": Rule(_broadcast, _normal),
        "native_dropout.default": Rule(_dropout_rows, _native_dropout),
        "multinomial.default": Rule(_rows_of_chances, _multinomial),
        "rrelu_with_noise.default rrelu_with_noise_.default": Rule(_rrelu_rows, _rrelu),
        "poisson binomial _standard_gamma _sample_dirichlet": _WHOLE,
    }
)
