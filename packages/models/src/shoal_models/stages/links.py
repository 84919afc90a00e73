"""`CommLink`: the connection of a stage to the stages before and after it, forward and backward.

    stage 0                         stage 1 (the last one)
    layers 0, 1                     layers 2, 3, norm, head
      send -------- hidden --------> receive
      outputs <---- loss, logits --- deliver
      ...                           ...
      send's backward <- gradient -- receive's backward

On every stage the outputs depend on what the stage has sent, so `loss.backward()` on all ranks runs
the whole backward. Only the last stage's gradient of the outputs counts: all ranks compute the same
loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import apply, first_order_only
from shoal_mesh import Comm, broadcast, comm_over

from ..errors import StageError
from . import messages

_FIRST_ORDER = (
    "the stages of a model with pp_size send gradients of first order only; call backward() without "
    "create_graph, or load the model with tp_size"
)


class StageLink(Protocol):
    """The connection of a stage to the others; a proof runs all stages in one process.

    Attributes:
        stage: the number of the stage.
        stages: the number of stages.
    """

    stage: int
    stages: int

    def receive(self, device: torch.device) -> Tensor:
        """Return the hidden states of the stage before."""

    def send(self, hidden: Tensor) -> Tensor:
        """Send hidden states to the next stage; return a token, on which outputs will depend."""

    def deliver(
        self, outputs: Mapping[str, Tensor], token: Tensor | None, device: torch.device
    ) -> Mapping[str, Tensor]:
        """Return the outputs of the last stage on every stage.

        Args:
            outputs: the outputs of this stage, which count on the last one.
            token: the token of `send`; None on the last stage.
            device: the device of the outputs.
        """

    def fail(self, error: BaseException, device: torch.device, *, has_sent: bool) -> None:
        """Tell the other stages that this one has raised.

        Args:
            error: the error.
            device: the device of the model.
            has_sent: whether this stage has sent its hidden states.
        """


class CommLink:
    """The connection of the stage of this rank.

    Args:
        comm: the communicator along the axis of the stages.
    """

    def __init__(self, comm: Comm) -> None:
        self.stage = comm.rank
        self.stages = comm.size
        self._all = comm
        self._before: Comm | None = None
        self._after: Comm | None = None
        if self.stage > 0:
            self._before = comm_over(comm.line[self.stage - 1 : self.stage + 1], "stages")
        if self.stage < self.stages - 1:
            self._after = comm_over(comm.line[self.stage : self.stage + 2], "stages")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedModuleError(
            "a model with pp_size cannot be copied: gradients of tied weights and norms of gradients "
            "would be those of one stage. Save it, and load the copy with hf.from_pretrained"
        )

    def receive(self, device: torch.device) -> Tensor:
        assert self._before is not None, "the first stage receives nothing"
        (arrived,) = messages.receive(self._before, 0, device).values()
        if not arrived.requires_grad:
            return arrived.tensor
        received: Tensor = apply(_Receive, _anchor(device), arrived.tensor, self._before)
        return received

    def send(self, hidden: Tensor) -> Tensor:
        assert self._after is not None, "the last stage sends nothing"
        messages.send({"hidden": hidden}, self._after, hidden.device)
        if not hidden.requires_grad:
            return _anchor(hidden.device)
        token: Tensor = apply(_Send, hidden, self._after)
        return token

    def deliver(
        self, outputs: Mapping[str, Tensor], token: Tensor | None, device: torch.device
    ) -> Mapping[str, Tensor]:
        last = self.stages - 1
        if self.stage == last:
            messages.send(outputs, self._all, device)
            return outputs
        arrived = messages.receive(self._all, last, device)
        delivered = {name: value.tensor for name, value in arrived.items()}
        dependent = [name for name, value in arrived.items() if value.requires_grad]
        values = [delivered[name] for name in dependent]
        with_token: tuple[Tensor, ...] = apply(_Deliver, token, *values)
        return {**delivered, **dict(zip(dependent, with_token, strict=True))}

    def fail(self, error: BaseException, device: torch.device, *, has_sent: bool) -> None:
        rank = self._all.line[self.stage]
        text = f"stage {self.stage} (rank {rank}) raised {type(error).__name__}: {error}"
        if isinstance(error, StageError):
            # the stage before has failed, and its error is passed on
            text = str(error)
        if self._after is None:
            messages.send_failure(text, self._all, device)
            return
        if not has_sent:
            messages.send_failure(text, self._after, device)
        try:
            messages.receive(self._all, self.stages - 1, device)
        except StageError:
            # the last stage passes the error on; this stage raises its own
            return


def _anchor(device: torch.device) -> Tensor:
    """Return a tensor that requires a gradient, so that autograd runs a backward that has no input."""
    return torch.zeros((), device=device, requires_grad=True)


class _Receive(torch.autograd.Function):
    """Hidden states that have arrived; the backward sends their gradient to the stage before."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        # The output is the tensor itself and not a view of it, so callers may write to it.
        ctx.mark_dirty(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        first_order_only(_FIRST_ORDER)
        broadcast(gradient.contiguous(), ctx.comm, 1)
        return None, None, None


class _Send(torch.autograd.Function):
    """A token for hidden states that were sent; the backward waits for their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        ctx.like = torch.empty_like(hidden, device="meta")
        ctx.device = hidden.device
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first_order_only(_FIRST_ORDER)
        target = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=ctx.device)
        return broadcast(target, ctx.comm, 1), None


class _Deliver(torch.autograd.Function):
    """Outputs of the last stage, as outputs of this stage that depend on the token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(token)
        # Callers may write to the outputs, as Trainer does to the loss.
        ctx.mark_dirty(*values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        first_order_only(_FIRST_ORDER)
        (token,) = ctx.saved_tensors
        return torch.zeros_like(token), *[None for _ in gradients]
