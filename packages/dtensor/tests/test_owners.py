"""Covers: modules/owners.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal_dtensor import Shard, distribute_tensor
from shoal_dtensor.modules.owners import batched_by_owner, move_attachments
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


def test_items_that_need_the_same_owners_come_together() -> None:
    items: Any = [("a", [1]), ("b", []), ("c", [2]), ("d", [1]), ("e", [2, 3]), ("f", [])]
    turns: Any = batched_by_owner(items)
    assert turns == [(["a", "d"], [1]), (["b"], []), (["c"], [2]), (["e"], [2, 3]), (["f"], [])]
    turns = batched_by_owner(items, as_one_group=True)
    assert turns == [([*"abcdef"], [1, 2, 3])]
    assert batched_by_owner([]) == []


def test_attributes_set_on_a_dtensor_are_carried_over_if_it_replaced_a_bare_parameter() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for first in ({}, {"first": 1}):
            plain: Any = nn.Parameter(torch.ones(2))
            vars(plain).update(first)
            shards = distribute_tensor(plain.detach(), mesh, [Shard(0)])
            sharded: Any = nn.Parameter(shards)
            move_attachments(plain, sharded)
            sharded.register_hook(lambda grad: grad)
            sharded.later = 2
            restored: Any = nn.Parameter(torch.ones(2))
            move_attachments(sharded, restored)
            attributes = {name: vars(restored)[name] for name in vars(restored) if name[0] != "_"}
            assert attributes == first | {"later": 2}
            assert not restored._backward_hooks
