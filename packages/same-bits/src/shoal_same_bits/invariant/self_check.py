"""`check_arithmetic` compares the bits of operators on one rank with their bits on several ranks.

Each operator is computed as one rank would do it, and as 2, 4 and 8 ranks would do it: every rank
computes its samples, features or tokens, and the results are joined as collectives join them. All
of this runs on the calling rank. The first module that is made parallel in `invariant_arithmetic`
runs these checks for its device and dtype. `check_arithmetic` also compares collectives along the
axes of a mesh with the tree on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import clip_grad_norm_
from shoal_dtensor.internal import check_device_mesh, unwatched, unwatched_functions
from shoal_mesh import DeviceMesh, all_reduce, reduce_scatter, sums_in_tree
from shoal_mesh.internal import tree_sum

from ..errors import VariantArithmeticError
from ..row_attention import attention_in_rows
from .blocks import bias_gradient, current_arithmetic, spread, sum_of_products, weight_gradient
from .norms_and_embeddings import embedding_gradient, sum_of_cells

# Sizes of the operands: multiples of 8, so that up to 8 ranks can share each of them.
BLOCKS = 8
HEADS = 8
SAMPLES = 8
ROWS = 16
FEATURES = 128
# Numbers of ranks that are compared with one rank.
DEGREES = (2, 4, 8)
Draw = Callable[..., Tensor]
# a function of operands
Function = Callable[..., Tensor]
# a function of a number of blocks, and of operands
BlockForm = Callable[..., Tensor]


class Compared(NamedTuple):
    """A result as one rank computes it, and as several ranks or calls compute it together.

    Attributes:
        name: the name of the operator.
        expected: the result of one rank in one call.
        together: the joined results of several ranks or calls.
    """

    name: str
    expected: Tensor
    together: Tensor


def _layer_norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (FEATURES,))


def _rms_norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (FEATURES,), eps=1e-6)


_NORMS: dict[str, Function] = {"layer_norm": _layer_norm, "rms_norm": _rms_norm}


class Case(NamedTuple):
    """An operator that ranks share.

    Attributes:
        name: the name of the operator, and of the dim that ranks share.
        form: a function of a number of blocks and of the operands.
        operands: names of tensors of `_draw_operands`. A digit behind a name is the dim that ranks
            share: each rank has its part of the tensor, and its part of the blocks. Example: "x0 w"
            is x, whose dim 0 is shared, and the whole w.
        joined: the dim along which the results of ranks are joined; None if they are added in the
            tree.
    """

    name: str
    form: BlockForm
    operands: str
    joined: int | None


# A product of x and a weight has two kinds of blocks. `spread` computes blocks of the result's
# features, and `sum_of_products` adds blocks of the features that are summed. `dim` is the dim of
# the weight (output features, input features) that is in blocks.


def _cases_over_samples() -> Iterator[Case]:
    # Ranks with different samples do not share blocks: each rank computes all `BLOCKS`. So these
    # forms ignore the rank's number of blocks.
    def linear(_: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return spread(x, weight, dim=0, blocks=BLOCKS, bias=bias)

    def input_gradient(_: int, grad: Tensor, weight: Tensor) -> Tensor:
        return sum_of_products([(grad, weight)], dim=0, blocks=BLOCKS)

    def gradient_of_weight(_: int, grad: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(grad, x, dim=0, blocks=BLOCKS)

    def gradient_of_bias(_: int, grad: Tensor) -> Tensor:
        return bias_gradient(grad, BLOCKS)

    def gradient_of_norm(_: int, grad: Tensor) -> Tensor:
        # `comm` is None, because this rank computes the parts of all ranks.
        return sum_of_cells(grad, comm=None, dim=1, blocks=BLOCKS)

    def gradient_of_embedding(_: int, grad: Tensor, tokens: Tensor) -> Tensor:
        # Tokens are below FEATURES, see `_draw_operands`; no row is padding.
        return embedding_gradient(grad, tokens, rows=FEATURES, padding=-1)

    def sum_of_losses(_: int, grad: Tensor) -> Tensor:
        return tree_sum(grad.flatten())

    yield Case("linear, over samples", linear, "x0 w b", 0)
    yield Case("gradient of the input of a linear, over samples", input_gradient, "g0 w", 0)
    yield Case("gradient of a weight, over samples", gradient_of_weight, "g0 x0", None)
    yield Case("gradient of a bias, over samples", gradient_of_bias, "g0", None)
    yield Case("gradient of a norm, over samples", gradient_of_norm, "g0", None)
    yield Case("gradient of an embedding, over samples", gradient_of_embedding, "g0 t0", None)
    yield Case("sum of losses, over samples", sum_of_losses, "g0", None)


def _cases_over_features() -> Iterator[Case]:
    def output_columns(blocks: int, x: Tensor, weight: Tensor) -> Tensor:
        return spread(x, weight, dim=0, blocks=blocks)

    def input_rows(blocks: int, x: Tensor, weight: Tensor) -> Tensor:
        return sum_of_products([(x, weight)], dim=1, blocks=blocks)

    def input_gradient_columns(blocks: int, grad: Tensor, weight: Tensor) -> Tensor:
        return spread(grad, weight, dim=1, blocks=blocks)

    def input_gradient_rows(blocks: int, grad: Tensor, weight: Tensor) -> Tensor:
        return sum_of_products([(grad, weight)], dim=0, blocks=blocks)

    def gradient_of_two_readers(
        blocks: int, grad: Tensor, other_grad: Tensor, weight: Tensor
    ) -> Tensor:
        # Two Linears read one input, so its gradient is the sum of two products. Both have the
        # same weight here.
        return sum_of_products([(grad, weight), (other_grad, weight)], dim=0, blocks=blocks)

    def weight_gradient_rows(blocks: int, grad: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(grad, x, dim=0, blocks=blocks)

    def weight_gradient_columns(blocks: int, grad: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(grad, x, dim=1, blocks=blocks)

    def gradient_of_bias(blocks: int, grad: Tensor) -> Tensor:
        return bias_gradient(grad, blocks)

    def sum_over_classes(_: int, x: Tensor) -> Tensor:
        return tree_sum(x.movedim(-1, 0))

    of_input = "gradient of the input of a linear"
    yield Case("linear, over its output features", output_columns, "x w0", -1)
    yield Case("linear, over its input features", input_rows, "x2 w1", None)
    yield Case(f"{of_input}, over its input features", input_gradient_columns, "g w1", -1)
    yield Case(f"{of_input}, over its output features", input_gradient_rows, "g2 w0", None)
    # x serves as the gradient of the second layer.
    yield Case("gradient of an input of several layers", gradient_of_two_readers, "g2 x2 w0", None)
    yield Case("gradient of a weight, over its dim 0", weight_gradient_rows, "g2 x", 0)
    yield Case("gradient of a weight, over its dim 1", weight_gradient_columns, "g x2", 1)
    yield Case("gradient of a bias, over features", gradient_of_bias, "g2", 0)
    for function in (functional.silu, functional.gelu, torch.exp, torch.tanh):
        yield Case(function.__name__, partial(_without_blocks, function), "x2", -1)
    yield Case("sum over classes", sum_over_classes, "x2", None)


def _cases_over_tokens_and_heads() -> Iterator[Case]:
    def gradient_of_norm(blocks: int, grad: Tensor) -> Tensor:
        # Ranks that share the tokens of each sample add their sums sample by sample, and all ranks
        # then add the sums of the samples. So a rank's result here is one sum for each sample.
        # Ranks that share the samples add the sums of their samples first.
        samples = torch.split(grad, 1)
        sums = [sum_of_cells(sample, comm=None, dim=1, blocks=blocks) for sample in samples]
        return torch.stack(sums)

    # `_with_gradient` stacks results in a new dim 0. So ranks that share dim 1 of the operands have
    # parts of dim 2 of the result.
    for kind, norm in _NORMS.items():
        form = partial(_with_gradient, norm)
        yield Case(kind, form, "g1 x1", joined=2)
    yield Case("gradient of a norm, over tokens", gradient_of_norm, "g1", None)
    attention = partial(functional.scaled_dot_product_attention, is_causal=True)
    attention_with_gradient = partial(_with_gradient, attention)
    of_attention = "scaled_dot_product_attention"
    yield Case(f"{of_attention}, over samples", attention_with_gradient, "h0 q0 k0 v0", joined=1)
    yield Case(f"{of_attention}, over heads", attention_with_gradient, "h1 q1 k1 v1", joined=2)


def _without_blocks(function: Function, _: int, x: Tensor) -> Tensor:
    """Call a function that computes each element alone, with any number of blocks."""
    return function(x)


def _draw_operands(draw: Draw) -> dict[str, Tensor]:
    """Draw the tensors of all cases, by their names in `Case.operands`.

    x and g are the input of a Linear and the gradient at its output, (SAMPLES, ROWS, FEATURES). w
    and b are its weight and bias. t has tokens. q, k and v are the heads of an attention, and h is
    the gradient at its output.
    """
    operands = {"x": draw(ROWS, FEATURES), "g": draw(ROWS, FEATURES)}
    operands["w"] = draw(FEATURES, FEATURES, samples=0)
    # Example: -1.5 gives -96, and the remainder by 128 is token 32.
    numbers = operands["x"][..., 0] * 64
    operands["t"] = numbers.long().remainder(FEATURES)
    for name in "qkvh":
        # (8, 8, 16, 16): samples, heads, rows, features of a head
        operands[name] = draw(HEADS, ROWS, FEATURES // HEADS)
    operands["b"] = draw(FEATURES, samples=0)
    return operands


def _compare_ranks(draw: Draw) -> Iterator[Compared]:
    """Compute every case on one rank, and on several ranks together."""
    operands = _draw_operands(draw)
    cases = [*_cases_over_samples(), *_cases_over_features(), *_cases_over_tokens_and_heads()]
    for case in cases:
        names = case.operands.split()
        wholes = [operands[name[0]] for name in names]
        shared_dims = [name[1:] for name in names]
        on_one_rank = case.form(BLOCKS, *wholes)
        for ranks in DEGREES:
            parts = []
            for whole, dim in zip(wholes, shared_dims, strict=True):
                parts.append(_parts_of_ranks(whole, dim, ranks))
            # Example: with 8 blocks on 4 ranks, each has 2.
            own_blocks = BLOCKS // ranks
            results = [case.form(own_blocks, *of_rank) for of_rank in zip(*parts, strict=True)]
            if case.joined is None:
                together = tree_sum(torch.stack(results))
            else:
                together = torch.cat(results, case.joined)
            yield Compared(case.name, on_one_rank, together)


def _parts_of_ranks(operand: Tensor, dim: str, ranks: int) -> list[Tensor]:
    """Return each rank's part of an operand along a dim; the whole operand if `dim` is ''."""
    if not dim:
        return [operand] * ranks
    return [part.contiguous() for part in operand.chunk(ranks, int(dim))]


def _with_gradient(function: Function, _: int, grad: Tensor, *inputs: Tensor) -> Tensor:
    """Return the result and the gradients of the inputs, stacked in a new dim 0."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, grad)
        return torch.stack([out.detach(), *grads])


def _compare_clipping(draw: Draw) -> Iterator[Compared]:
    """Compare the norm of one gradient with the norm of its parts."""
    grad = draw(ROWS, FEATURES)

    def norm(parts: Iterable[Tensor]) -> Tensor:
        params = [torch.zeros_like(part, requires_grad=True) for part in parts]
        for param, part in zip(params, parts, strict=True):
            param.grad = part.clone()
        return clip_grad_norm_(params, 1.0)

    with sums_in_tree():
        for ranks in DEGREES:
            parts = grad.chunk(ranks)
            yield Compared("clip_grad_norm_", norm([grad]), norm(parts))


def _compare_chunks(draw: Draw, rows: int) -> Iterator[Compared]:
    """Compute a sequence at once, and in chunks.

    `rows` is the number of tokens that a kernel of the mode computes together.
    """
    # Example: with `rows=4` the kernels compute the tokens 0:4, 4:8, 8:12 and 12:13 of the whole
    # sequence. The chunks have 1, 4, 5 and 3 tokens, and begin at the tokens 0, 1, 5 and 10. So in
    # chunks most tokens are computed together with others than in the whole sequence.
    sizes = [1, rows, rows + 1, max(rows - 1, 1)]
    length = sum(sizes)
    x = draw(length, FEATURES)
    weight = draw(FEATURES, FEATURES, samples=0)
    heads = (HEADS, length, FEATURES // HEADS)
    q = draw(*heads)
    k = draw(*heads)
    v = draw(*heads)

    def linear(part: Tensor) -> Tensor:
        return spread(part, weight, dim=0, blocks=BLOCKS)

    def summed_linear(part: Tensor) -> Tensor:
        return sum_of_products([(part, weight)], dim=1, blocks=BLOCKS)

    functions: dict[str, Function] = {
        "linear": linear,
        "linear, summed in blocks": summed_linear,
        **_NORMS,
        "silu": functional.silu,
    }
    chunks = [chunk.contiguous() for chunk in torch.split(x, sizes, 1)]
    for name, function in functions.items():
        together = torch.cat([function(chunk) for chunk in chunks], 1)
        yield Compared(f"{name}, over chunks of a sequence", function(x), together)

    is_visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    outputs = []
    end = 0
    for size in sizes:
        # Example: the queries 5:10 of the third chunk attend to the keys 0:10.
        start = end
        end = start + size
        mask = is_visible[start:end, :end]
        queries = q[:, :, start:end]
        keys = k[:, :, :end]
        values = v[:, :, :end]
        outputs.append(attention_in_rows(rows, queries, keys, values, attn_mask=mask))
    at_once = attention_in_rows(rows, q, k, v, is_causal=True)
    together = torch.cat(outputs, 2)
    yield Compared("attention, over chunks of a sequence", at_once, together)


def _differing_operators(device: str, dtype: torch.dtype, rows: int | None) -> list[str]:
    """Return the names of operators whose bits differ, each once."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, samples: int = SAMPLES) -> Tensor:
        whole = (samples, *shape) if samples else shape
        return torch.randn(whole, generator=generator).to(device, dtype)

    # The check must not change the program. Modes and subclasses of the user do not observe its
    # functions (`unwatched_functions`), and activation checkpoints do not save its results
    # (`unwatched`).
    with torch.no_grad(), unwatched_functions(), unwatched():
        compared = [*_compare_ranks(draw), *_compare_clipping(draw)]
        if rows is not None:
            compared += _compare_chunks(draw, rows)
    differing = [c.name for c in compared if not torch.equal(c.expected, c.together)]
    return list(dict.fromkeys(differing))


@lru_cache
def check_device(device: str, dtype: torch.dtype, threads: int, rows: int | None) -> None:
    """Check the operators of one rank.

    The result is cached, so the check runs once for the same arguments. `threads` is only a key of
    the cache: it is the number of threads of torch, because kernels depend on it.
    """
    _refuse(_differing_operators(device, dtype, rows), device, dtype)


def check_arithmetic(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Check the operators of this device, and sums over every axis of a mesh; all ranks call it.

    Args:
        mesh: the mesh whose device and ranks are checked.
        dtype: the dtype of the computation.

    Raises:
        VariantArithmeticError: if bits depend on the number of ranks; the message names the
            operators.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     check_arithmetic(init_device_mesh("cpu", (1,)))
    """
    check_device_mesh("check_arithmetic", mesh)
    arithmetic = current_arithmetic()
    rows = None if arithmetic is None else arithmetic.rows
    differing = _differing_operators(mesh.device_type, dtype, rows)
    # `all_reduce` adds up to 16 KiB in one exchange: each rank gets all terms. It adds larger
    # tensors in two exchanges: each rank adds its part, and then gets the parts of the others. In
    # float32 a small tensor has 256 bytes, and a large one has 1 MiB.
    small = 64
    large = 1 << 18
    for axis, size in product(mesh.axis_names, (small, large)):
        differing += _differing_collectives(mesh, axis, size, dtype)
    _refuse(differing, mesh.device_type, dtype)


def _differing_collectives(
    mesh: DeviceMesh, axis: str, size: int, dtype: torch.dtype
) -> Iterator[str]:
    """Compare the sums of collectives along an axis with the tree on one rank."""
    comm = mesh.comm(axis)
    draw = torch.Generator().manual_seed(size)
    terms = torch.randn((comm.size, size), generator=draw).to(mesh.device_type, dtype)
    expected = tree_sum(terms)
    term = terms[comm.rank].clone()
    with sums_in_tree():
        total = all_reduce(term, comm)
        part = reduce_scatter(term, comm)
    if not torch.equal(total, expected):
        yield f"all_reduce of {size} elements along {axis!r}"
    expected_part = expected.chunk(comm.size)[comm.rank]
    if not torch.equal(part, expected_part):
        yield f"reduce_scatter of {size} elements along {axis!r}"


def _refuse(differing: list[str], device: str, dtype: torch.dtype) -> None:
    """Raise a VariantArithmeticError if the bits of any operator differ."""
    if not differing:
        return
    threads = torch.get_num_threads()
    operators = "; ".join(differing)
    raise VariantArithmeticError(
        f"invariant_arithmetic on {device!r} in {dtype}, {threads} threads: the bits of these "
        f"operators depend on the number of ranks, or on chunks: {operators}. Leave the mode, or "
        "use another dtype or number of threads"
    )
