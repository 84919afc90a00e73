"""Models on the meta device, filled from files.  Covers: weights/loading.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import DTensor, Replicate
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import load_sharded
from shoal_tp_styles import (
    ColwiseParallel,
    Heads,
    PackedColwiseParallel,
    PlanError,
    RowwiseParallel,
    parallelize_module,
)
from small_gpt import Gpt, gpt_plan

needs_safetensors = pytest.mark.skipif(
    find_spec("safetensors") is None, reason="safetensors is not installed"
)


@needs_safetensors
@on_ranks(4)
@pytest.mark.parametrize("tied", [True, False])
def test_meta_model_from_two_files(tmp_path: Path, tied: bool) -> None:
    from safetensors.torch import save_file

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    single: Any = Gpt(dropout=0.0, vocab_size=10, tied=tied)
    state = {
        name: value
        for name, value in single.state_dict().items()
        if not (tied and name == "output.weight")
    }
    names = sorted(state)
    paths = [tmp_path / f"{rank}-{part}.safetensors" for part in (0, 1)]
    for part, path in enumerate(paths):
        save_file({name: state[name].contiguous() for name in names[part::2]}, path)
    with torch.device("meta"):
        module = Gpt(dropout=0.0, vocab_size=10, tied=tied)
    parallelize_module(module, all_ranks(), gpt_plan())
    with CommDebugMode() as mode:
        loaded = load_sharded(module, paths)
    assert mode.get_total_counts() == 0
    assert not loaded.missing and not loaded.unexpected
    total = sum(value.numel() * 4 for value in state.values())
    assert loaded.bytes_read < 0.45 * total
    assert (module.output.weight is module.tok_embeddings.weight) is tied
    tokens = torch.randint(10, (2, 6))
    torch.testing.assert_close(module(tokens), single(tokens))
    assert isinstance(module.output.weight, DTensor) and module.output.weight.requires_grad


class CountingFile:
    """A safetensors file that counts the bytes of what it returns."""

    def __init__(self, file: Any, counted: list[int]) -> None:
        self.file = file
        self.counted = counted

    def __enter__(self) -> CountingFile:
        self.file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def keys(self) -> Any:
        return self.file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_tensor(name)
        self.counted.append(tensor.nbytes)
        return tensor

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self.file.get_slice(name), self.counted)


class CountingSlice:
    """A tensor of a file that counts the bytes of the parts that are read."""

    def __init__(self, part: Any, counted: list[int]) -> None:
        self.part = part
        self.counted = counted

    def get_shape(self) -> Any:
        return self.part.get_shape()

    def __getitem__(self, slices: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.part[slices]
        self.counted.append(tensor.nbytes)
        return tensor


@needs_safetensors
@on_ranks(4)
def test_a_rank_takes_only_its_shards_from_the_files(tmp_path: Path) -> None:
    # Reading every tensor whole on every rank, and slicing it then, was not seen by `bytes_read`.
    import safetensors
    from safetensors.torch import save_file

    torch.manual_seed(0)
    single: Any = Gpt(dropout=0.0, vocab_size=12, tied=False)
    state = {name: value.contiguous() for name, value in single.state_dict().items()}
    path = tmp_path / f"{torch.distributed.get_rank()}.safetensors"
    save_file(state, path)
    with torch.device("meta"):
        module = Gpt(dropout=0.0, vocab_size=12, tied=False)
    parallelize_module(module, all_ranks(), gpt_plan())
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        plain_open = safetensors.safe_open

        def safe_open(*args: Any, **kwargs: Any) -> CountingFile:
            return CountingFile(plain_open(*args, **kwargs), counted)

        patch.setattr(safetensors, "safe_open", safe_open)
        loaded = load_sharded(module, path)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    assert sum(counted) == sum(tensor.nbytes for tensor in local) == loaded.bytes_read


@on_ranks(4)
def test_fused_parameters_and_errors() -> None:
    axis = all_ranks()
    single: Any = nn.Sequential(nn.Linear(8, 24), nn.Identity(), nn.Linear(16, 8))
    style = PackedColwiseParallel(blocks={"q": Heads(4, 4), "k": Heads(1, 4), "v": Heads(1, 4)})
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 24), nn.Identity(), nn.Linear(16, 8))
    parallelize_module(module, axis, {"0": style, "2": RowwiseParallel()})
    load_sharded(module, single.state_dict())
    x, rank = torch.randn(3, 8), axis.get_local_rank()
    expected = single[0](x)
    rows = [*range(4 * rank, 4 * rank + 4), *range(16, 24)]
    torch.testing.assert_close(module[0](x), expected[:, rows])
    fused: Any = module[0]
    q, k = fused.weight_q.to_local(), fused.weight_k.to_local()
    # one buffer: the product reads it without a copy
    assert k.data_ptr() == q.data_ptr() + q.numel() * 4
    state = single.state_dict()
    state["extra"] = state.pop("2.bias")
    with pytest.raises(PlanError, match=r"missing \['2.bias'\], unexpected \['extra'\]"):
        load_sharded(module, state)
    assert load_sharded(module, state, strict=False).missing == ["2.bias"]
    wrong = {**single.state_dict(), "2.weight": torch.zeros(8, 17)}
    with pytest.raises(
        PlanError,
        match=r"'2.weight' has the shape \(8, 17\) in the source, but the model needs \(8, 16\)",
    ):
        load_sharded(module, wrong)
    plain: Any = parallelize_module(
        nn.Linear(4, 8), axis, ColwiseParallel(output_layouts=Replicate())
    )
    other = nn.Linear(4, 8)
    load_sharded(plain, other.state_dict())
    torch.testing.assert_close(plain(torch.ones(1, 4)), other(torch.ones(1, 4)))
