"""Messages between stages: tensors whose shapes and dtypes the receiver learns from the message.

A message is a description of fixed size, and then the tensors; each is one broadcast. A stage that
has failed sends the text of its error in the place of tensors, so that no other stage waits for
them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shoal_dtensor.internal import device_of_numbers
from shoal_mesh import Comm, broadcast

from ..errors import StageError

# Size of the pickle of a `Description`, padded.
_DESCRIPTION_BYTES = 2048
# The longest text of an error: 400 characters of at most 4 bytes leave room for the rest.
_MOST_CHARACTERS = 400


class TensorFacts(NamedTuple):
    """A description of a tensor that follows.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        requires_grad: whether the sender waits for its gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Arrived(NamedTuple):
    """A tensor of another stage.

    Attributes:
        tensor: its values.
        requires_grad: whether the sender waits for its gradient.
    """

    tensor: Tensor
    requires_grad: bool


class Description(NamedTuple):
    """The first part of a message.

    Attributes:
        tensors: the tensors that follow, by name.
        failure: the error of a stage; then no tensors follow.
    """

    tensors: dict[str, TensorFacts]
    failure: str = ""


def send(tensors: Mapping[str, Tensor], comm: Comm, device: torch.device) -> None:
    """Send tensors to the other ranks of a communicator, all of which call `receive`."""
    facts = {}
    for name, tensor in tensors.items():
        facts[name] = TensorFacts(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    _send_description(Description(facts), comm, device)
    for tensor in tensors.values():
        broadcast(tensor.detach().contiguous(), comm, comm.rank)


def send_failure(text: str, comm: Comm, device: torch.device) -> None:
    """Send the text of an error in the place of tensors."""
    _send_description(Description({}, text[:_MOST_CHARACTERS]), comm, device)


def receive(comm: Comm, source: int, device: torch.device) -> dict[str, Arrived]:
    """Return the tensors that a rank sends by `send`, by name.

    Args:
        comm: the communicator.
        source: the rank in it that sends.
        device: the device of the tensors.

    Raises:
        StageError: if the rank sent the text of an error.
    """
    empty = torch.zeros(_DESCRIPTION_BYTES, dtype=torch.uint8)
    received = broadcast(empty.to(device_of_numbers(comm, device)), comm, source)
    description: Description = pickle.loads(bytes(received.cpu().tolist()))
    if description.failure:
        raise StageError(description.failure)
    arrived = {}
    for name, facts in description.tensors.items():
        target = torch.empty(facts.shape, dtype=facts.dtype, device=device)
        arrived[name] = Arrived(broadcast(target, comm, source), facts.requires_grad)
    return arrived


def _send_description(description: Description, comm: Comm, device: torch.device) -> None:
    pickled = pickle.dumps(description)
    assert len(pickled) <= _DESCRIPTION_BYTES, "a description of few tensors is short"
    # `pickle.loads` ignores the padding after the pickle.
    padded = torch.tensor(list(pickled.ljust(_DESCRIPTION_BYTES, b"\0")), dtype=torch.uint8)
    broadcast(padded.to(device_of_numbers(comm, device)), comm, comm.rank)
