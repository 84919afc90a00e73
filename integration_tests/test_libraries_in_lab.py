"""accelerate, transformers' Trainer and torchtitan, unchanged, on many ranks of the lab.

Covers: shoal_mesh: lab/isolation/process_ranks.py, lab/isolation/cuda_on_cpu.py, lab/programs.py.

torchtitan reads its tokenizer and its data from files; the tests write small ones.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal_mesh.testing import lab

SCRIPTS = Path(__file__).parent / "lab_scripts"
# a script and the way it runs: ranks, the lab's device, more arguments
WAYS = {
    "ddp on the CPU": (8, None, ["--cpu"]),
    "ddp for CUDA": (8, "cpu", []),
    "FSDP2 for CUDA": (16, "cpu", ["--fsdp"]),
}
BATCH = 16
WORDS = ["one", "fish", "and", "many", "fish", "swim", "in", "a", "shoal", "as", "it", "turns"]
LENGTH = 32
DEGREES = {
    "--parallelism.data_parallel_shard_degree": 2,
    "--parallelism.tensor_parallel_degree": 2,
    "--parallelism.pipeline_parallel_degree": 2,
}
TITAN = [
    *("--model.name", "llama3", "--model.flavor", "debugmodel"),
    *("--model.hf_assets_path", "tokenizer", "--training.dataset_path", "data"),
    *("--training.seq_len", str(LENGTH), "--training.steps", "2", "--debug.seed", "1"),
    *("--training.dtype", "float32", "--training.mixed_precision_param", "float32"),
    *("--activation_checkpoint.mode", "none", "--metrics.log_freq", "1", "--checkpoint.enable"),
]

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("transformers") is None,
    reason="needs accelerate and transformers: nox -s hugging_face",
)
needs_torchtitan = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torchtitan", "datasets", "triton")),
    reason="needs torchtitan and what it imports: nox -s torchtitan",
)


def run_script(name: str, folder: Path, way: tuple[int, str | None, list[str]]) -> list[float]:
    """Return the numbers that a script writes; the ranks together have a batch of the same rows."""
    ranks, device, options = way
    output = folder / f"{name}{ranks}{device}"
    arguments = ["--output", str(output), "--rows", str(BATCH // ranks), *options]
    lab(ranks, device=device).run_script(str(SCRIPTS / f"{name}.py"), arguments)
    return [float(word) for word in output.read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_accelerate
@pytest.mark.parametrize("name", ["accelerate_script", "trainer_script"])
def test_scripts_have_the_losses_of_one_process(name: str, tmp_path: Path) -> None:
    alone = run_script(name, tmp_path, (1, None, ["--cpu"]))
    # the loss of the first batch is not the one of the last
    assert abs(alone[0] - alone[3]) > 1e-3
    for way in WAYS.values():
        # transformers computes the loss in float32 and its gradients in float64
        precision = 1e-12 if name == "accelerate_script" else 3e-7
        assert run_script(name, tmp_path, way) == pytest.approx(alone, rel=precision), way


def write_assets(folder: Path) -> None:
    """Write a tokenizer of a few words, and data of one batch: a sample has LENGTH + 1 tokens.

    torchtitan repeats the data set, so every step has the same rows, however many ranks read them.
    """
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *set(WORDS)])}
    special = [
        {"id": vocabulary[word], "content": word, "special": True} for word in ("<s>", "</s>")
    ]
    for entry in special:
        entry |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(ends))
    generator = random.Random(0)
    # the tokenizer adds two tokens to the words
    texts = [" ".join(generator.choices(WORDS, k=LENGTH - 1)) for _ in range(BATCH)]
    (folder / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "data" / "texts.json").write_text("\n".join(lines))


def run_torchtitan(folder: Path, ranks: int, rows: int, *options: str) -> str:
    """Run torchtitan's trainer by its own command, and return its output."""
    command = [sys.executable, "-m", "shoal_lab", "run", "-m", "torchtitan.train"]
    command += ["--ranks", str(ranks), "--device", "cpu", "--", *TITAN]
    command += ["--training.local_batch_size", str(rows), *options]
    environment = {**os.environ, "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)


def losses_of(output: str) -> set[tuple[str, str]]:
    """Return the steps and losses that ranks print.

    Ranks without a pipeline's last stage print -2.
    """
    pairs = re.findall(r"step: +(\d+) +loss: +([-\d.]+)", output)
    return {(step, loss) for step, loss in pairs if not loss.startswith("-")}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_torchtitan
def test_torchtitan_has_the_losses_of_one_process(tmp_path: Path) -> None:
    write_assets(tmp_path)
    seed = ["--checkpoint.create_seed_checkpoint", "--job.dump_folder", "seed"]
    run_torchtitan(tmp_path, 1, BATCH, *seed)
    load = ["--checkpoint.initial_load_path", "seed/checkpoint/step-0"]
    alone = losses_of(run_torchtitan(tmp_path, 1, BATCH, *load, "--job.dump_folder", "alone"))
    # two steps, with losses of five decimals
    assert len(alone) == 2
    degrees = [str(word) for pair in DEGREES.items() for word in pair]
    output = run_torchtitan(tmp_path, 8, BATCH // 2, *load, *degrees, "--job.dump_folder", "many")
    assert losses_of(output) == alone
