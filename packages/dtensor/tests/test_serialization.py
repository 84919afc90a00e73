"""Covers: tensor/serialization.py: contents of files are checked; checkpoints of several boxes."""

from __future__ import annotations

import base64
import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_tensor,
    safe_globals,
)
from shoal_dtensor.errors import ArgumentValueError, PlacementError
from shoal_dtensor.tensor.serialization import rebuild
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks


class Forged:
    """What pickles as a DTensor of other parts than one has."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return rebuild, self.arguments


def _loaded(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    with torch.serialization.safe_globals(safe_globals()):
        return torch.load(file, weights_only=True)


def test_a_tensor_comes_back_with_its_attributes() -> None:
    with fake_world(2):
        x = distribute_tensor(
            torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        x.note = "mine"  # type: ignore[attr-defined]  # set by a user
        loaded = _loaded({"x": x})["x"]
        assert loaded.spec == x.spec
        assert loaded.note == "mine"


@pytest.mark.parametrize(
    ("local", "attributes", "error"),
    [
        (torch.ones(99), {}, PlacementError),
        (torch.ones(4, 4), {}, PlacementError),
        (torch.ones(2, 4, dtype=torch.float64), {}, PlacementError),
        (torch.ones(2, 4), {"redistribute": "hidden"}, ArgumentValueError),
        (torch.ones(2, 4), {"_spec": "hidden"}, ArgumentValueError),
        (torch.ones(2, 4), {"shape": "hidden"}, ArgumentValueError),
    ],
)
def test_what_does_not_fit_is_not_built(
    local: torch.Tensor, attributes: dict[str, Any], error: type[Exception]
) -> None:
    with fake_world(2):
        x = distribute_tensor(
            torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        with pytest.raises(error, match=r"DTensor (from|of) a file"):
            _loaded(Forged(DTensor, local, x.spec, False, attributes, (0,)))


@on_ranks(4)
def test_a_file_of_another_rank_is_refused_and_one_of_a_replica_is_not() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Replicate()], [Replicate(), Partial()]):
        x = DTensor.from_local(torch.ones(2, 3), mesh, placements)
        file = io.BytesIO()
        torch.save(x, file)
        sent: list[Any] = [file.getvalue()]
        dist.broadcast_object_list(sent)
        file = io.BytesIO(sent[0])
        axis = placements.index(Replicate())
        if mesh.get_local_rank(1 - axis) == 0:
            loaded = torch.load(file, weights_only=False)
            assert (loaded.spec, loaded.to_local().tolist()) == (x.spec, x.to_local().tolist())
        else:
            with pytest.raises(PlacementError, match="each rank must load the file that it saved"):
                torch.load(file, weights_only=False)


STRIDED: dict[str, list[Placement]] = {
    "even": [StridedShard(0, split_factor=3, sizes=(2, 2)), Replicate()],
    "uneven": [Replicate(), StridedShard(0, split_factor=3, sizes=(3, 1))],
    "empty": [StridedShard(0, split_factor=3, sizes=(4, 0)), Shard(1)],
    "nested": [
        StridedShard(0, split_factor=3, sizes=(3, 1)),
        StridedShard(0, split_factor=3, sizes=(2, 1, 1, 0)),
    ],
    "two dims": [
        StridedShard(0, split_factor=3, sizes=(3, 1)),
        StridedShard(1, split_factor=2, sizes=(1, 2)),
    ],
}


@on_ranks(4)
@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_strided_shards_are_saved_by_runs(kind: str, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(72.0).view(12, 6)
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)
    strided = distribute_tensor(full, mesh, STRIDED[kind])
    dcp.save({"x": strided}, checkpoint_id=paths[0])
    for placements in ([Shard(1), Shard(0)], STRIDED["nested"], STRIDED[kind], [Replicate()] * 2):
        loaded = distribute_tensor(torch.zeros(12, 6), mesh, placements)
        dcp.load({"x": loaded}, checkpoint_id=paths[0])
        torch.testing.assert_close(loaded.full_tensor(), full)
    with pytest.raises(PlacementError, match="does not match a box"):
        strided.__get_tensor_shard__(dcp.metadata.MetadataIndex("x", torch.Size((1, 5))))
    partial = DTensor.from_local(full, mesh, [Partial(), Replicate()])
    with pytest.raises(PlacementError, match="a checkpoint cannot hold"):
        partial.__create_chunk_list__()


@on_ranks(4)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_checkpoint_has_every_shard_of_a_local_shards_wrapper(tmp_path: Path) -> None:
    # the only thing of torch's that is taken
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    mesh, row = init_device_mesh("cpu", (4,)), 2 * dist.get_rank()
    full = torch.arange(64.0).view(8, 8)
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)

    def held(value: torch.Tensor) -> DTensor:
        parts = [value[row : row + 2, :3].contiguous(), value[row : row + 2, 3:].contiguous()]
        wrapper = LocalShardsWrapper(parts, [(row, 0), (row, 3)])
        return DTensor.from_local(
            wrapper, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 8)), stride=(8, 1)
        )

    dcp.save({"x": held(full)}, checkpoint_id=paths[0])
    loaded = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)])
    dcp.load({"x": loaded}, checkpoint_id=paths[0])
    torch.testing.assert_close(loaded.full_tensor(), full)
    again = held(torch.zeros(8, 8))
    dcp.load({"x": again}, checkpoint_id=paths[0])
    shards: Any = again.to_local()
    torch.testing.assert_close(torch.cat(shards.local_shards(), 1), full[row : row + 2])


# The specs of the test below, pickled on 25 November 2026.
EARLIER = (
    "c-oDU*;CX&5XO@QR*feLilX9e)?>X8Z&6S@0ucv~c*Hfw;G_tfe3@AbAE?rY3I5s6Y*<T6OL>_|cXjvo^>6aE=EJZf&a"
    "xnF#e%kZRy5P#OV$xhp3}%$&<D(3$ui}v**#+VIf-aDVHGs&Bxzg)sQpn}1ns3(HPxC^iJ63^F}Kjy_=bKT1Gd*^7)F$"
    "LQ2%G|Y;|Fi>f5}EEw<OM`hpe8VL3IYR${BfHuYte*e<c7#7?iSDze2zP6c*3MmJ0oE@+HF*Bej~XF*P}yXxQ52|ZKK#"
    "8CGRF<fHruckf~StsYsyvQQTd8-PosUTXS?Rc7H3W|k&%HW8P{kH3RYKnmaG-NtC>f@kFG8LCN<hnF;zpvpi!Pwv5AWw"
    "scF4MN)R!bQzVhcwc!*$Fx93?pR-zGxyG>HPCJRNTkoG5Y9sY{%4Oo`Kx$cl(rNn1>eTd*C&F(eu#&PbdUI7e`vnKr92"
    "{Y*_C7i?B%8vVspT(X%}alR~ZMPi&OxNOj6ilfBUPRNEOCfKONHN7MoQ(ImqxWSZrr(cu4sdu<Va9iSzwscopnq=!P?v"
    "=PNF(oif@IbrR2p>@-F^zki9;!)wj;TG)tl<&CW2V-BqP3oCEvKh7TVhVa6?jH4zcH=(pb$xrT6o_5bC-h^5QznX7h2<"
    "`)_A2gUNgHP;1Rr8$N1LAyB@~(tMDs~3daYDmc+;3Fa`?akVMEvB%+@fV**N>KLBKiID`"
)


def test_specs_of_earlier_files_are_read() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        layouts: list[tuple[DeviceMesh, list[Placement]]] = [
            (mesh, [Shard(0), Replicate()]),
            (mesh["b"], [Shard(0, sizes=(4, 2))]),
            (mesh, [StridedShard(0, split_factor=3), Replicate()]),
            (mesh, [Partial("max"), Replicate()]),
        ]
        *specs, along_a = pickle.loads(zlib.decompress(base64.b85decode(EARLIER)))
        assert specs == [
            Spec(on, placements, (6,), dtype=torch.int64) for on, placements in layouts
        ]
        assert along_a == mesh["a"]
