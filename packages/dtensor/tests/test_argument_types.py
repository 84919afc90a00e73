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


def identity(x: Any) -> Any:
    return x


def no_rows(call: Any) -> list[Any]:
    return []


Call = Callable[[Given], object]


def from_local_with_one_gradient_placement(c: Given) -> object:
    return DTensor.from_local(
        c.t.clone().requires_grad_(), c.mesh, [Shard(0)], grad_placements=Shard(0)
    )


def local_map_to_a_number(c: Given) -> object:
    return local_map(identity, out_placements=3)(c.x)


def local_map_with_a_number(c: Given) -> object:
    return local_map(identity, out_placements=[Shard(0)], in_placements=3)(c.x)


def register_a_rule_without_call(c: Given) -> object:
    return register_rule(torch.ops.aten.special_airy_ai.default, no_rows, replace=True)


def register_sharding_of_a_number(c: Given) -> object:
    return register_sharding(3)(no_rows)


TYPE_ERRORS: dict[str, Call] = {
    "mesh str": lambda c: distribute_tensor(c.t, "cpu", [Shard(0)]),
    "mesh tuple": lambda c: distribute_tensor(c.t, (4,), [Shard(0)]),
    "torch mesh": lambda c: distribute_tensor(c.t, c.torch_mesh, [Shard(0)]),
    "torch mesh from_local": lambda c: DTensor.from_local(c.t, c.torch_mesh, [Shard(0)]),
    "torch mesh redistribute": lambda c: c.x.redistribute(c.torch_mesh, [Shard(0)]),
    "torch mesh zeros": lambda c: zeros(4, device_mesh=c.torch_mesh),
    "torch mesh distribute_module": lambda c: distribute_module(nn.Linear(4, 4), c.torch_mesh),
    "torch mesh Spec": lambda c: Spec(c.torch_mesh, [Shard(0)], (4,)),
    "placements not a list": lambda c: distribute_tensor(c.t, c.mesh, Shard(0)),
    "placements int": lambda c: distribute_tensor(c.t, c.mesh, 3),
    "Shard str": lambda c: Shard("0"),
    "Shard float": lambda c: Shard(1.5),
    "Partial int": lambda c: Partial(3),
    "from_local list": lambda c: DTensor.from_local([1.0], c.mesh, [Shard(0)]),
    "from_local dtensor": lambda c: DTensor.from_local(c.x, c.mesh, [Shard(0)]),
    "from_local shape str": lambda c: DTensor.from_local(c.t, c.mesh, [Shard(0)], shape="8"),
    "from_local grad_placements": from_local_with_one_gradient_placement,
    "src rank str": lambda c: distribute_tensor(c.t, c.mesh, [Shard(0)], src_data_rank="0"),
    "module wrong": lambda c: distribute_module(c.t, c.mesh),
    "module fn wrong": lambda c: distribute_module(nn.Linear(2, 2), c.mesh, partition_fn="x"),
    "zeros float": lambda c: zeros(4.5, device_mesh=c.mesh),
    "zeros dtype": lambda c: zeros(4, dtype="float32", device_mesh=c.mesh),
    "zeros kw": lambda c: zeros(4, device_mesh=c.mesh, placement=[Shard(0)]),
    "full str": lambda c: full((4,), "a", device_mesh=c.mesh),
    "explain str": lambda c: explain("a", "b"),
    "explain dst": lambda c: explain(c.x.spec, "b"),
    "local_map": lambda c: local_map(3, out_placements=[Shard(0)]),
    "local_map out": local_map_to_a_number,
    "local_map in": local_map_with_a_number,
    "local_step": lambda c: local_step(3),
    "clip": lambda c: clip_grad_norm_(3, 1.0),
    "register_rule op": lambda c: register_rule("aten.add", None),
    "register_rule rule": register_a_rule_without_call,
    "register_sharding op": register_sharding_of_a_number,
    "Spec shape": lambda c: Spec(c.mesh, [Shard(0)], "ab"),
    "Spec shape float": lambda c: Spec(c.mesh, [Shard(0)], (1.5,)),
    "local_shard plain": lambda c: local_shard(c.t),
    "manual_seed": lambda c: manual_seed("a", c.mesh),
    "manual_seed mesh": lambda c: manual_seed(1, c.torch_mesh),
    "visualize": lambda c: visualize_sharding(c.t),
    "compute": lambda c: compute_local_shape_and_global_offset((4,), c.torch_mesh, [Shard(0)]),
    "from_torch plain": lambda c: interop.from_torch(c.t),
    "to_torch plain": lambda c: interop.to_torch(c.t),
    "mesh_to_torch": lambda c: interop.mesh_to_torch(3),
    "mesh_from_torch": lambda c: interop.mesh_from_torch(c.mesh),
    "shard_order": lambda c: DTensor.from_local(c.t, c.grid, [Shard(0), Shard(0)], shard_order=3),
    "forward_dtype": lambda c: c.x.redistribute(placements=[Replicate()], forward_dtype="f32"),
}


def to_local_with_a_word(c: Given) -> object:
    return c.x.detach().requires_grad_().to_local(grad_placements=["x"])


def distribute_an_activation(c: Given) -> object:
    return distribute_tensor(torch.ones(8, 4, requires_grad=True) * 2, c.mesh, [Shard(0)])


def local_map_with_two_outputs(c: Given) -> object:
    return local_map(identity, out_placements=([Shard(0)], [Shard(0)]))(c.x)


VALUE_ERRORS: dict[str, Call] = {
    "torch placement": lambda c: distribute_tensor(c.t, c.mesh, [c.torch_shard]),
    "torch placement redistribute": lambda c: c.x.redistribute(placements=[c.torch_replicate]),
    "torch placement from_local": lambda c: DTensor.from_local(c.t, c.mesh, [c.torch_shard]),
    "placement int": lambda c: distribute_tensor(c.t, c.mesh, [0]),
    "placement str": lambda c: distribute_tensor(c.t, c.mesh, ["x"]),
    "placement class": lambda c: distribute_tensor(c.t, c.mesh, [Shard]),
    "too many": lambda c: distribute_tensor(c.t, c.mesh, [Shard(0), Replicate()]),
    "too few": lambda c: distribute_tensor(c.t, c.grid, [Shard(0)]),
    "dim out": lambda c: distribute_tensor(c.t, c.mesh, [Shard(7)]),
    "Partial unknown": lambda c: Partial("mode"),
    "redistribute none": lambda c: c.x.redistribute(),
    "redistribute mesh as placements": lambda c: c.x.redistribute([Replicate()]),
    "redistribute to partial": lambda c: c.x.redistribute(placements=[Partial("max")]),
    "from_local wrong shape": lambda c: DTensor.from_local(c.t, c.mesh, [Shard(0)], shape=(9, 4)),
    "to_local grad_placements": to_local_with_a_word,
    "distribute list": lambda c: distribute_tensor([1.0], c.mesh, [Shard(0)]),
    "distribute nonleaf": distribute_an_activation,
    "src rank": lambda c: distribute_tensor(c.t, c.mesh, [Shard(0)], src_data_rank=9),
    "zeros neg": lambda c: zeros(-4, device_mesh=c.mesh),
    "zeros no mesh": lambda c: zeros(4),
    "local_map out count": local_map_with_two_outputs,
    "unknown_ops": lambda c: unknown_ops("x").__enter__(),
    "communication": lambda c: communication(3).__enter__(),
    "spec with": lambda c: c.x.spec.with_(placements=["a"]),
    "data": lambda c: setattr(c.x, "data", c.t),
}


def add_of_another_shape(c: Given) -> object:
    return c.x + distribute_tensor(torch.ones(3), c.mesh, [Replicate()], src_data_rank=None)


def cat_of_another_shape(c: Given) -> object:
    return torch.cat(
        [c.x, distribute_tensor(torch.ones(3, 3), c.mesh, [Replicate()], src_data_rank=None)]
    )


OTHER_ERRORS: dict[str, tuple[Any, Call]] = {
    "matmul": (RuntimeError, lambda c: c.x @ c.x),
    "add shapes": (
        RuntimeError,
        add_of_another_shape,
    ),
    "cat": (
        RuntimeError,
        cat_of_another_shape,
    ),
    "dim": (IndexError, lambda c: c.x.sum(7)),
    "PartitionSpec axis": (
        (KeyError, ValueError),
        lambda c: distribute_tensor(c.t, c.mesh, PartitionSpec("nope")),
    ),
}
WRONG: dict[str, tuple[Any, Call]] = {
    **{name: (TypeError, call) for name, call in TYPE_ERRORS.items()},
    **{name: (ValueError, call) for name, call in VALUE_ERRORS.items()},
    **OTHER_ERRORS,
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
