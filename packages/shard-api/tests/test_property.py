"""Random specs x operations x reshards on real ranks, each result equal to the plain tensor's.

Every rank draws the same cases from the same seed.  Covers: all of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding_cases import KINDS, full_of, random_spec
from shoal_mesh.testing import rank_pool
from shoal_shard_api import NotExpressibleError, _shard_tensor, implicit_reshard

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: (a * b).tanh(),
    "where": lambda a, b: torch.where(a > b, a, b),
    "matmul": lambda a, b: a.transpose(-1, -2) @ b,
    "sum": lambda a, b: (a - b).sum(-1),
    "sum 0": lambda a, b: a.sum(0),
    "mean": lambda a, b: (a * b).mean(),
    "softmax": lambda a, b: a.softmax(0) * b.softmax(-1),
    "amax": lambda a, b: torch.maximum(a, b).amax(-1),
    "slice": lambda a, b: a[1:] + b[1:],
    "cat": lambda a, b: torch.cat([a, b]),
    "transpose": lambda a, b: a.transpose(0, -1) * 2,
    "in place": lambda a, b: a.clone().mul_(b).add_(1),
    "cast": lambda a, b: a.double() + b,
}


# Two layouts are refused everywhere; with one, what crosses the sharded dim in a way that shards
# cannot express.
ACROSS = {"cat", "mean", "slice", "softmax", "sum", "sum 0", "transpose"}
REFUSED = {(name, False) for name in OPS} | {(name, True) for name in ACROSS}


def shapes(random: Random) -> Sequence[int]:
    return [random.randint(2, 9) for _ in range(random.choice((2, 2, 3)))]


def moves(seed: int, count: int) -> int:
    """Chains of reshards through random specs, in place and not; every other one has gradients."""
    random = Random(seed)
    for _ in range(count):
        shape = shapes(random)
        plain = torch.randn(shape)
        specs = [random_spec(random, random.choice(KINDS), shape) for _ in range(4)]
        tensor: Any = _shard_tensor(plain, specs[0], src_rank=random.randrange(4))
        # the same on all ranks anyway: the pool seeds them alike
        dist.broadcast(plain, 0)
        leaf = tensor.requires_grad_()
        moved: Any = leaf
        for spec in specs[1:]:
            moved = moved.resharded(spec)
            assert torch.equal(moved.detach(), plain)
        weights = torch.randn(shape)
        (moved.full_tensor() * weights).sum().backward()
        assert torch.equal(leaf.grad, weights)
        leaf.reshard(specs[1])
        assert torch.equal(leaf.detach(), plain)
        out = torch.empty(shape) if dist.get_rank() == 1 else None
        leaf.detach().gather(1, out)
        assert out is None or torch.equal(out, plain)
    return count


def operations(seed: int, count: int) -> list[tuple[str, bool]]:
    """Pairs of tensors in random layouts through random ops, with gradients.

    Returns:
        Ops that were refused with a typed error outside of `implicit_reshard`, each with whether
        both had one spec.
    """
    random = Random(seed)
    refused = set()
    for _ in range(count):
        shape, name = shapes(random), random.choice(list(OPS))
        plain = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
        same = random.random() < 0.3
        spec = random_spec(random, random.choice(KINDS), shape)
        specs = [spec, spec if same else random_spec(random, random.choice(KINDS), shape)]
        sharded = [_shard_tensor(p, s).requires_grad_() for p, s in zip(plain, specs, strict=True)]
        for each in plain:
            each.requires_grad_()
        wanted: Any = OPS[name](*plain)
        try:
            got = OPS[name](*sharded)
        except NotExpressibleError:
            refused.add((name, same))
            with implicit_reshard():
                got = OPS[name](*sharded)
        where = f"{name} of {shape} in {specs}"
        torch.testing.assert_close(full_of(got), wanted, msg=where)
        weights: Any = torch.randn_like(wanted)
        (full_of(got) * weights).sum().backward()
        (wanted * weights).sum().backward()
        for a, b in zip(sharded, plain, strict=True):
            if b.grad is not None:
                torch.testing.assert_close(full_of(a.grad), b.grad, msg=f"gradient of {where}")
    return sorted(refused)


@pytest.mark.parametrize("seed", range(4))
def test_any_spec_to_any_spec(seed: int) -> None:
    assert rank_pool(4).run(moves, seed, 40, timeout=120) == [40] * 4


def test_operations_on_any_specs() -> None:
    refused: set[tuple[str, bool]] = set()
    for seed in range(4):
        results = rank_pool(4).run(operations, seed, 60, timeout=240)
        assert all(result == results[0] for result in results)
        refused.update(results[0])
    assert refused == REFUSED
