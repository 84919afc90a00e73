"""Checkpoints on real ranks: other layouts and numbers of ranks, padded, broken.

Covers: checkpoint.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharded_modules import FULL, model, save_model
from sharding_cases import bricks, chunk
from shoal_mesh.testing import rank_pool
from shoal_shard_api import ShardedOptimizer, zeros
from shoal_shard_api.checkpoint import load
from shoal_shard_api.errors import CheckpointError

# torch's own, on saving
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


BRICKS = bricks(10, 6, 4)


def load_model(where: str, spec: Any) -> None:
    module = model(spec)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    optimizer = ShardedOptimizer(dict(module.named_parameters()), torch.optim.AdamW)
    (module.weight * 0).full_tensor().sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()["state"], "step": 0}
    loaded = load(state, where)
    assert loaded["step"] == 7
    assert torch.equal(module.weight.detach(), FULL)
    assert module.bias.abs().sum() > 0
    moment: Any = optimizer.state_dict()["state"]["weight"]["exp_avg"]
    torch.testing.assert_close(moment.full_tensor(), torch.full((10, 6), 0.2))


@pytest.mark.parametrize(
    "there", [chunk(0, (1, 0)), chunk(1, (0, 1)), None], ids=["rows", "columns", "4 ranks, bricks"]
)
def test_onto_another_number_of_ranks_and_another_layout(there: Any, tmp_path: Path) -> None:
    rank_pool(4).run(save_model, str(tmp_path / "saved"), BRICKS if there is not None else chunk(0))
    if there is None:
        rank_pool(4).run(load_model, str(tmp_path / "saved"), BRICKS)
    else:
        rank_pool(2).run(load_model, str(tmp_path / "saved"), there)


def load_padded(where: str) -> None:
    for padding in (None, 0.0, -1.0):
        module = model(chunk(0), width=13)
        before = module.weight.detach().full_tensor()
        load(
            {"model": {"weight": module.weight.detach()}},
            where,
            allow_shape_mismatch=["model.w*"],
            padding=padding,
        )
        after = module.weight.detach().full_tensor()
        assert torch.equal(after[:10], FULL)
        assert torch.equal(
            after[10:], before[10:] if padding is None else torch.full((3, 6), padding)
        )
    smaller = {"model": {"weight": zeros(chunk(1), 7, 6)}}
    load(smaller, where, allow_shape_mismatch=["*"])
    assert torch.equal(smaller["model"]["weight"], FULL[:7])


def refuse(where: str, shape: tuple[int, ...], name: str, text: str) -> None:
    weight = zeros(chunk(0), *shape)
    bias = torch.full((10,), 5.0)
    with pytest.raises(CheckpointError, match=text) as raised:
        load({"model": {name: weight, "bias": bias}}, where)
    assert torch.equal(weight, torch.zeros(shape))
    assert torch.equal(bias, torch.full((10,), 5.0))
    messages: list[Any] = [None] * 4
    dist.all_gather_object(messages, str(raised.value))
    assert len(set(messages)) == 1


def test_sizes_that_differ(tmp_path: Path) -> None:
    where = str(tmp_path / "saved")
    rank_pool(4).run(save_model, where, chunk(0))
    rank_pool(4).run(load_padded, where)
    rank_pool(4).run(
        refuse,
        where,
        (13, 6),
        "weight",
        r"model.weight has size \(10, 6\), but the state dict has \(13, 6\); pass allow_shape",
    )
    rank_pool(4).run(refuse, where, (10,), "weight", "the number of dims must be the same")
    rank_pool(4).run(
        refuse,
        where,
        (10, 6),
        "wight",
        r"does not contain \['model.wight'\]; it contains .*'model.weight'",
    )


def test_broken_checkpoints_leave_everything_as_it_was(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    rank_pool(4).run(save_model, str(where), chunk(0))
    rank_pool(4).run(
        refuse, str(tmp_path / "nothing"), (10, 6), "weight", "no readable checkpoint at .*nothing"
    )
    for number, name in enumerate(sorted(path.name for path in where.iterdir())):
        broken = tmp_path / f"broken{number}"
        shutil.copytree(where, broken)
        data = (broken / name).read_bytes()
        (broken / name).write_bytes(data[:20])
        rank_pool(4).run(
            refuse,
            str(broken),
            (10, 6),
            "weight",
            "no readable checkpoint|cannot be read; nothing was changed",
        )
        if name.endswith(".distcp"):
            (broken / name).unlink()
            rank_pool(4).run(
                refuse, str(broken), (10, 6), "weight", "cannot be read; nothing was changed"
            )


IMPORT = """
import sys
from shoal_shard_api import zeros
sys.exit("torch.distributed.checkpoint.planner" in sys.modules)
"""


def test_importing_the_package_does_not_import_torchs_checkpoints() -> None:
    assert subprocess.run([sys.executable, "-c", IMPORT], check=False).returncode == 0


def stage_in_every_way(where: str) -> None:
    from torch.distributed import _state_dict_utils as helpers, checkpoint as dcp
    from torch.distributed.checkpoint.staging import (
        BlockingAsyncStager,
        DefaultStager,
        StagingOptions,
    )

    off = StagingOptions(*[False] * 4)
    for number, stager in enumerate((None, DefaultStager(off), BlockingAsyncStager())):
        module = model(chunk(0, (0, 1)))
        with torch.no_grad():
            module.weight.copy_(FULL)
        saved = dcp.async_save(
            module.state_dict(), checkpoint_id=f"{where}/{number}", async_stager=stager
        )
        with torch.no_grad():
            module.weight.zero_()
        future: Any = getattr(saved, "upload_completion", saved)
        future.result()
        dcp.load(module.state_dict(), checkpoint_id=f"{where}/{number}")
        assert torch.equal(module.weight.detach().full_tensor(), FULL)
    gathered = helpers._gather_state_dict({"weight": module.weight})["weight"]
    assert type(gathered) is torch.Tensor
    assert torch.equal(gathered, FULL)


def test_torchs_stagers_copy_the_shards(tmp_path: Path) -> None:
    # they asked for the data pointer, which is refused
    rank_pool(2).run(stage_in_every_way, str(tmp_path))
