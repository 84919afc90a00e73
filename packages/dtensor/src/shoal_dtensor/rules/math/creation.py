"""Sharding of operators that make a tensor like another, of constants or of random numbers.

Random numbers can have any sharding without communication, because each rank fills its own box of
the global tensor (`rng.draw`). The random mode at the time of the call determines which numbers the
ranks draw. Random numbers are never partial sums, because drawn addends would not add up to the
requested distribution. Operators whose use of the generator depends on data are replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import nan
from typing import Any

from torch import Generator, Tensor

from ...layout.boxes import slices_of
from ...layout.placements import REDUCE_OPS
from ...layout.spec import Spec
from ...redistribute.execution.execute import run_plan
from ...redistribute.plan import plan
from ...rng.draw import draw, draw_dropout_mask, empty_local
from ...rng.state import check_in_step, generator_of
from ...rng.streams import Fill
from ..language.local_ops import (
    bytes_of,
    check_values,
    in_every_form,
    on_functional_form,
    where_sharded,
    with_arguments,
)
from ..language.notation import pointwise, rows_sharded_alike
from ..language.rule import (
    ANY_NORM,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    family,
    no_rows,
)


def fill(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard the result like the first input, of which only the sizes are read.

    A dim of the result is sharded if it has the same size in the input.
    """
    source = call["self"].shape
    result = call.outputs[0].shape
    for d, n in enumerate(source):
        keeps_dim = len(source) == len(result) and n == result[d]
        yield call.row(self=S(d), out=S(d) if keeps_dim else R)
    # A partial tensor that is written to stays partial. A new tensor like it is replicated.
    if call.written:
        for op in ("sum", "avg", "max", "min"):
            yield call.row(self=P(op), out=P(op))
    else:
        for partial in (*map(P, REDUCE_OPS), ANY_NORM):
            yield call.row(self=partial)


def _fills(name: str, *parameters: str | float) -> Rule:
    """Return the rule of an operator that is one fill, in any form.

    The parameters of the fill are numbers or names of the operator's own arguments.
    """

    def local(local_call: LocalCall) -> LocalFunction:
        call = local_call.call
        values = [call[value] if isinstance(value, str) else value for value in parameters]
        numbers = Fill(name, tuple(values))
        (spec,) = local_call.outputs
        in_place = bool(call.written)
        # Every rank draws. In a partial sum, the first coordinate keeps the values and the others
        # get zeros.
        summed = [axis for axis, op in spec.partials if op == "sum"]
        gets_zeros = spec.coordinate is not None and any(spec.coordinate[axis] for axis in summed)
        unreduced = spec.without_partials()

        def run_fill(
            like: Tensor,
            *_: Any,
            generator: Generator | None = None,
            out: Tensor | None = None,
            **__: Any,
        ) -> Tensor:
            if in_place:
                target = like
            else:
                target = empty_local(spec, like.device) if out is None else out
            drawn = draw(unreduced, numbers, generator, out=target)
            return drawn.zero_() if gets_zeros else drawn

        return run_fill

    return Rule(fill, local)


def _bernoulli(local_call: LocalCall) -> LocalFunction:
    """Draw with probabilities `p` or, without `p`, with the tensor itself as probabilities."""
    (spec,) = local_call.outputs

    def run_fill(
        like: Tensor, p: Tensor | None = None, *, generator: Generator | None = None
    ) -> Tensor:
        target = empty_local(spec, like.device)
        chances = like if p is None else p.expand(target.shape)
        return draw(spec, Fill("bernoulli_"), generator, out=target, operand=chances)

    return in_every_form(local_call.call, run_fill)


def _normal(local_call: LocalCall) -> LocalFunction:
    """Draw normal numbers with means or deviations given as tensors.

    As in torch, standard normal numbers are scaled and then shifted.
    """
    (spec,) = local_call.outputs

    def run_fill(
        mean: Tensor | float, std: Tensor | float = 1.0, *, generator: Generator | None = None
    ) -> Tensor:
        if isinstance(std, Tensor) and std.device.type != "meta":
            check_values(std >= 0, "normal: all elements of std have to be 0 or larger")
        devices = [tensor.device for tensor in (std, mean) if isinstance(tensor, Tensor)]
        scale = 1.0 if isinstance(std, Tensor) else std
        target = empty_local(spec, devices[0] if devices else None)
        drawn = draw(spec, Fill("normal_", (0.0, scale)), generator, out=target)
        if isinstance(std, Tensor):
            drawn.mul_(std)
        return drawn.add_(mean)

    return in_every_form(local_call.call, run_fill)


def _native_dropout(local_call: LocalCall) -> LocalFunction:
    """Return a function that draws this rank's shard of the mask of one device."""
    chance = float(local_call.call["p"])
    train = local_call.call["train"]
    result, mask_spec = local_call.outputs

    def run_dropout(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        mask = empty_local(mask_spec, x.device)
        if train is False or x.device.type == "meta":
            return x.clone(), mask.fill_(True)
        draw_dropout_mask(mask_spec, chance, result.dtype, out=mask)
        scale = 0.0 if chance == 1.0 else 1.0 / (1.0 - chance)
        return x.mul(mask).mul_(scale), mask

    return run_dropout


def rrelu_with_noise(call: OpCall) -> Iterable[Row]:
    """Return the rows of a pointwise operator; no rows in training.

    In training, numbers are drawn for negative elements only, so their count depends on values.
    """
    return () if call["training"] else rows_sharded_alike(call)


def multinomial(call: OpCall) -> Iterator[Row]:
    """Yield the row that shards a matrix of probabilities by rows.

    The local function gathers the matrix, because the numbers are drawn in the global order.
    """
    if call["self"].ndim == 2:
        size = bytes_of(call["self"])

        def traffic(ranks: int) -> float:
            return size * (ranks - 1) / ranks

        yield call.row(self=S(0), out=S(0), traffic=traffic)


@on_functional_form
@where_sharded
def _multinomial(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Run the operator on the gathered input; each rank keeps its shard of the result."""
    op = local_call.call.op
    (result,) = local_call.outputs
    gather = plan(spec, spec.all_replicated())

    def run_gathered(
        chances: Tensor, *args: Any, generator: Generator | None = None, **kwargs: Any
    ) -> Tensor:
        own_generator = generator_of(chances.device) if generator is None else generator
        check_in_step(spec.mesh, own_generator)
        # A rank outside the mesh draws as many numbers, so that all generators advance equally.
        if spec.coordinate is None:
            op(chances.new_ones(spec.shape), *args, generator=generator, **kwargs)
            return chances.new_empty(0, dtype=result.dtype)
        samples: Tensor = op(run_plan(gather, chances), *args, generator=generator, **kwargs)
        assert result.coordinate is not None, "the result must be on the mesh of its input"
        return samples[slices_of(result.box(result.coordinate))].clone()

    return run_gathered


def _local_size(local_call: LocalCall) -> LocalFunction | None:
    """Run the operator with this rank's size; a requested stride keeps the global order of dims."""
    (spec,) = local_call.outputs
    if spec.local_shape == spec.shape:
        return None
    call = local_call.call
    stride = {"stride": spec.local_stride} if "stride" in call.arguments else {}
    return with_arguments(call, size=list(spec.local_shape), **stride)


def _empty_like(local_call: LocalCall) -> LocalFunction | None:
    """Fill the result with NaN if it replaces a tensor on the meta device.

    `Module.to_empty()` calls the operator. A parameter that is not initialized afterwards is then
    NaN instead of arbitrary numbers.
    """
    call = local_call.call
    if call.get("device") is None:
        return None

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = call.op(x, *args, **kwargs)
        has_left_meta = x.is_meta and not made.is_meta
        if has_left_meta and (made.is_floating_point() or made.is_complex()):
            made.fill_(nan)
        return made

    return run


CREATION: Table = family(
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
        "rand_like": _fills("uniform_", 0.0, 1.0),
        "randn_like": _fills("normal_", 0.0, 1.0),
        "randint_like": _fills("random_", 0, "high"),
        "randint_like.low_*": _fills("random_", "low", "high"),
        "randint_like.Tensor*": Rule(no_rows),
        "bernoulli_.float bernoulli.p bernoulli.float_out": _fills("bernoulli_", "p"),
        "bernoulli": Rule(pointwise().rows, _bernoulli),
        "normal.*Tensor*": Rule(pointwise().rows, _normal),
        "native_dropout.default": Rule(pointwise().rows, _native_dropout),
        "multinomial": Rule(multinomial, _multinomial),
        "rrelu_with_noise rrelu_with_noise_functional": Rule(rrelu_with_noise),
        "poisson binomial _standard_gamma _sample_dirichlet": Rule(no_rows),
        "zeros_like ones_like full_like": Rule(fill, by_value=False, unordered=True, sizes=()),
        "empty_like": Rule(fill, _empty_like, by_value=False, unordered=True, sizes=()),
        "new_zeros new_ones new_empty new_empty_strided new_full": Rule(fill, _local_size),
    }
)
