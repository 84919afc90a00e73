"""Calls of torch functions that draw random numbers, by the function's name and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Functions that draw while training, unless their probability is 0. "dropout_" writes in place.
_DROPOUTS = frozenset(
    f"{name}{suffix}"
    for name in (
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "native_dropout",
    )
    for suffix in ("", "_")
) | {"dropout1d", "dropout2d", "dropout3d"}

ALWAYS_DRAWING = frozenset(
    {
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "exponential_",
        "geometric_",
        "gumbel_softmax",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "uniform_",
    }
)
"""Names of functions that draw in every call."""

DROPOUT_POSITIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Functions that draw if they get a dropout probability, with the position of this argument."""

_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_RRELUS = frozenset(("rrelu", "rrelu_", "rrelu_with_noise"))
_MAY_DRAW = ALWAYS_DRAWING | _DROPOUTS | _RECURRENT | DROPOUT_POSITIONS.keys() | _RRELUS


def draws_numbers(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a torch function draws random numbers.

    For example, `dropout(x, 0.1)` draws; `dropout(x, 0.0)` and `dropout(x, 0.1, training=False)` do
    not.

    Args:
        name: the name of the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    # Every function under a watch comes here, and few of them may draw.
    if name not in _MAY_DRAW:
        return False
    if name in ALWAYS_DRAWING:
        return True
    training = kwargs.get("training", kwargs.get("train"))
    if name in _DROPOUTS:
        return _dropout_draws(args, kwargs, training)
    if name in DROPOUT_POSITIONS:
        return training is not False and _has_dropout(DROPOUT_POSITIONS[name], args, kwargs)
    if name in _RECURRENT:
        return _recurrent_draws(args)
    # Only `training` and `inplace` can be True here. A call with `inplace` counts as a draw too.
    return bool(training) or any(arg is True for arg in args)


def _dropout_draws(args: Sequence[Any], kwargs: Mapping[str, Any], training: Any) -> bool:
    """Tell whether `dropout(input, p, training)` draws.

    `training` is the keyword argument; None without it.
    """
    probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    is_training = training is None or bool(training)
    is_off_by_position = len(args) > 2 and not args[2]
    return bool(probability) and is_training and not is_off_by_position


def _has_dropout(position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether attention gets a dropout probability, which is the argument at a position."""
    by_position = args[position] if len(args) > position else 0.0
    return bool(kwargs.get("dropout_p", by_position))


def _recurrent_draws(args: Sequence[Any]) -> bool:
    """Tell whether a recurrent function draws, such as `gru(..., num_layers, 0.4, True, ...)`."""
    # The dropout probability is the only float, and the next argument is `train`.
    probability = next((arg for arg in args if type(arg) is float), 0.0)
    return probability > 0 and bool(args[args.index(probability) + 1])
