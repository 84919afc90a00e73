"""A model of transformers on ranks: memory of loading and saving, and tokens per second.

The speed is compared with transformers' own.

Memory is the peak that a rank allocates (anonymous memory, sampled) beyond its memory before,
beside the bytes of its own part of the model. Generation is greedy, in float32 with a dynamic
cache; prefill is one forward of the prompt, decode the tokens after the first. shoal and
transformers take turns in one run; one process runs on rank 0 alone.

    python benchmarks/hugging_face.py [memory] [speed] [--rounds 9]

transformers' own needs accelerate.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import Case, keep_cases, report

from shoal_dtensor import DTensor
from shoal_dtensor.internal import local_shard
from shoal_mesh import init_device_mesh, launch
from shoal_models import hf

MiB = 2**20
PROMPT = 128
# tokens per second at least, as a multiple of transformers' own TP
BAR = 1.2
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
SMALL = {
    **LARGE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
}
TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "one file": ("Llama", {}, "50GB"),
    "many files": ("Llama", {}, "50MB"),
    "tied": ("Llama", {"tie_word_embeddings": True}, "50GB"),
    "packed": ("Phi3", {}, "50GB"),
}


def quiet() -> None:
    """No progress bars, no warnings about random models."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def write_plain(
    home: str, family: str, sizes: dict[str, Any], changes: dict[str, Any], shard: str
) -> None:
    """A model with random weights as transformers saves it, and a tiny one, in its own process."""
    import transformers

    quiet()
    torch.manual_seed(0)
    for path, each in ((home, sizes), (f"{home}-tiny", TINY)):
        config = getattr(transformers, f"{family}Config")(**each, **changes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(
            path, max_shard_size=shard
        )


def anonymous() -> int:
    """Return bytes of anonymous memory of this process; memory mapped from files does not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of the work, and the peak of anonymous memory beyond the memory before."""
    start = most = anonymous()
    done = threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        result = work()
    finally:
        done.set()
        thread.join()
    return result, max(most, anonymous()) - start


def memory(home: str) -> dict[str, float]:
    """MiB on this rank: its own part, and the peaks of loading and of saving."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    # imports take memory too
    hf.save_sharded(hf.from_pretrained(f"{home}-tiny", mesh), f"{home}-warm")
    model, load = peak_of(lambda: hf.from_pretrained(home, mesh))
    own = sum((local_shard(p) if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    _, save = peak_of(lambda: hf.save_sharded(model, f"{home}-saved"))
    return {"own": own / MiB, "load": load / MiB, "save": save / MiB}


def speed(home: str, new: int, rounds: int, port: int) -> dict[str, dict[str, float]]:
    """Seconds of prefill and per decoded token on this rank, the best of the rounds."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    quiet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_PORT": str(port),
    }
    os.environ["MASTER_ADDR"] = "localhost"
    models: dict[str, Any] = {"shoal": hf.from_pretrained(home, mesh)}
    own = DistributedConfig(tp_plan="auto", tp_size=ranks)
    models["transformers"] = AutoModelForCausalLM.from_pretrained(home, distributed_config=own)
    models["one process"] = AutoModelForCausalLM.from_pretrained(home) if rank == 0 else None
    prompt = torch.randint(1, 2048, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    best: dict[str, dict[str, float]] = {name: {"prefill": 9e9, "decode": 9e9} for name in models}
    tokens = {}
    for _ in range(rounds):
        for name, model in models.items():
            dist.barrier()
            if model is not None:
                tokens[name], prefill, decode = generate(model, prompt, new)
                best[name] = {
                    "prefill": min(best[name]["prefill"], prefill),
                    "decode": min(best[name]["decode"], decode / (new - 1)),
                }
    assert all(torch.equal(each, tokens["shoal"]) for each in tokens.values())
    return best


@torch.no_grad()
def generate(model: Any, prompt: torch.Tensor, new: int) -> tuple[torch.Tensor, float, float]:
    """The tokens, and the seconds to the first and from there to the last."""
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):  # type: ignore[misc]  # transformers is not typed here
        def __init__(self) -> None:
            self.at: list[float] = []

        def put(self, value: Any) -> None:
            self.at.append(time.perf_counter())

        def end(self) -> None:
            pass

    clock = Clock()
    mask = torch.ones_like(prompt)
    how = {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    out = model.generate(prompt, streamer=clock, **how)
    return out, clock.at[1] - clock.at[0], clock.at[-1] - clock.at[1]


def memory_table(home: str) -> None:
    """Own parts and peaks of every case, on 2 and 4 ranks."""
    rows: list[list[object]] = []
    for name, (family, changes, shard) in CASES.items():
        path = f"{home}/{name.replace(' ', '-')}"
        launch(write_plain, 1, path, family, LARGE, changes, shard)
        for ranks in (2, 4):
            by_rank = launch(memory, ranks, path)
            own, load, save = (
                max(each[key] for each in by_rank) for key in ("own", "load", "save")
            )
            rows.append(
                [name, ranks, *(f"{each:.1f}" for each in (own, load, save)), f"{load / own:.2f}"]
            )
    report(
        "hugging_face_memory",
        ["files", "ranks", "own MiB", "load MiB", "save MiB", "load / own"],
        rows,
    )


def speed_table(home: str, rounds: int) -> None:
    """Tokens per second of two sizes, on 2 and 4 ranks, and whether the bar is met."""
    rows: list[list[object]] = []
    port, ratios = 29611, []
    for sizes in (SMALL, LARGE):
        path, width = f"{home}/speed-{sizes['hidden_size']}", sizes["hidden_size"]
        launch(write_plain, 1, path, "Llama", sizes, {}, "50GB")
        for ranks in (2, 4):
            found, port = launch(speed, ranks, path, 24, rounds, port)[0], port + 1
            for phase, count in (("prefill", PROMPT), ("decode", 1)):
                rate = {name: count / each[phase] for name, each in found.items()}
                ratios.append(rate["shoal"] / rate["transformers"])
                rows.append(
                    [
                        width,
                        ranks,
                        phase,
                        *(f"{each:.1f}" for each in rate.values()),
                        f"{ratios[-1]:.2f}",
                    ]
                )
    keep_cases("hugging_face", [
        Case(
            f"Llama of width {width}, 4 ranks: {phase}", "ms a token",
            1e3 / float(ours), torch=1e3 / float(theirs),
        )
        for width, ranks, phase, ours, theirs, *_ in rows
        if width == LARGE["hidden_size"] and ranks == 4
    ])  # fmt: skip
    names = ["shoal tokens/s", "transformers", "one process", "shoal / transformers"]
    report("hugging_face_speed", ["width", "ranks", "phase", *names], rows)
    least = min(ratios)
    print(
        f"least: {least:.2f} x transformers' TP, bar {BAR}: {'met' if least >= BAR else 'NOT met'}"
    )


def main() -> None:
    """Print both tables, or one, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="*", default=["memory", "speed"])
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        if "memory" in asked.tables:
            memory_table(home)
        if "speed" in asked.tables:
            speed_table(home, asked.rounds)


if __name__ == "__main__":
    main()
