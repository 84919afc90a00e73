"""Print the collectives of a redistribution before it runs. One process is enough.

python examples/explain_a_layout.py
"""

from shoal_dtensor import Partial, Replicate, Shard, Spec, explain
from shoal_mesh import abstract_mesh


def main() -> None:
    """Explain how partial sums over one axis become rows that are sharded over both axes."""
    mesh = abstract_mesh((8, 4), ("data", "tensor"))
    source = Spec(mesh, (Shard(0), Partial()), (4096, 1024))
    target = Spec(mesh, (Shard(0), Shard(0)), (4096, 1024))
    whole = Spec(mesh, (Replicate(), Replicate()), (4096, 1024))
    print(explain(source, target))
    print(explain(target, whole))


if __name__ == "__main__":
    main()
