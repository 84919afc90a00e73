"""Trains two models on many meshes inside `invariant_arithmetic`.

All bits are compared with those of one rank.

    python integration_tests/same_bits.py [--steps 50] [--models demo hf] [--dtypes float32
    bfloat16]

The models are the Llama of examples/llama and the one of transformers, of small sizes, with
dropout, clipping and AdamW. Losses, norms, gradients, weights and the optimizer's state of every
step are compared, by digests of their bits.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import Replicate, Shard, clip_grad_norm_, full_tensor
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_same_bits import invariant_arithmetic
from shoal_tp_styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

Run = tuple[tuple[int, int], bool, bool]
Plan = dict[str, ParallelStyle]
Digests = list[dict[str, str]]

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS, BATCH, SEQUENCE = 64, 64, 8, 128, 2, 8, 32
SPLIT, WHOLE = Shard(1), Replicate()

# Ranks for data and for tensors; whether the sequence is sharded; whether parameters are sharded
# over data ranks.
RUNS: list[Run] = [
    ((1, 1), False, False),
    ((1, 1), True, False),
    ((1, 2), False, False),
    ((1, 2), True, False),
    ((2, 1), False, True),
    ((1, 4), False, False),
    ((1, 4), True, False),
    ((4, 1), False, False),
    *(((2, 2), sequence, sharded) for sequence in (False, True) for sharded in (False, True)),
]


def demo_model(dtype: torch.dtype) -> nn.Module:
    """The model of examples/llama."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "llama"))
    from llama import Llama, LlamaConfig

    config = LlamaConfig(WIDTH, LAYERS, HEADS, HEADS, HIDDEN, VOCAB, 2 * SEQUENCE, dropout=0.1)
    return Llama(config).to(dtype)


def demo_plan(sequence: bool) -> Plan:
    """The plan of examples/llama/train_llama.py, or the one without sequence parallelism."""
    split = SPLIT if sequence else WHOLE
    plan: Plan = {
        "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=split),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=split),
        "blocks.*.feed_forward.gate": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=split),
        "head": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        inputs, desired = (SPLIT, None, None), (WHOLE, None, None)
        plan |= {
            "**.*norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(
                input_layouts=inputs, desired_input_layouts=desired
            ),
            "blocks.*.feed_forward": PrepareModuleInput(
                input_layouts=SPLIT, desired_input_layouts=WHOLE
            ),
        }
    return plan


def hf_model(dtype: torch.dtype) -> nn.Module:
    """The Llama of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        attention_dropout=0.1,
        pad_token_id=0,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    return model


def hf_plan(sequence: bool) -> Plan:
    """Styles of the modules of transformers.

    With `sequence` its layers run on shards of the sequence.
    """
    split, layer = SPLIT if sequence else WHOLE, "model.layers.*."
    plan: Plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE),
        layer + "self_attn.[qkv]_proj": ColwiseParallel(),
        layer + "self_attn.o_proj": RowwiseParallel(output_layouts=split),
        layer + "mlp.gate_proj": ColwiseParallel(),
        layer + "mlp.up_proj": ColwiseParallel(),
        layer + "mlp.down_proj": RowwiseParallel(output_layouts=split),
        "lm_head": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        plan |= {
            "model.layers.0": PrepareModuleInput(
                input_layouts=WHOLE, desired_input_layouts=SPLIT, use_local_output=True
            ),
            layer + "*norm": SequenceParallel(use_local_output=True),
            "model.norm": SequenceParallel(use_local_output=True),
            layer + "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": SPLIT},
                desired_input_kwarg_layouts={"hidden_states": WHOLE},
            ),
            layer + "mlp": PrepareModuleInput(input_layouts=SPLIT, desired_input_layouts=WHOLE),
        }
    return plan


MODELS: dict[str, tuple[Callable[[torch.dtype], nn.Module], Callable[[bool], Plan]]] = {
    "demo": (demo_model, demo_plan),
    "hf": (hf_model, hf_plan),
}


def build(kind: str, mesh: DeviceMesh, dtype: torch.dtype, *, sequence: bool, sharded: bool) -> Any:
    """The parallel model, from the same seed on every mesh."""
    make, plan = MODELS[kind]
    torch.manual_seed(0)
    model: Any = parallelize_module(make(dtype), mesh["tensor"], plan(sequence))
    if not sharded:
        return replicate(model, mesh["data"])
    for module in (*(model.blocks if kind == "demo" else model.model.layers), model):
        fully_shard(module, mesh["data"])
    return model


def train(kind: str, run: Run, dtype: torch.dtype, steps: int) -> Digests:
    """Digests of all that every step leaves."""
    torch.set_num_threads(1)
    shape, sequence, sharded = run
    seen = []
    with invariant_arithmetic():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        model = build(kind, mesh, dtype, sequence=sequence, sharded=sharded)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
        for step in range(steps):
            draw = torch.Generator().manual_seed(step)
            tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=draw)
            tokens = tokens.chunk(shape[0])[mesh.get_local_rank("data")]
            with loss_parallel():
                out = model(tokens[:, :-1])
                logits = out if kind == "demo" else out.logits
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            found = {
                "loss": digest(all_reduce(full_tensor(loss.detach()), (mesh, "data"), op="avg"))
            }
            found |= {
                f"gradient of {name}": digest(param.grad)
                for name, param in model.named_parameters()
            }
            found["norm"] = digest(clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            found |= dict(state_of(model, optimizer))
            seen.append(found)
    return seen


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    """Digests of weights and of the optimizer's state."""
    for name, param in model.named_parameters():
        yield name, digest(param.detach())
        yield from (
            (f"{key} of {name}", digest(value)) for key, value in optimizer.state[param].items()
        )


def digest(tensor: Any) -> str:
    """Of the bits of a global value."""
    return hashlib.sha1(
        full_tensor(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def difference(want: Digests, got: Digests) -> str:
    """The first step that differs and what differs in it; empty if nothing does."""
    for step, (before, after) in enumerate(zip(want, got, strict=True)):
        differ = [name for name in before if before[name] != after.get(name)]
        if differ:
            return f"step {step}: {', '.join(differ[:3])} ({len(differ)} of {len(before)})"
    return ""


def compare(kind: str, dtype: torch.dtype, steps: int, runs: list[Run]) -> list[str]:
    """What differs from the first run, by run."""
    want: Digests = []
    found = []
    for run in runs:
        (data, tensor), sequence, sharded = run
        began = time.perf_counter()
        got: Digests = rank_pool(data * tensor).run(train, kind, run, dtype, steps, timeout=900)[0]
        want = want or got
        differ = difference(want, got)
        found += [f"{run}: {differ}"] if differ else []
        modes = f"{'sequence ' if sequence else ''}{'fully_shard' if sharded else 'replicate'}"
        seconds = time.perf_counter() - began
        print(
            f"{kind} {dtype} {data}x{tensor} {modes}: {differ or 'same bits'}, {seconds:.0f} s",
            flush=True,
        )
    return found


def main() -> None:
    """Compare; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    asked = parser.parse_args()
    pairs = [(kind, getattr(torch, dtype)) for kind in asked.models for dtype in asked.dtypes]
    found = [compare(kind, dtype, asked.steps, RUNS) for kind, dtype in pairs]
    if any(found):
        raise SystemExit("runs differ")


if __name__ == "__main__":
    main()
