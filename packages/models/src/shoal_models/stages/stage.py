"""`Stage`: the part of a model that is on one rank of an axis of stages.

The model keeps its class, its forward and the names of its parameters. Modules of other stages are
replaced by modules without parameters, and hooks around the model's forward give every stage the
outputs of the last one.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor.errors import UnsupportedModuleError
from shoal_mesh import CollectiveError

from ..errors import StageError
from .absent_modules import AbsentLayer, AbsentModule, ReceivingLayer, SendingLayer
from .links import StageLink
from .model_parts import ModelParts, tied_weights

# Options that add outputs of each layer, of which a stage has only its own.
_OUTPUTS_OF_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")


class Stage:
    """One stage of a model.

    Args:
        model: a causal language model of transformers; it is changed in place.
        parts: its parts.
        link: the connection to the other stages.
    """

    def __init__(self, model: Any, parts: ModelParts, link: StageLink) -> None:
        self.link = link
        self.is_last = link.stage == link.stages - 1
        # whether the model's forward is running
        self._is_running = False
        # the token of `link.send`, from the layer that sends until the end of the forward
        self._token: Tensor | None = None
        # whether the caller wants a tuple in place of a `ModelOutput`
        self._returns_tuple = False
        self._replace_modules(model, parts)
        model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _replace_modules(self, model: nn.Module, parts: ModelParts) -> None:
        """Replace the modules of other stages by modules without parameters.

        The last stage keeps the weights that it shares with the first, under their names there.
        """
        is_first = self.link.stage == 0
        own = parts.layers_of(self.link.stage, self.link.stages)
        layers: Any = model.get_submodule(parts.layers)
        for number, layer in enumerate(layers):
            if number in own:
                continue
            if number == own.start - 1:
                layers[number] = ReceivingLayer(layer, number, self._receive)
            elif number == own.stop:
                layers[number] = SendingLayer(layer, number, self._send)
            else:
                layers[number] = AbsentLayer(layer, number)
        ids_of_tied: set[int] = set()
        if self.is_last:
            ids_of_tied = {id(weight) for weight in tied_weights(model, parts)}
        if not is_first:
            for name in parts.before:
                module = model.get_submodule(name)
                weights = dict(module.named_parameters(recurse=False))
                kept = {key: weight for key, weight in weights.items() if id(weight) in ids_of_tied}
                model.set_submodule(name, AbsentModule(module, kept))
        if not self.is_last:
            for name in parts.after:
                model.set_submodule(name, AbsentModule(model.get_submodule(name), {}))

    # --- what the replaced layers call ------------------------------------------------------------

    def _receive(self, device: torch.device) -> Tensor:
        self._check_running()
        return self.link.receive(device)

    def _send(self, hidden: Tensor) -> None:
        self._check_running()
        self._token = self.link.send(hidden)

    def _check_running(self) -> None:
        if not self._is_running:
            raise UnsupportedModuleError(
                "a part of a model with pp_size was called; call the whole model on the ranks of "
                "all stages, which returns the outputs of the last stage"
            )

    # --- hooks ------------------------------------------------------------------------------------

    def _begin(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare the arguments of this stage's forward: all by name.

        A hook before the model's forward. It decides by arguments and configuration, so it raises
        on all ranks or on none.
        """
        named = _named_arguments(model, args, kwargs)
        for option in _OUTPUTS_OF_LAYERS:
            is_wanted = named.get(option)
            if is_wanted is None:
                is_wanted = getattr(model.config, option, False)
            if is_wanted:
                raise UnsupportedModuleError(
                    f"{option}=True: each stage of a model with pp_size has the outputs of its own "
                    f"layers only; pass {option}=False, or load the model with tp_size"
                )
        if not self.is_last:
            # The last stage alone has logits, and computes the loss.
            named["labels"] = None
        return_dict = named.get("return_dict")
        if return_dict is None:
            return_dict = getattr(model.config, "return_dict", True)
        # `_end` replaces outputs by name, and makes a tuple of them if one is wanted.
        self._returns_tuple = not return_dict
        named["return_dict"] = True
        self._is_running = True
        self._token = None
        return (), named

    def _end(self, model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Return the outputs of the last stage, with this stage's cache.

        A hook after the model's forward, which torch also calls if the forward has raised: then
        `outputs` is None.
        """
        if not self._is_running:
            # `_begin` has raised, on all ranks.
            return None
        self._is_running = False
        token = self._token
        self._token = None
        if outputs is None:
            self._report_failure(model, has_sent=token is not None)
            return None
        device = outputs.logits.device
        tensors = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
        sent = tensors if self.is_last else {}
        delivered = self.link.deliver(sent, token, device)
        complete = type(outputs)(**{**outputs, **delivered})
        return complete.to_tuple() if self._returns_tuple else complete

    def _report_failure(self, model: nn.Module, *, has_sent: bool) -> None:
        """Make the other stages raise the error that the forward has raised."""
        error = sys.exception()
        assert error is not None, "torch calls the hook while it handles the error"
        is_of_transport = isinstance(error, CollectiveError) and not isinstance(error, StageError)
        if is_of_transport:
            # A collective has failed, so the other ranks raise too, and no message can be sent.
            return
        device = next(model.parameters()).device
        self.link.fail(error, device, has_sent=has_sent)


def _named_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a model's forward by name, `**kwargs` of its signature included."""
    signature = inspect.signature(model.forward)
    bound = signature.bind_partial(*args, **kwargs).arguments
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named
