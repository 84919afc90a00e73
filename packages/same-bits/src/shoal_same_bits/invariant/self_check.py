"""`check_arithmetic`: whether operators have the same bits on this device however many ranks share them, one by one.

Every check computes something as one rank does, and as 2, 4 and 8 ranks would: on their samples, features or tokens,
joined as collectives join them. The first module that is made parallel in the mode runs those of its device and dtype;
where the mode has a number of rows, also those of a sequence in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import clip_grad_norm_
from shoal_dtensor.internal import check_device_mesh, unwatched, unwatched_functions
from shoal_mesh import Comm, DeviceMesh, all_reduce, reduce_scatter, sums_in_tree
from shoal_mesh.internal import tree_sum

from ..errors import VariantArithmeticError
from ..row_attention import attention_in_rows
from .mode import current_arithmetic
from .products import bias_gradient, spread, summed, weight_gradient
from .replicated import sum_of_cells
from .sample_embedding import embedding_gradient

BLOCKS, SAMPLES, ROWS, FEATURES = 8, 8, 16, 128
DEGREES = (2, 4, 8)
Draw = Callable[..., Tensor]
Check = Callable[[Draw, int], Iterator[tuple[str, Tensor, Tensor]]]
"""Of numbers and a degree: the names of operators, what one rank computes, and what ranks compute."""


def _samples(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, grad, weight = draw(ROWS, FEATURES), draw(ROWS, FEATURES), draw(FEATURES, FEATURES, samples=0)
    bias = draw(FEATURES, samples=0)
    tokens = (x[..., 0] * 64).long().remainder(FEATURES)

    def of_ranks(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        return [function(*own) for own in zip(*(t.chunk(ranks) for t in tensors), strict=True)]

    def over(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return function(*tensors), torch.cat(of_ranks(function, *tensors))

    def total(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return function(*tensors), tree_sum(torch.stack(of_ranks(function, *tensors)))

    yield "linear, over samples", *over(lambda s: spread(s, weight, 0, BLOCKS, bias), x)
    yield "gradient of the input of a linear, over samples", *over(lambda s: summed([(s, weight)], 0, BLOCKS), grad)
    yield "gradient of a weight, over samples", *total(lambda g, s: weight_gradient(g, s, 0, BLOCKS), grad, x)
    yield "gradient of a bias, over samples", *total(lambda g: bias_gradient(g, BLOCKS), grad)
    yield "gradient of a norm, over samples", *total(lambda g: sum_of_cells(g, None, 1, BLOCKS), grad)
    yield (
        "gradient of an embedding, over samples",
        *total(lambda g, t: embedding_gradient(g, t, FEATURES, -1), grad, tokens),
    )
    yield "sum of losses, over samples", *total(lambda g: tree_sum(g.flatten()), grad)


def _features(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, grad, weight = draw(ROWS, FEATURES), draw(ROWS, FEATURES), draw(FEATURES, FEATURES, samples=0)
    blocks = BLOCKS // ranks
    columns, rows = weight.chunk(ranks), weight.chunk(ranks, 1)
    xs, grads = x.chunk(ranks, -1), grad.chunk(ranks, -1)

    def pairs(parts: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        return ([pair] for pair in zip(parts, weights, strict=True))

    yield (
        "linear, over its output features",
        spread(x, weight, 0, BLOCKS),
        torch.cat([spread(x, w, 0, blocks) for w in columns], -1),
    )
    yield (
        "gradient of the input of a linear, over its input features",
        spread(grad, weight, 1, BLOCKS),
        torch.cat([spread(grad, w, 1, blocks) for w in rows], -1),
    )
    for name, dim, parts, weights, full in (
        ("linear, over its input features", 1, xs, rows, x),
        ("gradient of the input of a linear, over its output features", 0, grads, columns, grad),
    ):
        shards = torch.stack([summed(pair, dim, blocks) for pair in pairs(parts, weights)])
        yield name, summed([(full, weight)], dim, BLOCKS), tree_sum(shards)
    several = [summed([(g, w), (s, w)], 0, blocks) for g, s, w in zip(grads, xs, columns, strict=True)]
    yield (
        "gradient of what several layers read",
        summed([(grad, weight), (x, weight)], 0, BLOCKS),
        tree_sum(torch.stack(several)),
    )
    for dim, operands in ((0, [(g, x) for g in grads]), (1, [(grad, s) for s in xs])):
        got = torch.cat([weight_gradient(g, s, dim, blocks) for g, s in operands], dim)
        yield f"gradient of a weight, over its dim {dim}", weight_gradient(grad, x, dim, BLOCKS), got
    yield (
        "gradient of a bias, over features",
        bias_gradient(grad, BLOCKS),
        torch.cat([bias_gradient(g, blocks) for g in grads]),
    )
    for function in (functional.silu, functional.gelu, torch.exp, torch.tanh):
        yield function.__name__, function(x), torch.cat([function(part.contiguous()) for part in xs], -1)
    classes = tree_sum(torch.stack([tree_sum(part.movedim(-1, 0)) for part in xs]))
    yield "sum over classes", tree_sum(x.movedim(-1, 0)), classes


def _tokens(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, grad = draw(ROWS, FEATURES), draw(ROWS, FEATURES)
    for name, norm in (
        ("layer_norm", lambda t: functional.layer_norm(t, (FEATURES,))),
        ("rms_norm", lambda t: functional.rms_norm(t, (FEATURES,), eps=1e-6)),
    ):
        parts = zip(x.chunk(ranks, 1), grad.chunk(ranks, 1), strict=True)
        shards = [_with_gradient(norm, g, s) for s, g in parts]
        yield name, _with_gradient(norm, grad, x), torch.cat(shards, 2)
    of_tokens = tree_sum(torch.stack([_of_samples(part, BLOCKS // ranks) for part in grad.chunk(ranks, 1)]))
    yield "gradient of a norm, over tokens", _of_samples(grad, BLOCKS), of_tokens


def _of_samples(grad: Tensor, blocks: int) -> Tensor:
    return torch.stack([sum_of_cells(sample, None, 1, blocks) for sample in grad.chunk(len(grad))])


def _attention(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    q, k, v, grad = (draw(BLOCKS, ROWS, FEATURES // BLOCKS) for _ in range(4))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    want = _with_gradient(attend, grad, q, k, v)
    for what, dim in (("samples", 0), ("heads", 1)):
        parts = zip(*(t.chunk(ranks, dim) for t in (grad, q, k, v)), strict=True)
        got = torch.cat([_with_gradient(attend, *(t.contiguous() for t in part)) for part in parts], dim + 1)
        yield f"scaled_dot_product_attention, over {what}", want, got


def _chunks(draw: Draw, rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What is computed for a sequence at once, and for chunks of it, by so many rows of the mode."""
    sizes = [1, rows, rows + 1, max(rows - 1, 1)]
    x, weight = draw(sum(sizes), FEATURES), draw(FEATURES, FEATURES, samples=0)
    q, k, v = (draw(BLOCKS, sum(sizes), FEATURES // BLOCKS) for _ in range(3))
    for name, function in (
        ("linear", lambda part: spread(part, weight, 0, BLOCKS)),
        ("linear, summed in blocks", lambda part: summed([(part, weight)], 1, BLOCKS)),
        ("layer_norm", lambda part: functional.layer_norm(part, (FEATURES,))),
        ("rms_norm", lambda part: functional.rms_norm(part, (FEATURES,), eps=1e-6)),
        ("silu", functional.silu),
    ):
        parts = [function(part.contiguous()) for part in torch.split(x, sizes, 1)]
        yield f"{name}, over chunks of a sequence", function(x), torch.cat(parts, 1)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    seen = torch.ones(ends[-1], ends[-1], dtype=torch.bool, device=q.device).tril()
    cut = [
        (q[:, :, end - n : end], k[:, :, :end], v[:, :, :end], seen[end - n : end, :end])
        for end, n in zip(ends, sizes, strict=True)
    ]
    got = torch.cat([attention_in_rows(rows, *each) for each in cut], 2)
    yield "attention, over chunks of a sequence", attention_in_rows(rows, q, k, v, is_causal=True), got


def _with_gradient(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> Tensor:
    """The result and the gradients of the inputs, stacked."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return torch.stack([out.detach(), *torch.autograd.grad(out, leaves, grad)])


def _norm(draw: Draw, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    grad = draw(ROWS, FEATURES)
    with sums_in_tree():
        want, got = (clip_grad_norm_(_with_grads(parts), 1.0) for parts in ([grad], grad.chunk(ranks)))
        yield "clip_grad_norm_", want, got


def _with_grads(grads: Iterable[Tensor]) -> list[Tensor]:
    params = [torch.zeros_like(grad, requires_grad=True) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


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
    """Check what one rank computes, once for each device, dtype, number of threads, and rows of the mode around it.

    Raises:
        VariantArithmeticError: naming the operators.
    """
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
