"""RNN, LSTM and GRU on this rank's shard of the batch.

A hidden state needs all of the one before it, so sharded hidden units cost a gather at every step of the sequence;
what is independent is the batch.  x: S(batch), state: S(batch) -> output and state: S(batch); the gradients of the
replicated parameters are partial sums and are reduced together, in one collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError

from ..lowering.boundary import from_local, local_input
from ..lowering.lowered import Lowered
from ..lowering.parameters import local_parameters
from ..lowering.ports import declare_summed_gradients
from ..sharding.collective import Collective
from ..sharding.module_sharding import ModuleCall, Port

RECURRENT: tuple[type[nn.Module], ...] = (nn.RNN, nn.LSTM, nn.GRU)


class Recurrent(Lowered):
    """A recurrent module under `SequenceParallel(sequence_dim=<its batch dim>)`."""

    __slots__ = ()

    def resolve(self) -> None:
        module: Any = self.module
        batch = 0 if module.batch_first else 1
        dim = getattr(self.port_in.desired, "dim", None)
        if dim != batch:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} reads its sequence step by step, so dim {dim} cannot be sharded; "
                f"its batch can: SequenceParallel(sequence_dim={batch})"
            )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_summed_gradients(call.module.parameters())

    def __call__(self, input: Tensor, hx: Any = None) -> Any:
        module: Any = self.module
        if module.training and module.dropout > 0:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} drops between its layers; set dropout=0 or eval()"
            )
        if input.ndim < 3:
            raise LayoutError(
                f"SequenceParallel: {module} got one sequence of shape {tuple(input.shape)} without a batch dim, which "
                f"is what is sharded; give it one: x.unsqueeze({0 if module.batch_first else 1})"
            )
        saved = dict(module._parameters)
        flat = list(module._flat_weights)
        local = local_parameters(saved, self.comm)
        try:
            module._parameters.update(local)
            module._flat_weights = [local[name] for name in module._flat_weights_names]
            out, state = _forward(module, self.own_shard(input, self.port_in), self.states(hx))
        finally:
            module._parameters.update(saved)
            module._flat_weights = flat
        if self.sharding.local_outputs:
            return out, state
        states = state if type(state) is tuple else (state,)
        batch = 0 if module.batch_first else 1
        rows = input.shape[batch] if isinstance(input, DTensor) else None
        wrapped = tuple(from_local(each, Shard(1), self.mesh, _with_rows(each, 1, rows)) for each in states)
        full = from_local(out, self.port_out.desired, self.mesh, _with_rows(out, batch, rows))
        return full, wrapped if type(state) is tuple else wrapped[0]

    def states(self, hx: Any) -> Any:
        """This rank's shard of the initial state: one tensor, or two for an LSTM."""
        port = Port(Shard(1), Shard(1))
        return tuple(self.own_shard(each, port) for each in hx) if isinstance(hx, tuple) else self.own_shard(hx, port)

    def own_shard(self, tensor: Any, port: Port) -> Any:
        """This rank's shard of the batch."""
        return local_input(tensor, port, self.mesh, grad=port.desired) if isinstance(tensor, DTensor) else tensor


def _with_rows(local: Tensor, batch: int, rows: int | None) -> tuple[int, ...] | None:
    """The global shape of a tensor that holds some of so many rows; None where every rank has equally many."""
    return None if rows is None else (*local.shape[:batch], rows, *local.shape[batch + 1 :])


def _forward(module: Any, x: Tensor, hx: Any) -> tuple[Tensor, Any]:
    """The module's own forward; an empty shard of the batch passes as one row of zeros, of which nothing is kept.

    So a rank without rows takes part in the reduction of gradients, with zeros.
    """
    batch = 0 if module.batch_first else 1
    forward = type(module).forward
    if x.shape[batch]:
        return forward(module, x, hx)  # type: ignore[no-any-return]  # a module's forward has no type
    shape = list(x.shape)
    shape[batch] = 1
    out, state = forward(module, x.new_zeros(shape))
    none = tuple(each.narrow(1, 0, 0) for each in (state if type(state) is tuple else (state,)))
    return out.narrow(batch, 0, 0), none if type(state) is tuple else none[0]
