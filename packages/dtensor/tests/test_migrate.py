"""Covers: migrate.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal_dtensor.migrate import main, migrate

REWRITTEN = {
    "from torch.distributed.device_mesh import init_device_mesh\n": (
        "from shoal_mesh import init_device_mesh\n"
    ),
    "from torch.distributed._tensor import DTensor as D, Shard  # why\n": (
        "from shoal_dtensor import DTensor as D, Shard  # why\n"
    ),
    "from torch.distributed.tensor import (\n    DTensor,  # one\n    Shard,\n)\nx = 1\n": (
        "from shoal_dtensor import DTensor, Shard  # one\nx = 1\n"
    ),
    "from torch.distributed import DeviceMesh, all_reduce\n": (
        "from torch.distributed import all_reduce\nfrom shoal_mesh import DeviceMesh\n"
    ),
    "def f():\n    from torch.distributed.tensor.debug import CommDebugMode\n": (
        "def f():\n    from shoal_mesh import CommDebugMode\n"
    ),
    "import torch\nm = torch.distributed.device_mesh.init_device_mesh('cpu', (2,))\n": (
        "import shoal_mesh\nimport torch\nm = shoal_mesh.init_device_mesh('cpu', (2,))\n"
    ),
    "import torch.distributed as dist\n"
    "m = dist.init_device_mesh('é', (2,)); dist.all_reduce(m)\n": (
        "import shoal_mesh\nimport torch.distributed as dist\n"
        "m = shoal_mesh.init_device_mesh('é', (2,)); dist.all_reduce(m)\n"
    ),
    "import torch.distributed.tensor as dt\nx = [dt.Shard(0), dt.Replicate()]\n": (
        "import shoal_dtensor\nimport torch.distributed.tensor as dt\n"
        "x = [shoal_dtensor.Shard(0), shoal_dtensor.Replicate()]\n"
    ),
    # no name of a module, though one is called so
    "import torch.distributed.tensor as dt\nx = dt.DTensor.full\n": (
        "import shoal_dtensor\nimport torch.distributed.tensor as dt\nx = "
        "shoal_dtensor.DTensor.full\n"
    ),
    "from torch.distributed.checkpoint.state_dict "
    "import StateDictOptions, get_model_state_dict\n": (
        "from torch.distributed.checkpoint.state_dict import StateDictOptions\n"
        "from shoal_dtensor import get_model_state_dict\n"
    ),
    "from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info\n": (
        "from shoal_data_parallel import mesh_info as _get_mesh_info\n"
    ),
    "from torch.distributed.tensor.experimental._attention import _context_parallel_shard\n": (
        "from shoal_context_parallel import context_parallel_shard as _context_parallel_shard\n"
    ),
    "from torch.distributed.tensor.experimental._context_parallel "
    "import _HeadTailLoadBalancer as H\n": (
        "from shoal_context_parallel import head_tail_layout as H\n"
    ),
    "import torch.distributed.fsdp._fully_shard._fsdp_init as init\ninit._get_mesh_info(m)\n": (
        "import shoal_data_parallel\nimport torch.distributed.fsdp._fully_shard._fsdp_init as "
        "init\nshoal_data_parallel.mesh_info(m)\n"
    ),
}
COLLECTIVES = """
import torch.distributed._functional_collectives as funcol

def total(x, group, mesh: "DeviceMesh | None", *, world: DeviceMesh):
    def inner():
        return funcol.all_gather_tensor(x, 0, (mesh, 1))
    other(x, group=mesh)
    return (
        funcol.all_reduce(x, "sum", group=mesh), funcol.broadcast(x, 0, world), funcol.wait(group)
    )
"""
# whole imports of the package of types, if the package that takes its place is installed
TYPES = {
    "import spmd_types as spmd  # why\nspmd.S(0)\n": (
        "import shoal_spmd_types as spmd  # why\nspmd.S(0)\n"
    ),
    "import spmd_types\n": "import shoal_spmd_types as spmd_types\n",
    "import os, spmd_types.types, spmd_types.runtime as run\n": (
        "import os, shoal_spmd_types as spmd_types, shoal_spmd_types.types, "
        "shoal_spmd_types.runtime as run\n"
    ),
    "from spmd_types.checker import typecheck as check\n": (
        "from shoal_spmd_types import typecheck as check\n"
    ),
}


@pytest.mark.parametrize("old", REWRITTEN)
def test_imports_and_dotted_names_are_rewritten(old: str) -> None:
    new = migrate(old)
    assert new.text == REWRITTEN[old] and not new.left
    assert migrate(new.text).text == new.text


def test_functional_collectives_take_the_groups_of_meshes() -> None:
    found = migrate(COLLECTIVES)
    assert not found.left
    expected = COLLECTIVES.replace("(mesh, 1)", "mesh.get_group(1)")
    expected = expected.replace('"sum", group=mesh', '"sum", group=mesh.get_group()')
    assert found.text == expected.replace("x, 0, world", "x, 0, world.get_group()")


@pytest.mark.parametrize("old", TYPES)
def test_imports_of_types_are_rewritten(old: str) -> None:
    found = migrate(old)
    if find_spec("shoal_spmd_types") is None:  # where this layer is tested alone
        assert found.text == old
        assert "shoal_spmd_types" in found.left[0][1]
        return
    assert found == (TYPES[old], [])
    lacking = migrate("import spmd_types as spmd\nspmd.nonsense(x)\n")
    assert lacking.text.startswith("import shoal_spmd_types as spmd")
    assert lacking.left == [(2, "spmd_types.nonsense: no package of shoal has this name")]


@pytest.mark.parametrize(
    "same",
    [
        "import torch\nimport torch.distributed as dist\ndist.all_gather(x, y)\n",
        "from torch.distributed import all_reduce, broadcast\n",
        "from torch.distributed.checkpoint import save\n",
        "from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper\n",
        "from .tensor import DTensor\n",
    ],
)
def test_what_is_torchs_stays(same: str) -> None:
    assert migrate(same).text == same and not migrate(same).left


def test_methods_of_sharded_modules_that_are_refused_are_listed() -> None:
    found = migrate("model.set_symm_mem_for_comm()\nmodel.set_requires_all_reduce(False)\n")
    assert found.left == [
        (
            1,
            "set_symm_mem_for_comm: shoal gathers without buffers: leave it out, or "
            "set_custom_all_gather",
        )
    ]


def test_what_it_cannot_decide_is_listed_by_line() -> None:
    found = migrate(
        "from torch.distributed.tensor._ops.utils import register_prop_rule\n"
        "x = 1; from torch.distributed.tensor import DTensor\n"
        "DTensor._op_dispatcher.sharding_propagator\n"
        "import torch.distributed.tensor as dt\n"
        "dt.DTensor_.x; dt.placement_types\n"
        "from torch.distributed.tensor import parallel as par\n"
        "par.ddp._pre_dp_module_transform(m)\n"
    )
    assert [line for line, _ in found.left] == [1, 2, 3, 5, 7]
    absent = find_spec("shoal_tp_styles") is None  # where this layer is tested alone
    of_styles = (
        ["shoal_tp_styles, which is not installed"] * 2
        if absent
        else ["DTensor_: no package", "replicate(module"]
    )
    ways = ["register_rule", "that shares a line with other", "register_rule", *of_styles]
    assert all(way in text for way, (_, text) in zip(ways, found.left, strict=True))
    assert found.text.count("shoal") == 0


def test_the_command_prints_a_difference_or_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, broken = tmp_path / "train.py", tmp_path / "old.py"
    file.write_text("from torch.distributed.tensor import DTensor, nonsense\n")
    broken.write_text("print 'two'\n")
    assert main([str(file)]) == 0
    shown = capsys.readouterr().out
    assert (
        "+from shoal_dtensor import DTensor" in shown
        and "1: torch.distributed.tensor.nonsense" in shown
    )
    assert (
        shown.endswith("2 lines would change, 1 to change by hand\n")
        and "shoal" not in file.read_text()
    )
    assert main([str(tmp_path), "--write"]) == 1
    assert "2 lines written, 1 to change by hand" in capsys.readouterr().out
    assert file.read_text() == (
        "from torch.distributed.tensor import nonsense\nfrom shoal_dtensor import DTensor\n"
    )
