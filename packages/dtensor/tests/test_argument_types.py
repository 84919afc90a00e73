"""Wrong arguments are errors of this package, and of the builtin type that torch raises.

Covers: argument_types.py.
"""

# mypy: disable-error-code="arg-type, call-arg, call-overload, type-var, attr-defined"
# mypy: disable-error-code="list-item, dict-item, operator"
# Wrong types are what these calls are about.

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import (
    DTensor,
    Partial,
    PartitionSpec,
    Replicate,
    Shard,
    ShoalTensorError,
    Spec,
    clip_grad_norm_,
    communication,
    compute_local_shape_and_global_offset,
    distribute_module,
    distribute_tensor,
    explain,
    full,
    get_state_dict,
    interop,
    local_map,
    local_step,
    manual_seed,
    random_mode,
    register_rule,
    register_sharding,
    unknown_ops,
    visualize_sharding,
    zeros,
)
from shoal_dtensor.checkpoint import Checkpointer
from shoal_dtensor.errors import ArgumentTypeError
from shoal_dtensor.internal import local_shard
from shoal_mesh import MeshError, init_device_mesh
from shoal_mesh.testing import fake_world


@dataclass
class Given:
    """What the calls get.

    It is a mesh of 4, one of 2 x 2, torch's own, a plain tensor of 8 x 4, and a DTensor of it.
    """

    mesh: Any
    grid: Any
    torch_mesh: Any
    torch_shard: Any
    torch_replicate: Any
    t: Any
    x: Any


def given() -> Given:
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor import Replicate as R, Shard as S

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    t = torch.ones(8, 4)
    x = distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)
    return Given(mesh, init_device_mesh("cpu", (2, 2)), torch_mesh("cpu", (4,)), S(0), R(), t, x)


WRONG: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "mesh str": (TypeError, lambda c: distribute_tensor(c.t, "cpu", [Shard(0)])),
    "mesh tuple": (TypeError, lambda c: distribute_tensor(c.t, (4,), [Shard(0)])),
    "torch mesh": (TypeError, lambda c: distribute_tensor(c.t, c.torch_mesh, [Shard(0)])),
    "torch mesh from_local": (
        TypeError,
        lambda c: DTensor.from_local(c.t, c.torch_mesh, [Shard(0)]),
    ),
    "torch mesh redistribute": (TypeError, lambda c: c.x.redistribute(c.torch_mesh, [Shard(0)])),
    "torch mesh zeros": (TypeError, lambda c: zeros(4, device_mesh=c.torch_mesh)),
    "torch mesh distribute_module": (
        TypeError,
        lambda c: distribute_module(nn.Linear(4, 4), c.torch_mesh),
    ),
    "torch mesh Spec": (TypeError, lambda c: Spec(c.torch_mesh, [Shard(0)], (4,))),
    "torch placement": (ValueError, lambda c: distribute_tensor(c.t, c.mesh, [c.torch_shard])),
    "torch placement redistribute": (
        ValueError,
        lambda c: c.x.redistribute(placements=[c.torch_replicate]),
    ),
    "torch placement from_local": (
        ValueError,
        lambda c: DTensor.from_local(c.t, c.mesh, [c.torch_shard]),
    ),
    "placement int": (ValueError, lambda c: distribute_tensor(c.t, c.mesh, [0])),
    "placement str": (ValueError, lambda c: distribute_tensor(c.t, c.mesh, ["x"])),
    "placements not a list": (TypeError, lambda c: distribute_tensor(c.t, c.mesh, Shard(0))),
    "placements int": (TypeError, lambda c: distribute_tensor(c.t, c.mesh, 3)),
    "placement class": (ValueError, lambda c: distribute_tensor(c.t, c.mesh, [Shard])),
    "too many": (ValueError, lambda c: distribute_tensor(c.t, c.mesh, [Shard(0), Replicate()])),
    "too few": (ValueError, lambda c: distribute_tensor(c.t, c.grid, [Shard(0)])),
    "dim out": (ValueError, lambda c: distribute_tensor(c.t, c.mesh, [Shard(7)])),
    "Shard str": (TypeError, lambda c: Shard("0")),
    "Shard float": (TypeError, lambda c: Shard(1.5)),
    "Partial unknown": (ValueError, lambda c: Partial("mode")),
    "Partial int": (TypeError, lambda c: Partial(3)),
    "redistribute none": (ValueError, lambda c: c.x.redistribute()),
    "redistribute mesh as placements": (ValueError, lambda c: c.x.redistribute([Replicate()])),
    "redistribute to partial": (
        ValueError,
        lambda c: c.x.redistribute(placements=[Partial("max")]),
    ),
    "from_local list": (TypeError, lambda c: DTensor.from_local([1.0], c.mesh, [Shard(0)])),
    "from_local dtensor": (TypeError, lambda c: DTensor.from_local(c.x, c.mesh, [Shard(0)])),
    "from_local shape str": (
        TypeError,
        lambda c: DTensor.from_local(c.t, c.mesh, [Shard(0)], shape="8"),
    ),
    "from_local wrong shape": (
        ValueError,
        lambda c: DTensor.from_local(c.t, c.mesh, [Shard(0)], shape=(9, 4)),
    ),
    "from_local grad_placements": (
        TypeError,
        lambda c: DTensor.from_local(
            c.t.clone().requires_grad_(), c.mesh, [Shard(0)], grad_placements=Shard(0)
        ),
    ),
    "to_local grad_placements": (
        ValueError,
        lambda c: c.x.detach().requires_grad_().to_local(grad_placements=["x"]),
    ),
    "distribute list": (ValueError, lambda c: distribute_tensor([1.0], c.mesh, [Shard(0)])),
    "distribute nonleaf": (
        ValueError,
        lambda c: distribute_tensor(torch.ones(8, 4, requires_grad=True) * 2, c.mesh, [Shard(0)]),
    ),
    "src rank": (ValueError, lambda c: distribute_tensor(c.t, c.mesh, [Shard(0)], src_data_rank=9)),
    "src rank str": (
        TypeError,
        lambda c: distribute_tensor(c.t, c.mesh, [Shard(0)], src_data_rank="0"),
    ),
    "module wrong": (TypeError, lambda c: distribute_module(c.t, c.mesh)),
    "module fn wrong": (
        TypeError,
        lambda c: distribute_module(nn.Linear(2, 2), c.mesh, partition_fn="x"),
    ),
    "zeros float": (TypeError, lambda c: zeros(4.5, device_mesh=c.mesh)),
    "zeros neg": (ValueError, lambda c: zeros(-4, device_mesh=c.mesh)),
    "zeros dtype": (TypeError, lambda c: zeros(4, dtype="float32", device_mesh=c.mesh)),
    "zeros kw": (TypeError, lambda c: zeros(4, device_mesh=c.mesh, placement=[Shard(0)])),
    "zeros no mesh": (ValueError, lambda c: zeros(4)),
    "full str": (TypeError, lambda c: full((4,), "a", device_mesh=c.mesh)),
    "explain str": (TypeError, lambda c: explain("a", "b")),
    "explain dst": (TypeError, lambda c: explain(c.x.spec, "b")),
    "local_map": (TypeError, lambda c: local_map(3, out_placements=[Shard(0)])),
    "local_map out": (TypeError, lambda c: local_map(lambda a: a, out_placements=3)(c.x)),
    "local_map out count": (
        ValueError,
        lambda c: local_map(lambda a: a, out_placements=([Shard(0)], [Shard(0)]))(c.x),
    ),
    "local_map in": (
        TypeError,
        lambda c: local_map(lambda a: a, out_placements=[Shard(0)], in_placements=3)(c.x),
    ),
    "local_step": (TypeError, lambda c: local_step(3)),
    "clip": (TypeError, lambda c: clip_grad_norm_(3, 1.0)),
    "unknown_ops": (ValueError, lambda c: unknown_ops("x").__enter__()),
    "communication": (ValueError, lambda c: communication(3).__enter__()),
    "register_rule op": (TypeError, lambda c: register_rule("aten.add", None)),
    "register_rule rule": (
        TypeError,
        lambda c: register_rule(torch.ops.aten.special_airy_ai.default, lambda c: [], replace=True),
    ),
    "register_sharding op": (TypeError, lambda c: register_sharding(3)(lambda x: [])),
    "spec with": (ValueError, lambda c: c.x.spec.with_(placements=["a"])),
    "Spec shape": (TypeError, lambda c: Spec(c.mesh, [Shard(0)], "ab")),
    "Spec shape float": (TypeError, lambda c: Spec(c.mesh, [Shard(0)], (1.5,))),
    "local_shard plain": (TypeError, lambda c: local_shard(c.t)),
    "manual_seed": (TypeError, lambda c: manual_seed("a", c.mesh)),
    "manual_seed mesh": (TypeError, lambda c: manual_seed(1, c.torch_mesh)),
    "visualize": (TypeError, lambda c: visualize_sharding(c.t)),
    "compute": (
        TypeError,
        lambda c: compute_local_shape_and_global_offset((4,), c.torch_mesh, [Shard(0)]),
    ),
    "matmul": (RuntimeError, lambda c: c.x @ c.x),
    "add shapes": (
        RuntimeError,
        lambda c: c.x + distribute_tensor(torch.ones(3), c.mesh, [Replicate()], src_data_rank=None),
    ),
    "cat": (
        RuntimeError,
        lambda c: torch.cat(
            [c.x, distribute_tensor(torch.ones(3, 3), c.mesh, [Replicate()], src_data_rank=None)]
        ),
    ),
    "dim": (IndexError, lambda c: c.x.sum(7)),
    "from_torch plain": (TypeError, lambda c: interop.from_torch(c.t)),
    "to_torch plain": (TypeError, lambda c: interop.to_torch(c.t)),
    "mesh_to_torch": (TypeError, lambda c: interop.mesh_to_torch(3)),
    "mesh_from_torch": (TypeError, lambda c: interop.mesh_from_torch(c.mesh)),
    "data": (ValueError, lambda c: setattr(c.x, "data", c.t)),
    "shard_order": (
        TypeError,
        lambda c: DTensor.from_local(c.t, c.grid, [Shard(0), Shard(0)], shard_order=3),
    ),
    "forward_dtype": (
        TypeError,
        lambda c: c.x.redistribute(placements=[Replicate()], forward_dtype="f32"),
    ),
    "PartitionSpec axis": (
        (KeyError, ValueError),
        lambda c: distribute_tensor(c.t, c.mesh, PartitionSpec("nope")),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_a_typed_error(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, call = WRONG[name]
    with fake_world(4), caplog.at_level(logging.ERROR):
        with pytest.raises((ShoalTensorError, MeshError)) as raised:
            call(given())
        assert isinstance(raised.value, kind)
        assert (
            "torch mesh" not in name
            or "mesh_from_torch" in str(raised.value)
            or "torch's own" in str(raised.value)
        )
    assert caplog.records == []


def test_an_operator_names_itself_and_its_specs() -> None:
    with (
        fake_world(4),
        pytest.raises(RuntimeError, match=r"aten\.mm\.default\(Spec\(f32\[8@\(tp\), 4\]"),
    ):
        c = given()
        c.x @ c.x


KEYWORDS: dict[str, tuple[Callable[..., object], dict[str, Any], str]] = {
    "distribute": (distribute_tensor, {"placement": [Shard(0)]}, "placements"),
    "factory": (zeros, {"placement": [Shard(0)]}, "placements"),
    "local function": (local_map, {"out_placement": [Shard(0)]}, "out_placements"),
    "norm": (clip_grad_norm_, {"norm_typ": 1.0}, "norm_type"),
    "random numbers": (manual_seed, {"sead": 3}, "seed"),
    "block": (random_mode, {"mod": "local"}, "mode"),
    "state dict": (get_state_dict, {"option": None}, "options"),
    "checkpoint": (Checkpointer, {"keeps": 3}, "keep"),
    "picture": (visualize_sharding, {"headers": ""}, "header"),
}


@pytest.mark.parametrize("call", KEYWORDS)
def test_an_unknown_keyword_is_named_with_a_similar_one(call: str) -> None:
    function, keywords, similar = KEYWORDS[call]
    (wrong,) = keywords
    message = rf"keyword (argument )?'{wrong}'; did you mean '{similar}'\?; (it takes|allowed are) "
    with pytest.raises(ArgumentTypeError, match=message):
        function(**keywords)
