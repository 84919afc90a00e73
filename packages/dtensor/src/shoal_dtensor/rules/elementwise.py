"""Sharding of elementwise operators, on one mesh axis.

Every dim may be cut, in all operands alike (the rows of `pointwise`).  What differs is what happens to partial values:
linear operators pass partial sums on, increasing ones partial extrema, and choosing ones (`where`, `copy_`) any
reduction that gives `x` for equal values `x`.  Scalars never influence a row, only whether an operand is a number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..placements import REDUCE_OPS
from ..spec import TensorMeta
from .local import across, cutting, replacing
from .notation import keeps_digits, pointwise
from .rule import ANY_NORM, Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["ELEMENTWISE"]

Found = list[tuple[tuple[Entry, ...], Entry]]
IDEMPOTENT = ("avg", "max", "min", "band", "bor")  # reducing equal values gives that value


def _only(call: OpCall, index: int, op: str) -> tuple[Entry, ...]:
    return tuple(P(op) if i == index else R for i in range(len(call.tensors)))


def _all(call: OpCall, op: str) -> tuple[Entry, ...]:
    return (P(op),) * len(call.tensors)


def _number_operands(call: OpCall) -> int:
    """How many of the first two operands are numbers (or lists of them, for `foreach` operators)."""
    values = [call.get(argument.name) for argument in call.op._schema.arguments[:2]]
    firsts = [value[0] if isinstance(value, list) and value else value for value in values]
    return sum(isinstance(value, int | float | complex) for value in firsts)


def _offset(decided: LocalCall) -> LocalFunction | None:
    """A number that is added to a partial sum, or put into it: the first coordinate takes it, the others take 0.

    Theirs is of the number's type, which has a say in the dtype of the result.
    """
    call, made = decided.call, decided.outputs[0]
    axes = [axis for axis, op in made.partials if op == "sum"]
    name = next(
        (name for name in ("other", "value", "self") if isinstance(call.get(name), int | float | complex)), None
    )
    if not axes or name is None or made.coordinate is None or not any(made.coordinate[axis] for axis in axes):
        return None
    return replacing(call, **{name: type(call[name])(0)})


def _sums(call: OpCall) -> Found:
    """`a + b`: partial sums on both sides; an average or extremum on one side and a fixed value on the other."""
    listed = bool(_number_operands(call)) and call.op.__name__.startswith("_foreach")  # `_offset` is for one tensor
    found: Found = [(_all(call, op), P(op)) for op in (("avg",) if listed else ("sum", "avg"))]
    weighted = "sub" in call.op.__name__ or "alpha" in call.kwargs or len(call.args) > 2
    ordered = not any(t.dtype.is_complex for t in call.outputs)  # a real extremum plus 1j is none
    for op in ("max", "min") if ordered else ():
        found += [(_only(call, i, op), P(op)) for i in range(1 if weighted else len(call.tensors))]
    if len(call.tensors) == 2:
        found += [(_only(call, i, "avg"), P("avg")) for i in (0, 1)]
    return found


def _reversed_difference(call: OpCall) -> Found:
    return [(_all(call, op), P(op)) for op in (("avg",) if _number_operands(call) else ("sum", "avg"))]


def _negated(call: OpCall) -> Found:
    return [((P("max"),), P("min")), ((P("min"),), P("max"))]


def _kept(call: OpCall) -> Found:
    """Values unchanged: any reduction still to be done stays to be done."""
    return [((partial,), partial) for partial in (*map(P, REDUCE_OPS), ANY_NORM)]


def _converted(call: OpCall) -> Found:
    """`to`: partial values stay as they are where the conversion is exact or increasing.

    Partial sums are not narrowed: each part would be rounded, and where parts cancel the sum would be off by much more.
    """
    (source,), (target,) = call.tensors, call.outputs
    found: Found = [((P(op),), P(op)) for op in REDUCE_OPS if _commutes(op, source, target)]
    return [*found, *([((ANY_NORM,), ANY_NORM)] if _keeps_norms(source, target) else [])]


def _commutes(op: str, source: TensorMeta, target: TensorMeta) -> bool:
    """Whether converting and then reducing with `op` gives what reducing and then converting does."""
    if source.dtype == target.dtype:
        return True
    if op in ("max", "min"):
        return target.dtype.is_floating_point and not source.dtype.is_complex
    floating = source.dtype.is_floating_point or source.dtype.is_complex
    return op in ("sum", "avg") and floating and keeps_digits(source.dtype, target.dtype)


def _keeps_norms(source: TensorMeta, target: TensorMeta) -> bool:
    """Whether partial norms, which are real, may be converted."""
    return all(_commutes(op, source, target) for op in ("sum", "max"))


def _made(call: OpCall) -> TensorMeta:
    return (call.outputs or call.tensors)[0]


def _chosen(call: OpCall, first: int, count: int) -> Found:
    """One of `count` operands from `first` on is chosen for every element, whatever the values."""
    before, after = (R,) * first, (R,) * (len(call.tensors) - first - count)
    found: Found = []
    chosen = range(first, first + count)
    kept = {op: [i for i in chosen if _commutes(op, call.tensors[i], _made(call))] for op in REDUCE_OPS}
    if count > 1 or not _fills_with_number(call):
        found += [((*before, *(P(op),) * count, *after), P(op)) for op in REDUCE_OPS if len(kept[op]) == count]
    for op in IDEMPOTENT:
        found += [(_only(call, i, op), P(op)) for i in kept[op]]
    return list(dict.fromkeys(found))


def _fills_with_number(call: OpCall) -> bool:
    return any(isinstance(value, int | float | complex) for value in call.bound.values())


def _where(call: OpCall) -> Found:
    return _chosen(call, 1, len(call.tensors) - 1)


def _masked_fill(call: OpCall) -> Found:
    found: Found = [(_only(call, 0, op), P(op)) for op in IDEMPOTENT]
    if len(call.tensors) == 2:
        found.append(((P("sum"), R), P("sum")))
    if len(call.tensors) == 3:
        ops = [op for op in REDUCE_OPS if _commutes(op, call.tensors[2], _made(call))]
        found += [((P(op), R, P(op)), P(op)) for op in ops]
        found += [((R, R, P(op)), P(op)) for op in ops if op in IDEMPOTENT]
    return found


def _copied(call: OpCall) -> Found:
    """`copy_`: the source's values, so any reduction may wait if the target has the same one."""
    return _replaced(call) + [(_only(call, 0, op), P(op)) for op in IDEMPOTENT]


def _replaced(call: OpCall) -> Found:
    """Values taken from the second tensor."""
    if len(call.tensors) != 2:
        return []
    target, source = call.tensors
    # Not partial norms: what is written to them must pass `write_back`, for they remember what they were reduced to.
    return [(_all(call, op), P(op)) for op in REDUCE_OPS if _commutes(op, source, target)]


def _filled(call: OpCall) -> Found:
    """`fill`: old values do not matter."""
    found: Found = [(_only(call, 0, op), P(op)) for op in IDEMPOTENT]
    if len(call.tensors) == 1:
        found.append(((P("sum"),), P("sum")))
    return found + _replaced(call)


def _zeroed(call: OpCall) -> Found:
    return [((P(op),), P(op)) for op in REDUCE_OPS if op != "bxor"]


def _largest(call: OpCall) -> Found:
    return [(_all(call, "max"), P("max")), *((_only(call, i, "max"), P("max")) for i in range(len(call.tensors)))]


def _smallest(call: OpCall) -> Found:
    return [(_all(call, "min"), P("min")), *((_only(call, i, "min"), P("min")) for i in range(len(call.tensors)))]


def _bits(op: str) -> Rule:
    """Bitwise `op` of two partial values that are to be reduced with the same `op`."""
    return pointwise(partial=lambda call: [] if _number_operands(call) else [(_all(call, op), P(op))])


def _multiplied(call: OpCall) -> Found:
    return [] if _number_operands(call) else [(_all(call, "product"), P("product"))]


def _ternary_sum(call: OpCall) -> Found:
    """`a + value * b * c`: linear in `a` and `b` together, or in `a` and `c`."""
    if len(call.tensors) != 3:
        return []
    found: Found = []
    for op in ("sum", "avg"):
        found += [((P(op), P(op), R), P(op)), ((P(op), R, P(op)), P(op))]
    return [*found, ((P("avg"), R, R), P("avg"))]


def _ternary_quotient(call: OpCall) -> Found:
    """`a + value * b / c`: linear in `a` and `b` together."""
    found: Found = [((P(op), P(op), R), P(op)) for op in ("sum", "avg")]
    return [*found, ((P("avg"), R, R), P("avg"))]


def _blended(call: OpCall) -> Found:
    """`lerp(a, b, w)`: linear in `a` and `b` together; fixed points keep averages."""
    rest = (R,) * (len(call.tensors) - 2)
    found: Found = [((P(op), P(op), *rest), P(op)) for op in ("sum", "avg")]
    return [*found, ((P("avg"), R, *rest), P("avg")), ((R, P("avg"), *rest), P("avg"))]


def _divided(call: OpCall) -> Found:
    """True division is linear in the dividend; rounded division is not."""
    if call.get("rounding_mode") is not None or not isinstance(_number_or(call, 0), tuple):
        return []
    rest = (R,) * (len(call.tensors) - 1)
    return [((P(op), *rest), P(op)) for op in ("sum", "avg")]


def _of_real_gradients(call: OpCall) -> Found:
    """Linear in the gradient, but for whole numbers, to which the result is cut."""
    ops = ("sum", "avg") if call.tensors[0].dtype.is_floating_point else ()
    return [(_only(call, 0, op), P(op)) for op in ops]


def _number_or(call: OpCall, index: int) -> Any:
    return call.bound[call.op._schema.arguments[index].name]


def _verdict(decided: LocalCall) -> LocalFunction:
    """`equal` and `allclose`: every rank's verdict on its own part, then all agree."""
    op = decided.call.op
    axes = tuple(sorted({axis for spec in decided.inputs for axis in cutting(spec)}))

    def run(a: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        same = torch.tensor(int(op(a, *args, **kwargs)), device=a.device)
        return bool(across(same, decided.inputs[0], axes, "min").item())

    return run


def _verdict_rows(call: OpCall) -> list[Row]:
    first, second = call.tensors
    if first.shape != second.shape:
        return []
    return [Row((S(d), S(d)), (), traffic=1) for d in range(first.ndim)]


_PLAIN = pointwise()
_RISING = pointwise(monotone=True)
_LINEAR = pointwise(linear=(0,))
_LINEAR_RISING = pointwise(linear=(0,), monotone=True)
_KEPT = pointwise(partial=_kept)
_SUM = replace(pointwise(partial=_sums), local=_offset)
_EACH_GRADIENT = pointwise(linear=(0,))  # backward operators: linear in the gradient, their first operand

_RULES: dict[str, Rule] = {
    # -- values unchanged or converted
    "clone alias detach detach_copy alias_copy lift lift_fresh lift_fresh_copy contiguous": _KEPT,
    "_to_copy": pointwise(partial=_converted),
    "positive": _KEPT,
    "copy_ copy": pointwise(partial=_copied),
    "fill": replace(pointwise(partial=_filled), local=_offset),
    "zero": pointwise(partial=_zeroed),
    "where.self where.ScalarOther where.ScalarSelf where.self_out": pointwise(partial=_where),
    "where.Scalar": _PLAIN,
    "masked_fill": replace(pointwise(partial=_masked_fill), local=_offset),
    # -- linear
    "add sub": _SUM,
    "rsub": pointwise(partial=_reversed_difference),
    "neg": pointwise(linear=(0,), partial=_negated),
    "mul": pointwise(linear=(0, 1), partial=_multiplied),
    "div true_divide divide": pointwise(partial=_divided),
    "lerp": pointwise(partial=_blended),
    "addcmul": pointwise(partial=_ternary_sum),
    "addcdiv": pointwise(partial=_ternary_quotient),
    "conj_physical _conj_physical resolve_conj resolve_neg": _LINEAR,
    # The marks that say "conjugate later" are not looked at below a tensor subclass: compute now.
    "_conj": replace(_LINEAR, local=lambda decided: torch.conj_physical, copies=True),
    "_neg_view": replace(_LINEAR, local=lambda decided: torch.neg, copies=True),
    "rad2deg deg2rad": _LINEAR_RISING,
    # -- increasing for all real numbers
    "relu relu6 exp exp2 expm1 tanh sigmoid atan asinh erf sinh ceil floor trunc sign": _RISING,
    "hardtanh hardsigmoid softplus special_ndtr special_expit": _RISING,
    "round": _RISING,
    "maximum fmax max.other max.out": pointwise(partial=_largest),
    "minimum fmin min.other min.out": pointwise(partial=_smallest),
    "bitwise_and __and__ __iand__": _bits("band"),
    "bitwise_or __or__ __ior__": _bits("bor"),
    "bitwise_xor __xor__ __ixor__": _bits("bxor"),
    "clamp clip clamp_min clamp_max": pointwise(monotone=True),
    # -- nothing but sharding
    "abs acos acosh angle arccos asin arcsin atanh arctanh arctan2 atan2 cos cosh digamma erfc erfinv frac": _PLAIN,
    "i0 lgamma log log10 log1p log2 logit mvlgamma nan_to_num polygamma reciprocal rsqrt sgn signbit sin": _PLAIN,
    "sinc sqrt square tan isfinite isinf isnan isneginf isposinf logical_not bitwise_not frexp": _PLAIN,
    "eq ne lt le gt ge logical_and logical_xor bitwise_left_shift bitwise_right_shift": _PLAIN,
    "__lshift__ __ilshift__ __rshift__ __irshift__ copysign float_power floor_divide fmod gcd heaviside": _PLAIN,
    "hypot igamma igammac lcm ldexp logaddexp logaddexp2 nextafter pow remainder xlogy complex polar": _PLAIN,
    "_prelu_kernel _prelu_kernel_backward special_gammaln special_psi": _PLAIN,
    "celu elu gelu hardshrink hardswish leaky_relu log_sigmoid log_sigmoid_forward mish selu silu": _PLAIN,
    "softshrink threshold logical_or": _PLAIN,
    "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr": _PLAIN,
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v": _PLAIN,
    "special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he": _PLAIN,
    "special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p": _PLAIN,
    "special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0": _PLAIN,
    "special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0": _PLAIN,
    "special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t": _PLAIN,
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v": _PLAIN,
    "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta": _PLAIN,
    # -- backward, linear in the incoming gradient
    "elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward": _EACH_GRADIENT,
    "hardtanh_backward leaky_relu_backward log_sigmoid_backward logit_backward mish_backward": _EACH_GRADIENT,
    "sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward": _EACH_GRADIENT,
    "threshold_backward native_dropout_backward": _EACH_GRADIENT,
    "infinitely_differentiable_gelu_backward": pointwise(partial=_of_real_gradients),
    "_masked_scale": _EACH_GRADIENT,
    "rrelu_with_noise_backward": _EACH_GRADIENT,
    # -- one answer for all elements
    "equal allclose": Rule(_verdict_rows, _verdict),
}

_FOREACH = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 "
    "floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign "
    "sin sinh sqrt sub tan tanh trunc zero"
)
_RULE_OF = {name: rule for names, rule in _RULES.items() for name in names.split()}


def _with_numbers(rule: Rule) -> Rule:
    """`rule` for operators whose last tensor holds a number for each element of the lists."""

    def rows(call: OpCall) -> list[Row]:
        found = rule.rows(replace(call, tensors=call.tensors[:-1]))
        return [replace(row, inputs=(*row.inputs, R)) for row in found]

    return replace(rule, rows=rows)


_LISTS = {f"_foreach_{n}": replace(_RULE_OF[n], each=True, local=None) for n in _FOREACH.split()}
_TERNARY = ("_foreach_addcdiv", "_foreach_addcmul")

ELEMENTWISE: Table = family(_RULES) | family(
    _LISTS | {f"{n}.Tensor {n}_.Tensor": _with_numbers(_LISTS[n]) for n in _TERNARY}
)
