"""`check_arithmetic`: whether operators have the same bits on this device however many ranks share them, one by one.

Everything is computed as one rank does, and as 2, 4 and 8 ranks would: on their samples, features
or tokens, joined as collectives join them. The first module that is made parallel in the mode runs
those of its device and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, product

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import clip_grad_norm_
from shoal_dtensor.internal import check_device_mesh, unwatched, unwatched_functions
from shoal_mesh import DeviceMesh, all_reduce, reduce_scatter, sums_in_tree
from shoal_mesh.internal import tree_sum

from ..errors import VariantArithmeticError
from ..row_attention import attention_in_rows
from .blocks import bias_gradient, current_arithmetic, spread, summed, weight_gradient
from .norms_and_embeddings import embedding_gradient, sum_of_cells

BLOCKS = 8
SAMPLES = 8
ROWS = 16
FEATURES = 128
DEGREES = (2, 4, 8)
Draw = Callable[..., Tensor]
Form = Callable[..., Tensor]
_NORMS: dict[str, Form] = {
    "layer_norm": lambda part: functional.layer_norm(part, (FEATURES,)),
    "rms_norm": lambda part: functional.rms_norm(part, (FEATURES,), eps=1e-6),
}


def _forms() -> Iterator[tuple[str, Form, str, int | None]]:
    """What ranks share: a name, a function of a number of blocks and of tensors, these, and the dim of its result."""
    # Tensors are those of `_shared`; the digit behind one is the dim of which each rank has its
    # part, and its blocks. Results of ranks are joined along their dim, or added in the tree where
    # that is None.
    yield "linear, over samples", lambda _, x, w, b: spread(x, w, 0, BLOCKS, bias=b), "x0 w b", 0
    of_input = "gradient of the input of a linear"
    yield f"{of_input}, over samples", lambda _, g, w: summed([(g, w)], 0, BLOCKS), "g0 w", 0
    yield (
        "gradient of a weight, over samples",
        lambda _, g, x: weight_gradient(g, x, 0, BLOCKS),
        "g0 x0",
        None,
    )
    yield "gradient of a bias, over samples", lambda _, g: bias_gradient(g, BLOCKS), "g0", None
    yield (
        "gradient of a norm, over samples",
        lambda _, g: sum_of_cells(g, None, 1, BLOCKS),
        "g0",
        None,
    )
    name = "gradient of an embedding, over samples"
    yield name, lambda _, g, t: embedding_gradient(g, t, FEATURES, -1), "g0 t0", None
    yield "sum of losses, over samples", lambda _, g: tree_sum(g.flatten()), "g0", None

    yield "linear, over its output features", lambda n, x, w: spread(x, w, 0, n), "x w0", -1
    yield "linear, over its input features", lambda n, x, w: summed([(x, w)], 1, n), "x2 w1", None
    yield f"{of_input}, over its input features", lambda n, g, w: spread(g, w, 1, n), "g w1", -1
    yield (
        f"{of_input}, over its output features",
        lambda n, g, w: summed([(g, w)], 0, n),
        "g2 w0",
        None,
    )
    name = "gradient of what several layers read"
    yield name, lambda n, g, x, w: summed([(g, w), (x, w)], 0, n), "g2 x2 w0", None
    yield (
        "gradient of a weight, over its dim 0",
        lambda n, g, x: weight_gradient(g, x, 0, n),
        "g2 x",
        0,
    )
    yield (
        "gradient of a weight, over its dim 1",
        lambda n, g, x: weight_gradient(g, x, 1, n),
        "g x2",
        1,
    )
    yield "gradient of a bias, over features", lambda n, g: bias_gradient(g, n), "g2", 0
    for function in (functional.silu, functional.gelu, torch.exp, torch.tanh):
        yield function.__name__, lambda _, x, function=function: function(x), "x2", -1
    yield "sum over classes", lambda _, x: tree_sum(x.movedim(-1, 0)), "x2", None

    for kind, norm in _NORMS.items():
        yield kind, partial(_with_gradient, norm), "g1 x1", 2
    name = "gradient of a norm, over tokens"
    yield (
        name,
        lambda n, g: torch.stack([sum_of_cells(x, None, 1, n) for x in g.split(1)]),
        "g1",
        None,
    )

    attend = partial(functional.scaled_dot_product_attention, is_causal=True)
    for what, dim in (("samples", 0), ("heads", 1)):
        name = f"scaled_dot_product_attention, over {what}"
        yield name, partial(_with_gradient, attend), f"h{dim} q{dim} k{dim} v{dim}", dim + 1


def _shared(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names of operators, what one rank computes, and what ranks compute of it together."""
    # Inputs, gradients, weight and bias of a Linear, tokens, and heads of an attention with their
    # gradient.
    x = draw(ROWS, FEATURES)
    g = draw(ROWS, FEATURES)
    weight = draw(FEATURES, FEATURES, samples=0)
    tokens = (x[..., 0] * 64).long().remainder(FEATURES)  # -1.5 is -96, so 32 of 128
    heads = {name: draw(BLOCKS, ROWS, FEATURES // BLOCKS) for name in "qkvh"}  # (8, 8, 16, 16) each
    tensors = {"x": x, "g": g, "w": weight, "b": draw(FEATURES, samples=0), "t": tokens, **heads}
    for name, form, operands, dim in _forms():
        want = form(BLOCKS, *(tensors[each[0]] for each in operands.split()))
        for ranks in DEGREES:
            parts = [
                [p.contiguous() for p in tensors[each[0]].chunk(ranks, int(each[1]))]
                if each[1:]
                else [tensors[each]] * ranks
                for each in operands.split()
            ]
            # 8 blocks on 4 ranks: 2 each
            results = [form(BLOCKS // ranks, *own) for own in zip(*parts, strict=True)]
            yield (
                name,
                want,
                tree_sum(torch.stack(results)) if dim is None else torch.cat(results, dim),
            )


def _with_gradient(function: Form, _: int, grad: Tensor, *inputs: Tensor) -> Tensor:
    """The result and the gradients of the inputs, stacked."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return torch.stack([out.detach(), *torch.autograd.grad(out, leaves, grad)])


def _clipped(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    grad = draw(ROWS, FEATURES)

    def norm(parts: Iterable[Tensor]) -> Tensor:
        params = [torch.zeros_like(part, requires_grad=True) for part in parts]
        for param, part in zip(params, parts, strict=True):
            param.grad = part.clone()
        return clip_grad_norm_(params, 1.0)

    with sums_in_tree():
        for ranks in DEGREES:
            yield "clip_grad_norm_", norm([grad]), norm(grad.chunk(ranks))


def _chunks(draw: Draw, rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What is computed for a sequence at once, and for chunks of it, by so many rows of the mode."""
    # 4 rows: 1, 4, 5, 3, which begin anywhere in a part
    sizes = [1, rows, rows + 1, max(rows - 1, 1)]
    x = draw(sum(sizes), FEATURES)
    weight = draw(FEATURES, FEATURES, samples=0)
    q, k, v = (draw(BLOCKS, sum(sizes), FEATURES // BLOCKS) for _ in range(3))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda part: spread(part, weight, 0, BLOCKS),
        "linear, summed in blocks": lambda part: summed([(part, weight)], 1, BLOCKS),
        **_NORMS,
        "silu": functional.silu,
    }
    for name, function in functions.items():
        parts = [function(part.contiguous()) for part in torch.split(x, sizes, 1)]
        yield f"{name}, over chunks of a sequence", function(x), torch.cat(parts, 1)
    ends = torch.tensor(sizes).cumsum(0).tolist()  # 1 4 5 3: 1, 5, 10, 13
    seen = torch.ones(ends[-1], ends[-1], dtype=torch.bool, device=q.device).tril()
    cut = [
        # 5:10 to 0:10
        (q[:, :, end - n : end], k[:, :, :end], v[:, :, :end], seen[end - n : end, :end])
        for end, n in zip(ends, sizes, strict=True)
    ]
    got = torch.cat([attention_in_rows(rows, *each) for each in cut], 2)
    yield (
        "attention, over chunks of a sequence",
        attention_in_rows(rows, q, k, v, is_causal=True),
        got,
    )


def _differing(device: str, dtype: torch.dtype, rows: int | None) -> list[str]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, samples: int = SAMPLES) -> Tensor:
        return torch.randn((samples, *shape) if samples else shape, generator=generator).to(
            device, dtype
        )

    with torch.no_grad(), unwatched_functions(), unwatched():
        compared = chain(_shared(draw), _clipped(draw), () if rows is None else _chunks(draw, rows))
        return list(
            dict.fromkeys(name for name, want, got in compared if not torch.equal(want, got))
        )


@lru_cache
def check_device(device: str, dtype: torch.dtype, threads: int, rows: int | None) -> None:
    """Check what one rank computes, once for each device, dtype, number of threads, and rows of the mode around it."""
    _refuse(_differing(device, dtype, rows), device, dtype)


def check_arithmetic(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Check the operators of this device, and sums over the ranks of every axis of a mesh; all ranks call it.

    Args:
        mesh: whose device and ranks are checked.
        dtype: of the computation.

    Raises:
        VariantArithmeticError: naming the operators whose bits depend on how many ranks share them.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     check_arithmetic(init_device_mesh("cpu", (1,)))
    """
    check_device_mesh("check_arithmetic", mesh)
    arithmetic = current_arithmetic()
    found = _differing(mesh.device_type, dtype, None if arithmetic is None else arithmetic.rows)
    with sums_in_tree():
        for axis, size in product(mesh.axis_names, (64, 1 << 18)):  # one exchange, and two
            comm = mesh.comm(axis)
            draw = torch.Generator().manual_seed(size)
            terms = torch.randn((comm.size, size), generator=draw).to(mesh.device_type, dtype)
            want = tree_sum(terms)
            term = terms[comm.rank].clone()
            if not torch.equal(all_reduce(term, comm), want):
                found.append(f"all_reduce of {size} elements along {axis!r}")
            if not torch.equal(reduce_scatter(term, comm), want.chunk(comm.size)[comm.rank]):
                found.append(f"reduce_scatter of {size} elements along {axis!r}")
    _refuse(found, mesh.device_type, dtype)


def _refuse(found: list[str], device: str, dtype: torch.dtype) -> None:
    if found:
        raise VariantArithmeticError(
            f"invariant_arithmetic on {device!r} in {dtype}, {torch.get_num_threads()} threads: "
            "these have other bits "
            f"on other numbers of ranks, or in chunks: {'; '.join(found)}. Leave the mode, or use "
            "another dtype or "
            "number of threads"
        )
