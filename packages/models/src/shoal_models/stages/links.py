"""`CommLink`: the connection of a stage to the stages before and after it, forward and backward.

    stage 0                         stage 1 (the last one)
    layers 0, 1                     layers 2, 3, norm, head
      send -------- hidden --------> receive
      outputs <---- loss, logits --- deliver
      ...                           ...
      send's backward <- gradient -- receive's backward

Every stage but the last gets its loss from the last stage. To run its backward by
`loss.backward()`, autograd needs a path from this loss to the layers of the stage. The path goes
through a token, a tensor without useful elements that `send` returns:

    loss -> _Deliver -> token -> _Send -> hidden states -> layers of this stage

The backward of `_Deliver` only calls the backward of `_Send`, which waits for the gradient of the
hidden states from the next stage. The gradient that begins at the loss of this stage is dropped:
all ranks compute the same loss, and only the last stage has the path from the loss to its head.
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
    "the stages of a model with pp_size send gradients of first order only; call backward() "
    "without create_graph, or load the model with tp_size"
)


# Ranks in a communicator of two neighboring stages.
_EARLIER_STAGE = 0
_LATER_STAGE = 1


class StageLink(Protocol):
    """The connection of a stage to the other stages.

    `CommLink` connects the stages of ranks. `check_stages` runs all stages in one process, with a
    link of its own.

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
            outputs: the outputs of this stage; those of the last stage are delivered.
            token: the token of `send`; None on the last stage.
            device: the device of the outputs.
        """

    def fail(self, error: BaseException, device: torch.device, *, has_sent: bool) -> None:
        """Make the other stages raise too, because this stage has raised.

        Args:
            error: the error.
            device: the device of the model.
            has_sent: whether this stage has sent its hidden states, so that the next stage runs.
        """


class CommLink:
    """The connection of this rank's stage, by broadcasts.

    Neighboring stages have a communicator of two ranks, the earlier stage first. The outputs are
    sent over all stages.

    Args:
        comm: the communicator along the axis of the stages.
    """

    def __init__(self, comm: Comm) -> None:
        self.stage = comm.rank
        self.stages = comm.size
        self._all = comm
        # with the stage before, and with the stage after
        self._before: Comm | None = None
        self._after: Comm | None = None
        ranks = comm.line
        if self.stage > 0:
            self._before = comm_over(ranks[self.stage - 1 : self.stage + 1], "stages")
        if self.stage < self.stages - 1:
            self._after = comm_over(ranks[self.stage : self.stage + 2], "stages")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedModuleError(
            "a model with pp_size cannot be copied: gradients of tied weights and norms of "
            "gradients would be those of one stage. Save it, and load the copy with "
            "hf.from_pretrained"
        )

    def receive(self, device: torch.device) -> Tensor:
        assert self._before is not None, "the first stage receives nothing"
        (arrived,) = messages.receive(self._before, _EARLIER_STAGE, device).values()
        if not arrived.requires_grad:
            return arrived.tensor
        # The tensor has just arrived and does not require a gradient itself. With the anchor among
        # the arguments autograd runs the backward of `_Receive` all the same.
        received: Tensor = apply(_Receive, _anchor(device), arrived.tensor, self._before)
        return received

    def send(self, hidden: Tensor) -> Tensor:
        assert self._after is not None, "the last stage sends nothing"
        messages.send({"hidden": hidden}, self._after, hidden.device)
        if not hidden.requires_grad:
            # Example: all layers of this stage are frozen. The next stage then sends no gradient
            # back, and the token needs no path to the layers. It requires a gradient, because the
            # loss of this stage must have a backward that users can call.
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
        names_with_gradient = [name for name, value in arrived.items() if value.requires_grad]
        # Example: the loss and the logits require a gradient on the last stage, so they get a path
        # to the token. A number of tokens does not, and stays as it has arrived.
        values = [delivered[name] for name in names_with_gradient]
        values_with_token: tuple[Tensor, ...] = apply(_Deliver, token, *values)
        delivered.update(zip(names_with_gradient, values_with_token, strict=True))
        return delivered

    def fail(self, error: BaseException, device: torch.device, *, has_sent: bool) -> None:
        rank = self._all.line[self.stage]
        text = f"stage {self.stage} (rank {rank}) raised {type(error).__name__}: {error}"
        if isinstance(error, StageError):
            # An earlier stage has failed, and its error is passed on.
            text = str(error)
        # The failure takes the place of messages that other stages wait for. Example: stage 1 of 4
        # fails before it has sent its hidden states.
        #   1. Stage 1 sends the failure to stage 2 in place of the hidden states.
        #   2. Stage 2 raises a StageError in `receive`, and sends it to stage 3 in the same way.
        #   3. Stage 3, the last one, sends the failure to all stages in place of the outputs.
        #   4. Stage 0, which has run without an error, raises it in `deliver`. The stages 1 and 2
        #      must take part in this broadcast too, but raise the errors that they have.
        # If a stage fails after it has sent its hidden states, the stages behind it run as usual,
        # and all stages take part in the broadcast of the outputs.
        if self._after is None:
            messages.send_failure(text, self._all, device)
            return
        if not has_sent:
            messages.send_failure(text, self._after, device)
        try:
            messages.receive(self._all, self.stages - 1, device)
        except StageError:
            # The caller raises `error`, which is the cause of this error or the same failure.
            return


def _anchor(device: torch.device) -> Tensor:
    """Return a tensor that requires a gradient, without elements that matter.

    As an argument of an autograd function it makes autograd run the function's backward, though no
    other argument requires a gradient.
    """
    return torch.zeros((), device=device, requires_grad=True)


class _Receive(torch.autograd.Function):
    """Hidden states that have arrived; the backward sends their gradient to the stage before."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        # Without this, the output would be a view, which callers must not write to.
        ctx.mark_dirty(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        first_order_only(_FIRST_ORDER)
        broadcast(gradient.contiguous(), ctx.comm, _LATER_STAGE)
        return None, None, None


class _Send(torch.autograd.Function):
    """A token for hidden states that were sent; the backward waits for their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        # shape and dtype of the gradient, without its memory
        ctx.gradient_like = torch.empty_like(hidden, device="meta")
        ctx.device = hidden.device
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first_order_only(_FIRST_ORDER)
        like = ctx.gradient_like
        received = torch.empty(like.shape, dtype=like.dtype, device=ctx.device)
        return broadcast(received, ctx.comm, _LATER_STAGE), None


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
        # The gradient of the token only makes autograd run the backward of `_Send`.
        return torch.zeros_like(token), *[None for _ in gradients]
