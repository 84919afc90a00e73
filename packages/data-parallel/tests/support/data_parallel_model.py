"""A small language model for one device and for ranks, its batches, and comparisons of the two."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal_data_parallel import fully_shard
from shoal_dtensor import DTensor, clip_grad_norm_, full_tensor
from shoal_mesh import DeviceMesh, init_device_mesh

__all__ = [
    "VOCABULARY",
    "Adapted",
    "Block",
    "Branching",
    "Fault",
    "Model",
    "OptionalFirst",
    "adapted",
    "backward_of_each",
    "batch",
    "full",
    "loss_of",
    "mesh_of",
    "own",
    "pickled",
    "raising",
    "same_gradients",
    "same_weights",
    "shard_blocks_and_root",
    "train_alike",
    "two_equal_models",
]

VOCABULARY = 13


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Tokens to logits.

    Dims of 10 and 13 leave uneven and empty shards, and one parameter is a number.
    """

    def __init__(
        self, dim: int = 10, blocks: int = 3, tied: bool = False, recompute: bool | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(dim, VOCABULARY)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = (
                block(x)
                if self.recompute is None
                else checkpoint(block, x, use_reentrant=self.recompute)
            )
        logits: Tensor = self.head(x) * self.scale
        return logits


def mesh_of(data: int, tensor: int) -> DeviceMesh:
    """Axes "data" and "tensor"; ranks along the latter have the same rows."""
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))


def two_equal_models(make: Callable[[], nn.Module] = Model) -> list[Any]:
    """A model, and the same again, to be made parallel."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make().double())
    return made


class Branching(nn.Module):
    """One block twice in each of two branches, one that odd ranks skip, and two that all do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))

    def forward(self, x: Tensor, odd: bool) -> Any:
        blocks: Any = self.blocks
        twice = blocks[0](blocks[0](x)) + blocks[0](x * 2)
        return twice if odd else twice + blocks[1].up(x).sum()


class OptionalFirst(nn.Module):
    """Two layers, of which a batch may leave out the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.second(self.first(x) if both else x)
        return out


class Adapted(nn.Module):
    """A frozen Linear and two small trained ones beside it, as libraries of adapters make."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * self.b(self.a(x))
        return out


def adapted() -> Any:
    torch.manual_seed(0)
    model: Any = Model(6, 2).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model.double()


def shard_blocks_and_root(model: Any, data: DeviceMesh) -> Any:
    """Blocks and model as units over a data axis."""
    for block in model.blocks:
        fully_shard(block, data)
    return fully_shard(model, data)


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCABULARY, (2, rows, 5), generator=generator)
    return tokens, targets


def pickled(model: nn.Module) -> Any:
    """The module that a file of this one holds."""
    return pickle.loads(pickle.dumps(model))


def own(mesh: DeviceMesh, *tensors: Tensor) -> list[Tensor]:
    """This rank's rows of a global batch."""
    return [t.chunk(mesh.shape[0])[mesh.get_local_rank("data")] for t in tensors]


def in_rows(mesh: DeviceMesh, tensor: int = 1) -> DeviceMesh:
    """Return the ranks of a mesh as rows of the axis "data", as the checks of the model take it."""
    shape = (mesh.size() // tensor, tensor)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def backward_of_each(plain: nn.Module, model: nn.Module, mesh: DeviceMesh, step: int = 0) -> None:
    """One device's backward on a global batch, and each rank's on its own rows."""
    tokens, targets = batch(step)
    loss_of(plain, tokens, targets).backward()
    loss_of(model, *own(mesh, tokens, targets)).backward()


def train_alike(
    plain: nn.Module, model: nn.Module, mesh: DeviceMesh, optimizers: Sequence[Any]
) -> None:
    """Three steps of both with clipping: gradients, norms and weights are the same."""
    for step in range(3):
        backward_of_each(plain, model, mesh, step)
        same_gradients(plain, model)
        norms = (
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
            clip_grad_norm_(model.parameters(), 0.5),
        )
        torch.testing.assert_close(norms[1], norms[0])
        for one in optimizers:
            one.step()
            one.zero_grad()
    same_weights(plain, model)


class Fault(RuntimeError):
    """Raised on purpose."""


@contextmanager
def raising(module: nn.Module, where: str) -> Iterator[None]:
    """Inside the block, the module raises in its forward or in its backward."""

    def stop(*_: Any) -> None:
        raise Fault(where)

    def stop_backward(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(stop)  # type: ignore[no-untyped-call]  # torch gives it no types

    handle = module.register_forward_hook(stop if where == "forward" else stop_backward)
    try:
        yield
    finally:
        handle.remove()


def same_gradients(plain: nn.Module, model: nn.Module) -> None:
    for (name, expected), (_, got) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        if expected.grad is None:
            assert got.grad is None, name
            continue
        if isinstance(got, DTensor):
            assert isinstance(got.grad, DTensor), name
            assert got.grad.placements == got.placements, name
        torch.testing.assert_close(full(got.grad), expected.grad, msg=f"of {name}")


def full(tensor: Any) -> Tensor:
    """The global value of a DTensor, a plain tensor as it is."""
    value: Tensor = full_tensor(tensor)
    return value


def same_weights(plain: nn.Module, model: nn.Module) -> None:
    for (name, expected), (_, got) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(full(got), expected, msg=f"of {name}")
