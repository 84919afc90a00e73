"""Compute attention over a sequence that is sharded over four ranks (ring attention).

python examples/long_context.py
"""

import torch
import torch.nn.functional as F

from shoal_context_parallel import context_parallel, context_parallel_unshard
from shoal_mesh import init_device_mesh, launch


def main() -> str:
    """Compute causal attention on a quarter of the sequence in each rank."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("context",))
    # batch 1, 2 heads, 64 positions, head size 16
    query, key, value = (torch.randn(1, 2, 64, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
        local_positions = query.shape[2]
        local = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        (output,) = context_parallel_unshard(mesh, [local], [2])

    torch.testing.assert_close(output, expected)
    return f"computed {local_positions} of 64 positions, equal to attention on one process"


if __name__ == "__main__":
    for rank, line in enumerate(launch(main, 4)):
        print(f"rank {rank}: {line}")
