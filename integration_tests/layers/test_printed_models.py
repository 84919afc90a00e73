"""Styles and data axes in the `repr` of a model.

Covers: shoal_tp_styles/lowering/lowered.py, shoal_dtensor/modules/forwards.py.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

from torch import nn

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import Replicate
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import ColwiseParallel, HeadParallel, parallelize_module, unparallelize_module


def test_a_printed_model_shows_its_styles() -> None:
    with fake_world(4):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.MultiheadAttention(8, 4))
        plain = repr(model)
        styles: Any = {"0": ColwiseParallel(output_layouts=Replicate()), "2": HeadParallel()}
        parallelize_module(model, grid["tp"], styles)
        fully_shard(model[0], grid["data"])
        shown = repr(model)
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert repr(one) == shown
        assert "Attention(\n    HeadParallel on tp\n" in shown
        assert (
            "Linear(in_features=4, out_features=8, bias=True, fully_shard, ColwiseParallel on tp)"
            in shown
        )
        assert "Dropout(p=0.1, inplace=False)" in shown
        replicated = replicate(nn.Sequential(nn.Linear(4, 8)), grid["data"], src_data_rank=None)
        assert repr(replicated).startswith("Sequential(\n  replicate\n")
        again = parallelize_module(nn.Sequential(nn.Linear(4, 8)), grid["tp"], {"0": "colwise"})
        assert "colwise" not in repr(unparallelize_module(again)).lower() and "on tp" not in plain
