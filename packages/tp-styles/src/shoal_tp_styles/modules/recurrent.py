"""RNN, LSTM and GRU on this rank's shard of the batch, or of the hidden units.

batch         x: S(batch), state: S(batch) -> output and states: S(batch);
              parameters are replicated, their gradients partial sums, which are reduced together,
              in one collective
hidden units  x: R | S(d), W of each gate: S(hidden), h: S(hidden)
              -> output and states: S(hidden) | R

A step reads the complete hidden state of the step before. If the units are sharded, every step of
every layer and direction gathers a state (batch, hidden), and its backward reduce-scatters a
gradient of this shape. So sharded units are for wide layers and short sequences. A sharded batch
needs no communication of activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence

from shoal_dtensor import DTensor, Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError
from shoal_dtensor.internal import shard_sizes, with_memory_order_of

from ..lowering import ports
from ..lowering.collective_functions import gather
from ..lowering.lowered import (
    Lowered,
    OnLocalTokens,
    collectives_of_move,
    input_collectives,
    nbytes,
)
from ..lowering.parameters import local_parameters, run_own_forward
from ..lowering.ports import from_local
from ..lowering.shared_reduction import gather_partial
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
# Parameters of one layer in one direction, in the order of `_CellWeights`.
_WEIGHT_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class _CellWeights(NamedTuple):
    """Local weights and biases of one layer in one direction: of its input and of its state."""

    of_input: Tensor
    of_state: Tensor
    bias_of_input: Tensor | None
    bias_of_state: Tensor | None


class _Direction(NamedTuple):
    """Results of one layer in one direction.

    Attributes:
        output: this rank's units, (steps, batch, units).
        next_input: all units, (steps, batch, all units), for a layer that another layer follows;
            unused for the last layer.
        state: the state after the last step.
    """

    output: Tensor
    next_input: Tensor
    state: tuple[Tensor, ...]


class Recurrent(OnLocalTokens):
    """A recurrent module under `SequenceParallel(sequence_dim=<its batch dim>)`."""

    __slots__ = ("batch",)

    def resolve(self) -> None:
        module: Any = self.module
        self.batch: int = 0 if module.batch_first else 1
        dim = getattr(self.port_in.desired, "dim", None)
        if dim != self.batch:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} reads its sequence step by step, so dim {dim} cannot "
                f"be sharded; shard its batch: SequenceParallel(sequence_dim={self.batch})"
            )

    def __call__(self, input: Tensor, hx: Any = None) -> Any:
        module: Any = self.module
        if module.training and module.dropout > 0:
            raise UnsupportedModuleError(
                f"SequenceParallel: {module} has dropout between its layers, which is not "
                "supported; set dropout=0 or call eval()"
            )
        if input.ndim < 3:
            raise LayoutError(
                f"SequenceParallel: {module} got one sequence of shape {tuple(input.shape)} "
                f"without the batch dim that is sharded; add it: x.unsqueeze({self.batch})"
            )
        local = local_parameters(dict(module._parameters), self.comm)
        flat_weights = [local[name] for name in module._flat_weights_names]
        values = {**local, "_flat_weights": flat_weights}
        state_port = Port(Shard(1), Shard(1))
        initial = tuple(
            ports.sharded_input(self, state, port=state_port) for state in _state_tensors(hx)
        )
        hx = initial if isinstance(hx, tuple | list) else initial[0]
        # A rank without rows runs too, so it takes part in the reduction of gradients, with zeros.
        out, state = run_own_forward(module, values, ports.sharded_input(self, input), hx)
        if self.sharding.local_outputs:
            return out, state
        # Plain inputs have equally many rows on each rank.
        rows = input.shape[self.batch] if isinstance(input, DTensor) else None
        states = tuple(self._wrap(tensor, 1, rows) for tensor in _state_tensors(state))
        output = self._wrap(out, self.batch, rows)
        if type(state) is tuple:
            return output, states
        return output, states[0]

    def _wrap(self, local: Tensor, batch: int, rows: int | None) -> DTensor:
        """Wrap a result as a DTensor whose dim `batch` has so many rows on all ranks together."""
        shape = None
        if rows is not None:
            shape = (*local.shape[:batch], rows, *local.shape[batch + 1 :])
        return from_local(local, Shard(batch), self.mesh, shape)


def sharded_hidden_units(
    style: str,
    module: Any,
    input_layout: Placement,
    output_layout: Placement | None,
    *,
    local_outputs: bool,
) -> ModuleSharding:
    """Return the sharding of a recurrent module along its hidden units.

    `output_layout` is the layout of output and states.
    """
    cls = next(cls for cls in _GATES if isinstance(module, cls))
    obstacle = ""
    if module.proj_size:
        obstacle = f"proj_size={module.proj_size}"
    elif not keeps_forward(module, cls):
        obstacle = "its own forward"
    if obstacle:
        batch = 0 if module.batch_first else 1
        raise UnsupportedModuleError(
            f"{style}: {type(module).__name__} has {obstacle}, so its hidden units cannot be "
            f"sharded; shard its batch: SequenceParallel(sequence_dim={batch})"
        )
    layout = output_layout or _UNITS
    _check_output_layout(style, module, layout)
    gates = HeadShard(0, Heads(module.hidden_size, 1, chunked=True), _GATES[cls])
    input_port = Port(input_layout, Replicate())
    state_port = Port(layout, _UNITS)
    output_port = Port(_UNITS, layout)
    return ModuleSharding(
        style,
        dict.fromkeys(module._flat_weights_names, gates),
        inputs=(input_port, state_port),
        outputs=(output_port, output_port),
        lowering=HiddenUnits,
        local_outputs=local_outputs,
    )


def _check_output_layout(style: str, module: Any, layout: Placement) -> None:
    """Refuse layouts that the outputs of sharded hidden units cannot have."""
    is_bidirectional = module.bidirectional
    if layout == Replicate() or (layout == _UNITS and not is_bidirectional):
        return
    allowed = "Replicate()" if is_bidirectional else "Replicate() or Shard(-1)"
    got = repr(layout)
    if is_bidirectional:
        got = f"{got} (each rank has a part of both directions)"
    raise LayoutError(
        f"{style}: the output layout of {module} must be {allowed}, got {got}; pass "
        "output_layouts=Replicate()"
    )


class HiddenUnits(Lowered):
    """A recurrent module of which each rank computes some hidden units."""

    __slots__ = ("sizes",)

    def resolve(self) -> None:
        module: Any = self.module
        # Example: 8 units on 3 ranks -> 3, 3, 2.
        sizes = shard_sizes(module.hidden_size, Shard(0), self.comm.size)
        self.sizes: tuple[int, ...] = tuple(sizes)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        module: Any = call.module
        x = call.input()
        assert x is not None, "a recurrent module has an input"
        yield from input_collectives(call)
        initial = _initial_states(call)
        last = _state_tensors(call.outputs[1])
        steps = x.shape[int(module.batch_first and x.ndim > 2)]
        gathered = nbytes(last[0]) // last[0].shape[0]
        directions = 1 + module.bidirectional
        for layer in range(module.num_layers):
            # Example: 5 steps without an initial state -> 4 gathers, and one more after the last
            # step if another layer follows.
            has_next_layer = layer < module.num_layers - 1
            gathers = steps - 1 + bool(initial) + has_next_layer
            yield from [Collective("all_gather", gathered)] * (gathers * directions)
            if call.output.requires_grad:
                initial_has_grad = not initial or initial[0].requires_grad
                scatters = gathers if initial_has_grad else gathers - 1
                scatter = Collective("reduce_scatter", gathered, backward=True)
                yield from [scatter] * (scatters * directions)
        entering = call.sharding.input_port(1)
        leaving = call.sharding.output_port()
        for tensor in initial:
            yield from collectives_of_move(tensor, entering.layout, entering.desired)
        outputs = call.output.chunk(directions, -1)
        for tensor in (*outputs, *last):
            yield from collectives_of_move(tensor, leaving.layout, leaving.desired)

    def __call__(self, input: Tensor, hx: Any = None) -> Any:
        module: Any = self.module
        if isinstance(input, PackedSequence):
            raise UnsupportedModuleError(
                f"{self.sharding.style}: {module} got a PackedSequence, whose steps have "
                "different batch sizes; pass the padded tensor, and mask the positions behind "
                "the end of a sequence"
            )
        x = ports.replicated_input(self, input)
        is_single = x.ndim == 2
        # (steps, batch, features)
        if is_single:
            x = x.unsqueeze(1)
        elif module.batch_first:
            x = x.transpose(0, 1)
        initial = []
        for state in () if hx is None else _state_tensors(hx):
            # (layers and directions, batch, units)
            batched = state.unsqueeze(1) if is_single else state
            port = self.sharding.input_port(1)
            initial.append(ports.sharded_input(self, batched, self.sizes, port))
        outputs, states = self.run_layers(x, initial)
        if is_single:
            outputs = [output.squeeze(1) for output in outputs]
            states = [state.squeeze(1) for state in states]
        elif module.batch_first:
            outputs = [output.transpose(0, 1) for output in outputs]
        out = self.join_directions(outputs)
        last = tuple(self.join_directions([state]) for state in states)
        if isinstance(module, nn.LSTM):
            return out, last
        return out, last[0]

    def join_directions(self, parts: list[Tensor]) -> Tensor:
        """Return an output or a state of this rank's units in the layout that leaves.

        The units of the second direction follow the units of the first one.
        """
        if len(parts) == 1:
            return ports.sharded_output(self, parts[0], self.sizes)
        gathered = [gather(part, self.comm, part.ndim - 1, self.sizes) for part in parts]
        out = with_memory_order_of(parts[0], torch.cat(gathered, -1))
        return out if self.sharding.local_outputs else from_local(out, Replicate(), self.mesh)

    def run_layers(self, x: Tensor, initial: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last layer's outputs by direction and the last states, of this rank's units.

        `x` is (steps, batch, features). The tensors of `initial` are (layers and directions, batch,
        units); if the list is empty, the initial states are zeros.
        """
        module: Any = self.module
        local: Any = self.local(*module._flat_weights_names)
        last_states: list[tuple[Tensor, ...]] = []
        outputs: list[Tensor] = []
        for layer in range(module.num_layers):
            is_inner = layer < module.num_layers - 1
            outputs = []
            next_inputs = []
            for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
                names = [f"{name}_l{layer}{suffix}" for name in _WEIGHT_NAMES]
                weights = _CellWeights(*[local.get(name) for name in names])
                # Example: the reverse direction of layer 1 has the index 3.
                state = tuple(states[len(last_states)] for states in initial)
                inputs = x.flip(0) if suffix else x
                direction = self.run_steps(inputs, weights, state, is_inner=is_inner)
                output = direction.output
                next_input = direction.next_input
                if suffix:
                    output = output.flip(0)
                    next_input = next_input.flip(0) if is_inner else next_input
                outputs.append(output)
                next_inputs.append(next_input)
                last_states.append(direction.state)
            if is_inner:
                x = self.apply_dropout(torch.cat(next_inputs, -1))
        return outputs, [torch.stack(states) for states in zip(*last_states, strict=True)]

    def run_steps(
        self, x: Tensor, weights: _CellWeights, state: tuple[Tensor, ...], *, is_inner: bool
    ) -> _Direction:
        """Run one layer in one direction."""
        # (steps, batch, gates * units), of all steps at once
        drive = linear(x, weights.of_input, weights.bias_of_input)
        if state:
            hidden = gather_partial(state[0], self.comm, 1, self.sizes)
        else:
            units = self.sizes[self.comm.rank]
            zeros = x.new_zeros(x.shape[1], units, dtype=drive.dtype)
            state = (zeros, zeros) if isinstance(self.module, nn.LSTM) else (zeros,)
            hidden = x.new_zeros(x.shape[1], sum(self.sizes), dtype=drive.dtype)
        outputs = []
        gathered = []
        for step, driven in enumerate(drive):
            recurrence = linear(hidden, weights.of_state, weights.bias_of_state)
            state = self.cell(driven, recurrence, state)
            # (batch, units of this rank); all steps are stacked to (steps, batch, units) below
            outputs.append(state[0])
            if is_inner or step < len(drive) - 1:
                hidden = gather_partial(state[0], self.comm, 1, self.sizes)
                gathered.append(hidden)
        next_input = torch.stack(gathered) if is_inner else outputs[0]
        return _Direction(torch.stack(outputs), next_input, state)

    def cell(
        self, driven: Tensor, recurrence: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the next state from the gates' inputs, (batch, gates and units).

        `driven` comes from the layer's input, `recurrence` from the state before.
        """
        module: Any = self.module
        if isinstance(module, nn.LSTM):
            # The input, forget, cell and output gates. Example for 3 units on this rank:
            # (batch, 12) -> four tensors (batch, 3).
            gates = (driven + recurrence).chunk(4, -1)
            input_gate, forget_gate, candidate, output_gate = gates
            kept_memory = forget_gate.sigmoid() * state[1]
            memory = kept_memory + input_gate.sigmoid() * candidate.tanh()
            return output_gate.sigmoid() * memory.tanh(), memory
        if isinstance(module, nn.GRU):
            reset, update, candidate = driven.chunk(3, -1)
            state_reset, state_update, state_candidate = recurrence.chunk(3, -1)
            update = (update + state_update).sigmoid()
            reset = (reset + state_reset).sigmoid()
            candidate = (candidate + reset * state_candidate).tanh()
            return ((1 - update) * candidate + update * state[0],)
        both = driven + recurrence
        hidden = both.tanh() if module.nonlinearity == "tanh" else both.relu()
        return (hidden,)

    def apply_dropout(self, x: Tensor) -> Tensor:
        """Return the next layer's input: `x` after the dropout that one device would draw.

        The gradient of `x` is partial.
        """
        module: Any = self.module
        if not module.training or not module.dropout:
            return x
        ones = from_local(torch.ones_like(x), Replicate(), self.mesh)
        dropped: Any = dropout(ones, module.dropout)
        mask: Tensor = dropped.to_local()
        return x * mask


def _initial_states(call: ModuleCall) -> tuple[Tensor, ...]:
    """Return the initial state tensors of a recorded call; none if the call gives no state."""
    arguments = (*call.args, *call.kwargs.values())
    if len(arguments) < 2 or arguments[1] is None:
        return ()
    return _state_tensors(arguments[1])


def _state_tensors(state: Any) -> tuple[Tensor, ...]:
    """Return the state tensors: one of an RNN or GRU, two of an LSTM."""
    return tuple(state) if isinstance(state, tuple | list) else (state,)
