"""Seconds and memory of a plan for a 405B model from 1,024 to 256 ranks, on one core.

The plan is made and proven.

Run: ``python benchmarks/transfer_plan_405b.py``. The trainer shards by FSDP over 128
ranks and by tensor parallelism over 8; the server has 32 replicas of tensor parallelism over 8,
with fused qkv and gate_up. No tensor and no process group is made.
"""

from __future__ import annotations

import resource
import time
from itertools import product

from shoal_dtensor import Replicate, Shard, Spec
from shoal_dtensor.internal import shape_of
from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_transfer import Holding, Manifest, TensorRecord, WeightMapping, plan_transfer

LAYERS = 126
HIDDEN = 16384
INNER = 53248
VOCABULARY = 128256
KV = 8 * 128
# shape, and the dim that tensor parallelism shards; None for a norm
LAYER = {
    "self_attn.q_proj": ((HIDDEN, HIDDEN), 0),
    "self_attn.k_proj": ((KV, HIDDEN), 0),
    "self_attn.v_proj": ((KV, HIDDEN), 0),
    "self_attn.o_proj": ((HIDDEN, HIDDEN), 1),
    "mlp.gate_proj": ((INNER, HIDDEN), 0),
    "mlp.up_proj": ((INNER, HIDDEN), 0),
    "mlp.down_proj": ((HIDDEN, INNER), 1),
    "input_layernorm": ((HIDDEN,), None),
    "post_attention_layernorm": ((HIDDEN,), None),
}
OTHERS = {
    "embed_tokens": ((VOCABULARY, HIDDEN), 0),
    "lm_head": ((VOCABULARY, HIDDEN), 0),
    "norm": ((HIDDEN,), None),
}
BLOCKS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def trainer_weights() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Shapes and sharded dims of all weights, by name."""
    weights = dict(OTHERS)
    for layer in range(LAYERS):
        for name, weight in LAYER.items():
            weights[f"layers.{layer}.{name}"] = weight
    return weights


def layout_of(mesh: DeviceMesh, spec: Spec) -> tuple[Holding, ...]:
    """Holdings of all ranks of a mesh."""
    holdings = []
    for rank, coordinate in enumerate(product(*map(range, mesh.shape))):
        for box, _ in spec.boxes(coordinate):
            sizes = shape_of(box)
            strides = tuple(sizes[1:] and [sizes[1], 1][-len(sizes) :]) or (1,)
            if min(sizes):
                holdings.append(Holding(rank, box, 0, strides))
    return tuple(holdings)


def trainer() -> Manifest:
    """The trainer's manifest: FSDP over 128 ranks on dim 0, tensor parallelism over 8."""
    mesh = abstract_mesh((128, 8))
    layouts = {}
    records = {}
    for name, (shape, dim) in trainer_weights().items():
        if (shape, dim) not in layouts:
            tensor_parallel = Replicate() if dim is None else Shard(dim)
            # FSDP shards dim 0 inside of tensor parallelism
            order = ((0, (1, 0)),) if dim == 0 else None
            spec = Spec(mesh, (Shard(0), tensor_parallel), shape, shard_order=order)
            layouts[shape, dim] = layout_of(mesh, spec)
        records[name] = TensorRecord(name, shape, "bfloat16", layouts[shape, dim], (name,))
    return Manifest(records, {rank: f"trainer {rank // 8}" for rank in range(1024)}, "trainer")


def fused_mapping(source: Manifest) -> WeightMapping:
    """The mapping to fused tensors, interleaved by rank of the server as its memory is."""
    mapping = WeightMapping.same_names(source.shapes)
    for fused, names in BLOCKS.items():
        parts = tuple(f"layers.{{}}.{name}" for name in names)
        mapping = mapping.fuse({f"layers.{{}}.{fused}": parts}, groups=8)
    return mapping


def server(mapping: WeightMapping) -> Manifest:
    """The server's manifest: 32 replicas of tensor parallelism over 8 ranks."""
    mesh = abstract_mesh((32, 8))
    dims = dict(OTHERS) | LAYER | dict.fromkeys(BLOCKS, ((), 0))
    layouts = {}
    records = {}
    for name, shape in mapping.targets.items():
        _, dim = dims[name.split(".", 2)[-1] if name.startswith("layers.") else name]
        if (shape, dim) not in layouts:
            tensor_parallel = Replicate() if dim is None else Shard(dim)
            spec = Spec(mesh, (Replicate(), tensor_parallel), shape)
            layouts[shape, dim] = layout_of(mesh, spec)
        records[name] = TensorRecord(name, shape, "bfloat16", layouts[shape, dim], (name,))
    return Manifest(records, {rank: f"server {rank // 8}" for rank in range(256)}, "server")


def main() -> None:
    """Make the manifests and the plan, and print their time and memory."""
    begin = time.perf_counter()
    source = trainer()
    mapping = fused_mapping(source)
    target = server(mapping)
    described = time.perf_counter()
    plan = plan_transfer(source, target, mapping)
    planned = time.perf_counter()
    print(plan.explain(pairs=2))
    explained = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"manifests and mapping {described - begin:.1f} s, plan and proof "
        f"{planned - described:.1f} s,"
    )
    print(f"explain {explained - planned:.1f} s; peak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
