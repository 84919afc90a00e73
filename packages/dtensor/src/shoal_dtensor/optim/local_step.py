"""Steps of torch's optimizers on the local shards of DTensors, as fast as on plain tensors.

On DTensors, each of the ten list operators of a step would unwrap every parameter, gradient and
state. If an update works element by element, the local shards alone give the same numbers.
Therefore a hook before each step (`_before_step`) gives torch's `step` a proxy in place of the
optimizer itself. The optimizer always holds DTensors. The proxy's `_init_group`, which collects the
lists of a step, puts shards into them.

Muon orthogonalizes the update of each matrix in five rounds of three products of matrices. On
shards they would take 11 to 21 collectives, depending on the placements. Here every rank gathers
the update, in bfloat16 as Muon computes, and orthogonalizes all of it. The result is bit for bit
the result of one device. Updates are gathered in groups; one group is
in flight during the products of the group before it. If a rank's shard consists of whole matrices
(experts, or a matrix that one rank holds), this rank alone orthogonalizes them, and nothing is
sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal_mesh import purpose

from .._torch.tensors import (
    adjusted_rate,
    bump_version,
    orthogonalized,
    unwatched_by_subclasses,
    wrap_local,
)
from ..errors import ArgumentTypeError, PlacementError
from ..layout.dim_sharding import DimSharding
from ..layout.spec import Spec
from ..redistribute.shards_in_flight import ShardsInFlight, redistribute_shards
from ..tensor.dtensor import DTensor
from ..tensor.gradients import in_groups

O = TypeVar("O", bound=Optimizer)  # noqa: E741  # a type variable, not a number

ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD)
"""Optimizers whose update of an element depends on the element's own tensors and state alone."""

_KINDS: frozenset[type[Optimizer]] = frozenset({*ELEMENTWISE, Muon})


def local_step(optimizer: O) -> O:
    """Check that an optimizer's steps work on local shards of DTensors, and return the optimizer.

    This call is not necessary: torch's optimizers run on local shards without it. A step does not
    communicate (except Muon's, which gathers the update of each matrix, one collective for many).
    The numbers and the state dict are the same as with DTensors, and DTensors and plain tensors may
    share an optimizer. Steps that only dispatch supports go through dispatch, operator by operator:
    compiled and differentiable steps, partial parameters, plain gradients or states of DTensors,
    subclasses.

    Args:
        optimizer: an optimizer of any class.

    Returns:
        The optimizer, unchanged.

    Raises:
        ArgumentTypeError: if it is not certain that its update works element by element
            (`ELEMENTWISE`; subclasses may differ) and it is not a Muon.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     ones = distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)
        ...     weight = torch.nn.Parameter(ones)
        ...     optimizer = local_step(torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0))
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        ...     weight.to_local(), optimizer.state[weight]["exp_avg"].placements
        (tensor([0.5000, 0.5000], grad_fn=<ToLocalBackward>), (Shard(dim=0),))
    """
    if type(optimizer) not in _KINDS:
        names = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        raise ArgumentTypeError(
            f"local_step: {type(optimizer).__name__} is not known to update element by element; "
            f"supported are {names} and Muon, without subclasses. Use {type(optimizer).__name__} "
            "without local_step: it works on DTensors through dispatch"
        )
    return optimizer


class _UnfitError(Exception):
    """A plain tensor where the gradient or the state of a DTensor should be a DTensor."""


def _collect_shards(optimizer: Any, group: dict[str, Any], *lists: list[Any]) -> Any:
    """Run `_init_group` for a step on shards: fill lists of parameters, gradients and states.

    torch fills them with DTensors, and makes the state of the first step. Then shards take the
    DTensors' place:

        list        filled by torch    for the step
        parameters  [DTensor, Tensor]  [shard, Tensor]
        gradients   [DTensor, Tensor]  [shard, Tensor]
        exp_avg     [DTensor, Tensor]  [shard, Tensor]
        step        [Tensor, Tensor]   [Tensor, Tensor]

    If a value does not have a shard to step on (partial parameters, plain gradients or states of
    DTensors), all values stay DTensors, and the update runs operator by operator.
    """
    # The block switches `__torch_function__` off, which would add 100 ns to each read of an
    # attribute of a DTensor. `optimizer` is the original: the proxy has this function as its
    # `_init_group`, and the class has torch's.
    with unwatched_by_subclasses():
        result = type(optimizer)._init_group(optimizer, group, *lists)
    params = [*lists[0]]
    specs = [param._spec if isinstance(param, DTensor) else None for param in params]
    if any(spec.partials for spec in {*specs} if spec is not None):
        return result
    try:
        shards = [_shards(values, params, specs, optimizer.state) for values in lists]
    except _UnfitError:
        return result
    for values, local in zip(lists, shards, strict=True):
        values[:] = local
    # Autograd must count the writes to come. A write to a shard is counted for the shard, but not
    # for its DTensor. A write of a fused kernel is not even counted for the shard.
    written = [param for param, spec in zip(params, specs, strict=True) if spec is not None]
    if group.get("fused"):
        written += [param._local_tensor for param in written]
    bump_version(written)
    return result


def _shards(
    values: list[Any], params: list[Any], specs: Sequence[Spec | None], state: Any
) -> list[Any]:
    """Return the shards of one list: parameters, gradients, or one value of their state."""
    shards = []
    # Lists for options that are not used are empty.
    for value, param, spec in zip(values, params, specs, strict=False):
        if type(value) is DTensor and value._spec is spec:
            shards.append(value._local_tensor)
        else:
            shards.append(_shard(value, param, spec, state))
    return shards


def _shard(value: Any, param: Any, spec: Spec | None, state: Any) -> Any:
    """Return the shard of a value in its parameter's layout.

    A value in another layout is redistributed, and replaces the old value in the state, so that
    later steps do not communicate. Numbers are returned as they are.

    Raises:
        _UnfitError: if the value of a DTensor parameter is a plain tensor.
    """
    # The parameter is plain, or the value is not a tensor: SGD's momentum is None at first.
    if spec is None or not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        if value.ndim:
            raise _UnfitError
        # the number of steps
        return value
    if value._spec.same_layout(spec):
        return value._local_tensor
    # For example, a loaded momentum is replicated, and its parameter is sharded.
    moved = value.redistribute(spec.mesh, spec.placements, shard_order=spec.shard_order)
    entry = state.get(param, {})
    entry.update({name: moved for name, before in entry.items() if before is value})
    return moved._local_tensor


class _Groups:
    """Parameter groups over which torch's `step` iterates, after it has called its closure.

    The iteration does more than yield: it runs the whole step of a Muon, and yields nothing. For
    other optimizers, it copies the state that torch assigned for a group back to the optimizer.
    """

    def __init__(self, optimizer: Optimizer, assigned: dict[Any, dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._assigned = assigned

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if type(self._optimizer) is Muon:
            _muon_step(self._optimizer)
            # torch's step then does not see any group.
            return
        for group in self._optimizer.param_groups:
            yield group
            # SGD assigns momentum buffers after the update of a group.
            if self._assigned:
                _write_back_state(self._optimizer.state, self._assigned, group["params"])
                self._assigned.clear()


def _write_back_state(state: Any, assigned: dict[Any, dict[str, Any]], params: list[Any]) -> None:
    """Copy the state that a step assigned to shards to their parameters.

    Args:
        state: the state of the optimizer, by parameter.
        assigned: the state that the step assigned, by shard or plain parameter.
        params: the parameters of a group.
    """
    owners = {param._local_tensor: param for param in params if isinstance(param, DTensor)}
    for tensor, entry in assigned.items():
        # A tensor that is not a shard is a plain parameter, its own owner.
        param = owners.get(tensor, tensor)
        for name, value in entry.items():
            before = state[param].get(name)
            # A value that was only updated in place is the shard of `before`, or is `before`.
            if getattr(before, "_local_tensor", before) is not value:
                if param is not tensor:
                    # The new value, such as SGD's first momentum, is a shard like the parameter's.
                    value = wrap_local(DTensor, value, param._spec.with_(dtype=value.dtype), False)
                state[param][name] = value


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments of a step with a proxy of the optimizer; None leaves them unchanged.

    Only an optimizer of DTensors gets a proxy.
    """
    cls = type(optimizer)
    if cls not in _KINDS or torch.compiler.is_compiling():
        return None
    groups = optimizer.param_groups
    if not any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        return None
    if any(group.get("differentiable") or isinstance(group["lr"], DTensor) for group in groups):
        return None
    assigned: Any = defaultdict(dict)
    proxy_optimizer = object.__new__(cls)
    # The groups act between two groups. `state` is empty and receives the values that SGD assigns:
    # steps read the state by `_init_group` only, which takes the original's.
    vars(proxy_optimizer).update(
        vars(optimizer),
        param_groups=_Groups(optimizer, assigned),
        state=assigned,
        _init_group=partial(_collect_shards, optimizer),
    )
    return (proxy_optimizer, *args[1:]), kwargs


# Registers a hook that runs before every optimizer's step.
install_local_step = partial(register_optimizer_step_pre_hook, _before_step)


# --- Muon: updates of sharded matrices are gathered, everything else runs on local shards ---------

# Bytes of gathered updates in one group: enough to hide the latency of a collective.
_MUON_GROUP = 2**25


@torch.no_grad()
def _muon_step(optimizer: Any) -> None:
    """Step a `torch.optim.Muon` that may have DTensors; hooks run around this function."""
    for group in optimizer.param_groups:
        params: list[Any] = [param for param in group["params"] if param.grad is not None]
        moves = [_to_whole(param) if isinstance(param, DTensor) else None for param in params]
        lists: list[list[Any]] = [[], [], []]
        _collect_shards(optimizer, group, *lists)
        shards, grads, momenta = lists
        if any(isinstance(shard, DTensor) for shard in shards):
            # A gradient or a state is plain, so `_collect_shards` has left all values as they were.
            # Dispatch runs the products of matrices, and redistributes what they need.
            moves = [None] * len(params)
        updates: list[Tensor] = []
        for grad, momentum in zip(grads, momenta, strict=True):
            momentum.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            # A copy, because orthogonalization writes to it.
            updates.append(update.to(torch.bfloat16, copy=True))
        rate = float(group["lr"])
        pairs = zip(updates, moves, strict=True)
        # The whole updates arrive in the order of the parameters that are moved.
        gathered = _gather_updates([(update, move) for update, move in pairs if move is not None])
        for param, move, shard, update in zip(params, moves, shards, updates, strict=True):
            whole = update if move is None else next(gathered)
            full = _each_orthogonalized(whole, group)
            if move is not None:
                # From replicated to sharded, each rank keeps a slice, and nothing is sent.
                back = move[::-1]
                (full,) = redistribute_shards([full.contiguous()], [back]).wait()
            shard.mul_(1 - rate * group["weight_decay"])
            shard.add_(full, alpha=-adjusted_rate(rate, group["adjust_lr_fn"], param.shape[-2:]))


def _each_orthogonalized(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return an update with each matrix of its last two dims orthogonalized."""
    options = group["ns_coefficients"], group["ns_steps"], group["eps"]
    # Another rank has the matrix.
    if not update.numel():
        return update
    if update.ndim == 2:
        return orthogonalized(update, *options)
    matrices = update.flatten(0, -3)
    results = [orthogonalized(matrix, *options) for matrix in matrices]
    return torch.stack(results).reshape(update.shape)


def _has_whole_matrices(spec: Spec) -> bool:
    """Tell whether every rank has whole matrices of the last two dims, or nothing of them."""
    for dim in range(spec.ndim - 2, spec.ndim):
        sharding = spec.dim_shardings[dim]
        # Shards in runs (a dim flattened from several) are parts of matrices.
        if not isinstance(sharding, DimSharding):
            return False
        if any(size not in (0, spec.shape[dim]) for size in sharding.sizes):
            return False
    return True


def _to_whole(param: DTensor) -> tuple[Spec, Spec] | None:
    """Return the layouts of a parameter's update, as computed and as gathered.

    Return None if every rank has whole matrices.
    """
    spec = param._spec.with_(dtype=torch.bfloat16)
    if spec.partials:
        raise PlacementError(
            f"Muon: a parameter has placements {param.placements}; the elements of a partial "
            "value are not known before a reduction. Redistribute it to Replicate or Shard"
        )
    return None if _has_whole_matrices(spec) else (spec, spec.all_replicated())


def _bytes_of_update(update: tuple[Tensor, tuple[Spec, Spec]]) -> int:
    """Return the bytes of a whole update, which is of bfloat16."""
    _, (source, _) = update
    return 2 * source.shape.numel()


def _gather_updates(updates: Sequence[tuple[Tensor, tuple[Spec, Spec]]]) -> Iterator[Tensor]:
    """Yield whole updates in order.

    A group of updates is in flight while the updates of the group before it are used.
    """
    groups = in_groups(updates, _bytes_of_update, _MUON_GROUP)
    in_flight: list[ShardsInFlight] = []
    # In round i, group i is sent, and group i - 1 is waited for. In the last round, the empty group
    # sends nothing.
    for group in [*groups, []]:
        with purpose("a step of Muon gathers updates"):
            tensors = [update for update, _ in group]
            in_flight.append(redistribute_shards(tensors, [move for _, move in group]))
        arrived = in_flight.pop(0).wait() if len(in_flight) > 1 else []
        # `pop` gives up the reference to an update, so that its memory is free after its use.
        while arrived:
            yield arrived.pop(0)
