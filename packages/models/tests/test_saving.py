"""Parallel models written as safetensors, without gathering.  Covers: weights/saving.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_models import build_model, needs_hf, save_plain, shared_directory, token_batch
from shoal_dtensor import DTensor, Partial, Shard, communication, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import CheckpointError, hf, load_sharded, save_sharded
from shoal_models.weights import saving
from shoal_tp_styles import Heads, PackedColwiseParallel, parallelize_module, unparallelize_module

pytestmark = needs_hf


def values(home: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: each for file in home.glob("*.safetensors") for name, each in load_file(file).items()
    }


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 10)


# Replicated heads, a block of another size, weights of shape (in, out); uneven, ragged and empty
# shards.
PLANS: dict[str, Any] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed": PackedColwiseParallel(blocks=2),
    "split": PackedColwiseParallel(blocks={"q": Heads(4, 2), "k": Heads(1, 1), "v": Heads(1, 1)}),
}


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_those_of_the_plain_module(plan: str, dtype: torch.dtype, tmp_path: Path) -> None:
    home = shared_directory(tmp_path) / "saved"
    single = linear().to(dtype)
    expected = {name: value.clone() for name, value in single.state_dict().items()}
    module = parallelize_module(single, all_ranks(), PLANS[plan])
    # for DTensors; what the ranks agree on are names and boxes
    with communication("forbid"):
        saved = save_sharded(module, home, max_file_bytes=30)
    assert len(saved.files) == 2 and saved.bytes_written < 50 * dtype.itemsize
    found = values(home)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("case", ["tied", "packed"])
def test_plain_transformers_loads_it_and_so_do_other_degrees(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    single = build_model(
        "Phi3" if case == "packed" else "Llama", tie_word_embeddings=case == "tied"
    )
    home = save_plain(single, tmp_path)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = hf.from_pretrained(home, pairs)
    # over the files that it was read from
    saved = hf.save_sharded(model, home, max_file_bytes=20_000)
    assert len(saved.files) > 1 and not (home / "model.safetensors").exists()
    back = AutoModelForCausalLM.from_pretrained(home)
    assert all(
        torch.equal(back.state_dict()[name], value) for name, value in single.state_dict().items()
    )
    assert type(back) is type(single) and back.dtype == torch.float64
    on_four = hf.from_pretrained(home, all_ranks())
    torch.testing.assert_close(on_four(token_batch()).logits, single(token_batch()).logits)


@on_ranks(2, timeout=200)
def test_resume(tmp_path: Path) -> None:
    home = shared_directory(tmp_path) / "saved"
    module = parallelize_module(linear(), all_ranks(), "colwise")
    save_sharded(module, home)
    other = parallelize_module(linear(1), all_ranks(), "rowwise")
    load_sharded(other, home / "model.safetensors")
    assert torch.equal(unparallelize_module(other).state_dict()["weight"], linear().weight)


@on_ranks(2, timeout=200)
def test_errors_are_raised_on_all_ranks_and_leave_the_old_files(
    tmp_path: Path, monkeypatch: Any
) -> None:
    home = shared_directory(tmp_path) / "saved"
    module = parallelize_module(linear(), all_ranks(), "colwise")
    save_sharded(module, home)
    (home / "notes.txt").write_text("kept") if dist.get_rank() == 0 else None
    dist.barrier()
    old = values(home)
    with torch.no_grad():
        module.weight.add_(1)

    def fail(*_: object) -> int:
        raise OSError("disk full")

    # on one rank alone; the first and the last run on rank 0
    for step in ("_prepare", "_write_box", "_exchange"):
        with monkeypatch.context() as patch:
            if dist.get_rank() == (step == "_write_box"):
                patch.setattr(saving, step, fail)
            with pytest.raises(
                CheckpointError,
                match=r"^save_sharded failed, existing files are unchanged: .*rank [01]: OSError",
            ):
                save_sharded(module, home)
        dist.barrier()
        assert all(torch.equal(each, old[name]) for name, each in values(home).items())
        assert [path.name for path in home.parent.iterdir()] == ["saved"], "nothing is left behind"
        dist.barrier()
    save_sharded(module, home)
    assert torch.equal(values(home)["weight"], old["weight"] + 1)
    assert (home / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize(
    "step", ["_prepare", "_write_box", "fsync", "_publish", "_exchange", "rmtree"]
)
@pytest.mark.parametrize("exchange", [True, False])
def test_a_crash_leaves_the_old_checkpoint_or_the_new(
    step: str, exchange: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    home, module = tmp_path / "saved", linear()
    save_sharded(module, home)
    child = os.fork()  # which ends where a crash would end it
    if child == 0:
        with torch.no_grad():
            module.weight.add_(1)
        if not exchange:
            monkeypatch.setattr(saving, "_exchange", lambda *_: False)
        owner: Any = {"fsync": os, "rmtree": shutil}.get(step, saving)
        inner = getattr(owner, step)

        def crash(*args: Any, **kwargs: Any) -> None:
            if step != "rmtree" or Path(args[0]).exists():  # before anything of a save is removed
                os._exit(0)
            inner(*args, **kwargs)

        monkeypatch.setattr(owner, step, crash)
        save_sharded(module, home)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the crash was reached"
    new = step == "rmtree"
    assert torch.equal(values(home)["weight"], linear().weight + int(new))
    save_sharded(module, home)  # files that the crash left are replaced
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@on_ranks(2, timeout=200)
def test_what_files_cannot_hold(tmp_path: Path) -> None:
    home, mesh = shared_directory(tmp_path) / "saved", all_ranks()
    for value, message in (
        (DTensor.from_local(torch.ones(2), mesh, [Partial()]), "redistribute partial tensors"),
        (
            distribute_tensor(torch.ones(2, dtype=torch.complex64), mesh, [Shard(0)]),
            "complex64, which safetensors",
        ),
        (torch.ones(2, device="meta"), "on the meta device"),
    ):
        module = nn.Module()
        module.register_buffer("x", value)
        with pytest.raises(CheckpointError, match=message):
            save_sharded(module, home)
    assert not home.exists()
