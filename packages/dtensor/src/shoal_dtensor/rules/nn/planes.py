"""Sharding of images by the dims before the spatial ones, and of operators that move elements between their dims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..language.rule import OpCall, Row, Rule, S, Table
from ..language.rule_tables import family


def spatial_dims(call: OpCall) -> int:
    """How many spatial dims an operator has, by its name: 2 for `max_pool2d`."""
    return next(n for n in (1, 2, 3) if f"{n}d" in call.op.__name__)


def planes(call: OpCall, linear: str = "") -> Iterator[Row]:
    """Rows for the leading dims that all operands share: each plane is treated for itself; spatial dims are replicated.

    Args:
        call: of an operator whose name says how many spatial dims it has.
        linear: the argument in which the operator is linear.
    """
    operands = (*call.tensors, *call.outputs)
    for d in range(max(min(t.ndim for t in operands) - spatial_dims(call), 0)):
        if len({t.shape[d] for t in operands}) == 1:
            entries: dict[str, Any] = dict.fromkeys((*call.places, "out"), S(d))
            yield call.row(**entries)
    if linear:
        yield from call.linear(linear)


def im2col(call: OpCall) -> Iterator[Row]:
    """`im2col` and `col2im`: batch; channels, each with all elements of its window (3 x 3: 9 columns per channel)."""
    source, result = call["self"], call.outputs[0]
    channel = source.ndim - (2 if "col2im" in call.op.__name__ else 3)
    per_result = max(source.shape[channel] // max(result.shape[channel], 1), 1)
    per_source = max(result.shape[channel] // max(source.shape[channel], 1), 1)
    if channel:
        yield call.row(self=S(0), out=S(0))
    yield call.row(self=S(channel, per_result), out=S(channel, per_source))
    yield from call.linear("self")


def channel_shuffle(call: OpCall) -> Iterator[Row]:
    """Channels are replicated."""
    yield from (call.row(self=S(d), out=S(d)) for d in range(call["self"].ndim) if d != 1)


def pixel_shuffle(call: OpCall) -> Iterator[Row]:
    """And back: by 2, a channel of 2 x 2 pixels of the fine image is 4 channels of the coarse one."""
    up = "upscale_factor" in call.bound
    factor, last = call["upscale_factor" if up else "downscale_factor"], call["self"].ndim - 1
    pairs = [(S(d), S(d)) for d in range(last - 2)]
    pairs += [(S(last - 2, factor**2), S(last - 2)), (S(last - 1), S(last - 1, factor)), (S(last), S(last, factor))]
    for coarse, fine in pairs:
        yield call.row(self=coarse, out=fine) if up else call.row(self=fine, out=coarse)
    yield from call.linear("self")


PLANES: Table = family(
    {
        "im2col col2im": Rule(im2col, skip_empty=True),
        "pixel_shuffle pixel_unshuffle": Rule(pixel_shuffle, skip_empty=True),
        "channel_shuffle native_channel_shuffle": Rule(channel_shuffle, skip_empty=True),
    }
)
