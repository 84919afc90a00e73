"""Against a model of torch's launches made from Philox's definition, and on a device.

Covers: rng/streams.py.

The model: thread `t` of `T` reads subsequence `t` from the generator's offset on; four values a
call, value `j` of call `k` is element `t + T * (j + 4 * k)`; `T` is 256 times the blocks needed, at
most what the device holds at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import Replicate, Shard, Spec
from shoal_dtensor.rng import streams as cuda_stream
from shoal_dtensor.rng.counter import philox
from shoal_dtensor.rng.draw import draw
from shoal_dtensor.rng.memory_walk import memory_walk_of
from shoal_dtensor.rng.streams import Fill
from shoal_mesh import abstract_mesh

BLOCK, MOST_BLOCKS, LANES = 256, 2, 4
ROUND = BLOCK * MOST_BLOCKS * LANES


class ModelGenerator:
    """An offset, as torch's CUDA generators have one."""

    def __init__(self) -> None:
        self.offset = 8

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@dataclass(frozen=True)
class ModelFill:
    """Raw words, filled as torch's kernels fill; `flawed` kernels do not work in rounds."""

    flawed: bool = False
    granule: int = 1
    name: str = "random_"

    def __call__(
        self, target: Tensor, generator: ModelGenerator, operand: Tensor | None = None
    ) -> None:
        numel = target.numel()
        threads = BLOCK * min(-(-numel // BLOCK), MOST_BLOCKS)
        calls = -(-numel // (threads * LANES))
        thread = torch.arange(threads)
        values = []
        for call in range(calls):
            counter = (generator.offset // 4 + call, 0, thread, 0)
            values += [word + (numel if self.flawed else 0) for word in philox(counter, (7, 0))]
        target.copy_(torch.cat(values)[:numel].view(target.shape))
        generator.offset += 4 * calls


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_stream, "_LARGEST", 1 << 13)
    monkeypatch.setattr(cuda_stream, "_private_generator", lambda device: ModelGenerator())
    cuda_stream.rounds_of.cache_clear()
    yield
    cuda_stream.rounds_of.cache_clear()


def rounds(fill: Any) -> cuda_stream.Rounds | None:
    return cuda_stream.rounds_of(fill, torch.int64, torch.device("cpu"), 0)


def test_rounds_are_measured_and_tested() -> None:
    assert rounds(ModelFill()) == cuda_stream.Rounds(ROUND, 4)
    assert rounds(ModelFill(flawed=True)) is None


SHAPES = [(100, 90), (8, 2048), (3, 5000), (7,), (ROUND,), (ROUND + 1,), (0, 4)]


@pytest.mark.parametrize("flawed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_equal_one_device(shape: tuple[int, ...], flawed: bool) -> None:
    fill: Any = ModelFill(flawed)
    generator: Any = ModelGenerator()
    whole = torch.empty(shape, dtype=torch.int64)
    if whole.numel():
        fill(whole.view(-1), generator)
    for mesh_shape, placements in (
        ((8, 8), (Shard(0), Shard(-1))),
        ((4,), (Shard(0),)),
        ((4,), (Shard(-1),)),
        ((2, 2), (Shard(-1), Replicate())),
    ):
        for rank in (0, 1, len(mesh_shape) + 1):
            spec = Spec(abstract_mesh(mesh_shape, rank=rank), placements, shape, None, torch.int64)
            own: Any = ModelGenerator()
            local = torch.empty(spec.local_shape, dtype=torch.int64)
            if whole.numel():
                cuda_stream.fill_cuda(local, memory_walk_of(spec), fill, own)
            box = tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate or ()))
            assert torch.equal(local, whole[box]), spec
            assert own.offset == generator.offset


def test_only_rounds_with_own_elements_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    assert rounds(ModelFill()) is not None
    monkeypatch.setattr(ModelGenerator, "set_offset", lambda self, offset: drawn.append(offset))
    spec = Spec(abstract_mesh((8,), rank=3), (Shard(0),), (16, ROUND), None, torch.int64)
    generator: Any = ModelGenerator()
    fill: Any = ModelFill()
    cuda_stream.fill_cuda(
        torch.empty(spec.local_shape, dtype=torch.int64), memory_walk_of(spec), fill, generator
    )
    start = 8
    assert drawn == [start + 4 * 6, start + 4 * 7, start + 4 * 16], (
        "two rounds of sixteen, then the state after all"
    )


FILLS = [
    Fill("uniform_", (-1.0, 2.0)),
    Fill("normal_"),
    Fill("bernoulli_", (0.3,)),
    Fill("exponential_", (1.0,)),
    Fill("cauchy_", (0.0, 1.0)),
    Fill("geometric_", (0.3,)),
    Fill("log_normal_", (0.0, 1.0)),
    Fill("random_", (0, 2**40)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (1500, 2049), (3000, 4096)], ids=str)
def test_on_a_device(
    fill: Fill, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated coordinates of meshes up to 8 x 8 against the operator on one device."""
    if fill.name == "random_" and dtype == torch.bfloat16:
        pytest.skip("bfloat16 cannot hold these integers")
    monkeypatch.undo()
    cuda_stream.rounds_of.cache_clear()
    generator = torch.Generator("cuda")
    generator.manual_seed(3)
    whole = torch.empty(shape, dtype=dtype, device="cuda")
    fill(whole, generator)
    after = generator.get_offset()
    assert cuda_stream.rounds_of(fill, dtype, whole.device) is not None, (
        "torch's kernels no longer work in rounds"
    )
    for placements in ((Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1), Replicate())):
        for rank in (0, 7, 36, 63):
            spec = Spec(
                abstract_mesh((8, 8), rank=rank, device_type="cuda"), placements, shape, None, dtype
            )
            generator.manual_seed(3)
            local = draw(spec, fill, generator)
            box = tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate or ()))
            assert torch.equal(local, whole[box]), spec
            assert generator.get_offset() == after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (1500, 2049), (3000, 4096)], ids=str)
def test_dropout_on_a_device(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    cuda_stream.rounds_of.cache_clear()
    torch.cuda.manual_seed(3)
    whole = torch.native_dropout(torch.ones(shape, dtype=dtype, device="cuda"), 0.3, True)[1]
    after = torch.cuda.get_rng_state()
    from shoal_dtensor.rng.draw import draw_dropout_mask

    for rank in (0, 7, 36, 63):
        mesh = abstract_mesh((8, 8), rank=rank, device_type="cuda")
        spec = Spec(mesh, (Shard(0), Shard(1)), shape, None, torch.bool)
        torch.cuda.manual_seed(3)
        local = torch.empty(spec.local_shape, dtype=torch.bool, device="cuda")
        draw_dropout_mask(spec, 0.3, dtype, out=local)
        box = tuple(slice(start, stop) for start, stop in spec.box(spec.coordinate or ()))
        assert torch.equal(local, whole[box]), spec
        assert torch.equal(torch.cuda.get_rng_state(), after)
