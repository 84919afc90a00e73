"""Sharding of elementwise operators, on one mesh axis.

`pointwise` makes the rules: by one row for each dim, the dim may be sharded, in all operands alike.
This file adds the rows with partial values, in which operators differ. Linear operators allow
partial sums, increasing operators allow partial extrema, and operators that choose elements
(`where`, `copy_`) allow every reduction that returns `x` for equal values `x`.

An operand may be a Python number. The rows depend on which operands are numbers, and not on the
numbers themselves, so decisions are cached for all numbers (`by_value=False`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._torch.operators import signature_of
from ...layout.placements import REDUCE_OPS
from ...layout.tensor_meta import TensorMeta
from ..language.local_ops import all_reduce_traffic, all_reduced, sharding_axes, with_arguments
from ..language.notation import Partials, pointwise
from ..language.op_call import entries_at
from ..language.rule import (
    Entry,
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

# pairs of the entries of all tensor operands, and the entry of the result
PartialRows = list[tuple[tuple[Entry, ...], Entry]]
# a number of Python; `bool` is a subclass of `int`
Number = int | float | complex
# reductions that return `x` for equal values `x`
IDEMPOTENT = ("avg", "max", "min", "band", "bor")


def _partial(call: OpCall, ops: Iterable[str], *groups: tuple[int, ...]) -> PartialRows:
    """Return one row for each reduction and each group of operands.

    The operands of the group and the result are partial with the reduction; the other operands are
    replicated.

    Args:
        call: the call of an operator.
        ops: the reductions.
        groups: groups of tensor operands, by position. `()` stands for all operands.
    """
    count = len(call.tensors)
    rows: PartialRows = []
    for op in ops:
        partial = P(op)
        for operands in groups:
            entries = entries_at(operands or range(count), partial, count)
            rows.append((tuple(entries), partial))
    return rows


def _number_operands(call: OpCall) -> int:
    """Return how many of the two operands are numbers, or lists of numbers (`foreach`).

    Further arguments are options, such as `alpha` of `add`.
    """
    values = [call.get(name) for name in call.schema.inputs[:2]]
    firsts = []
    for value in values:
        is_list_with_items = isinstance(value, list) and value
        firsts.append(value[0] if is_list_with_items else value)
    return sum(isinstance(value, Number) for value in firsts)


def _offset(local_call: LocalCall) -> LocalFunction | None:
    """Add or write a number to a partial sum on the first coordinate only; other ranks use 0."""
    call = local_call.call
    result = local_call.outputs[0]
    axes = [axis for axis, op in result.partials if op == "sum"]
    if result.coordinate is None or all(result.coordinate[axis] == 0 for axis in axes):
        return None
    # Each of these operators has at most one number, under one of these names.
    for name in ("other", "value", "src", "self"):
        number = call.get(name)
        if isinstance(number, Number):
            # a number's type influences the result's dtype
            return with_arguments(call, **{name: type(number)(0)})
    return None


def _sums(call: OpCall) -> PartialRows:
    """Return partials of `a + b`: two sums, two averages, or an average and a fixed value."""
    # Partial extrema are excluded, although addition is increasing. In int8, 100 + 50 wraps to -106
    # on the rank that has the maximum, and infinite floats may give inf - inf.
    name = call.op.__name__.partition(".")[0]
    # A partial sum stays partial if a number is added in place, because `_offset` then adds the
    # number on one rank. A new result is reduced, because most programs read it next.
    # `_foreach_add_` is left out, because it runs without `_offset` (see `_LISTS`).
    is_in_place = name.endswith("_") and not name.startswith("_foreach")
    adds_number = bool(_number_operands(call))
    ops = ["avg"] if adds_number and not is_in_place else ["sum", "avg"]
    rows = _partial(call, ops, ())
    if len(call.tensors) == 2 and name != "rsub":
        rows += _partial(call, ["avg"], (0,), (1,))
    return rows


def _partials_of_negation(call: OpCall) -> PartialRows:
    """Return partials of `neg`: a maximum of floats becomes a minimum and vice versa.

    This does not hold for integers, because the smallest integer does not have a negative, and
    unsigned integers wrap.
    """
    is_floating = call.tensors[0].dtype.is_floating_point
    if not is_floating:
        return []
    return [((P("max"),), P("min")), ((P("min"),), P("max"))]


def _partials_of_where(call: OpCall) -> PartialRows:
    """Return partials of `where`, which chooses between the operands after the condition.

    The choice does not depend on the values of these operands.
    """
    operands = tuple(range(1, len(call.tensors)))
    has_number = any(isinstance(value, Number) for value in call.arguments.values())
    other_is_number = len(operands) < 2 and has_number
    rows: PartialRows = []
    if not other_is_number:
        rows += _partial(call, REDUCE_OPS, operands)
    # One operand is partial. The other one has the same value on all ranks, and so has the result
    # where it is chosen: it must not be added up.
    single = [(i,) for i in operands]
    rows += _partial(call, IDEMPOTENT, *single)
    # A call with one operand and no number has the same rows in both parts.
    return list(dict.fromkeys(rows))


def _masked_fill(call: OpCall) -> PartialRows:
    """Return partials of `masked_fill(self, mask, value)`, whose value is a number or a tensor.

    A number is written into a partial sum on one rank only (`_offset`).
    """
    if len(call.tensors) == 2:
        return _partial(call, [*IDEMPOTENT, "sum"], (0,))
    both = _partial(call, REDUCE_OPS, (0, 2))
    return both + _partial(call, IDEMPOTENT, (0,), (2,))


def _partials_of_replacement(call: OpCall) -> PartialRows:
    """Return partials of operators that replace values by a tensor (`copy`) or a number (`fill`).

    The old values do not matter. A number is written into a partial sum on one rank only
    (`_offset`).
    """
    # `REDUCE_OPS` does not have norms. A partial norm caches the result of its reduction, so it is
    # reduced before it is written to.
    if len(call.tensors) == 2:
        rows = _partial(call, REDUCE_OPS, ())
    else:
        rows = _partial(call, ["sum"], (0,))
    return rows + _partial(call, IDEMPOTENT, (0,))


def _extremum(op: str) -> Rule:
    """Return the rule of the larger or smaller of two values, each fixed or a partial `op`.

    The rule is not for `fmax`, which ignores NaN, whereas a reduction by `max` returns NaN.
    """

    def partials(call: OpCall) -> PartialRows:
        single = [(i,) for i in range(len(call.tensors))]
        return _partial(call, [op], (), *single)

    return pointwise(partial=partials)


def _joint(op: str) -> Partials:
    """Return the partials of an operator of two values that are partial with a reduction `op`.

    The result is partial with `op` too: the product of partial products is a partial product.
    """

    def partials(call: OpCall) -> PartialRows:
        return [] if _number_operands(call) else _partial(call, [op], ())

    return partials


def _linear_in(*groups: tuple[int, ...], averages: Sequence[tuple[int]]) -> Rule:
    """Return the rule of an operator that is linear in the operands of each group together.

    Example: `addcmul(a, b, c)` is `a + b * c`. While `c` is fixed, it is linear in `(a, b)`, the
    group `(0, 1)`. While `b` and `c` are fixed, it maps an average `a` to an average.

    Args:
        groups: groups of operands, by position. If all operands of a group are partial sums or
            averages, the result is too.
        averages: groups of operands, by position. If one group is an average, the result is too,
            whatever the other operands add to it.
    """

    def partials(call: OpCall) -> PartialRows:
        rows = _partial(call, ["sum", "avg"], *groups)
        return rows + _partial(call, ["avg"], *averages)

    return pointwise(partial=partials)


def _linear_unless_rounded(call: OpCall) -> PartialRows:
    """Return partials of an operator that is linear in its first operand if that is a tensor.

    Rounded results, as of integers or with a `rounding_mode`, do not have partials.
    """
    result = (call.outputs or call.tensors)[0].dtype
    has_fractions = result.is_floating_point or result.is_complex
    is_rounded = call.get("rounding_mode") is not None or not has_fractions
    first = call[call.schema.inputs[0]]
    if is_rounded or not isinstance(first, TensorMeta):
        return []
    return _partial(call, ["sum", "avg"], (0,))


def equal(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard both tensors alike; the answers of the ranks are all-reduced."""
    # the bytes of an answer, an int64
    nbytes = 8
    if call["self"].shape == call["other"].shape:
        for d in range(call["self"].ndim):
            yield call.row(self=S(d), other=S(d), traffic=lambda ranks: nbytes)


def _equal(local_call: LocalCall) -> LocalFunction:
    """Tell whether the shards of all ranks are equal."""
    is_exact = local_call.call.op is torch.ops.aten.equal.default
    axes_of_inputs = {axis for spec in local_call.inputs for axis in sharding_axes(spec)}
    axes = tuple(sorted(axes_of_inputs))

    def run(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        if is_exact and a.shape != b.shape:
            return False
        matches = torch.eq(a, b) if is_exact else torch.isclose(a, b, *args, **kwargs)
        all_match = matches.all().long()
        return bool(all_reduced(all_match, local_call.inputs[0], axes, "min").item())

    return run


_PLAIN = pointwise()
_RISING = pointwise(monotone=True)
_LINEAR = pointwise(linear=(0,))
_LINEAR_RISING = pointwise(linear=(0,), monotone=True)
# The operator returns the elements of `self` as they are, so any reduction may stay pending.
_KEPT = replace(_PLAIN, moves="self")
_SUM = replace(pointwise(partial=_sums), local=_offset)

_RULES: dict[str, Rule] = {
    # -- values unchanged or converted
    "clone alias detach detach_copy alias_copy": _KEPT,
    "lift lift_fresh lift_fresh_copy contiguous _to_copy": _KEPT,
    "positive": _KEPT,
    "copy fill": replace(pointwise(partial=_partials_of_replacement), local=_offset),
    "zero": pointwise(
        partial=lambda call: _partial(call, [op for op in REDUCE_OPS if op != "bxor"], ())
    ),
    "where.self where.ScalarOther where.ScalarSelf where.self_out": pointwise(
        partial=_partials_of_where
    ),
    "where.Scalar": _PLAIN,
    "masked_fill": replace(pointwise(partial=_masked_fill), local=_offset),
    # -- linear
    "add sub": _SUM,
    "rsub": pointwise(partial=_sums),
    "neg": pointwise(linear=(0,), partial=_partials_of_negation),
    "mul": pointwise(linear=(0, 1), partial=_joint("product")),
    "div true_divide divide": pointwise(partial=_linear_unless_rounded),
    "lerp": _linear_in((0, 1), averages=[(0,), (1,)]),
    "addcmul": _linear_in((0, 1), (0, 2), averages=[(0,)]),
    "addcdiv": _linear_in((0, 1), averages=[(0,)]),
    "conj_physical _conj_physical resolve_conj resolve_neg": _LINEAR,
    # torch would return a view with a mark (the conj bit or neg bit), and compute when it is read.
    # A tensor subclass loses the mark of its local tensor, so the values are computed now, and the
    # result is a copy.
    "_conj": replace(_LINEAR, local=lambda local_call: torch.conj_physical, kind="copy"),
    "_neg_view": replace(_LINEAR, local=lambda local_call: torch.neg, kind="copy"),
    "rad2deg deg2rad": _LINEAR_RISING,
    # -- increasing for all real numbers
    "relu relu6 exp exp2 expm1 tanh sigmoid atan asinh erf sinh ceil floor trunc sign": _RISING,
    "hardtanh hardsigmoid special_ndtr special_expit round clamp clip clamp_min clamp_max": _RISING,
    "maximum max.other max.out": _extremum("max"),
    "minimum min.other min.out": _extremum("min"),
    "bitwise_and __and__ __iand__": pointwise(partial=_joint("band")),
    "bitwise_or __or__ __ior__": pointwise(partial=_joint("bor")),
    "bitwise_xor __xor__ __ixor__": pointwise(partial=_joint("bxor")),
    # -- nothing but sharding
    "abs acos acosh angle arccos asin arcsin atanh arctanh": _PLAIN,
    "arctan2 atan2 cos cosh digamma erfc erfinv frac": _PLAIN,
    "i0 lgamma log log10 log1p log2 logit mvlgamma": _PLAIN,
    "nan_to_num polygamma reciprocal rsqrt sgn signbit sin": _PLAIN,
    "sinc sqrt square tan isfinite isinf": _PLAIN,
    "isnan isneginf isposinf logical_not bitwise_not frexp": _PLAIN,
    "eq ne lt le gt ge logical_and logical_xor bitwise_left_shift bitwise_right_shift": _PLAIN,
    "__lshift__ __ilshift__ __rshift__ __irshift__ copysign": _PLAIN,
    "float_power floor_divide fmod gcd heaviside": _PLAIN,
    "hypot igamma igammac lcm ldexp logaddexp logaddexp2": _PLAIN,
    "nextafter pow remainder xlogy complex polar": _PLAIN,
    "_prelu_kernel _prelu_kernel_backward special_gammaln special_psi": _PLAIN,
    "celu elu gelu hardshrink hardswish leaky_relu": _PLAIN,
    "log_sigmoid log_sigmoid_forward mish selu silu": _PLAIN,
    "softshrink softplus threshold logical_or fmax fmin": _PLAIN,
    "special_airy_ai special_bessel_j0 special_bessel_j1": _PLAIN,
    "special_bessel_y0 special_bessel_y1 special_entr": _PLAIN,
    "special_chebyshev_polynomial_t": _PLAIN,
    "special_chebyshev_polynomial_u special_chebyshev_polynomial_v": _PLAIN,
    "special_chebyshev_polynomial_w special_erfcx": _PLAIN,
    "special_hermite_polynomial_h special_hermite_polynomial_he": _PLAIN,
    "special_i0e special_i1 special_i1e": _PLAIN,
    "special_laguerre_polynomial_l special_legendre_polynomial_p": _PLAIN,
    "special_log_ndtr special_modified_bessel_i0": _PLAIN,
    "special_modified_bessel_i1 special_modified_bessel_k0": _PLAIN,
    "special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0": _PLAIN,
    "special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t": _PLAIN,
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v": _PLAIN,
    "special_shifted_chebyshev_polynomial_w": _PLAIN,
    "special_spherical_bessel_j0 special_xlog1py special_zeta": _PLAIN,
    # -- backward, linear in the incoming gradient, their first operand
    "elu_backward gelu_backward hardshrink_backward": _LINEAR,
    "hardsigmoid_backward hardswish_backward": _LINEAR,
    "hardtanh_backward leaky_relu_backward": _LINEAR,
    "log_sigmoid_backward logit_backward mish_backward": _LINEAR,
    "sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward": _LINEAR,
    "threshold_backward native_dropout_backward _masked_scale rrelu_with_noise_backward": _LINEAR,
    "infinitely_differentiable_gelu_backward": pointwise(partial=_linear_unless_rounded),
    # -- one Python value, which is the value for the global tensor
    "equal allclose": Rule(equal, _equal),
    "_local_scalar_dense": Rule(no_rows),
}


def _with_numbers(rule: Rule) -> Rule:
    """Adapt `rule` to `_foreach_addcmul(a, b, c, numbers)`, or `_foreach_addcdiv` likewise.

    `a`, `b` and `c` are lists, whose elements `rule` is for. `numbers` is a tensor with one factor
    for each element; it is replicated.
    """

    def rows(call: OpCall) -> Iterator[Row]:
        for row in rule.rows(replace(call, tensors=call.tensors[:-1])):
            yield replace(row, inputs=(*row.inputs, R))

    return replace(rule, rows=rows)


# The operators that torch also has for lists, which run element by element. Names with an overload
# are left out: `where.self` does not exist for lists, and `max.other` has another meaning there.
_LISTS = {
    f"_foreach_{name}": replace(rule, kind="each", local=None)
    for names, rule in _RULES.items()
    for name in names.split()
    if "." not in name
}
_TERNARY = ("_foreach_addcdiv", "_foreach_addcmul")


# --- optimizers and AMP: element by element of their lists, all state sharded alike ---------------


def fused_optimizer(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard a parameter, its gradient and its state alike.

    Step counts, rates and scales are replicated.
    """
    arguments = signature_of(call.op).arguments
    shared = {argument.name for argument in arguments if "List" not in str(argument.type)}
    shared.add("state_steps")
    for d in range(call.tensors[0].ndim):
        entries: dict[str, Entry] = {name: R if name in shared else S(d) for name in call.places}
        for i, name in enumerate(call.schema.written):
            entries[f"out{i}"] = entries[name]
        # Functional forms name their results after arguments: `exp_avgs_out` is the new `exp_avgs`.
        for result in call.results:
            name = result.removesuffix("_out")
            if name in entries:
                entries[result] = entries[name]
        yield call.row(entries)


def unscale(call: OpCall) -> Iterator[Row]:
    """Yield rows that shard a gradient; `found_inf` is then all-reduced (`_unscale`)."""
    nbytes = call["found_inf"].dtype.itemsize
    for d in range(call.tensors[0].ndim):
        yield call.row(self=S(d), out0=S(d), traffic=all_reduce_traffic(nbytes))


def _unscale(local_call: LocalCall) -> LocalFunction | None:
    """Unscale the shard; all-reduce `found_inf` as a maximum over shards."""
    *gradients, found_inf, _scale = local_call.inputs
    axes = tuple(sorted({axis for spec in gradients for axis in sharding_axes(spec)}))
    op = local_call.call.op
    if not axes:
        return None

    def run(gradients: list[Tensor], found: Tensor, scale: Tensor) -> None:
        op(gradients, found, scale)
        found.copy_(all_reduced(found, found_inf, axes, "max"))

    return run


# A call works on lists of parameters, one element after the other. Learning rates and other numbers
# do not influence the rows, and neither do the positions of elements in a sharded dim.
_OPTIMIZERS = {
    "_fused_sgd _fused_adam _fused_adamw _fused_adagrad": Rule(
        fused_optimizer, by_value=False, kind="each", unordered=True
    ),
    "_amp_foreach_non_finite_check_and_unscale_": Rule(
        unscale, _unscale, by_value=False, kind="each"
    ),
}
_WITH_NUMBERS = {
    # a key names the functional form and, after a space, the in-place form
    f"{name}.Tensor {name}_.Tensor": _with_numbers(_LISTS[name])
    for name in _TERNARY
}
POINTWISE: Table = family(_RULES | _OPTIMIZERS) | family(_LISTS | _WITH_NUMBERS)
