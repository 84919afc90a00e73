"""Proposals of data- and tensor-parallel degrees with which each rank stays within a memory bound.

Each degree is proposed with its memory and its time of communication.

Activations are counted by one forward on the meta device: simulated ranks run the parallel model on
tensors without values. Every new storage is recorded, and storages that still exist when the
forward ends are counted: tensors that autograd, custom functions and checkpoints keep, and the
outputs. Attention without dropout is counted like torch's fused kernels, which keep no attention
weights. The meta device does not have these kernels; `_attention` replaces them.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_context_parallel.internal import flash_attention
from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    ReplacedAttention,
    TorchDispatchMode,
    check_types,
    format_bytes,
    local_of,
    pytree,
)
from shoal_mesh import DeviceMesh, abstract_mesh, all_reduce, topology_of
from shoal_mesh.internal import html_table
from shoal_tp_styles import preview
from shoal_tp_styles.internal import Plan, StorageReference, apply_plan, map_tensors, to_meta

from .auto import auto_plan


class _DataParallelism(NamedTuple):
    """A method of data parallelism.

    Attributes:
        parameters: True if the parameters are divided by the number of replicas.
        gradients: True if the gradients are divided.
        state: True if the optimizer state is divided.
        passes: how often a step sends the parameters' bytes around a ring: an all-gather and a
            reduce-scatter are one pass each, an all-reduce is two.
    """

    parameters: bool
    gradients: bool
    state: bool
    passes: int


# the data-parallel functions that are compared, by name
_METHODS = {
    "replicate": _DataParallelism(parameters=False, gradients=False, state=False, passes=2),
    "replicate(shard_optimizer=True)": _DataParallelism(
        parameters=False, gradients=False, state=True, passes=2
    ),
    "fully_shard": _DataParallelism(parameters=True, gradients=True, state=True, passes=3),
}


class Candidate(NamedTuple):
    """One way to spread a model over ranks.

    Attributes:
        shape: numbers of replicas and of tensor-parallel ranks, the shape of the mesh ("dp", "tp").
        data: the data-parallel function for the axis "dp", by name: "replicate",
            "replicate(shard_optimizer=True)" or "fully_shard".
        nbytes: bytes of parameters, gradients, optimizer state and activations, on the rank that
            holds most.
        activation_bytes: the part of `nbytes` that a forward keeps for its backward, and its
            outputs.
        seconds: expected time of the collectives of a step, if none of them overlaps with
            computation.
    """

    shape: tuple[int, int]
    data: str
    nbytes: int
    activation_bytes: int
    seconds: float


class Proposal(NamedTuple):
    """A plan, and the candidates for the shape of the mesh.

    Attributes:
        plan: the plan of the tensor-parallel axis.
        bound: bytes that a rank may hold.
        candidates: candidates of every shape. Those within the bound come first, the fastest of
            them first; then come the others, the smallest of them first.
        uncounted: the error because of which activations are not counted for some candidates, the
            last one if there are several; empty if they are counted for all.
    """

    plan: Plan
    bound: int
    candidates: tuple[Candidate, ...]
    uncounted: str = ""

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate within the bound; None if there is none."""
        first = self.candidates[0]
        return first if first.nbytes <= self.bound else None

    def __repr__(self) -> str:
        bound = format_bytes(self.bound)
        # The 19 spaces fill the column of the functions' names, so that the other headings are
        # above the right-aligned numbers of `_row`. The last heading, the bound, is above the
        # verdicts.
        heading = f"data parallelism {'':19} bytes/rank  activations   of {bound}"
        lines = [f"  dp x tp   {heading}"]
        lines += [self._row(candidate) for candidate in self.candidates]
        if self.uncounted:
            lines.append(f"activations are not counted: {self.uncounted}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the candidates as a table for notebooks."""
        header = ("dp x tp", "data parallelism", "bytes/rank", "activations", "ms", "fits")
        rows = []
        for candidate in self.candidates:
            replicas, ranks = candidate.shape
            nbytes = format_bytes(candidate.nbytes)
            activations = format_bytes(candidate.activation_bytes)
            milliseconds = f"{candidate.seconds * 1e3:.2f}"
            fits = "yes" if candidate.nbytes <= self.bound else "too much"
            shape = f"{replicas} x {ranks}"
            rows.append((shape, candidate.data, nbytes, activations, milliseconds, fits))
        caption = f"candidates within {format_bytes(self.bound)} a rank"
        if self.uncounted:
            caption += f"; activations are not counted: {self.uncounted}"
        return html_table(rows, header=header, caption=caption)

    def _row(self, candidate: Candidate) -> str:
        replicas, ranks = candidate.shape
        nbytes = format_bytes(candidate.nbytes)
        activations = format_bytes(candidate.activation_bytes)
        milliseconds = candidate.seconds * 1e3
        verdict = "" if candidate.nbytes <= self.bound else "too much"
        degrees = f"{replicas:>4} x {ranks:<4}"
        sizes = f"{nbytes:>11} {activations:>12}"
        row = f"{degrees} {candidate.data:32} {sizes} {milliseconds:9.2f} ms  {verdict}"
        return row.rstrip()


@check_types(model=nn.Module, ranks=int, bound=(int, float))
def propose(
    model: nn.Module,
    ranks: int,
    bound: int,
    *args: Any,
    plan: Plan | None = None,
    state: float = 2.0,
    **kwargs: Any,
) -> Proposal:
    """Propose degrees and a plan under a memory bound, compared with the alternatives.

    The function needs no process group.

    Memory is counted for parameters, gradients, optimizer state, and activations that a forward
    keeps: give a model that returns its loss, in the mode and with the checkpoints with which it
    trains. Temporary memory of a step is not included: it consists of the parameters that
    `fully_shard` gathers for the layer that runs, of the buckets in which gradients are joined for
    a reduction, and of the gradients of activations. To prove that the plan computes the same
    values as one process, call `shoal_tp_styles.verify` with a small configuration of the model.

    Args:
        model: a model that is not parallel, on any device, including meta.
        ranks: the number of ranks of the whole mesh.
        bound: bytes that a rank may hold.
        args: example inputs of global shape, with the batch along dim 0.
        plan: the plan of the tensor-parallel axis; `auto_plan(model)` if left out.
        state: bytes of optimizer state per byte of parameters: 2 for Adam.
        kwargs: keyword arguments among the example inputs.

    Raises:
        LayoutError: if there is no rank, or if the bound is not positive.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> best = propose(mlp, 4, 1700, torch.randn(8, 10)).best
        >>> best.shape, best.data
        ((4, 1), 'fully_shard')

        The parameters have 1384 bytes. With their gradients and two values of optimizer state, 4
        times as many bytes are divided among 4 replicas. The rest are activations of 2 samples:

        >>> best.nbytes - best.activation_bytes, best.activation_bytes
        (1384, 208)
    """
    if ranks < 1 or bound < 1:
        raise LayoutError(
            f"propose: expected at least one rank and one byte per rank, got {ranks} ranks and "
            f"{bound} bytes"
        )
    chosen: Plan = auto_plan(model) if plan is None else plan
    candidates: list[Candidate] = []
    uncounted = ""
    for tensor_ranks in range(1, ranks + 1):
        if ranks % tensor_ranks:
            continue
        replicas = ranks // tensor_ranks
        mesh = abstract_mesh((tensor_ranks,))
        inputs = _inputs_of_replica(args, replicas)
        named_inputs = _inputs_of_replica(kwargs, replicas)
        try:
            activations = activation_bytes(model, chosen, mesh, inputs, kwargs=named_inputs)
        # Tensors on the meta device have no values, so the user's model may raise any error. The
        # error is reported in `uncounted`, and the proposal goes on without activations. The
        # preview below does not run the model's forward.
        except Exception as error:
            activations = 0
            uncounted = f"{type(error).__name__}: {str(error)[:200]}"
        cost = preview(model, chosen, mesh, *inputs, **named_inputs)
        shape = (replicas, tensor_ranks)
        for data, method in _METHODS.items():
            # With one replica all functions cost the same, so only the first is a candidate.
            if replicas > 1 or data == "replicate":
                nbytes = _divided_bytes(method, cost.parameter_bytes, state, replicas)
                seconds = cost.seconds + _ring_seconds(method, cost.parameter_bytes, replicas)
                candidates.append(
                    Candidate(shape, data, nbytes + activations, activations, seconds=seconds)
                )
    affordable = [candidate for candidate in candidates if candidate.nbytes <= bound]
    beyond = [candidate for candidate in candidates if candidate.nbytes > bound]
    affordable.sort(key=lambda candidate: candidate.seconds)
    beyond.sort(key=lambda candidate: candidate.nbytes)
    return Proposal(chosen, bound, (*affordable, *beyond), uncounted)


def _divided_bytes(
    method: _DataParallelism, parameter_bytes: int, state: float, replicas: int
) -> int:
    """Return the bytes of parameters, gradients and optimizer state on each rank."""
    total = parameter_bytes / (replicas if method.parameters else 1)
    total += parameter_bytes / (replicas if method.gradients else 1)
    total += parameter_bytes * state / (replicas if method.state else 1)
    return round(total)


def _ring_seconds(method: _DataParallelism, parameter_bytes: int, replicas: int) -> float:
    """Return the expected time of the collectives over the replicas, in a ring."""
    if replicas == 1:
        return 0.0
    link = topology_of(abstract_mesh((replicas,)))[0]
    sent = parameter_bytes * method.passes * (replicas - 1) / replicas
    return link.seconds(sent)


def _inputs_of_replica(value: Any, replicas: int) -> Any:
    """Return the inputs of one replica: the first rows of each tensor, on the meta device.

    A tensor without dims has no rows, so all replicas get it as it is, on its own device.
    """

    def take_rows(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        # Rounded up: if the rows do not divide evenly, the first replicas have one more.
        rows = math.ceil(tensor.shape[0] / replicas)
        return tensor[:rows].to("meta")

    return map_tensors(take_rows, value)


# --- activations ----------------------------------------------------------------------------------


class _Storages(TorchDispatchMode):
    """Record of the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # Weak references to the storages, and their bytes. The key is the address of a storage. It
        # is not used again as long as a weak reference exists, so each storage has its own key.
        self.made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in filter(torch.is_tensor, pytree.tree_leaves(out)):
            storage: Any = local_of(leaf).untyped_storage()
            reference: Any = StorageReference(storage)  # type: ignore[no-untyped-call]  # torch
            self.made[storage._cdata] = reference, storage.nbytes()
        return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention that saves the same tensors on the meta device as a fused kernel."""
    tensors = (query, key, value)
    is_plain = not any(isinstance(tensor, DTensor) for tensor in tensors)
    is_batched = all(tensor.ndim == 4 for tensor in tensors)
    has_one_width = query.shape[-1] == value.shape[-1]
    if dropout_p or not is_plain or not is_batched or not has_one_width:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
    mask = attn_mask
    if mask is not None and not mask.is_floating_point():
        mask = mask.to(query.dtype)
    scale = options.get("scale")
    out, _ = flash_attention(query, key, value, is_causal, mask=mask, scale=scale)
    return out


def activation_bytes(model: nn.Module, plan: Plan, mesh: DeviceMesh, args: Any, kwargs: Any) -> int:
    """Return the bytes of activations after a forward, on the rank that keeps most.

    The model must not be parallel. It must be in the mode, and have the activation checkpoints,
    with which it will train. Inputs have global shapes. A model that reads values may raise any
    error, because tensors on the meta device have no values.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> mlp = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> activation_bytes(mlp, {}, abstract_mesh((1,)), (torch.randn(8, 10),), {})
        832
    """
    # imported here because few programs need the lab
    from shoal_mesh.lab import simulate_ranks

    def count_on_one_rank(view: DeviceMesh) -> int:
        module = _copy_without_values(model)
        apply_plan(plan, module, view)
        tensors = [*module.parameters(), *module.buffers()]
        parameters = {local_of(tensor).untyped_storage()._cdata for tensor in tensors}
        storages = _Storages()
        inputs = to_meta(args)
        named_inputs = to_meta(kwargs)
        with torch.enable_grad(), storages, ReplacedAttention(_attention):
            out = module(*inputs, **named_inputs)
        # Wait until all ranks have finished the forward: until then, they refer to tensors that
        # this rank has sent.
        all_reduce(torch.zeros(1), view.comm(0))
        nbytes = 0
        for key, (storage, size) in storages.made.items():
            if key not in parameters and not storage.expired():
                nbytes += size
        # The outputs keep the graph and its saved tensors, so they must exist until here.
        del out
        return nbytes

    # A model may draw random numbers on the CPU, such as a decision to skip a layer. The caller's
    # random numbers must not change.
    with torch.random.fork_rng(devices=()):
        return max(simulate_ranks(mesh, count_on_one_rank))


def _copy_without_values(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device; tied parameters and buffers stay tied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)
