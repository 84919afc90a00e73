"""Modules that stand for modules of other stages, under the same names.

A model's own forward runs on every stage. With layers 2 and 3 of 6 on this stage, its modules are:

    embeddings   AbsentModule      returns hidden states of zeros, of the right shape
    layer 0      AbsentLayer       returns its input
    layer 1      ReceivingLayer    returns the hidden states that the stage before sends
    layers 2, 3                    the model's own
    layer 4      SendingLayer      sends its input to the next stage, and returns it
    layer 5      AbsentLayer       returns its input
    norm, head   AbsentModule      returns its input

An absent layer also has a place in the cache of keys and values, because models read the number of
cached positions from the entry of any layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor.errors import UnsupportedModuleError

# Types of attributes that a model may read from a layer, such as the kind of its attention.
_PLAIN_VALUES = (str, int, float, bool, type(None))


class AbsentModule(nn.Module):
    """A module of another stage that is not a layer.

    Args:
        module: the module that this one replaces.
        weights: its parameters that this stage holds too, under the same names.
    """

    def __init__(self, module: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, weight)
        self.replaced_class = type(module).__name__
        # For embeddings, which get tokens, the number of hidden features. None for modules that get
        # hidden states.
        self.width: int | None = None
        dtype: torch.dtype | None = None
        if isinstance(module, nn.Embedding):
            self.width = module.embedding_dim
            dtype = module.weight.dtype
        # A buffer without elements: `model.to(dtype)` changes its dtype, as it would change that of
        # embeddings.
        dtype_holder = torch.empty(0, dtype=dtype, device="cpu")
        self.register_buffer("dtype_holder", dtype_holder, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return hidden states of zeros for tokens, and other inputs as they are."""
        tensor = _first_tensor(args, kwargs)
        if self.width is None:
            return tensor
        dtype = self.get_buffer("dtype_holder").dtype
        return torch.zeros(*tensor.shape, self.width, dtype=dtype, device=tensor.device)

    def extra_repr(self) -> str:
        """Return the name of the class that is on another stage."""
        return f"{self.replaced_class} of another stage"


class AbsentLayer(nn.Module):
    """A layer of another stage.

    Args:
        layer: the layer that this one replaces.
        number: its number in the model.
    """

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.replaced_class = type(layer).__name__
        self.number = number
        # The model may read plain attributes of the layer.
        for name, value in vars(layer).items():
            if (
                isinstance(value, _PLAIN_VALUES)
                and not name.startswith("_")
                and not hasattr(self, name)
            ):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states that the layer gets, and add their positions to the cache."""
        hidden = _first_tensor(args, kwargs)
        self._extend_cache(hidden, kwargs)
        return hidden

    def extra_repr(self) -> str:
        """Return the name of the class that is on another stage."""
        return f"{self.replaced_class} of another stage"

    def _extend_cache(self, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """Add the positions of hidden states (rows, positions, features) to a cache in `kwargs`."""
        from transformers.cache_utils import Cache, CacheLayerMixin

        for cache in kwargs.values():
            if not isinstance(cache, Cache):
                continue
            has_entry = self.number < len(cache.layers)
            if has_entry and not isinstance(cache.layers[self.number], CacheLayerMixin):
                # The entry is of a layer without keys, such as one with a recurrent state.
                continue
            # The smallest keys and values: one head of one feature, (rows, 1, positions, 1).
            rows, positions = hidden.shape[:2]
            keys = hidden.new_zeros(rows, 1, positions, 1)
            cache.update(keys, keys, self.number)


class ReceivingLayer(AbsentLayer):
    """The layer before this stage's first layer.

    Args:
        layer: the layer that this one replaces.
        number: its number in the model.
        receive: returns the hidden states of the stage before, given the device of the model.
    """

    def __init__(
        self, layer: nn.Module, number: int, receive: Callable[[torch.device], Tensor]
    ) -> None:
        super().__init__(layer, number)
        self.receive = receive

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states of the stage before."""
        hidden = super().forward(*args, **kwargs)
        return self.receive(hidden.device)


class SendingLayer(AbsentLayer):
    """The layer after this stage's last layer.

    Args:
        layer: the layer that this one replaces.
        number: its number in the model.
        send: sends hidden states to the next stage.
    """

    def __init__(self, layer: nn.Module, number: int, send: Callable[[Tensor], None]) -> None:
        super().__init__(layer, number)
        self.send = send

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Send the hidden states, and return their values without a gradient."""
        hidden = super().forward(*args, **kwargs)
        self.send(hidden)
        # The gradient comes from the next stage, through the token of `send`.
        return hidden.detach()


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a call, or raise if it is not a tensor."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(value, Tensor):
        raise UnsupportedModuleError(
            "a module of another stage of the pipeline needs a tensor as its first argument, got "
            f"{type(value).__name__}"
        )
    return value
