"""Which modules may draw random numbers, by the code of their forwards.

Covers: random_layouts/{drawing_modules,drawing_calls}.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_dtensor.random_layouts.drawing_modules import find_drawing_modules

TABLE = {"noise": F.dropout}
HELPERS = ModuleType("helpers")
exec("import torch.nn.functional as F\ndef noisy(x): return F.dropout(x)", vars(HELPERS))
# globals without `__name__`, as of a module that a notebook or `exec` makes
NAMELESS: dict[str, Any] = {}
exec(
    "import torch.nn.functional as F\ndef noisy(x): return F.dropout(x)\ndef calls(x): return "
    "noisy(x)",
    NAMELESS,
)


class Noise:
    def __call__(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class Own(nn.Module):
    """A module of a user: its forward is a function that it holds, or calls."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


DRAW: dict[str, Any] = {
    "a function": F.dropout,
    "by keyword": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "by position": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
    "a partial call": partial(F.dropout, p=0.5),
    "of a table": lambda x: TABLE["noise"](x),
    "of a list": [torch.relu, F.dropout],
    "an object": Noise(),
    "of another module": lambda x: HELPERS.noisy(x),
    "of no module": NAMELESS["calls"],
    "an operator": lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
}
DO_NOT: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=None, is_causal=True),
    "activation": partial(F.gelu, approximate="tanh"),
    "of another module": lambda x: F.layer_norm(x, (4,)),
}


@pytest.mark.parametrize("name", DRAW)
def test_what_draws_is_seen(name: str) -> None:
    module = Own(DRAW[name])
    assert find_drawing_modules(nn.Sequential(module, nn.Linear(2, 2))) == [module]


@pytest.mark.parametrize("name", DO_NOT)
def test_what_does_not_draw_is_left_alone(name: str) -> None:
    assert find_drawing_modules(Own(DO_NOT[name])) == []
