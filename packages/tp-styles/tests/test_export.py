"""An exported parallel module is a program of ATen operators and functional collectives.

It runs without shoal.

Covers: lowering/parameters.py. The program is saved, loaded by processes in which no import of
shoal succeeds, and gives the result of the module; AOTInductor compiles it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard
from shoal_mesh import broadcast
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

pytestmark = [
    pytest.mark.skipif(
        torch.__version__ < "2.12",
        reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
    ),
    # torch's own, of what it exports with
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("shoal"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Refuse())
import torch
folder, rank, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = f"file://{folder}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
x = torch.load(f"{folder}/input.pt")
if kind == "aot_inductor":
    # not called: torch's loader keeps the GIL, which gloo's thread needs (pytorch#197516)
    torch._inductor.aoti_load_package(f"{folder}/{rank}.so.pt2")
else:
    program = torch.export.load(f"{folder}/{rank}.pt2").module()
    torch.save(program(x), f"{folder}/{rank}.out")
assert not any(name.startswith("shoal") for name in sys.modules)
torch.distributed.destroy_process_group()
"""


class PackedGateOfTokens(nn.Module):
    """Embedding, norm on shards of the sequence, packed columns, rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.packed, self.rows = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """`(batch, length, 8)`."""
        gate, up = self.packed(self.norm(self.words(tokens))).chunk(2, -1)
        out: Tensor = self.rows(torch.sigmoid(gate) * up)
        return out


PLAN: dict[str, Any] = {
    "words": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "packed": PackedColwiseParallel(blocks=2, input_layouts=Shard(1)),
    "rows": RowwiseParallel(),
}


def exported(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    """The module's program of plain tensors."""
    program: torch.export.ExportedProgram = torch.export.export(
        module, (x,), strict=False
    ).run_decompositions()
    return program


def shared_folder() -> Path:
    """A folder that rank 0 makes and all ranks use."""
    name = tempfile.mkdtemp() if dist.get_rank() == 0 else ""
    text = torch.zeros(256, dtype=torch.uint8)
    text[: len(name)] = torch.tensor([*name.encode()], dtype=torch.uint8)
    return Path(bytes(broadcast(text, (all_ranks(), 0), 0).tolist()).rstrip(b"\0").decode())


def run_alone(kind: str) -> None:
    """Load the saved program of a module, and run it if it can be, in a process without shoal."""
    torch.manual_seed(0)
    module = parallelize_module(PackedGateOfTokens(), all_ranks(), PLAN)
    folder, rank = shared_folder(), dist.get_rank()
    x = torch.randint(9, (3, 4))
    with torch.no_grad():
        expected = module(x)
        program = exported(module, x)
        names = {
            str(node.target).split(".")[0]
            for node in program.graph.nodes
            if node.op == "call_function"
        }
        assert {name for name in names if not name.startswith("<")} == {"aten", "_c10d_functional"}
        assert not any(isinstance(value, DTensor) for value in program.state_dict.values())
        torch.save(x, folder / "input.pt")
        if kind == "aot_inductor":
            # Most of the time is that of the C++ compiler, on both ranks at once: nothing is asked
            # of the code's speed.
            quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}
            package = str(folder / f"{rank}.so.pt2")
            torch._inductor.aoti_compile_and_package(
                program, package_path=package, inductor_configs=quickly
            )
        else:
            torch.export.save(program, folder / f"{rank}.pt2")
    dist.barrier()
    done = subprocess.run(
        [sys.executable, "-c", ALONE, folder, str(rank), kind],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if kind == "export":
        torch.testing.assert_close(torch.load(folder / f"{rank}.out"), expected)


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_an_exported_program_runs_without_shoal() -> None:
    run_alone("export")


@pytest.mark.slow
# above that of the ranks, which says where they stand
@pytest.mark.timeout(460)
@on_ranks(2, timeout=400)
def test_aot_inductor_compiles_an_exported_program() -> None:
    run_alone("aot_inductor")
