"""Multiply two sharded matrices on four ranks.

python examples/sharded_tensor.py
"""

import torch

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh, launch


def main() -> str:
    """Compute a product of a row-sharded matrix and a replicated one, and gather it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("rows",))
    left = torch.randn(8, 6)
    right = torch.randn(6, 5)

    # Each of the four ranks holds 2 of the 8 rows of `left`, and all of `right`.
    sharded_left = distribute_tensor(left, mesh, [Shard(0)])
    replicated_right = distribute_tensor(right, mesh, [Replicate()])
    product = sharded_left @ replicated_right

    assert isinstance(product, DTensor)
    torch.testing.assert_close(product.full_tensor(), left @ right)
    local_shape = tuple(product.to_local().shape)
    return f"placements {product.placements}, local shape {local_shape}"


if __name__ == "__main__":
    for rank, line in enumerate(launch(main, 4)):
        print(f"rank {rank}: {line}")
