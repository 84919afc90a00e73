"""RNN, LSTM and GRU on this rank's shard of the batch, or of the hidden units.

batch         x: S(batch), state: S(batch) -> output and states: S(batch); parameters are replicated, their gradients
              partial sums, which are reduced together, in one collective
hidden units x: R | S(d), W of each gate: S(hidden), h: S(hidden) -> output and states: S(hidden) |
R

A step reads the complete hidden state of the step before. If the units are sharded, the state is
gathered in every step of every layer and direction, and its gradient is reduce-scattered, (batch,
hidden) each: sharded units pay off for wide layers and short sequences. Sharding the batch takes no
communication of activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence

from shoal_dtensor import DTensor, Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError
from shoal_dtensor.internal import in_memory_as, shard_sizes

from ..lowering import ports
from ..lowering.collective_functions import gather, gather_partial
from ..lowering.lowered import (
    Lowered,
    collectives_of_move,
    input_collectives,
    nbytes,
    summed_gradient_collectives,
)
from ..lowering.parameters import local_parameters, own_forward
from ..lowering.ports import from_local
from ..sharding.module_kinds import keeps_forward
from ..sharding.module_sharding import (
    Collective,
    Heads,
    HeadShard,
    ModuleCall,
    ModuleSharding,
    Port,
)

_GATES: dict[type[nn.Module], int] = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}
RECURRENT: tuple[type[nn.Module], ...] = tuple(_GATES)
_UNITS = Shard(-1)


class Recurrent(Lowered):
    """A recurrent module under `SequenceParallel(sequence_dim=<its batch dim>)`."""

    __slots__ = ("batch",)

    def resolve(self) -> None:
        module: Any = self.module
        self.batch: int = 0 if module.batch_first else 1
        dim = getattr(self.port_in.desired, "dim", None)
        if dim != self.batch:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} reads its sequence step by step, so dim {dim} cannot "
                f"be sharded; its batch can: SequenceParallel(sequence_dim={self.batch})"
            )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from summed_gradient_collectives(call.module.parameters())

    def __call__(self, input: Tensor, hx: Any = None) -> Any:
        module: Any = self.module
        if module.training and module.dropout > 0:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} drops between its layers; set dropout=0 or eval()"
            )
        if input.ndim < 3:
            raise LayoutError(
                f"SequenceParallel: {module} got one sequence of shape {tuple(input.shape)} "
                "without a batch dim, which is what is sharded; give it one: "
                f"x.unsqueeze({self.batch})"
            )
        local = local_parameters(dict(module._parameters), self.comm)
        values = {**local, "_flat_weights": [local[name] for name in module._flat_weights_names]}
        port = Port(Shard(1), Shard(1))
        initial = tuple(ports.sharded_input(self, each, port=port) for each in _tensors(hx))
        hx = initial if isinstance(hx, tuple | list) else initial[0]
        # A rank without rows runs too, so it takes part in the reduction of gradients, with zeros.
        out, state = own_forward(module, values, ports.sharded_input(self, input), hx)
        if self.sharding.local_outputs:
            return out, state
        # else every rank has equally many
        rows = input.shape[self.batch] if isinstance(input, DTensor) else None

        def wrapped(local: Tensor, batch: int) -> DTensor:
            shape = (
                None if rows is None else (*local.shape[:batch], rows, *local.shape[batch + 1 :])
            )
            return from_local(local, Shard(batch), self.mesh, shape)

        states = tuple(wrapped(each, 1) for each in _tensors(state))
        return wrapped(out, self.batch), states if type(state) is tuple else states[0]


def sharded_hidden_units(
    style: str, module: Any, arriving: Placement, leaving: Placement | None, local_outputs: bool
) -> ModuleSharding:
    """Return the sharding of a recurrent module along its hidden units.

    `leaving` is the layout of output and states.
    """
    kind = next(kind for kind in _GATES if isinstance(module, kind))
    if module.proj_size or not keeps_forward(module, kind):
        what = f"proj_size={module.proj_size}" if module.proj_size else "a forward of its own"
        raise UnsupportedModuleError(
            f"{style}: {type(module).__name__} has {what}, so its hidden units cannot be sharded; "
            f"its batch can: SequenceParallel(sequence_dim={0 if module.batch_first else 1})"
        )
    leaving = leaving or _UNITS
    if leaving not in (Replicate(), _UNITS) or (module.bidirectional and leaving == _UNITS):
        raise LayoutError(
            f"{style}: the output of {module} leaves as "
            f"Replicate(){'' if module.bidirectional else ' or Shard(-1)'}, got "
            f"{leaving!r}{' (both directions have some of each rank)' * module.bidirectional}; "
            "give output_layouts=Replicate()"
        )
    gates = HeadShard(0, Heads(module.hidden_size, 1, chunked=True), _GATES[kind])
    port = Port(_UNITS, leaving)
    return ModuleSharding(
        style,
        dict.fromkeys(module._flat_weights_names, gates),
        inputs=(Port(arriving, Replicate()), Port(leaving, _UNITS)),
        outputs=(port, port),
        lowering=HiddenUnits,
        local_outputs=local_outputs,
    )


class HiddenUnits(Lowered):
    """A recurrent module of which each rank computes some hidden units."""

    __slots__ = ("sizes",)

    def resolve(self) -> None:
        module: Any = self.module
        # 8: 3, 3, 2
        self.sizes: tuple[int, ...] = tuple(
            shard_sizes(module.hidden_size, Shard(0), self.comm.size)
        )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        module: Any = call.module
        x = call.input()
        state = _tensors(call.outputs[1])[0]
        given = (*call.args, *call.kwargs.values())[1:]
        initial = _tensors(given[0]) if given and given[0] is not None else ()
        assert x is not None, "a recurrent module has an input"
        yield from input_collectives(call)
        steps = x.shape[int(module.batch_first and x.ndim > 2)]
        gathered = nbytes(state) // state.shape[0]
        directions = 1 + module.bidirectional
        for layer in range(module.num_layers):
            # Of 5 steps without an initial state: 4 gathers, and that of the last step where a
            # layer follows.
            count = (steps - 1 + bool(initial) + (layer < module.num_layers - 1)) * directions
            yield from (Collective("all_gather", gathered) for _ in range(count))
            if call.output.requires_grad:
                count -= directions * bool(initial and not initial[0].requires_grad)
                yield from (
                    Collective("reduce_scatter", gathered, backward=True) for _ in range(count)
                )
        entering = call.sharding.input_port(1)
        leaving = call.sharding.output_port()
        for tensor in initial:
            yield from collectives_of_move(tensor, entering.layout, entering.desired)
        for tensor in (*call.output.chunk(directions, -1), *_tensors(call.outputs[1])):
            yield from collectives_of_move(tensor, leaving.layout, leaving.desired)

    def __call__(self, input: Tensor, hx: Any = None) -> Any:
        module: Any = self.module
        if isinstance(input, PackedSequence):
            raise UnsupportedModuleError(
                f"{self.sharding.style}: {module} got a PackedSequence, whose steps have different "
                "batches; give it the padded tensor, and mask what is behind the end of a sequence"
            )
        x = ports.replicated_input(self, input)
        single = x.ndim == 2
        x = x.unsqueeze(1) if single else x.transpose(0, 1) if module.batch_first else x
        # (layers and directions, batch, units)
        given = (
            [state.unsqueeze(1) if single else state for state in _tensors(hx)]
            if hx is not None
            else []
        )
        initial = [
            ports.sharded_input(self, state, self.sizes, self.sharding.input_port(1))
            for state in given
        ]
        outputs, states = self.layers(x, initial)
        if single:
            outputs, states = (
                [each.squeeze(1) for each in tensors] for tensors in (outputs, states)
            )
        elif module.batch_first:
            outputs = [each.transpose(0, 1) for each in outputs]
        out = self.leaving(outputs)
        left = tuple(self.leaving([each]) for each in states)
        return out, left if isinstance(module, nn.LSTM) else left[0]

    def leaving(self, parts: list[Tensor]) -> Tensor:
        """Return an output or a state of this rank's units in the layout that leaves.

        Two directions are placed side by side.
        """
        if len(parts) == 1:
            return ports.sharded_output(self, parts[0], self.sizes)
        whole = [gather(part, self.comm, part.ndim - 1, self.sizes) for part in parts]
        out = in_memory_as(parts[0], torch.cat(whole, -1))
        return out if self.sharding.local_outputs else from_local(out, Replicate(), self.mesh)

    def layers(self, x: Tensor, initial: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last layer's outputs by direction and the last states, of this rank's units.

        `x` is (steps, batch, features), each tensor of `initial` (layers and directions, batch,
        units); without them the states are zeros.
        """
        module: Any = self.module
        local: Any = self.local(*module._flat_weights_names)
        last: list[tuple[Tensor, ...]] = []
        outputs: list[Tensor] = []
        for layer in range(module.num_layers):
            inner = layer < module.num_layers - 1
            outputs = []
            whole = []
            for end in ("", "_reverse")[: 1 + module.bidirectional]:
                names = [
                    f"{name}_l{layer}{end}"
                    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                ]
                weights = [local.get(name) for name in names]
                state = tuple(each[len(last)] for each in initial)  # layer 1 reverse: 3
                of_units, of_all, state = self.steps(x.flip(0) if end else x, weights, state, inner)
                outputs.append(of_units.flip(0) if end else of_units)
                whole.append(of_all.flip(0) if end and inner else of_all)
                last.append(state)
            if inner:
                x = self.dropped(torch.cat(whole, -1))
        return outputs, [torch.stack(each) for each in zip(*last, strict=True)]

    def steps(
        self, x: Tensor, weights: list[Tensor], state: tuple[Tensor, ...], inner: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Run one layer in one direction; return its outputs and states.

        The outputs (steps, batch, units) have all units if `inner`, else this rank's units.
        """
        of_inputs, of_state, bias_of_inputs, bias_of_state = weights
        # (steps, batch, gates * units), of all steps at once
        drive = linear(x, of_inputs, bias_of_inputs)
        if state:
            hidden = gather_partial(state[0], self.comm, 1, self.sizes)
        else:
            units = self.sizes[self.comm.rank]
            state = (x.new_zeros(x.shape[1], units, dtype=drive.dtype),) * (
                1 + isinstance(self.module, nn.LSTM)
            )
            hidden = x.new_zeros(x.shape[1], sum(self.sizes), dtype=drive.dtype)
        of_units = []
        of_all = []
        for step, driven in enumerate(drive):
            state = self.cell(driven, linear(hidden, of_state, bias_of_state), state)
            # (batch, 3): steps of them are stacked to (steps, batch, 3)
            of_units.append(state[0])
            if inner or step < len(drive) - 1:
                hidden = gather_partial(state[0], self.comm, 1, self.sizes)
                of_all.append(hidden)
        return torch.stack(of_units), torch.stack(of_all) if inner else of_units[0], state

    def cell(
        self, driven: Tensor, recurrence: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the next state from the gates' inputs, (batch, gates and units).

        One of them comes from the input, the other from the state.
        """
        module: Any = self.module
        if isinstance(module, nn.LSTM):
            # (batch, 4 * 3): four of (batch, 3)
            into, forget, value, out = (driven + recurrence).chunk(4, -1)
            memory = forget.sigmoid() * state[1] + into.sigmoid() * value.tanh()
            return out.sigmoid() * memory.tanh(), memory
        if isinstance(module, nn.GRU):
            reset, update, value = driven.chunk(3, -1)
            state_reset, state_update, state_value = recurrence.chunk(3, -1)
            update = (update + state_update).sigmoid()
            value = (value + (reset + state_reset).sigmoid() * state_value).tanh()
            return ((1 - update) * value + update * state[0],)
        both = driven + recurrence
        return (both.tanh() if module.nonlinearity == "tanh" else both.relu(),)

    def dropped(self, x: Tensor) -> Tensor:
        """Return the next layer's input: `x` after the dropout that one device would draw.

        The gradient of `x` is partial.
        """
        module: Any = self.module
        if not module.training or not module.dropout:
            return x
        dropped: Any = dropout(
            from_local(torch.ones_like(x), Replicate(), self.mesh), module.dropout
        )
        mask: Tensor = dropped.to_local()
        return x * mask


def _tensors(state: Any) -> tuple[Tensor, ...]:
    """Return the state tensors: one of an RNN or GRU, two of an LSTM."""
    return tuple(state) if isinstance(state, tuple | list) else (state,)
