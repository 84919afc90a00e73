"""`check_arithmetic`: whether operators have the same bits on this device however many ranks share them, one by one.

Every check computes something as one rank does, and as 2, 4 and 8 ranks would: on their samples, features or tokens,
joined as collectives join them. The first module that is made parallel in the mode runs those of its device and dtype;
where the mode has a number of rows, also those of a sequence in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import clip_grad_norm_
from shoal_dtensor.internal import check_device_mesh, unwatched, unwatched_functions
from shoal_mesh import Comm, DeviceMesh, all_reduce, reduce_scatter, sums_in_tree
from shoal_mesh.internal import tree_sum

from ..errors import VariantArithmeticError
from ..row_attention import attention_in_rows
from .block_sums import current_arithmetic
from .norms_and_embeddings import embedding_gradient, sum_of_cells
from .products import bias_gradient, spread, summed, weight_gradient

BLOCKS, SAMPLES, ROWS, FEATURES = 8, 8, 16, 128
DEGREES = (2, 4, 8)
Draw = Callable[..., Tensor]
Check = Callable[[Draw, int], Iterator[tuple[str, Tensor, Tensor]]]
"""Of numbers and a degree: the names of operators, what one rank computes, and what ranks compute."""
_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda part: functional.layer_norm(part, (FEATURES,)),
    "rms_norm": lambda part: functional.rms_norm(part, (FEATURES,), eps=1e-6),
}


def _over(
    name: str, function: Callable[..., Tensor], *operands: tuple[Tensor, Sequence[Tensor]], dim: int | None = None
) -> tuple[str, Tensor, Tensor]:
    """What a function of a number of blocks has for whole operands, and for the ranks' parts of them.

    The ranks' results are joined along `dim`, or added in the tree.
    """
    parts = [*zip(*(parts for _, parts in operands), strict=True)]
    results = [function(BLOCKS // len(parts), *own) for own in parts]  # 8 blocks on 4 ranks: 2 each
    want = function(BLOCKS, *(whole for whole, _ in operands))
    return name, want, tree_sum(torch.stack(results)) if dim is None else torch.cat(results, dim)


def _samples(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, grad = ((each, each.chunk(ranks)) for each in (draw(ROWS, FEATURES), draw(ROWS, FEATURES)))
    weight, bias = draw(FEATURES, FEATURES, samples=0), draw(FEATURES, samples=0)
    numbers = (x[0][..., 0] * 64).long().remainder(FEATURES)  # tokens: -1.5 is -96, so 32 of 128
    tokens = numbers, numbers.chunk(ranks)
    yield _over("linear, over samples", lambda _, s: spread(s, weight, 0, BLOCKS, bias), x, dim=0)
    yield _over(
        "gradient of the input of a linear, over samples", lambda _, g: summed([(g, weight)], 0, BLOCKS), grad, dim=0
    )
    yield _over("gradient of a weight, over samples", lambda _, g, s: weight_gradient(g, s, 0, BLOCKS), grad, x)
    yield _over("gradient of a bias, over samples", lambda _, g: bias_gradient(g, BLOCKS), grad)
    yield _over("gradient of a norm, over samples", lambda _, g: sum_of_cells(g, None, 1, BLOCKS), grad)
    yield _over(
        "gradient of an embedding, over samples", lambda _, g, t: embedding_gradient(g, t, FEATURES, -1), grad, tokens
    )
    yield _over("sum of losses, over samples", lambda _, g: tree_sum(g.flatten()), grad)


def _features(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    s, g, w = draw(ROWS, FEATURES), draw(ROWS, FEATURES), draw(FEATURES, FEATURES, samples=0)
    x, grad, columns, rows = ((t, t.chunk(ranks, dim)) for t, dim in ((s, -1), (g, -1), (w, 0), (w, 1)))
    yield _over("linear, over its output features", lambda n, w: spread(s, w, 0, n), columns, dim=-1)
    yield _over(
        "gradient of the input of a linear, over its input features", lambda n, w: spread(g, w, 1, n), rows, dim=-1
    )
    yield _over("linear, over its input features", lambda n, s, w: summed([(s, w)], 1, n), x, rows)
    yield _over(
        "gradient of the input of a linear, over its output features",
        lambda n, g, w: summed([(g, w)], 0, n),
        grad,
        columns,
    )
    yield _over(
        "gradient of what several layers read", lambda n, g, s, w: summed([(g, w), (s, w)], 0, n), grad, x, columns
    )
    yield _over("gradient of a weight, over its dim 0", lambda n, g: weight_gradient(g, s, 0, n), grad, dim=0)
    yield _over("gradient of a weight, over its dim 1", lambda n, s: weight_gradient(g, s, 1, n), x, dim=1)
    yield _over("gradient of a bias, over features", lambda n, g: bias_gradient(g, n), grad, dim=0)
    contiguous = s, [part.contiguous() for part in x[1]]
    for function in (functional.silu, functional.gelu, torch.exp, torch.tanh):
        yield _over(function.__name__, partial(_plain, function), contiguous, dim=-1)
    yield _over("sum over classes", lambda _, part: tree_sum(part.movedim(-1, 0)), x)


def _tokens(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, grad = ((each, each.chunk(ranks, 1)) for each in (draw(ROWS, FEATURES), draw(ROWS, FEATURES)))
    for name, norm in _NORMS.items():
        yield _over(name, partial(_with_gradient, norm), grad, x, dim=2)

    def of_samples(blocks: int, grad: Tensor) -> Tensor:
        return torch.stack([sum_of_cells(sample, None, 1, blocks) for sample in grad.chunk(len(grad))])

    yield _over("gradient of a norm, over tokens", of_samples, grad)


def _attention(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    q, k, v, grad = (draw(BLOCKS, ROWS, FEATURES // BLOCKS) for _ in range(4))  # (8, 8, 16, 16) each

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    for what, dim in (("samples", 0), ("heads", 1)):
        operands = ((t, [part.contiguous() for part in t.chunk(ranks, dim)]) for t in (grad, q, k, v))
        yield _over(
            f"scaled_dot_product_attention, over {what}", partial(_with_gradient, attend), *operands, dim=dim + 1
        )


def _chunks(draw: Draw, rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What is computed for a sequence at once, and for chunks of it, by so many rows of the mode."""
    sizes = [1, rows, rows + 1, max(rows - 1, 1)]  # 4 rows: 1, 4, 5, 3, which begin anywhere in a part
    x, weight = draw(sum(sizes), FEATURES), draw(FEATURES, FEATURES, samples=0)
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
        (q[:, :, end - n : end], k[:, :, :end], v[:, :, :end], seen[end - n : end, :end])  # 5:10 to 0:10
        for end, n in zip(ends, sizes, strict=True)
    ]
    got = torch.cat([attention_in_rows(rows, *each) for each in cut], 2)
    yield "attention, over chunks of a sequence", attention_in_rows(rows, q, k, v, is_causal=True), got


def _plain(function: Callable[[Tensor], Tensor], _: int, part: Tensor) -> Tensor:
    return function(part)


def _with_gradient(function: Callable[..., Tensor], _: int, grad: Tensor, *inputs: Tensor) -> Tensor:
    """The result and the gradients of the inputs, stacked."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return torch.stack([out.detach(), *torch.autograd.grad(out, leaves, grad)])


def _norm(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    grad = draw(ROWS, FEATURES)

    def norm(parts: Iterable[Tensor]) -> Tensor:
        params = [torch.zeros_like(part, requires_grad=True) for part in parts]
        for param, part in zip(params, parts, strict=True):
            param.grad = part.clone()
        return clip_grad_norm_(params, 1.0)

    with sums_in_tree():
        yield "clip_grad_norm_", norm([grad]), norm(grad.chunk(ranks))


_CHECKS: tuple[Check, ...] = (_samples, _features, _tokens, _attention, _norm)


def _differing(device: str, dtype: torch.dtype, rows: int | None) -> list[str]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, samples: int = SAMPLES) -> Tensor:
        return torch.randn((samples, *shape) if samples else shape, generator=generator).to(device, dtype)

    found: dict[str, None] = {}
    with torch.no_grad(), unwatched_functions(), unwatched():
        for check in _CHECKS:
            for ranks in DEGREES:
                found |= {name: None for name, want, got in check(draw, ranks) if not torch.equal(want, got)}
        if rows is not None:
            found |= {name: None for name, want, got in _chunks(draw, rows) if not torch.equal(want, got)}
    return list(found)


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
    for axis in mesh.axis_names:
        found += [f"{name} along {axis!r}" for name in _differing_sums(mesh.comm(axis), mesh.device_type, dtype)]
    _refuse(found, mesh.device_type, dtype)


def _differing_sums(comm: Comm, device: str, dtype: torch.dtype) -> list[str]:
    """The reductions over ranks that are not the tree over the ranks' terms."""
    found: list[str] = []
    with sums_in_tree():
        for size in (64, 1 << 18):  # one exchange, and two
            draw = torch.Generator().manual_seed(size)
            terms = torch.randn((comm.size, size), generator=draw).to(device, dtype)
            want, term = tree_sum(terms), terms[comm.rank].clone()
            if not torch.equal(all_reduce(term, comm), want):
                found.append(f"all_reduce of {size} elements")
            if not torch.equal(reduce_scatter(term, comm), want.chunk(comm.size)[comm.rank]):
                found.append(f"reduce_scatter of {size} elements")
    return found


def _refuse(found: list[str], device: str, dtype: torch.dtype) -> None:
    if found:
        raise VariantArithmeticError(
            f"invariant_arithmetic on {device!r} in {dtype}, {torch.get_num_threads()} threads: these have other bits "
            f"on other numbers of ranks, or in chunks: {'; '.join(found)}. Leave the mode, or use another dtype or "
            "number of threads"
        )
