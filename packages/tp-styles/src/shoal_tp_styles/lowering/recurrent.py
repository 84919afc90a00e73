"""RNN, LSTM and GRU on the rank's own part of the batch.

A hidden state needs all of the one before it, so cutting hidden units costs a gather at every step of the sequence;
what is independent is the batch.  x: S(batch), state: S(batch) -> output and state: S(batch); the gradients of the
replicated parameters are partial sums and are reduced together, in one collective.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard

from ..errors import UnsupportedModuleError
from ..sharding import Port
from .boundary import arrive_local, wrap_like
from .enter import enter
from .forward import Lowered

__all__ = ["RECURRENT", "Recurrent"]

RECURRENT: tuple[type[nn.Module], ...] = (nn.RNN, nn.LSTM, nn.GRU)


class Recurrent(Lowered):
    """Stand-in for a recurrent module under `SequenceParallel(sequence_dim=<its batch dim>)`."""

    __slots__ = ("weights",)

    def resolve(self) -> None:
        module: Any = self.module
        batch = 0 if module.batch_first else 1
        dim = getattr(self.port_in.desired, "dim", None)
        if dim != batch:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} reads its sequence step by step, so dim {dim} cannot be cut; "
                f"its batch can: SequenceParallel(sequence_dim={batch})"
            )

    def __call__(self, input: Tensor, hx: Any = None) -> Any:
        module: Any = self.module
        if module.training and module.dropout > 0:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} drops between its layers; set dropout=0 or eval()"
            )
        held = dict(module._parameters)
        flat = list(module._flat_weights)
        local = enter(held, self.comm)
        try:
            module._parameters.update(local)
            module._flat_weights = [local[name] for name in module._flat_weights_names]
            out, state = type(module).forward(module, self.own(input, self.port_in), self.states(hx))
        finally:
            module._parameters.update(held)
            module._flat_weights = flat
        if self.sharding.local_outputs:
            return out, state
        whole = wrap_like(out, self.port_out.desired, self.mesh, None)
        wrap = [wrap_like(each, Shard(1), self.mesh, None) for each in (state if type(state) is tuple else (state,))]
        return whole, tuple(wrap) if type(state) is tuple else wrap[0]

    def states(self, hx: Any) -> Any:
        """The rank's part of the initial state: one tensor, or two for an LSTM."""
        port = Port(Shard(1), Shard(1))
        return tuple(self.own(each, port) for each in hx) if isinstance(hx, tuple) else self.own(hx, port)

    def own(self, tensor: Any, port: Port) -> Any:
        """The rank's part of the batch."""
        return arrive_local(tensor, port, self.mesh, grad=port.desired) if isinstance(tensor, DTensor) else tensor
