"""Covers: declared_types.py: attention of a sharded sequence has the type of its queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_context_parallel import context_parallel_attention
from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import I, ShardType as S, V, spmd
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


def typed(kind: Any, *shape: int) -> Tensor:
    tensor = torch.randn(shape, requires_grad=True)
    spmd.assert_tensor_type(tensor, {"cp": kind})
    return tensor


# The ring and the gather fold batch and heads into one dim, whose local sizes have several
# readings.
@pytest.mark.parametrize(
    ("method", "local", "kind"),
    [("ulysses", False, S(2)), ("ulysses", True, V), ("allgather", True, V), ("ring", True, V)],
)
def test_attention_has_the_type_of_its_queries(method: Any, local: bool, kind: Any) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with spmd.set_current_mesh(mesh), spmd.typecheck(local=local):
            q, k, v = (typed(kind, 2, 4, 6, 8) for _ in range(3))
            out = context_parallel_attention(q, k, v, mesh, is_causal=True, method=method)
            assert repr(spmd.type_of(out)) == f"{{cp: {kind}}}"
            whole = typed(I, 2, 4, 6, 8)
            with pytest.raises(SpmdTypeError, match="each rank's positions"):
                context_parallel_attention(whole, whole, whole, mesh, method=method)
