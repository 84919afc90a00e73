"""Choice of tokens from logits with a sharded vocabulary, the same for every sharding."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_dtensor.errors import OperatorArgumentError
from shoal_dtensor.internal import FakeTensor, assert_on_device, is_compiling
from shoal_mesh import all_gather, all_reduce
from shoal_mesh.internal import all_reduce_

from .functional import log_sum_exp
from .logits import Vocab, local_logits

__all__ = ["argmax", "sample"]


def argmax(logits: Tensor, *, dim: int = -1, vocab: Vocab | None = None) -> Tensor:
    """Return the index of the largest logit per row; the smallest index among equals, on all ranks.

    Args:
        logits: a DTensor whose dim `dim`, the classes, is sharded, or this rank's classes.
        dim: the dim of the classes.
        vocab: the classes of each rank, for plain local logits.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     logits = distribute_tensor(torch.tensor([[0., 2., 1.]]), mesh, [Shard(1)])
        ...     print(argmax(logits))
        tensor([1])
    """
    x, classes, _ = local_logits(logits.detach(), vocab, dim)
    if classes.own_classes:
        best, index = x.max(-1)
    else:
        best = x.new_full(x.shape[:-1], -torch.inf)
        index = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    # a rank with padding alone sends -inf with the index of some class
    first = min(classes.first, classes.total - 1)
    values = all_gather(best.unsqueeze(0), classes.comm, 0)
    indices = all_gather((index + first).unsqueeze(0), classes.comm, 0)
    # As in torch, NaN is larger than any number. It is tested by itself, because NaN != NaN.
    is_top = (values == values.amax(0)) | values.isnan()
    return indices.masked_fill(~is_top, classes.total).amin(0)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    dim: int = -1,
    vocab: Vocab | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), the same on all ranks.

    The drawn tokens do not depend on the sharding of the classes.

    A uniform number per row (drawn on rank 0) is compared with the cumulative probabilities. Each
    rank computes them for its own classes, starting from the mass of the classes before.

    Args:
        logits: as for `argmax`.
        temperature: divisor of the logits; 0 or less returns the argmax.
        dim: as for `argmax`.
        vocab: as for `argmax`.
        generator: the generator of the uniform numbers; the default one if left out.

    Returns:
        Class indices of the shape of `logits` without `dim`.

    Raises:
        OperatorArgumentError: a row has no probabilities: it has a NaN or an infinity, or is all
            -inf; on all ranks that share it.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     logits = distribute_tensor(torch.tensor([[0., 99., 1.]]), mesh, [Shard(1)])
        ...     print(sample(logits))
        tensor([1])
    """
    if temperature <= 0:
        return argmax(logits, dim=dim, vocab=vocab)
    x, classes, _ = local_logits(logits.detach(), vocab, dim)
    x = x.double() / temperature
    log_probabilities = x - log_sum_exp(x, classes).unsqueeze(-1)
    # cumulative over this rank's classes
    mass = log_probabilities.exp_().cumsum(-1)
    rows = x.shape[:-1]
    total = mass[..., -1] if classes.own_classes else x.new_zeros(rows)
    # (ranks, rows): the mass of the classes of each rank and the ranks before it
    mass_of_ranks = all_gather(total.unsqueeze(0), classes.comm, 0).cumsum(0)
    whole_mass = mass_of_ranks[-1]
    _check_mass(whole_mass)
    rank = classes.comm.rank
    mass_before = mass_of_ranks[rank - 1] if rank else torch.zeros_like(total)
    # not `rand`, which does not accept symbolic sizes together with a generator
    point = x.new_empty(rows).uniform_(generator=generator)
    if rank:
        point.zero_()
    all_reduce_(point, classes.comm)
    point = (point * whole_mass).unsqueeze(-1)
    # The number of cumulative masses at or below the point, over all ranks, is the index.
    is_below = mass + mass_before.unsqueeze(-1) <= point
    index = all_reduce(is_below.sum(-1), classes.comm)
    return index.clamp_(max=classes.total - 1)


def _check_mass(mass: Tensor) -> None:
    """Refuse rows whose probabilities do not add up to a number, as `torch.multinomial` does."""
    is_valid = mass.isfinite()
    message = "cannot sample from a row of logits that contains NaN or +inf, or is -inf everywhere"
    if is_compiling() or not mass.is_cpu or isinstance(mass, FakeTensor):
        assert_on_device(is_valid.all(), message)
    elif not is_valid.all():
        raise OperatorArgumentError(message)
