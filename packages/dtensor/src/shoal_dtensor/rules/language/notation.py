"""Rules written as factors: `product("m k, k n -> m n")`.

Each operand lists its dims; a name is a factor of the operator. Sharding a factor shards every
operand that has it. A factor that only inputs have is summed over, so sharding it leaves the
outputs partial. `...` stands for the broadcast dims that operands share, aligned at the right. `(h
d)` is one dim made of two factors, the first varying slowest. The notation is einsum's; the idea of
factors is Shardy's (openxla/shardy, sharding rules) and the parser's shape einops'.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ...errors import ArgumentValueError
from ...layout.tensor_meta import TensorMeta
from .op_call import partial_rows
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S

ELLIPSIS = "..."
Dim = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern: for each operand its dims, each a tuple of factor names, slowest first.

    Attributes:
        text: the source of the pattern.
        inputs: the dims of each tensor input.
        outputs: the dims of each tensor output.
    """

    text: str
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Parse a pattern into the dims of its operands.

    Args:
        text: inputs and outputs around `->`, operands separated by commas, their dims by spaces.

    Raises:
        ArgumentValueError: if the pattern has no single arrow, unbalanced brackets or a repeated
            factor in one operand.

    Example:
        >>> parse("b (h d), d -> b h").inputs
        ((('b',), ('h', 'd')), (('d',),))
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ArgumentValueError(f"pattern {text!r}: expected inputs -> outputs with one arrow")
    inputs_text, outputs_text = sides
    inputs = tuple([_operand(part, text) for part in inputs_text.split(",")])
    outputs = tuple([_operand(part, text) for part in outputs_text.split(",")])
    return Pattern(text, inputs, outputs)


def _operand(part: str, text: str) -> tuple[Dim, ...]:
    """Return the dims of one operand of a pattern; `text` is the whole pattern, for errors."""
    # Example: the tokens of "b (h d)" are ("", "b") and ("h d", "").
    tokens = re.findall(r"\(([^()]*)\)|([^\s()]+|[()])", part)
    dims: list[Dim] = []
    for group, name in tokens:
        dims.append((name,) if name else tuple(group.split()))
    names = [name for dim in dims for name in dim]
    problem = "" if len(names) == len(set(names)) else "a factor is repeated"
    for name in names:
        if name in "()":
            problem = "brackets do not match"
        elif name != ELLIPSIS and not name.isidentifier():
            problem = f"{name!r} is not a factor name"
    if problem:
        raise ArgumentValueError(f"pattern {text!r}: {problem} in {part.strip()!r}")
    return tuple(dims)


def _spread(dims: tuple[Dim, ...], ndim: int, pattern: Pattern) -> list[Dim]:
    """Replace `...` by one factor per dim it stands for.

    Factors are named from the right so that operands align.
    """
    has_ellipsis = (ELLIPSIS,) in dims
    # Example: for 4 dims and "... m k", `...` stands for 2 dims, named ...1 and ...0.
    free = ndim - len(dims) + has_ellipsis
    if free < 0 or (free and not has_ellipsis):
        raise ArgumentValueError(
            f"pattern {pattern.text!r}: an operand has {len(dims)} dims, but the tensor has {ndim}"
        )
    broadcast = [(f"...{i}",) for i in reversed(range(free))]
    result: list[Dim] = []
    for dim in dims:
        result += broadcast if dim == (ELLIPSIS,) else [dim]
    return result


def _spread_all(
    operands: Sequence[tuple[Dim, ...]], tensors: Sequence[TensorMeta], pattern: Pattern
) -> list[list[Dim]]:
    pairs = zip(operands, tensors, strict=True)
    return [_spread(dims, len(tensor.shape), pattern) for dims, tensor in pairs]


def factor_rows(
    pattern: Pattern,
    inputs: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta],
    *,
    replicated: Sequence[str] = (),
    reduce: str = "sum",
) -> list[Row]:
    """Return one row per factor that may be sharded.

    Args:
        pattern: the parsed pattern.
        inputs, outputs: global tensors, in order.
        replicated: factors that must not be sharded; `"..."` names all broadcast dims.
        reduce: how a factor that only inputs have is reduced.

    Raises:
        ArgumentValueError: if the pattern does not fit the operands.
    """
    inputs_fit = len(inputs) == len(pattern.inputs)
    if not inputs_fit or len(outputs) != len(pattern.outputs):
        expected = f"{len(pattern.inputs)} inputs and {len(pattern.outputs)} outputs"
        got = f"{len(inputs)} and {len(outputs)}"
        raise ArgumentValueError(f"pattern {pattern.text!r}: fits {expected}, got {got}")
    operands = _spread_all(pattern.inputs, inputs, pattern)
    results = _spread_all(pattern.outputs, outputs, pattern)
    sizes = _factor_sizes(pattern, [*operands, *results], [*inputs, *outputs])
    rows = []
    for name in _factors_of(operands):
        is_broadcast = name.startswith(ELLIPSIS)
        if name in replicated or (is_broadcast and ELLIPSIS in replicated):
            continue
        # Example: S(1), S(0) for the factor k of "m k, k n -> m n".
        input_entries = _entries(operands, inputs, name, sizes)
        output_entries = _entries(results, outputs, name, sizes)
        if input_entries is None or output_entries is None:
            continue
        # In the example, the output lacks k, so it is P(sum).
        reduced = [P(reduce) if entry is R else entry for entry in output_entries]
        rows.append(Row(tuple(input_entries), tuple(reduced)))
    return rows


def _factors_of(operands: Sequence[list[Dim]]) -> list[str]:
    """Return the names of the factors of some operands, in order and each once."""
    names: dict[str, None] = {}
    for dims in operands:
        for dim in dims:
            names |= dict.fromkeys(dim)
    return list(names)


def _factor_sizes(
    pattern: Pattern, dims: Sequence[list[Dim]], tensors: Sequence[TensorMeta]
) -> dict[str, int]:
    """Return the size of every factor; operands that broadcast it (size 1) do not count."""
    sizes: dict[str, int] = {}
    pairs: list[tuple[Dim, int]] = []
    for operand, tensor in zip(dims, tensors, strict=True):
        pairs += zip(operand, tensor.shape, strict=True)
    for dim, n in pairs:
        if len(dim) == 1:
            (name,) = dim
            # Example: if "k" is 1 (broadcast) in one operand and 6 in another, it is 6.
            size = sizes.get(name, 1)
            if size not in (1, n) and n != 1:
                raise ArgumentValueError(
                    f"pattern {pattern.text!r}: factor {name!r} has sizes {size} and {n}"
                )
            sizes[name] = n if size == 1 else size

    def count_unknown(pair: tuple[Sequence[str], int]) -> int:
        return sum(name not in sizes for name in pair[0])

    by_unknown = sorted(pairs, key=count_unknown)
    for dim, n in by_unknown:
        unknown = [name for name in dim if name not in sizes]
        if len(unknown) == 1:
            # Example: if (h d) is 12 and d is 4, h is 3.
            others = prod(sizes[name] for name in dim if name in sizes)
            sizes[unknown[0]] = n // others if others else 1
        elif unknown:
            raise ArgumentValueError(
                f"pattern {pattern.text!r}: the sizes of {', '.join(unknown)} cannot be derived"
            )
    return sizes


def _entries(
    operands: Sequence[list[Dim]], tensors: Sequence[TensorMeta], name: str, sizes: dict[str, int]
) -> list[Entry] | None:
    """Return the placements of operands when factor `name` is sharded.

    Return None if the shards of an operand would not be contiguous.
    """
    entries = []
    for dims, tensor in zip(operands, tensors, strict=True):
        entry = _entry(dims, tensor, name, sizes)
        if entry is None:
            return None
        entries.append(entry)
    return entries


def _entry(dims: list[Dim], tensor: TensorMeta, name: str, sizes: dict[str, int]) -> Entry | None:
    """Return the placement of an operand when factor `name` is sharded.

    Return None if the operand's shards would not be contiguous.
    """
    for i, dim in enumerate(dims):
        if name not in dim:
            continue
        position = dim.index(name)
        # Example: sharded by d, a shard of "(h d)" would have a run of every head.
        runs = prod([sizes[outer] for outer in dim[:position]])
        if runs != 1:
            return None
        # Example: (1, 6) is broadcast to (4, 6), which is sharded by rows: R and S(0).
        if tensor.shape[i] == 1 and sizes[name] != 1:
            return R
        unit = prod([sizes[inner] for inner in dim[position + 1 :]])
        return S(i, unit)
    return R


def linear_rows(linear: Sequence[int], inputs: int, outputs: int) -> list[Row]:
    """Return the rows that are partial in one linear operand and in the outputs.

    Args:
        linear: indices of the inputs in each of which alone the operator is linear.
        inputs: number of tensor inputs.
        outputs: number of tensor outputs.
    """
    partials = (P("sum"), P("avg"))
    rows = []
    for i in linear:
        if i < inputs:
            rows += partial_rows(partials, frozenset((i,)), inputs, outputs)
    return rows


def product(
    text: str,
    *,
    linear: Sequence[int] = (),
    replicated: str = "",
    reduce: str = "sum",
    local: Callable[[LocalCall], LocalFunction | None] | None = None,
    skip_empty: bool = False,
) -> Rule:
    """Return the rule that a pattern describes.

    Args:
        text: the pattern.
        linear: operands in which the operator is linear: a partial sum there gives partial sums.
        replicated: factors, space-separated, that must not be sharded.
        reduce: how factors that only inputs have are reduced.
        local, skip_empty: see `Rule`.

    Example:
        >>> rule = product("m k, k n -> m n", linear=(0, 1))
        >>> import torch
        >>> a, b, c = (TensorMeta(s, (s[1], 1), torch.float32) for s in ((4, 6), (6, 2), (4, 2)))
        >>> call = OpCall(torch.ops.aten.mm.default, (a, b), {}, (a, b), (c,))
        >>> [row.outputs[0] for row in rule.rows(call)][:3]
        [S(0), Partial(sum), S(1)]
    """
    pattern = parse(text)
    fixed = tuple(replicated.split())

    def rows(call: OpCall) -> list[Row]:
        # Results that a mask argument leaves out are removed from the pattern.
        places = zip(pattern.outputs, call.results.values(), strict=False)
        present = tuple(dims for dims, place in places if place)
        wanted = replace(pattern, outputs=present)
        rows = factor_rows(wanted, call.tensors, call.outputs, replicated=fixed, reduce=reduce)
        return rows + linear_rows(linear, len(call.tensors), len(call.outputs))

    return Rule(
        rows,
        local,
        unordered=local is None,
        skip_empty=skip_empty,
        sizes=None if "(" in text else (),
    )


def broadcast_entry(meta: TensorMeta, dim: int, ndim: int, unit: int = 1) -> Entry:
    """Return the entry of a tensor that is broadcast to `ndim` dims of which `dim` is sharded."""
    own_dim = dim - (ndim - meta.ndim)
    has_dim = own_dim >= 0 and meta.shape[own_dim] != 1
    return S(own_dim, unit) if has_dim else R


def rows_sharded_alike(call: OpCall, *fixed: int) -> Iterator[Row]:
    """Yield a row for each dim that is not `fixed`, sharded in all operands and results."""
    for d in range(call.outputs[0].ndim):
        if d not in fixed:
            tensors = (*call.places, "out")
            yield call.row(dict.fromkeys(tensors, S(d)))


Partials = Callable[[OpCall], Sequence[tuple[tuple[Entry, ...], Entry]]]
"""Function of a call: pairs of input entries and the entry of every output, partial or not."""


def pointwise(
    *,
    linear: Sequence[int] = (),
    jointly: bool = False,
    monotone: bool = False,
    partial: Partials | None = None,
) -> Rule:
    """Return the rule of an elementwise operator with broadcasting.

    Every dim may be sharded, in all operands alike.

    Args:
        linear: operands in which it is linear when the others are fixed. For `mul` this is each of
            them, for `neg` the only one.
        jointly: whether it is linear in all tensor operands together, without a constant term
            (`real`, `add` without numbers). Then partial sums give partial sums.
        monotone: for an operator with one operand, whether the result never decreases when the
            operand increases. Then it commutes with partial `max` and `min`.
        partial: further rows with partial values.

    Example:
        >>> import torch
        >>> from shoal_dtensor.testing import validate
        >>> negate = torch.ops.aten.neg.default
        >>> validate(negate, torch.randn(4, 3), rule=pointwise(linear=(0,))).wrong
        []
    """

    def rows(call: OpCall) -> list[Row]:
        inputs = len(call.tensors)
        results = call.outputs or tuple(call.tensors[i] for i in call.written)
        outputs = len(results)
        pattern = _elementwise(inputs, outputs)
        rows = factor_rows(pattern, call.tensors, results)
        rows += linear_rows(linear, inputs, outputs)
        ops = ["sum", "avg"] if jointly else []
        if monotone and inputs == 1:
            ops += ["max", "min"]
        for op in ops:
            partial_op = P(op)
            rows.append(Row((partial_op,) * inputs, (partial_op,) * outputs))
        if partial:
            rows += [Row(entries, (output,) * outputs) for entries, output in partial(call)]
        return rows

    return Rule(rows, by_value=False, unordered=True, sizes=())


def _elementwise(inputs: int, outputs: int) -> Pattern:
    """Return the pattern of an elementwise operator: `..., ... -> ...` for two inputs."""
    inputs_text = ", ".join([ELLIPSIS] * inputs)
    outputs_text = ", ".join([ELLIPSIS] * outputs)
    return parse(f"{inputs_text} -> {outputs_text}")
