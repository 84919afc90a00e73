"""Notes of layouts on plain local tensors.

Covers: random_layouts/{layouts,layout_inference,global_sizes}.py, _torch/tensors.py,
modules/owners.py.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

from shoal_dtensor import Replicate, Shard, Spec
from shoal_dtensor.modules.owners import has_hooks, move_attachments
from shoal_dtensor.random_layouts.layout_inference import infer_layouts
from shoal_dtensor.random_layouts.layouts import (
    UNSEEN,
    UNSHARDED,
    LocalLayout,
    known_layout,
    note_layout,
)
from shoal_mesh import abstract_mesh


def through_a_file(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def test_a_layout_stays_with_its_tensor() -> None:
    x = torch.ones(2)
    note_layout(x, UNSHARDED)
    assert known_layout(x) is UNSHARDED
    assert known_layout(through_a_file(x)) is UNSEEN
    assert known_layout(copy.deepcopy(x)) is UNSEEN


def test_what_a_parameter_carries_of_another_stays_with_it() -> None:
    first: Any = nn.Parameter(torch.ones(2))
    second: Any = nn.Parameter(torch.ones(2))
    first.tag = "weight"
    first.register_hook(lambda grad: grad)
    move_attachments(first, second)
    assert has_hooks(second) and second.tag == "weight"
    second._backward_hooks.clear()  # torch refuses to save them
    for alone in (through_a_file(second), copy.deepcopy(second)):
        move_attachments(alone, nn.Parameter(torch.ones(2)))
        assert not has_hooks(alone)


def test_a_view_of_an_empty_batch_is_sharded_as_it() -> None:
    x = torch.empty(0, 6)
    spec = Spec(abstract_mesh((2,)), (Shard(0),), (0, 6))
    note_layout(x, LocalLayout(spec))
    view = x.view(0, 2, 3)
    (layout,) = infer_layouts(
        "view", torch.Tensor.view, (x, 0, 2, 3), {}, [view], [known_layout(x)]
    )
    assert layout == LocalLayout(spec.with_(shape=(0, 2, 3)))


def test_equal_draws_are_followed_after_the_same_call_on_other_tensors() -> None:
    spec = Spec(abstract_mesh((2, 2)), (Shard(0), Replicate()), (8, 3))
    x = torch.ones(4, 3)
    for has_equal_draws in (False, True, False):
        note_layout(x, LocalLayout(spec, has_equal_draws=has_equal_draws))
        out = x.relu()
        (layout,) = infer_layouts("relu", torch.relu, (x,), {}, [out], [known_layout(x)])
        assert layout == LocalLayout(spec, has_equal_draws=has_equal_draws)
