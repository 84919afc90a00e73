"""The elements that each rank reads, and its memory.

Covers: api/constructors.py, redistribute/scatter.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal_dtensor
from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_module,
    distribute_tensor,
    full,
    local_map,
    rand,
)
from shoal_dtensor.errors import PlacementError, StyleError
from shoal_dtensor.modules import owners
from shoal_dtensor.redistribute import scatter as scatter_module
from shoal_dtensor.redistribute.scatter import scattering, shard_of
from shoal_mesh import (
    CommDebugMode,
    DeviceMesh,
    LockstepError,
    abstract_mesh,
    init_device_mesh,
    lockstep,
)
from shoal_mesh.testing import fake_world, on_ranks

LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((5, 3), (Shard(0), Shard(0))),
    ((7, 9), (Shard(1), Shard(0))),
    ((2, 3), (Replicate(), Shard(0))),
    ((3, 2, 4), (Replicate(), Replicate())),
    ((6, 4), (Shard(0, sizes=(5, 1)), Replicate())),
    ((), (Replicate(), Replicate())),
]


class Stored:
    """A stored tensor that counts the elements that are read."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.read = values, 0

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.values[index].clone()
        self.read += part.numel()
        return part


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_rank_reads_its_part_of_a_stored_tensor_and_no_more(
    shape: tuple[int, ...], placements: tuple[Placement, ...], rank: int
) -> None:
    mesh = abstract_mesh((2, 2), rank=rank)
    stored = Stored(torch.arange(float(torch.Size(shape).numel())).view(shape))
    made = distribute_tensor(stored, mesh, placements)
    spec = Spec(mesh, placements, shape)
    assert spec.coordinate is not None
    box = tuple(slice(*interval) for interval in spec.box(spec.coordinate))
    assert stored.read == spec.local_shape.numel()
    assert torch.equal(made.to_local(), stored.values[box])
    assert (made.shape, made.dtype) == (torch.Size(shape), torch.float32)


@on_ranks(4)
def test_a_safetensors_slice(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    from safetensors import safe_open
    from safetensors.torch import load_file

    mesh = init_device_mesh("cpu", (2, 2))
    path = str(tmp_path / f"{mesh.get_rank()}.safetensors")
    whole = torch.arange(35.0).view(7, 5).bfloat16()
    save_file({"w": whole, "b": torch.arange(5.0).bfloat16()}, path)
    with safe_open(path, "pt") as file, CommDebugMode() as counted:
        for name, placements in (("w", [Shard(0), Shard(1)]), ("b", [Replicate(), Shard(0)])):
            made = distribute_tensor(file.get_slice(name), mesh, placements)
            assert made.to_local().untyped_storage().nbytes() == made.to_local().numel() * 2
            assert made.dtype is torch.bfloat16
    assert counted.get_total_counts() == 0
    moved = distribute_tensor(load_file(path)["w"], mesh, [Shard(1), Shard(0)])
    assert torch.equal(moved.full_tensor(), whole)


def test_a_memory_mapped_tensor_is_read_only_where_it_is_needed(tmp_path: Path) -> None:
    """Counted in resident pages of the mapping (Linux)."""
    path = tmp_path / "whole.bin"
    size = 64 << 20
    with path.open("wb") as file:
        file.truncate(size)
    whole = torch.from_file(str(path), shared=True, size=size // 4)
    with fake_world(8, rank=3):
        mesh = init_device_mesh("cpu", (8,))
        part = distribute_tensor(whole.view(1 << 12, -1), mesh, [Shard(0)], src_data_rank=None)
    assert part.to_local().numel() * 4 == size // 8
    assert resident(path) <= size // 8 + (4 << 20)  # and what the kernel reads ahead


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process has in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    total = 0
    for line in lines:
        if line.endswith(str(path)):
            total += next(int(row.split()[1]) << 10 for row in lines if row.startswith("Rss:"))
    return total


@pytest.mark.parametrize("bucket", [1, 1 << 24])
@pytest.mark.parametrize("source", [0, 1])
@on_ranks(4)
def test_tensors_that_travel_together_are_those_that_travel_alone(source: int, bucket: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(mesh.get_rank())
    cases = [
        (shape, placements, dtype)
        for shape, placements in LAYOUTS
        for dtype in (torch.float32, torch.int64)
    ] * 2
    specs = [Spec(mesh, placements, shape, None, dtype) for shape, placements, dtype in cases]
    wholes = [(torch.randn(spec.shape) * 100).to(spec.dtype) for spec in specs]
    usual, scatter_module.BUCKET_BYTES = scatter_module.BUCKET_BYTES, bucket
    try:
        with (
            CommDebugMode() as mode,
            pytest.raises(ZeroDivisionError),
            scattering(source) as scatter,
        ):
            shards = [scatter.shard(whole, spec) for whole, spec in zip(wholes, specs, strict=True)]
            raise ZeroDivisionError  # what other ranks have sent arrives
    finally:
        scatter_module.BUCKET_BYTES = usual
    # Of each dtype one all-to-all along both axes, one along either and a broadcast, and a
    # broadcast along both.
    assert bucket == 1 or mode.get_total_counts() <= 2 * 6
    for shard, whole, spec in zip(shards, wholes, specs, strict=True):
        assert torch.equal(shard, shard_of(whole, spec, source))


def test_meta_tensors_give_meta_parts_without_communication() -> None:
    mesh = abstract_mesh((2, 2), rank=3)
    for source in (0, None):
        made = distribute_tensor(
            torch.empty(5, 3, device="meta"), mesh, [Shard(0), Shard(1)], src_data_rank=source
        )
        assert made.to_local().is_meta
        assert made.to_local().shape == (2, 1)


META = torch.empty(6, 4, device="meta")


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        # The dense tensor keeps its order: column by column.
        (META.t(), (1, 4)),
        # A tensor with unused memory becomes row-major.
        (META[:, ::2], (2, 1)),
    ],
    ids=["transposed", "sliced"],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_meta_parts_have_the_memory_order_of_the_layout(
    tensor: torch.Tensor, stride: tuple[int, ...], dim: int
) -> None:
    made = distribute_tensor(tensor, abstract_mesh((2,)), [Shard(dim)])
    rows, columns = made.to_local().shape
    local_stride = (1, rows) if stride[0] == 1 else (columns, 1)
    assert (made.stride(), made.to_local().stride()) == (stride, local_stride)


def test_what_is_no_tensor_is_refused() -> None:
    wrong: Any = [1.0, 2.0]
    with pytest.raises(PlacementError, match="as safetensors' get_slice"):
        distribute_tensor(wrong, abstract_mesh((2,)), [Shard(0)])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@on_ranks(4)
def test_only_the_source_needs_memory_for_the_whole(placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (4,))
    shape = (4096, 4096)  # 64 MiB
    # connects, and loads what is loaded at first use
    distribute_tensor(torch.zeros(8, 8), mesh, [placement])
    full = torch.ones(shape) if mesh.get_rank() == 0 else torch.empty(1).expand(shape)
    before = peak(reset=True)
    made: DTensor = distribute_tensor(full, mesh, [placement])
    grown = peak() - before
    assert made.to_local().sum() == 4096 * 1024
    if mesh.get_rank():
        assert grown < 40 << 20, f"{grown >> 20} MiB for a part of 16 MiB"


def peak(*, reset: bool = False) -> int:
    """Bytes that this process had resident at its worst, since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(0, sizes=(3, 0))], ids=str)
def test_the_local_part_of_a_transposed_tensor_is_contiguous(placement: Placement) -> None:
    """As the spec says: the strides are those of the shard.

    A rank that holds all of it kept the strides 4, 12, 1, which cannot be viewed as (6, 4).
    """
    with fake_world(2):
        tensor = torch.randn(2, 3, 4).transpose(0, 1)
        spread = distribute_tensor(
            tensor, init_device_mesh("cpu", (2,)), [placement], src_data_rank=None
        )
        assert spread.is_contiguous() and spread.to_local().is_contiguous()
        assert spread.view(6, 4).shape == (6, 4)


def test_what_a_user_attached_goes_along_when_a_module_is_distributed() -> None:
    seen: list[str] = []
    with fake_world(1):
        module = nn.Linear(2, 2, bias=False)
        weight: Any = module.weight
        weight.mine = 5
        handles = [
            weight.register_hook(lambda grad: seen.append("hook")),
            weight.register_post_accumulate_grad_hook(lambda leaf: seen.append("after")),
        ]
        mesh = init_device_mesh("cpu", (1,))
        distribute_module(module, mesh)
        for expected in (["hook", "after"], ["after"], []):  # old handles remove what went along
            seen.clear()
            module(distribute_tensor(torch.ones(1, 2), mesh)).sum().backward()
            assert seen == expected
            for handle in handles[:1]:
                handle.remove()
            del handles[:1]
        weight = module.weight
        assert weight.mine == 5


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("source", [0, None])
@on_ranks(4)
def test_a_partial_target_reduces_to_the_values(op: str, source: int | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(1.0, 16.0, dtype=torch.float64).view(5, 3)
    made = distribute_tensor(whole, mesh, [Shard(0), Partial(op)], src_data_rank=source)
    assert made.placements == (Shard(0), Partial(op))
    torch.testing.assert_close(made.full_tensor(), whole)


@pytest.mark.parametrize("length", [8, 6, 2])
@on_ranks(4)
def test_a_strided_target_is_cut_in_runs(length: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(float(length))
    made = distribute_tensor(whole, mesh, [StridedShard(0, split_factor=2)])
    runs = [run.chunk(4) for run in whole.chunk(2)]
    own = [run[mesh.get_rank()] for run in runs if mesh.get_rank() < len(run)]
    assert torch.equal(made.to_local(), torch.cat(own) if own else whole[:0])
    assert torch.equal(made.full_tensor(), whole)


_RUNS = StridedShard(0, split_factor=2)
STRIDED = {
    "one axis": ((4,), [_RUNS]),
    "given sizes": ((4,), [StridedShard(0, split_factor=2, sizes=(1, 2, 0, 1))]),
    "from the last dim": ((4,), [StridedShard(-1, split_factor=2)]),
    "both axes": ((2, 2), [_RUNS, _RUNS]),
    "an order": ((2, 2), [_RUNS, Shard(0)]),
    "runs of shards": ((2, 2), [Shard(0), StridedShard(0, split_factor=4, sizes=(1, 1))]),
}


@pytest.mark.parametrize(("shape", "placements"), STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("run_check", [False, True])
@on_ranks(4)
def test_parts_of_strided_targets_are_a_tensor_again(
    shape: tuple[int, ...], placements: list[Placement], run_check: bool
) -> None:
    mesh, whole = init_device_mesh("cpu", shape), torch.arange(8.0)
    local = distribute_tensor(whole, mesh, placements).to_local()
    made = DTensor.from_local(local, mesh, placements, run_check=run_check)
    assert torch.equal(made.full_tensor(), whole) and torch.equal(made.to_local(), local)
    with lockstep():
        assert torch.equal(DTensor.from_local(local, mesh, placements).full_tensor(), whole)
    mapped = local_map(lambda x: x + 1, out_placements=placements, device_mesh=mesh)(made)
    assert torch.equal(mapped.full_tensor(), whole + 1)


@on_ranks(4)
def test_parts_that_are_no_runs_are_refused_on_all_ranks() -> None:
    mesh, placements = (
        init_device_mesh("cpu", (4,)),
        [StridedShard(0, split_factor=2, sizes=(1, 1, 1, 1))],
    )
    with pytest.raises(PlacementError, match="that rank passes"):
        DTensor.from_local(
            torch.zeros(2 if mesh.get_rank() else 3), mesh, placements, run_check=True
        )


# the check was itself a mismatched broadcast, which broke the group for the rest of the process
@on_ranks(2)
def test_a_check_agrees_on_what_it_compares_and_the_group_goes_on() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_rank()
    differing: dict[str, torch.Tensor] = {
        "the same dtype, got torch.float32": torch.ones(
            4, dtype=[torch.float32, torch.float64][rank]
        ),
        "needs a local shape of": torch.ones(4 + rank),
        "tensors of .* dims": torch.ones([2] * (1 + rank)),
        "the same requires_grad, got requires_grad=True": torch.ones(4, requires_grad=rank == 0),
        "up to 16 dims": torch.ones([1] * (16 + rank)),
    }
    for text, local in differing.items():
        for placements in ([Replicate()], [Shard(0)]):
            if text == "needs a local shape of" and placements == [Shard(0)]:
                # uneven shards
                continue
            with pytest.raises(PlacementError, match=text):
                DTensor.from_local(local, mesh, placements, run_check=True)
            assert distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor().sum() == 4


@on_ranks(2)
def test_placements_that_differ_are_named_before_anything_else_is_sent() -> None:
    """One rank would send its replica, which the other one does not receive."""
    mesh = init_device_mesh("cpu", (2,))
    own = [Shard(0), Replicate()][mesh.get_rank()]
    with pytest.raises(PlacementError, match="all ranks must pass the same placements"):
        DTensor.from_local(torch.ones(3), mesh, [own], run_check=True)
    whole = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=True).full_tensor()
    assert torch.equal(whole, torch.ones(6))


@on_ranks(2)
def test_checked_replicas_take_the_first_values_and_keep_their_own_gradient() -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((3,), float(mesh.get_rank()), requires_grad=True)
    whole = DTensor.from_local(local, mesh, [Replicate()], run_check=True)
    assert whole.to_local().tolist() == [0.0] * 3
    scaled: Any = whole * 5
    scaled.to_local().sum().backward()
    assert local.grad is not None
    assert local.grad.tolist() == [5.0] * 3


@on_ranks(2)
def test_checked_shards_have_one_memory_order() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(6.0).view(2, 3)
    local = rows.t().contiguous().t() if mesh.get_rank() else rows
    checked = DTensor.from_local(local, mesh, [Shard(0)], run_check=True)
    mapped = local_map(lambda: local, out_placements=[Shard(0)], device_mesh=mesh)()
    for tensor in (checked, mapped):
        # the strides differed between ranks, so one of them refused the view
        assert tensor.stride() == (3, 1)
        flat: Any = tensor.view(12)
        assert flat.full_tensor().tolist() == [*range(6), *range(6)]


@on_ranks(2)
def test_functions_of_two_arguments_prepare_inputs_and_outputs() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.nn.Linear(3, 2)
    module = distribute_module(
        torch.nn.Linear(3, 2),
        mesh,
        None,
        lambda inputs, mesh: (distribute_tensor(inputs[0], mesh, [Shard(0)]),),
        lambda outputs, mesh: outputs.full_tensor(),
    )
    module.load_state_dict(
        {name: distribute_tensor(value, mesh) for name, value in plain.state_dict().items()}
    )
    x = torch.randn(3, 3)
    torch.testing.assert_close(module(x), distribute_tensor(plain(x).detach(), mesh).to_local())
    with pytest.raises(ValueError, match="output_fn must take"):
        distribute_module(torch.nn.Linear(3, 2), mesh, None, None, lambda outputs: outputs)


def sharding(dims: dict[str, int]) -> Callable[[str, nn.Module, DeviceMesh], None]:
    """A `partition_fn` that shards the weights of modules, by name, along a dim."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if name in dims:
            weight: Any = module.weight
            module.weight = nn.Parameter(
                distribute_tensor(weight.detach(), mesh, [Shard(dims[name])])
            )

    return partition


def tied_linears() -> nn.Sequential:
    """Two layers with one weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def test_a_shared_parameter_that_partition_fn_replaces_stays_shared() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for dims in ({"0": 0}, {"1": 0}, {"0": 0, "1": 0}):
            model = distribute_module(tied_linears(), mesh, sharding(dims))
            weight, other = model.get_parameter("0.weight"), model.get_parameter("1.weight")
            assert (
                weight is other and isinstance(weight, DTensor) and weight.placements == (Shard(0),)
            ), dims
        with pytest.raises(
            PlacementError, match="partition_fn gave a shared parameter two layouts"
        ):
            distribute_module(tied_linears(), mesh, sharding({"0": 0, "1": 1}))


@pytest.mark.parametrize("dims", [{}, {"0": 0}])
def test_an_optimizer_made_before_distribute_module_does_not_step(dims: dict[str, int]) -> None:
    with fake_world(2):
        model = tied_linears()
        optimizer, late = torch.optim.SGD([model.get_parameter("0.weight")]), nn.Linear(2, 2)
        distribute_module(model, init_device_mesh("cpu", (2,)), sharding(dims))
        with pytest.raises(
            StyleError, match=r"distribute_module has replaced, .* Construct the optimizer after"
        ):
            optimizer.step()
        torch.optim.SGD([*model.parameters(), *late.parameters()]).step()


def test_only_replaced_parameters_that_the_program_holds_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(owners, "note_replaced", lambda param: noted.append(id(param)))
    with fake_world(2):
        model = nn.Sequential(tied_linears(), nn.Linear(4, 4))
        held = model.get_parameter("1.weight")
        distribute_module(model, init_device_mesh("cpu", (2,)), sharding({"0.0": 0}))
    assert noted == [id(held)]


def test_factories_list_their_keywords() -> None:
    assert [*inspect.signature(full).parameters][2:] == [
        "dtype",
        "layout",
        "requires_grad",
        "device_mesh",
        "placements",
    ]
    assert "generator" in inspect.signature(rand).parameters


SPACED: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("linspace", torch.linspace, (0, 1, 11)),
    ("linspace", torch.linspace, (-2.5, 3.25, 3)),
    ("linspace", torch.linspace, (1 + 2j, 4, 6)),
    ("linspace", torch.linspace, (torch.tensor(2.0), 5, 0)),
    ("logspace", torch.logspace, (0, 3, 11)),
    ("logspace", torch.logspace, (torch.tensor(-1.0), 2.5, 5, 2.0)),
]


@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()], [Partial()]])
@pytest.mark.parametrize(("name", "expected", "arguments"), SPACED)
@on_ranks(4)
def test_spaced_values_are_those_of_torch(
    name: str, expected: Callable[..., Any], arguments: Any, placements: Any
) -> None:
    mesh = init_device_mesh("cpu", (4,))
    factory = getattr(shoal_dtensor, name)
    for dtype in (None, torch.float64, torch.complex64):
        if dtype is torch.float64 and isinstance(arguments[0], complex):
            continue
        values = expected(*arguments, dtype=dtype)
        made = factory(*arguments, dtype=dtype, device_mesh=mesh, placements=placements)
        assert (made.shape, made.dtype) == (values.shape, values.dtype)
        assert made.placements == tuple(placements)
        assert torch.equal(made.full_tensor(), values)
    ends = distribute_tensor(torch.tensor(1.5), mesh, [Replicate()])
    made = factory(ends, 7, 5, device_mesh=mesh, placements=placements, requires_grad=True)
    assert made.requires_grad and made.is_leaf
    assert torch.equal(made.detach().full_tensor(), expected(1.5, 7, 5))


def test_ends_that_are_no_numbers_are_refused() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for factory in (shoal_dtensor.linspace, shoal_dtensor.logspace):
            with pytest.raises(TypeError, match="start"):
                factory("0", 1, 3, device_mesh=mesh)  # type: ignore[arg-type]  # refused
            with pytest.raises(TypeError, match="end"):
                factory(0, [1], 3, device_mesh=mesh)  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [8, 7, 1])
def test_shards_become_terms_of_a_sum_without_communication(ranks: int, rows: int) -> None:
    @on_ranks(ranks)
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
        values = torch.randn(
            rows, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        weights = torch.randn_like(values, generator=torch.Generator().manual_seed(1))
        moves: list[tuple[list[Placement], list[Placement]]] = [
            ([Shard(0), Replicate()], [Partial(), Replicate()]),
            ([Shard(0), Shard(0)], [Partial(), Partial()]),
            ([Shard(1), Shard(0)], [Shard(1), Partial()]),
            ([Shard(0), Partial()], [Partial(), Partial()]),
        ]
        for source, target in moves:
            x = distribute_tensor(values, mesh, source).requires_grad_()
            with CommDebugMode() as counted:
                terms = x.redistribute(placements=target)
            assert terms.placements == tuple(target)
            assert counted.get_total_counts() == 0
            whole: Any = terms.detach()
            torch.testing.assert_close(whole.full_tensor(), values)
            product: Any = terms * distribute_tensor(weights, mesh, [Replicate()] * 2)
            product.sum().full_tensor().backward()
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(x.grad.full_tensor(), weights)

    check()


@pytest.mark.parametrize(
    ("source", "target"),
    [(Replicate(), Partial()), (Shard(0), Partial("max")), (Shard(0), Partial("avg"))],
)
def test_other_values_do_not_become_partial(source: Placement, target: Placement) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4), mesh, [source])
        with pytest.raises(PlacementError, match="cannot make mesh axis"):
            x.redistribute(placements=[target])


@on_ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_result_on_one_rank_is_refused_there_and_keeps_the_ranks_in_step(
    placement: Placement,
) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for refused in range(4):
        tensor = torch.arange(8.0) + refused
        if mesh.get_local_rank() == refused:
            result = tensor.clone().requires_grad_() * 1
            with pytest.raises(PlacementError, match="not a leaf"):
                distribute_tensor(result, mesh, [placement])
        else:
            distributed = distribute_tensor(tensor, mesh, [placement])
            local = tensor.chunk(4)[mesh.get_local_rank()] if placement.is_shard() else tensor
            assert torch.equal(distributed.to_local(), local)
        whole = distribute_tensor(tensor, mesh, [Shard(0)]).full_tensor()
        assert torch.equal(whole, tensor)


S0, S1, R = Shard(0), Shard(1), Replicate()
# What the ranks of rank % 2 == 0 and 1 pass: placements, shape and dtype.
Passed = tuple[list[Placement], tuple[int, ...], torch.dtype]
F32 = torch.float32
DIFFERENT: dict[str, tuple[tuple[int, ...], Passed, Passed]] = {
    "dims": ((4,), ([S0], (8, 8), F32), ([S1], (8, 8), F32)),
    "sizes too": ((4,), ([S0], (8, 4), F32), ([S1], (8, 4), F32)),
    "pending reduction": ((4,), ([R], (2, 3), F32), ([Partial()], (2, 3), F32)),
    "reduction": ((4,), ([Partial("max")], (2, 3), F32), ([Partial()], (2, 3), F32)),
    "shape": ((4,), ([S0], (4, 6), F32), ([S0], (8, 3), F32)),
    "replicated shape": ((4,), ([R], (4, 6), F32), ([R], (6, 4), F32)),
    "dtype": ((4,), ([S0], (4, 6), F32), ([S0], (4, 6), torch.int32)),
    "a plane": ((2, 2), ([S0, R], (4, 4), F32), ([S1, R], (4, 4), F32)),
    "between planes": ((2, 2), ([R, S0], (4, 4), F32), ([R, S1], (4, 4), F32)),
    "order": (
        (2, 2),
        ([S0, S0], (4, 4), F32),
        ([StridedShard(0, split_factor=2), S0], (4, 4), F32),
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
@on_ranks(4)
def test_layouts_that_differ_between_ranks_raise_on_all_ranks(case: str) -> None:
    """They may send as many elements, of other places."""
    sizes, *passed = DIFFERENT[case]
    mesh = init_device_mesh("cpu", sizes)
    # "a plane": ranks 0 and 1 have other layouts than 2 and 3, so that both planes are mixed
    kind = mesh.get_rank() // 2 if case == "a plane" else mesh.get_rank() % 2
    placements, shape, dtype = passed[kind]
    with (
        CommDebugMode() as counted,
        pytest.raises(LockstepError, match="same placements") as caught,
    ):
        distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements)
    assert "src_data_rank 0" in str(caught.value)
    assert counted.get_total_counts() <= mesh.ndim
    # the groups stay usable
    ranks = torch.arange(4.0)
    whole = distribute_tensor(ranks, mesh, [S0] * mesh.ndim).full_tensor()
    assert torch.equal(whole, ranks)


@on_ranks(4)
def test_the_difference_is_named_with_its_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,))
    placements = [Shard(int(mesh.get_rank() == 2))]
    text = (
        r"ranks 0, 1, 3: \[Shard\(dim=0\)\] of shape \(8, 8\), torch.float32, src_data_rank 0; "
        r"rank 2: \[Shard\(dim=1\)\]"
    )
    with pytest.raises(LockstepError, match=text):
        distribute_tensor(torch.zeros(8, 8), mesh, placements)
