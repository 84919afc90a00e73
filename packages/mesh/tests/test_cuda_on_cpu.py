"""Programs that name CUDA devices, on ranks that are processes.

Covers: lab/isolation/cuda_on_cpu.py.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torchs_mesh
from torch.distributed.fsdp import fully_shard

import shoal_mesh
from shoal_mesh.errors import MeshError
from shoal_mesh.testing import lab


def run(function: Any, ranks: int = 1) -> list[Any]:
    return lab(ranks, device="cpu").run(function, world=False)


def devices_of_tensors() -> set[str]:
    device = torch.device("cuda", 1)
    layer = nn.Linear(2, 2).cuda()
    tensors = [
        torch.ones(2, device="cuda"),
        torch.ones(2, device=0),
        torch.ones(2, device=device),
        torch.ones(2).to("cuda:1"),
        torch.ones(2).to(device, torch.float64, non_blocking=True),
        torch.ones(2).to(0),
        torch.ones(2).cuda(),
        torch.ones(2).pin_memory(),
        torch.empty_like(torch.ones(2), device="cuda"),
        nn.Linear(2, 2, device="cuda").weight,
        nn.Linear(2, 2).to("cuda").weight,
        nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        layer.weight,
    ]
    with torch.device("cuda"):
        tensors.append(torch.ones(2))
    torch.set_default_device("cuda:0")
    tensors.append(torch.ones(2))
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    return {str(tensor.device) for tensor in tensors}


def test_tensors_for_cuda_are_on_the_cpu() -> None:
    assert run(devices_of_tensors) == [{"cpu"}]
    assert torch.device("cuda:1").type == "cuda"


def devices() -> list[Any]:
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    copies = [pickle.loads(pickle.dumps(device)), copy.deepcopy(device)]
    meta = torch.device("meta")
    generator = torch.Generator(device="cuda").manual_seed(3)
    return [
        device == torch.ones(1, device="cuda").device,
        isinstance(device, torch.device),
        isinstance("cuda", torch.device),
        copies == [device, device],
        meta.type,
        pickle.loads(pickle.dumps(meta)).type,
        isinstance(generator, torch.Generator),
        torch.rand(1, generator=generator, device="cuda").item(),
    ]


def test_devices_are_devices_of_torch() -> None:
    expected = torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    assert run(devices) == [[True, True, False, True, "meta", "meta", True, expected]]


def functions_of_cuda() -> dict[str, Any]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]  # of torch
    make_event: Any = torch.cuda.Event
    start, end = (make_event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        product.record_stream(stream)
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.manual_seed_all(5)
    first = torch.rand(1, device="cuda").item()
    state = torch.cuda.get_rng_state()
    second = torch.rand(1, device="cuda").item()
    torch.cuda.set_rng_state(state)
    with pytest.raises(MeshError, match="needs a device"):
        torch.cuda.cudart()  # type: ignore[no-untyped-call]  # of torch
    return {
        "available": torch.cuda.is_available(),
        "current": torch.cuda.current_device(),
        "count": torch.cuda.device_count(),
        "seconds pass": start.elapsed_time(end) > 0,
        "seed": first == torch.rand(1, generator=torch.Generator().manual_seed(5)).item(),
        "state": second == torch.rand(1, device="cuda").item(),
        "memory": torch.cuda.max_memory_allocated(),
        "capability": torch.cuda.get_device_capability(),
        "has memory": torch.cuda.get_device_properties(0).total_memory > 1 << 20,
    }


def test_functions_of_cuda_have_a_meaning_on_the_cpu() -> None:
    for rank, found in enumerate(run(functions_of_cuda, 2)):
        assert found == {
            "available": True,
            "current": rank,
            "count": 2,
            "seconds pass": True,
            "seed": True,
            "state": True,
            "memory": 0,
            "capability": (0, 0),
            "has memory": True,
        }


def modes_and_files() -> list[Any]:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
        inside = torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda")
    scaler = torch.amp.GradScaler("cuda")
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]  # of torch
    scaler.step(optimizer)
    scaler.update()
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cuda:0")
    return [product.dtype, inside, weight.tolist(), str(loaded.device)]


def test_autocast_scalers_and_files_use_the_cpu() -> None:
    assert run(modes_and_files) == [[torch.bfloat16, (True, True), [0.0, 0.0], "cpu"]]


def meshes_and_wrappers() -> list[Any]:
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    dist.barrier(device_ids=[local_rank])
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    mesh = torchs_mesh("cuda", (2,), mesh_dim_names=("dp",))
    ours = shoal_mesh.init_device_mesh("cuda", (2,))
    torch.manual_seed(0)
    replicated = nn.parallel.DistributedDataParallel(
        nn.Linear(2, 2).cuda(), device_ids=[local_rank]
    )
    sharded = nn.Linear(2, 2).cuda()
    sharded.load_state_dict(replicated.module.state_dict())
    fully_shard(sharded, mesh=mesh)
    for model in (replicated, sharded):
        model(torch.full((1, 2), float(dist.get_rank()), device="cuda")).sum().backward()
    shard: Any = sharded.weight.grad
    gradients: list[Any] = [replicated.module.weight.grad, shard.full_tensor()]
    kinds = mesh.device_type, ours.device_type
    return [objects, kinds, [gradient.tolist() for gradient in gradients]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_meshes_and_data_parallel_modules_are_on_the_cpu() -> None:
    gradient = [[0.5, 0.5], [0.5, 0.5]]
    expected = [[{"rank": 0}, {"rank": 1}], ("cpu", "cpu"), [gradient, gradient]]
    assert run(meshes_and_wrappers, 2) == [expected, expected]
